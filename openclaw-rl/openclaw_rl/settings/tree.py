"""The whole tree of settings, and the rules between its branches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from openclaw_rl.settings.base import USERS_FILE, Branch
from openclaw_rl.settings.episodes import EpisodeSettings
from openclaw_rl.settings.learning import JudgeSettings, TrainerSettings, TrainingSettings
from openclaw_rl.settings.method_settings import AnyMethodSettings, default_method_settings
from openclaw_rl.settings.policies import PoliciesSettings
from openclaw_rl.settings.practice import PracticeSettings
from openclaw_rl.settings.publishing import AlertSettings, PublisherSettings, WatchSettings
from openclaw_rl.settings.server import (
    EngineSettings,
    ModelSettings,
    PictureSettings,
    SamplingSettings,
    ServerSettings,
    SessionSettings,
    UserLimits,
)
from openclaw_rl.settings.storage import MemorySettings, RedactionSettings, RetentionSettings
from openclaw_rl.settings.tracking import TrackingSettings


class Settings(Branch):
    """The whole tree."""

    data_dir: Path = Path("~/.openclaw-rl")
    """Ledger, versions, keys and logs: private to you."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    server: ServerSettings = ServerSettings()
    limits: UserLimits = UserLimits()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    pictures: PictureSettings = PictureSettings()
    sampling: SamplingSettings = SamplingSettings()
    sessions: SessionSettings = SessionSettings()
    judge: JudgeSettings = JudgeSettings()
    method: AnyMethodSettings = Field(default_factory=default_method_settings)
    training: TrainingSettings = TrainingSettings()
    trainer: TrainerSettings = TrainerSettings()
    policies: PoliciesSettings = PoliciesSettings()
    practice: PracticeSettings = PracticeSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    publisher: PublisherSettings = PublisherSettings()
    watch: WatchSettings = WatchSettings()
    alerts: AlertSettings = AlertSettings()
    tracking: TrackingSettings = TrackingSettings()
    redaction: RedactionSettings = RedactionSettings()
    retention: RetentionSettings = RetentionSettings()
    memory: MemorySettings = MemorySettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if found := [*self._conflicts()]:
            raise ValueError("\n".join(found))
        return self

    def _conflicts(self) -> Iterator[str]:
        """Yield every contradiction between branches, so that the user sees all of them at one start."""
        if not self.server.is_loopback and not self.has_keys:
            yield f"server.host {self.server.host!r} is not loopback: set server.api_keys first"
        yield from self._engine_conflicts()
        if self.watch.turns < 2 * self.watch.min_turns:
            yield f"watch.turns {self.watch.turns} holds no two sides of watch.min_turns"
        if self.training.weights == "full":
            yield from self._full_conflicts()
        if self.method.needs_ema and self.trainer.kind == "external":
            yield 'method.teacher "ema" needs trainer.kind = "local": others write no teacher'
        if self.publisher.base_url is not None and self.training.weights != "full":
            yield 'publisher.base_url is for training.weights = "full": with adapters the policy\'s engine has the base'
        if self.judge.url is None and self._asks_model:
            for name in ("model", "api_key"):
                if getattr(self.judge, name) is not None:
                    yield f"judge.{name} is for a judge at judge.url, and none is set: the policy's base would judge"
        yield from self.method.conflicts(self.training.weights)
        if "min_batch" in self.training.model_fields_set and self.training.min_batch > self.training.batch_size:
            n, most = self.training.min_batch, self.training.batch_size
            yield f"training.min_batch {n} is larger than training.batch_size {most}"
        if self.training.enabled:
            yield from self._never_trained()

    def _engine_conflicts(self) -> Iterator[str]:
        engine = self.engine
        if engine.kind == "url" and not engine.url and not engine.urls:
            yield 'engine.url or engine.urls is needed with engine.kind = "url"'
        if engine.replicas > 1 and engine.kind == "url":
            yield f"engine.replicas {engine.replicas}: the server starts no engine here; name each one in engine.urls"
        if not engine.urls:
            return
        if engine.kind != "url":
            yield f'engine.urls is for engine.kind = "url": with {engine.kind!r} the server starts its engines'
        if engine.url:
            yield "engine.url and engine.urls are both set: name every engine in engine.urls"
        if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
            yield "engine.urls names an engine twice"

    @property
    def trains_pictures(self) -> bool:
        """True when trainer and method take turns whose prompt has pictures: adapters of the local trainer alone."""
        is_local = self.training.enabled and self.trainer.kind == "local"
        return is_local and self.training.weights == "lora" and self.method.takes_pictures

    @property
    def has_keys(self) -> bool:
        """True when chats need a key: one of the settings, or one of a user of the data directory."""
        return bool(self.server.api_keys) or (self.data_dir.expanduser() / USERS_FILE).is_file()

    @property
    def _asks_model(self) -> bool:
        """True when verdicts or hints come from a model."""
        return self.judge.kind == "llm" or self.method.needs_hint_judge

    def _never_trained(self) -> Iterator[str]:
        """Yield each setting under which training is on and no step can ever be made."""
        off = "or switch training.enabled off"
        keys = self.server.api_keys
        if keys and not any(key.train for key in keys):
            yield f"server.api_keys: train is false for every key, so no turn can be trained on: allow one, {off}"
        waiting, needed = self.training.max_waiting, self.training.batch_size
        if waiting < needed:
            yield f"training.max_waiting {waiting} holds no training.batch_size {needed}: a batch would never fill"
        if self.trainer.kind == "local" and self.training.weights == "lora" and not self.trainer.target_modules:
            yield f"trainer.target_modules is empty: the adapter would have no weights; name some, {off}"
        if self.method.credits_groups and self.episodes.max_groups_ahead < self.episodes.groups_per_step:
            yield (
                f"episodes.max_groups_ahead {self.episodes.max_groups_ahead} holds no episodes.groups_per_step"
                f" {self.episodes.groups_per_step}: a batch would never fill"
            )
        yield from self.method.never_trains()

    def _full_conflicts(self) -> Iterator[str]:
        """Yield the contradictions with full weights: they leave no base in the policy's engine that could judge."""
        if self.policies.is_per_user:
            yield 'policies.mode "per_user" is for training.weights = "lora": full weights have one policy'
        if self.judge.url is None and self._asks_model:
            yield 'judge.url is needed with training.weights = "full": a judge must not change as it judges'
        if self.trainer.kind == "local" and self.trainer.quantise != "none":
            yield 'trainer.quantise is for a frozen base: not with training.weights = "full"'
