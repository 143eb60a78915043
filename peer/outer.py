"""Outer optimizer arithmetic: Nesterov momentum on outer gradients (ALGORITHM.md sec. 1, steps 5 to 7).

It runs chunk by chunk, and where a vector is cut must not show in its bits. So there is one elementwise operation at a
time here: a fused multiply-add rounds once in the vectorised part of a loop and may round twice in its tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STABLE_SHARE = 0.85  # of the largest stable gamma


@dataclass(slots=True)
class Vectors:
    """What the outer optimizer knows of the model: fp32 (n_params,) on the CPU."""

    z: Tensor  # where the inner steps start
    v: Tensor  # outer momentum, never mixed
    x: Tensor  # the last mixed parameters; a chunk that was never mixed is the peer's own z


def outer_step(v: Tensor, dm: Tensor, gamma: float, mu: float, x: Tensor, z_out: Tensor) -> None:
    """Set v <- mu v + dm and z_out <- x - gamma (dm + mu v), in place. All (n,); z_out may be x, dm stays."""
    v.mul_(mu).add_(dm)
    update = v.mul(mu).add_(dm).mul_(gamma)
    torch.sub(x, update, out=z_out)


def gamma_cap(gamma: float, mu: float) -> float:
    """Return the gamma to use where Mix2 is off: the disagreement is stable below (1 + mu)/(1 + 2 mu) (sec. 4)."""
    return min(gamma, _STABLE_SHARE * (1 + mu) / (1 + 2 * mu))
