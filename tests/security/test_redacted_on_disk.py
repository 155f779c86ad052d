"""Files of the real server hold no secrets by default, and no personal data when `redaction.pii` is on.

That holds wherever in a conversation they occur. The model reads all of it.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from files import contents

from openclaw_rl.ledger.blobs import unpack_bytes

SECRETS = (
    "sk-proj-Zz12Yy34Xx56Ww78Vv90Uu12",
    "ghp_x9Y8x9Y8x9Y8x9Y8x9Y8x9Y8x9Y8x9Y8x9Y8",
    "AKIAQ7XJ2M5N8P3R6T9V",
    "Gx7!mQ2#vR9z",  # by its name alone
)
PERSONAL = (
    "ann.smith@mail.example.org",
    "4111 1111 1111 1111",
    "DE89 3704 0044 0532 0130 00",
    "+49 170 1234567",
    "123-45-6789",
)


def written(data_dir: Path) -> bytes:
    """Return all files as they are, and the ledger's compressed contents."""
    files = b"\n".join(contents(data_dir).values())
    with closing(sqlite3.connect(f"{data_dir.absolute().as_uri()}/ledger.sqlite3?mode=ro", uri=True)) as db:
        return files + b"\n".join(unpack_bytes(blob) for (blob,) in db.execute("SELECT data FROM piece"))


@pytest.mark.parametrize("is_on", [False, True])
def test_secrets_never_and_personal_data_as_asked(host, tmp_path, engine_settings, key_settings, doors_of, is_on):
    told = [*SECRETS[:3], f"password: {SECRETS[3]}", *PERSONAL]
    tool = {"type": "function", "function": {"name": "send", "description": " ".join(told), "parameters": {}}}
    called = {"id": "c", "type": "function", "function": {"name": "send", "arguments": json.dumps({"to": told})}}
    settings = engine_settings | key_settings | ({"redaction.pii": True} if is_on else {})
    with host.running(tmp_path, settings) as server:
        doors, said = doors_of(server), " and ".join(told)
        for session in ({}, {"X-Session-Id": "s"}):
            messages = [
                {"role": "system", "content": f"The user is {said}"},
                {"role": "user", "content": [{"type": "text", "text": said}]},
                {"role": "assistant", "content": "I send it", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c", "content": f"sent to {said}"},
            ]
            first = doors.chat("ann", messages=messages, tools=[tool], headers=session)
            assert first.status_code == 200
            read = doors.stubs._vocabulary.text(doors.stubs.calls[-1].input_ids)
            assert all(read.count(part) >= 3 for part in (*SECRETS, *PERSONAL))  # the model is told as it was said
            messages += [first.json()["choices"][0]["message"], {"role": "user", "content": f"no, to {said}"}]
            assert doors.chat("ann", messages=messages, tools=[tool], headers=session).status_code == 200
            rating = {"turn_id": first.json()["id"], "value": -1, "comment": said, "demonstration": f"Sent to {said}"}
            assert doors.ask("POST", "/v1/feedback", "ann", json=rating).status_code == 200
        doors.chat("ann", messages=[{"role": "user", "content": said}], headers={"X-Turn-Type": "side"})
        content = written(server.data_dir) + server.log.encode()
    assert [secret for secret in SECRETS if secret.encode() in content] == []
    assert [part for part in PERSONAL if part.encode() in content] == ([] if is_on else list(PERSONAL))
    assert b"[redacted:api_key]" in content
