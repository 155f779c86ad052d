"""The distillation term of one turn: a hint out of hindsight, and what the teacher says of the reply when it reads it.

`hindsight` is what `method.score` of OPD and of Combined call. It never raises for a judge, teacher or engine that
fails: the term is then absent, with a counted reason, and whatever reward the turn has stays.
"""

from dataclasses import replace

from openclaw_opd.hints import find_hints
from openclaw_opd.teacher import score_hints
from openclaw_opd.terms import Absent, Hindsight
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.types import JudgedTurn

__all__ = ["Absent", "Hindsight", "hindsight"]


async def hindsight(judged: JudgedTurn, tools: ScoringTools) -> Hindsight:
    """The turn's distillation term, or why there is none. For turns that can be trained on: the caller looks first."""
    found = await find_hints(judged, tools)
    if found.absent is Absent.JUDGE_FAILED:
        tools.meters.failed("hint judge", found.detail)
    elif found.source == "judge":
        tools.meters.worked("hint judge")
    if found.absent is not None:
        answer = Hindsight(found.absent, found.detail)
    else:
        answer = await score_hints(judged, found, tools)
    answer = replace(answer, source=found.source or None)
    tools.meters.count(f"hindsight_{answer.absent or 'scored'}")
    return answer
