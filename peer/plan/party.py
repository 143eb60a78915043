"""A party to a plan: what planning needs to know of a member, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Party:
    """One peer that takes part in an exchange."""

    id: str
    dialable: bool = True  # somebody can open a stream to it
    upload_bps: int = 0  # as it declares; 0: unknown, taken as average


def draw(*parts: bytes | str | int) -> int:
    """Return 64 bits that every peer draws alike, whatever its Python or machine."""
    hash_ = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        hash_.update(len(raw).to_bytes(4, "little") + raw)  # lengths, so that ("ab", "c") is not ("a", "bc")
    return int.from_bytes(hash_.digest(), "little")
