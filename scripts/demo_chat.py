"""Demonstration: a scripted user who wants one or two short sentences chats until the model has learned it.

    python scripts/demo_chat.py [--minutes 10]                                  the first hour: OPD, which practises
    python scripts/demo_chat.py openclaw-rl/run_embedded_rl.sh --batch-size 4   another method's launch script
    … [any flag of `openclaw-rl serve`]

The script starts a server, on a free port and in a data directory of its own, and chats over HTTP as any client does.

Where the server practises, the user corrects four replies in its own words and then goes away. The demonstration shows
the progress of practice until every wish rests or the minutes are over. It prints the replies to new questions, which
train nothing, from before and after, and one to a request of another kind.

Where it does not practise, the user complains of long replies and thanks for short ones, until the first trained
version serves. Then come the step, and every turn with its verdict, its hint and its teacher's gap.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.testing.running_server import RunningServer

ROOT = Path(__file__).resolve().parents[1]

QUESTIONS = (
    "How do I boil an egg?",
    "How do I keep bread fresh?",
    "How do I remove a coffee stain from a shirt?",
    "How do I fall asleep on a hot night?",
    "How do I store potatoes?",
    "How do I sharpen a kitchen knife?",
    "How do I start a compost heap?",
    "How do I make lemonade?",
    "How do I unblock a sink?",
    "How do I read a map?",
)
COMPLAINTS = (
    "No, that is too long. Please answer in one or two short sentences.",
    "Still too long. Please say it in one short sentence.",
)
THANKS = "Thanks, that is perfect!"
SHORT_WORDS = 40
REPLY_TOKENS = 80


CORRECTIONS = (
    "No, that is far too long. Please answer in one or two short sentences.",
    "Shorter please. One or two short sentences are enough for me.",
    "No, too long. Just say it in one or two short sentences.",
    "No, please keep it to two short sentences.",
)
NEW = (
    "How do I make pancakes?",
    "How do I clean a muddy pair of boots?",
    "How do I keep cut flowers fresh?",
    "How do I sew on a button?",
)
ELSEWHERE = "Write a story about an old lighthouse."
_POLL_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, nargs="?", help="launch script; default: scripts/serve.sh --method opd")
    parser.add_argument("--batch-size", type=int, help="turns of a training step")
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time to practise")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="openclaw-demo-") as folder:
        script = options.script or ROOT / "scripts" / "serve.sh"
        args = [*([] if options.script else ["--method", "opd"]), *flags]
        args += ["--batch-size", str(options.batch_size)] if options.batch_size else []
        print(f"$ {options.script or 'scripts/serve.sh'} --port 0 --data-dir … {' '.join(args)}", flush=True)
        with RunningServer(Path(folder), args, launch=[str(script.resolve())], start_s=900) as server:
            practises = server.status().get("practice") is not None
            return teach(server, 60 * options.minutes) if practises else talk(server)


def teach(server: RunningServer, longest_s: float) -> int:
    """Correct a few replies, let the server practise, and show new questions before and after."""
    with httpx.Client(base_url=server.url, timeout=300) as client:
        before = {question: aside(client, question) for question in (*NEW, ELSEWHERE)}
        for question, correction in zip(QUESTIONS, CORRECTIONS, strict=False):
            reply, _ = say(client, [], question)
            print(f"\nuser:       {question}\n  policy:   {in_short(reply)}\n  user:     {correction}", flush=True)
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            print(f"  policy:   {in_short(say(client, said, correction)[0])}", flush=True)
        print("\n… the user goes away, and the server practises")
        practise(server, longest_s)
        print("\nNew questions, which train nothing:")
        for question, (old, _) in before.items():
            new, version = aside(client, question)
            print(f"\nuser:       {question}\n  version 0: {in_short(old, 240)}")
            print(f"  version {version}: {in_short(new, 240)}")
    return 0


def practise(server: RunningServer, longest_s: float) -> None:
    """Print the progress of practice until all wishes rest or the time is over."""
    started, shown = time.monotonic(), ""
    while (passed_s := time.monotonic() - started) < longest_s:
        status = server.status()
        line = str(status["practice"]["line"])
        if line != shown:
            print(f"{passed_s / 60:5.1f} min  version {status['serving']}, {line}", flush=True)
            shown = line
        if status["practice"]["wishes"] and not status["practice"]["still_open"]:
            return
        time.sleep(_POLL_S)


def talk(server: RunningServer) -> int:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        before = say(client, [], QUESTIONS[0])[0]
        started = time.monotonic()
        for number, question in enumerate(QUESTIONS):
            chat(client, question, first=before if number == 0 else None)
            if server.status()["tip"] >= 1:
                break
        print("\n… waiting for the step and its version", flush=True)
        status = server.wait_for("version 1 serves", lambda s: s["serving"] >= 1, 1200)
        print(f"version {status['serving']} serves {time.monotonic() - started:.0f} s after the first question\n")
        after, version = say(client, [], QUESTIONS[0])
        show(server, status)
        print(f"\nuser:       {QUESTIONS[0]}\n  version 0: {in_short(before)}\n  version {version}: {in_short(after)}")
    return 0


def chat(client: httpx.Client, question: str, first: str | None = None) -> None:
    """Hold one conversation: the question, complaints while the reply is long, then thanks."""
    messages: list[dict[str, str]] = [{"role": "user", "content": question}]
    reply = first
    print(f"\nuser:       {question}")
    for complaint in (*COMPLAINTS, None):
        if reply is None:
            reply, _ = say(client, messages[:-1], messages[-1]["content"])
        print(f"  policy:   {in_short(reply)}")
        is_short = len(reply.split()) <= SHORT_WORDS
        said = THANKS if is_short else complaint
        if said is None:
            return
        print(f"  user:     {said}", flush=True)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]
        reply = None
        if is_short:
            say(client, messages[:-1], said)
            return


def say(client: httpx.Client, history: list[dict[str, str]], text: str, *, turn_type: str = "main") -> tuple[str, int]:
    """Return the reply and the version that sampled it."""
    body = {
        "model": "policy",
        "messages": [*history, {"role": "user", "content": text}],
        "max_tokens": REPLY_TOKENS,
    }
    answer = client.post("/v1/chat/completions", json=body, headers={"X-Turn-Type": turn_type})
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"], int(answer.headers["X-Weight-Version"])


def aside(client: httpx.Client, question: str) -> tuple[str, int]:
    """Return the reply to a new question, and its version; a side turn trains nothing."""
    return say(client, [], question, turn_type="side")


def show(server: RunningServer, status: Any) -> None:
    print("turn  state              verdict  gap     hint")
    for number, row in enumerate(server.turns(), 1):
        sample = row["sample"] or {}
        verdict = f"{row['verdict']['value']:+d}" if row["verdict"] else "–"
        state = f"{row['state']} v{row['trained_in']}" if row["trained_in"] else row["state"]
        state += f": {row['reason']}" if row["reason"] else ""
        print(f"{number:>4}  {state:22} {verdict:>3}  {gap(sample):>6}  {hint(sample)}".rstrip())
    version = next(v for v in status["versions"] if v["weight_version"] == status["serving"])
    report = json.loads(version["report_json"])
    metrics = report.get("metrics", report)
    names = ("samples", "trained_tokens", "loss", "grad_norm", "abs_log_ratio", "learning_rate", "learner_s")
    told = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
    print(f"\nstep to version {version['weight_version']}: {told}")
    scoring = status.get("scoring", {})
    means = ", ".join(f"{name} {value:.3g}" for name, value in sorted(scoring.get("means", {}).items()))
    print(f"scoring: {means}" if means else "scoring: this method asks no teacher")


def gap(sample: Any) -> str:
    teacher, student = sample.get("teacher_log_probs"), sample.get("student_log_probs")
    if not teacher or not student:
        return "–"
    return f"{statistics.fmean(t - s for t, s in zip(teacher, student, strict=True)):+.2f}"


def hint(sample: Any) -> str:
    extra = json.loads(sample.get("extra_json") or "{}")
    return str(extra.get("hint", {}).get("text", ""))


def in_short(text: str, limit: int = 90) -> str:
    line = " ".join(text.split())
    words = len(line.split())
    return f"{line[:limit]}{'…' if len(line) > limit else ''} ({words} words)"


if __name__ == "__main__":
    sys.exit(main())
