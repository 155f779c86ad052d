"""Sizes of a run of the practice experiment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run."""

    updates: int = 17
    """Updates of a wish, the first of them the user's own turns."""
    marks: tuple[int, ...] = (9, 17)
    """Updates after which a run of one wish is measured; one of several wishes is measured after each wish."""
    glances: tuple[int, ...] = (3, 5, 7, 12)
    """Updates after which the score alone is measured."""
    reply_tokens: int = 96
    held_out: int = 48
    replies: int = 2
    """Replies per held-out topic at a mark."""
    others: int = 3
    temperature: float = 0.7
    yardstick_prompts: int = 8
    """Prompts of a wish, held back from practice, on which the learned share is measured."""
    yardstick_tokens: int = 48
    elsewhere_prompts: int = 6
    """Prompts of each other kind."""
    elsewhere_replies: int = 3
    elsewhere_tokens: int = 160
    exact_questions: int = 60
    exact_tokens: int = 24
    chat_turns: int = 8
    """Turns of the long neutral chat."""
    tool_questions: int = 12
    tool_tokens: int = 48
    problems: int = 96
    """Word problems, where the user names some."""
    problem_tokens: int = 200
    width: int = 16
    """Prompts of a policy in one call of the sampler during an update, whatever their number: draws depend on it."""
    chunk: int = 48
    """The same in measurements."""
