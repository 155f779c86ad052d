"""Packed rows have the numbers and gradients that each has alone, in every architecture that we name."""

from collections.abc import Callable

import pytest
import torch
from close import assert_close, largest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tolerances import rel
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from openclaw_rl.errors import SettingsError
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import packed_attention as packed_attention_module
from openclaw_rl.trainers.batches import MicroBatch, micro_batches, rows_of
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.packed_attention import PackedLayout, choose_kernel, packed_attention
from openclaw_rl.trainers.step import accumulate
from openclaw_rl.types import Sample

PACKED = TrainerSettings(rank=2, alpha=8, packing="on", micro_batch_tokens=64, max_tokens=64)


@pytest.fixture
def packed_policy(architecture: Callable[[], PreTrainedModel]) -> LoraPolicy:
    policy = LoraPolicy(architecture(), PACKED)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return policy


def gradients_of(policy: LoraPolicy, samples: list[Sample], passes: list[MicroBatch]) -> tuple[list[Tensor], float]:
    policy.cut = lambda rows, token_budget: passes  # type: ignore[method-assign]
    credit = METHOD.advantages(samples, BinarySettings(baseline="none"), {})
    done = accumulate(policy, METHOD, samples, credit, PACKED, BinarySettings(baseline="none"))
    found = [parameter.grad.clone() for parameter in policy.parameters.values() if parameter.grad is not None]
    for parameter in policy.parameters.values():
        parameter.grad = None
    return found, done.loss


def test_packed_rows_give_the_gradients_of_rows_alone(packed_policy: LoraPolicy, batch: list[Sample]) -> None:
    """Alone without our attention's layout: this is transformers' own forward pass of each sample."""
    rows = rows_of(batch)
    packed, loss = gradients_of(packed_policy, batch, micro_batches(rows, 1000, packed=True))
    alone, loss_alone = gradients_of(packed_policy, batch, micro_batches(rows, 1))
    padded, _ = gradients_of(packed_policy, batch, micro_batches(rows, 1000))
    assert loss == pytest.approx(loss_alone, abs=rel(ulps=1024) * len(batch))
    scale = largest(alone)
    assert scale > 1e-3
    assert len(packed) == len(alone) == len(packed_policy.parameters)
    for a, b, c in zip(packed, alone, padded, strict=True):
        assert_close(a, b, ulps=2048, scale=scale)
        assert_close(c, b, ulps=2048, scale=scale)


def test_rows_that_begin_alike_give_the_gradients_of_rows_alone(
    packed_policy: LoraPolicy, make_sample: Callable[..., Sample]
) -> None:
    """A tree: two questions behind one system prompt, several replies to one of them, and a turn that goes on."""
    system, question = tuple(range(10)), tuple(range(30, 39))
    samples = [
        make_sample("1", prompt=(*system, *question), response=6, reward=-1.0),
        make_sample("2", prompt=(*system, *question), response=5),
        make_sample("3", prompt=(*system, 50, 51, 52), response=7, reward=-1.0, temperature=1.0),
        make_sample("4", prompt=5, response=4),
    ]
    first = samples[0]
    samples.append(make_sample("5", prompt=(*first.prompt_ids, *first.response_ids[:3], 7, 8), response=3))
    samples.append(make_sample("6", prompt=(*system, *question), response=(60,)))  # no position of its own
    rows = rows_of(samples)
    (tree,) = passes = packed_policy.cut(rows, 1000)
    assert tree.tokens < 0.6 * sum(len(row.ids) - 1 for row in rows)
    assert {0} < set(tree.starts)
    assert 0 in tree.lengths
    shared, loss = gradients_of(packed_policy, samples, passes)
    alone, loss_alone = gradients_of(packed_policy, samples, micro_batches(rows, 1))
    assert loss == pytest.approx(loss_alone, abs=rel(ulps=1024) * len(samples))
    for a, b in zip(shared, alone, strict=True):
        assert_close(a, b, ulps=2048, scale=largest(alone))


