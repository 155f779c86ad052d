"""Settings of policies: one that learns from all users, or one for each."""

from typing import Literal

from pydantic import Field

from openclaw_rl.settings.base import Branch
from openclaw_rl.types import SHARED_POLICY, own_policy


class PoliciesSettings(Branch):
    mode: Literal["shared", "per_user"] = "shared"
    """`shared`: one policy learns from all users. `per_user`: each user's turns and wishes train an adapter of that
    user's own, which answers nobody else. Episodes of agents train the shared policy in both."""
    start: Literal["base", "shared"] = "base"
    """`per_user`: weights that a new user's policy begins with: the base's, or those that the shared policy serves at
    that moment."""
    loaded: int = Field(default=8, ge=2)
    """`per_user`: versions that the engine holds for requests. Another one comes when a request needs it, and the least
    recently used one that nobody uses leaves. Publications take up to two places more."""

    @property
    def is_per_user(self) -> bool:
        return self.mode == "per_user"

    def of(self, user: str) -> str:
        """Return the policy that answers a user's chats and learns from them."""
        return own_policy(user) if self.is_per_user else SHARED_POLICY
