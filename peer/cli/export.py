"""`peer export`: from a checkpoint to a folder that transformers loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from peer.cli.options import Json


def export(
    checkpoint: Annotated[
        Path,
        typer.Option(help="A checkpoint, a folder of checkpoints, or a peer's storage folder.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write. An earlier export there is replaced.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace the folder whatever it holds.")] = False,
    as_json: Json = False,
) -> None:
    """Write the mixed weights of the newest whole checkpoint as a folder that transformers' from_pretrained loads.

    Example: peer export --checkpoint peer-data --out my-model
    """
    from peer import export as exporter  # torch and transformers take seconds; --help should not

    done = exporter.export(checkpoint, out, force)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    for damaged in done.damaged:
        typer.echo(f"passed over: {damaged}")
    typer.echo(
        f"{done.out}: {done.run} after {done.round} rounds, {done.n_params:,} parameters, from {done.checkpoint}"
    )
