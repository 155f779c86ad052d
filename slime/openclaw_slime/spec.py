"""A Megatron layer spec for packed (THD) training where Transformer Engine, apex and flash-attn are not installed.

    --transformer-impl local --spec openclaw_slime.spec get_spec

slime packs each micro-batch into one stream of tokens (`PackedSeqParams(qkv_format="thd")`) and names parameters as
Transformer Engine's fused "norm + linear" modules do; Megatron's own local spec refuses packed sequences and names the
norms otherwise. This one keeps slime's names and computes attention with `torch.nn.attention.varlen`, the
flash-attention kernel inside PyTorch.

Dense decoders with RMSNorm or LayerNorm (Qwen2, Qwen3, Llama), tensor and sequence parallel. Not covered: context
parallelism, mixture of experts, latent attention, multi-token prediction, fp8, attention dropout, CUDA graphs.
"""

# Megatron is untyped, and there only on hosts that train with it.
# mypy: disable-error-code="no-untyped-def,misc,import-not-found"

import itertools
import math

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def _norm_parameter(config, size, value):
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.full((size,), value, dtype=config.params_dtype, device=device))
    # Megatron all-reduces the gradients of parameters marked so over the tensor-parallel group.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def _normalize(config, x, weight, bias, eps):
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm by `config.normalization`; allows sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_unused):
        super().__init__()
        self.config = config
        self.eps = eps
        self.weight = _norm_parameter(config, hidden_size, 0.0 if config.layernorm_zero_centered_gamma else 1.0)
        self.bias = _norm_parameter(config, hidden_size, 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, x):
        return _normalize(self.config, x, self.weight, self.bias, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then column-parallel linear, with TransformerEngine's parameter names.

    Parameters: `weight`, `bias`, `layer_norm_weight` and, for LayerNorm, `layer_norm_bias`.
    """

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        zero_centered = config.layernorm_zero_centered_gamma
        self.layer_norm_weight = _norm_parameter(config, input_size, 0.0 if zero_centered else 1.0)
        self.layer_norm_bias = _norm_parameter(config, input_size, 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, input_, *args, **kwargs):
        normalized = _normalize(
            self.config, input_, self.layer_norm_weight, self.layer_norm_bias, self.config.layernorm_epsilon
        )
        return super().forward(normalized, *args, **kwargs)


class VarlenCoreAttention(MegatronModule):
    """Causal attention over packed sequences; never materialises the score matrix."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("VarlenCoreAttention does not support context parallelism")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError("VarlenCoreAttention does not support attention dropout (set --attention-dropout 0)")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"VarlenCoreAttention is causal only, got {attn_mask_type}")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        # Grouped-query attention: give every query head its own key and value head.
        repeats = query.size(-2) // key.size(-2)
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=-2)
            value = value.repeat_interleave(repeats, dim=-2)
        if packed_seq_params is None:
            return self._unpacked(query, key, value)
        if packed_seq_params.qkv_format != "thd":
            raise ValueError(f"unsupported packed layout {packed_seq_params.qkv_format!r}")
        lengths = packed_seq_params.cu_seqlens_q
        if query.is_cuda and query.dtype in _KERNEL_DTYPES:
            from torch.nn.attention.varlen import varlen_attn

            out = varlen_attn(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                lengths,
                packed_seq_params.cu_seqlens_kv,
                int(packed_seq_params.max_seqlen_q),
                int(packed_seq_params.max_seqlen_kv),
                scale=self.softmax_scale,
                window_size=(-1, 0),
            )
        else:  # CPU or float32: for tests only
            bounds = lengths.tolist()
            out = torch.cat(
                [
                    self._unpacked(query[a:b, None], key[a:b, None], value[a:b, None]).view(b - a, *query.shape[1:])
                    for a, b in itertools.pairwise(bounds)
                    if b > a
                ]
            )
        return out.flatten(-2)  # [tokens, heads * head_dim]

    def _unpacked(self, query, key, value):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, h, d] -> [b, h, s, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(-2)


def get_spec(args, config, vp_stage=None):
    """Return the block spec of this pipeline stage; slime's `--spec` calls this function."""
    if config.num_moe_experts or config.multi_latent_attention:
        raise ValueError("varlen_spec covers dense multi-head or grouped-query attention models only")
    head_norm = Norm if config.qk_layernorm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=NormColumnParallelLinear,
                    core_attention=VarlenCoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=Norm
    )
