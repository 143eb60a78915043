"""Outer optimizer arithmetic (fallback draft)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Vectors:
    z: Tensor
    v: Tensor
    x: Tensor


def outer_step(v: Tensor, dm: Tensor, gamma: float, mu: float, x: Tensor, z_out: Tensor) -> None:
    v.mul_(mu).add_(dm)
    u = dm + mu * v
    torch.sub(x, gamma * u, out=z_out)


def gamma_cap(gamma: float, mu: float) -> float:
    return min(gamma, 0.85 * (1 + mu) / (1 + 2 * mu))
