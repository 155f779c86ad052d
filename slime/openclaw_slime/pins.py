"""The versions this plugin was written against, in one place; the README beside quotes them.

Nothing here is downloaded or built by us: slime and Megatron-LM are checkouts of the user's, installed as those
projects say, and SGLang comes with them.
"""

from collections.abc import Mapping
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

PACKAGES = (
    Pin("ray", "2.60.0", "ray"),
    Pin("sglang-router", "0.3.2", "sglang_router"),
    Pin("torch", "2.11.0", "torch"),
)
"""Beside them, as they were run; other versions may do."""
FILES: Mapping[str, Mapping[str, str]] = {
    SLIME.name: {
        "slime/ray/rollout.py": "a54dea5e8e3c",
        "slime/ray/actor_group.py": "779d845723fa",
        "slime/ray/placement_group.py": "3c5064102ea3",
        "slime/observability/logging_utils.py": "30ba0ccefdee",
        "slime/utils/arguments.py": "434f78ffce78",
        "slime/backends/megatron_utils/actor.py": "fba3c8d92c61",
        "slime/backends/megatron_utils/model.py": "f413ab3d486a",
        "slime/backends/megatron_utils/loss.py": "f3a0f85db2d5",
        "slime/backends/megatron_utils/data.py": "581ed42c5bd2",
        "slime/backends/megatron_utils/initialize.py": "3c858fb92571",
        "slime/backends/megatron_utils/cp_utils.py": "01cc3c6cfa35",
        "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py": "8f1c0132395f",
        "slime/backends/sglang_utils/sglang_engine.py": "bca020ccc5f5",
        "slime/backends/sglang_utils/external.py": "06d3e561bed3",
    },
    MEGATRON.name: {
        "megatron/core/transformer/attention.py": "378fea76d259",
        "megatron/core/transformer/transformer_layer.py": "3f589c79eba9",
        "megatron/core/transformer/transformer_block.py": "f1cf3732e97d",
        "megatron/core/transformer/mlp.py": "0a51b7ee9af3",
        "megatron/core/tensor_parallel/layers.py": "4f2732329e62",
        "megatron/core/models/gpt/gpt_model.py": "d944b42a6a17",
        "megatron/core/optimizer/__init__.py": "87c984430926",
        "megatron/core/optimizer/distrib_optimizer.py": "6b6c413743c2",
        "megatron/training/arguments.py": "3b1bf4a7fa58",
    },
}
"""What we call or replace parts of: path in the checkout → the first digits of its sha256 at the pin."""
