"""Named tensors in a safetensors file, written and read in small pieces.

The format is the safetensors library's; only the moving of bytes is done here, because a checkpoint is several times
the size of the model and must pass through a few MiB of memory: some versions of the library serialise to a second copy
first, and a file it maps to read counts as resident. The hash is taken on the way, so a file is read once less.

The one thing to get wrong: the tensors must not change while they are written, or the file holds a state that never
was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.errors import CheckpointError

PIECE_BYTES = 1 << 22
MAX_HEADER_BYTES = 100_000_000  # the library's own bound
ALIGN_BYTES = 64  # data starts on a cache line, so that a mapped tensor does too

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Where one tensor lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a new file, sync it to the disk, and return its sha256 in hex. OSError if the disk refuses."""
    # Widest elements first keeps every tensor aligned to its own element, as the format asks of its writers.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    hasher = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        _put(file, hasher, memoryview(_header(tensors, order)))
        for name in order:
            for piece in _pieces(tensors[name]):
                _put(file, hasher, _view(piece.cpu().contiguous()))
        os.fsync(file.fileno())
    return hasher.hexdigest()


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes, in hex."""
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def spans(path: Path) -> dict[str, Span]:
    """Return the file's contents without reading a value. CheckpointError if it makes no sense."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = Span(entry["dtype"], tuple(entry["shape"]), 8 + length + first, 8 + length + last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not all(8 + length <= span.start <= span.stop <= size for span in found.values()):
        raise CheckpointError(f"{path}: a tensor lies outside the file's {size} bytes")
    return found


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill contiguous CPU tensors in place from those of the same names. CheckpointError if one differs in form."""
    found = spans(path)
    for name, tensor in tensors.items():
        span = found.get(name)
        wanted = (NAMES[tensor.dtype], tuple(tensor.shape))
        if span is None or (span.dtype, span.shape) != wanted:
            held = "nothing" if span is None else f"{span.dtype} {span.shape}"
            raise CheckpointError(f"{path}: {name} is {held}, expected {wanted[0]} {wanted[1]}")
        if span.stop - span.start != tensor.nbytes:
            raise CheckpointError(f"{path}: {name} takes {span.stop - span.start} bytes, expected {tensor.nbytes}")
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            file.seek(found[name].start)
            _take(file, _view(tensor.detach()))


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries: dict[str, object] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Flat slices of at most PIECE_BYTES; only a tensor with gaps between its elements is copied first."""
    flat = tensor.detach().reshape(-1)
    step = PIECE_BYTES // tensor.element_size()
    return (flat[start : start + step] for start in range(0, flat.numel(), step))


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they are."""
    octets: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return octets.data


def _put(file: io.FileIO, hasher: hashlib._Hash, view: memoryview) -> None:
    hasher.update(view)
    while view:  # an unbuffered write may take only a part, as it does just before the disk is full
        view = view[file.write(view) :]


def _take(file: io.FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view[:PIECE_BYTES])
        if not count:
            raise CheckpointError(f"{file.name}: ends {len(view)} bytes early")
        view = view[count:]
