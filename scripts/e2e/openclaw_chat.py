"""Check that the model learns from a chat of the real OpenClaw with corrections, on the embedded default, meanwhile.

    scripts/e2e.sh openclaw_chat FOLDER [--identity headers|none] [--report FILE] [--out FILE] [--messages 20]

FOLDER keeps the installed client between runs. With `--messages N` the chat is N messages long and nothing is trained:
it checks the records and the pairs alone. The script prints each check on a line. No request failed. Every main
turn is in the ledger, paired with its true next state and judged. Side requests were served and not recorded. A LoRA
step ran, and later replies name the next version, in the ledger and in the reply's header.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from e2e.openclaw_client import OpenClaw
from openclaw_rl.sessions.openclaw import unstamped
from openclaw_rl.testing.phases import phases
from openclaw_rl.testing.running_server import RunningServer

CHAT = (
    "Give me three tips to sleep better.",
    "No, that is wrong. I asked for no lists: answer again in one short sentence.",
    "Too long. Shorter, please.",
    "Thanks, that is perfect!",
    "And what helps me to wake up early?",
)
"""Messages of the user. Each is the feedback for the previous reply; the last one completes the batch."""
AFTER_THE_STEP = "One more: what is a good time to go to bed?"
BATCH = len(CHAT) - 1
MORE = (
    "Name a tree.",
    "And a river?",
    "What do bees eat?",
    "How many legs has a spider?",
    "Name a tree.",  # once more: another turn with the same words
    "Which month comes after May?",
    "What is a haiku?",
    "Thanks, that is perfect!",
    "Say hello in Spanish.",
)
"""Messages of a longer chat, over and over; none of them is a correction."""
SHORT = 24
"""Tokens of a reply of the longer chat."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--identity", choices=["headers", "none"], default="headers", help="session-affinity headers, or no identity"
    )
    parser.add_argument("--report", type=Path, help="JSON file for the records of the chat")
    parser.add_argument("--out", type=Path, help="JSON file for the time from the last feedback to serving")
    parser.add_argument("--messages", type=int, default=0, help="length of a chat without training")
    options = parser.parse_args()
    if options.messages:
        return long_chat(options)
    data_dir = options.folder.absolute() / f"data-{options.identity}-{int(time.time())}"
    compat = {"sendSessionAffinityHeaders": True} if options.identity == "headers" else {}
    report: dict[str, Any] = {"identity": options.identity, "turns": [], "seconds": {}}
    with RunningServer(data_dir, ["--batch-size", str(BATCH), "--set", "log_format=json"]) as server:
        with OpenClaw(
            options.folder.absolute(), base_url=f"{server.url}/v1", model="policy", compat=compat, heartbeat_every="30m"
        ) as client:
            replies = [timed(report, f"turn {number}", client.say, "e2e", text) for number, text in enumerate(CHAT, 1)]
            client.event("The oven is hot.")  # a heartbeat: served, not recorded
            status = server.wait_for("version 1 serves, or is refused", is_decided, 600)
            if status["serving"] < 1:
                raise RuntimeError(f"version 1 is refused: {status['last_gate']}")
            replies.append(timed(report, "turn after the step", client.say, "e2e", AFTER_THE_STEP))
            server.wait_for("the heartbeat was served", lambda status: "side.heartbeat" in status["counts"], 600)
            report["header"] = version_header(server.url)
            status, turns = server.status(), server.turns()
            version = server.admin("GET", "/v1/admin/versions/1")
        metrics = json.loads(version["report_json"])["metrics"]
        report["last feedback to serving"] = phases(turns, data_dir / "server.log", 1, metrics)
    report |= {"status": status, "turns": turns, "replies": replies}
    if options.report:
        options.report.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    if options.out:
        figures = {name: report[name] for name in ("identity", "last feedback to serving", "seconds")}
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return judge(report)


def long_chat(options: argparse.Namespace) -> int:
    """Hold a chat of `--messages` messages; return 1 if a record or a pair is wrong."""
    data_dir = options.folder.absolute() / f"data-long-{options.identity}-{int(time.time())}"
    compat = {"sendSessionAffinityHeaders": True} if options.identity == "headers" else {}
    said = [*CHAT, *(MORE[n % len(MORE)] for n in range(max(0, options.messages - len(CHAT))))][: options.messages]
    report: dict[str, Any] = {"identity": options.identity, "seconds": {}}
    with RunningServer(data_dir, ["--set", "training.enabled=false", "--set", "log_format=json"]) as server:
        # Short replies: the client's own prompt fills most of the context, and it would begin to compact the chat.
        with OpenClaw(
            options.folder.absolute(), base_url=f"{server.url}/v1", model="policy", compat=compat, max_tokens=SHORT
        ) as client:
            for number, text in enumerate(said, 1):
                timed(report, f"turn {number}", client.say, "e2e", text)
        turns, counts = server.turns(), server.status()["counts"]
    if options.report:
        options.report.write_text(json.dumps(report | {"turns": turns}, indent=1, ensure_ascii=False))
    print(f"counts {counts}")
    return told(pair_checks(turns, said) | {"no request failed": counts["abandoned"] == 0})


