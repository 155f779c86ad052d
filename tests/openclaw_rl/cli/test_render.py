"""Text for a terminal: every number has a name, and no character moves the cursor."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import render

COUNTS = {
    **{state: 0 for state in ("served", "paired", "judged", "sampled", "leased", "trained", "dropped")},
    **{"requests": 9, "running": 1, "abandoned": 0, "side": 0, "feedback": 0, "rejections_in_a_row": 0},
}
BASE = {"weight_version": 0, "parent": None, "state": "serving", "committed_at": 1e9, "reason": None}


def a_status(**more: Any) -> dict[str, Any]:
    return {
        "policy": "policy",
        "policies": 1,
        "waiting": more.get("counts", COUNTS)["sampled"],
        "model": "toy",
        "method": "opd",
        "started_at": time.time() - 3 * 3600,
        "serving": 0,
        "tip": 0,
        "pinned": None,
        "learning": True,
        "training": {"enabled": True, "batch_size": 16},
        "problems": [],
        "counts": COUNTS,
        "versions": [BASE],
    } | more


def a_row(**more: Any) -> dict[str, Any]:
    return {
        "turn_id": "chatcmpl-1",
        "user": "uma",
        "session_id": None,
        "state": "served",
        "reason": None,
        "finished_at": 1e9,
        "prompt_tokens": 30,
        "response_tokens": 5,
        "oldest_version": 3,
        "is_tool": False,
        "verdict": None,
        "trained_in": None,
        "feedback": None,
        "demonstration_of": None,
    } | more


def a_record(**more: Any) -> dict[str, Any]:
    return {
        "request": {
            "scope": {"user": "uma", "session_id": "s1", "policy": "policy"},
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How\nlong?"}],
            "prompt_ids": [1] * 30,
        },
        "turn": {
            "turn_id": "chatcmpl-1",
            "response_ids": [1, 2],
            "versions": [{"weight_version": 3, "length": 2}],
            "finish_reason": "stop",
            "reply": {"role": "assistant", "content": "Very."},
        },
        "state": "served",
        "reason": None,
        "next_state": None,
        "verdict": None,
        "feedback": [],
        "sample": None,
        "trained_in": None,
        "events": [{"at": 1e9, "state": "served", "detail": ""}],
    } | more


def test_a_status_says_what_waits_for_what_and_how_far_the_next_step_is() -> None:
    counts = COUNTS | {"sampled": 3, "dropped": 5, "dropped.stale": 2, "dropped.neutral": 3}
    text = render.status(a_status(counts=counts, problems=["judge: down"]), "http://127.0.0.1:30000")
    assert text.startswith("toy at http://127.0.0.1:30000/v1, method opd, up 3 h\nversion 0 serves (the base)\n")
    assert "learning is on: 3 of the 16 samples of the next step are there\n  ! judge: down\n" in text
    assert "  sampled         3  wait for a full batch\n" in text
    assert "  dropped         5  neutral 3, stale 2\n" in text
    assert text.endswith("  the base            serving")


def test_a_status_names_its_policy_where_there_are_several() -> None:
    counts = COUNTS | {"sampled": 9}
    text = render.status(a_status(counts=counts, policy="user:ann", policies=3, waiting=2), "http://x")
    assert "\npolicy user:ann, of 3 (openclaw-rl policies)\n" in text
    assert "learning is on: 2 of the 16 samples of the next step are there" in text


def test_a_list_of_policies_has_figures_and_what_is_not_as_usual() -> None:
    usual = {"policy": "policy", "serving": 0, "pinned": None, "tip": 0, "learning": True, "waiting": 0}
    changed = {"policy": "user:ann", "serving": 3, "pinned": 3, "tip": 7, "learning": False, "waiting": 4}
    rows = [usual | {"practice_waiting": 0}, changed | {"practice_waiting": 8}]
    first, second = render.policies(rows)
    assert first.split(None, 1) == ["policy", "version 0 serves, 0 samples wait"]
    said = "version 3 serves, pinned at 3, version 7 is the newest trained, 4 samples wait, 8 of practice"
    assert second.split(None, 1) == ["user:ann", f"{said}, learning is paused"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"training": {"enabled": False, "batch_size": 16}}, "learning is off (training.enabled)"),
        ({"learning": False}, "learning is paused, 0 samples wait (openclaw-rl learning resume)"),
        ({"serving": 2, "tip": 3}, "version 2 serves; version 3 is the newest trained, on its way to serve"),
        ({"serving": 2, "tip": 3, "pinned": 2}, "version 2 serves, pinned at 2; version 3 is the newest trained\n"),
    ],
)
def test_a_status_says_why_nothing_is_learned_or_published(more: dict[str, Any], says: str) -> None:
    assert says in render.status(a_status(**more), "http://x")


def test_what_the_nodes_first_commands_wait_for_is_what_status_prints() -> None:
    page = (Path(__file__).parents[3] / "instructions/node.md").read_text()
    verdict, update = re.findall(r'status --data-dir "\$SAVE_CKPT" \| grep (?:-E )?"([^"]+)"', page)
    before, judged = (render.status(a_status(counts=COUNTS | {"sampled": n}), "http://x") for n in (0, 1))
    trained = render.status(a_status(serving=1), "http://x")
    for pattern, there, ends in ((verdict, before, False), (verdict, judged, True), (update, judged, False)):
        assert bool(re.search(pattern, there, re.MULTILINE)) is ends
    assert re.search(update, trained, re.MULTILINE)


def test_a_list_of_turns_has_a_head_and_aligned_columns() -> None:
    rows = [
        a_row(state="trained", trained_in=4, verdict=-1, session_id="s1"),
        a_row(turn_id="chatcmpl-22", state="dropped", reason="no_next_state", feedback=1.0),
        a_row(state="leased", verdict=-1, feedback=1.0, demonstration_of="chatcmpl-22"),
    ]
    head, *lines = render.turns(rows)
    assert head.split() == ["reply", "finished", "version", "tokens", "verdict", "state", "user", "session"]
    assert [line.index("30+5") for line in lines] == [head.index("tokens")] * 3
    assert [line[head.index("state") : head.index("user")].strip() for line in lines] == [
        "trained in version 4",
        "dropped: no_next_state (its user said +1)",
        "leased (its user said +1, too late) (a better reply to chatcmpl-22)",
    ]
    assert [line[head.index("session") :] for line in lines] == ["s1", "-", "-"]


def test_one_turn_says_what_was_said_and_why_it_ended_as_it_did() -> None:
    record = a_record(
        state="trained",
        trained_in=4,
        next_state={"messages": [{"role": "user", "content": "No, shorter."}], "reactions": ["👎"]},
        verdict={"value": -1, "votes": [-1], "source": "rules", "rationale": "correction"},
        feedback=[{"value": -1.0, "comment": "shorter", "demonstration": None}],
        sample={"reward": -1.0},
        events=[{"at": 1e9, "state": "trained", "detail": "version 4"}],
    )
    lines = render.turn(record).splitlines()
    assert lines[1] == "  user uma, session s1, version 3, 30 tokens of prompt, 2 of reply (stop)"
    assert lines[3:-3] == [
        "  asked    user: How long?",
        "  replied  assistant: Very.",
        "  then     user: No, shorter.",
        "  reaction 👎",
        "  feedback -1; comment: shorter",
        "  verdict  -1 (rules: correction)",
        "  reward   -1",
    ]
    assert lines[-2] == "it is trained in version 4"
    assert lines[-1].endswith("trained   version 4")


@pytest.mark.parametrize(
    ("session", "state", "reason", "is_told"),
    [
        (None, "served", None, True),
        (None, "dropped", "no_next_state", True),
        (None, "dropped", "neutral", False),
        (None, "paired", None, False),
        ("s", "served", None, False),
    ],
)
def test_a_turn_that_was_not_continued_names_the_cure(session, state, reason, is_told: bool) -> None:
    record = a_record(state=state, reason=reason)
    record["request"]["scope"]["session_id"] = session
    assert ("X-Session-Id" in render.turn(record)) is is_told


def test_a_reply_that_calls_a_tool_shows_the_call() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    turn = a_record()["turn"] | {"reply": {"role": "assistant", "content": None, "tool_calls": [call]}}
    assert '  replied  assistant: read({"path": "a"})' in render.turn(a_record(turn=turn))


def test_nothing_that_a_client_sent_reaches_the_terminal_as_a_control_character() -> None:
    evil = "a\x1b[2J\nb\u202e\r"
    (_, line) = render.turns([a_row(session_id=evil, user=evil)])
    request = a_record()["request"] | {
        "scope": {"user": evil, "session_id": evil, "policy": "policy"},
        "messages": [{"role": "user", "content": evil}],
    }
    page = render.turn(
        a_record(
            request=request,
            feedback=[{"value": None, "comment": evil, "demonstration": None}],
            verdict={"value": 1, "votes": [1], "source": "llm", "rationale": evil},
            events=[{"at": 1e9, "state": "dropped", "detail": evil}],
        )
    )
    for text in (line, *page.splitlines()):
        assert text.isprintable()
    assert len(page.splitlines()) == len(render.turn(a_record()).splitlines()) + 2  # feedback and verdict


def test_a_pool_has_a_line_for_each_engine() -> None:
    engine = {"engine": "http://e", "is_in": False, "is_drained": False, "running": 1, "sessions": 2, "failures": 3}
    line = "engine 1 at http://e is out of the pool: 1 running, 2 sessions, 3 failed calls"
    assert line in render.status(a_status(engines=[engine]), "http://x")
    rows = [engine | {"fault": "it is gone"}, engine | {"is_drained": True, "fault": None}]
    drained = "engine 2 at http://e is drained: 1 running, 2 sessions, 3 failed calls"
    assert list(render.engines(rows)) == [line, "  ! engine 1: it is gone", drained]


def test_practice_is_marked_and_told() -> None:
    line = render.status(a_status(practice={"line": "practising 2 wishes, update 5, learned 60 %"}), "http://x")
    assert "practising 2 wishes, update 5, learned 60 %" in line.splitlines()
    counts = COUNTS | {"practice": 3, "practice.trained": 2, "practice.dropped.stale": 1}
    assert "replies that nobody asked for: trained 2, dropped.stale 1" in render.status(a_status(counts=counts), "u")
    rows = [a_row(practice="wish", practice_of="chatcmpl-0", wish_id=4), a_row(practice="anchor", practice_of=None)]
    shown = list(render.turns(rows))
    assert "(practice: wish 4, on chatcmpl-0)" in shown[1]
    assert "(practice: anchor)" in shown[2]


def test_a_wish_shows_its_words_without_control_characters() -> None:
    wish = {
        "wish_id": 4,
        "text": "shorter\x1b[2J please",
        "created_at": 1e9,
        "state": "active",
        "rests": None,
        "reason": None,
        "learned": 0.6,
        "kl": 0.31,
        "practised": 24,
        "updates": 4,
        "since": 2,
        "is_general": False,
        "sources": [{}, {}],
    }
    head, figures = render.wishes([wish])
    assert head == "   4  shorter\ufffd[2J please"
    assert figures.endswith(
        "asked 2 times, where it was asked; practised; learned 60 %; KL 0.31; 24 practice replies in 4 updates;"
        " since version 2"
    )
    over = wish | {"state": "superseded", "reason": "wish 5 asks for the opposite: length", "is_general": True}
    assert "everywhere; superseded; wish 5 asks for the opposite: length" in list(render.wishes([over]))[1]
