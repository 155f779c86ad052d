"""All wishes are rehearsed together, each prompt with its own words, and anchors hold the rest in place."""

from collections import Counter

import pytest

from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.practice.plan import AnchorUse, plan
from openclaw_rl.types import PracticeKind

ANN, BOB = ("ann", "policy"), ("bob", "policy")


def made(wishes, anchors=None, *, replies=8, share=0.5, anchored=None, leaks=None, **more):
    return plan(
        wishes,
        anchors or {},
        replies=replies,
        anchor_share=share,
        anchored=AnchorUse(anchored or Counter(), leaks or {}),
        **more,
    )


def counted(exercises):
    return Counter(one.wish_id for one in exercises)


def test_every_wish_takes_its_turn_and_the_rest_are_anchors(wish):
    found = made([wish(1), wish(2), wish(3)], replies=9)
    assert counted(found) == {1: 2, 2: 2, 3: 1, None: 4}
    assert [one.kind for one in found if one.wish_id is None] == [PracticeKind.ANCHOR] * 4


def test_the_least_practised_wish_and_prompt_go_first(wish):
    found = made([wish(1, 5, 2), wish(2, 0)], replies=3, share=0)
    assert [(one.wish_id, one.turn_id) for one in found] == [(2, "turn-2-0"), (1, "turn-1-1"), (2, "turn-2-0")]


def test_a_prompt_is_practised_with_its_own_words(wish):
    found = made([wish(1, 0, 0, 0)], replies=3, share=0)
    assert sorted((one.turn_id, one.hint) for one in found) == [
        (f"turn-1-{place}", f"words 1-{place}") for place in range(3)
    ]


@pytest.mark.parametrize(
    ("practised", "share", "varied"),
    [
        (0, 0.0, [False] * 6),
        (0, 0.5, [False, True, False, True, False, True]),
        (1, 0.5, [True, False, True, False, True, False]),
        (0, 0.75, [False, True, True, True, False, True]),
        (0, 1.0, [True] * 6),
    ],
)
def test_a_share_of_each_prompts_replies_answers_variants(wish, practised, share, varied):
    found = made([wish(1, practised, practised)], replies=12, share=0, variant_share=share)
    for place in range(2):
        assert [one.is_variant for one in found if one.turn_id == f"turn-1-{place}"] == varied


def test_an_anchor_is_no_variant(wish):
    found = made([wish(1)], variant_share=1.0)
    assert {one.is_variant for one in found if one.kind is PracticeKind.ANCHOR} == {False}


def test_a_rested_wish_is_rehearsed_beside_an_open_one(wish):
    found = made([wish(1, 40, rests="learned"), wish(2)], share=0)
    assert counted(found) == {1: 4, 2: 4}, "half of the places keeps what is learned"
    both = [wish(1, rests="learned"), wish(2, rests="learned")]
    assert counted(made(both, share=0)) == {1: 4, 2: 4}


def test_a_prompt_on_which_a_newer_wish_holds_is_left_out(wish):
    assert [source.turn_id for source in wish(1, 0, 0, over=(0,)).practised_sources] == ["turn-1-1"]
    assert made([wish(1, 0, over=(0,))]) == []


def test_every_fourth_prompt_is_held_back(wish):
    many = wish(1, *[0] * 8)
    assert [source.turn_id for source in many.held_back] == ["turn-1-3", "turn-1-7"]
    assert len(many.practised_sources) == 6
    assert wish(1, 0, 0, 0).held_back == []
    assert {one.turn_id for one in made([many], replies=16, share=0)} == {s.turn_id for s in many.practised_sources}


def test_anchors_are_the_users_own_turns_then_built_in_prompts(wish):
    found = [one for one in made([wish(1)], {ANN: ["a", "b"]}) if one.kind is PracticeKind.ANCHOR]
    assert [one.turn_id for one in found] == ["a", "b", None, None]
    assert [one.text for one in found[2:]] == list(BUILT_IN[:2])
    assert all(one.hint is None and one.wish_id is None and one.owner == ANN for one in found)


def test_anchors_change_from_update_to_update(wish):
    anchored = Counter({"a": 1, BUILT_IN[0]: 1})
    found = [one for one in made([wish(1)], {ANN: ["a", "b"]}, replies=2, anchored=anchored) if one.hint is None]
    assert [one.turn_id for one in found] == ["b"]
    (built_in,) = [one for one in made([wish(1)], replies=2, anchored=anchored) if one.hint is None]
    assert built_in.text == BUILT_IN[1]


def test_anchors_are_of_the_users_whose_wishes_are_practised(wish):
    found = made([wish(1), wish(2, user="bob")], {ANN: ["a1", "a2"], BOB: ["b1", "b2"]})
    assert sorted(one.turn_id for one in found if one.hint is None) == ["a1", "a2", "b1", "b2"]
    assert {one.turn_id: one.owner for one in found if one.hint is None}["b1"] == BOB


