"""A data source as a sequence of texts: the standard library's sources, files, folders, hub datasets.

Text is read here; JSON lines, Parquet and the hub go through `datasets`, imported only then because it costs seconds.
The one thing you would get wrong: the order must be the same on every start, so files are sorted by their path inside
the source and never taken as the file system lists them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer.config import DataSpec
from peer.errors import ConfigError, DataError
from peer.model import Tokenizer, Tokens

_NOT_TEXT_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_PIECE_CHARS = 16384  # a longer text file is several documents, so that one big file has a held-out part too


@dataclass
class Tally:
    """What was met while reading."""

    documents: int = 0
    replaced: int = 0  # documents with bytes that are not UTF-8, each replaced by U+FFFD
    empty: int = 0
    binary: int = 0  # files left out because they are not text


@dataclass(frozen=True, slots=True)
class Source:
    """Where the texts are, resolved: files to read, in order, each with its format; or a hub dataset."""

    name: str
    files: tuple[tuple[Path, str], ...]
    hub: tuple[str, str | None] | None = None

    def identity(self) -> str:
        """Return a hash that changes when the files do."""
        digest = hashlib.sha256(repr((self.name, self.hub)).encode())
        if self.name == "stdlib":
            digest.update(sys.version.encode())
        for path, kind in self.files:
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"data.source: {path} cannot be read: {error.strerror}") from error
            digest.update(repr((str(path), kind, stat.st_size, stat.st_mtime_ns)).encode())
        return digest.hexdigest()


def find_source(spec: DataSpec) -> Source:
    """Return what the spec's source stands for. Raises DataError when there is nothing, ConfigError for a bad name."""
    if spec.source.startswith("hf:"):
        name, _, config = spec.source[3:].partition(":")
        if not name:
            raise ConfigError("data.source", f'must be "hf:NAME" or "hf:NAME:CONFIG", got {spec.source!r}')
        return Source(spec.source, (), (name, config or None))
    if spec.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in _walk(root, _NOT_TEXT_FOLDERS) if path.suffix == ".py"]
        kinds = [(path, "text") for path in files]
    else:
        root = Path(spec.source).expanduser()
        if not root.exists():
            raise DataError(f"data.source: there is no file or folder {root}")
        files = _walk(root) if root.is_dir() else [root]
        kinds = [(path, _format(spec, path)) for path in files]
    if not kinds:
        raise DataError(f"data.source: no files in {root}")
    return Source(spec.source, tuple(kinds))


def documents(spec: DataSpec, source: Source, tally: Tally) -> Iterator[str]:
    """Yield the texts, never an empty one, counting as it goes. Raises DataError."""
    for text in _texts(spec, source, tally):
        if text:
            tally.documents += 1
            yield text
        else:
            tally.empty += 1


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Return each text's tokens, the one that ends a document included."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    return [np.concatenate([tokens, np.array(end, tokens.dtype)]) for tokens in tokenizer.encode(texts)]


def hub_rows(spec: DataSpec, name: str, config: str | None, *, streaming: bool) -> Any:
    """Return a hub dataset's split. Raises DataError."""
    datasets = _datasets()
    with _named(f"data.source: {spec.source}"):
        return datasets.load_dataset(name, config, split=spec.split, streaming=streaming)


def rows_text(rows: Iterable[Any], field: str, name: str) -> Iterator[str]:
    """Yield the text field of each row; "" for a null. Raises DataError."""
    with _named(name):
        for row in rows:
            if field not in row:
                raise DataError(f"data.field: {name} has no {field!r}; it has {', '.join(sorted(row))}")
            value = row[field]
            if not isinstance(value, str | None):
                raise DataError(f"data.field: {field!r} of {name} must hold text, got {type(value).__name__}")
            yield value or ""


def _texts(spec: DataSpec, source: Source, tally: Tally) -> Iterator[str]:
    if source.hub:
        rows = hub_rows(spec, *source.hub, streaming=False)
        yield from rows_text(rows, spec.field, spec.source)
    for path, kind in source.files:
        if kind == "text":
            yield from _text_file(path, tally)
        else:
            yield from _table(path, kind, spec.field, tally)


def _text_file(path: Path, tally: Tally) -> Iterator[str]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"data.source: {path} cannot be read: {error.strerror}") from error
    if b"\0" in raw[:8192]:
        tally.binary += 1
        return
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        tally.replaced += 1
        text = raw.decode(errors="replace")
    yield from _pieces(text)


def _pieces(text: str) -> Iterator[str]:
    """Cut at the end of a line where there is one in reach."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _table(path: Path, kind: str, field: str, tally: Tally) -> Iterator[str]:
    datasets = _datasets()
    name = f"data.source: {path}"
    builder, options = ("json", {"encoding_errors": "replace"}) if kind == "jsonl" else ("parquet", {})
    if not path.stat().st_size:
        return
    with _named(name):
        # Streaming reads the file itself; otherwise datasets would first write a copy of it to its own cache.
        rows = datasets.load_dataset(builder, data_files=[str(path)], split="train", streaming=True, **options)
    for text in rows_text(rows, field, str(path)):
        tally.replaced += "\ufffd" in text
        yield text


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files under a folder, sorted, without hidden ones and those in folders to skip."""
    found: list[Path] = []

    def unreadable(error: OSError) -> None:
        raise DataError(f"data.source: {error.filename} cannot be read: {error.strerror}") from error

    for folder, below, names in os.walk(root, onerror=unreadable):
        below[:] = [name for name in below if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _format(spec: DataSpec, path: Path) -> str:
    return spec.format if spec.format != "auto" else _ENDINGS.get(path.suffix.lower(), "text")


def _datasets() -> Any:
    """Import datasets when it is needed: it costs seconds."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it calls out even to read a local file
    datasets.disable_progress_bars()
    return datasets


@contextmanager
def _named(thing: str) -> Iterator[None]:
    """Turn whatever datasets raises about a source into a DataError that names it."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, TypeError, KeyError) as error:
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        raise DataError(f"{thing} cannot be read: {' '.join(lines[:2]) or type(cause).__name__}") from error
