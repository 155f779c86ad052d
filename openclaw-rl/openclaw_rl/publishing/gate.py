"""The gate: tests that a version must pass before, or as soon as, it serves.

Four tests: its weights are finite, its KL to the parent and to the base is bounded, the owner's canaries lost little,
and the engine's log-probs are the trainer's. The first is `version_folders.not_finite`.

An adapter is compared with the serving version while the engine holds both (`check`). Full weights replace the serving
ones. So `before_swap` scores stored replies under the old weights, and `after_swap` scores the same replies under the
new ones, each within `publisher.gate_s`. A second engine with the base's weights (`score_base`) gives the base's
figures. A figure is None, and refuses no version, where no reply is stored or an engine cannot score.

All scores are log-probs at temperature 1, of replies that were sampled at the chat's temperature. Below 1 such replies
hold the likely tokens too often, so the KL is that of the likely tokens.

The engine may give no log-probs (NaN, or no values) for a version, twice. If it gives them for the serving version, the
new version is refused. If it does not, the engine is at fault: AlignmentError, and the gate is asked again later. Full
weights replace the serving ones, so `needs_numbers` asks the engine before the swap.

Leaves to others: what follows for a version that fails (`publication`, `weight_push`).
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import AlignmentError, EngineError, LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.canary import Canary, CanaryScore, Score, ScoreBase
from openclaw_rl.publishing.reply_scores import (
    Remembered,
    Reply,
    affordable,
    few_at_once,
    in_time,
    mean_abs,
    or_left_out,
    probed_kl,
    scored,
    with_ids,
)
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import SHARED_POLICY, Ids, LogProbs, StepProbe, StepReport, Version, VersionState, WeightKind
from openclaw_rl.types.pictures import pictures_of

log = structlog.get_logger()

BASE_KL_ALERT = 0.8
_ANCESTORS = 64
"""Versions among which the gate looks for the newest that sampled a reply."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """The gate's measurements; KL in nats per token, None without replies to measure on."""

    step_kl: float | None
    base_kl: float | None
    refusal: str | None = None
    canary_drop: float | None = None
    """Nats per token that the owner's canaries lost against the base."""


