"""What a version must pass before, or as soon as, it serves: finite, not too far from its parent and the base, the
owner's canaries no worse, and the engine's numbers are the trainer's.

An engine that gives no numbers (NaN, or none) for a version, twice, and gives them for the one that serves, is not at
fault: the version is refused. One that gives none for what serves either is: AlignmentError, and the gate is asked
again later. Full weights take the place of what serves: there the engine is asked before they do (`needs_numbers`).

Leaves to others: its files (`finite_weights`); what becomes of a version that fails (`publication`, `pushed_weights`).

Whether every weight of a version is a number, read from its files without torch.

Looks at the *.safetensors of a folder, an adapter's EMA teacher below it included, and tells NaN and infinity by the
exponent bits, so that bfloat16 and fp8, which numpy does not know, need no conversion. Integers are always numbers.
Memory: one block, whatever the file.

Raises nothing, whatever a file holds. Leaves to others: a file that cannot be read, is no safetensors, or is cut short
(the engine refuses it when it loads), dtypes that no trainer of ours writes (the FNUZ forms of fp8), and numbers that
are finite and useless (the gate).
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import structlog

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import AlignmentError, EngineError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.canary import Canary, CanaryScore, Score
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.step_report import StepProbe, StepReport
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.types import Ids, LogProbs, Version, WeightKind

log = structlog.get_logger()

BASE_KL_ALERT = 0.8


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate measured; KL in nats per token, None where there was nothing to measure on."""

    step_kl: float | None
    base_kl: float | None
    refusal: str | None = None
    canary_drop: float | None = None
    """Nats per token that the owner's canaries lost against the base."""


class _NoNumbers(Exception):
    """Under the version that is tested, and it is the version."""


class Gate:
    def __init__(
        self,
        ledger: Ledger,
        serving: VersionAdmission,
        score: Score,
        settings: PublisherSettings,
        *,
        canaries: Sequence[Canary] = (),
        alert: Alert = log.error,
    ) -> None:
        self._ledger, self._serving, self._score, self._settings = ledger, serving, score, settings
        self._canaries, self._alert = CanaryScore(canaries, self._canary_numbers), alert
        self.last: GateResult | None = None

    async def check(self, version: Version, report: StepReport) -> GateResult:
        self.last = await self._measure(version, report)
        return self.last

    async def _measure(self, version: Version, report: StepReport) -> GateResult:
        if not all(math.isfinite(value) for value in report.metrics.values()):
            return GateResult(None, None, "the step's metrics are not finite")
        serving = self._serving.current
        parents = {row.weight_version: row.parent for row in await self._ledger.versions(since=serving)}
        steps, ancestor = 0, version.weight_version
        while ancestor != serving and (parent := parents.get(ancestor)) is not None:
            steps, ancestor = steps + 1, parent
        if version.kind is WeightKind.FULL:  # the engine holds one set of weights: the trainer's own figures count
            step_kl, base_kl, steps, canary_drop = _probed_kl(report.probes), None, 1, None
        else:
            try:
                step_kl = await self._kl(serving, version.weight_version)
                base_kl = step_kl if serving == 0 else await self._kl(0, version.weight_version)
                canary_drop = await self._canaries.drop(version.weight_version)
            except _NoNumbers as error:
                return GateResult(None, None, str(error))
        refusal = None
        # The serving version stands for the parent when versions between were superseded: each of their steps has its
        # own allowance.
        allowed = self._settings.max_step_kl * max(steps, 1)
        if step_kl is not None and not step_kl <= allowed:
            refusal = f"KL(v{serving} || v{version.weight_version}) = {step_kl:.3f} > {allowed:g}"
        elif base_kl is not None and not base_kl <= self._settings.max_base_kl:
            refusal = f"KL(base || v{version.weight_version}) = {base_kl:.3f} > {self._settings.max_base_kl:g}"
        elif canary_drop is not None and not canary_drop <= self._settings.max_canary_drop:
            refusal = f"canaries lost {canary_drop:.3f} nats per token > {self._settings.max_canary_drop:g}"
        elif base_kl is not None and base_kl > BASE_KL_ALERT * self._settings.max_base_kl:
            limit = self._settings.max_base_kl
            self._alert("base_kl_high", weight_version=version.weight_version, base_kl=base_kl, limit=limit)
        return GateResult(step_kl, base_kl, refusal, canary_drop)

    async def _kl(self, a: int, b: int) -> float | None:
        """Mean over tokens of log π_a − log π_b on stored replies that a sampled (an unbiased estimate of KL(a ‖
        b)).
        """
        replies = await self._ledger.recent_replies(sampled_by=a, limit=4 * self._settings.gate_replies)
        total, count, budget = 0.0, 0, self._settings.gate_prompt_tokens
        for prompt_ids, response_ids in sorted(replies, key=lambda reply: len(reply[0]))[: self._settings.gate_replies]:
            budget -= len(prompt_ids)
            if count and budget < 0:
                break
            forced = response_ids[: self._settings.gate_tokens]
            under_a, under_b = await self._finite(a, prompt_ids, forced), await self._tested(b, prompt_ids, forced)
            total += math.fsum(under_a) - math.fsum(under_b)
            count += len(forced)
        return total / count if count else None

    async def self_test(self, number: int, probes: Sequence[StepProbe]) -> str | None:
        """Whether the engine's numbers are the trainer's, or numbers at all where the trainer sent none. A reason when
        they are not."""
        try:
            return await self._probe(number, probes)
        except _NoNumbers as error:
            return f"self-test: {error}"

    async def needs_numbers(self, probes: Sequence[StepProbe]) -> None:
        """Raises EngineError when the engine has no numbers for the weights it holds: whatever came in their place
        would be condemned for that. Nothing is asked behind a shut gate: what a push that broke off has left is mended
        by the next."""
        if not self._serving.is_open:
            return
        try:
            if probes := _with_ids(probes):
                probe = probes[0]
                await self._finite(self._serving.current, tuple(probe.prompt_ids), tuple(probe.response_ids))
            elif reply := await self._short_reply():
                await self._finite(self._serving.current, *reply)
        except AlignmentError as error:
            raise EngineError(f"the engine has no numbers at all, and nothing can be tested: {error}") from error

    async def _probe(self, number: int, probes: Sequence[StepProbe]) -> str | None:
        probes = _with_ids(probes)
        if not probes and (reply := await self._short_reply()):
            await self._tested(number, *reply)
        for probe in probes:
            ids = tuple(probe.response_ids)
            engine = await self._tested(number, tuple(probe.prompt_ids), ids)
            noise = _mean_abs(engine, probe.log_probs)
            if not noise <= self._settings.self_test_tolerance:
                return f"self-test: engine and trainer differ by {noise:.3g} nats per token"
            shift = _mean_abs(probe.log_probs, probe.parent_log_probs)
            from_parent = _mean_abs(engine, probe.parent_log_probs)
            # Only a shift well above the noise proves that the new weights, not the parent's, are what answers.
            if shift > 3 * self._settings.self_test_tolerance and from_parent < shift / 2:
                return f"self-test: the engine answers like the parent ({from_parent:.3g} of {shift:.3g} nats a token)"
        return None

    async def _short_reply(self) -> tuple[Ids, Ids] | None:
        """A stored prompt and the start of its reply."""
        replies = await self._ledger.recent_replies(sampled_by=None, limit=self._settings.gate_replies)
        for prompt_ids, response_ids in sorted(replies, key=lambda reply: len(reply[0])):
            return prompt_ids, response_ids[: self._settings.gate_tokens]
        return None

    # -- the engine's numbers ------------------------------------------------------------------------------------------

    async def _finite(self, number: int, prompt_ids: Ids, ids: Ids) -> LogProbs:
        log_probs = await self._score(number, prompt_ids, ids)
        if not all(map(math.isfinite, log_probs)):
            raise AlignmentError(f"the engine's log-probs under version {number} are not finite")
        return log_probs

    async def _tested(self, number: int, prompt_ids: Ids, ids: Ids) -> LogProbs:
        """Under the version at the gate. Raises _NoNumbers when it is the version that has none."""
        try:
            return await self._finite(number, prompt_ids, ids)
        except AlignmentError:
            if (serving := self._serving.current) != number:
                await self._finite(serving, prompt_ids, ids)
        try:
            return await self._finite(number, prompt_ids, ids)
        except AlignmentError as error:
            raise _NoNumbers(f"the engine has no numbers for version {number}: {error}") from error

    async def _canary_numbers(self, number: int, prompt_ids: Ids, ids: Ids) -> LogProbs:
        return await (self._finite if number == 0 else self._tested)(number, prompt_ids, ids)


