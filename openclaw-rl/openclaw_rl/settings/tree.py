"""All branches together, and what must hold between them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from openclaw_rl.settings.base import Branch
from openclaw_rl.settings.learning import JudgeSettings, MethodSettings, TrainerSettings, TrainingSettings
from openclaw_rl.settings.publishing import AlertSettings, PublisherSettings, WatchSettings
from openclaw_rl.settings.server import EngineSettings, ModelSettings, SamplingSettings, ServerSettings, SessionSettings
from openclaw_rl.settings.storage import MemorySettings, RedactionSettings, RetentionSettings


class Settings(Branch):
    """The whole tree."""

    data_dir: Path = Path("~/.openclaw-rl")
    """Ledger, versions, keys and logs: private to you."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    sessions: SessionSettings = SessionSettings()
    judge: JudgeSettings = JudgeSettings()
    method: MethodSettings = MethodSettings()
    training: TrainingSettings = TrainingSettings()
    trainer: TrainerSettings = TrainerSettings()
    publisher: PublisherSettings = PublisherSettings()
    watch: WatchSettings = WatchSettings()
    alerts: AlertSettings = AlertSettings()
    redaction: RedactionSettings = RedactionSettings()
    retention: RetentionSettings = RetentionSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if found := [*self._conflicts()]:
            raise ValueError("\n".join(found))
        return self

    def _conflicts(self) -> Iterator[str]:
        """Between branches; all of them, so that nobody has to start again for each."""
        if not self.server.is_loopback and not self.server.api_keys:
            yield f"server.host {self.server.host!r} is not loopback: set server.api_keys first"
        if self.engine.kind == "url" and not self.engine.url:
            yield 'engine.url is needed with engine.kind = "url"'
        if self.watch.turns < 2 * self.watch.min_turns:
            yield f"watch.turns {self.watch.turns} holds no two sides of watch.min_turns"
        if self.training.weights == "full":
            yield from self._full_conflicts()
        if self.method.needs_ema and self.trainer.kind == "external":
            yield 'method.teacher "ema" needs trainer.kind = "local": others write no teacher'
        if self.method.teacher_url is not None and self.method.teacher != "base":
            yield 'method.teacher_url is for method.teacher = "base": the policy\'s engine has the others'
        if "min_batch" in self.training.model_fields_set and self.training.min_batch > self.training.batch_size:
            n, most = self.training.min_batch, self.training.batch_size
            yield f"training.min_batch {n} is larger than training.batch_size {most}"

    def _full_conflicts(self) -> Iterator[str]:
        """Full weights leave no base in the policy's engine: who judges, and a base teacher, must be elsewhere."""
        asks_for_hints = self.method.name != "binary_rl" and self.method.hint_source == "judge"
        if self.judge.url is None and (self.judge.kind == "llm" or asks_for_hints):
            yield 'judge.url is needed with training.weights = "full": a judge must not change as it judges'
        if self.trainer.kind == "local" and self.trainer.quantise != "none":
            yield 'trainer.quantise is for a frozen base: not with training.weights = "full"'
        has_base = self.method.teacher == "base" and self.method.teacher_url is not None
        if self.method.teacher != "policy" and not has_base and self.method.name != "binary_rl":
            teacher = self.method.teacher
            yield (
                f'method.teacher "{teacher}" is not to be had with training.weights = "full": use "policy",'
                ' or "base" with method.teacher_url'
            )
