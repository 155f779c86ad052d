"""Three fixes of Megatron at its pin: an Adam that survives a checkpoint, Llama 3's rotary factor, rates of a resume.

`GroupStepAdam`: without Transformer Engine and apex, Megatron's distributed optimizer runs on torch's Adam. Torch keeps
the step count as a tensor in each parameter's state. At the pin such a checkpoint cannot be written in the default
format: the count is taken for a shard of the parameter. It cannot be read in any format either: a fresh optimizer has
no count, and a loaded one gives every parameter the same tensor, so that one step counts as many. Apex and Transformer
Engine keep one number for a group of parameters, and so does this class. `use_group_step_adam` tells Megatron that the
class is of their kind, in this process only, and only if neither is installed.

`set_factor`: slime switches Llama 3's scaled rotary embedding on and leaves the factor at Megatron's default, 8. That
is Llama 3.1's. Llama 3.2 has 32, and would be trained as another model than the engine serves. So the factor of
`--rope-scaling-factor` is set once the model is built.

`use_given_rates`: a loaded optimizer keeps the learning rate and the betas of its checkpoint in its parameter groups.
`--override-opt-param-scheduler` changes the scheduler alone, which reads the groups first.
"""

# mypy: disable-error-code="import-not-found"

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.AdamW):
    """torch's Adam (AdamW with `adam_w_mode`), with an int step count in the groups: `group["step"]`.

    The arguments are those of apex's FusedAdam.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's own expects a count in each parameter's state

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
        """Return the states of parameters that were stepped before; torch makes the state of a new one."""
        return [self.state[p] for p in group["params"] if self.state.get(p)]


def use_group_step_adam() -> None:
    """Make Megatron use GroupStepAdam. Call it in each worker before Megatron makes its optimizer; twice is safe."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def set_factor(args: Namespace, chunks: Iterable[Any]) -> None:
    """Set the rotary factor of the built model. Call it before the first forward pass: the embedding caches values."""
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


def use_given_rates(args: Namespace, optimizer: Any, scheduler: Any) -> None:
    """Set the learning rate and the betas of the arguments in a loaded optimizer."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = args.lr, args.min_lr
        group["betas"] = (args.adam_beta1, args.adam_beta2)
    scheduler.step(increment=0)  # writes the rates of its step count into the groups
