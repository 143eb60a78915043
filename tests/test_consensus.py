"""JS distance against its definition, and what streamed top-k predictions tell of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.consensus import coarse_js, js_distance, l2_distance, top_k

QUICK = settings(derandomize=True, max_examples=30, deadline=None)


def predictions(seed: int, tokens: int = 32, vocabulary: int = 384, sharpness: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(tokens, vocabulary, generator=generator)).log_softmax(-1)


def disturbed(log_p: torch.Tensor, seed: int, by: float) -> torch.Tensor:
    noise = torch.randn(log_p.shape, generator=torch.Generator().manual_seed(seed))
    return (log_p + by * noise).log_softmax(-1)


def entropy_bits(p: list[float]) -> float:
    return -sum(value * math.log2(value) for value in p if value > 0)


def test_js_distance_is_its_definition_in_base_two():
    log_p, log_q = predictions(1, tokens=3, vocabulary=5), predictions(2, tokens=3, vocabulary=5)
    for got, p, q in zip(js_distance(log_p, log_q), log_p.exp().tolist(), log_q.exp().tolist(), strict=True):
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        expected = math.sqrt(entropy_bits(middle) - (entropy_bits(p) + entropy_bits(q)) / 2)
        assert float(got) == pytest.approx(expected, rel=1e-5)


def test_js_distance_is_zero_for_equals_and_one_for_strangers():
    log_p = predictions(3)
    assert torch.equal(js_distance(log_p, log_p), torch.zeros(32, dtype=torch.float64))
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    torch.testing.assert_close(js_distance(certain, certain.flip(0)), torch.ones(2, dtype=torch.float64))


def test_small_disagreement_is_an_eighth_of_the_squared_log_ratio():
    log_p = predictions(4)
    log_q = disturbed(log_p, 5, by=1e-3)
    squared = js_distance(log_p, log_q).square() * math.log(2)
    expected = (log_p.double().exp() * (log_p - log_q).double().square()).sum(-1) / 8
    torch.testing.assert_close(squared, expected, rtol=2e-2, atol=0)


def test_top_k_gives_the_likeliest_tokens_and_what_is_left():
    log_p = predictions(6)
    ids, log_probs, tail = top_k(log_p, 16)
    assert ids.shape == log_probs.shape == (32, 16)
    assert torch.equal(log_p.gather(-1, ids), log_probs)
    assert float(log_probs.min(-1).values.sub(log_p.sort(-1, descending=True).values[:, 15]).abs().max()) == 0.0
    torch.testing.assert_close(tail + log_probs.exp().sum(-1), torch.ones(32))


@given(st.integers(0, 1000), st.sampled_from([1, 4, 16, 64, 384]), st.floats(0.0, 3.0), st.floats(0.1, 6.0))
@QUICK
def test_the_exact_distance_lies_within_the_bounds(seed, k, by, sharpness):
    log_p = predictions(seed, sharpness=sharpness)
    log_q = disturbed(log_p, seed + 1, by)
    exact = float(js_distance(log_p, log_q).mean())
    told = coarse_js(*top_k(log_p, k), log_q)
    slack = 1e-4  # the tail travels as fp32
    assert told.low - slack <= exact <= told.high + slack
    assert told.low - slack <= told.estimate <= told.high + slack
    assert 0.0 <= told.low <= told.high <= 1.0


@pytest.mark.parametrize(("k", "within"), [(64, 0.03), (256, 0.01)])
def test_the_estimate_is_within_a_few_percent(k, within):
    log_p = predictions(8, tokens=128, vocabulary=4000, sharpness=3.0)
    log_q = disturbed(log_p, 9, by=0.2)
    ids, log_probs, tail = top_k(log_p, k)
    exact = float(js_distance(log_p, log_q).mean())
    told = coarse_js(ids, log_probs.half(), tail, log_q)
    assert told.estimate == pytest.approx(exact, rel=within)


def test_equal_predictions_are_near_zero_after_the_wires_rounding():
    log_p = predictions(10)
    ids, log_probs, tail = top_k(log_p, 64)
    assert coarse_js(ids, log_probs.half(), tail, log_p).estimate < 2e-3


def test_impossible_tokens_do_not_make_it_nan():
    log_p = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]])
    log_q = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf]])
    told = coarse_js(*top_k(log_p, 2), log_q)
    assert (told.low, told.estimate, told.high) == pytest.approx((1.0, 1.0, 1.0))


def test_a_strangers_predictions_that_add_up_to_nothing_do_not_make_it_nan():
    ids, nothing = torch.tensor([[0, 1]]), torch.tensor([[-6e4, -6e4]])
    told = coarse_js(ids, nothing, torch.zeros(1), predictions(11, tokens=1))
    assert 0.0 <= told.low <= told.estimate <= told.high <= 1.0


def test_l2_distance_is_the_norm_of_the_difference_in_any_number_of_slices():
    generator = torch.Generator().manual_seed(11)
    a, b = torch.randn(2, (1 << 20) + 77, generator=generator)
    assert l2_distance(a, b) == pytest.approx(float((a.double() - b.double()).norm()), rel=1e-6)
    assert l2_distance(a, a) == 0.0
    assert l2_distance(a[:0], b[:0]) == 0.0
