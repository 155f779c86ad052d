"""The recorded traffic of a real OpenClaw: every main turn pairs with its true next state, and no other pair is made.

Each recording is played in order: main requests are observed, and the recorded reply is the turn. Names are request
numbers.
"""

from dataclasses import dataclass, field

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import turn_key
from openclaw_rl.sessions.openclaw import strip_wrapping
from openclaw_rl.sessions.pairing import Paired, Pairing
from openclaw_rl.types import OpenTurn, Scope, TurnType


@dataclass
class Replay:
    """Plays recordings through one `Pairing`."""

    pairing: Pairing = field(default_factory=lambda: Pairing(1000))
    pairs: dict[str, list[str]] = field(default_factory=dict)
    """Turn → text of its next state, without wrapping."""
    reactions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    superseded: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)

    def play(self, requests, *, prefix: str = "") -> "Replay":
        for number, request in enumerate(requests):
            if request.classified.type is TurnType.SIDE:
                assert self.pairing.observe_side(request.scope, request.messages) is None
                continue
            self.note(self.pairing.observe(request.scope, request.messages))
            if request.reply is not None:
                self.serve(request.scope, request.messages, request.reply, f"{prefix}{number}")
        return self

    def serve(self, scope: Scope, messages: list[Message], reply: Message, name: str) -> None:
        self.served.append(name)
        self.pairing.add(OpenTurn(name, scope, turn_key(messages, reply), float(len(self.served))))

    def note(self, paired: Paired | None) -> None:
        if paired is not None:
            assert paired.turn_id not in self.pairs
            self.pairs[paired.turn_id] = [
                f"{message.role}: {strip_wrapping(message.text())}" for message in paired.next_state.messages
            ]
            self.reactions[paired.turn_id] = paired.next_state.reactions
            self.superseded += paired.superseded


@pytest.mark.parametrize(
    ("recording", "served", "pairs"),
    [
        (
            "chat_3_turns",
            ["0", "1", "2"],
            {"0": ["user: Message number 2 in the same session"], "1": ["user: Message number 3 in the same session"]},
        ),
        ("interleaved_two_sessions", ["0", "1", "2", "3"], {"0": ["user: A second"], "1": ["user: B second"]}),
        # 0 and 1 were answered 503; 2 is the client's rewritten retry, whose text is clean again in 3
        ("retry_after_503", ["2", "3"], {"2": ["user: Follow-up after 503"]}),
        # 2 memory flush, 3 title, 4 compaction are side; 5 follows the compaction
        ("session_affinity_headers", ["0", "1", "5"], {"0": ["user: second"], "1": ["user: /compact", "user: third"]}),
        ("side_memory_flush", ["0", "2"], {"0": ["user: B fourth"]}),
        # 0 cron, 3 the child's run, 4 the announcement of its result
        ("side_cron_and_subagent", ["1", "2"], {"1": ["tool: PLACEHOLDER tool result"]}),
        ("side_heartbeat", [], {}),
        ("side_title_and_slug", [], {}),
        ("side_compaction", ["1"], {}),
        ("telegram_reaction", ["0", "1"], {"0": ["user: Second telegram message"]}),
        ("tool_call_turn", ["0", "1", "2"], {"0": ["tool: tool-says-hi"], "1": ["user: A fifth: thanks"]}),
    ],
)
def test_recording(traffic, recording: str, served: list[str], pairs: dict[str, list[str]]) -> None:
    replay = Replay().play(traffic(recording))
    assert replay.served == served
    assert replay.pairs == pairs
    assert replay.superseded == []


def test_next_states_keep_the_messages_as_sent(traffic) -> None:
    requests = traffic("chat_3_turns")
    pairing = Pairing(10)
    pairing.add(OpenTurn("0", requests[0].scope, turn_key(requests[0].messages, requests[0].reply), 0.0))
    paired = pairing.observe(requests[1].scope, requests[1].messages)
    assert paired.next_state.messages == (requests[1].messages[3],)
    assert paired.next_state.messages[0].text().startswith("[Fri 2026-11-27 22:15 UTC] ")


