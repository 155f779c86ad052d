"""State of practice for people: the status line, the log and the metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from openclaw_rl.types import Wish


@dataclass(frozen=True, slots=True)
class PracticeStatus:
    waits: str | None = None
    """The reason why nothing is practised now; None: an update is being made."""
    wishes: int = 0
    """Active wishes."""
    still_open: int = 0
    """Those of them that still need practice of their own."""
    update: int = 0
    """The update that is being made: one more than the most practised open wish has had."""
    learned: float | None = None
    """Mean learned share of the active wishes, as a part of the aim, in [0, 1]; None: not measured."""

    @classmethod
    def of(cls, wishes: Sequence[Wish], *, aim: float, waits: str | None = None) -> Self:
        shares = [min(max(wish.learned_share / aim, 0.0), 1.0) for wish in wishes if wish.learned_share is not None]
        still_open = [wish for wish in wishes if wish.is_open]
        return cls(
            waits=waits,
            wishes=len(wishes),
            still_open=len(still_open),
            update=1 + max((wish.updates for wish in still_open), default=0),
            learned=sum(shares) / len(shares) if shares else None,
        )

    def waiting(self, reason: str | None) -> Self:
        return replace(self, waits=reason)

    def figures(self) -> dict[str, float]:
        """Return the figures, for the metrics."""
        found: dict[str, float] = {"wishes": self.wishes, "open": self.still_open, "update": self.update}
        return found if self.learned is None else found | {"learned": round(self.learned, 3)}

    def fields(self) -> dict[str, int | str]:
        """Return the fields of a log line."""
        share = {} if self.learned is None else {"learned": percent(self.learned)}
        return {"wishes": self.wishes, "update": self.update, **share}

    def line(self) -> str:
        """Return one line for people."""
        if not self.wishes:
            return f"practice: {self.waits or 'there is no wish'}"
        what = f"{self.wishes} {'wish' if self.wishes == 1 else 'wishes'}"
        share = "" if self.learned is None else f", learned {percent(self.learned)}"
        if self.still_open:
            doing = f"practising {what}, update {self.update}{share}"
            return doing + ("" if self.waits is None else f" ({self.waits})")
        return f"practice: {what}{share}; {self.waits or 'resting'}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
