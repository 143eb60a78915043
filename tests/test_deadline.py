"""How long an exchange may take, before there is history."""

from __future__ import annotations

import pytest

from peer.deadline import fixed_or_rate


@pytest.mark.parametrize(
    ("fixed_s", "bytes_", "rate_bps", "expected_s"),
    [
        (4.5, 10**9, 1_000, 4.5),
        (0.0, 10**9, 1_000, 0.0),
        (None, 0, 100_000_000, 10.0),
        (None, 12_500_000, 100_000_000, 13.0),
        (None, 12_500_000, None, 10.0),
        (None, 12_500_000, 0, 10.0),
    ],
)
def test_a_fixed_deadline_stands_and_else_it_is_three_times_what_the_rate_takes(fixed_s, bytes_, rate_bps, expected_s):
    assert fixed_or_rate(fixed_s, bytes_, rate_bps) == pytest.approx(expected_s)


def test_the_floor_can_be_set():
    assert fixed_or_rate(None, 1_000_000, 8_000_000, floor_s=1.0) == pytest.approx(4.0)
