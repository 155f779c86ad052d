"""One rank of Megatron on CPUs: two steps, a checkpoint by Megatron's own functions, a third step; then a fresh model
loads the checkpoint and makes the third step again.

    python checkpoint_child.py RANK RANKS tp|dp STORE_FILE FOLDER [--plain]

A fourth step, whose lease is over, is left out and then made. A third model loads the checkpoint for a run at a tenth
of the learning rate. Prints a JSON line: how far apart the two third steps are, how far a step goes, and the rates. The
calls that ask for a CUDA device are answered with the CPU. --plain: on torch's Adam, as Megatron would.
"""

import json
import sys
from argparse import Namespace
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from openclaw_rl.trainer_protocol import LeaseRef
from openclaw_slime.lease_guard import LeaseGuard
from openclaw_slime.megatron_fixes import use_given_rates, use_group_step_adam
from openclaw_slime.node import without_ours


class OnCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def cuda_name(name: str) -> str:
    return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)


def without_cuda() -> None:
    OnCpu().__enter__()
    if find_spec("six") is None:  # a tokenizer that nobody asks for imports it
        sys.modules["six"] = ModuleType("six")
    named = Tensor.type
    Tensor.type = lambda self, *a, **k: named(self, *a, **k) if a or k else cuda_name(named(self))
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None


def megatron_args(folder: str, tp: int) -> Namespace:
    from megatron.training import arguments

    sys.argv = ["megatron", "--use-distributed-optimizer", "--tensor-model-parallel-size", str(tp)]
    args = arguments.parse_args(ignore_unknown_args=True)
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    vars(args).update(sizes, save=folder, load=folder, use_dist_ckpt=True, max_position_embeddings=64, bf16=True)
    vars(args).update(world_size=dist.get_world_size(), rank=dist.get_rank(), consumed_train_samples=0)
    vars(args).update(consumed_valid_samples=0, skipped_train_samples=0, vocab_file=None, padded_vocab_size=96)
    args.pipeline_model_parallel_size, args.num_query_groups, args.params_dtype = 1, 2, torch.bfloat16
    return args


class Ours:
    """Data that Megatron would not read again."""


class Trainer:
    def __init__(self, tp: int, seed: int, rate: float = 1e-2) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.transformer_config import TransformerConfig

        from openclaw_slime.spec import get_spec

        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2,
            kv_channels=8, use_cpu_initialization=True, normalization="RMSNorm", layernorm_epsilon=1e-6,
            add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            qk_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, bf16=True,
            pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp, apply_rope_fusion=False,
            bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        model = GPTModel(
            config=config, transformer_layer_spec=get_spec(None, config), vocab_size=96, max_sequence_length=64,
            position_embedding_type="rope", rotary_base=10000, share_embeddings_and_output_weights=True,
            parallel_output=True,
        ).to(torch.bfloat16)  # fmt: skip
        how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, how, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=rate, weight_decay=0.0, bf16=True, params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )  # fmt: skip
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=rate, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=100,
            lr_decay_style="constant", start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
            override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False,
        )  # fmt: skip

    def step(self, number: int) -> None:
        """Make a step, as slime's `train_one_step` does."""
        from megatron.core.distributed import finalize_model_grads

        dice = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 96, (1, 16), generator=dice)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits = self.model(input_ids=ids, position_ids=None, attention_mask=None)
        (logits.float() * torch.randn(logits.shape, generator=dice)).sum().backward()
        finalize_model_grads([self.model])
        if not self.optimizer.prepare_grads():
            assert self.optimizer.step()[0]
            self.scheduler.step(increment=1)

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def weights(self) -> Tensor:
        """The fp32 masters of this rank, which show what bf16 hides."""
        groups = self.optimizer.chained_optimizers[0].shard_fp32_from_float16_groups
        return torch.cat([p.detach().flatten() for group in groups for p in group]).clone()


def left_out(trainer: Trainer) -> dict[str, float]:
    """Leave a step out because its lease is over, and then make it."""
    before, made = trainer.weights(), trainer.scheduler.num_steps
    guard = LeaseGuard(trainer.optimizer, lambda _: True)
    guard.watch(LeaseRef(lease_id="lease-4", fence=4))
    trainer.step(4)
    found = {"left_out": float((trainer.weights() - before).abs().max()), "steps": trainer.scheduler.num_steps - made}
    trainer.step(4)  # the next one; Megatron itself prepares the gradients once more inside it
    return {**found, "made": float((trainer.weights() - before).abs().max())}


def at_another_rate(tp: int, loaded: Tensor) -> dict[str, object]:
    from megatron.training.checkpointing import load_checkpoint

    other = Trainer(tp, seed=7, rate=1e-3)
    load_checkpoint([other.model], other.optimizer, other.scheduler)
    found = {"checkpoints_rates": other.rates}
    use_given_rates(Namespace(lr=1e-3, min_lr=0.0, adam_beta1=0.9, adam_beta2=0.999), other.optimizer, other.scheduler)
    other.step(3)
    return {**found, "rates": other.rates, "moved_slower": float((other.weights() - loaded).abs().max())}


def main(rank: int, ranks: int, kind: str, store: str, folder: str, flags: list[str]) -> None:
    torch.set_num_threads(1)
    without_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint
    from megatron.training.global_vars import set_args

    tp = ranks if kind == "tp" else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(rank, None, 1, 1, 1, False)
    if "--plain" not in flags:
        use_group_step_adam()
    args = megatron_args(folder, tp)
    args.openclaw = Ours()
    set_args(args)
    first = Trainer(tp, seed=rank)
    for number in (1, 2):
        first.step(number)
    with without_ours(args):
        save_checkpoint(2, [first.model], first.optimizer, first.scheduler, 0)
    saved = first.weights()
    first.step(3)

    again = Trainer(tp, seed=100 + rank)
    iteration, _ = load_checkpoint([again.model], again.optimizer, again.scheduler)
    loaded = again.weights()
    again.step(3)
    answer = {
        "iteration": iteration,
        "scheduler": again.scheduler.num_steps,
        "loaded": float((loaded - saved).abs().max()),
        "continued": float((again.weights() - first.weights()).abs().max()),
        "moved": float((first.weights() - saved).abs().max()),
    }
    answer |= at_another_rate(tp, loaded)
    answer |= left_out(again)
    sys.stdout.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], sys.argv[6:])
