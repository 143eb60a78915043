"""Asking the daemon that runs in a folder. Shared by `peer status` and `peer members`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from peer.errors import PeerError, TransportError

DataDir = Annotated[str, typer.Option("--data-dir", help="Folder of the peer to ask.", metavar="DIR")]
AdminAddress = Annotated[
    str | None, typer.Option("--address", help="Its admin address, instead of the folder.", metavar="HOST:PORT")
]

TIMEOUT_S = 5.0


class NoDaemon(PeerError):
    """Nobody to ask."""


def ask(data_dir: str, address: str | None) -> dict[str, Any]:
    """Return the daemon's status. Raises NoDaemon, saying how to start one."""
    from peer.home import admin_address
    from peer.rpc_client import ask_admin

    where = address or admin_address(Path(data_dir))
    if where is None:
        raise NoDaemon(f"no peer is running in {data_dir}; start one with: peer run --data-dir {data_dir}")
    try:
        answer = json.loads(ask_admin(where, TIMEOUT_S))
    except TransportError as error:
        raise NoDaemon(f"the peer at {where} does not answer ({error}); start one with: peer run") from None
    return dict(answer)
