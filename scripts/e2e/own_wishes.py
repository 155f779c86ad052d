"""A wish of one user is learned by that user's policy alone: one person corrects, and two are asked before and after.

    scripts/e2e.sh own_wishes FOLDER [--person short] [--seeds 0 1] [--idle-minutes 10] [--out FILE.json]
        [any flag of `openclaw-rl serve`]

The real server with the embedded engine and the trainer, `policies.mode = "per_user"`, OPD by its defaults, and the
keys of two users. Ann corrects a few replies, and the server practises while nobody chats, as in
`openclaw-rl experiment personalization`. Then Ann and Bob are asked the same new questions. The exit code is 1 if Ann's
score is below .8, if Bob's differs from the base's by more than .05, or if Bob's list has a wish. The base's score is
Ann's before the corrections.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import httpx

from openclaw_rl.offline.personalization import Chat, Plan, Result, interval, run
from openclaw_rl.offline.personas import PREFERENCES, RulePerson
from openclaw_rl.testing.running_server import RunningServer

ANN, BOB = "ann", "bob"
LEARNED, SAME = 0.8, 0.05
_TIMEOUT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--person", choices=sorted(PREFERENCES), default="short")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--corrections", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--idle-minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=None)
    options, flags = parser.parse_known_args()
    rows, wrong = [], []
    for seed in options.seeds:
        ann, bob, wishes = _experiment(options, flags, seed)
        learned, base = ann.scores("learned"), ann.scores("base")
        others = bob.scores("base") + bob.scores("learned")  # Bob corrects nothing: both were asked after Ann's rest
        rows.append({"seed": seed, ANN: asdict(ann), BOB: asdict(bob), "wishes in Bob's list": wishes})
        print(f"seed {seed}: base {interval(base)}, Ann {interval(learned)}, Bob {interval(others)}", flush=True)
        if statistics.fmean(learned) < LEARNED:
            wrong.append(f"seed {seed}: Ann's policy learned too little")
        if abs(statistics.fmean(others) - statistics.fmean(base)) > SAME:
            wrong.append(f"seed {seed}: Bob's policy is not the base")
        if wishes:
            wrong.append(f"seed {seed}: Bob sees {wishes} wishes")
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(wrong) or "all as it should be")
    return 1 if wrong else 0


def _experiment(options: argparse.Namespace, flags: list[str], seed: int) -> tuple[Result, Result, int]:
    """Return the results of both users, and the number of wishes that Bob sees."""
    data_dir = options.folder.absolute() / f"seed-{seed}"
    shutil.rmtree(data_dir, ignore_errors=True)
    person, idle_s = RulePerson(PREFERENCES[options.person], seed), 60 * options.idle_minutes
    asks = Plan(corrections=0, held_out=options.held_out, idle_s=0)
    learns = Plan(corrections=options.corrections, held_out=options.held_out, idle_s=idle_s)
    keys = ",".join(f"{{key='{_key(user)}',user='{user}'}}" for user in (ANN, BOB))
    own = ["--method", "opd", "--set", "policies.mode=per_user", "--set", f"server.api_keys=[{keys}]"]
    with (
        RunningServer(data_dir, [*own, *flags]) as server,
        _client(server, ANN) as of_ann,
        _client(server, BOB) as of_bob,
    ):
        ann = run(Chat(of_ann, learns, seed), person, learns, seed, ANN, _tell(ANN))
        chat = Chat(of_bob, asks, seed)
        bob = run(chat, person, asks, seed, BOB, _tell(BOB))
        return ann, bob, len(chat.wishes())


def _client(server: RunningServer, user: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {_key(user)}"}, timeout=_TIMEOUT_S)


def _key(user: str) -> str:
    return f"sk-{user}-own-wishes"


def _tell(user: str) -> Callable[[str], None]:
    return lambda line: print(f"{user}: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
