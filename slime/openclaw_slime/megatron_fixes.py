"""An optimizer that comes back from a checkpoint where Megatron has neither Transformer Engine's Adam nor apex's.

Its distributed optimizer then runs on torch's, whose step count is a tensor in every parameter's state. At the pin,
such a checkpoint cannot be written in the default format (the count is taken for a shard of the parameter), and cannot
be read in any (a fresh optimizer has no count to ask for, and what was read gives every parameter the same tensor, so
that one step counts as many). Apex and Transformer Engine keep one number for a group of parameters; so does this one,
and Megatron is told that it is of their kind. Only in this process, and only where there is no other.

Llama 3's scaled rotary embedding under slime, which switches it on and leaves the factor at Megatron's default.

Llama 3.1 has that factor, 8; Llama 3.2 has 32, and would be trained as another model than the engine serves. Megatron
knows the argument (`--rope-scaling-factor`), so what it says is put in place once the model is built.
"""

# mypy: disable-error-code="import-not-found"

# mypy: disable-error-code="import-not-found"
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.AdamW):
    """torch's Adam (AdamW with `adam_w_mode`), with the step count in the groups: `group["step"]`, an int.

    Arguments as apex's FusedAdam.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's own looks for a count in each parameter's state

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            count = float(group.get("step", 0))
            for state in self._states(group):
                state["step"] = torch.tensor(count, dtype=torch.float32)
        loss = super().step(closure)
        for group in self.param_groups:
            for state in self._states(group):
                group["step"] = int(state.pop("step"))
        return loss

    def _states(self, group: dict[str, Any]) -> list[dict[str, Tensor]]:
        """Of the parameters that were stepped before: a new one's is made by torch."""
        return [self.state[p] for p in group["params"] if self.state.get(p)]


def use_group_step_adam() -> None:
    """Once in each worker, before Megatron makes its optimizer. Again is harmless."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def set_factor(args: Namespace, chunks: Iterable[Any]) -> None:
    """Before the first forward pass: the embedding keeps what it computed."""
    if not args.use_rope_scaling:
        return
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = RotaryEmbedding(
                kv_channels=2 * len(module.inv_freq),
                rotary_percent=1.0,
                rotary_base=args.rotary_base,
                rope_scaling=True,
                rope_scaling_factor=args.rope_scaling_factor,
                use_cpu_initialization=module.inv_freq.device.type == "cpu",
            ).inv_freq
