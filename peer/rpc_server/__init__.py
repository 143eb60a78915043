"""The incoming side over gRPC: what other peers may call, and the admin listener for this machine's operator."""

from __future__ import annotations

from peer.rpc_server.server import AdminServer, Server
from peer.rpc_server.servicer import Limits

__all__ = ["AdminServer", "Limits", "Server"]
