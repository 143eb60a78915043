"""The outgoing side over gRPC: transport.Transport, and the question the command line asks its daemon.

Each address has two connections, opened when first used: one for bulk (exchanges, state), one for control (gossip,
join, probes), so that a full link never delays a sign of life. Everything runs on one asyncio loop. The one thing to
get wrong: in grpc.aio a cancelled read or write cancels the whole call, so a timed-out `receive` ends its stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from peer import log, wire
from peer.config import parse_address
from peer.errors import AddressError, Declined, FrameError, PeerError, StreamClosed, TransportError, Unreachable
from peer.transport import Frame, Gossip, JoinReply, JoinRequest, StateChunk, StatePosition, StateRequest, Stream, TopK

EXCHANGE = "/peer.v1.Mixing/Exchange"
GOSSIP = "/peer.v1.Membership/Gossip"
JOIN = "/peer.v1.Membership/Join"
FETCH = "/peer.v1.State/Fetch"
TOP_K = "/peer.v1.Probe/TopK"
STATUS = "/peer.v1.Admin/Status"

ADMITTED = "peer-exchange"  # initial metadata of an exchange the server has taken on
REFUSAL = "peer-refusal-bin"  # trailing metadata: why a peer is not let in

DEFAULT_MAX_FRAME_BYTES = 16 << 20
CONTROL_LIMIT = 8 << 20  # longest answer to a control message
_METADATA_LIMIT = 64 << 10  # a refusal names the fields that differ
_SHOWN = 200  # characters of another peer's words in our messages

# Both sides ping a silent connection and both must allow it, or the server answers too_many_pings and hangs up.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # of pings gRPC sends for itself, and keepalive waits for: 60 s otherwise
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_RETRY_ONCE = {  # only what the server has not begun to answer: the first call after its restart
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "0.1s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OnDrop = Callable[[str], None]
_T = TypeVar("_T")
logger = log.get(__name__)


def uncounted(_reason: str) -> None:
    """Take a dropped frame's reason where nobody counts them."""


def size_limits(receive_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _METADATA_LIMIT),
        ("grpc.absolute_max_metadata_size", _METADATA_LIMIT),
    )


def tolerated(max_frame_bytes: int) -> int:
    """Return what gRPC lets pass: a frame that it refuses costs the stream, one that we refuse costs only itself."""
    return 2 * max_frame_bytes + (64 << 10)


def _options(receive_bytes: int) -> list[tuple[str, Any]]:
    return [
        *KEEPALIVE,
        *size_limits(receive_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # or bulk and control would share a connection, and inherit its backoff
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 3_000),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name: how long one attempt to connect may take
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.service_config", json.dumps(_RETRY_ONCE)),
    ]


def _target(address: str) -> str:
    """Return what gRPC dials. The scheme is ours: a rumoured "unix:1" or "xds:1" must not choose its own."""
    try:
        parse_address(address, any_port=False)
    except AddressError as error:
        raise Unreachable(str(error)) from None
    return f"dns:///{address}"


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
        self._closed = False

    async def exchange(self, address: str, timeout_s: float) -> Stream:
        """Return once the other side has taken the stream on; `timeout_s` is for that, not for what follows."""
        call = self._bulk_channel(address).stream_stream(EXCHANGE)()
        stream = _ClientStream(address, call, self.max_frame_bytes, self._on_drop)
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
                        raise _silent(address, timeout_s, under_way) from None
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
            channels[address] = grpc.aio.insecure_channel(_target(address), options=_options(receive_bytes))
        return channels[address]


