"""Stage `tp`: one rank of a tensor-parallel step in the real Megatron with our layer spec, beside a plain fp32 pass.

    torchrun --nproc-per-node 2 -m gpu.node_tp --out FILE [--tiny]

Each case is one optimizer step on a batch of five replies, with our losses on logits that are sharded over the
vocabulary. It reports the loss, the gradient norm of the optimizer, and the parameter with the largest error of its
gradient. Then the batch is filled up to eight with masked copies, and cut into micro-batches: the gradient must be that
of the batch of five.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gpu.megatron_weights import TINY, Shape, full_tensors, is_cut, shard
from openclaw_rl import losses
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_slime.rollout import Extras, extras_of, train_data_of
from openclaw_slime.vocab_parallel import VocabShard, gathered_log_probs

GLOBAL_BATCH = 8
PAD_TO = 128


# -- the plain pass ----------------------------------------------------------------------------------------------------


def plain_model(shape: Shape) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, tie_word_embeddings=True,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        head_dim=shape.head_dim, rms_norm_eps=1e-6, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is not applied
                parameter.uniform_(0.5, 1.5)
    return model


def batch_of(shape: Shape, model: Qwen3ForCausalLM, device: str) -> list[Extras]:
    """Return replies with the plain pass's log-probs plus a little noise, in the place of an engine's."""
    random = torch.Generator().manual_seed(1)
    bodies, credits = [], []
    for n, (prompt, response) in enumerate(shape.replies):
        ids = torch.randint(0, shape.vocab, (prompt + response,), generator=random)
        with torch.no_grad():
            logits = model(ids[None].to(device)).logits[0, prompt - 1 : -1]
            log_probs = losses.log_probs_of(logits, ids[prompt:].to(device), 1.0).cpu()
        shaken = log_probs + 0.1 * torch.randn(response, generator=random)
        mask = torch.rand(response, generator=random) < 0.9
        mask[0] = True
        bodies.append(
            SampleBody(
                sample_id=str(n), prompt_ids=ids[:prompt].tolist(), response_ids=ids[prompt:].tolist(),
                loss_mask=mask.tolist(), rollout_log_probs=shaken.tolist(), versions=[(0, response)], temperature=1.0,
            )
        )  # fmt: skip
        credits.append(((-1.0) ** n * torch.rand(response, generator=random)).tolist())
    return extras_of(bodies, credits, len(bodies))


def sample_loss(row: Extras, log_probs: Tensor) -> Tensor:
    """Return the loss, summed over the reply's trained tokens; the old log-probs are the engine's."""
    device = log_probs.device
    mask = torch.tensor(row.sample.loss_mask, device=device) & (not row.is_filler)
    old = torch.tensor(row.sample.rollout_log_probs, device=device)
    return losses.clipped_policy_loss(
        log_probs, old, torch.tensor(row.advantages, device=device), mask, clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )


def plain_step(model: Qwen3ForCausalLM, rows: list[Extras], device: str) -> float:
    """Return the mean over the batch of the mean over each reply's tokens; gradients stay in the model."""
    total = 0.0
    for row in rows:
        ids = torch.tensor(row.sample.prompt_ids + row.sample.response_ids, device=device)
        start = len(row.sample.prompt_ids)
        log_probs = losses.log_probs_of(model(ids[None]).logits[0, start - 1 : -1], ids[start:], 1.0)
        loss = sample_loss(row, log_probs) / sum(row.sample.loss_mask) / len(rows)
        loss.backward()
        total += float(loss.detach())
    return total


# -- Megatron ----------------------------------------------------------------------------------------------------------


def megatron_model(shape: Shape, dtype: torch.dtype, tp: int, *, sequence_parallel: bool, device: str) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from openclaw_slime.spec import get_spec

    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads, num_query_groups=shape.groups, kv_channels=shape.head_dim,
        use_cpu_initialization=device == "cpu", perform_initialization=False, normalization="RMSNorm",
        layernorm_epsilon=1e-6, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, qk_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, bf16=dtype == torch.bfloat16, pipeline_dtype=dtype, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel, apply_rope_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, attention_softmax_in_fp32=True,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_spec(None, config), vocab_size=shape.vocab,
        max_sequence_length=8192, position_embedding_type="rope", rotary_base=1_000_000,
        share_embeddings_and_output_weights=True, parallel_output=True,
    ).to(device)  # fmt: skip
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=device == "cuda", overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, how, model)


