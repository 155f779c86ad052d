"""The combined method: which terms a turn's sample has, and the credit that comes of them."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_combine.method import METHOD, CombineSettings, combined
from openclaw_opd import teacher
from openclaw_opd.method import METHOD as OPD
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Score
from openclaw_rl.errors import EngineGone, TeacherError
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped, ScoringTools, load_method
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Ids,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    Verdict,
    VersionRun,
)

HINT = "Answer in one sentence."


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "FIRST_PAUSE_S", 1e-6)


class Scorer(FakeEngine):
    """Scores hinted prompts by -0.5, others by -1; fails when `is_gone`; its tables lack an id when `is_narrow`."""

    is_gone = is_narrow = False
    asked = 0

    async def score(self, prompt_ids: Any, response_ids: Any, *, top_k: int = 0, **_: Any) -> Score:
        self.asked += 1
        if self.is_gone:
            raise EngineGone("no engine")
        value = -0.5 if HINT in "".join(map(chr, prompt_ids)) else -1.0
        rows = [tuple(range(top_k - (self.is_narrow and t == 0))) for t in range(len(response_ids))]
        log_probs = tuple(tuple(-1.0 - k for k in row) for row in rows)
        top = (log_probs, tuple(rows)) if top_k else (None, None)
        return Score((value,) * len(response_ids), *top)


def render(messages: Sequence[Message], tools_json: str | None, template_kwargs_json: str | None) -> Ids:
    return tuple(ord(c) for message in messages for c in f"<{message.role}>{message.text()}")


def tools(engine: FakeEngine, context_length: int = 8192, **method: object) -> ScoringTools:
    serving = VersionAdmission(hold_s=0.05)
    serving.switch(0, None)
    return ScoringTools(CombineSettings.model_validate(method), engine, serving, render, context_length=context_length)


def judged(verdict: int | None, *, hint: bool) -> JudgedTurn:
    """Of feedback alone: a comment is a hint as it stands."""
    messages = (Message(role="user", content="hi"),)
    request = Request("r", Scope("u", "s"), 0.0, messages, None, None, render(messages, None, None), SamplingParams(8))
    reply = Message(role="assistant", content="hello")
    turn = Turn("t", "r", 1.0, (4, 5), (-0.5, -0.25), (True, False), (VersionRun(0, 2),), "stop", reply)
    return JudgedTurn(
        request,
        turn,
        NextState(()),
        None if verdict is None else Verdict(verdict, (verdict,), "feedback"),
        (Feedback("f", "t", 2.0, comment=HINT),) if hint else (),
    )


# -- score: each mixture of terms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [1, -1])
async def test_hint_and_reward_give_both_terms(verdict: int) -> None:
    made = await METHOD.score(judged(verdict, hint=True), tools(Scorer()))
    assert isinstance(made, Sample)
    assert (made.reward, made.teacher_log_probs, made.student_log_probs) == (verdict, (-0.5,) * 2, (-1.0,) * 2)


@pytest.mark.parametrize("verdict", [0, None])
async def test_a_hint_alone_gives_no_reward(verdict: int | None) -> None:
    made = await METHOD.score(judged(verdict, hint=True), tools(Scorer()))
    assert isinstance(made, Sample)
    assert made.reward is None
    assert made.teacher_log_probs == (-0.5,) * 2


async def test_a_reward_alone_leaves_the_other_term_absent() -> None:
    made = await METHOD.score(judged(-1, hint=False), tools(Scorer()))
    assert isinstance(made, Sample)
    assert made.reward == -1
    assert (made.teacher_log_probs, made.student_log_probs, made.scored_version) == (None, None, None)  # D21
    assert (made.hint and made.hint.absent) == "no_hint"


@pytest.mark.parametrize(("verdict", "reason"), [(0, DropReason.NEUTRAL), (None, DropReason.UNJUDGED)])
async def test_neither_is_no_sample(verdict: int | None, reason: DropReason) -> None:
    made = await METHOD.score(judged(verdict, hint=False), tools(Scorer()))
    assert isinstance(made, Dropped)
    assert made.reason is reason
    assert made.detail.startswith("no_hint")


@pytest.mark.parametrize("hint", [True, False])
async def test_a_thought_that_the_limit_cut_is_not_praised(hint: bool) -> None:
    told = judged(1, hint=hint)
    cut = Message(role="assistant", content="", reasoning_content="First I")
    made = await METHOD.score(
        replace(told, turn=replace(told.turn, reply=cut, finish_reason="length")), tools(Scorer())
    )
    if hint:
        assert isinstance(made, Sample)
        assert made.reward is None
    else:
        assert isinstance(made, Dropped)
        assert made.reason is DropReason.NEUTRAL


@pytest.mark.parametrize("failure", ["is_gone", "is_narrow", "overflow"])
async def test_a_teacher_that_fails_costs_its_term_and_never_the_reward(failure: str) -> None:  # D27
    engine = Scorer()
    if failure != "overflow":
        setattr(engine, failure, True)
    scoring = tools(engine, context_length=12 if failure == "overflow" else 8192, top_k=3)
    made = await METHOD.score(judged(1, hint=True), scoring)
    assert isinstance(made, Sample)
    assert made.reward == 1
    assert made.teacher_log_probs is None
    absent = "hint_overflows" if failure == "overflow" else "teacher_failed"
    assert (made.hint and made.hint.absent) == absent
    if failure == "overflow":
        assert isinstance(await METHOD.score(judged(0, hint=True), scoring), Dropped)
    else:
        with pytest.raises(TeacherError):  # nothing else can be made of it: later, perhaps
            await METHOD.score(judged(0, hint=True), scoring)


async def test_a_weight_of_zero_takes_its_term_away() -> None:
    engine = Scorer()
    for verdict in (1, 0, None):
        turn = judged(verdict, hint=True)
        assert await METHOD.score(turn, tools(engine, opd_weight=0)) == await BINARY.score(turn, tools(engine))
        assert engine.asked == 0
    for verdict in (1, 0, None):
        turn = judged(verdict, hint=True)
        assert await METHOD.score(turn, tools(engine, binary_weight=0)) == await OPD.score(turn, tools(engine))
    assert isinstance(await METHOD.score(judged(1, hint=False), tools(engine, binary_weight=0)), Dropped)


# -- practise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [1, 0, -1, None])
async def test_a_practice_reply_has_the_teachers_term_and_its_own_verdict(verdict: int | None) -> None:
    made = await METHOD.practise(judged(verdict, hint=False), HINT, tools(Scorer()))
    assert isinstance(made, Sample)
    assert (made.teacher_log_probs, made.student_log_probs) == ((-0.5,) * 2, (-1.0,) * 2)
    assert made.reward == (verdict or None)
    assert (await METHOD.practise(judged(verdict, hint=False), HINT, tools(Scorer(), binary_weight=0))).reward is None


async def test_an_anchor_has_no_reward() -> None:
    made = await METHOD.practise(judged(1, hint=True), None, tools(Scorer(), top_k=3))
    assert isinstance(made, Sample)
    assert (made.reward, made.teacher_log_probs) == (None, (-1.0,) * 2)
    assert METHOD.gathered_ids(made) == ((0, 1, 2),) * 2


async def test_practice_is_never_by_the_reward_alone() -> None:
    made = await METHOD.practise(judged(1, hint=False), HINT, tools(Scorer(), context_length=12))
    assert isinstance(made, Dropped)
    assert made.detail.startswith("hint_overflows")
    assert isinstance(await METHOD.practise(judged(1, hint=False), HINT, tools(Scorer(), opd_weight=0)), Dropped)
    gone = Scorer()
    gone.is_gone = True
    with pytest.raises(TeacherError):
        await METHOD.practise(judged(1, hint=False), HINT, tools(gone))


# -- advantages --------------------------------------------------------------------------------------------------------


def sample(reward: float | None, gap: Sequence[float] | None, *, n: int = 3, demonstration: bool = False) -> Sample:
    return Sample(
        sample_id="s",
        prompt_ids=(1,),
        response_ids=(2,) * n,
        loss_mask=(True,) * n,
        rollout_log_probs=(-1.0,) * n,
        versions=(VersionRun(0, n),),
        temperature=0.7,
        reward=reward,
        teacher_log_probs=None if gap is None else tuple(-1.0 + g for g in gap),
        student_log_probs=None if gap is None else (-1.0,) * n,
        is_demonstration=demonstration,
    )


def test_the_credit_by_hand() -> None:
    settings = CombineSettings(binary_weight=0.5, opd_weight=2.0, opd_clip=1.0)
    batch = [
        sample(-1.0, (0.25, -3.0, 0.0)),
        sample(None, (0.25, -3.0, 0.0)),
        sample(1.0, None),
        sample(None, None, demonstration=True),
    ]
    assert METHOD.advantages(batch, settings, {}) == [
        [-0.5 + 2 * 0.25, -0.5 - 2 * 1.0, -0.5],
        [0.5, -2.0, 0.0],
        [0.5] * 3,
        [0.0] * 3,
    ]


def test_the_baseline_is_of_the_rewards_that_are_there() -> None:
    settings = CombineSettings(baseline="ema", baseline_decay=0.5, binary_weight=1.0)
    state = {"baseline_user": 0.25}
    batch = [sample(1.0, (1.0, 0.0, 0.0)), sample(None, (1.0, 0.0, 0.0)), sample(None, None, demonstration=True)]
    assert METHOD.advantages(batch, settings, state) == [[1.75, 0.75, 0.75], [1.0, 0.0, 0.0], [0.0] * 3]
    assert state["baseline_user"] == pytest.approx(0.25 + 0.5 * (1.0 - 0.25))


def test_a_sample_with_neither_is_a_bug_not_a_zero() -> None:
    assert not METHOD.can_train(sample(None, None))
    with pytest.raises(ValueError, match="reward"):
        METHOD.advantages([sample(None, None)], CombineSettings(), {})


terms = st.none() | st.lists(st.floats(-3, 3), min_size=2, max_size=2)


@given(terms, terms, st.floats(0, 2), st.floats(0, 2))
def test_absent_adds_nothing_and_a_weight_of_zero_is_absence(b: Any, o: Any, binary: float, opd: float) -> None:
    both = combined(2, b, o, binary_weight=binary, opd_weight=opd)
    alone = [combined(2, b, None, binary_weight=binary, opd_weight=opd)]
    alone.append(combined(2, None, o, binary_weight=binary, opd_weight=opd))
    assert both == pytest.approx([x + y for x, y in zip(*alone, strict=True)])
    assert combined(2, b, o, binary_weight=binary, opd_weight=0) == alone[0]
    assert combined(2, b, o, binary_weight=0, opd_weight=opd) == alone[1]
    assert combined(2, None, None, binary_weight=binary, opd_weight=opd) == [0.0, 0.0]


@given(
    st.lists(st.sampled_from([1.0, -1.0]), min_size=1, max_size=6),
    st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from(["none", "ema", "others"]),
)
def test_one_weight_zero_is_the_other_method(rewards: list[float], gaps: list[list[float]], baseline: Any) -> None:
    rewarded, hinted = [sample(r, None) for r in rewards], [sample(None, gap) for gap in gaps]
    binary = CombineSettings(baseline=baseline, binary_weight=1.0, opd_weight=0.0)
    state, own_state = {"baseline_user": 0.3}, {"baseline_user": 0.3}
    assert METHOD.advantages(rewarded, binary, state) == BINARY.advantages(rewarded, binary, own_state)
    assert state == own_state
    opd = CombineSettings(binary_weight=0.0)
    assert METHOD.advantages(hinted, opd, {}) == OPD.advantages(hinted, opd, {})


def test_it_is_found_by_its_entry_point_without_torch() -> None:
    assert load_method("combine") is METHOD
    code = (
        "import sys; from openclaw_rl.methods.base import load_method; "
        "load_method('combine'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
