"""The outer step against PyTorch's own Nesterov momentum, in any cut, and the stability it promises."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.outer import gamma_cap, outer_step

SIZE = 1003


def randoms(seed: int, count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


def test_rounds_alone_are_pytorchs_nesterov_momentum_on_outer_gradients():
    z = randoms(1)[0]
    reference = torch.nn.Parameter(z.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    v = torch.zeros(SIZE)
    for round_ in range(6):
        delta = randoms(10 + round_)[0]
        reference.grad = delta.clone()
        sgd.step()
        outer_step(v, delta, 0.7, 0.9, z.clone(), z)
        torch.testing.assert_close(z, reference.detach(), rtol=1e-6, atol=1e-6)


@given(st.lists(st.integers(0, SIZE), max_size=6))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_the_bits_do_not_depend_on_where_the_vector_is_cut(cuts):
    v, delta, x = randoms(3, 3)
    whole_v, whole_z = v.clone(), torch.empty(SIZE)
    outer_step(whole_v, delta, 0.7, 0.9, x, whole_z)
    z = torch.empty(SIZE)
    edges = [0, *sorted(cuts), SIZE]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        outer_step(v[part], delta[part], 0.7, 0.9, x[part], z[part])
    assert torch.equal(z, whole_z)
    assert torch.equal(v, whole_v)


def test_z_may_be_written_over_x_and_the_outer_gradient_stays():
    v, delta, x = randoms(4, 3)
    expected, kept = torch.empty(SIZE), delta.clone()
    outer_step(v.clone(), delta, 0.7, 0.9, x, expected)
    outer_step(v, delta, 0.7, 0.9, x, x)
    assert torch.equal(x, expected)
    assert torch.equal(delta, kept)


def test_the_mean_of_z_follows_the_recursion_when_both_mixes_keep_the_mean():
    """ALGORITHM.md sec. 1: zbar' = zbar - gamma (Dbar + mu vbar'), vbar' = mu vbar + Dbar."""
    peers, gamma, mu = 4, 0.7, 0.9
    z = [randoms(20 + i)[0] for i in range(peers)]
    v = [torch.zeros(SIZE) for _ in range(peers)]
    z_mean, v_mean = torch.stack(z).double().mean(0), torch.zeros(SIZE, dtype=torch.float64)
    for round_ in range(5):
        deltas = [randoms(100 * round_ + i)[0] for i in range(peers)]
        d_mean = torch.stack(deltas).double().mean(0)
        v_mean = mu * v_mean + d_mean
        z_mean = z_mean - gamma * (d_mean + mu * v_mean)
        pairs = ((0, 1), (2, 3)) if round_ % 2 else ((0, 2), (1, 3))
        x = torch.stack(z).mean(0)
        for i, j in pairs:
            mixed = (deltas[i] + deltas[j]) / 2
            for k in (i, j):
                outer_step(v[k], mixed, gamma, mu, x, z[k])
    got = torch.stack(z).double().mean(0)
    assert float((got - z_mean).norm() / z_mean.norm()) < 1e-6


def spread_after(gamma: float, mu: float, rounds: int) -> float:
    """Return the disagreement left of 1 without Mix2: exact Mix1 (x = 0), inner loops that contract all of it."""
    z, v, x = torch.ones(1), torch.zeros(1), torch.zeros(1)
    for _ in range(rounds):
        outer_step(v, z.clone(), gamma, mu, x, z)
    return float(z.abs())


def test_without_mix2_dilocos_gamma_is_unstable_and_the_capped_one_is_not():
    assert spread_after(0.7, 0.9, 400) > 10
    assert spread_after(gamma_cap(0.7, 0.9), 0.9, 400) < 1e-6


@pytest.mark.parametrize(("gamma", "mu", "expected"), [(0.7, 0.9, 0.85 * 1.9 / 2.8), (0.3, 0.9, 0.3), (1.0, 0.0, 0.85)])
def test_the_cap_lowers_gamma_only_where_it_must(gamma, mu, expected):
    assert gamma_cap(gamma, mu) == pytest.approx(expected)
