"""Defaults of a method for the bundled model, where measurements support them.

The branches' own defaults are for models that were not measured. With them a policy drifts little, and it hardly
learns where nearly every verdict is the same. `load` applies the values of this module as its weakest source. They
hold for the bundled model with a LoRA of the local trainer alone. A learning rate does not carry over to another
model, other weights or another optimizer. A user's value wins, key by key. `Settings()` in a program has the branches'
defaults.

A new row needs a table that compares it with the branches' defaults, over seeds, with its costs beside the score.
`openclaw-rl/README.md` and `openclaw-opd/README.md` show the figures under "What it teaches".
"""

from collections.abc import Mapping
from typing import Any

from openclaw_rl.settings.base import Branch
from openclaw_rl.settings.method_settings import MethodSettings
from openclaw_rl.settings.tree import Settings

Values = Mapping[str, str | float]
"""Dotted keys of the tree."""

_GUIDED: Values = {
    "method.guidance": 2.0,
    "method.neutral_hint": "Thank you.",
    "practice.max_tokens": 96,
    "practice.patience": 12,
}
BUNDLED: Mapping[str, Values] = {
    "binary_rl": {
        "method.baseline": "others",
        "trainer.learning_rate": 1e-3,
        "trainer.kl_coef": 0.1,
        "publisher.max_step_kl": 1.0,
    },
    "agent": {
        "trainer.learning_rate": 1e-3,
        "trainer.kl_coef": 0.1,
        "publisher.max_step_kl": 1.0,
    },
    "opd": {
        **_GUIDED,
        "method.guidance": 3.0,
        "method.request_guidance": 0.3,
        "practice.anchor_share": 0.25,
        "trainer.learning_rate": 2e-4,
    },
    "combine": {
        **_GUIDED,
        "method.request_guidance": 0.25,
        "method.top_k": 20,
        "method.anchor_weight": 3.0,
        "method.forward_kl": 0.5,
        "trainer.beta2": 0.9,
        "practice.max_updates": 40,
    },
}
"""By method. Binary RL: `scripts/benchmarks/results/learning_preferences-binary.md` (`follows others lr=1e-3 kl=.1`
beside `follows`, eight seeds and two), and once more, eleven seeds, in `…-texts.md`. Those runs had no gate: at
that rate a first step from four turns of the real OpenClaw was 0.23 to 0.50 nats, and the branch's bound refused
one of four. OPD and Combined: the guidance of `learning_practice-neutral.md`, three seeds, beside w = 1 without
neutral words (`scripts/benchmarks/README.md`). The request's guidance, OPD's larger weights (with a top-k), the
weight of Combined's anchors: `learning_practice-final.md`, three seeds; the half of anchors is the branch's own.
Combined's half forward KL and beta2 learn a wish that comes after others: `learning_practice-day.md`, beside
`…-final.md`, where they cost nothing. Without a judge model that holds a wish back
(`personalization-combine-cpu.md`). OPD's anchors and rate: `personalization-cpu.md`, four corrections and ten idle
minutes on two cores. At the token level a rate of 3e-4 let the learned share swing. With a top-k of 20 replies
become one endless sentence: `scripts/benchmarks/README.md` has its scores by version. Practice replies have the
length of the benchmark's: longer ones cost a CPU minutes. The rest of what the branches hold is what was measured,
`…-users.md` beside it. Agent: the rates of Binary RL, with which episodes of one turn and a reward of ±1 went from
0.22 to 0.67 in two updates (tool calls), and from 0.42 to 0.89 in one (clicks by name). Those are single runs of
one seed, without the branch's rate beside them."""


def defaults(settings: Settings) -> Values | None:
    """Return the tuned values for the method, model and trainer of these settings; None without a measurement."""
    is_ours = settings.model.path == "bundled" and settings.trainer.kind == "local"
    return BUNDLED.get(settings.method.name) if is_ours and settings.training.weights == "lora" else None


def applied(settings: Settings) -> Settings:
    """Return the tree with tuned values for unset keys. They stay defaults: `model_fields_set` does not name them."""
    changed: dict[str, Any] = dict(settings)
    for key, value in (defaults(settings) or {}).items():
        name, field = key.split(".")
        branch: Branch = changed[name]
        if field not in branch.model_fields_set:
            tuned = type(branch).model_construct(branch.model_fields_set, **(dict(branch) | {field: value}))
            # A value of the user's may exclude it: there is no guidance for a teacher that moves.
            if not (isinstance(tuned, MethodSettings) and any(tuned.conflicts(settings.training.weights))):
                changed[name] = tuned
    return Settings.model_construct(settings.model_fields_set, **changed)


def in_force(settings: Settings) -> Values:
    """Return the tuned values that are in force in these settings."""
    found = {}
    for key, value in (defaults(settings) or {}).items():
        name, field = key.split(".")
        branch: Branch = getattr(settings, name)
        if field not in branch.model_fields_set and getattr(branch, field) == value:
            found[key] = value
    return found