def test_a_general_wish_has_no_anchors(wish):
    assert counted(made([wish(1, is_general=True)])) == {1: 8}
    assert counted(made([wish(1, is_general=True), wish(2)])) == {1: 4, 2: 2, None: 2}, "half of the local one's"


@pytest.mark.parametrize("replies", [1, 2, 5, 16])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_an_update_has_its_size_and_at_least_one_wish(wish, replies, share):
    found = made([wish(1), wish(2)], replies=replies, share=share)
    assert len(found) <= replies
    assert len(found) >= replies - 1
    assert any(one.wish_id is not None for one in found)


def test_without_a_wish_nothing_is_practised():
    assert made([], {ANN: ["a"]}) == []


def test_every_second_anchor_is_the_prompt_whose_reply_was_farthest_from_the_base(wish):
    leaks = {"a": 0.1, "b": -0.5, "d": 0.4, BUILT_IN[7]: 0.2}
    found = made([wish(1)], {ANN: ["a", "b", "c", "d"]}, replies=8, leaks=leaks)
    assert [one.turn_id for one in found if one.hint is None] == ["a", "d", "b", "c"], "no other place is known to leak"
    found = made([wish(1)], replies=8, leaks=leaks)
    assert [one.text for one in found if one.hint is None] == [*BUILT_IN[:1], BUILT_IN[7], BUILT_IN[1], BUILT_IN[2]]


def test_the_use_of_anchors_forgets_prompts_that_are_gone():
    use = AnchorUse()
    use.add("a", 0.3)
    use.add("a", None)
    use.add("b", 0.5)
    kept = use.only({"a", "c"})
    assert (kept.times, kept.leaks) == (Counter(a=2), {"a": 0.3})
    assert kept.choice(["a", "c"], 1) == "a"
    assert kept.choice(["a", "c"], 0) == "c"


def test_anchors_of_two_owners_both_follow_the_leak_and_look_at_each_prompt(wish):
    two = [wish(1), wish(2, user="ben")]
    turns = {ANN: [f"a{n}" for n in range(6)], ("ben", "policy"): [f"b{n}" for n in range(6)]}
    use = AnchorUse(leaks={"a5": 5.0, "b5": 5.0})
    for _ in range(12):
        for one in plan(two, turns, replies=8, anchor_share=0.5, anchored=use):
            if one.hint is None:
                use.add(one.place, use.leaks.get(one.place))
    for name in "ab":
        times = [use.times[f"{name}{n}"] for n in range(6)]
        assert sum(times) == 24
        assert times[5] >= 12, "every second anchor is the prompt that leaks"
        assert min(times) >= 2, "the others take turns"


def test_a_single_anchor_of_an_update_follows_the_leak_every_second_time(wish):
    use, found = AnchorUse(leaks={"c": 1.0}), []
    for _ in range(4):
        (one,) = [
            one
            for one in plan([wish(1)], {ANN: ["a", "b", "c"]}, replies=2, anchor_share=0.5, anchored=use)
            if not one.hint
        ]
        use.add(one.place, None)
        found.append(one.place)
    assert found == ["a", "c", "b", "c"]


def test_no_open_wish_has_less_than_one_that_rests(wish):
    many = [wish(1, 40, rests="learned"), *(wish(n) for n in range(2, 9))]
    assert counted(made(many, replies=8, share=0)) == dict.fromkeys(range(1, 9), 1)
    more = [wish(1, 40, rests="learned"), *(wish(n) for n in range(2, 14))]
    assert counted(made(more, replies=8, share=0)) == dict.fromkeys(range(2, 10), 1), "the least practised first"


def test_a_users_share_holds_for_wishes_and_their_anchors_together(wish):
    """Ann may have a quarter of 16: her two wishes and their anchors. Bob's fill the rest, as if he were alone."""
    wishes = [wish(1), wish(2), wish(3, user="bob")]
    shares = {"ann": 0.25}
    found = plan(wishes, {}, replies=16, anchor_share=0.5, anchored=AnchorUse(), share_of=shares.get)
    assert Counter(one.owner for one in found) == {ANN: 4, BOB: 12}
    assert counted([one for one in found if one.owner == ANN]) == {1: 1, 2: 1, None: 2}
    alone = plan(wishes[:2], {}, replies=16, anchor_share=0.5, anchored=AnchorUse(), share_of=shares.get)
    assert len(alone) == 4, "a share is a limit also while nobody else practises"


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("anchor_share", [0.0, 0.5])
def test_no_plan_is_over_a_share_and_a_small_one_still_practises(wish, share, anchor_share):
    wishes = [wish(number, user="ann" if number % 2 else "bob") for number in range(1, 8)]
    for replies in (4, 16):
        found = plan(
            wishes, {}, replies=replies, anchor_share=anchor_share, anchored=AnchorUse(), share_of={"ann": share}.get
        )
        anns = [one for one in found if one.owner == ANN]
        assert 1 <= len(anns) <= max(1, replies * share) + (anchor_share > 0), "the anchor of its one wish comes too"
        assert len(found) <= replies
