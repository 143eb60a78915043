"""Tensor <-> bytes: fp32, bf16, int8 and int4.

A codec is a stateless value, so any thread may use any codec: zstandard objects corrupt data when shared, and live for
one call. The one thing to get wrong: a payload comes from a stranger. Sizes are checked against the run's own before
memory is taken, and nothing that decodes to a non-finite value comes through.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from peer.errors import FrameError

Payload = bytes | memoryview

BLOCK = 256  # values that share a scale
_TOP = 32768.0  # fp16 scale of a chunk's largest block: the others may be 2**39 times smaller
_SMALLEST = 2.0**-80  # a chunk without a larger value codes as zeros; keeps steps clear of fp32's subnormals
_FP32_MAX = torch.finfo(torch.float32).max
_BF16_GAIN = 1.43  # what zstd takes off trained parameters and outer gradients, measured
_ZSTD_LEVEL = 1  # higher ones are slower and no smaller on byte planes


class Codec(Protocol):
    """One way to write a chunk."""

    @property
    def name(self) -> str: ...

    @property
    def wire_id(self) -> int: ...

    @property
    def bits(self) -> float:
        """How many a value takes, about."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives back the bits that were encoded."""

    def encode(self, values: Tensor, seed: int) -> bytes:
        """Write fp32 (n,), contiguous, on the CPU. The same seed gives the same bytes.

        Non-finite values are written as such: whoever decodes the payload, the sender included, refuses it.
        """

    def decode(self, payload: Payload, n: int) -> Tensor:
        """Return n values as a new fp32 (n,) tensor. Raises FrameError."""

    def size(self, n: int) -> int:
        """Return how many bytes n values take; what is expected, where that depends on the values."""

    def max_size(self, n: int) -> int:
        """Return how many bytes n values take at most."""


@dataclass(frozen=True, slots=True)
class Fp32:
    """The values as they are, little-endian."""

    name: str = "fp32"
    wire_id: int = 1
    bits: float = 32.0
    exact: bool = True

    def encode(self, values: Tensor, seed: int) -> bytes:  # noqa: ARG002 - nothing is rounded
        return _array(values).tobytes()

    def decode(self, payload: Payload, n: int) -> Tensor:
        _check_size(len(payload), self.size(n))
        out = torch.empty(n)
        out.numpy().view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
        return _finite(out)

    def size(self, n: int) -> int:
        return 4 * n

    def max_size(self, n: int) -> int:
        return self.size(n)


