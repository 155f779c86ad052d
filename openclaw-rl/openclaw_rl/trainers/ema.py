"""The EMA teacher: a slow mean of the policy's versions, as an adapter of the same shape beside theirs.

    W̄_v = d · W̄_{v−1} + (1 − d) · s B_v A_v,   W̄_0 = 0: the base, which is what the policy starts as

What is averaged is the *product*. A mean of the factors is another adapter: B̄ Ā has the cross terms B_u A_w of versions
that never were one policy, and the same product in other factors (B R)(R⁻¹ A) would give another mean. The mean of two
products of rank r has rank 2r at most; its best approximation of rank r (Eckart–Young) is kept, by a QR of the stacked
factors and an SVD of a 2r × 2r core, never of a matrix of the model's size. `ema_truncation` reports the share of W̄
that this leaves out; versions that follow each other differ little, so it is small.

Promises: a restart goes on where it was; a version from before there was a teacher starts one as that version.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from openclaw_rl.trainers.checkpoint import EMA_FOLDER
from openclaw_rl.trainers.lora import LoraPolicy

_A, _B = ".lora_A.", ".lora_B."


class EmaTeacher:
    def __init__(self, policy: LoraPolicy, decay: float) -> None:
        """decay: share of the old mean that each version keeps."""
        self._policy, self._decay = policy, decay
        self._mean: dict[str, Tensor] = {}

    def load(self, version: Path | None) -> None:
        """The mean of this version, whose adapter the policy holds; None: the base. Raises TrainerError."""
        if version is None:
            self._mean = {name: torch.zeros_like(tensor) for name, tensor in self._policy.tensors().items()}
        elif (version / EMA_FOLDER).is_dir():
            self._mean = self._policy.read(version / EMA_FOLDER)
        else:
            self._mean = self._policy.tensors()

    def follow(self) -> float:
        """Take the policy's new adapter into the mean; the share that the rank leaves out."""
        old, new = self._mean, self._policy.tensors()
        self._mean, left_out, whole = {}, 0.0, 0.0
        for a_name in (name for name in new if _A in name):
            b_name = a_name.replace(_A, _B)
            found = _mean((old[a_name], old[b_name]), (new[a_name], new[b_name]), self._decay)
            self._mean |= {a_name: found.a, b_name: found.b}
            left_out, whole = left_out + found.left_out, whole + found.whole
        return math.sqrt(left_out / whole) if whole else 0.0

    def write(self, version: Path) -> None:
        folder = version / EMA_FOLDER
        folder.mkdir(mode=0o700)
        self._policy.save(folder, self._mean)


@dataclass(frozen=True, slots=True)
class _Mean:
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    left_out: float
    whole: float
    """Squared norms."""


def _mean(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], decay: float) -> _Mean:
    """Of rank r nearest to decay · B_old A_old + (1 − decay) · B_new A_new. Shapes: A [r, in], B [out, r]."""
    (a_old, b_old), (a_new, b_new) = old, new
    rank = a_new.shape[0]
    q_out, r_out = torch.linalg.qr(torch.cat([decay * b_old, (1 - decay) * b_new], 1).double())  # of [out, 2r]
    q_in, r_in = torch.linalg.qr(torch.cat([a_old, a_new]).double().T)  # of [in, 2r]
    u, s, v = torch.linalg.svd(r_out @ r_in.T, full_matrices=False)
    root = s[:rank].sqrt()
    a, b = root[:, None] * (v[:rank] @ q_in.T), q_out @ u[:, :rank] * root
    missing = rank - len(root)  # in a layer narrower than the rank
    a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))
    return _Mean(a.float(), b.float(), float(s[rank:].square().sum()), float(s.square().sum()))
