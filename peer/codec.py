"""Tensor <-> bytes (fallback draft)."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from peer.errors import FrameError

BLOCK = 256


class Codec(Protocol):
    name: str
    wire_id: int
    bits: float
    exact: bool

    def encode(self, values: Tensor, seed: int) -> bytes: ...
    def decode(self, payload: bytes | memoryview, n: int) -> Tensor: ...
    def size(self, n: int) -> int: ...
    def max_size(self, n: int) -> int: ...


class Fp32:
    name, wire_id, bits, exact = "fp32", 1, 32.0, True

    def encode(self, values: Tensor, seed: int) -> bytes:
        return values.numpy().tobytes()

    def decode(self, payload: bytes | memoryview, n: int) -> Tensor:
        if len(payload) != 4 * n:
            raise FrameError("size", f"{len(payload)} bytes")
        out = torch.frombuffer(bytearray(payload), dtype=torch.float32) if n else torch.empty(0)
        if not torch.isfinite(out).all():
            raise FrameError("nonfinite")
        return out

    def size(self, n: int) -> int:
        return 4 * n

    max_size = size


class Bf16:
    name, wire_id, bits, exact = "bf16", 2, 16.0 / 1.43, False

    def encode(self, values: Tensor, seed: int) -> bytes:
        raw = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8).reshape(-1, 2)
        parts = [zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(raw[:, i]).data) for i in (0, 1)]
        return len(parts[0]).to_bytes(4, "little") + parts[0] + parts[1]

    def decode(self, payload: bytes | memoryview, n: int) -> Tensor:
        payload = bytes(payload)
        if len(payload) > self.max_size(n) or len(payload) < 4:
            raise FrameError("size")
        first = int.from_bytes(payload[:4], "little")
        planes = []
        for part in (payload[4 : 4 + first], payload[4 + first :]):
            try:
                if zstandard.frame_content_size(part) != n:
                    raise FrameError("codec")
                planes.append(np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint8))
            except zstandard.ZstdError as error:
                raise FrameError("codec", str(error)) from None
        both = np.stack(planes, 1)
        out = torch.from_numpy(both.reshape(-1).view(np.int16)).view(torch.bfloat16).float()
        if not torch.isfinite(out).all():
            raise FrameError("nonfinite")
        return out

    def size(self, n: int) -> int:
        return int(2 * n / 1.43)

    def max_size(self, n: int) -> int:
        return 2 * n + n // 64 + 128


class Blockwise:
    exact = False

    def __init__(self, name: str, wire_id: int, levels: int) -> None:
        self.name, self.wire_id, self.levels = name, wire_id, levels
        self.packed = levels == 7
        self.bits = (4.0 if self.packed else 8.0) + 16 / BLOCK

    def encode(self, values: Tensor, seed: int) -> bytes:
        n = values.numel()
        blocks = -(-n // BLOCK)
        padded = values.new_zeros(blocks * BLOCK)
        padded[:n] = values
        grid = padded.view(blocks, BLOCK)
        peak = grid.abs().amax(1)
        most = float(peak.max()) if n else 0.0
        scale = (peak / most if most > 0 else peak).to(torch.float16)
        step = scale.float() * (most / self.levels)
        inverse = torch.where(step > 0, 1 / step, torch.zeros(()))
        grid.mul_(inverse[:, None])
        if self.packed:
            generator = torch.Generator().manual_seed(seed)
            grid.add_(torch.rand(grid.shape, generator=generator)).floor_()
        else:
            grid.round_()
        q = grid.clamp_(-self.levels, self.levels).to(torch.int8).view(-1)[: n + (n % 2 if self.packed else 0)]
        if self.packed:
            u = (q + 8).to(torch.uint8)
            q = u[0::2] | (u[1::2] << 4)
        head = np.float32(most).tobytes() + scale.numpy().tobytes()
        return head + q.numpy().tobytes()

    def decode(self, payload: bytes | memoryview, n: int) -> Tensor:
        if len(payload) != self.size(n):
            raise FrameError("size")
        blocks = -(-n // BLOCK)
        payload = bytes(payload)
        most = float(np.frombuffer(payload, np.float32, 1)[0])
        scale = torch.from_numpy(np.frombuffer(payload, np.float16, blocks, 4).astype(np.float32))
        body = torch.from_numpy(np.frombuffer(payload, np.uint8, offset=4 + 2 * blocks).copy())
        if not np.isfinite(most) or not torch.isfinite(scale).all() or float(scale.max()) > 1.0:
            raise FrameError("nonfinite")
        out = torch.zeros(blocks * BLOCK)
        if self.packed:
            pair = torch.stack([body & 15, body >> 4], 1).view(-1)[:n]
            out[:n] = pair.float().sub_(8)
        else:
            out[:n] = body.view(torch.int8).float()
        out.view(blocks, BLOCK).mul_((scale * (most / self.levels))[:, None])
        return out[:n]

    def size(self, n: int) -> int:
        return 4 + 2 * (-(-n // BLOCK)) + ((n + 1) // 2 if self.packed else n)

    max_size = size


_ALL: tuple[Codec, ...] = (Fp32(), Bf16(), Blockwise("int8", 3, 127), Blockwise("int4", 4, 7))
NAMES = tuple(c.name for c in _ALL)


def by_name(name: str) -> Codec:
    return next(c for c in _ALL if c.name == name)


def by_id(wire_id: int) -> Codec:
    for c in _ALL:
        if c.wire_id == wire_id:
            return c
    raise FrameError("codec", str(wire_id))


def chunk_seed(run: bytes, round_: int, stage: str, chunk: int, peer: str) -> int:
    text = run + f"|{round_}|{stage}|{chunk}|{peer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