def packed_loss(model: Any, rows: list[Extras], denominators: list[float], shape: Shape, device: str) -> Tensor:
    """Return the loss of replies in one packed stream, as slime packs them, with the padding as one more sequence."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    streams = [row.sample.prompt_ids + row.sample.response_ids for row in rows]
    lengths = [len(ids) for ids in streams]
    padding = -sum(lengths) % PAD_TO
    longest = max(*lengths, padding)
    bounds = [0]
    for length in [*lengths, padding]:
        bounds.append(bounds[-1] + length)
    cut = torch.tensor(bounds, dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        cu_seqlens_q=cut, cu_seqlens_kv=cut, max_seqlen_q=longest, max_seqlen_kv=longest, qkv_format="thd"
    )
    ids = torch.tensor([[i for stream in streams for i in stream] + [0] * padding], device=device)
    logits = model(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)[0]
    group = parallel_state.get_tensor_model_parallel_group()
    columns = VocabShard.of(group, logits.shape[-1], shape.vocab)
    total = logits.new_zeros((), dtype=torch.float32)
    for row, start, denominator in zip(rows, bounds, denominators, strict=False):
        first, n = start + len(row.sample.prompt_ids), len(row.sample.response_ids)
        log_probs = gathered_log_probs(
            logits[first - 1 : first - 1 + n], ids[0, first : first + n, None], torch.ones(n, device=device), columns
        )[:, 0]
        total = total + sample_loss(row, log_probs) / denominator
    return total / GLOBAL_BATCH


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    dtype: torch.dtype
    sequence_parallel: bool
    fillers: bool = False
    micro_batches: int = 1


CASES = (
    Case("bf16, sequence parallel", torch.bfloat16, True),
    Case("bf16", torch.bfloat16, False),
    Case("bf16, sequence parallel, three fillers", torch.bfloat16, True, fillers=True),
    Case("fp32, sequence parallel", torch.float32, True),
    Case("fp32, three fillers, three micro-batches", torch.float32, True, fillers=True, micro_batches=3),
)


def run_case(case: Case, shape: Shape, rows: list[Extras], truth: "Truth", rank: int, tp: int, device: str) -> Any:
    from megatron.core.distributed import finalize_model_grads

    started = time.monotonic()
    model = megatron_model(shape, case.dtype, tp, sequence_parallel=case.sequence_parallel, device=device)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.copy_(shard(name, truth.weights[name].to(device), rank, tp))
    step = optimizer(model, case.dtype) if device == "cuda" else None
    filled = extras_of([r.sample for r in rows], [r.advantages for r in rows], GLOBAL_BATCH if case.fillers else 5)
    # Without fillers the five are a whole batch; slime divides by the global batch size in either case.
    denominators = [d * len(filled) / GLOBAL_BATCH for d in train_data_of(filled)["rollout_mask_sums"]]
    model.zero_grad_buffer()
    value = 0.0
    for at in range(case.micro_batches):
        part = slice(at, None, case.micro_batches)
        loss = packed_loss(model, filled[part], denominators[part], shape, device)
        loss.backward()
        value += float(loss.detach())
    finalize_model_grads([model])
    sums, worst = torch.zeros(2, device=device, dtype=torch.float64), []
    for name, parameter in model.module.named_parameters():
        grad = parameter.main_grad.float()
        wanted = shard(name, truth.grads[name].to(device), rank, tp)
        pair = torch.stack([(grad - wanted).double().square().sum(), wanted.double().square().sum()])
        if is_cut(name):
            dist.all_reduce(pair)
        worst.append((float((pair[0] / pair[1].clamp_min(1e-30)).sqrt()), name))
        sums += pair
    figures: dict[str, Any] = {
        "loss": value,
        "loss of the plain pass": truth.loss,
        "gradient norm of the plain pass": float(sums[1].sqrt()),
        "gradient, relative error": float((sums[0] / sums[1]).sqrt()),
        "worst parameters": [[name, round(error, 6)] for error, name in sorted(worst, reverse=True)[:3]],
    }
    if step is not None:
        is_stepped, norm, _ = step.step()
        figures["gradient norm"] = float(norm)
        figures["stepped"] = bool(is_stepped)
        model.zero_grad_buffer()
        with torch.no_grad():
            after = sum(
                float(packed_loss(model, filled[slice(at, None, case.micro_batches)],
                                  denominators[slice(at, None, case.micro_batches)], shape, device))
                for at in range(case.micro_batches)
            )  # fmt: skip
        figures["loss after the step"] = after
    return figures | {"seconds": round(time.monotonic() - started, 2)}


def optimizer(model: Any, dtype: torch.dtype) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-5, weight_decay=0.0, adam_beta2=0.98, clip_grad=1e9, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, use_distributed_optimizer=True,
    )  # fmt: skip
    return get_megatron_optimizer(config, [model])


@dataclass(frozen=True, slots=True)
class Truth:
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    loss: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on CPUs, for a rehearsal")
    given = parser.parse_args()
    rank, tp = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, shape = "cuda", Shape()
    cases: Sequence[Case] = CASES
    if given.tiny:
        device, shape = "cpu", TINY
        cases = tuple(case for case in CASES if case.dtype == torch.float32)
        cases = tuple(Case(c.name, c.dtype, False, c.fillers, c.micro_batches) for c in cases)
        torch.set_num_threads(1)
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    else:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    if device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    plain = plain_model(shape).to(device)
    weights = {k: v.detach().clone() for k, v in full_tensors(shape, dict(plain.named_parameters())).items()}
    rows = batch_of(shape, plain, device)
    loss = plain_step(plain, rows, device)
    grads = full_tensors(shape, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    truth = Truth(weights, {name: grad.clone() for name, grad in grads.items()}, loss)
    del plain
    results: dict[str, Any] = {"torch": torch.__version__, "tensor parallel": tp}
    for case in cases:
        try:
            results[case.name] = run_case(case, shape, rows, truth, rank, tp, device)
        except Exception as error:
            traceback.print_exc()
            results[case.name] = {"failed": repr(error)[:1500]}
        gc.collect()
        if rank == 0:
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            sys.stdout.write(f"== tp: {case.name}: {json.dumps(results[case.name])}\n")
            sys.stdout.flush()
    dist.destroy_process_group()
    return int(any("failed" in figures for figures in results.values() if isinstance(figures, dict)))


if __name__ == "__main__":
    sys.exit(main())
