"""How long a blocking exchange may take. Pure: what was measured comes in as arguments."""

from __future__ import annotations

_MARGIN = 3.0  # links are slower than they say, and both directions share one


def fixed_or_rate(fixed_s: float | None, bytes_: int, rate_bps: int | None, floor_s: float = 10.0) -> float:
    """Return the longest wait for an exchange in which this peer sends `bytes_`.

    A fixed one stands. Otherwise the floor, and on top of it what the bytes take at the configured rate, with margin.
    """
    if fixed_s is not None:
        return fixed_s
    return floor_s + (_MARGIN * 8 * bytes_ / rate_bps if rate_bps else 0.0)
