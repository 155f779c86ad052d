"""Choice of the prompts of one update: all wishes are rehearsed together, and anchors hold the rest in place.

What is not rehearsed is forgotten, so every active wish takes its turn, the least practised one first. Beside open
wishes those that rest have half of the places at most: with a quarter a learned wish was lost while the next one was
practised. Each prompt is practised with its own words. Of a wish with many corrected prompts every fourth is held back,
to measure on. A part of a wish's replies answers variants of its prompts: requests that begin alike (`variants`).

A wish leaks most into the prompts that are most like its own. So every second anchor is the prompt whose newest reply
was the farthest from the base; the others take turns, so that each prompt is looked at.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from openclaw_rl.practice.anchors import BUILT_IN
from openclaw_rl.types import PracticeKind, Wish

REHEARSED = 0.5
"""Share of the wishes' places for those that rest, while another is open."""

Owner = tuple[str, str]
"""User and policy."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """One prompt to answer anew."""

    kind: PracticeKind
    owner: Owner
    turn_id: str | None = None
    """The user's turn that has the prompt."""
    text: str | None = None
    """A built-in prompt, where no turn has it."""
    wish_id: int | None = None
    hint: str | None = None
    """The user's words on this very prompt; None for an anchor."""
    is_variant: bool = False
    """Answer another request that begins like the turn's, where the turn has one."""

    @property
    def place(self) -> str:
        """The prompt's name, by which its use is counted."""
        return self.turn_id or self.text or ""


@dataclass(slots=True)
class AnchorUse:
    """Use of prompts as anchors, by the prompt's name."""

    times: Counter[str] = field(default_factory=Counter)
    leaks: dict[str, float] = field(default_factory=dict)
    """Distance of the newest reply from the base, in nats a token."""

    def add(self, place: str, leak: float | None) -> None:
        self.times[place] += 1
        if leak is not None:
            self.leaks[place] = leak

    def choice(self, places: Sequence[str], number: int) -> str:
        """Return the prompt of anchor `number` of an update: by turns the farthest from the base, the least used."""
        if number % 2 and (known := [place for place in places if self.leaks.get(place, 0.0) > 0]):
            return max(known, key=self.leaks.__getitem__)
        return min(places, key=self.times.__getitem__)

    def only(self, places: Collection[str]) -> "AnchorUse":
        """Return a copy without the prompts that are gone."""
        times = Counter({place: n for place, n in self.times.items() if place in places})
        return AnchorUse(times, {place: leak for place, leak in self.leaks.items() if place in places})


def plan(
    wishes: Sequence[Wish],
    anchors: Mapping[Owner, Sequence[str]],
    *,
    replies: int,
    anchor_share: float,
    anchored: AnchorUse,
    variant_share: float = 0.0,
    share_of: Callable[[str], float | None] = lambda _: None,
) -> list[Exercise]:
    """Return the exercises of one update, `replies` at most; an empty list when no wish has a prompt.

    wishes: the active ones. anchors: uncorrected turns of each owner, the best first. anchored: their use so far.
    variant_share: share of each prompt's replies that answer variants of it.
    share_of: largest share of the replies that a user may have, of the user's wishes and anchors; None: all of them.
    """
    rehearsed = [wish for wish in wishes if wish.practised_sources]
    if not rehearsed:
        return []
    shares = {wish.user: share_of(wish.user) for wish in rehearsed}
    most = {user: replies if share is None else max(1, int(replies * share)) for user, share in shares.items()}
    # A limited user's wishes leave room for the anchors that come with them.
    room = {user: n if shares[user] is None else max(1, round(n * (1 - anchor_share))) for user, n in most.items()}
    wished = _open_first(rehearsed, max(1, replies - round(replies * anchor_share)), room)
    local = [one for one in wished if not _is_general(one, rehearsed)]
    # In proportion to the wishes that stay where they were asked; the room of the others is theirs.
    count = min(replies - len(wished), round(len(local) * anchor_share / (1 - anchor_share)))
    general = [wish for wish in rehearsed if wish.is_general]
    owners = [one.owner for one in local]
    taken = Counter(user for user, _ in [*(one.owner for one in wished), *_in_turn(owners, count)])
    room = {user: n - taken[user] for user, n in most.items()}
    wished += _open_first(general or rehearsed, replies - len(wished) - count, room, after=wished)
    return _varied(wished, rehearsed, variant_share) + _anchors(owners, anchors, count, anchored)


