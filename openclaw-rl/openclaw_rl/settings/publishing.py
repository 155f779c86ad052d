"""How new weights come to serve, how they are watched, and who hears of it."""

from pathlib import Path

from pydantic import Field

from openclaw_rl.settings.base import Branch, SecretUrl


class PublisherSettings(Branch):
    max_step_kl: float = Field(default=0.5, gt=0)
    """Largest mean KL(parent || new) per token on stored replies."""
    max_base_kl: float = Field(default=3.0, gt=0)
    """Largest mean KL(base || new); an alert is logged at 80 %."""
    gate_replies: int = Field(default=8, ge=1)
    """Stored replies scored by the gate."""
    gate_tokens: int = Field(default=64, ge=1)
    """Tokens of each such reply."""
    gate_prompt_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens the gate may prefill for one comparison; the shortest prompts are taken first."""
    self_test_tolerance: float = Field(default=0.15, gt=0)
    """Largest mean |log-prob of the engine − of the trainer| on the trainer's own probe after loading. An fp32 engine
    agrees to 1e-4; bfloat16 was measured at 0.01 on flat distributions and 0.05 on peaked ones."""
    canary_file: Path | None = None
    """JSON lines of {"messages": […], "reply": "…"}, replies known to be good: see `canary`. Adapters only."""
    max_canary_drop: float = Field(default=0.5, gt=0)
    """Largest loss of those replies' mean log-prob per token against the base, in nats."""
    keep_versions: int = Field(default=20, ge=1)
    """Versions that passed the gate whose weights stay on disk for a rollback. What serves, is pinned, is trained from
    or may be fallen back to stays beside them; everything else is deleted."""
    max_versions: int = Field(default=3, ge=2)
    """Policy versions an engine serves at once; a newer one waits, and supersedes what waits."""
    prewarm_sessions: int = Field(default=1, ge=0)
    """Recently active sessions whose prompts are prefilled on a new version before the switch."""
    call_timeout_s: float = Field(default=120.0, gt=0)
    push_timeout_s: float = Field(default=600.0, gt=0)
    """Full weights: how long the engine may take to read a version's."""
    unbroken_drain_s: float = Field(default=5.0, ge=0)
    """Full weights: how long a swap waits for replies that cannot be cut and resumed whole (a grammar, a seed)."""


class WatchSettings(Branch):
    """The automatic rollback: what users think of replies, by the version that gave them."""

    enabled: bool = True
    """Off: nothing goes back by itself."""
    turns: int = Field(default=400, ge=20)
    """The newest judged user turns that are looked at."""
    min_turns: int = Field(default=30, ge=5)
    """On each side of a fall."""
    drop: float = Field(default=0.3, gt=0, le=2)
    """Smallest fall of the mean verdict (−1 to 1) that matters."""
    p_value: float = Field(default=0.001, gt=0, lt=1)
    """A fall this unlikely to be luck (permutation test over all cuts between versions) is gone back from. It is looked
    for again after every batch: 0.01 would find one by luck in every fifteenth run of 200 turns where nothing happens,
    0.001 once in about 30,000 turns."""
    pause_after: int = Field(default=2, ge=1)
    """Automatic rollbacks since the start after which learning pauses: what caused them goes on."""
    check_every_s: float = Field(default=5.0, gt=0)


class AlertSettings(Branch):
    """Rollbacks, rejections in a row, a base KL near its limit, paused learning: logged as errors, and sent."""

    webhook_url: SecretUrl | None = None
    """Gets a POST of JSON for each alert. It may hold a token, so it is never shown."""
    timeout_s: float = Field(default=5.0, gt=0)
    retry_s: float = Field(default=2.0, ge=0)
