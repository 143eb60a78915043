"""`peer init`: a configuration file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.config import template
from peer.errors import UsageError


def init(
    path: Annotated[Path, typer.Argument(help='The file to write; "-" for stdout.')] = Path("peer.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented configuration file in which every setting stands with its default.

    Example: peer init && peer run --config peer.toml
    """
    if str(path) == "-":
        typer.echo(template(), nl=False)
        return
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise UsageError(f"{path} exists; --force replaces it") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    typer.echo(f"wrote {path}; next: peer run --config {path}")
