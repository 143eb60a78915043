"""Text that no peer trains on: how it is chosen, and what is measured on it.

The one thing you would get wrong: a document is held out by its content, never by its place. Files may be added, moved
or read in another order, and what was held out stays so on every machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out tokens; the same for all peers."""

    tokens: NDArray[Any]
    context: int

    def batches(self, count: int, size: int) -> list[Tensor]:
        """Return up to `count` batches (size, context + 1) int64, spread evenly; fewer where there is less text."""
        width = self.context + 1
        windows = len(self.tokens) // width
        wanted = min(windows, count * size)
        chosen = np.arange(wanted, dtype=np.int64) * windows // max(wanted, 1)
        rows = take_windows(self.tokens, chosen * width, width)
        return [rows[start : start + size] for start in range(0, wanted, size)]

    def probe_ids(self, count: int) -> Tensor:
        """Return (count,) int32 tokens to compare predictions on; fewer where there is less text."""
        return torch.from_numpy(np.array(self.tokens[:count], np.int32))


def is_held_out(text: str, share: float) -> bool:
    """Say whether a document is among that share of all documents."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"peer holdout")
    return int.from_bytes(digest.digest(), "little") < share * 2**64


def take_windows(tokens: NDArray[Any], starts: NDArray[np.int64], width: int) -> Tensor:
    """Return (len(starts), width) int64."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(width)].astype(np.int64))
