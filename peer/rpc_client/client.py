"""transport.Transport over gRPC, and the question the command line asks its daemon.

Each address has two connections, opened when first used: one for bulk (exchanges, state), one for control (gossip,
join, probes), so that a full link never delays a sign of life. The one thing to get wrong: everything here belongs to
one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from peer import wire
from peer.errors import FrameError, PeerError, StreamClosed, Unreachable
from peer.rpc_client.channel import (
    CONTROL_LIMIT,
    DEFAULT_MAX_FRAME_BYTES,
    EXCHANGE,
    FETCH,
    GOSSIP,
    JOIN,
    STATUS,
    TOP_K,
    client_options,
    open_channel,
    target,
    tolerated,
)
from peer.rpc_client.failure import OnDrop, failure, silence, translated, uncounted
from peer.rpc_client.stream import ClientStream
from peer.transport import Gossip, JoinReply, JoinRequest, StateChunk, StatePosition, StateRequest, Stream, TopK

_T = TypeVar("_T")


class GrpcTransport:
    """transport.Transport over gRPC. Used on one loop only.

    `max_frame_bytes` (see wire.frame_bytes) covers frames and state items. It may be set later, when the run is known,
    as long as no exchange or state call was made.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES, on_drop: OnDrop = uncounted) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._on_drop = on_drop
        self._bulk: dict[str, Any] = {}
        self._control: dict[str, Any] = {}
        self._partings: set[asyncio.Task[None]] = set()  # the loop holds tasks weakly
        self._closed = False

    async def exchange(self, address: str, timeout_s: float) -> Stream:
        """Return once the other side has taken the stream on; `timeout_s` is for that, not for what follows."""
        call = self._bulk_channel(address).stream_stream(EXCHANGE)()
        stream = ClientStream(address, call, self.max_frame_bytes, self._on_drop, self._partings)
        try:
            async with asyncio.timeout(timeout_s):
                await stream.admitted()
        except TimeoutError:
            stream.cancel()
            raise Unreachable(f"{address}: no answer in {timeout_s:g} s") from None
        except (PeerError, asyncio.CancelledError):
            stream.cancel()
            raise
        return stream

    async def gossip(self, address: str, message: Gossip, timeout_s: float) -> Gossip:
        return await self._ask(address, GOSSIP, wire.encode_gossip(message), wire.decode_gossip, timeout_s)

    async def join(self, address: str, request: JoinRequest, timeout_s: float) -> JoinReply:
        return await self._ask(address, JOIN, wire.encode_join_request(request), wire.decode_join_reply, timeout_s)

    async def top_k(self, address: str, run: bytes, round_: int, timeout_s: float) -> TopK | None:
        request = wire.encode_top_k_request(run, round_)
        return await self._ask(address, TOP_K, request, wire.decode_top_k_reply, timeout_s)

    async def state(
        self, address: str, request: StateRequest, timeout_s: float
    ) -> AsyncGenerator[StatePosition | StateChunk, None]:
        call = self._bulk_channel(address).unary_stream(FETCH)(wire.encode_state_request(request))
        under_way = False
        try:
            while True:
                with translated(address, under_way):
                    try:
                        async with asyncio.timeout(timeout_s):
                            raw = await call.read()
                    except TimeoutError:
                        raise silence(address, timeout_s, under_way) from None
                if raw is grpc.aio.EOF:
                    return
                under_way = True
                yield self._read(address, lambda raw: wire.decode_state_item(raw, self.max_frame_bytes), raw)
        finally:
            call.cancel()

    async def forget(self, address: str) -> None:
        for channels in (self._bulk, self._control):
            channel = channels.pop(address, None)
            if channel is not None:
                await channel.close()

    async def close(self) -> None:
        """Close every connection; what is in progress fails."""
        self._closed = True
        for parting in self._partings:
            parting.cancel()
        for address in {*self._bulk, *self._control}:
            await self.forget(address)

    async def _ask(
        self, address: str, method: str, request: bytes, decode: Callable[[bytes], _T], timeout_s: float
    ) -> _T:
        ask = self._channel(self._control, address, CONTROL_LIMIT).unary_unary(method)
        with translated(address, under_way=False):
            raw: bytes = await ask(request, timeout=timeout_s)
        return self._read(address, decode, raw)

    def _read(self, address: str, decode: Callable[[bytes], _T], raw: bytes) -> _T:
        try:
            return decode(raw)
        except FrameError as error:
            self._on_drop(error.reason)
            raise StreamClosed(f"{address}: {error}") from None

    def _bulk_channel(self, address: str) -> Any:
        return self._channel(self._bulk, address, tolerated(self.max_frame_bytes))

    def _channel(self, channels: dict[str, Any], address: str, receive_bytes: int) -> Any:
        if self._closed:
            raise Unreachable(f"{address}: this peer is stopping")
        if address not in channels:
            channels[address] = open_channel(address, receive_bytes)
        return channels[address]


def ask_admin(address: str, timeout_s: float) -> str:
    """Return the status of the daemon whose admin listener is at that address, as JSON. Blocks; needs no loop."""
    with grpc.insecure_channel(target(address), options=client_options(CONTROL_LIMIT)) as channel:
        try:
            raw: bytes = channel.unary_unary(STATUS)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            raise failure(address, error) from None
    try:
        return wire.decode_status(raw)
    except FrameError as error:
        raise StreamClosed(f"{address}: {error}") from None
