"""Credit of the combined method: the binary term and the distillation term, of those that are there."""

from collections.abc import Sequence


def combined(
    tokens: int,
    binary: Sequence[float] | None,
    distilled: Sequence[float] | None,
    *,
    binary_weight: float,
    opd_weight: float,
) -> list[float]:
    """A_t = w_binary · (r − b) + w_opd · clip(gap_t, ±c) for each of `tokens` tokens (OpenClaw-RL, arXiv:2603.10165).

    A term that is absent is None and adds nothing; there is no number that stands for it. Both may be: the distillation
    term of a top-k is a loss of its own and no advantage.
    """
    credit = [0.0] * tokens
    for term, weight in ((binary, binary_weight), (distilled, opd_weight)):
        if term is not None:
            credit = [sofar + weight * value for sofar, value in zip(credit, term, strict=True)]
    return credit
