"""One rank of a tensor-parallel Megatron model on CPUs: its logits and gradients beside a plain Hugging Face Qwen3.

    python spec_child.py RANK TENSOR_PARALLEL_SIZE STORE_FILE

Prints a JSON line with the largest differences. It needs Megatron-LM on the path, and no GPU: the one call that asks
for a current CUDA device is answered with the CPU.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS = (5, 7, 4)
VOCAB, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, LAYERS = 96, 32, 64, 4, 2, 8, 2


def reference() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
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
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
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
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )


def full_weights(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """The Hugging Face tensors under Megatron's names, before they are cut for tensor parallelism."""
    source = {name: parameter for name, parameter in model.named_parameters()}
    found = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
    }
    per_group = HEADS // GROUPS
    for n in range(LAYERS):
        hf, mg = f"model.layers.{n}.", f"decoder.layers.{n}."
        q = source[hf + "self_attn.q_proj.weight"].view(GROUPS, per_group * HEAD_DIM, HIDDEN)
        k = source[hf + "self_attn.k_proj.weight"].view(GROUPS, HEAD_DIM, HIDDEN)
        v = source[hf + "self_attn.v_proj.weight"].view(GROUPS, HEAD_DIM, HIDDEN)
        found[mg + "self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, HIDDEN)
        found[mg + "self_attention.linear_qkv.layer_norm_weight"] = source[hf + "input_layernorm.weight"]
        found[mg + "self_attention.linear_proj.weight"] = source[hf + "self_attn.o_proj.weight"]
        found[mg + "self_attention.q_layernorm.weight"] = source[hf + "self_attn.q_norm.weight"]
        found[mg + "self_attention.k_layernorm.weight"] = source[hf + "self_attn.k_norm.weight"]
        gate, up = source[hf + "mlp.gate_proj.weight"], source[hf + "mlp.up_proj.weight"]
        found[mg + "mlp.linear_fc1.weight"] = torch.stack([gate, up])
        found[mg + "mlp.linear_fc1.layer_norm_weight"] = source[hf + "post_attention_layernorm.weight"]
        found[mg + "mlp.linear_fc2.weight"] = source[hf + "mlp.down_proj.weight"]
    return found


def shard(name: str, tensor: Tensor, rank: int, tp: int) -> Tensor:
    if "linear_fc1.weight" in name:  # gate and up are cut each, then stacked
        return tensor.chunk(tp, 1)[rank].reshape(-1, HIDDEN)
    if "linear_qkv.weight" in name or "word_embeddings" in name:
        return tensor.chunk(tp, 0)[rank]
    if "linear_proj" in name or "linear_fc2.weight" in name:
        return tensor.chunk(tp, 1)[rank]
    return tensor


def main(rank: int, tp: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", rank=rank, world_size=tp, init_method=f"file://{store}")
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    theirs, ours = reference(), megatron(tp)
    weights = full_weights(theirs)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(shard(name, weights.pop(name), rank, tp))
    assert not weights, sorted(weights)

    total = sum(LENGTHS)
    ids = torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(1))
    target = torch.randn(total, VOCAB, generator=torch.Generator().manual_seed(2))
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
    mine = slice(rank * VOCAB // tp, (rank + 1) * VOCAB // tp)
    (logits * target[:, mine]).sum().backward()
    (expected * target).sum().backward()
    wanted, worst = gradients_of(theirs), 0.0
    for name, parameter in ours.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:  # each rank saw its heads: Megatron sums them after backward
            dist.all_reduce(parameter.grad)
        grad = shard(name, wanted[name], rank, tp)
        worst = max(worst, float((parameter.grad - grad).norm() / grad.norm()))
    difference = float((logits - expected[:, mine]).abs().max())
    sys.stdout.write(json.dumps({"rank": rank, "logits": difference, "gradients": worst}) + "\n")
    dist.destroy_process_group()


def gradients_of(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """Under Megatron's names; the model's weights are spent on it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return full_weights(model)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