@dataclass(frozen=True, slots=True)
class Bf16:
    """Rounded to bf16; high and low bytes apart, each a zstd frame, the high ones first behind their size (u32)."""

    name: str = "bf16"
    wire_id: int = 2
    bits: float = 16 / _BF16_GAIN
    exact: bool = False

    def encode(self, values: Tensor, seed: int) -> bytes:  # noqa: ARG002 - rounds to nearest
        # NumPy has no bf16: its bits travel as integers.
        bits = _array(values.to(torch.bfloat16).view(torch.int16)).view(np.uint16)
        low = bits.astype(np.uint8)
        bits >>= 8
        high = bits.astype(np.uint8)
        first, second = (zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(plane.data) for plane in (high, low))
        return b"".join((len(first).to_bytes(4, "little"), first, second))

    def decode(self, payload: Payload, n: int) -> Tensor:
        if not 4 <= len(payload) <= self.max_size(n):
            raise FrameError("size", f"{len(payload)} bytes for {n} bf16 values, at most {self.max_size(n)}")
        view = memoryview(payload)
        split = 4 + int.from_bytes(view[:4], "little")
        high, low = _inflate(view[4:split], n), _inflate(view[split:], n)
        out = torch.empty(n)
        bits = out.numpy().view(np.uint32)
        np.copyto(bits, high)
        bits <<= 8
        bits |= low
        bits <<= 16
        return _finite(out)

    def size(self, n: int) -> int:
        return int(2 * n / _BF16_GAIN)

    def max_size(self, n: int) -> int:
        plane = n + (n >> 8) + (max(0, (128 << 10) - n) >> 11)  # ZSTD_COMPRESSBOUND
        return 4 + 2 * (plane + 32)


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Small integers in units of their block's step: largest absolute value of the block / levels.

    A payload is a multiplier (fp32), a scale per block (fp16) and the integers. Steps are scale * multiplier / levels,
    so that scales use the range of fp16 whatever the chunk's magnitude. Scales round up: no value ever exceeds
    `levels` steps, and stochastic rounding is unbiased at the block's largest value, too.
    """

    name: str
    wire_id: int
    levels: int
    packed: bool  # two a byte, rounded stochastically: the first half of the chunk in the low nibbles
    bits: float
    exact: bool = False

    def encode(self, values: Tensor, seed: int) -> bytes:
        n = values.numel()
        work = torch.empty(n)
        peaks = _block_max(torch.abs(values, out=work))
        largest = float(peaks.max()) if n else 0.0
        # Written so that NaN, which compares as False, stays in the payload.
        multiplier = 0.0 if largest < _SMALLEST else float(np.float32(largest / _TOP))
        scales = _fp16_up(peaks / multiplier) if multiplier else torch.zeros(len(peaks), dtype=torch.float16)
        steps = self._steps(scales, multiplier)
        inverse = steps.clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_()
        _times_blocks(values, inverse, out=work)
        whole = self._nibbles(work, seed) if self.packed else work.round_().to(torch.int8)
        return b"".join((np.float32(multiplier).tobytes(), _array(scales).data, _array(whole).data))

    def decode(self, payload: Payload, n: int) -> Tensor:
        _check_size(len(payload), self.size(n))
        blocks = -(-n // BLOCK)
        multiplier = float(np.frombuffer(payload, np.float32, 1)[0])
        # Copies of a few KB: torch wants writable memory.
        scales = torch.from_numpy(np.frombuffer(payload, np.float16, blocks, 4).copy())
        self._check_scales(scales, multiplier)
        out = torch.empty(n)
        values = out.numpy()
        at = 4 + 2 * blocks
        if self.packed:
            pairs = np.frombuffer(payload, np.uint8, offset=at)
            half = len(pairs)
            np.copyto(values[:half], pairs & 15)
            np.copyto(values[half:], (pairs >> 4)[: n - half])
            out.sub_(8.0)
        else:
            np.copyto(values, np.frombuffer(payload, np.int8, offset=at))
        _times_blocks(out, self._steps(scales, multiplier), out=out)
        return out

    def size(self, n: int) -> int:
        return 4 + 2 * -(-n // BLOCK) + ((n + 1) // 2 if self.packed else n)

    def max_size(self, n: int) -> int:
        return self.size(n)

    def _steps(self, scales: Tensor, multiplier: float) -> Tensor:
        return scales.float().mul_(multiplier / self.levels)

    def _check_scales(self, scales: Tensor, multiplier: float) -> None:
        """Refuse what could decode to a non-finite value; a look at the scales is enough."""
        largest = float(scales.max()) if len(scales) else 0.0  # NaN if there is one
        smallest = float(scales.min()) if len(scales) else 0.0
        if not (math.isfinite(multiplier) and math.isfinite(largest) and math.isfinite(smallest)):
            raise FrameError("nonfinite", f"multiplier {multiplier}, scales {smallest} to {largest}")
        if multiplier < 0 or smallest < 0:
            raise FrameError("codec", f"a negative scale: multiplier {multiplier}, smallest {smallest}")
        if largest * multiplier / self.levels * (self.levels + 1) * 1.001 > _FP32_MAX:
            raise FrameError("nonfinite", f"multiplier {multiplier}, largest scale {largest}")

    def _nibbles(self, work: Tensor, seed: int) -> Tensor:
        """Round (n,) in steps up or down at random, the mean staying, and pack. Overwrites `work`."""
        n = len(work)
        # One 64-bit draw dithers four values: a quarter of the time of one draw each.
        draws = torch.empty(-(-n // 4), dtype=torch.int64)
        draws.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
        dither = draws.view(torch.int16)[:n]
        # Dither uniform on 0..1 (its centres, at 16 bit) and 8 on top: conversion to integer then rounds down.
        work.add_(dither, alpha=2.0**-16).add_(8.5 + 2.0**-17)
        whole = work.to(torch.uint8).clamp_(8 - self.levels, 8 + self.levels)
        half = (n + 1) // 2
        whole[: n - half] |= whole[half:] << 4
        return whole[:half]


_ALL: tuple[Codec, ...] = (
    Fp32(),
    Bf16(),
    Blockwise("int8", 3, levels=127, packed=False, bits=8 + 16 / BLOCK),
    Blockwise("int4", 4, levels=7, packed=True, bits=4 + 16 / BLOCK),
)
_BY_NAME = {codec.name: codec for codec in _ALL}
_BY_ID = {codec.wire_id: codec for codec in _ALL}
NAMES = tuple(_BY_NAME)


def by_name(name: str) -> Codec:
    """Return the codec of a configured name, one of NAMES."""
    return _BY_NAME[name]


def by_id(wire_id: int) -> Codec:
    """Return the codec of a frame. Raises FrameError."""
    if wire_id not in _BY_ID:
        raise FrameError("codec", f"codec {wire_id} is not known here")
    return _BY_ID[wire_id]


def chunk_seed(run: bytes, round_: int, stage: str, chunk: int, peer: str) -> int:
    """Return what seeds the rounding of one peer's chunk: 63 bits, another for every chunk of every peer and round."""
    place = f"{round_}|{stage}|{chunk}|{peer}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8, key=run[:64]).digest(), "little") >> 1


