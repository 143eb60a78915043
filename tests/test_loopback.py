"""The loopback network: streams that behave as real ones do, and faults that follow the script."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from peer.errors import RefusedError, StreamClosed, Unreachable
from peer.loopback import Loopback
from peer.membership import Member
from peer.transport import (
    ChunkFrame,
    Done,
    Form,
    Frame,
    Gossip,
    JoinReply,
    JoinRequest,
    Open,
    Part,
    Stage,
    StateChunk,
    StatePosition,
    StateRequest,
    Stream,
    TopK,
    Vector,
)

RUN = b"r" * 16
OPEN = Open(RUN, 0, Stage.MIX1, "a", b"", (0, 1))
POSITION = StatePosition(3, 5, 0.1)


def chunk(index: int) -> ChunkFrame:
    payload = bytes([index]) * 8
    checksum = zlib.crc32(payload)
    return ChunkFrame(RUN, 0, Stage.MIX1, index, Part.CONTRIBUTION, Form.PLAIN, 1, 2, 1, checksum, payload)


class Echo:
    """Sends every frame back, and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[Frame] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.mute = False

    async def on_exchange(self, stream: Stream) -> None:
        try:
            while (frame := await stream.receive()) is not None:
                self.seen.append(frame)
                if not self.mute:
                    await stream.send(frame)
            self.ended.put_nowait("in order")
        except StreamClosed:
            self.ended.put_nowait("closed")

    async def on_gossip(self, message: Gossip) -> Gossip:
        if message.run != RUN:
            raise RefusedError("another run")
        return message

    async def on_join(self, request: JoinRequest) -> JoinReply:
        return JoinReply("{}", (request.member,))

    async def on_state(self, request: StateRequest) -> AsyncIterator[StatePosition | StateChunk]:
        yield POSITION
        for index in range(2):
            yield StateChunk(3, Vector.Z, index, zlib.crc32(b"abcd"), b"abcd")
        yield POSITION

    async def on_top_k(self, run: bytes, round_: int) -> TopK | None:
        return None


def on_loopback(body: Callable[[Loopback, Echo], Awaitable[None]]) -> None:
    """Run a test's body with one peer, "b", that echoes."""

    async def main() -> None:
        net, echo = Loopback(), Echo()
        net.serve("b", echo)
        async with asyncio.timeout(5):
            await body(net, echo)
            await net.close()
        assert net.errors == []

    asyncio.run(main())


async def all_of(stream: Stream) -> list[Frame]:
    frames = []
    while (frame := await stream.receive()) is not None:
        frames.append(frame)
    return frames


async def state_of(net: Loopback, timeout_s: float, into: list[StatePosition | StateChunk]) -> None:
    async for item in net.transport("a").state("b", StateRequest(RUN, b"", b""), timeout_s):
        into.append(item)  # noqa: PERF401  # what came before a failure matters


async def converse(net: Loopback, *frames: Frame) -> list[Frame]:
    """Send from a to b, and return what b echoes."""
    stream = await net.transport("a").exchange("b", 1.0)
    for frame in frames:
        await stream.send(frame)
    await stream.finish()
    return await all_of(stream)


def test_frames_go_there_and_back_in_order():
    async def body(net, echo):
        assert await converse(net, OPEN, chunk(0), chunk(1)) == [OPEN, chunk(0), chunk(1)]
        assert await echo.ended.get() == "in order"

    on_loopback(body)


def test_a_sender_waits_while_the_other_side_is_slow():
    async def send_for_ever(stream):
        while True:
            await stream.send(chunk(0))

    async def body(net, echo):
        stream = await net.transport("a").exchange("b", 1.0)
        with pytest.raises(TimeoutError):  # nobody reads the echo
            await asyncio.wait_for(send_for_ever(stream), 0.05)
        assert len(echo.seen) < 100
        with pytest.raises(StreamClosed):  # as with the real one, a cancelled send is the end of the stream
            await stream.send(chunk(0))

    on_loopback(body)


def test_faults_hit_the_frames_they_name_in_their_direction_only():
    async def body(net, echo):
        link = net.link("a", "b")
        link.drop, link.duplicate, link.corrupt = {1}, {2}, {3}
        returned = await converse(net, OPEN, chunk(0), chunk(1), chunk(2))
        assert returned[:3] == [OPEN, chunk(1), chunk(1)]
        spoilt = returned[3]
        assert isinstance(spoilt, ChunkFrame)
        assert zlib.crc32(spoilt.payload) != spoilt.checksum
        assert link.sent == 4
        assert net.link("b", "a").sent == 4

    on_loopback(body)


def test_faults_of_one_stage_leave_the_other_alone():
    async def body(net, echo):
        link = net.link("a", "b")
        link.stage, link.drop = Stage.MIX2, {1}
        assert await converse(net, OPEN, Done(Part.RESULT)) == [OPEN, Done(Part.RESULT)]
        other = Open(RUN, 0, Stage.MIX2, "a", b"", ())
        link.drop = {0, 1}  # the opening frame itself suffers too
        assert await converse(net, other, Done(Part.RESULT)) == []

    on_loopback(body)


