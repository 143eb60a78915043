"""`peer members`: whom the peer running here knows."""

from __future__ import annotations

import json

import typer

from peer.cli.admin import AdminAddress, DataDir, ask
from peer.cli.options import Json

COLUMNS = ("id", "address", "state", "round", "step", "from_round")


def members(data_dir: DataDir = "peer-data", address: AdminAddress = None, as_json: Json = False) -> None:
    """List the members that the peer running here knows, itself included.

    Example: peer members --data-dir peer-data --json
    """
    answer = ask(data_dir, address)
    known = answer.get("members", [])
    if as_json:
        typer.echo(json.dumps(known))
        return
    rows = [COLUMNS, *(tuple(str(member[column]) for column in COLUMNS) for member in known)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
