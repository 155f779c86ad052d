"""Layout of a batch for forward passes: rows of ids, and micro-batches of rows under a token budget.

Promises: every trained token of every sample appears exactly once, at a position that sees its own prefix only. A row's
numbers are those it has alone.

Rows are padded on the right, or packed one behind the other. Under a causal model padding after the end changes no
position before it, so no attention mask is needed. Packed rows are kept apart by the attention (`packed_attention`),
and waste no computation. Turns that extend each other share one row: one turn's prompt and response are the beginning
of another's. So a long conversation is computed once and not once a turn.

Leaves to others: the model, and every division.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.types import Ids, Sample


@dataclass(frozen=True, slots=True)
class Piece:
    """One sample's place in a row: its response is `row.ids[start : start + length]`."""

    index: int
    """The sample's index in the batch."""
    start: int
    length: int
    trained: tuple[int, ...]
    """Offsets k in [0, length) whose loss mask is True; token k is predicted at position start + k - 1."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Row:
    """Ids of one sequence, and the samples in it."""

    ids: Ids
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, longest first."""

    rows: tuple[Row, ...]
    is_packed: bool = False

    @property
    def lengths(self) -> list[int]:
        """Positions of each row that are read: its last id is only predicted."""
        return [len(row.ids) - 1 for row in self.rows]

    @property
    def width(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of computed positions, padding included."""
        return sum(self.lengths) if self.is_packed else len(self.rows) * self.width

    @property
    def pieces(self) -> list[Piece]:
        return [piece for row in self.rows for piece in row.pieces]


def piece_of(sample: Sample, index: int, temperature: float | None = None) -> Piece:
    """Return the piece of a sample that is a row of its own; `temperature` replaces the sample's."""
    return Piece(
        index=index,
        start=len(sample.prompt_ids),
        length=len(sample.response_ids),
        trained=tuple(k for k, trained in enumerate(sample.loss_mask) if trained),
        temperature=sample.temperature if temperature is None else temperature,
    )


def rows_of(samples: Sequence[Sample], *, share_prefixes: bool = True) -> list[Row]:
    """Return the rows, longest first. A sample whose ids begin another row's ids joins that row."""
    rows: list[tuple[Ids, list[Piece]]] = []
    for index in sorted(range(len(samples)), key=lambda i: (-_length(samples[i]), i)):
        ids, piece = samples[index].prompt_ids + samples[index].response_ids, piece_of(samples[index], index)
        home = next((pieces for row, pieces in rows if share_prefixes and row[: len(ids)] == ids), None)
        if home is None:
            rows.append((ids, [piece]))
        else:
            home.append(piece)
    return [Row(ids, tuple(pieces)) for ids, pieces in rows]


def micro_batches(rows: Sequence[Row], token_budget: int, *, packed: bool = False) -> list[MicroBatch]:
    """Cut rows, longest first, into passes of at most `token_budget` computed positions; a longer row goes alone."""
    # A packed row goes to the first pass that has room for it, which leaves few passes half empty.
    cut: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: -len(r.ids)):
        for part in cut if packed else cut[-1:]:
            if MicroBatch((*part, row), packed).tokens <= token_budget:
                part.append(row)
                break
        else:
            cut.append([row])
    return [MicroBatch(tuple(part), packed) for part in cut]


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)