def test_the_telegram_reaction_belongs_to_the_reply_before(traffic) -> None:
    assert Replay().play(traffic("telegram_reaction")).reactions == {"0": ("👍",)}


def test_all_recordings_at_once_pair_as_alone(traffic) -> None:
    """Sessions A and B continue through several recordings; no turn pairs across them."""
    replay = Replay()
    for name in ("interleaved_two_sessions", "tool_call_turn", "side_memory_flush", "side_cron_and_subagent"):
        replay.play(traffic(name), prefix=f"{name}.")
    assert replay.pairs == {
        "interleaved_two_sessions.0": ["user: A second"],
        "interleaved_two_sessions.1": ["user: B second"],
        "tool_call_turn.0": ["tool: tool-says-hi"],
        "tool_call_turn.1": ["user: A fifth: thanks"],
        "interleaved_two_sessions.3": ["user: B third long"],
        "side_memory_flush.0": ["user: B fourth"],
        "tool_call_turn.2": ["user: Spawn a subagent please"],
        "side_cron_and_subagent.1": ["tool: PLACEHOLDER tool result"],
    }


@pytest.mark.parametrize("keep_id", [True, False])
def test_the_reply_before_a_compaction_pairs_after_it(traffic, keep_id: bool) -> None:
    """The recording starts after the compacted turn, so that turn is made from the client's history."""
    before, after = traffic("side_memory_flush")[2], traffic("side_compaction")[1]
    tail = [message for message in after.messages if message.role != "system"][1:]
    at = next(k for k, message in enumerate(tail) if message.text() == "Longer turn reply.")
    history = [*before.messages[:-1], before.reply, tail[at - 1]]
    scope = before.scope if keep_id else Scope("uma", None)
    replay = Replay()
    replay.serve(scope, history, tail[at], "longer")
    replay.note(replay.pairing.observe(after.scope if keep_id else scope, after.messages))
    assert replay.pairs == ({"longer": ["user: B sixth"]} if keep_id else {})


def test_a_subagents_result_merged_into_the_reply_still_pairs(traffic) -> None:
    requests = traffic("side_cron_and_subagent")
    replay = Replay().play(requests)
    spawned, announced = requests[2], requests[4]
    merged = Message(role="assistant", content=f"{spawned.reply.text()}\n{announced.reply.text()}")
    said = Message(role="user", content="[Fri 2026-11-27 22:30 UTC] Lovely, thanks")
    replay.note(replay.pairing.observe(spawned.scope, [*spawned.messages[:-1], merged, said]))
    assert replay.pairs["2"] == ["user: Lovely, thanks"]


def test_the_users_message_after_a_heartbeat_answers_the_reply_before_it(traffic) -> None:
    requests = traffic("side_heartbeat")
    last = requests[1]
    poll = next(k for k, message in enumerate(last.messages) if "heartbeat poll" in message.text())
    replay = Replay()
    replay.serve(last.scope, last.messages[: poll - 1], last.messages[poll - 1], "before")
    replay.play(requests)
    said = Message(role="user", content="[Fri 2026-11-27 22:40 UTC] Message 3")
    replay.note(replay.pairing.observe(last.scope, [*last.messages[: poll + 2], said, last.messages[-1]]))
    assert replay.pairs == {"before": ["user: Message 3"]}


@pytest.mark.parametrize("recording", ["chat_3_turns", "tool_call_turn", "telegram_reaction"])
def test_without_any_session_id_the_recordings_pair_alike(traffic, recording: str) -> None:
    named, anonymous = Replay().play(traffic(recording)), Replay()
    for number, request in enumerate(traffic(recording)):
        scope = Scope("uma", None)
        anonymous.note(anonymous.pairing.observe(scope, request.messages))
        anonymous.serve(scope, request.messages, request.reply, str(number))
    assert anonymous.pairs == named.pairs