@dataclass(frozen=True, slots=True)
class BeforeSwap:
    """Stored replies, and their log-probs under the weights that full weights replace."""

    serving: int
    allowed: float
    """Largest KL of the steps from the serving version to the new one."""
    replies: tuple[tuple[Reply, float], ...] = ()
    """Replies of the serving version, each with the sum of its log-probs under that version."""
    base_replies: tuple[tuple[Reply, float], ...] = ()
    """Replies of the base, each with the sum of its log-probs under the base."""
    took_s: float = 0.0


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
        score_base: ScoreBase | None = None,
        alert: Alert = log.error,
        health: Health | None = None,
    ) -> None:
        """score_base: asks an engine that holds the base alone, for versions of full weights."""
        self._ledger, self._serving, self._score, self._settings = ledger, serving, score, settings
        self._score_base = score_base
        self._health = health or Health()
        self._canaries, self._alert = CanaryScore(canaries, self._tested), alert
        self._remembered = Remembered()
        self.last: GateResult | None = None
        self.policy = SHARED_POLICY
        """The policy of the version that is tested."""

    async def check(self, version: Version, report: StepReport) -> GateResult:
        """Test a version before it serves: of full weights only the figures that their trainer sent."""
        started, self.policy = time.perf_counter(), version.policy
        self.last = await self._measure(version, report)
        await self._record(version.weight_version, self.last)
        if version.kind is WeightKind.LORA or self.last.refusal is not None:  # else `after_swap` has the time of both
            self._health.gate.observe(time.perf_counter() - started)
        return self.last

    async def _record(self, number: int, result: GateResult) -> None:
        """Keep the measurements with the version: its page and the curves show them."""
        of = {"gate_kl_parent": result.step_kl, "gate_kl_base": result.base_kl, "gate_canary_drop": result.canary_drop}
        known = {name: value for name, value in of.items() if value is not None and math.isfinite(value)}
        if not known:
            return
        try:
            await self._ledger.record_gate(number, known)
        except LedgerError as error:  # refused weights may serve already: the refusal counts, not its figures
            log.warning("gate_not_recorded", weight_version=number, error=str(error))

    async def _measure(self, version: Version, report: StepReport) -> GateResult:
        if not all(math.isfinite(value) for value in report.metrics.values()):
            return GateResult(None, None, "the step's metrics are not finite")
        serving, number = self._current, version.weight_version
        if version.kind is WeightKind.FULL:
            return self._judged(number, serving, self._settings.max_step_kl, step_kl=probed_kl(report.probes))
        try:
            step_kl = await self._kl(serving, number)
            base_kl = await self._base_kl(serving, number, step_kl)
            await self._canaries.compare_with(self._base_numbers)
            drop = await self._canaries.drop(number)
        except _NoNumbers as error:
            return GateResult(None, None, str(error))
        self._remembered.next_gate()  # not before: a gate that is asked again finds what was prepared
        allowed = await self._allowed(serving, number)
        return self._judged(number, serving, allowed, step_kl=step_kl, base_kl=base_kl, canary_drop=drop)

    @property
    def _current(self) -> int:
        """The version that serves the policy of the tested one."""
        return self._serving.currents.get(self.policy, self._serving.current)

    async def _base_kl(self, serving: int, number: int, step_kl: float | None) -> float | None:
        """Return KL(base ‖ number) on replies that the base gave to users of this policy."""
        root = 0 if self.policy == SHARED_POLICY else await self._ledger.root(self.policy)
        if isinstance(root, Version):
            if not root.is_base:  # it began at weights of the shared policy: no reply to its user is the base's
                return None
            self._serving.name(root.weight_version, None)  # since a restart no request may have named it
            root = root.weight_version
        return step_kl if serving == root else await self._kl(root, number)

    async def _allowed(self, serving: int, number: int) -> float:
        """Return the largest KL of the steps from the serving version to this one."""
        # The serving version replaces the parent when versions between were superseded: each of their steps has its
        # own allowance.
        versions = await self._ledger.versions(since=serving, policy=self.policy)
        parents = {row.weight_version: row.parent for row in versions}
        steps, ancestor = 0, number
        while ancestor != serving and (parent := parents.get(ancestor)) is not None:
            steps, ancestor = steps + 1, parent
        return self._settings.max_step_kl * max(steps, 1)

    def _judged(
        self,
        number: int,
        serving: int,
        allowed: float,
        *,
        step_kl: float | None,
        base_kl: float | None = None,
        canary_drop: float | None = None,
    ) -> GateResult:
        """Compare the figures with their bounds. Alerts if the base's is near."""
        refusal, limit, lost = None, self._settings.max_base_kl, self._settings.max_canary_drop
        if step_kl is not None and not step_kl <= allowed:
            refusal = f"KL(v{serving} || v{number}) = {step_kl:.3f} > {allowed:g}"
        elif base_kl is not None and not base_kl <= limit:
            refusal = f"KL(base || v{number}) = {base_kl:.3f} > {limit:g}"
        elif canary_drop is not None and not canary_drop <= lost:
            refusal = f"canaries lost {canary_drop:.3f} nats per token > {lost:g}"
        elif base_kl is not None and base_kl > BASE_KL_ALERT * limit:
            self._alert("base_kl_high", weight_version=number, base_kl=base_kl, limit=limit)
        return GateResult(step_kl, base_kl, refusal, canary_drop)

    # -- full weights --------------------------------------------------------------------------------------------------

    async def before_swap(self, version: Version) -> BeforeSwap:
        """Score stored replies under the weights that `version` will replace, while chats still run on them.

        Raises EngineError if the engine has no log-probs at all: no test could follow the swap.
        """
        await self.needs_numbers(version.report.probes)
        serving = self._serving.current
        allowed = await self._allowed(serving, version.weight_version)
        if version.state is VersionState.SERVING or not self._serving.is_open:
            # The engine holds other weights than the serving version's: it was restarted, or a push failed.
            return BeforeSwap(serving, allowed)
        started, end = time.perf_counter(), self._end()
        old = partial(self._finite, serving)
        replies = await scored(old, await self._replies_of(serving), end, self._health)
        base_replies: tuple[tuple[Reply, float], ...] = ()
        if self._score_base is not None and serving != 0:
            base_replies = await scored(
                self._base_numbers, affordable(await self._stored(0), self._settings), end, self._health
            )
        # Without an engine for the base, the version that is met first takes its place.
        base = old if self._score_base is None else self._base_numbers
        await in_time(self._canaries.compare_with(base), end, "canaries")
        return BeforeSwap(serving, allowed, replies, base_replies, time.perf_counter() - started)

    async def after_swap(self, version: Version, before: BeforeSwap) -> str | None:
        """Test full weights that now serve: first their numbers, then their distance from the weights before.

        Returns the reason of a refusal.
        """
        refusal = await self.self_test(version.weight_version, version.report.probes)
        if refusal is not None or version.state is VersionState.SERVING:
            return refusal
        started = time.perf_counter()
        self.last = result = await self._compared(version, before)
        await self._record(version.weight_version, result)
        self._health.gate.observe(before.took_s + time.perf_counter() - started)
        log.info(
            "gate",
            weight_version=version.weight_version,
            parent=version.parent,
            step_kl=result.step_kl,
            base_kl=result.base_kl,
            canary_drop=result.canary_drop,
            refusal=result.refusal,
        )
        return result.refusal

    async def _compared(self, version: Version, before: BeforeSwap) -> GateResult:
        number, serving, end = version.weight_version, before.serving, self._end()
        try:
            step_kl = await self._moved(number, before.replies, end)
            base_kl = step_kl if serving == 0 else await self._moved(number, before.base_replies, end)
            drop = await in_time(self._canaries.drop(number), end, "canaries")
        except _NoNumbers as error:
            return GateResult(None, None, str(error))
        if step_kl is None:
            step_kl = probed_kl(version.report.probes)
        return self._judged(number, serving, before.allowed, step_kl=step_kl, base_kl=base_kl, canary_drop=drop)

    async def _moved(self, number: int, before: Sequence[tuple[Reply, float]], end: float) -> float | None:
        """Return the mean over tokens of log π_before − log π_number on the replies that were scored in time."""
        known = dict(before)
        after = await scored(partial(self._tested, number), list(known), end, self._health)
        lost = math.fsum(known[reply] - new for reply, new in after)
        count = sum(len(ids) for (_, ids), _ in after)
        return lost / count if count else None

    async def _replies_of(self, number: int) -> list[Reply]:
        """Return replies of a version; if it sampled none, those of its nearest ancestor that did."""
        versions = await self._ledger.versions(newest=_ANCESTORS, policy=self.policy)
        parents = {row.weight_version: row.parent for row in versions}
        ancestor: int | None = number
        while ancestor is not None:
            if stored := await self._stored(ancestor):
                return affordable(stored, self._settings)
            ancestor = parents.get(ancestor)
        return []

    def _end(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.gate_s

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def prepare(self, serving: int) -> None:
        """Score what the next gate needs of known versions. Raises EngineError, AlignmentError or TimeoutError.

        serving: a version that the caller keeps loaded.
        """
        self._remembered.next_preparation()
        for number in sorted({serving, 0}):
            replies = affordable(await self._stored(number), self._settings)
            await few_at_once([partial(self._known, number, *reply) for reply in replies])
        await self._canaries.compare_with(self._base_numbers)

    async def _kl(self, a: int, b: int) -> float | None:
        """Return the mean over tokens of log π_a − log π_b on stored replies that a sampled.

        That is an unbiased estimate of KL(a ‖ b).
        """
        replies = affordable(await self._stored(a), self._settings)
        of_each = await few_at_once([partial(self._lost, a, b, *reply) for reply in replies])
        lost = [(nats, len(ids)) for nats, (_, ids) in zip(of_each, replies, strict=True) if nats is not None]
        count = sum(tokens for _, tokens in lost)
        return math.fsum(nats for nats, _ in lost) / count if count else None

    async def _lost(self, a: int, b: int, prompt_ids: Ids, ids: Ids) -> float | None:
        """Return log π_a − log π_b of the reply. Version b is the tested one. None: the reply is left out."""
        if (under_a := await self._known(a, prompt_ids, ids)) is None:
            return None
        return math.fsum(under_a) - math.fsum(await self._tested(b, prompt_ids, ids))

    async def _known(self, number: int, prompt_ids: Ids, ids: Ids) -> LogProbs | None:
        """Return log-probs under a version that served; None: the reply's pictures fail, and it is left out."""
        found = self._remembered.of(number, prompt_ids, ids, self._finite)
        return await or_left_out(found, prompt_ids, self._health)

    async def _stored(self, number: int) -> list[Reply]:
        return await self._ledger.recent_replies(sampled_by=number, limit=4 * self._settings.gate_replies)

    # -- the engine's numbers ------------------------------------------------------------------------------------------

    async def self_test(self, number: int, probes: Sequence[StepProbe], score: Score | None = None) -> str | None:
        """Return a reason if the engine's log-probs are not the trainer's; None if they are.

        Without probes of the trainer, finite log-probs pass. score: of one engine of a pool.
        """
        try:
            return await self._probe(number, probes, score)
        except _NoNumbers as error:
            return f"self-test: {error}"

    async def needs_numbers(self, probes: Sequence[StepProbe]) -> None:
        """Raise EngineError if the engine has no log-probs for the weights that it holds."""
        # The next version would be refused for the engine's fault. A held engine is not asked: a push that failed may
        # have left half a version there, and the next push replaces it.
        if not self._serving.is_open:
            return
        try:
            if probes := with_ids(probes):
                probe = probes[0]
                await self._finite(self._serving.current, tuple(probe.prompt_ids), tuple(probe.response_ids))
            elif reply := await self._short_reply():
                await self._finite(self._serving.current, *reply)
        except AlignmentError as error:
            raise EngineError(f"the engine has no numbers at all, and nothing can be tested: {error}") from error

    async def _probe(self, number: int, probes: Sequence[StepProbe], score: Score | None) -> str | None:
        probes = with_ids(probes)
        if not probes and (reply := await self._short_reply()):
            await self._tested(number, *reply, score)
        asked = [partial(self._tested, number, tuple(p.prompt_ids), tuple(p.response_ids), score) for p in probes]
        for probe, engine in zip(probes, await few_at_once(asked), strict=True):
            noise = mean_abs(engine, probe.log_probs)
            if not noise <= self._settings.self_test_tolerance:
                return f"self-test: engine and trainer differ by {noise:.3g} nats per token"
            shift = mean_abs(probe.log_probs, probe.parent_log_probs)
            from_parent = mean_abs(engine, probe.parent_log_probs)
            # Only a shift well above the noise proves that the new weights, not the parent's, are what answers.
            if shift > 3 * self._settings.self_test_tolerance and from_parent < shift / 2:
                return f"self-test: the engine answers like the parent ({from_parent:.3g} of {shift:.3g} nats a token)"
        return None

    async def _short_reply(self) -> tuple[Ids, Ids] | None:
        """Return a stored prompt and the start of its reply, of the policy that is tested; a text before others."""
        replies = await self._ledger.recent_replies(
            sampled_by=None, limit=self._settings.gate_replies, policy=self.policy
        )
        for prompt_ids, response_ids in sorted(replies, key=lambda reply: (bool(pictures_of(reply[0])), len(reply[0]))):
            ids = response_ids[: self._settings.gate_tokens]
            if not pictures_of(prompt_ids) or await self._known(self._current, prompt_ids, ids) is not None:
                return prompt_ids, ids
        return None

    async def _finite(self, number: int, prompt_ids: Ids, ids: Ids, score: Score | None = None) -> LogProbs:
        log_probs = await (score or self._score)(number, prompt_ids, ids)
        if not all(map(math.isfinite, log_probs)):
            raise AlignmentError(f"the engine's log-probs under version {number} are not finite")
        return log_probs

    async def _tested(self, number: int, prompt_ids: Ids, ids: Ids, score: Score | None = None) -> LogProbs:
        """Return log-probs under the tested version. Raises _NoNumbers if the version is at fault."""
        try:
            return await self._finite(number, prompt_ids, ids, score)
        except AlignmentError:
            if (serving := self._current) != number:
                await self._finite(serving, prompt_ids, ids, score)
        try:
            return await self._finite(number, prompt_ids, ids, score)
        except AlignmentError as error:
            raise _NoNumbers(f"the engine has no numbers for version {number}: {error}") from error

    async def _base_numbers(self, prompt_ids: Ids, ids: Ids) -> LogProbs:
        """Return log-probs under the base."""
        if self._score_base is None:
            return await self._finite(0, prompt_ids, ids)
        log_probs = await self._score_base(prompt_ids, ids)
        if not all(map(math.isfinite, log_probs)):
            raise AlignmentError("the base's engine has no finite log-probs")
        return log_probs
