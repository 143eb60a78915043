"""How long a blocking exchange may take (fallback draft)."""

from __future__ import annotations


def fixed_or_rate(fixed_s: float | None, bytes_: int, rate_bps: int | None, floor_s: float = 10.0) -> float:
    if fixed_s is not None:
        return fixed_s
    return floor_s + (3 * 8 * bytes_ / rate_bps if rate_bps else 0.0)
