"""How long the workers wait: for news, after a failure, for the ledger."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the loops wait; tests shorten it."""

    poll_s: float = 10.0
    """Between two looks at the ledger when nothing wakes the loop."""
    gather_s: float = 0.05
    """From the wake of an idle loop to its look: what wakes it is a chat's request, whose first token goes first."""
    first_rest_s: float = 5.0
    """A turn's pause after its first failure; it doubles with each."""
    longest_rest_s: float = 600.0
    ledger_pause_s: float = 1.0
    """After the ledger failed; it doubles up to `longest_ledger_pause_s`."""
    longest_ledger_pause_s: float = 30.0
    longest_outage_rest_s: float = 30.0
    """Between two tries while everything fails."""


USUAL_PACE = Pace()
