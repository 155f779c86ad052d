"""Configuration that every process of a run shares: it travels in slime's own `args`, which slime pickles to each."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import AnyMethodSettings, TrainerSettings

TRAINER = "slime"
"""The trainer's name in the ledger: the same after a restart."""


class NodeConfig(BaseModel):
    """The plugin's part of slime's args."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """The server's base URL."""
    token: SecretStr
    trainer: TrainerSettings
    method: AnyMethodSettings
    push_folder: str | None = None
    """Folder, relative to the data directory, that this driver writes weights into; None: it sends them by NCCL."""
    engines: int = Field(default=1, ge=1)
    """Number of engines that a push reaches."""
    heartbeat: str | None = None
    """Name of the actor that counts the step's progress (`heartbeat`)."""

    def folder_of(self, weight_version: int) -> str | None:
        """Return the folder that slime writes this version into, relative to the data directory; None: by NCCL."""
        return None if self.push_folder is None else f"{self.push_folder}/weight_v{weight_version:06d}"

    def attach(self, args: Namespace) -> None:
        args.openclaw = self

    @classmethod
    def of(cls, args: Namespace) -> "NodeConfig":
        config = getattr(args, "openclaw", None)
        if not isinstance(config, cls):
            raise SettingsError("slime was not started by `python -m openclaw_slime.driver`: its args lack our part")
        return config


@contextmanager
def without_ours(args: Namespace) -> Iterator[None]:
    """Take the plugin's part out of slime's args inside the block."""
    # Megatron writes its args into each checkpoint and cannot read unknown classes back; the token must not be there.
    ours = vars(args).pop("openclaw", None)
    try:
        yield
    finally:
        if ours is not None:
            args.openclaw = ours
