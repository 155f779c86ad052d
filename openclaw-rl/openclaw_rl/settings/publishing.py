"""Settings of the publisher, of the automatic rollback, and of alerts."""

from pathlib import Path

from pydantic import Field

from openclaw_rl.settings.base import Branch, SecretUrl, Url


class PublisherSettings(Branch):
    max_step_kl: float = Field(default=0.5, gt=0)
    """Largest mean KL(parent || new) per token on stored replies. Full weights are scored as soon as they serve."""
    max_base_kl: float = Field(default=3.0, gt=0)
    """Largest mean KL(base || new); an alert is logged at 80 %. Full weights need an engine with the base for it:
    `publisher.base_url`, or `method.teacher_url`."""
    base_url: Url | None = None
    """Full weights: URL of a second engine that serves the base alone, which the gate asks for log-probs."""
    gate_replies: int = Field(default=8, ge=1)
    """Stored replies that the gate scores."""
    gate_tokens: int = Field(default=64, ge=1)
    """Tokens of each such reply."""
    gate_prompt_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens the gate may prefill for one comparison; the shortest prompts are taken first."""
    gate_s: float = Field(default=30.0, gt=0, le=60)
    """Full weights: time for all scores before a swap, and again after it. What is not scored by then has no figure."""
    self_test_tolerance: float = Field(default=0.15, gt=0)
    """Largest mean |log-prob of the engine − of the trainer| on the trainer's own probe after loading. An fp32 engine
    agrees to 1e-4; bfloat16 was measured at 0.01 on flat distributions and 0.05 on peaked ones."""
    canary_file: Path | None = None
    """JSON lines of {"messages": […], "reply": "…"}: replies known to be good (`publishing.canary`)."""
    max_canary_drop: float = Field(default=0.5, gt=0)
    """Largest loss of those replies' mean log-prob per token against the base, in nats. Full weights without an engine
    for the base: against the version that serves at the server's first swap."""
    keep_versions: int = Field(default=20, ge=1)
    """Versions that passed the gate and have weights, of which the newest stay on disk for a rollback. Of the older
    ones the first of each power of two of commits stays. So do the version that serves, a pinned one, the tip and the
    fallbacks; the publisher deletes all others."""
    max_versions: int = Field(default=3, ge=2)
    """Policy versions an engine serves at once. A newer one waits, and supersedes the version that waits."""
    prewarm_sessions: int = Field(default=1, ge=0)
    """Recently active sessions whose prompts are prefilled on a new version before the switch."""
    call_timeout_s: float = Field(default=120.0, gt=0)
    """Time for one call of the engine: load, score, unload."""
    push_timeout_s: float = Field(default=600.0, gt=0)
    """Full weights: time for the engine to read those of a version."""
    unbroken_drain_s: float = Field(default=5.0, ge=0)
    """Full weights: time that a swap waits for replies that cannot be cut and resumed (a grammar, a seed)."""


class WatchSettings(Branch):
    """Automatic rollback, by the users' verdicts on the replies of each version and by evaluations of agents."""

    enabled: bool = True
    """False: no automatic rollback."""
    turns: int = Field(default=400, ge=20)
    """Newest judged user turns that the test reads."""
    min_turns: int = Field(default=30, ge=5)
    """Turns on each side of a fall, at least; held-out tasks that two versions must both have played."""
    drop: float = Field(default=0.3, gt=0, le=2)
    """Smallest fall of the mean verdict, or of the mean reward of held-out tasks, that matters (both −1 to 1)."""
    p_value: float = Field(default=0.001, gt=0, lt=1)
    """A fall this unlikely to be luck causes a rollback (permutation test over all cuts between versions). The test
    runs again after every batch. Without any fall, 0.01 finds one by luck in every fifteenth run of 200 turns, and
    0.001 once in about 30,000 turns."""
    pause_after: int = Field(default=2, ge=1)
    """Automatic rollbacks since the start after which learning pauses, because their cause goes on."""
    check_every_s: float = Field(default=5.0, gt=0)
    """Time between two looks for new verdicts."""


class AlertSettings(Branch):
    """Alerts: rollbacks, rejections in a row, a base KL near its limit, paused learning. Each is logged and sent."""

    webhook_url: SecretUrl | None = None
    """URL that gets a POST of JSON for each alert. It may hold a token, so it is never shown."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Time for one POST."""
    retry_s: float = Field(default=2.0, ge=0)
    """First pause between two tries of a POST; later pauses grow."""
