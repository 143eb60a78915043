"""Checkpoints: everything a peer needs to go on as if it had never stopped, in a folder a round.

    round-00000012/  vectors.safetensors   z, v, x and the shared flags
                     inner.safetensors     the trainer's tensors: inner optimizer, random state
                     meta.json             the rest, with the sha256 of both files and of itself; written last

A folder appears under its name only when it is whole: it is written aside, synced and renamed. Nothing is unpickled.

The one thing to get wrong: an old checkpoint is removed only after a new one is in place, and what is found damaged
never counts as one of those kept. So damaged folders lose their `round-` name before anything new is saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from peer import log, tensorfile
from peer.errors import CheckpointError
from peer.outer import Vectors
from peer.trainer import TrainerState

logger = log.get(__name__)

FORMAT = 1
VECTORS, INNER, META = "vectors.safetensors", "inner.safetensors", "meta.json"
NAME = re.compile(r"round-[0-9]{8,}(\.[0-9]+)?")  # .1, .2 where a round is saved again
PARTIAL = ".peer-partial-"  # being written or being removed; debris once its process is gone
ASIDE = "aside-"  # damaged, or of a course that was given up; for the operator to look at and delete
BYTES_PER_PARAM = 20  # z, v, x and AdamW's two moments, all fp32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A peer between two rounds.

    `meta` is plain JSON. Two of its keys are read here: `fingerprint` (the run's) and `layout` (digest of the model's,
    in hex); a third, `spec` (canonical JSON text), is what an export builds the model from.
    """

    round: int  # the next one to run
    vectors: Vectors
    trainer: TrainerState
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint of a place, and what was passed over to get to it."""

    path: Path
    content: dict[str, Any]  # of meta.json: round, n_params, meta, trainer, files
    damaged: tuple[str, ...]


def save(folder: Path, snapshot: Snapshot, keep: int = 2) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`. Return its path.

    The tensors must stand still meanwhile. On CheckpointError nothing is left behind and the earlier ones are
    untouched, so a caller may warn and go on training.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1, got {keep}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        with scratch(folder) as partial:
            _write(partial, snapshot)
            path = _free_name(folder, snapshot.round)
            partial.rename(path)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"cannot save round {snapshot.round} in {folder}: {error}") from error
    _retain(folder, path, keep)
    return path


def load_latest(
    folder: Path, fingerprint: str | None = None, layout: bytes | None = None, into: Vectors | None = None
) -> Snapshot | None:
    """Return the newest checkpoint that is whole, None if there is none.

    Damaged ones are named in a warning and renamed, so that they are neither read nor counted again. One of another run
    or another model is no damage: CheckpointError. Vectors given as `into` are filled in place. The trainer's tensors
    are copy-on-write views of the file, which cost no memory until they are used.
    """
    clean(folder)
    for path in candidates(folder):
        try:
            content = read_content(path)
            foreign = _foreign(content, fingerprint, layout, into)
            if foreign is None:
                verify(path, content)
                return _read(path, content, into)
        except CheckpointError as error:
            logger.warning("checkpoint damaged, looking at the one before it", checkpoint=str(path), why=str(error))
            _set_aside(path)
        else:
            raise CheckpointError(f"{path} {foreign}; choose another storage.dir, or move it away to start anew")
    return None


def load(path: Path, into: Vectors | None = None) -> Snapshot:
    """Return the checkpoint at `path`, verified. CheckpointError if it is damaged."""
    content = read_content(path)
    verify(path, content)
    return _read(path, content, into)


def find(place: Path) -> Found:
    """Return the newest whole checkpoint of a place, changing nothing there.

    A place is a checkpoint, a folder of them, or a peer's storage folder. CheckpointError if it holds no whole one.
    """
    if (place / META).is_file() or NAME.fullmatch(place.name):
        paths = [place]
    else:
        paths = candidates(place) or candidates(place / "checkpoints")
    damaged: list[str] = []
    for path in paths:
        try:
            content = read_content(path)
            verify(path, content)
            return Found(path, content, tuple(damaged))
        except CheckpointError as error:
            logger.warning("checkpoint damaged, passed over", checkpoint=str(path), why=str(error))
            damaged.append(str(error))
    if damaged:
        raise CheckpointError("no whole checkpoint in {}:{}".format(place, "".join(f"\n  {line}" for line in damaged)))
    raise CheckpointError(
        f"no checkpoint in {place}: expected meta.json, round-* folders, or checkpoints/ with such in it"
    )


def candidates(folder: Path) -> list[Path]:
    """Return the folders named as checkpoints, newest first, none of them looked into."""
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder}: {error}") from error
    return sorted(found, key=_order, reverse=True)


def read_content(path: Path) -> dict[str, Any]:
    """Return what meta.json of a checkpoint says. CheckpointError if it is missing, cut or altered."""
    try:
        content = json.loads((path / META).read_bytes())
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise CheckpointError(f"{path / META} was altered: its sha256 does not match")
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path / META} has format {content['format']}, this version reads {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / META} cannot be read: {error}") from error
    return dict(content)


def verify(path: Path, content: dict[str, Any]) -> None:
    """CheckpointError naming the first file that is not as it was written."""
    for name, wanted in content["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != wanted["bytes"]:
                raise CheckpointError(f"{file} has {size} bytes, was written with {wanted['bytes']}")
            if tensorfile.sha256(file) != wanted["sha256"]:
                raise CheckpointError(f"{file} was altered: its sha256 does not match")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


def clean(folder: Path) -> None:
    """Remove what processes that are gone left half written or half removed."""
    for partial in folder.glob(f"{PARTIAL}*"):
        # A lock dies with its process, also in a container where every peer has the same process id.
        with contextlib.suppress(OSError), _lock(partial):
            shutil.rmtree(partial)


def check_space(folder: Path, checkpoint_bytes: int, keep: int = 2) -> None:
    """CheckpointError unless the folder can be written and has room for `keep` checkpoints and one in the making."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder):
            free = shutil.disk_usage(folder).free
        held = sum(file.stat().st_size for path in candidates(folder) for file in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot save in {folder}: {error}") from error
    need = (keep + 1) * checkpoint_bytes - held
    if need > free:
        raise CheckpointError(
            f"{folder} has {free / 1e6:.0f} MB free and needs {need / 1e6:.0f} MB more, for {keep} checkpoints of "
            f"{checkpoint_bytes / 1e6:.0f} MB and one in the making; free some, or change checkpoint.keep, storage.dir"
        )


def _write(folder: Path, snapshot: Snapshot) -> None:
    digests = {
        VECTORS: tensorfile.write(folder / VECTORS, _named(snapshot.vectors)),
        INNER: tensorfile.write(folder / INNER, snapshot.trainer.tensors),
    }
    content = {
        "format": FORMAT,
        "round": snapshot.round,
        "n_params": snapshot.vectors.z.numel(),
        "meta": snapshot.meta,
        "trainer": snapshot.trainer.values,
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": hex_} for name, hex_ in digests.items()},
    }
    content = json.loads(json.dumps(content))  # as a reader will see it: keys are text, tuples lists
    content["sha256"] = _digest(content)
    with (folder / META).open("x") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _read(path: Path, content: dict[str, Any], into: Vectors | None) -> Snapshot:
    try:
        vectors = _empty(path / VECTORS) if into is None else into
        tensorfile.read_into(path / VECTORS, _named(vectors))
        with safetensors.safe_open(path / INNER, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Snapshot(content["round"], vectors, TrainerState(tensors, content["trainer"]), content["meta"])


def _named(vectors: Vectors) -> dict[str, Tensor]:
    return {entry.name: getattr(vectors, entry.name) for entry in dataclasses.fields(vectors)}


def _empty(path: Path) -> Vectors:
    dtypes = {name: dtype for dtype, name in tensorfile.NAMES.items()}
    spans = tensorfile.spans(path)
    return Vectors(**{name: torch.empty(span.shape, dtype=dtypes[span.dtype]) for name, span in spans.items()})


def _foreign(
    content: dict[str, Any], fingerprint: str | None, layout: bytes | None, into: Vectors | None
) -> str | None:
    """Say in which way a checkpoint is not this peer's to load, None if it is."""
    meta = content["meta"]
    if fingerprint is not None and meta.get("fingerprint") != fingerprint:
        return f"is of another run: its fingerprint is {meta.get('fingerprint')}, this run's {fingerprint}"
    if layout is not None and meta.get("layout") != layout.hex():
        return f"is of another model: its layout is {meta.get('layout')}, this model's {layout.hex()}"
    if into is not None and content["n_params"] != into.z.numel():
        return f"is of another model: it has {content['n_params']} parameters, this one {into.z.numel()}"
    return None


def _retain(folder: Path, newest: Path, keep: int) -> None:
    paths = candidates(folder)
    at = paths.index(newest)
    for path in paths[:at]:
        logger.warning("checkpoint is ahead of the one just saved, so not of the same course", checkpoint=str(path))
        _set_aside(path)
    for path in paths[at + keep :]:
        try:
            doomed = path.rename(folder / f"{PARTIAL}{secrets.token_hex(6)}")  # half removed must not look damaged
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("checkpoint cannot be removed", checkpoint=str(path), why=str(error))


def _set_aside(path: Path) -> None:
    target = path.with_name(f"{ASIDE}{path.name}")
    if target.exists():
        target = path.with_name(f"{target.name}-{secrets.token_hex(3)}")
    try:
        path.rename(target)
    except OSError as error:
        logger.warning("checkpoint cannot be set aside", checkpoint=str(path), why=str(error))
    else:
        logger.warning("checkpoint set aside; delete it when it is of no more use", now=str(target))


def _free_name(folder: Path, round_: int) -> Path:
    name = f"round-{round_:08d}"
    again = [path for path in candidates(folder) if path.name.startswith(name)]
    if not again:
        return folder / name
    return folder / f"{name}.{_order(again[0])[1] + 1}"


def _order(path: Path) -> tuple[int, int]:
    """Round, and how often that round was saved before."""
    number, _, again = path.name.removeprefix("round-").partition(".")
    return int(number), int(again or 0)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder beside the checkpoints, locked while in use; what is left of it at the end is removed."""
    partial = folder / f"{PARTIAL}{secrets.token_hex(6)}"
    partial.mkdir()
    try:
        with _lock(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder; OSError if another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
