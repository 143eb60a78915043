"""The end of an exchange that was dialled.

The one thing to get wrong: once its call has ended the context must not be touched again, not even to be told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import grpc.aio

from peer import wire
from peer.errors import StreamClosed
from peer.rpc_client.channel import ADMITTED
from peer.rpc_client.failure import OnDrop, translated
from peer.rpc_client.stream import read_frame
from peer.transport import Frame


class ServerStream:
    """A transport.Stream over the context of a call."""

    def __init__(self, context: Any, max_frame_bytes: int, on_drop: OnDrop) -> None:
        self.caller: str = context.peer()
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._max_frame_bytes = max_frame_bytes
        self._on_drop = on_drop
        self._pending: set[asyncio.Task[Any]] = set()
        self._closed = False  # the context is not ours any more
        self.finished = False  # said that nothing more is sent
        self._ended = False  # heard that nothing more will come

    async def admit(self) -> None:
        await self._do(self._context.send_initial_metadata(((ADMITTED, "1"),)))

    async def send(self, frame: Frame) -> None:
        if self.finished:
            raise StreamClosed(f"{self.caller}: nothing more can be sent")
        await self._do(self._context.write(wire.encode_frame(frame)))

    async def receive(self) -> Frame | None:
        while not self._ended:
            raw = await self._do(self._context.read())
            if raw is grpc.aio.EOF:
                raise StreamClosed(f"{self.caller}: ended without saying so")
            if raw == wire.END:
                self._ended = True
                break
            frame = read_frame(raw, self._max_frame_bytes, self._on_drop)
            if frame is not None:
                return frame
        return None

    async def finish(self) -> None:
        if self.finished or self._closed:
            return
        self.finished = True
        with suppress(StreamClosed):  # whoever receives will hear of it
            await self._do(self._context.write(wire.END))

    def cancel(self) -> None:
        self.close()
        if not self.dropped.done():
            self.dropped.set_result(None)

    def close(self) -> None:
        """Let go of the context: what waits for it fails, what comes later does too."""
        self._closed = True
        for task in self._pending:
            task.cancel()

    async def abort(self, *status: Any) -> None:
        if not self._closed:
            await self._context.abort(*status)

    async def _do(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Await one operation in a task of its own, so that `close` can end it."""
        if self._closed:
            operation.close()
            raise StreamClosed(f"{self.caller}: closed")
        task = asyncio.ensure_future(operation)
        self._pending.add(task)
        try:
            with translated(self.caller, under_way=True):
                return await task
        except asyncio.CancelledError:
            self.cancel()  # as on the other side: a call is not fit for use after an interrupted operation
            raise
        finally:
            self._pending.discard(task)
