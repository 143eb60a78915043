"""Export: a checkpoint's mixed weights as a folder that transformers' from_pretrained loads.

Between rounds the weights are x, what Mix1 last agreed on: the peers hold it in common, while z has a peer's own last
outer step on top. In mid-round x holds that peer's own parameters, so there it is z, where the round began.
The one thing to get wrong: the folder is replaced as a whole, so never one that holds anything else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from peer import checkpoint, model, tensorfile
from peer.config import RunSpec
from peer.errors import CheckpointError, UsageError

MARK = "peer_export.json"  # by it a folder is known as one that an export may replace
UNMOVABLE = (errno.EBUSY, errno.EXDEV, errno.EINVAL, errno.EACCES)  # a mount point, for one; it is filled file by file

ATTEMPTS = 5

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {run}

Mixed weights of the run `{run}` after {round} rounds, {n_params:,} parameters, exported by peer.

Run fingerprint: `{fingerprint}`
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what from."""

    out: str
    checkpoint: str
    run: str
    fingerprint: str
    round: int  # rounds behind these weights
    n_params: int
    damaged: tuple[str, ...]  # newer checkpoints that were passed over


def export(place: Path, out: Path, force: bool = False) -> Exported:
    """Write the newest whole checkpoint of `place` (see checkpoint.find) as a folder for transformers.

    An earlier export at `out` is replaced. Any other folder with something in it is a UsageError, unless `force`.
    """
    place, out = place.resolve(), out.resolve()
    _check_target(place, out, force)
    exported, language_model, weights = _rebuild_newest(place, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out.parent if os.access(out.parent, os.W_OK) else out
        checkpoint.clean(beside)
        with checkpoint.scratch(beside) as aside:
            fresh = aside / out.name
            fresh.mkdir()
            language_model.save_pretrained(fresh, weights)
            (fresh / "README.md").write_text(CARD.format(**asdict(exported)), encoding="utf-8")
            (fresh / MARK).write_text(json.dumps(asdict(exported), indent=1), encoding="utf-8")
            _replace(fresh, out, aside / "before")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    return exported


def _check_target(place: Path, out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a new or empty folder")
    if out == place or out in place.parents or place in out.parents:
        raise UsageError(f"{out} and the checkpoint {place} lie one inside the other; choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).is_file() and not force:
        raise UsageError(f"{out} is not empty and no earlier export; choose another folder, or --force to replace it")


def _rebuild_newest(place: Path, out: Path) -> tuple[Exported, model.LanguageModel, torch.Tensor]:
    """Rebuild from the newest checkpoint. A peer that runs may retire it meanwhile; then there is a newer one."""
    for _ in range(ATTEMPTS):
        found = checkpoint.find(place)
        try:
            return _rebuild(found, out)
        except FileNotFoundError:
            continue
    raise CheckpointError(f"{place} is saved to faster than it can be read; keep more with checkpoint.keep")


def _rebuild(found: checkpoint.Found, out: Path) -> tuple[Exported, model.LanguageModel, torch.Tensor]:
    content = found.content
    meta, n_params = content["meta"], content["n_params"]
    if "spec" not in meta:
        raise CheckpointError(f"{found.path} holds no run spec, so its model cannot be built")
    spec = RunSpec.from_json(meta["spec"])
    built = model.build(spec)
    if meta.get("layout") not in (None, built.layout.digest.hex()):
        raise CheckpointError(
            f"{found.path} has the layout {meta['layout']}, but its model is built with {built.layout.digest.hex()} "
            "here: another version of transformers, or other files at model.path"
        )
    weights = torch.empty(n_params)
    tensorfile.read_into(found.path / checkpoint.VECTORS, {"z" if meta.get("step") else "x": weights})
    exported = Exported(
        str(out), str(found.path), spec.name, spec.fingerprint, content["round"], n_params, found.damaged
    )
    return exported, built, weights


def _replace(fresh: Path, out: Path, before: Path) -> None:
    mode = (fresh / MARK).stat().st_mode  # safetensors leaves the weights to be read by their owner alone
    for file in fresh.iterdir():
        file.chmod(mode)
        with file.open("rb") as written:
            os.fsync(written.fileno())
    try:
        if out.is_dir():
            out.rename(before)
        fresh.rename(out)
    except OSError as error:
        if before.is_dir():
            before.rename(out)
        if error.errno not in UNMOVABLE or not out.is_dir():
            raise
        for file in sorted(fresh.iterdir(), key=lambda file: file.name == MARK):
            shutil.move(file, out / file.name)
