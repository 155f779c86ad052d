"""The gate: tests that a version must pass before, or as soon as, it serves.

Four tests: its weights are finite, its KL to the parent and to the base is bounded, the owner's canaries lost little,
and the engine's log-probs are the trainer's.

The engine may give no log-probs (NaN, or no values) for a version, twice. If it gives them for the serving version, the
new version is refused. If it does not, the engine is at fault: AlignmentError, and the gate is asked again later. Full
weights replace the serving ones, so `needs_numbers` asks the engine before the swap.

`not_finite` reads the files without torch: the *.safetensors of a folder, with an adapter's EMA teacher below it. It
finds NaN and infinity by the exponent bits, because numpy knows neither bfloat16 nor fp8. It needs the memory of one
block, and raises no exception for a broken file: the engine refuses such a file when it loads it. The FNUZ forms of
fp8, which no trainer of ours writes, are not read.

Leaves to others: what follows for a version that fails (`publication`, `weight_push`).
"""

import json
import math
import time
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
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import Ids, LogProbs, StepProbe, StepReport, Version, WeightKind

log = structlog.get_logger()

BASE_KL_ALERT = 0.8


@dataclass(frozen=True, slots=True)
class GateResult:
    """The gate's measurements; KL in nats per token, None without replies to measure on."""

    step_kl: float | None
    base_kl: float | None
    refusal: str | None = None
    canary_drop: float | None = None
    """Nats per token that the owner's canaries lost against the base."""


class _NoNumbers(Exception):
    """The engine has no log-probs for the tested version, and has them for the serving one."""


class Gate:
    """Tests one version at a time on the engine."""

    def __init__(
        self,
        ledger: Ledger,
        serving: VersionAdmission,
        score: Score,
        settings: PublisherSettings,
        *,
        canaries: Sequence[Canary] = (),
        alert: Alert = log.error,
        health: Health | None = None,
    ) -> None:
        self._ledger, self._serving, self._score, self._settings = ledger, serving, score, settings
        self._health = health or Health()
        self._canaries, self._alert = CanaryScore(canaries, self._canary_numbers), alert
        self.last: GateResult | None = None

    async def check(self, version: Version, report: StepReport) -> GateResult:
        started = time.perf_counter()
        self.last = await self._measure(version, report)
        self._health.gate.observe(time.perf_counter() - started)
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
        # The serving version replaces the parent when versions between were superseded: each of their steps has its
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
        """Return the mean over tokens of log π_a − log π_b on stored replies that a sampled.

        That is an unbiased estimate of KL(a ‖ b).
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
        """Return a reason if the engine's log-probs are not the trainer's; None if they are.

        Without probes of the trainer, finite log-probs pass.
        """
        try:
            return await self._probe(number, probes)
        except _NoNumbers as error:
            return f"self-test: {error}"

    async def needs_numbers(self, probes: Sequence[StepProbe]) -> None:
        """Raise EngineError if the engine has no log-probs for the weights that it holds."""
        # The next version would be refused for the engine's fault. A held engine is not asked: a push that failed may
        # have left half a version there, and the next push replaces it.
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
        """Return a stored prompt and the start of its reply."""
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
        """Return log-probs under the tested version. Raises _NoNumbers if the version is at fault."""
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
    """Return the probes with ids; those of a forgotten session have figures alone."""
    return [probe for probe in probes if probe.response_ids]


def _probed_kl(probes: Sequence[StepProbe]) -> float | None:
    """Return KL(parent || new) by the trainer's own figures on its probes; None without probes."""
    terms = [a - b for probe in probes for a, b in zip(probe.parent_log_probs, probe.log_probs, strict=True)]
    return math.fsum(terms) / len(terms) if terms else None


def _mean_abs(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean |a − b|; infinite when the lengths differ, so that no test passes."""
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
"""Integer type and the bits that are all set in NaN and infinity.

F8_E4M3 has no infinity, and one NaN of each sign.
"""


def not_finite(folder: Path) -> str | None:
    """Name the first tensor that holds NaN or infinity; None if all are finite. Blocks: call it in a thread."""
    for file in sorted(folder.rglob("*.safetensors")):
        with suppress(OSError):  # of this file: the next is still read
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
    """Yield (name, dtype, first byte, end) of the floating-point tensors, in file order; no tensor of a bad header."""
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
