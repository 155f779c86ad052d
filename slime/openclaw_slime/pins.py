"""The versions this plugin was written against, in one place; the README beside quotes them.

Nothing here is downloaded or built by us: slime and Megatron-LM are checkouts of the user's, installed as those
projects say, and SGLang comes with them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    """A commit, or a release."""
    module: str
    """Importable exactly when the part is there (`slime` on PyPI is another project: its top module proves nothing)."""


SLIME = Pin("slime", "624b824a", "slime.ray.rollout")
MEGATRON = Pin("Megatron-LM", "1dcf0dafa884ad52ffb243625717a3471643e087", "megatron.training")
SGLANG = Pin("sglang", "0.5.15.post1", "sglang.srt")
PINS = (SLIME, MEGATRON, SGLANG)
