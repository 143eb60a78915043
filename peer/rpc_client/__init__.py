"""The outgoing side over gRPC: transport.Transport, and the question the command line asks its daemon."""

from __future__ import annotations

from peer.rpc_client.client import GrpcTransport, ask_admin

__all__ = ["GrpcTransport", "ask_admin"]
