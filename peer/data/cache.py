"""Token files shared by the peers of one machine, written once and mapped into memory.

Many peers start at the same moment and want the same file: one makes it under a lock, the others wait and read. The one
thing you would get wrong: a file must appear whole or not at all, so it is written in a folder of its own, synced, and
the folder is renamed last; a peer killed in between leaves only a folder that the next one removes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from peer import log
from peer.errors import DataError

_PARTS = ("train", "heldout")
_log = log.get(__name__)


class Writes(Protocol):
    """Makes the token files: yields (part, tokens), then has `facts` to keep beside them."""

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any]]]: ...

    def facts(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """The two parts of a corpus, mapped read-only, and what was counted while they were made."""

    train: NDArray[Any]
    heldout: NDArray[Any]
    facts: dict[str, int]


def open_tokens(folder: Path, key: str, dtype: str, make: Writes) -> TokenFiles:
    """Return the token files of that key, making them when they are not there whole. Raises DataError."""
    final = folder / f"tokens-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _read(final, dtype)
        if found:
            return found
        with _locked(folder / f"tokens-{key}.lock"):
            found = _read(final, dtype)
            if not found:
                for stale in folder.glob(f".tokens-{key}.*"):  # the lock is ours: whoever made it is gone
                    shutil.rmtree(stale, ignore_errors=True)
                shutil.rmtree(final, ignore_errors=True)  # damaged, or it would have been read
                _write(final, dtype, make)
                found = _read(final, dtype)
    except OSError as error:
        raise DataError(f"token cache {folder} cannot be used: {error.strerror or error}") from error
    if not found:
        raise DataError(f"token cache {final} does not hold what was just written to it")
    return found


def _locked(path: Path) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
        lock.release()
    except Timeout:
        _log.info("waiting for another peer to make the token cache", path=str(path))
    return lock


def _write(final: Path, dtype: str, make: Writes) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        counts = _write_parts(temporary, dtype, make)
        (temporary / "facts.json").write_text(json.dumps({"tokens": counts, "facts": make.facts()}))
        for path in temporary.iterdir():
            _sync(path)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_parts(folder: Path, dtype: str, make: Iterable[tuple[str, NDArray[Any]]]) -> dict[str, int]:
    counts = dict.fromkeys(_PARTS, 0)
    files = {part: (folder / part).open("wb") for part in _PARTS}
    try:
        for part, tokens in make:
            files[part].write(tokens.astype(dtype).tobytes())
            counts[part] += len(tokens)
    finally:
        for file in files.values():
            file.close()
    return counts


def _read(folder: Path, dtype: str) -> TokenFiles | None:
    """Map the files; None when they are not there or not of the size they were written with."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        parts = {part: _map(folder / part, dtype, facts["tokens"][part]) for part in _PARTS}
        return TokenFiles(parts["train"], parts["heldout"], dict(facts["facts"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        _log.warning("token cache is damaged and will be made again", path=str(folder))
        return None


def _map(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(path)
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