def _array(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.numpy()
    return array


def _check_size(got: int, expected: int) -> None:
    if got != expected:
        raise FrameError("size", f"{got} bytes, must be {expected}")


def _finite(values: Tensor) -> Tensor:
    """Return the values. NaN and infinities show in the extremes, and finding those makes no copy."""
    if len(values):
        least, most = (float(extreme) for extreme in torch.aminmax(values))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise FrameError("nonfinite", f"values from {least} to {most}")
    return values


def _inflate(frame: memoryview, n: int) -> NDArray[np.uint8]:
    """Decompress one zstd frame of exactly n bytes; takes memory only once its header says n."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != n:
            raise FrameError("codec", f"a frame of {header.content_size} bytes, must be {n}")
        # Without allow_extra_data=False, whatever follows the first frame is ignored.
        plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError("codec", str(error)) from None
    if len(plane) != n:
        raise FrameError("codec", f"{len(plane)} bytes in a frame, must be {n}")
    return np.frombuffer(plane, np.uint8)


def _block_max(values: Tensor) -> Tensor:
    """Return the largest of each block, (blocks,)."""
    whole = len(values) // BLOCK * BLOCK
    peaks = values[:whole].view(-1, BLOCK).amax(1)
    return peaks if whole == len(values) else torch.cat([peaks, values[whole:].amax().view(1)])


def _times_blocks(values: Tensor, factors: Tensor, out: Tensor) -> None:
    """Multiply each block by its factor. `out` may be `values`."""
    whole = len(values) // BLOCK * BLOCK
    torch.mul(values[:whole].view(-1, BLOCK), factors[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < len(values):
        torch.mul(values[whole:], factors[-1], out=out[whole:])


def _fp16_up(values: Tensor) -> Tensor:
    """Round non-negative fp32 to fp16, never down: the next fp16 up has the next bit pattern."""
    halves = values.to(torch.float16)
    halves.view(torch.int16).add_(halves.float() < values)
    return halves