class _ClientStream:
    """The end of an exchange that dialled."""

    def __init__(self, address: str, call: Any, max_frame_bytes: int, on_drop: OnDrop) -> None:
        self._address = address
        self._call = call
        self._max_frame_bytes = max_frame_bytes
        self._on_drop = on_drop
        self._finished = False  # said that nothing more is sent
        self._ended = False  # heard that nothing more will come

    async def admitted(self) -> None:
        """Wait until the server has taken the stream on."""
        with translated(self._address, under_way=False):
            if ADMITTED in await self._call.initial_metadata():
                return
            await self._call.read()  # raises what the server says instead
        raise StreamClosed(f"{self._address}: does not take exchanges")

    async def send(self, frame: Frame) -> None:
        if self._finished:
            raise StreamClosed(f"{self._address}: nothing more can be sent")
        with translated(self._address, under_way=True):
            await self._call.write(wire.encode_frame(frame))

    async def receive(self) -> Frame | None:
        while not self._ended:
            with translated(self._address, under_way=True, on_drop=self._on_drop):
                raw = await self._call.read()
            if raw is grpc.aio.EOF:
                raise StreamClosed(f"{self._address}: ended without saying so")
            if raw == wire.END:
                self._ended = True
                break
            frame = read_frame(raw, self._max_frame_bytes, self._on_drop)
            if frame is not None:
                return frame
        return None

    async def finish(self) -> None:
        if self._finished or self._call.done():
            return
        self._finished = True
        try:
            with translated(self._address, under_way=True):
                await self._call.write(wire.END)
                await self._call.done_writing()
        except TransportError:
            pass  # already closed: whoever receives will hear of it

    def cancel(self) -> None:
        self._finished = True
        self._call.cancel()


def read_frame(raw: bytes, max_frame_bytes: int, on_drop: OnDrop) -> Frame | None:
    """Return the frame, or count it and return None."""
    try:
        return wire.decode_frame(raw, max_frame_bytes)
    except FrameError as error:
        on_drop(error.reason)
        logger.debug("frame dropped", problem=str(error))
        return None


@contextmanager
def translated(address: str, under_way: bool, on_drop: OnDrop = uncounted) -> Iterator[None]:
    """Turn what grpc.aio raises into our errors. `under_way`: the other side had answered already."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if "CLIENT: Received message larger than max" in (error.details() or ""):  # it has no code of its own
            on_drop("oversized")
        raise _failure(address, error, under_way) from None
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise StreamClosed(f"{address}: {error}") from None
    except asyncio.CancelledError:
        # grpc.aio raises this for a call that was cancelled, too; only a cancelled task may see it.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StreamClosed(f"{address}: dropped by this side") from None


def _failure(address: str, error: Any, under_way: bool = False) -> PeerError:
    """Return our error for a call's status."""
    words = "".join(c if c.isprintable() else "?" for c in (error.details() or "")[:_SHOWN])
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED if not under_way:
            return Unreachable(f"{address}: {words}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if not under_way:
            return Declined(f"{address}: {words}")
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.PERMISSION_DENIED:
            return _refusal(error) or StreamClosed(f"{address}: {words}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return StreamClosed(f"{address}: does not speak this protocol")
        case code:
            return StreamClosed(f"{address}: {code.name.lower()} {words}".rstrip())


def _refusal(error: Any) -> PeerError | None:
    raw = (error.trailing_metadata() or {}).get(REFUSAL)
    try:
        return None if raw is None else wire.decode_refusal(raw)
    except FrameError:
        return None


def _silent(address: str, timeout_s: float, under_way: bool) -> TransportError:
    silent = f"{address}: silent for {timeout_s:g} s"
    return StreamClosed(silent) if under_way else Unreachable(silent)


def ask_admin(address: str, timeout_s: float) -> str:
    """Return the status of the daemon whose admin listener is at that address, as JSON. Blocks; needs no loop."""
    with grpc.insecure_channel(_target(address), options=_options(CONTROL_LIMIT)) as channel:
        try:
            raw: bytes = channel.unary_unary(STATUS)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            raise _failure(address, error) from None
    try:
        return wire.decode_status(raw)
    except FrameError as error:
        raise StreamClosed(f"{address}: {error}") from None
