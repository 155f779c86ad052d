"""Arms of the practice experiment: the ways to learn from a few corrections that are compared.

An arm changes the settings we ship, the number of corrections, or the content of practice. `FAMILIES` groups the arms
by the question that they answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.learning.experiment import Variant
from openclaw_rl.settings import MethodSettings, TrainerSettings

JUDGED = "hint_source=judge,binary_weight=1,baseline=others"
"""Combined with a judge: it writes the wish in one sentence, and votes on each practice reply with the wish in view."""
NEVER = "1e6"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to learn. After one round of corrected turns, every update is practice."""

    name: str
    method: str = "combine"
    settings: str = ""
    """Changes of `trainer` and `method`: `key=value,…`."""
    corrections: int = 16
    """Turns of the round. The base fails nearly all of them."""
    replies: int = 16
    """Replies of a practice update, anchors included."""
    anchors: float = 0.0
    """Share of the replies that answer prompts which no user corrected. 0: the wish is said to be general."""
    anchor_kind: Literal["mixed", "like", "other"] = "mixed"
    has_judge: bool = True
    """A judge votes on practice replies. False: rules and the user's own words are all there is."""
    has_own_hint: bool = True
    """False: a practised prompt gets the hint of any correction."""
    in_few_words: bool = False
    """The user complains in few words ("No, shorter please.")."""
    least_relevance: float = 0.0
    """`practice.least_relevance`: a practice reply below it is left out. 0: none is."""
    variants: float = 0.5
    """`practice.variant_share`: share of a prompt's replies that answer other requests which begin like it."""
    is_live: bool = False
    """Every update learns from a round of new turns instead; no practice."""
    shift: int = 0
    """Tokens by which the teacher's log-probs are displaced: the control of a misaligned teacher."""
    stop_share: float | None = None
    """Learned share of every wish at which practice stops."""
    stop_passed: float | None = None
    """Share of an update's practice replies that meet the wish at which practice stops, where a judge votes."""
    later_conversations: int = 0
    """Conversations with feedback after the last mark, in rounds of `replies`; then the run is measured once more."""

    @property
    def later_updates(self) -> int:
        """Number of updates after the last mark: one on each round, and one of practice behind it."""
        return 2 * -(-self.later_conversations // self.replies)

    def branches(self, device: str, seed: int) -> tuple[TrainerSettings, MethodSettings]:
        return Variant.parse(f"{self.name}:{self.settings}").settings(device, seed, self.method)


def _changed(name: str, arm: Arm, settings: str = "", **fields: object) -> Arm:
    joined = ",".join(part for part in (arm.settings, settings) if part)
    return replace(arm, name=name, settings=joined, **fields)  # type: ignore[arg-type]


AGAINST = "guidance=2,neutral_hint=Thank you.,request_guidance=0.25,top_k=20"
"""The guided teacher of Combined as we ship it for the bundled model: the hint's effect is taken against neutral words,
and the request's own effect is added."""
UNJUDGED = "guidance=3,neutral_hint=Thank you.,request_guidance=0.3,top_k=20"
"""The same of OPD: no verdict helps the teacher, so its weights are larger."""
ALONE = "guidance=1,neutral_hint="
"""A guided teacher without neutral words, as published for sampling; w = 1 was the best of 0, .5, 1 and 2."""
AIM = 1.8
"""Learned share at which practice stops: `practice.stop_share` of Combined's own place, 3. OPD's place is 4: on the
server it goes on to 2.4."""
GUIDED = Arm("combined", settings=f"{JUDGED},{AGAINST}", stop_share=AIM, stop_passed=0.75)
OPD = Arm("opd", "opd", settings=f"hint_source=judge,{UNJUDGED}", stop_share=AIM)
OWN = Arm("no judge", "opd", settings=UNJUDGED, has_judge=False, stop_share=AIM)
MAIN = (GUIDED, _changed("combined, 4 corrections", GUIDED, corrections=4), OPD, OWN)
HALF = _changed("combined, half anchors", GUIDED, anchors=0.5, least_relevance=0.5)
_SHIPPED = "anchor_weight=3,forward_kl=0.5"
ANCHORED = (
    _changed("combined, half anchors of weight 3", HALF, "anchor_weight=3"),
    _changed("combined, half anchors of weight 3, half forward", HALF, _SHIPPED),
    _changed("combined, half anchors of weight 3, half forward, beta2 .9", HALF, f"{_SHIPPED},beta2=0.9"),
)
"""The server with a judge: a wish holds where it was asked."""
DAY = (
    _changed("day", HALF, "anchor_weight=3"),
    _changed("day, half forward, beta2 .9", HALF, f"{_SHIPPED},beta2=0.9"),
    _changed("day, half forward, weight 1", HALF, "forward_kl=0.5"),
    _changed("day, half forward, weight 1, quarter anchors, beta2 .9", HALF, "forward_kl=0.5,beta2=0.9", anchors=0.25),
)
"""Ways to learn wishes that come one after the other."""
DRIFT = (
    _changed(
        "combined, 4 corrections, shipped anchors",
        GUIDED,
        corrections=4,
        anchors=0.5,
        least_relevance=0.5,
        later_conversations=150,
    ),
)
"""Combined with the bundled model by its defaults; then a user who goes on to complain and to thank."""
_TOKENS = "neutral_hint=Thank you.,learning_rate=2e-4"
_ANSWERING = "top_k=20,guidance=3,request_guidance=1"
_HANDFUL = Arm(
    "handful",
    "opd",
    settings=f"{_TOKENS},guidance=3,request_guidance=0.3",
    has_judge=False,
    corrections=4,
    anchors=0.25,
    least_relevance=0.5,
)
HANDFUL = (
    _HANDFUL,
    _changed("handful, no variants", _HANDFUL, variants=0.0),
    _changed("handful, top-k 20", _HANDFUL, "top_k=20"),
    _changed("handful, w = 3, v = 1", _HANDFUL, "request_guidance=1"),
    _changed("handful, top-k 20, w = 2, v = 0.6", _HANDFUL, "top_k=20,guidance=2,request_guidance=0.6"),
    _changed("handful, top-k 20, w = 3, v = 1", _HANDFUL, _ANSWERING),
    _changed("handful, top-k 20, w = 3, v = 1, no variants", _HANDFUL, _ANSWERING, variants=0.0),
    _changed("handful, top-k 20, w = 3, v = 1, half forward", _HANDFUL, f"{_ANSWERING},forward_kl=0.5"),
)
"""OPD with the bundled model by its defaults, from four corrections in the user's own words, without a stop."""
BINARY = Arm(
    "binary, new turns",
    "binary_rl",
    settings="baseline=others,learning_rate=1e-3,kl_coef=0.1",
    is_live=True,
)
CONTROLS = (
    _changed("combined, w = 0", GUIDED, "guidance=0,request_guidance=0"),
    _changed("combined, no neutral words", GUIDED, ALONE),
    Arm("combined, new turns", settings="guidance=0", is_live=True),
    Arm("opd, new turns", "opd", settings="guidance=0", is_live=True),
    BINARY,
    Arm("combined, new turns, guided", settings=AGAINST, is_live=True),
)
"""No guidance, and what the server did before it practised: each update learns from 16 new turns of the user."""
ABLATIONS = (
    _changed("hint of any correction", OWN, has_own_hint=False),
    _changed("no variants", GUIDED, variants=0.0),
    _changed("no variants, 4 corrections", GUIDED, variants=0.0, corrections=4),
    _changed("no judge, no variants", OWN, variants=0.0),
    _changed("no judge, 4 corrections", OWN, corrections=4),
    _changed("no judge, 4 corrections, no variants", OWN, corrections=4, variants=0.0),
    _changed("w = 0.5", GUIDED, "guidance=0.5"),
    _changed("w = 1", GUIDED, "guidance=1"),
    _changed("w = 3", GUIDED, "guidance=3"),
    _changed("no TIS", GUIDED, f"tis_clip={NEVER},tis_mask={NEVER}"),
    _changed("no clip", GUIDED, f"opd_clip={NEVER},clip_low=0.999,clip_high={NEVER}"),
    _changed("rank 4", GUIDED, "rank=4,alpha=8"),
    _changed("rank 64", GUIDED, "rank=64,alpha=128"),
    _changed("8 replies an update", GUIDED, replies=8),
    _changed("rate 1e-4", GUIDED, "learning_rate=1e-4"),
    _changed("rate 1e-3", GUIDED, "learning_rate=1e-3"),
    _changed("token level", GUIDED, "top_k=0"),
    _changed("half forward KL", GUIDED, "forward_kl=0.5"),
    _changed("no guidance by the request", GUIDED, "request_guidance=0"),
    _changed("more guidance by the request", GUIDED, "request_guidance=0.5"),
    _changed("KL term .05", GUIDED, "kl_coef=0.05"),
    _changed("teacher one token late", GUIDED, shift=1),
    _changed("half anchors", GUIDED, anchors=0.5),
    _changed("half anchors of other kinds", GUIDED, anchors=0.5, anchor_kind="other"),
    _changed("1 correction", GUIDED, corrections=1),
    _changed("2 corrections", GUIDED, corrections=2),
    _changed("8 corrections", GUIDED, corrections=8),
)
JUDGED_ALONE = Arm("combined", settings=f"{JUDGED},{ALONE}")
FOUR = Arm("own words", "opd", settings=ALONE, has_judge=False, corrections=4, anchors=0.5)
"""Four corrections without a judge, half anchors."""
AGAIN = "hint_place=between"
WHOLE = (
    FOUR,
    _changed("own words, relevant alone", FOUR, least_relevance=0.5),
    _changed("own words, between", FOUR, AGAIN),
)
FEW = tuple(_changed(arm.name.replace("own", "few"), arm, in_few_words=True) for arm in WHOLE)
JUDGED_PLACES = (JUDGED_ALONE, _changed("combined, between", JUDGED_ALONE, AGAIN))
FAMILIES: Mapping[str, tuple[Arm, ...]] = {
    "main": MAIN,
    "anchored": (HALF, *ANCHORED),
    "day": DAY,
    "drift": DRIFT,
    "handful": HANDFUL,
    "controls": CONTROLS,
    "ablations": ABLATIONS,
    "places": (*WHOLE, *FEW, JUDGED_PLACES[1]),
}
ARMS = {arm.name: arm for family in FAMILIES.values() for arm in family}
