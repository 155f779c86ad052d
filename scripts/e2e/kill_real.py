"""Real processes are killed while real chats run: the server, the embedded engine and the LoRA trainer, in turn.

    python scripts/e2e/kill_real.py FOLDER [--kills 15] [--seed 0] [--log benchmarks/results/kill_real.log]

SIGKILL at a random moment; the server is started again by this script, its children by the server. After each kill the
ledger is audited from its file alone, and every reply that a client saw finish must be in it, word for word. A chat
that was held while the engine was away must finish. Exit 1 when anything is found.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import httpx

from openclaw_rl.ledger import audit as ledger_audit
from openclaw_rl.ledger.open import connect
from openclaw_rl.testing.running_server import RunningServer

ANSWERS = ("No, that is wrong. Shorter please.", "Thanks, that is perfect!")


class Chats(threading.Thread):
    """One two-turn session after another; remembers every reply that it saw finish."""

    def __init__(self, server: RunningServer, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server, self._number, self._stop_asked = server, number, stop
        self.finished: dict[str, str] = {}
        self.cut = 0

    def run(self) -> None:
        session = 0
        while not self._stop_asked.is_set():
            session += 1
            name = f"chat-{self._number}-{session}"
            messages = [{"role": "user", "content": f"Give me one tip, number {session}."}]
            try:
                text = self._say(messages, name)
                answer = {"role": "user", "content": ANSWERS[session % 2]}
                self._say([*messages, {"role": "assistant", "content": text}, answer], name)
            except (httpx.HTTPError, ConnectionError):
                self.cut += 1
                time.sleep(0.5)

    def _say(self, messages: list[dict[str, str]], session: str) -> str:
        body = {"messages": messages, "stream": True, "max_tokens": 24}
        text, turn_id, is_finished = "", "", False
        url = f"{self._server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers={"X-Session-Id": session}, timeout=300) as reply:
            if reply.status_code != 200:
                raise ConnectionError(reply.status_code)
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ConnectionError(event["error"]["message"])
                    turn_id = event["id"]
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        is_finished |= choice["finish_reason"] is not None
        if not is_finished:
            raise ConnectionError("cut")
        self.finished[turn_id] = text
        return text


def findings(server: RunningServer, chats: list[Chats]) -> list[str]:
    """What the ledger's file, and it alone, has against us."""
    db = connect(server.data_dir / "ledger.sqlite3", read_only=True)
    try:
        found = ledger_audit.audit(db, is_deep=True)
        known = {turn_id for (turn_id,) in db.execute("SELECT turn_id FROM turn")}
    finally:
        db.close()
    seen = [turn_id for chat in chats for turn_id in list(chat.finished)]
    return found + [f"{turn_id} was acknowledged and is not in the ledger" for turn_id in seen if turn_id not in known]


def kill(server: RunningServer, target: str) -> None:
    if target == "server":
        server.kill()
        server.start()
        return
    pid = next(child["pid"] for child in server.status()["children"] if child["name"] == target)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    server.wait_for(
        f"the {target} is back",
        lambda now: (
            not now["problems"]
            and all(child["pid"] not in (None, pid) or child["name"] != target for child in now["children"])
        ),
        300,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    dice, stop, lines, total = random.Random(options.seed), threading.Event(), [], 0

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with RunningServer(options.folder.absolute(), ["--batch-size", "2"]) as server:
        chats = [Chats(server, number, stop) for number in range(3)]
        for chat in chats:
            chat.start()
        for number in range(1, options.kills + 1):
            time.sleep(dice.uniform(1, 8))
            target = ("server", "engine", "trainer")[number % 3]
            started = time.monotonic()
            kill(server, target)
            found = findings(server, chats)
            total += len(found)
            seen = sum(len(chat.finished) for chat in chats)
            status = server.status()
            say(
                f"kill {number:2} {target:7} whole again after {time.monotonic() - started:5.1f} s, "
                f"{seen} replies finished, {sum(chat.cut for chat in chats)} cut, version {status['serving']} serves, "
                f"{status['counts']['trained']} trained, findings {found}"
            )
        stop.set()
        for chat in chats:
            chat.join(300)
        texts = {turn_id: text for chat in chats for turn_id, text in chat.finished.items()}
        wrong = [
            i for i, text in texts.items() if server.admin("GET", f"/v1/turns/{i}")["turn"]["reply"]["content"] != text
        ]
        total += len(wrong) + len(findings(server, chats))
        say(
            f"{options.kills} kills, {len(texts)} acknowledged replies, {len(wrong)} differ from the ledger, "
            f"findings {total}"
        )
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