def test_recomputing_packed_rows_changes_no_gradient(packed_policy: LoraPolicy, batch: list[Sample]) -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        (passed,) = packed_policy.cut(rows_of(batch), 1000)
        sum(values.sum() for values in packed_policy.log_probs(passed, recompute=recompute).values()).backward()  # type: ignore[union-attr]
        found = [parameter.grad for parameter in packed_policy.parameters.values() if parameter.grad is not None]
        for parameter in packed_policy.parameters.values():
            parameter.grad = None
        return found

    for kept, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert_close(kept, recomputed, ulps=256)


def test_bfloat16_bases_train_fp32_adapters(make_model: Callable[..., LlamaForCausalLM], batch: list[Sample]) -> None:
    exact, half = (
        LoraPolicy(make_model(dtype=dtype), PACKED.model_copy(update={"packing": packing}))
        for dtype, packing in ((torch.float32, "off"), (torch.bfloat16, "on"))
    )
    found = []
    for policy in (exact, half):
        policy.reset(0)
        with torch.no_grad():
            for name, parameter in policy.parameters.items():
                if ".lora_B." in name:
                    parameter.fill_(0.05)
        found.append(gradients_of(policy, batch, policy.cut(rows_of(batch), 1000))[0])
        assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}
    for a, b in zip(*found, strict=True):
        assert b.dtype is torch.float32
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98


class MixesRows(nn.Module):
    """A layer whose tokens see the row's earlier tokens by other ways than attention."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.layer(hidden.cumsum(1) / 4, *args, **kwargs)


def test_a_model_whose_rows_would_see_each_other_is_padded(
    make_model: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing() -> LlamaForCausalLM:
        model = make_model()
        model.model.layers[0] = MixesRows(model.model.layers[0])
        return model

    with pytest.raises(SettingsError, match="lets packed rows see each other"):
        LoraPolicy(mixing(), PACKED)
    auto, model = PACKED.model_copy(update={"packing": "auto"}), mixing()
    assert LoraPolicy(make_model(), auto).is_packing
    assert not LoraPolicy(make_model(), PACKED.model_copy(update={"packing": "off"})).is_packing
    monkeypatch.setattr(packed_attention_module, "choose_kernel", lambda *shape: "varlen")
    assert LoraPolicy(make_model(), auto).is_packing
    assert not LoraPolicy(model, auto).is_packing
    assert model.config._attn_implementation == "sdpa"


# -- the attention alone -----------------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@hypothesis_settings(max_examples=40)
@given(lengths, st.sampled_from([None, 1, 3]), st.sampled_from([None, 5.0]), st.integers(0, 10**6))
def test_sequences_never_see_each_other_or_what_comes_later(
    lengths: list[int], window: int | None, softcap: float | None, seed: int
) -> None:
    """The output of one token depends on the tokens that a plain mask lets it see, and on no other token; exactly."""
    generator = torch.Generator().manual_seed(seed)
    total, heads, groups, dim = sum(lengths), 2, 2, 4
    q = torch.randn(1, heads * groups, total, dim, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, heads, total, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    v.requires_grad_()
    k.requires_grad_()
    layout = PackedLayout.of(lengths, torch.device("cpu"))
    out, _ = packed_attention(
        nn.Module(), q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap, packed_layout=layout
    )
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    sees = (owner[:, None] == owner[None, :]) & (distance >= 0) & (distance < (window or total))
    wide_k, wide_v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    scores = q @ wide_k.transpose(-1, -2) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    expected = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ wide_v
    assert_close(out.detach(), expected.transpose(1, 2).detach(), ulps=4096)
    token = int(torch.randint(total, (1,), generator=generator))
    for gradient in torch.autograd.grad(out[0, token].sum(), (k, v)):
        assert (gradient[0, :, ~sees[token]] == 0).all()
    assert layout.positions[0].tolist() == [place for length in lengths for place in range(length)]


def test_what_packed_attention_does_not_know_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    layout = PackedLayout.of([1, 2], torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="s_aux"):
        packed_attention(nn.Module(), q, q, q, None, packed_layout=layout, s_aux=torch.zeros(2))
    assert choose_kernel(4, 2, 64, torch.bfloat16, torch.device("cpu")) == "split"
