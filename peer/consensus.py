"""How far peers are from each other: JS distance of predictions, L2 distance of parameters (ALGORITHM.md sec. 4).

JS distance tracks instability, L2 does not. Logarithms are base 2, so a JS distance lies in 0..1. The one thing to get
wrong: near agreement the divergence is a small difference of large terms, so it is taken in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE = 1 << 20  # elements differenced at a time, so that no copy of the model is made


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean JS distance over tokens, from coarse predictions: the exact one lies in low..high."""

    estimate: float
    low: float
    high: float


def js_distance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the JS distance of each token's predictions, double (tokens,). Natural log-probs (tokens, vocab)."""
    return _distance(_divergence(log_p.double().exp(), log_q.double().exp()))


def top_k(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k likeliest token ids (tokens, k), their log-probs (tokens, k) and the mass outside (tokens,)."""
    log_probs, ids = log_p.topk(k, dim=-1)
    return ids, log_probs, _outside(log_probs.double().exp()).to(log_p.dtype)


def coarse_js(ids: Tensor, log_probs: Tensor, tail: Tensor, own_log_p: Tensor) -> Estimate:
    """Compare another peer's `top_k` with our own full predictions, log-probs (tokens, vocab).

    Ours are coarsened onto their partition. What is inside the tail cannot be seen: it adds between nothing and
    m_T h(pi) to the divergence.
    """
    theirs = log_probs.double().exp()
    ours = own_log_p.gather(-1, ids).double().exp()
    p_tail, q_tail = tail.double(), _outside(ours)
    p = torch.cat([theirs, p_tail.unsqueeze(-1)], -1)
    # fp16 log-probs on the wire no longer add up to one, and a stranger's may add up to nothing.
    p /= p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    coarse = _divergence(p, torch.cat([ours, q_tail.unsqueeze(-1)], -1))
    both = p_tail + q_tail
    hidden = both / 2 * _binary_entropy(p_tail / both.clamp_min(torch.finfo(torch.float64).tiny))
    low, high = _distance(coarse), _distance(coarse + hidden)
    inside = (1 - both / 2).clamp_min(1e-6)
    estimate = torch.minimum(_distance(coarse / inside), high)
    return Estimate(float(estimate.mean()), float(low.mean()), float(high.mean()))


def l2_distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| of two flat vectors."""
    assert a.shape == b.shape
    slices = (slice(start, start + _SLICE) for start in range(0, len(a), _SLICE))
    return math.sqrt(sum(float((a[part] - b[part]).square_().sum(dtype=torch.float64)) for part in slices))


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return JSD(p, q) over the last axis, in nats."""
    middle = ((p + q) / 2).clamp_min_(torch.finfo(p.dtype).tiny)
    return (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).sum(-1) / 2


def _distance(divergence: Tensor) -> Tensor:
    return (divergence / math.log(2)).clamp(0.0, 1.0).sqrt()


def _outside(probabilities: Tensor) -> Tensor:
    return (1 - probabilities.sum(-1)).clamp(0.0, 1.0)


def _binary_entropy(pi: Tensor) -> Tensor:
    return -(torch.xlogy(pi, pi) + torch.xlogy(1 - pi, 1 - pi))