def _with_ids(probes: Sequence[StepProbe]) -> list[StepProbe]:
    """Those that the engine can be asked about: a forgotten session's have figures alone."""
    return [probe for probe in probes if probe.response_ids]


def _probed_kl(probes: Sequence[StepProbe]) -> float | None:
    """KL(parent || new) by the trainer's own figures on its probes; None without any."""
    terms = [a - b for probe in probes for a, b in zip(probe.parent_log_probs, probe.log_probs, strict=True)]
    return math.fsum(terms) / len(terms) if terms else None


def _mean_abs(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean |a − b|; infinite when their lengths differ, so that it never passes a test."""
    if len(a) != len(b) or not a:
        return math.inf
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


_BLOCK = 1 << 22
_EXPONENT: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "C64": ("<u4", 0x7F80_0000),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""The bits that are all set in what is no finite number. F8_E4M3 has no infinity, and one NaN of each sign."""


def not_finite(folder: Path) -> str | None:
    """The first tensor that holds NaN or infinity, in words; None when all are finite. Blocks: call it in a thread."""
    for file in sorted(folder.rglob("*.safetensors")):
        with suppress(OSError):  # of this file: the next is looked at all the same
            if (name := _first_in(file)) is not None:
                return f"{file.relative_to(folder).as_posix()}: {name} holds what is not a finite number"
    return None


def _first_in(file: Path) -> str | None:
    with file.open("rb") as stream:
        for name, dtype, begin, end in _tensors(stream, file.stat().st_size):
            kind, bits = _EXPONENT[dtype]
            stream.seek(begin)
            for at in range(begin, end, _BLOCK):
                block = stream.read(min(_BLOCK, end - at))
                values = np.frombuffer(block[: len(block) - len(block) % np.dtype(kind).itemsize], kind)
                if bool(((values & bits) == bits).any()):
                    return name
    return None


def _tensors(stream: BinaryIO, file_size: int) -> Iterator[tuple[str, str, int, int]]:
    """(name, dtype, first byte, end) of the tensors to look at, as they lie in the file; none where the header is not
    one."""
    size = int.from_bytes(stream.read(8), "little")
    if size > file_size - 8:
        return
    try:
        header = json.loads(stream.read(size))
    except (ValueError, RecursionError):
        return
    found = []
    for name, entry in header.items() if isinstance(header, dict) else ():
        match entry:
            case {"dtype": str(dtype), "data_offsets": [int(begin), int(end)]} if dtype in _EXPONENT:
                if 0 <= begin <= end <= file_size - 8 - size:
                    found.append((8 + size + begin, 8 + size + end, dtype, name))
    for begin, end, dtype, name in sorted(found):
        yield name, dtype, begin, end
