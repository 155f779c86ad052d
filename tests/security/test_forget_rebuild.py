"""`forget --rebuild` of a session that was trained on, by the route and by the command.

The versions are named. The policy goes back to before them and learns again without the session. No byte of its text is
left in any file.

Real: server, ledger, trainer loop, learner, checkpoints, command line. The engine is a stub whose scores are not the
learner's, so the gate passes every version here.
"""

import json
import os
import secrets
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from files import contents, modes
from harness.host import Server
from harness.model import Vocabulary
from harness.tiny import LENIENT, tiny_settings, tiny_trainer

from openclaw_rl.ledger.blobs import unpack_bytes
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.loop import TrainerLoop

SETTINGS = {"training.batch_size": 1, "training.min_batch": 1} | LENIENT

TEXT, DENSE, SPACED, PACKED, BLOBS = range(5)
"""Forms of a word; what the ledger stored of it comes last."""


@dataclass(frozen=True)
class Learning:
    """A server, and the trainer beside it."""

    server: Server
    http: httpx.Client
    loop: TrainerLoop
    vocabulary: Vocabulary

    def admin(self, path: str, **body: Any) -> Any:
        key = (self.server.data_dir / "keys" / "admin.key").read_text().strip()
        reply = self.http.post(self.server.url + path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def teach(self, *words: str, session: str | None) -> str:
        """Chat once and rate the turn, so that it waits for the trainer. Return the turn's id."""
        messages = [{"role": "user", "content": word} for word in words]
        headers = {} if session is None else {"X-Session-Id": session}
        url = self.server.url
        turn = self.http.post(f"{url}/v1/chat/completions", json={"messages": messages}, headers=headers).json()["id"]
        said = {"turn_id": turn, "value": True, "comment": f"more of {words[-1]}"}
        assert self.http.post(f"{url}/v1/feedback", json=said).status_code == 200
        return str(turn)

    def step(self) -> int:
        """Train on one waiting sample. Return the new version, which serves."""
        before = self.server.admin("/v1/admin/status")["tip"]
        assert self.loop.turn() is not None
        end = time.monotonic() + 120
        while (serving := self.server.admin("/healthz")["weight_version"]) <= before:
            assert time.monotonic() < end, self.server.log[-2000:]
            time.sleep(0.02)
        return int(serving)

    def traces(self, word: str) -> list[bytes]:
        """Return the forms that the text may have in a file: text, tokens in JSON, tokens in the ledger."""
        ids = self.vocabulary.ids([word])[-10:-3]  # a probe has the end of a prompt
        assert len(ids) == 7
        return [
            word.encode(),
            *(json.dumps(ids, separators=form)[1:-1].encode() for form in ((",", ":"), (", ", ": "))),
            np.array(ids, dtype="<u2").tobytes(),
        ]

    def found(self, word: str, stored: Sequence[bytes] = ()) -> set[int]:
        """Return the traces that occur in a file of the server or the trainer. stored: more traces."""
        files = contents(self.server.data_dir.parent)
        assert {"ledger.sqlite3", "server.log"} <= {file.name for file in files}
        traces = [*self.traces(word), *stored]
        return {n for n, trace in enumerate(traces) if any(trace in content for content in files.values())}

    def stored(self, word: str) -> list[bytes]:
        """Return the contents of the text as bytes of the ledger; some are compressed."""
        traces = self.traces(word)
        with closing(
            sqlite3.connect(f"{self.server.data_dir.absolute().as_uri()}/ledger.sqlite3?mode=ro", uri=True)
        ) as db:
            blobs = [
                blob for (blob,) in db.execute("SELECT data FROM piece UNION ALL SELECT probes FROM version") if blob
            ]
        return [blob for blob in blobs if any(trace in unpack_bytes(blob) for trace in traces)]

    def folders(self) -> set[str]:
        return {folder.name for folder in (self.server.data_dir / "versions").iterdir()}


@pytest.fixture(scope="module")
def learning(host, tmp_path_factory, engine_settings, model_folder) -> Iterator[Learning]:
    before = os.umask(0)  # of the trainer, which runs here
    with host.running(tmp_path_factory.mktemp("forget"), engine_settings | SETTINGS, umask=0) as server:
        with tiny_trainer(server, tiny_settings()) as loop, httpx.Client(timeout=120, trust_env=False) as http:
            yield Learning(server, http, loop, Vocabulary.of(model_folder))
    os.umask(before)


def word() -> str:
    return "".join(secrets.choice("bcdfgjkqvwxz") for _ in range(28))


def test_what_was_trained_on_is_forgotten_by_the_route_and_by_the_command(learning: Learning) -> None:
    theirs, mine, other = word(), word(), word()
    learning.teach(theirs, session="theirs")
    kept = learning.step()
    learning.teach(mine, session="mine")
    turn = learning.teach(other, "ok?", session=None)  # sampled by a version that stays: it still fits then
    spoilt = learning.step()
    above = learning.step()
    stored = {said: learning.stored(said) for said in (theirs, mine, other)}
    for said, blobs in stored.items():
        assert len(blobs) >= 3, "message, prompt and probes"
        assert learning.found(said, blobs) >= {TEXT, DENSE, *range(BLOBS, BLOBS + len(blobs))}, "the check is blind"
    folders = learning.folders()
    assert len(folders) == 3

    answer = learning.admin("/v1/admin/forget", session_id="mine", rebuild=True)
    assert (answer["turns"], answer["trained_in"], answer["is_scrubbed"]) == (1, [spoilt], True)
    assert answer["rebuilt"] == {"serving": {"policy": kept}, "waiting": 1, "folders": 2}
    assert learning.server.admin("/healthz")["weight_version"] == kept
    assert learning.found(mine, stored[mine]) == set()
    files = contents(learning.server.data_dir)
    assert not any(b"mine" in data for file, data in files.items() if file.name.startswith("ledger.sqlite3"))
    assert TEXT in learning.found(other)
    assert len(learning.folders()) == 1

    again = learning.step()  # on what is left
    assert again > above
    argv = [sys.executable, "-m", "openclaw_rl", "forget", "--turn", turn, "--rebuild"]
    argv += ["--data-dir", str(learning.server.data_dir)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    lines = said.splitlines()
    assert lines[0].startswith("1 turns of it are gone, and ")
    assert lines[1:] == [
        f"versions trained on it: {above}, {again}",
        f"version {kept} serves again, 0 samples wait to be learned",
    ]
    assert learning.found(other, stored[other]) == set()
    assert learning.found(theirs) >= {TEXT, DENSE}

    learning.teach(theirs, session="theirs")
    learning.step()
    rows = learning.server.admin("/v1/turns?limit=100")["turns"]
    assert [row["session_id"] for row in rows] == ["theirs", "theirs"]


def test_what_was_written_since_is_private_too(learning: Learning) -> None:
    """Files under an open umask: checkpoints, the trainer's notes, and rewritten commits."""
    root = learning.server.data_dir
    assert {file.name for file in root.rglob("*")} >= {checkpoint.COMMIT_FILE, "adapter_model.safetensors"}
    assert {name: oct(mode) for name, mode in modes(root).items() if mode & (stat.S_IRWXG | stat.S_IRWXO)} == {}


def test_a_checkpoint_that_will_never_be_committed_goes_too(learning: Learning) -> None:
    """The trainer was killed between writing the checkpoint and its commit, and never came back."""
    said = word()
    learning.teach(said, session="killed")
    lease = learning.loop._client.lease("gone", wait_s=30)
    assert lease is not None
    probe = {"prompt_ids": lease.samples[0].prompt_ids, "response_ids": [1], "log_probs": [0], "parent_log_probs": [0]}

    def fill(folder: Path) -> None:
        (folder / checkpoint.COMMIT_FILE).write_text(json.dumps({"report": {"metrics": {}, "probes": [probe]}}))

    checkpoint.write(learning.server.data_dir / "versions", lease.lease_id, fill)
    before = learning.folders()
    stored = learning.stored(said)
    assert learning.found(said, stored) >= {TEXT, SPACED, BLOBS}
    answer = learning.admin("/v1/admin/forget", session_id="killed")
    assert (answer["turns"], answer["trained_in"], answer["rebuilt"]) == (1, [], None)
    assert learning.found(said, stored) == set()
    assert before - learning.folders() == {lease.lease_id}


def test_a_user_is_forgotten_altogether(learning: Learning) -> None:
    said = word()
    learning.teach(said, session=None)
    learning.teach(said, "again", session="elsewhere")
    (user,) = {row["user"] for row in learning.server.admin("/v1/turns?limit=100")["turns"]}
    stored = learning.stored(said)
    assert stored
    assert learning.found(said, stored) >= {*range(BLOBS, BLOBS + len(stored))}, "the check is blind"
    answer = learning.admin("/v1/admin/forget", user=user, everything=True)
    assert answer["turns"] >= 2
    assert learning.server.admin("/v1/turns?limit=100")["turns"] == []
    assert learning.found(said, stored) == set()
