"""Fused layers are the plain ones: gradients exactly, whole models within rounding."""

from collections.abc import Callable

import pytest
import torch
from close import assert_close, largest
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from openclaw_rl.losses import log_probs_of
from openclaw_rl.trainers.fused import (
    HeadLogProbs,
    LinearProduct,
    LoraProduct,
    fuse_linears,
    fuse_lora,
    fuse_norms,
)

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_has_the_gradients_of_its_formula(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias = draw(5, 4), draw(5) if has_bias else None
    x, a, b = (tensor.requires_grad_() for tensor in (draw(3, 4), draw(2, 4), draw(5, 2)))
    expected = nn.functional.linear(x, weight, bias) + 0.7 * x @ a.t() @ b.t()
    assert_close(LoraProduct.apply(x, weight, bias, a, b, 0.7), expected)
    assert torch.autograd.gradcheck(
        lambda *inputs: LoraProduct.apply(inputs[0], weight, bias, *inputs[1:], 0.7), (x, a, b)
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_product_has_the_gradients_of_its_formula(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((7, 48), (33, 48), (33,))][: 2 + has_bias]
    direction = torch.randn(7, 33, generator=generator)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out = function(*leaves, *[None] * (3 - len(leaves)))
        return [out.detach().double(), *torch.autograd.grad((out * direction.to(dtype)).sum(), leaves)]

    exact = run(nn.functional.linear, torch.float64)
    for found, expected in zip(run(LinearProduct.apply, torch.float32), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(run(LinearProduct.apply, torch.float64), exact, strict=True):
        assert_close(found, expected)


def test_the_head_s_log_probs_and_gradients_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    count, width, vocabulary = 150, 24, 97  # more rows than are computed at once

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, direction = draw(count, width), draw(vocabulary, width), draw(count)
    hidden[3] *= 80  # logits whose exponentials overflow
    ids = torch.randint(vocabulary, (count,), generator=generator)
    temperature = torch.where(torch.arange(count) % 2 == 0, 0.7, 1.3).double()

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaf = hidden.to(dtype).requires_grad_()
        found = function(leaf, ids, temperature.to(dtype), weight.to(dtype))
        (gradient,) = torch.autograd.grad((found * direction.to(dtype)).sum(), leaf)
        return [found.detach().double(), gradient.double()]

    def plain(hidden: Tensor, ids: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
        return log_probs_of(hidden @ weight.t(), ids, temperature)

    exact = run(plain, torch.float64)
    for found, expected in zip(run(HeadLogProbs.apply, torch.float64), exact, strict=True):
        assert_close(found, expected, ulps=1024)
    for found, expected in zip(run(HeadLogProbs.apply, torch.float32), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4)
    with torch.no_grad():
        assert_close(HeadLogProbs.apply(hidden, ids, temperature, weight), exact[0], ulps=1024)


def outputs_and_gradients(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    ids = torch.arange(20).view(2, 10)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        logits = model(input_ids=ids).logits
    torch.log_softmax(logits.float(), -1)[..., 7].sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return logits.detach().float(), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_model_is_the_plain_one(architecture: Callable[[], PreTrainedModel], dtype: torch.dtype) -> None:
    model = get_peft_model(architecture().to(dtype), LoraConfig(r=2, lora_alpha=8, target_modules=NAMES)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    plain, gradients = outputs_and_gradients(model, dtype)
    if dtype is torch.float32 and torch.backends.mkldnn.is_available():
        assert fuse_linears(model)
    assert fuse_lora(model) == 2 * len(NAMES)
    fuse_norms(model)
    fused, others = outputs_and_gradients(model, dtype)
    assert len(others) == len(gradients) == 2 * 2 * len(NAMES)
    if dtype is torch.float32:
        assert_close(fused, plain, ulps=1024)
        for a, b in zip(others, gradients, strict=True):
            assert_close(a, b, ulps=2048, scale=largest(gradients))
    else:
        assert float((fused - plain).abs().mean()) < 0.03 * float(plain.std())
        joined = [torch.cat([gradient.flatten() for gradient in each]) for each in (others, gradients)]
        assert torch.cosine_similarity(*joined, dim=0) > 0.99
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=torch.arange(10)[None]).logits.float()
    with torch.no_grad():
        adapted = model(input_ids=torch.arange(10)[None]).logits.float()
        expected = architecture().to(dtype)(input_ids=torch.arange(10)[None]).logits.float()
    assert float((base - expected).abs().mean()) < 0.03 * float(expected.std())
    assert float((base - adapted).abs().mean()) > 0.1 * float(expected.std())


def test_norms_of_another_formula_are_left_alone(architecture: Callable[[], PreTrainedModel]) -> None:
    """Gemma multiplies by one plus the weight."""
    model = architecture()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    fused = fuse_norms(model)
    assert fused == (0 if "Gemma" in type(model).__name__ else len(norms))
