"""Decodes a call, asks the Service, encodes what it says.

A bug behind it costs one call and leaves a traceback in our log, not in the answer. The one thing to get wrong: a
served exchange may outlive its call, so it runs in a task of its own and its stream is closed before the call returns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from peer import log, wire
from peer.errors import Declined, FrameError, RefusedError, StreamClosed, TransportError, Unreachable
from peer.rpc_client.channel import EXCHANGE, FETCH, GOSSIP, JOIN, REFUSAL, TOP_K
from peer.rpc_client.failure import OnDrop, uncounted
from peer.rpc_server.stream import ServerStream
from peer.transport import Service

_STALL_S = 60.0  # how long a state stream waits for its reader

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is served at once. Who asks beyond that is declined at once, and asks somebody else or again."""

    exchanges: int = 256
    exchanges_a_host: int = 64  # many peers may stand behind one router
    donations: int = 8  # state streams

    @property
    def streams(self) -> int:
        return self.exchanges + self.donations


class Servicer:
    """Decodes, calls the Service, encodes."""

    def __init__(self, service: Service, max_frame_bytes: Callable[[], int], limits: Limits, on_drop: OnDrop) -> None:
        self._service = service
        self._max_frame_bytes = max_frame_bytes
        self._limits = limits
        self._on_drop = on_drop
        self._serving: dict[asyncio.Task[None], ServerStream] = {}
        self._hosts: Counter[str] = Counter()
        self._donations = 0

    def methods(self) -> dict[str, Any]:
        return {
            EXCHANGE: grpc.stream_stream_rpc_method_handler(self.exchange),
            GOSSIP: grpc.unary_unary_rpc_method_handler(self.gossip),
            JOIN: grpc.unary_unary_rpc_method_handler(self.join),
            FETCH: grpc.unary_stream_rpc_method_handler(self.fetch),
            TOP_K: grpc.unary_unary_rpc_method_handler(self.top_k),
        }

    async def exchange(self, _requests: object, context: Any) -> None:
        """Let the service talk in a task of its own: the call may end under it, and it must hear of that in order."""
        host = context.peer().rpartition(":")[0]
        if len(self._serving) >= self._limits.exchanges or self._hosts[host] >= self._limits.exchanges_a_host:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many exchanges")
        stream = ServerStream(context, self._max_frame_bytes(), self._on_drop)
        task = asyncio.create_task(self._serve(stream), name=f"exchange with {stream.caller}")
        self._serving[task] = stream
        self._hosts[host] += 1
        task.add_done_callback(lambda task: self._served(task, host))
        try:
            await asyncio.wait((task, stream.dropped), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                task.result()
            elif not stream.finished:  # else all was said, and is read before the end of the call is seen
                await context.abort(grpc.StatusCode.CANCELLED, "dropped")
        finally:
            stream.close()

    async def _serve(self, stream: ServerStream) -> None:
        async with Answer(EXCHANGE, stream.caller, stream.abort):
            await stream.admit()
            await self._service.on_exchange(stream)
            await stream.finish()

    def _served(self, task: asyncio.Task[None], host: str) -> None:
        del self._serving[task]
        self._hosts[host] -= 1
        if self._hosts[host] <= 0:
            del self._hosts[host]
        if not task.cancelled():
            task.exception()  # logged where it passed; taken here, for the call may be gone

    async def gossip(self, raw: bytes, context: Any) -> bytes:
        async with self._answer(GOSSIP, context):
            return wire.encode_gossip(await self._service.on_gossip(wire.decode_gossip(raw)))

    async def join(self, raw: bytes, context: Any) -> bytes:
        async with self._answer(JOIN, context):
            return wire.encode_join_reply(await self._service.on_join(wire.decode_join_request(raw)))

    async def top_k(self, raw: bytes, context: Any) -> bytes:
        async with self._answer(TOP_K, context):
            return wire.encode_top_k_reply(await self._service.on_top_k(*wire.decode_top_k_request(raw)))

    async def fetch(self, raw: bytes, context: Any) -> None:
        async with self._answer(FETCH, context):
            request = wire.decode_state_request(raw)
            if self._donations >= self._limits.donations:
                raise Declined("too many downloads")
            self._donations += 1
            items = self._service.on_state(request)
            try:
                async for item in items:
                    await _write_in_time(context, wire.encode_state_item(item))
            finally:
                self._donations -= 1
                if isinstance(items, AsyncGenerator):
                    await items.aclose()

    def _answer(self, method: str, context: Any) -> Answer:
        return Answer(method, context.peer(), context.abort, self._on_drop)

    async def stop(self, wait_s: float) -> None:
        """End what is still served: first by closing its streams, then by cancelling it. Waits that long for each."""
        for stream in self._serving.values():
            stream.close()
        if self._serving:
            await asyncio.wait(list(self._serving), timeout=wait_s)
        left = list(self._serving)
        for task in left:
            logger.warning("exchange does not end", task=task.get_name())
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=wait_s)


async def _write_in_time(context: Any, raw: bytes) -> None:
    try:
        async with asyncio.timeout(_STALL_S):
            await context.write(raw)
    except TimeoutError:
        raise StreamClosed(f"took nothing for {_STALL_S:g} s") from None


class Answer:
    """Turns whatever the answering of one call raises into its status."""

    def __init__(
        self, method: str, caller: str, abort: Callable[..., Awaitable[None]], on_drop: OnDrop = uncounted
    ) -> None:
        self._method = method
        self._caller = caller
        self._abort = abort
        self._on_drop = on_drop

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        match error:
            case None | grpc.aio.AbortError():
                pass
            case RefusedError():
                refusal = ((REFUSAL, wire.encode_refusal(error)),)
                await self._abort(grpc.StatusCode.FAILED_PRECONDITION, error.reason, refusal)
            case FrameError():
                self._on_drop(error.reason)
                await self._abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            case Declined():
                await self._abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.reason)
            case Unreachable():
                await self._abort(grpc.StatusCode.UNAVAILABLE, str(error))
            case TransportError():
                await self._abort(grpc.StatusCode.ABORTED, "the exchange failed")
            case Exception():
                logger.bug("call failed", method=self._method, caller=self._caller)
                await self._abort(grpc.StatusCode.INTERNAL, "internal error")
