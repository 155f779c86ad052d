"""What every process of a run knows of ours: it travels in slime's own `args`, which slime pickles to each of them."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, SecretStr

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import AnyMethodSettings, TrainerSettings

TRAINER = "slime"
"""The name we lease under: the same after a restart."""


class NodeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """The server's base URL."""
    token: SecretStr
    trainer: TrainerSettings
    method: AnyMethodSettings
    heartbeat: str | None = None
    """The name of the actor that is told when a step gets on (`pulse`)."""

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
    """Megatron writes its args into each checkpoint, and reads no class there that it does not know; the token has no
    place in one either."""
    ours = vars(args).pop("openclaw", None)
    try:
        yield
    finally:
        if ours is not None:
            args.openclaw = ours