def test_a_frame_without_payload_that_is_corrupted_is_counted_as_malformed():
    async def body(net, echo):
        dropped = []
        net.serve("b", echo, dropped.append)
        net.link("a", "b").corrupt = {0}
        assert await converse(net, OPEN, chunk(0)) == [chunk(0)]
        assert dropped == ["malformed"]

    on_loopback(body)


def test_a_delayed_frame_holds_up_those_behind_it_but_not_the_sender():
    async def body(net, echo):
        release = asyncio.Event()
        net.link("a", "b").delay = {1: release}
        stream = await net.transport("a").exchange("b", 1.0)
        for frame in (OPEN, chunk(0), chunk(1)):
            await stream.send(frame)
        await stream.finish()
        assert await stream.receive() == OPEN
        assert echo.seen == [OPEN]
        release.set()
        assert await all_of(stream) == [chunk(0), chunk(1)]

    on_loopback(body)


def test_a_cut_stream_fails_on_both_sides_after_what_got_through():
    async def body(net, echo):
        echo.mute = True
        net.link("a", "b").cut_after = 2
        stream = await net.transport("a").exchange("b", 1.0)
        await stream.send(OPEN)
        await stream.send(chunk(0))
        with pytest.raises(StreamClosed):
            await stream.send(chunk(1))
        with pytest.raises(StreamClosed):
            await all_of(stream)
        assert await echo.ended.get() == "closed"
        assert echo.seen == [OPEN, chunk(0)]

    on_loopback(body)


def test_cancelling_closes_the_other_side_and_may_be_repeated():
    async def body(net, echo):
        stream = await net.transport("a").exchange("b", 1.0)
        await stream.send(OPEN)
        assert await stream.receive() == OPEN
        stream.cancel()
        stream.cancel()
        await stream.finish()
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert await echo.ended.get() == "closed"

    on_loopback(body)


@pytest.mark.parametrize(("finished", "seen"), [(True, [OPEN, chunk(0)]), (False, [])])
def test_cancelling_loses_what_was_not_read_unless_the_stream_was_finished(finished, seen):
    async def body(net, echo):
        echo.mute = True
        stream = await net.transport("a").exchange("b", 1.0)
        await stream.send(OPEN)
        await stream.send(chunk(0))
        if finished:
            await stream.finish()
        stream.cancel()
        assert await echo.ended.get() == ("in order" if finished else "closed")
        assert echo.seen == seen

    on_loopback(body)


def test_a_stopped_peer_breaks_its_streams_and_answers_no_more():
    async def body(net, echo):
        transport = net.transport("a")
        stream = await transport.exchange("b", 1.0)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        net.stop("b")
        with pytest.raises(StreamClosed):
            await waiting
        with pytest.raises(Unreachable):
            await transport.exchange("b", 1.0)
        net.serve("b", echo)
        assert await transport.top_k("b", RUN, 0, 1.0) is None

    on_loopback(body)


def test_a_partition_loses_frames_without_a_word_and_dialling_times_out():
    async def body(net, echo):
        transport = net.transport("a")
        stream = await transport.exchange("b", 1.0)
        await stream.send(OPEN)
        assert await stream.receive() == OPEN
        net.link("a", "b").unreachable = True
        await stream.send(chunk(0))
        await stream.finish()
        with pytest.raises(Unreachable):
            await transport.gossip("b", Gossip(RUN, "a", ()), 0.01)
        assert echo.seen == [OPEN]
        assert echo.ended.empty()

    on_loopback(body)


def test_calls_and_refusals_pass():
    async def body(net, echo):
        transport = net.transport("a")
        message = Gossip(RUN, "a", (Member("a", ""),))
        assert await transport.gossip("b", message, 1.0) == message
        with pytest.raises(RefusedError):
            await transport.gossip("b", Gossip(b"x" * 16, "a", ()), 1.0)
        request = JoinRequest(1, Member("a", ""), "", {})
        assert (await transport.join("b", request, 1.0)).members == (request.member,)
        net.link("a", "b").refuse = True
        with pytest.raises(Unreachable):
            await transport.join("b", request, 1.0)

    on_loopback(body)


def test_state_is_streamed_and_can_be_cut():
    async def body(net, echo):
        whole, cut, silent = [], [], []
        await state_of(net, 1.0, whole)
        assert [type(item) for item in whole] == [StatePosition, StateChunk, StateChunk, StatePosition]
        net.link("b", "a").cut_after = 2
        with pytest.raises(StreamClosed):
            await state_of(net, 1.0, cut)
        assert cut == whole[:2]
        net.link("b", "a").cut_after, net.link("b", "a").delay = None, {1: asyncio.Event()}
        with pytest.raises(StreamClosed, match="silent"):
            await state_of(net, 0.01, silent)
        assert silent == whole[:1]

    on_loopback(body)


def test_a_bug_in_a_service_is_kept_for_the_test_and_closes_the_stream():
    class Faulty(Echo):
        async def on_exchange(self, stream):
            raise ZeroDivisionError

    async def main():
        net = Loopback()
        net.serve("b", Faulty())
        stream = await net.transport("a").exchange("b", 1.0)
        with pytest.raises(StreamClosed):
            await stream.receive()
        await net.close()
        assert [type(error) for error in net.errors] == [ZeroDivisionError]

    asyncio.run(main())
