"""Layout of a batch for forward passes: rows of ids, and micro-batches of rows under a token budget.

Promises: every trained token of every sample appears exactly once, at a position that sees its own prefix only. A row's
numbers are those it has alone.

Rows are padded on the right, or packed one behind the other. Under a causal model padding after the end changes no
position before it, so no attention mask is needed. Packed rows are kept apart by the attention (`packed_attention`),
and waste no computation. Turns that extend each other share one row: one turn's prompt and response are the beginning
of another's. So a long conversation is computed once and not once a turn.

Packed rows may also share their stems. Rows that begin alike (one system prompt, several replies to one question) are
then a tree: a pass computes each beginning once, and every row behind it reads its keys and values.

Leaves to others: the model, and every division.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    pictures: tuple[str, ...] = ()
    """Digests of the pictures whose places are among the ids, in order."""


_LEAST_STEM = 8
"""Tokens that rows share at least: for fewer, reading another row's keys costs more than the computation."""
_MOST_BUDGETS = 8
"""Largest pass over the budget, in budgets: one activation per layer of so many tokens, and all of one layer, take less
memory than all activations of one budget."""
_RECOMPUTED = 1 / 3
"""Work of a position over the budget, whose layers are computed again in backward, beside that of the position."""


@dataclass(frozen=True, slots=True)
class Stem:
    """The beginning of a row that an earlier row of the pass computes."""

    row: int
    length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, longest first."""

    rows: tuple[Row, ...]
    is_packed: bool = False
    shares_stems: bool = False
    """Packed rows are computed from where they differ from the rows before."""
    stems: tuple[Stem | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        stems = (_stem(self.rows[:at], row) if self.shares_stems else None for at, row in enumerate(self.rows))
        object.__setattr__(self, "stems", tuple(stems))

    @property
    def starts(self) -> list[int]:
        """Positions of each row that another row computes: its stem's."""
        return [0 if stem is None else stem.length for stem in self.stems]

    @property
    def lengths(self) -> list[int]:
        """Positions of each row that are computed for it: its last id is only predicted."""
        return [len(row.ids) - 1 - start for row, start in zip(self.rows, self.starts, strict=True)]

    @property
    def places(self) -> list[list[int]]:
        """For each row the places of all its positions among those of the pass."""
        found: list[list[int]] = []
        offset = 0
        for stem, length in zip(self.stems, self.lengths, strict=True):
            before = [] if stem is None else found[stem.row][: stem.length]
            found.append([*before, *range(offset, offset + length)])
            offset += length if self.is_packed else self.width
        return found

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
    """Return the rows, longest first. A sample whose ids and pictures begin another row's joins that row."""
    rows: list[tuple[Ids, tuple[str, ...], list[Piece]]] = []
    for index in sorted(range(len(samples)), key=lambda i: (-_length(samples[i]), i)):
        sample, piece = samples[index], piece_of(samples[index], index)
        ids, seen = sample.prompt_ids + sample.response_ids, sample.pictures
        home = next(
            (
                pieces
                for row, shown, pieces in rows
                if share_prefixes and row[: len(ids)] == ids and shown[: len(seen)] == seen
            ),
            None,
        )
        if home is None:
            rows.append((ids, seen, [piece]))
        else:
            home.append(piece)
    return [Row(ids, tuple(pieces), seen) for ids, seen, pieces in rows]


def micro_batches(
    rows: Sequence[Row], token_budget: int, *, packed: bool = False, shares_stems: bool = False, most: int | None = None
) -> list[MicroBatch]:
    """Cut rows, longest first, into passes of at most `token_budget` computed positions; a longer row goes alone.

    shares_stems: of packed rows. A row then joins the pass where it costs least, which may exceed the budget, up to
    `most` positions (`_MOST_BUDGETS` budgets when None).
    """
    # A packed row goes to the first pass that has room for it, which leaves few passes half empty.
    ordered = sorted(rows, key=lambda r: -len(r.ids))
    if packed and shares_stems:
        return _trees(ordered, token_budget, most or _MOST_BUDGETS * token_budget)
    cut: list[list[Row]] = []
    for row in ordered:
        for part in cut if packed else cut[-1:]:
            if MicroBatch((*part, row), packed).tokens <= token_budget:
                part.append(row)
                break
        else:
            cut.append([row])
    return [MicroBatch(tuple(part), packed) for part in cut]


def _trees(rows: Sequence[Row], token_budget: int, most: int) -> list[MicroBatch]:
    def work(tokens: int) -> float:
        return tokens + _RECOMPUTED * max(0, tokens - token_budget)

    cut: list[list[Row]] = []
    tokens: list[int] = []
    for row in rows:
        alone = len(row.ids) - 1
        best, cost, total = len(cut), work(alone), alone
        for at, part in enumerate(cut):
            stem = _stem(part, row)
            joined = tokens[at] + alone - (0 if stem is None else stem.length)
            added = work(joined) - work(tokens[at])
            # Rows that share nothing fill a pass up, too: each pass reads all weights.
            if joined <= most and (added < cost or (best == len(cut) and added <= cost)):
                best, cost, total = at, added, joined
        if best == len(cut):
            cut.append([])
            tokens.append(0)
        cut[best].append(row)
        tokens[best] = total
    return [MicroBatch(tuple(part), True, True) for part in cut]


def _stem(before: Sequence[Row], row: Row) -> Stem | None:
    """Return the longest beginning that the row has in common with an earlier one; None for a short one."""
    shared = [_common(other.ids[:-1], row.ids[:-1]) for other in before]
    longest = max(shared, default=0)
    return Stem(shared.index(longest), longest) if longest >= _LEAST_STEM else None


def _common(a: Ids, b: Ids) -> int:
    """Return the number of equal leading ids."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)
