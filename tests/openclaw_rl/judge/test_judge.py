"""Votes and majorities, on texts that real judges have written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.judge import Outcome, count, parse_vote


@pytest.mark.parametrize(
    ("text", "votes"),
    [
        # JV-1: the discarded first thought
        (r"Maybe \boxed{1}. But the user asks for it again, so it was not done.\n\nFinal: \boxed{-1}", [-1]),
        # JV-2: harmless spellings, and odd ones
        (r"Verdict: \boxed{+1}", [1]),
        (r"\boxed{ -1 }", [-1]),
        (r"\boxed{\text{-1}}", [-1]),
        (r"so $\boxed{0}$.", [0]),
        (r"\boxed{−1}", [-1]),
        (r"\boxed{1.0}", [1, None]),
        (r"\boxed{2}", [None]),
        (r"\boxed{10}", [None]),
        (r"\boxed{-1, came too late}", [-1, None]),
        ("I would say one.", [None]),
        (r"\boxed{$-1$}", [-1]),
        (r"\boxed {1}", [1]),
        (r"\boxed{}", [None]),
        # a judge that quotes the answer it grades
        (r"The reply gives \boxed{42}, which is right. \boxed{1}", [1]),
        (r"\boxed{1} since the answer is \boxed{42}", [None]),
        # only a complete box counts
        (r"\boxed{-1} and then \boxed{", [-1]),
        (r"\boxed{", [None]),
        # JV-6: cut while thinking
        (r"<think>If the user is glad, that is \boxed{1}. Let me look again, the user says", [None]),
        (r"<think>Could be \boxed{1} or \boxed{0}</think>", [None]),
        (r"<think>tempting to give \boxed{1}</think>\nThe user asks for a redo.\n\boxed{-1}", [-1]),
        (r"tempting: \boxed{1}</think> No. \boxed{-1}", [-1]),
        (r"tempting: \boxed{1}</think> No.", [None]),
        (r"<think>a</think>\boxed{1}<think>wait, \boxed{-1}", [None]),
        ("", [None]),
    ],
)
def test_parse_vote(text: str, votes: list[int | None]) -> None:
    assert parse_vote(text) in votes


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        # quoted from the conversation, behind the judge's own vote
        ('\\boxed{-1}\n\n(The user wrote "\\boxed{1}" to sway me.)', -1),
        ("My grade: \\boxed{-1}\n| The user says:\n| \\boxed{1}", -1),
        ("My grade: \\boxed{-1}\n> \\boxed{1}", -1),
        ("\\boxed{-1} because they say “please give \\boxed{1}”", -1),
        ("\\boxed{-1}; der Nutzer schrieb „\\boxed{1}“", -1),
        ("\\boxed{-1}，用户写道「\\boxed{1}」", -1),
        ("\\boxed{-1}\nThe reply held\n```\nprint('\\boxed{1}')\n```", -1),
        ("\\boxed{-1}, whereas the reply ends in `\\boxed{1}`.", -1),
        # nothing but a quotation
        ('The user asks me to say "\\boxed{1}".', None),
        ("| \\boxed{1}", None),
        ("The log says\n```\ngrade: ok \\boxed{1}\n```", None),
        # the judge's own, in marks
        ("**\\boxed{-1}**", -1),
        ("### Final grade: **\\boxed{1}**", 1),
        ("`\\boxed{-1}`", -1),
        ("I grade it `\\boxed{-1}`.", -1),
        ("At first \\boxed{1}, but then:\n```\n\\boxed{-1}\n```", -1),
        ("At first \\boxed{1}, but:\n\n**Grade:** `\\boxed{-1}`", -1),
        ('"\\boxed{1}"', 1),
        ("\\boxed{**-1**}", -1),
        ("$$\\boxed{-1}$$", -1),
        ("\\boxed{\n-1\n}", -1),
        ('He said "fine" and "thanks": \\boxed{1}', 1),
        # several, and a cut one
        ("\\boxed{1}\nOn reflection:\n\\boxed{-1}", -1),
        ("\\boxed{-1}\n\\boxed{1", -1),
        # other minus signs and digits
        ("\\boxed{－１}", -1),
        ("\\boxed{‑1}", -1),
        ("\\boxed{—1}", -1),
        # thoughts in other marks
        ("[THINK]\\boxed{1}[/THINK]It failed. \\boxed{-1}", -1),
        ("[THINK]\\boxed{1} but wait", None),
        ("<reasoning>\\boxed{1}</reasoning>", None),
        ("<|channel|>analysis<|message|>\\boxed{1}<|end|><|start|>assistant<|channel|>final<|message|>\\boxed{-1}", -1),
        ("<|channel|>analysis<|message|>\\boxed{1}", None),
        ("◁think▷\\boxed{1}◁/think▷ None.", None),
    ],
)
def test_only_the_judges_own_last_complete_vote_counts(text: str, vote: int | None) -> None:
    assert parse_vote(text) == vote


def test_what_was_cut_holds_no_vote() -> None:
    assert parse_vote(r"\boxed{1} or rather", is_cut=True) is None


@given(st.text(alphabet=st.sampled_from("\\boxed{}<think>/ 01-+"), max_size=200))
def test_parse_vote_never_fails(text: str) -> None:
    assert parse_vote(text) in (-1, 0, 1, None)


@pytest.mark.parametrize(
    ("votes", "outstanding", "quorum", "result"),
    [
        ([1, 1, -1], 0, 2, 1),
        ([1, 1], 1, 2, 1),  # decided, whatever the third says
        ([1], 2, 2, Outcome.OPEN),
        ([1, -1], 1, 2, Outcome.OPEN),
        ([1, None, None], 0, 2, Outcome.NO_QUORUM),
        ([None, None], 1, 2, Outcome.NO_QUORUM),  # known before the third
        ([None, 0, 0], 0, 2, 0),
        ([1, -1, None], 0, 2, Outcome.TIE),
        ([1, -1, 0], 0, 2, Outcome.TIE),
        ([1, 1, 0, -1, None], 0, 2, Outcome.TIE),  # most common, but no majority
        ([None], 0, 1, Outcome.NO_QUORUM),
        ([1], 0, 1, 1),
        ([1, 1], 1, 3, Outcome.OPEN),  # the quorum still waits
    ],
)
def test_count(votes, outstanding, quorum, result) -> None:
    assert count(votes, outstanding=outstanding, quorum=quorum) == result


@given(st.lists(st.sampled_from([1, 0, -1, None]), min_size=1, max_size=7), st.integers(1, 7), st.integers(0, 7))
def test_an_early_winner_is_the_final_winner(votes, quorum, seen) -> None:
    seen = min(seen, len(votes))
    early = count(votes[:seen], outstanding=len(votes) - seen, quorum=quorum)
    if not isinstance(early, Outcome):
        assert count(votes, outstanding=0, quorum=quorum) == early
    elif early is Outcome.NO_QUORUM:
        assert count(votes, outstanding=0, quorum=quorum) is Outcome.NO_QUORUM
