"""Settings of on-policy distillation: the hint, the teacher, the loss (`method.*` with `method.name = "opd"`)."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from openclaw_rl.settings import MethodSettings, Url


class OpdSettings(MethodSettings):
    name: str = "opd"
    hint_source: Literal["judge", "verbatim"] = "verbatim"
    """Where hindsight hints come from: the user's own correction is the hint, or a judge of some size reads the next
    state and writes one."""
    hint_votes: int = Field(default=3, ge=1)
    """Judge samples per turn; the majority says whether there is a hint, the largest teacher gain which."""
    hint_max_tokens: int = Field(default=1024, ge=16)
    """Of one judge answer, reasoning included."""
    teacher: Literal["policy", "base", "ema"] = "base"
    """Whose log-probs, hint in the prompt, the student follows: the policy's own, the base's (adapter off), or a slow
    mean of the policy's versions, which the local LoRA trainer writes beside each of them."""
    teacher_url: Url | None = None
    """`teacher = "base"`: a second engine that serves the base alone, as SGLang does; the policy's engine, adapter off,
    when unset."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """`teacher = "ema"`: share of the old teacher kept at each version."""
    student_term: Literal["engine", "trainer"] = "engine"
    """The gap's other side: the engine at the version that scored, or the trainer's own forward."""
    opd_clip: float = Field(default=2.0, gt=0)
    """Largest |advantage| of a token, in nats of gap."""
    top_k: int = Field(default=0, ge=0, le=256)
    """0: token-level distillation. 20 to 64: reverse KL over the teacher's top-k and a tail bucket."""
    score_timeout_s: float = Field(default=120.0, gt=0)
    """One scoring call of the teacher."""

    @property
    def distils(self) -> bool:
        """True when the method computes a distillation term at all."""
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
    def base_teacher_url(self) -> str | None:
        return self.teacher_url if self.distils else None

    def conflicts(self, weights: Literal["lora", "full"]) -> Iterator[str]:
        if self.teacher_url is not None and self.teacher != "base":
            yield 'method.teacher_url is for method.teacher = "base": the policy\'s engine has the others'
        # Full weights leave no base in the policy's engine, and no adapter that an EMA could be made of.
        has_base = self.teacher == "base" and self.teacher_url is not None
        if weights == "full" and self.distils and self.teacher != "policy" and not has_base:
            yield (
                f'method.teacher "{self.teacher}" is not to be had with training.weights = "full": use "policy",'
                ' or "base" with method.teacher_url'
            )
