"""One frozen tree of settings; `loading` is the only reader of the environment.

Sources, strongest first:

1. command-line flags (`--port 8000`, `--set server.port=8000`);
2. the environment (`OPENCLAW_RL__SERVER__PORT=8000`);
3. a TOML file (`--config FILE`, or `openclaw-rl.toml` in the working directory);
4. the values measured for the method on the bundled model (`tuned`);
5. the branches' defaults.

Wrong keys and values raise one `SettingsError`, with a line for each that names it. Each part of the system gets its
own branch, never the tree.
"""

from openclaw_rl.settings.base import USERS_FILE, Branch, Url, is_loopback
from openclaw_rl.settings.episodes import EpisodeSettings
from openclaw_rl.settings.learning import JudgeSettings, TrainerSettings, TrainingSettings
from openclaw_rl.settings.loading import ENV_PREFIX, load
from openclaw_rl.settings.method_settings import (
    AnyMethodSettings,
    MethodSettings,
    default_method_settings,
    installed_methods,
    settings_class,
)
from openclaw_rl.settings.policies import PoliciesSettings
from openclaw_rl.settings.practice import PracticeSettings
from openclaw_rl.settings.publishing import AlertSettings, PublisherSettings, WatchSettings
from openclaw_rl.settings.server import (
    NO_LIMITS,
    ApiKey,
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
from openclaw_rl.settings.tree import Settings

__all__ = [
    "ENV_PREFIX",
    "NO_LIMITS",
    "USERS_FILE",
    "AlertSettings",
    "AnyMethodSettings",
    "ApiKey",
    "Branch",
    "EngineSettings",
    "EpisodeSettings",
    "JudgeSettings",
    "MemorySettings",
    "MethodSettings",
    "ModelSettings",
    "PictureSettings",
    "PoliciesSettings",
    "PracticeSettings",
    "PublisherSettings",
    "RedactionSettings",
    "RetentionSettings",
    "SamplingSettings",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "TrackingSettings",
    "TrainerSettings",
    "TrainingSettings",
    "Url",
    "UserLimits",
    "WatchSettings",
    "default_method_settings",
    "installed_methods",
    "is_loopback",
    "load",
    "settings_class",
]
