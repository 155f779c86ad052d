"""Comparisons of tensors whose bound follows from the number format and the values' magnitude (`tolerances.rel`)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tolerances import rel
from torch import Tensor


def assert_close(
    actual: Tensor, expected: Tensor, *, ulps: float = 64, scale: float | None = None, dtype: torch.dtype | None = None
) -> None:
    """Check that the tensors agree within `ulps` roundings at `scale`.

    scale: the magnitude of what was added up; by default the largest expected value. dtype: of the computation, where
    the expected tensor is wider.
    """
    if scale is None:
        scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    bound = rel(dtype or expected.dtype, ulps)
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound * scale)


def approx(expected: Sequence[float], *, ulps: float = 64, dtype: torch.dtype = torch.float32) -> Any:
    """Return a pytest approximation of the values within `ulps` roundings at the largest of them."""
    return pytest.approx(list(expected), rel=0, abs=rel(dtype, ulps) * max(map(abs, expected), default=0.0))


def largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest magnitude in the tensors."""
    return max(float(tensor.detach().abs().max()) for tensor in tensors)