def timed(report: dict[str, Any], what: str, call: Any, *args: str) -> str:
    started = time.monotonic()
    reply: str = call(*args)
    report["seconds"][what] = round(time.monotonic() - started, 1)
    print(f"{what}: {report['seconds'][what]} s\n  user:  {args[-1]}\n  agent: {reply[:200]!r}", flush=True)
    return reply


def version_header(url: str) -> int:
    """Return the version header of a side request, since the client does not show headers."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"X-Turn-Type": "side"}, timeout=120)
    return int(answer.raise_for_status().headers["x-weight-version"])


def judge(report: dict[str, Any]) -> int:
    """Print each check; return 1 if one fails."""
    said = [*CHAT, AFTER_THE_STEP]
    turns, counts = report["turns"], report["status"]["counts"]
    versions = [turn["turn"]["versions"][0]["weight_version"] for turn in turns]
    verdicts = [turn["verdict"]["value"] if turn.get("verdict") else None for turn in turns]
    side = counts.get("side.heartbeat", 0)
    checks = {
        "corrections are judged -1, thanks +1, moving on +1": verdicts == [-1, -1, 1, 1, 1, None],
        "side requests were served and not recorded": side >= 1,
        "a step was trained and serves": report["status"]["serving"] >= 1,
        "the reply after it carries its version": versions[-1] == report["status"]["serving"] and versions[0] == 0,
        "so does the header of a reply": report["header"] == report["status"]["serving"],
        "no request failed": counts["abandoned"] == 0 and counts["requests"] == len(said),
        "nothing is degraded": not report["status"]["problems"],
    }
    print(f"\nlast feedback of {BATCH} turns to serving, s: {json.dumps(report['last feedback to serving'])}")
    print(f"verdicts {verdicts}, versions {versions}, side requests {side}, counts {counts}")
    return told(pair_checks(turns, said) | checks)


def pair_checks(turns: list[Any], said: list[str]) -> dict[str, bool]:
    """Return the checks of the records and the pairs of a chat in which the user said these messages."""
    asked = [last_user(turn["request"]["messages"]) for turn in turns]
    answered = [last_user(turn["next_state"]["messages"]) if turn.get("next_state") else None for turn in turns]
    texts = [turn["turn"]["reply"]["content"] for turn in turns]
    return {
        "every message the user sent is one recorded turn": len(turns) == len(said)
        and all(w in a for w, a in zip(said, asked, strict=True)),
        "each is paired with the user's next message": all(
            w in (a or "") for w, a in zip(said[1:], answered, strict=False)
        )
        and answered[-1:] == [None],
        "the client sends back what was recorded": all(
            is_sent_back(last_reply(after["request"]["messages"]), text)
            for after, text in zip(turns[1:], texts, strict=False)
        ),
    }


def told(checks: dict[str, bool]) -> int:
    """Print each check; return 1 if one fails."""
    for what, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return 0 if all(checks.values()) else 1


def is_decided(status: Any) -> bool:
    return any(row["weight_version"] == 1 and row["state"] in ("serving", "rejected") for row in status["versions"])


def is_sent_back(sent: str, recorded: str) -> bool:
    """Return True if the client sent the reply back verbatim, except for a leading time stamp and space around it."""
    is_stamped = unstamped(recorded) != recorded.strip()
    return sent == recorded or (is_stamped and unstamped(sent) == unstamped(recorded))


def last_reply(messages: list[Any]) -> str:
    return str([message["content"] for message in messages if message["role"] == "assistant"][-1])


def last_user(messages: list[Any]) -> str:
    """Return the last user message that is not the client's own trailing context."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
        if message["role"] == "user" and "BEGIN_OPENCLAW_INTERNAL_CONTEXT" not in text:
            texts.append(text)
    return texts[-1] if texts else ""


if __name__ == "__main__":
    sys.exit(main())
