"""JS and L2 distance (fallback draft)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    estimate: float
    low: float
    high: float


def top_k(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    top, ids = log_p.topk(k, dim=-1)
    return ids, top, (1 - top.exp().sum(-1)).clamp_(0, 1)


def coarse_js(ids: Tensor, log_probs: Tensor, tail: Tensor, own_log_p: Tensor) -> Estimate:
    q = own_log_p.gather(-1, ids).exp().double()
    p = log_probs.exp().double()
    qt = (1 - q.sum(-1)).clamp(0, 1)
    pt = tail.double()
    P, Q = torch.cat([p, pt[:, None]], 1), torch.cat([q, qt[:, None]], 1)
    m = (P + Q) / 2
    js = (0.5 * (torch.xlogy(P, P / m) + torch.xlogy(Q, Q / m))).nan_to_num(0).sum(-1).clamp(min=0)
    mt = (pt + qt) / 2
    pi = (pt / (pt + qt)).nan_to_num(0.5)
    h = -(torch.xlogy(pi, pi) + torch.xlogy(1 - pi, 1 - pi))
    ln2 = math.log(2)
    d = lambda v: float((v / ln2).clamp(0, 1).sqrt().mean())
    return Estimate(d(js / (1 - mt).clamp(min=1e-6)), d(js), d(js + mt * h))
