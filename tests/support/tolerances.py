"""Relative tolerances of numeric tests, from the number format: no bound comes from one processor."""

import torch


def rel(dtype: torch.dtype = torch.float32, ulps: float = 64) -> float:
    """Return `ulps` roundings of `dtype` as a relative tolerance; as an absolute one, times the largest magnitude."""
    return ulps * torch.finfo(dtype).eps
