"""Starts and stops the listeners.

The one thing to get wrong: two gRPC servers share a port without a word unless told not to, and steal calls from each
other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from peer import log, wire
from peer.config import parse_address
from peer.errors import AddressError
from peer.rpc_client.channel import DEFAULT_MAX_FRAME_BYTES, KEEPALIVE, STATUS, size_limits, tolerated
from peer.rpc_client.failure import OnDrop, uncounted
from peer.rpc_server.servicer import Answer, Limits, Servicer
from peer.transport import Service

_CONTROL_LIMIT = 2 << 20  # the largest membership view
_CALLS_BESIDE = 256  # gossip, joins, probes, health checks in progress
_LAST_WORDS_S = 1.0  # between ending what is served and giving it up
_SERVICES = ("peer.v1.Mixing", "peer.v1.Membership", "peer.v1.State", "peer.v1.Probe")

logger = log.get(__name__)


def _options(receive_bytes: int) -> list[tuple[str, Any]]:
    return [
        *KEEPALIVE,
        *size_limits(receive_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


class Server:
    """Serves one Service at one address. Used on one loop only.

    `max_frame_bytes` (see wire.frame_bytes) may be lowered later, when the run is known; what gRPC itself lets pass
    stays what it was at the start.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES, limits: Limits | None = None) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._limits = limits or Limits()
        self._server: Any = None
        self._health: Any = None
        self._servicer: Servicer | None = None

    async def start(self, service: Service, address: str, on_drop: OnDrop = uncounted) -> int:
        """Listen at "host:port" and return the port. Raises AddressError, also for one that is in use."""
        server = grpc.aio.server(
            options=_options(max(tolerated(self.max_frame_bytes), _CONTROL_LIMIT)),
            maximum_concurrent_rpcs=self._limits.streams + _CALLS_BESIDE,
        )
        servicer = Servicer(service, lambda: self.max_frame_bytes, self._limits, on_drop)
        server.add_generic_rpc_handlers(_by_service(servicer.methods()))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _bind(server, address)
        await server.start()
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server, self._servicer = server, servicer
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those in progress go on for `grace_s`, then end them. Idempotent."""
        server, servicer = self._server, self._servicer
        self._server = self._servicer = None
        if server is not None and servicer is not None:
            await self._health.enter_graceful_shutdown()
            await _stop(server, grace_s)
            await servicer.stop(_LAST_WORDS_S)


class AdminServer:
    """Answers the operator of this machine, on a loopback address."""

    def __init__(self) -> None:
        self._server: Any = None

    async def start(self, status: Callable[[], str], address: str) -> int:
        """Serve what `status` returns, which is JSON, and return the port. Raises AddressError."""
        if not parse_address(address).is_loopback:
            raise AddressError(f"admin.listen must be a loopback address such as 127.0.0.1:0, got {address}")

        async def answer(_request: bytes, context: Any) -> bytes:
            async with Answer(STATUS, context.peer(), context.abort):
                return wire.encode_status(status())

        server = grpc.aio.server(options=_options(_CONTROL_LIMIT))
        server.add_generic_rpc_handlers(_by_service({STATUS: grpc.unary_unary_rpc_method_handler(answer)}))
        port = _bind(server, address)
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await _stop(server, 0)


def _by_service(methods: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a server takes for {"/service/Method": its handler}."""
    split = {tuple(path[1:].split("/")): method for path, method in methods.items()}
    return tuple(grpc.method_handlers_generic_handler(service, {name: m}) for (service, name), m in split.items())


def _bind(server: Any, address: str) -> int:
    parse_address(address)
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError:
        raise AddressError(f"cannot listen on {address}: {_why_not(address)}") from None
    return port


def _why_not(address: str) -> str:
    """Return the system's reason, which gRPC keeps to itself."""
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "the port was in use a moment ago"


async def _stop(server: Any, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s + _LAST_WORDS_S):
            await server.stop(grace_s)
    except TimeoutError:
        logger.warning("server does not stop", waited_s=grace_s + _LAST_WORDS_S)
