"""One rank of a tensor-parallel Megatron model on CPUs: its logits and gradients beside a plain Hugging Face Qwen3.

    python spec_child.py RANK TENSOR_PARALLEL_SIZE STORE_FILE

Prints a JSON line with the largest differences. It needs Megatron-LM on the path, and no GPU: the one call that asks
for a current CUDA device is answered with the CPU.
"""

import json
import sys
from argparse import Namespace

import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu.megatron_weights import Shape, full_tensors, shard

LENGTHS = (5, 7, 4)
SHAPE = Shape(vocab=96, hidden=32, ffn=64, heads=4, groups=2, head_dim=8, layers=2)


def reference() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.groups,
        head_dim=SHAPE.head_dim,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is not applied
                parameter.uniform_(0.5, 1.5)
    return model


def megatron(tp: int):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from openclaw_slime.spec import get_spec

    config = TransformerConfig(
        num_layers=SHAPE.layers,
        hidden_size=SHAPE.hidden,
        ffn_hidden_size=SHAPE.ffn,
        num_attention_heads=SHAPE.heads,
        num_query_groups=SHAPE.groups,
        kv_channels=SHAPE.head_dim,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_spec(None, config),
        vocab_size=SHAPE.vocab,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )


def main(rank: int, tp: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", rank=rank, world_size=tp, init_method=f"file://{store}")
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    theirs, ours = reference(), megatron(tp)
    weights = full_tensors(SHAPE, dict(theirs.named_parameters()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(shard(name, weights.pop(name), rank, tp))
    assert not weights, sorted(weights)

    total = sum(LENGTHS)
    ids = torch.randint(0, SHAPE.vocab, (1, total), generator=torch.Generator().manual_seed(1))
    target = torch.randn(total, SHAPE.vocab, generator=torch.Generator().manual_seed(2))
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    packed = PackedSeqParams(
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        qkv_format="thd",
    )
    logits = ours(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packed)[0]
    expected = torch.cat([theirs(part).logits[0] for part in ids.split(LENGTHS, dim=1)])
    mine = slice(rank * SHAPE.vocab // tp, (rank + 1) * SHAPE.vocab // tp)
    (logits * target[:, mine]).sum().backward()
    (expected * target).sum().backward()
    wanted = full_tensors(SHAPE, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    worst = 0.0
    for name, parameter in ours.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:  # each rank saw its heads: Megatron sums them after backward
            dist.all_reduce(parameter.grad)
        grad = shard(name, wanted[name], rank, tp)
        worst = max(worst, float((parameter.grad - grad).norm() / grad.norm()))
    difference = float((logits - expected[:, mine]).abs().max())
    said = {"rank": rank, "logits": difference, "gradients": worst, "llama3 rope": llama3_rope()}
    sys.stdout.write(json.dumps(said) + "\n")
    dist.destroy_process_group()


def llama3_rope() -> float:
    """Llama 3.2's frequencies as slime's model would have them, beside transformers': the largest ratio off one."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from openclaw_slime.megatron_fixes import set_factor

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=384, num_attention_heads=3, rope_parameters=scaling)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    model = torch.nn.Sequential(
        RotaryEmbedding(128, 1.0, rotary_base=500000, rope_scaling=True, use_cpu_initialization=True)
    )
    arguments = Namespace(use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=500000)
    set_factor(arguments, [model])
    return float((model[0].inv_freq / wanted - 1).abs().max())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
