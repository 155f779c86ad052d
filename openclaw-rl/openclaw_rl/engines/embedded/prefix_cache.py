"""Prefix KV cache: sequences kept after their request, so that the next turn computes only what is new.

A request continues the held sequence with the longest common prefix under its key. When that sequence is idle and would
lose at most `spare` tokens, it is taken over; else the common part is copied, also from a sequence that is running.
Idle sequences over the token budget are forgotten, least recently used first. Keys (`extra_key`, adapter) never share.
Used by the model thread alone.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from openclaw_rl.engines.embedded.runner import KV, Adapter, Runner

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class CacheKey:
    extra_key: str | None
    adapter: Adapter | None
    """By identity: another load of the same name is another adapter."""


@dataclass(slots=True, eq=False)
class Sequence:
    key: CacheKey
    kv: KV
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values `kv` holds."""
    is_busy: bool = True
    last_used: int = 0


def common_prefix(a: Tokens[int], b: Tokens[int]) -> int:
    """How many leading tokens are equal."""
    end, at = min(len(a), len(b)), 0
    while at < end and a[at : at + _BLOCK] == b[at : at + _BLOCK]:
        at += _BLOCK
    while at < end and a[at] == b[at]:
        at += 1
    return min(at, end)


class PrefixCache:
    def __init__(self, runner: Runner, *, budget: int, spare: int) -> None:
        self._runner, self._budget, self._spare = runner, budget, spare
        self._held: dict[CacheKey, list[Sequence]] = {}
        self._clock = 0

    @property
    def idle_tokens(self) -> int:
        return sum(len(s.tokens) for held in self._held.values() for s in held if not s.is_busy)

    def take(self, key: CacheKey, tokens: list[int], limit: int) -> Sequence:
        """A busy sequence that holds as many of the first `limit` tokens as the cache knows."""
        best, matched = self._longest(key, tokens, limit)
        if best is None or matched == 0:
            found = Sequence(key, self._runner.new_kv())
            self._held.setdefault(key, []).append(found)
        elif not best.is_busy and len(best.tokens) - matched <= self._spare:
            self._runner.truncate_kv(best.kv, matched)
            del best.tokens[matched:]
            found = best
        else:
            found = Sequence(key, self._runner.copy_kv(best.kv, matched), tokens[:matched])
            self._held[key].append(found)
            best.last_used = self._tick()
        found.is_busy = True
        found.last_used = self._tick()
        return found

    def give_back(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The sequence runs no longer: keep it for a later request, or forget it."""
        sequence.is_busy = False
        sequence.last_used = self._tick()
        if not keep or not self._runner.can_share or not sequence.tokens:
            self._forget(sequence)
        self._evict()

    def clear(self, *, adapter: Adapter | None = None) -> None:
        """Forget what is idle: all of it, or one adapter's."""
        for held in list(self._held.values()):
            for sequence in list(held):
                if not sequence.is_busy and (adapter is None or sequence.key.adapter is adapter):
                    self._forget(sequence)

    def _longest(self, key: CacheKey, tokens: list[int], limit: int) -> tuple[Sequence | None, int]:
        if not self._runner.can_share:
            return None, 0
        best: Sequence | None = None
        best_rank = (0, False)
        for sequence in self._held.get(key, ()):
            matched = min(common_prefix(sequence.tokens, tokens), limit)
            can_take = not sequence.is_busy and len(sequence.tokens) - matched <= self._spare
            if (matched, can_take) > best_rank:
                best, best_rank = sequence, (matched, can_take)
        return best, best_rank[0]

    def _forget(self, sequence: Sequence) -> None:
        held = self._held[sequence.key]
        held.remove(sequence)
        if not held:
            del self._held[sequence.key]

    def _evict(self) -> None:
        idle = [s for held in self._held.values() for s in held if not s.is_busy]
        total = sum(len(s.tokens) for s in idle)
        for sequence in sorted(idle, key=lambda s: s.last_used):
            if total <= self._budget:
                return
            total -= len(sequence.tokens)
            self._forget(sequence)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
