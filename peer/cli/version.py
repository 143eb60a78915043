"""`peer version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import typer

from peer import __version__
from peer.cli.options import Json

# What decides whether two peers compute alike; read from the installed packages, without importing them.
LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "grpcio", "protobuf", "zstandard")


def version(as_json: Json = False) -> None:
    """Show the version of peer, of Python and of the libraries that matter.

    Example: peer version --json
    """
    versions = {"peer": __version__, "python": platform.python_version()}
    versions.update({name: _installed(name) for name in LIBRARIES})
    if as_json:
        typer.echo(json.dumps(versions))
        return
    for name, number in versions.items():
        typer.echo(f"{name:13} {number}")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
