"""Parameters <-> one flat fp32 vector, cut into blocks and chunks. (fallback draft)"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def block_of(name: str) -> str:
    if match := _LAYER.search(name):
        return f"layer.{match[1]}"
    if re.search(r"embed_tokens|wte|wpe|embed_in|embed_positions", name):
        return "embedding"
    if re.search(r"lm_head|embed_out", name):
        return "head"
    if re.search(r"norm|ln_f", name):
        return "final_norm"
    return "other"


def _block_order(block: str) -> tuple[int, int]:
    if block == "embedding":
        return 0, 0
    if block.startswith("layer."):
        return 1, int(block[6:])
    return {"other": 2, "final_norm": 3, "head": 4}[block], 0


def chunk_elements(n_params: int, bytes_per_value: float, chunk_bytes: int) -> int:
    largest = int(chunk_bytes / bytes_per_value)
    return max(1024, min(largest, n_params // 32) // 256 * 256)


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    blocks: tuple[Block, ...]
    chunks: tuple[Chunk, ...]
    n_params: int
    digest: bytes

    @classmethod
    def of_shapes(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], chunk_elements: int) -> Layout:
        ordered = sorted(shapes, key=lambda item: _block_order(block_of(item[0])))
        entries, blocks, at = [], [], 0
        for name, shape in ordered:
            size = 1
            for d in shape:
                size *= d
            entries.append(Entry(name, tuple(shape), at, at + size))
            block = block_of(name)
            if blocks and blocks[-1].name == block:
                blocks[-1] = Block(block, blocks[-1].start, at + size)
            else:
                blocks.append(Block(block, at, at + size))
            at += size
        chunks: list[Chunk] = []
        for number, block_ in enumerate(blocks):
            for start in range(block_.start, block_.stop, chunk_elements):
                chunks.append(Chunk(len(chunks), number, start, min(start + chunk_elements, block_.stop)))
        text = repr([(e.name, e.shape) for e in entries]) + repr([(c.start, c.stop) for c in chunks])
        digest = hashlib.sha256(text.encode()).digest()[:16]
        return cls(tuple(entries), tuple(blocks), tuple(chunks), at, digest)

    def _pieces(self, start: int, stop: int):  # type: ignore[no-untyped-def]
        i = bisect.bisect_right([e.stop for e in self.entries], start)
        while i < len(self.entries) and self.entries[i].start < stop:
            e = self.entries[i]
            if e.size:
                yield i, max(start, e.start) - e.start, min(stop, e.stop) - e.start, max(start, e.start) - start
            i += 1

    def read(self, params: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        for i, a, b, at in self._pieces(start, stop):
            out[at : at + b - a].copy_(params[i].detach().reshape(-1)[a:b])

    def write(self, params: Sequence[Tensor], start: int, stop: int, values: Tensor) -> None:
        with torch.no_grad():
            for i, a, b, at in self._pieces(start, stop):
                params[i].view(-1)[a:b].copy_(values[at : at + b - a])
