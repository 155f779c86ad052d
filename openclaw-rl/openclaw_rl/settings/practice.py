"""Settings of practice: new replies to corrected prompts while nobody chats."""

from pydantic import Field

from openclaw_rl.settings.base import Branch


class PracticeSettings(Branch):
    """Practice, for the methods that have a teacher to practise with (opd, combine)."""

    enabled: bool = True
    """False: learn from the users' own turns alone."""
    idle_s: float = Field(default=20.0, ge=0)
    """Time without a chat before practice begins. A chat that arrives ends the sampling at once."""
    replies: int = Field(default=16, ge=1)
    """Practice replies of one update, anchors included; at most `training.batch_size`."""
    anchor_share: float = Field(default=0.5, ge=0, lt=1)
    """Share of the replies that go to prompts which nobody corrected, held to the base: so a wish stays where it was
    asked. Wishes that are said to be general have no anchors."""
    variant_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a wish's replies that answer variants of the corrected prompts: other requests that begin with the same
    words, written by the base. Words about the answer's content are practised on their own prompt alone."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest practice reply; the limit of the user's own request holds too. A model that thinks needs room for its
    thought."""
    max_updates: int = Field(default=24, ge=1)
    """Updates after which a wish is only rehearsed beside others, whatever it has learned."""
    stop_share: float = Field(default=0.6, gt=0)
    """A wish is learned at this share of the teacher's own place. That place is 1 + `method.guidance`, where 1 is the
    base that reads the wish."""
    stop_passed: float = Field(default=0.75, ge=0, le=1)
    """Part of a wish's newest practice replies that the judge must pass before the wish is learned, where a model
    judges them (`combine`)."""
    max_kl: float = Field(default=1.5, gt=0)
    """KL to the base of a wish's practice replies, in nats a token, above which the wish is stopped."""
    least_relevance: float = Field(default=0.5, ge=0)
    """Relevance of a practice reply, in nats a token of its request, below which nothing is learned from it. A wish is
    stopped once more than a third of its newest replies are below it. 0: no reply is looked at."""
    patience: int = Field(default=6, ge=2)
    """Updates without progress after which a wish is only rehearsed beside others."""
    machine_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the time that practice samples and scores while nobody chats; it rests for the remainder."""
    score_timeout_s: float = Field(default=120.0, gt=0)
    """Time for one scoring call that measures a wish."""