def _varied(exercises: Sequence[Exercise], wishes: Sequence[Wish], share: float) -> list[Exercise]:
    """Mark `share` of the exercises of each prompt as variants, evenly over its practice so far; the own one first."""
    done = Counter({(wish.wish_id, one.turn_id): one.practised for wish in wishes for one in wish.sources})
    found = []
    for exercise in exercises:
        key = exercise.wish_id or 0, exercise.turn_id or ""
        found.append(replace(exercise, is_variant=int((done[key] + 1) * share) > int(done[key] * share)))
        done[key] += 1
    return found


def _in_turn(owners: Sequence[Owner], count: int) -> list[Owner]:
    return [owners[number % len(owners)] for number in range(count)]


def _is_general(exercise: Exercise, wishes: Sequence[Wish]) -> bool:
    return any(wish.wish_id == exercise.wish_id and wish.is_general for wish in wishes)


def _open_first(
    wishes: Sequence[Wish], count: int, room: dict[str, int], after: Sequence[Exercise] = ()
) -> list[Exercise]:
    """Return `count` exercises, of which wishes that rest have `REHEARSED`, where others are open.

    room: by user, how many there may still be; it shrinks with each. Without room there are fewer than `count`.
    """
    open_ones, resting = [one for one in wishes if one.is_open], [one for one in wishes if not one.is_open]
    if not open_ones or not resting:
        return _of_wishes(wishes, count, room, after)
    # At most what equal places would be: of many open wishes none may have less than one that rests.
    rehearsed = min(int(count * REHEARSED), count * len(resting) // len(wishes))
    if not rehearsed:
        return _of_wishes(wishes, count, room, after)
    return [
        *_of_wishes(open_ones, count - rehearsed, room, after),
        *_of_wishes(resting, rehearsed, room, after),
    ]


def _of_wishes(
    wishes: Sequence[Wish], count: int, room: dict[str, int], after: Sequence[Exercise] = ()
) -> list[Exercise]:
    """Return `count` exercises, round robin over the wishes and over the prompts of each, the least practised first."""
    turns = Counter(one.wish_id for one in after)
    prompts = Counter((one.wish_id, one.turn_id) for one in after)
    totals = {wish.wish_id: sum(source.practised for source in wish.sources) for wish in wishes}
    found: list[Exercise] = []
    for _ in range(count):
        fitting = [one for one in wishes if room[one.user] > 0]
        if not fitting:
            break
        wish = min(fitting, key=lambda one: (turns[one.wish_id], totals[one.wish_id], one.wish_id))
        wish_id = wish.wish_id
        room[wish.user] -= 1
        source = min(wish.practised_sources, key=lambda one: prompts[wish_id, one.turn_id] + one.practised)
        turns[wish_id] += 1
        prompts[wish_id, source.turn_id] += 1
        owner = (wish.user, wish.policy)
        found.append(Exercise(PracticeKind.WISH, owner, source.turn_id, None, wish_id, source.text))
    return found


def _anchors(
    owners: Sequence[Owner], turns: Mapping[Owner, Sequence[str]], count: int, anchored: AnchorUse
) -> list[Exercise]:
    """Return `count` anchors for these owners in turn: their own turns, each once, then built-in prompts."""
    used = AnchorUse(Counter(anchored.times), anchored.leaks)
    taken: set[str] = set()
    found: list[Exercise] = []
    for owner in _in_turn(owners, count):
        own = [turn_id for turn_id in turns.get(owner, ()) if turn_id not in taken]
        built_in = [text for text in BUILT_IN if text not in taken] or list(BUILT_IN)
        # By turns for each owner, and over updates: a batch may have one anchor of his alone.
        so_far = sum(used.times[place] for place in (turns[owner] if own else BUILT_IN))
        place = used.choice(own or built_in, so_far)
        turn_id, text = (place, None) if own else (None, place)
        found.append(Exercise(PracticeKind.ANCHOR, owner, turn_id, text))
        taken.add(place)
        used.times[place] += 1
    return found
