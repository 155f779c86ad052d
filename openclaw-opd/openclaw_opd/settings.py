"""Settings of on-policy distillation: the hint, the teacher, the loss (`method.*` with `method.name = "opd"`)."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from openclaw_rl.methods.hinted_prompt import HintPlace
from openclaw_rl.settings import MethodSettings, Url


class OpdSettings(MethodSettings):
    """Settings of the hint, the teacher and the loss."""

    name: str = "opd"
    hint_source: Literal["judge", "verbatim"] = "verbatim"
    """Source of hindsight hints: `verbatim` takes the user's own correction; with `judge` a larger model reads the next
    state and writes a hint."""
    hint_votes: int = Field(default=3, ge=1)
    """Judge samples per turn. Their majority decides if there is a hint, and the largest teacher gain selects it."""
    hint_max_tokens: int | None = Field(default=None, ge=16)
    """Tokens of one hint answer of the judge, reasoning included; `judge.max_new_tokens` when unset."""
    hint_place: HintPlace = "behind"
    """Place of the hint in the teacher's prompt: `behind` the user's message, or `between` the message and the message
    again."""
    teacher: Literal["policy", "base", "ema"] = "base"
    """Model that scores the reply with the hint in the prompt: the policy, the base (adapter off), or a slow mean of
    the policy's versions. The local LoRA trainer writes that mean beside each version."""
    guidance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """`teacher = "base"`: weight w of the hint's own effect on the base, which is added to the hinted base's log-probs.
    0: the hinted base as it is, the cautious default for models without a measurement."""
    neutral_hint: str = ""
    """With `guidance`: words that the hint's effect is taken against, in the hint's place. Empty: against the prompt
    without a hint, so that w makes more of any words behind the request, whatever they say."""
    request_guidance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """With `guidance`: weight v of the request's own effect on the base, which is added too, so that a guided reply
    still answers the request; at most `guidance`. It costs one more scoring pass."""
    neutral_request: str = Field(default="Tell me about it.", min_length=1)
    """With `request_guidance`: words that the request's effect is taken against, in the request's place."""
    teacher_url: Url | None = None
    """`teacher = "base"`: URL of a second engine that serves the base alone; when unset, the policy's engine with the
    adapter off."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """`teacher = "ema"`: share of the old teacher kept at each version."""
    student_term: Literal["engine", "trainer"] = "engine"
    """Student's side of the gap: from the engine at the version that scored, or from the trainer's own forward pass."""
    opd_clip: float = Field(default=2.0, gt=0)
    """Largest |advantage| of a token, in nats of gap."""
    top_k: int = Field(default=0, ge=0, le=256)
    """0: token-level distillation. 20 to 64: a divergence over the teacher's top-k and a tail bucket."""
    forward_kl: float = Field(default=0.0, ge=0, le=1)
    """With `top_k`: share of the forward KL in that divergence; the rest is the reverse KL. The forward KL also teaches
    ids that the policy no longer samples."""
    anchor_weight: float = Field(default=1.0, ge=0, le=10)
    """Weight of the distillation term of anchors, which are practice replies to prompts that nobody corrected."""
    score_timeout_s: float = Field(default=120.0, gt=0)
    """Time for one scoring call of the teacher."""

    @property
    def distils(self) -> bool:
        """True when the method computes a distillation term at all."""
        return True

    @property
    def takes_pictures(self) -> bool:
        return True

    @property
    def needs_engine(self) -> bool:
        return self.distils

    @property
    def needs_hint_judge(self) -> bool:
        return self.distils and self.hint_source == "judge"

    @property
    def ema_teacher_decay(self) -> float | None:
        return self.ema_decay if self.distils and self.teacher == "ema" else None

    @property
    def can_practise(self) -> bool:
        return self.distils and self.teacher == "base"  # the others move with the policy, and practice would compound

    @property
    def base_teacher_url(self) -> str | None:
        return self.teacher_url if self.distils else None

    @property
    def scores_given_ids(self) -> bool:
        return self.distils and self.top_k > 0 and self.guidance > 0

    def conflicts(self, weights: Literal["lora", "full"]) -> Iterator[str]:
        if self.teacher_url is not None and self.teacher != "base":
            yield 'method.teacher_url is for method.teacher = "base": the policy\'s engine has the others'
        if self.guidance and self.teacher != "base":
            yield (
                f'method.guidance is for method.teacher = "base": the effect of a hint on "{self.teacher}", which moves'
                " with the policy, would be added to itself"
            )
        if 0 < self.guidance < self.request_guidance:
            yield (
                f"method.request_guidance {self.request_guidance:g} is larger than method.guidance {self.guidance:g}:"
                " a guided reply would leave the wish for the request"
            )
        # Full weights leave no base in the policy's engine, and no adapter that an EMA could be made of.
        has_base = self.teacher == "base" and self.teacher_url is not None
        if weights == "full" and self.distils and self.teacher != "policy" and not has_base:
            yield (
                f'method.teacher "{self.teacher}" is not to be had with training.weights = "full": use "policy",'
                ' or "base" with method.teacher_url'
            )
