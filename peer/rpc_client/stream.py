"""The end of an exchange that dialled.

The one thing to get wrong: in grpc.aio a cancelled read or write cancels the whole call, so a timed-out `receive` ends
its stream; and a cancelled call throws away what the other side has not read yet.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc.aio

from peer import log, wire
from peer.errors import FrameError, StreamClosed, TransportError
from peer.rpc_client.channel import ADMITTED
from peer.rpc_client.failure import OnDrop, translated
from peer.transport import Frame

_PARTING_S = 10.0  # how long a finished stream stays open for the other side to read it
_PARTING_FRAMES = 8  # and how much may still come meanwhile: its last words, not its results

logger = log.get(__name__)


class ClientStream:
    """A transport.Stream over a call."""

    def __init__(
        self, address: str, call: Any, max_frame_bytes: int, on_drop: OnDrop, partings: set[asyncio.Task[None]]
    ) -> None:
        self._partings = partings
        self._address = address
        self._call = call
        self._max_frame_bytes = max_frame_bytes
        self._on_drop = on_drop
        self._finished = False  # said that nothing more is sent
        self._ended = False  # heard that nothing more will come
        self._cancelled = False
        self._receiving = False

    async def admitted(self) -> None:
        """Wait until the server has taken the stream on."""
        with translated(self._address, under_way=False):
            if ADMITTED in await self._call.initial_metadata():
                return
            await self._call.read()  # raises what the server says instead
        raise StreamClosed(f"{self._address}: does not take exchanges")

    async def send(self, frame: Frame) -> None:
        if self._finished or self._cancelled:
            raise StreamClosed(f"{self._address}: nothing more can be sent")
        with translated(self._address, under_way=True):
            await self._call.write(wire.encode_frame(frame))

    async def receive(self) -> Frame | None:
        if self._cancelled:
            raise StreamClosed(f"{self._address}: dropped by this side")
        self._receiving = True
        try:
            return await self._next_frame()
        finally:
            self._receiving = False

    async def _next_frame(self) -> Frame | None:
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
        if self._finished or self._cancelled or self._call.done():
            return
        self._finished = True
        with suppress(TransportError), translated(self._address, under_way=True):  # whoever receives will hear of it
            await self._call.write(wire.END)
            await self._call.done_writing()

    def cancel(self) -> None:
        """Drop the stream at once; after `finish`, as soon as the other side has read what was sent."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._finished and not self._receiving and not self._call.done():
            parting = asyncio.create_task(self._part())
            self._partings.add(parting)
            parting.add_done_callback(self._partings.discard)
        else:
            self._call.cancel()

    async def _part(self) -> None:
        """Wait for the other side's end, a little: a cancelled call loses what was sent and not read yet."""
        with suppress(TimeoutError, TransportError):
            async with asyncio.timeout(_PARTING_S):
                with translated(self._address, under_way=True):
                    await self._last_words()
        self._call.cancel()

    async def _last_words(self) -> None:
        for _ in range(_PARTING_FRAMES):
            if self._ended or await self._call.read() in (wire.END, grpc.aio.EOF):
                await self._call.code()  # the other side has read to our end, or will not
                return


def read_frame(raw: bytes, max_frame_bytes: int, on_drop: OnDrop) -> Frame | None:
    """Return the frame, or count it and return None."""
    try:
        return wire.decode_frame(raw, max_frame_bytes)
    except FrameError as error:
        on_drop(error.reason)
        logger.debug("frame dropped", problem=str(error))
        return None
