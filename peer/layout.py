"""Parameters <-> one flat fp32 vector, cut into blocks and chunks.

Everything that is mixed, saved or handed to a joiner is named by its place in this vector, so two peers must agree on
it to the last element: `digest` says whether they do. The one thing to get wrong: parameters may be strided
(transposed, channels last, slices), and flat order is their logical order, never the order of their memory.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Shape = tuple[str, tuple[int, ...]]

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
_OUTSIDE_LAYERS = (  # the first that matches; gpt-neox calls its head embed_out
    ("head", re.compile(r"lm_head|embed_out|^output\.")),
    ("embedding", re.compile(r"embed|(?:^|\.)w[tp]e\.")),
    ("final_norm", re.compile(r"norm|(?:^|\.)ln_")),
)
_RANK = {"embedding": 0, "other": 2, "final_norm": 3, "head": 4}  # layers are 1

_FEWEST_CHUNKS = 32  # so that small models, too, spread over owners and lose little with one frame
_SMALLEST_CHUNK = 1024
_CHUNK_MULTIPLE = 256  # the codecs' block: only the last chunk of a block has a ragged end


@dataclass(frozen=True, slots=True)
class Block:
    """A named group of parameters: elements start..stop of the flat vector."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is coded, sent, checked and mixed. `block` is an index into `Layout.blocks`."""

    index: int
    block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter's place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the flat vector, and how that is cut."""

    entries: tuple[Entry, ...]
    blocks: tuple[Block, ...]
    chunks: tuple[Chunk, ...]
    n_params: int
    digest: bytes  # 16 bytes over names, shapes, order and chunk bounds

    @classmethod
    def of_shapes(cls, shapes: Sequence[Shape], chunk_elements: int) -> Layout:
        """Order parameters by block (embedding, layers, the rest, head), as given within one, and cut the blocks."""
        assert chunk_elements >= 1
        assert len({name for name, _ in shapes}) == len(shapes), "two parameters of one name"
        ordered = sorted(shapes, key=lambda item: _block_order(block_of(item[0])))
        entries = _lay_out(ordered)
        blocks = _blocks(entries)
        chunks = _cut(blocks, chunk_elements)
        named = [[entry.name, *entry.shape] for entry in entries]
        bounds = [[chunk.start, chunk.stop] for chunk in chunks]
        digest = hashlib.blake2b(json.dumps([named, bounds]).encode(), digest_size=16).digest()
        return cls(entries, blocks, chunks, entries[-1].stop if entries else 0, digest)

    def read(self, params: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        """Copy elements start..stop to `out`, fp32 (stop - start,). `params[i]` is `entries[i]`, on any device."""
        for piece, at in self._pieces(params, start, stop):
            out[at : at + piece.numel()].view(piece.shape).copy_(piece)

    def write(self, params: Sequence[Tensor], start: int, stop: int, values: Tensor) -> None:
        """Copy `values`, fp32 (stop - start,), to elements start..stop, in place: storage, strides and dtype stay."""
        with torch.no_grad():
            for piece, at in self._pieces(params, start, stop):
                piece.copy_(values[at : at + piece.numel()].view(piece.shape))

    @cached_property
    def _stops(self) -> list[int]:
        return [entry.stop for entry in self.entries]

    def _pieces(self, params: Sequence[Tensor], start: int, stop: int) -> Iterator[tuple[Tensor, int]]:
        """Yield views that make up start..stop, in order, each with its offset from `start`."""
        assert len(params) == len(self.entries)
        assert 0 <= start <= stop <= self.n_params
        for index in range(bisect.bisect_right(self._stops, start), len(self.entries)):
            entry = self.entries[index]
            if entry.start >= stop:
                return
            if not entry.size:
                continue
            assert tuple(params[index].shape) == entry.shape, entry.name
            first, last = max(start, entry.start), min(stop, entry.stop)
            at = first - start
            for piece in _views(params[index].detach(), first - entry.start, last - entry.start):
                yield piece, at
                at += piece.numel()


def block_of(name: str) -> str:
    """Return the block of a parameter: embedding, layer.N, final_norm, head or other."""
    if match := _LAYER.search(name):
        return f"layer.{int(match[1])}"
    return next((block for block, pattern in _OUTSIDE_LAYERS if pattern.search(name)), "other")


def chunk_elements(n_params: int, bytes_per_value: float, chunk_bytes: int) -> int:
    """Return a chunk's size in elements: about `chunk_bytes` on the wire, less in models of a few chunks."""
    fitting = min(int(chunk_bytes / bytes_per_value), n_params // _FEWEST_CHUNKS)
    return max(_SMALLEST_CHUNK, fitting // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE)


def _block_order(block: str) -> tuple[int, int]:
    kind, _, number = block.partition(".")
    return (1, int(number)) if kind == "layer" else (_RANK[block], 0)


def _lay_out(shapes: Sequence[Shape]) -> tuple[Entry, ...]:
    stops = itertools.accumulate(math.prod(shape) for _, shape in shapes)
    return tuple(
        Entry(name, tuple(shape), stop - math.prod(shape), stop)
        for (name, shape), stop in zip(shapes, stops, strict=True)
    )


def _blocks(entries: Sequence[Entry]) -> tuple[Block, ...]:
    groups = [(name, tuple(group)) for name, group in itertools.groupby(entries, key=lambda e: block_of(e.name))]
    return tuple(Block(name, group[0].start, group[-1].stop) for name, group in groups)


def _cut(blocks: Sequence[Block], chunk_elements: int) -> tuple[Chunk, ...]:
    bounds = (
        (number, start, min(start + chunk_elements, block.stop))
        for number, block in enumerate(blocks)
        for start in range(block.start, block.stop, chunk_elements)
    )
    return tuple(Chunk(index, *bound) for index, bound in enumerate(bounds))


def _views(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield views of logical elements start..stop in order, without copying strided tensors as a whole."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    if stop - start == tensor.numel():
        yield tensor
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _views(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _views(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    yield from _views(tensor[last], 0, stop - last * row) if stop > last * row else ()
