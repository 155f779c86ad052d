"""Settings of episodes: runs of agents on tasks, in groups."""

from pydantic import Field

from openclaw_rl.settings.base import Branch


class EpisodeSettings(Branch):
    """Episodes and their groups, for the methods that give credit to a closed group (agent)."""

    ttl_s: float = Field(default=3600.0, gt=0)
    """An episode without a request for this long, and without an outcome, expires; its turns end as
    `episode_expired`."""
    group_ttl_s: float = Field(default=14_400.0, gt=0)
    """A group closes at this age; its episodes that still run expire."""
    max_groups_ahead: int = Field(default=32, ge=1)
    """Training groups that are open, wait for their credit or wait for the trainer. Beyond it a new group gets 429 with
    Retry-After, which bounds the age of samples."""
    groups_per_step: int = Field(default=8, ge=1)
    """Whole groups of a training step; groups without contrast have no sample and do not count. After
    `training.max_wait_s` one group is enough."""
