"""One version's way to serving: *files → load → gate → self-test → prewarm → switch*.

An adapter is loaded beside the serving one and tested before it serves. Full weights replace the serving ones and are
tested then; if they fail, the old ones are pushed back. A version that fails is rejected in the ledger with the reason.
An engine that fails raises, and the version is tried again.

`to_loading`, `reject` and `supersede` are the steps in the ledger that `publisher` and `weight_push` take too.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from openclaw_rl.errors import AlignmentError, EngineGone, EngineLeft, EngineRefused, PicturesRefused
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.types import SHARED_POLICY, Version, VersionState, WeightKind
from openclaw_rl.types.pictures import head, pictures_of

log = structlog.get_logger()

REJECTIONS_IN_A_ROW = 3
"""Rejections in a row that pause learning."""


async def to_loading(ledger: Ledger, version: Version) -> None:
    """Move a version that passed the gate to LOADING, from the state where a crash left it."""
    if version.state is VersionState.CANDIDATE:
        await ledger.set_version_state(version.weight_version, VersionState.GATED)
    if version.state in (VersionState.CANDIDATE, VersionState.GATED):
        await ledger.set_version_state(version.weight_version, VersionState.LOADING)


async def reject(ledger: Ledger, number: int, reason: str, *, alert: Alert) -> None:
    """Reject a version and its successors. Pause learning of its policy after too many rejections in a row."""
    rejected = await ledger.reject(number, reason)
    policy = (await ledger.version(number)).policy
    in_a_row = await ledger.rejections_in_a_row(policy)
    log.warning("version_rejected", weight_version=number, reason=reason, with_it=rejected, in_a_row=in_a_row)
    if in_a_row >= REJECTIONS_IN_A_ROW:
        await ledger.set_learning(False, policy)
        reason = f"{in_a_row} versions rejected in a row"
        of = {} if policy == SHARED_POLICY else {"policy": policy}
        alert("learning_paused", reason=reason, resume="openclaw-rl learning resume", **of)


async def supersede(ledger: Ledger, numbers: Sequence[int]) -> None:
    """Mark versions as superseded, because a newer version contains them and serves."""
    for number in numbers:
        if (await ledger.version(number)).state is VersionState.CANDIDATE:
            await ledger.set_version_state(number, VersionState.GATED)
        await ledger.set_version_state(number, VersionState.SUPERSEDED, "a newer version was ready first")


class Publication:
    """Takes one version at a time through the gate to serving."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PolicyEngine,
        gate: Gate,
        *,
        prewarm_sessions: int,
        alert: Alert,
    ) -> None:
        self._ledger, self._policy, self._gate = ledger, policy, gate
        self._prewarm_sessions, self._alert = prewarm_sessions, alert

    async def publish(self, version: Version) -> bool:
        """Publish the version. Return False if it was rejected.

        Raises EngineError, AlignmentError or TimeoutError when the engine fails.
        """
        number, times = version.weight_version, _PhaseTimes()
        refusal = await self._refusal(version, times)
        if refusal is not None:
            await reject(self._ledger, number, refusal, alert=self._alert)
            return False
        times.ends("switch_s")
        await self._ledger.set_version_state(number, VersionState.SERVING)
        log.info("published", weight_version=number, parent=version.parent, **times.seconds)
        return True

    async def _refusal(self, version: Version, times: "_PhaseTimes") -> str | None:
        """Try to serve the version. Return the reason of a refusal, or None when it serves."""
        if version.state is VersionState.CANDIDATE and version.folder is not None:
            # Before the engine loads them: full weights are tested only once they serve.
            refusal = await asyncio.to_thread(version_folders.not_finite, self._policy.data_dir / version.folder)
            times.ends("files_s")
            if refusal is not None:
                return refusal
        try:
            await self._policy.adapters.load(version)
        except EngineRefused as error:
            return f"the engine refused it: {error}"
        times.ends("load_s")
        if version.state is VersionState.CANDIDATE and (refusal := await self._pass_gate(version, times)) is not None:
            await self._policy.adapters.unload(version.weight_version)
            return refusal
        await to_loading(self._ledger, version)
        if version.kind is WeightKind.FULL:
            return await self._try_full(version)
        await self._prewarm(version)
        await self._policy.serve(version)
        return None

    async def _pass_gate(self, version: Version, times: "_PhaseTimes") -> str | None:
        report = version.report
        result = await self._gate.check(version, report)
        times.ends("gate_s")
        refusal = result.refusal
        if version.kind is WeightKind.FULL:  # tested once they serve
            return refusal
        if refusal is None:
            refusal = await self._self_test(version)
        times.ends("self_test_s")
        log.info(
            "gate",
            weight_version=version.weight_version,
            parent=version.parent,
            step_kl=result.step_kl,
            base_kl=result.base_kl,
            canary_drop=result.canary_drop,
            refusal=refusal,
        )
        return refusal

    async def _self_test(self, version: Version) -> str | None:
        """Test the version on each engine. One that dies meanwhile leaves the pool, and is not waited for."""
        passed, gone = 0, EngineGone("no engine is ready")
        for score in self._policy.scores():
            try:
                refusal = await self._gate.self_test(version.weight_version, version.report.probes, score)
            except EngineGone as error:
                gone = error
                continue
            if refusal is not None:
                return refusal
            passed += 1
        if not passed:
            raise gone
        return None

    async def _try_full(self, version: Version) -> str | None:
        """Serve full weights, and push the old ones back if the gate refuses them.

        Returns the reason of a failed test. Raises EngineError if the engine has no log-probs for the old weights
        either: then the version is not at fault.
        """
        old = await self._ledger.version(self._policy.serving.current)
        if not await self._policy.is_in_place():  # `EngineReadiness` restores it: the test compares with `old`
            raise EngineGone(f"the engine lacks version {old.weight_version}, which should serve")
        before = await self._gate.before_swap(version)
        await self._policy.serve(version)
        refusal = await self._gate.after_swap(version, before)
        if refusal is not None:
            await self._policy.serve(old)
            await self._gate.needs_numbers(version.report.probes)
        return refusal

    async def _prewarm(self, version: Version) -> None:
        """Prefill the prompts of recently active sessions, so that their next turn finds its prefix cached."""
        for user, prompt_ids in await self._ledger.recent_prompts(self._prewarm_sessions, version.policy):
            # A picture may be gone, or the engine refuse it: that session's next turn is prefilled then.
            of_pictures = (EngineRefused, AlignmentError) if pictures_of(prompt_ids) else (PicturesRefused,)
            if len(prompt_ids) > 1:
                for score in self._policy.scores():
                    with suppress(EngineLeft, *of_pictures):
                        await score(version.weight_version, head(prompt_ids, -1), prompt_ids[-1:], user=user)


class _PhaseTimes:
    """Durations of a publication's phases, for the log."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def ends(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._since = round(now - self._since, 3), now
