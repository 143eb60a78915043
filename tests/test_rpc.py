"""The gRPC transport on real sockets: what passes, what is refused, what is dropped, and that everything ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from peer import wire
from peer.errors import AddressError, Declined, RefusedError, StreamClosed, Unreachable
from peer.membership import Member, State
from peer.rpc_client import GrpcTransport, ask_admin
from peer.rpc_client.channel import EXCHANGE, GOSSIP
from peer.rpc_server import AdminServer, Limits, Server
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
ANYWHERE = "127.0.0.1:0"
PAYLOAD = 1 << 20
MAX_FRAME = wire.frame_bytes(PAYLOAD, 3)
OPEN = Open(RUN, 7, Stage.MIX2, "a", b"plan", (0, 1, 5), b"12345678" * 3)
ME = Member("a", "10.0.0.1:7700", 2, State.ALIVE, 9, 7, 3, 1, 100_000_000)
POSITION = StatePosition(3, 5, 0.1)


def chunk(index: int, size: int = 8) -> ChunkFrame:
    payload = bytes([index % 256]) * size
    checksum = zlib.crc32(payload)
    return ChunkFrame(RUN, 7, Stage.MIX2, index, Part.CONTRIBUTION, Form.PLAIN, 3, size // 4, 1, checksum, payload)


class Peer:
    """A service that echoes frames; tests replace what they need."""

    def __init__(self) -> None:
        self.seen: list[Frame] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.started = asyncio.Event()

    async def on_exchange(self, stream: Stream) -> None:
        self.started.set()
        try:
            while (frame := await stream.receive()) is not None:
                self.seen.append(frame)
                await stream.send(frame)
        except StreamClosed:
            self.ended.put_nowait("closed")
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise
        else:
            self.ended.put_nowait("in order")

    async def on_gossip(self, message: Gossip) -> Gossip:
        if message.run != RUN:
            raise RefusedError("another run", {"name": ('"theirs"', '"ours"'), "round.steps": ("50", "x" * 5000)})
        return message

    async def on_join(self, request: JoinRequest) -> JoinReply:
        return JoinReply('{"seed":0}', (request.member,))

    async def on_state(self, request: StateRequest) -> AsyncIterator[StatePosition | StateChunk]:
        yield POSITION
        for index in range(3):
            payload = bytes([index]) * PAYLOAD
            yield StateChunk(3, Vector.V, index, zlib.crc32(payload), payload)
        yield POSITION

    async def on_top_k(self, run: bytes, round_: int) -> TopK | None:
        return TopK(round_, 2, 1, b"i" * 8, b"p" * 4, b"t" * 8) if round_ == 7 else None


class Net:
    """One server, one transport."""

    def __init__(self, peer: Peer, limits: Limits | None = None) -> None:
        self.peer = peer
        self.server = Server(MAX_FRAME, limits)
        self.dropped: list[str] = []
        self.dropped_here: list[str] = []
        self.transport = GrpcTransport(MAX_FRAME, self.dropped_here.append)
        self.address = ""

    async def exchange(self, timeout_s: float = 5.0) -> Stream:
        return await self.transport.exchange(self.address, timeout_s)


def on_sockets(body: Callable[[Net], Awaitable[None]], peer: Peer | None = None, limits: Limits | None = None) -> None:
    """Run a test's body against a server, and stop everything in bounded time."""

    async def main() -> None:
        net = Net(peer or Peer(), limits)
        port = await net.server.start(net.peer, ANYWHERE, net.dropped.append)
        net.address = f"127.0.0.1:{port}"
        async with asyncio.timeout(10):
            try:
                await body(net)
            finally:
                await net.transport.close()
                await net.server.stop(0)

    asyncio.run(main())


async def raw_call(net: Net, method: str, *messages: bytes, stream: bool = False) -> list[bytes]:
    """Speak to the server below the level at which a message must make sense."""
    async with grpc.aio.insecure_channel(net.address) as channel:
        if not stream:
            return [await channel.unary_unary(method)(messages[0], timeout=5)]
        call = channel.stream_stream(method)()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [answer async for answer in call]


class Relay:
    """A link that can be cut: forwards to the server whatever comes in."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._links: list[asyncio.Transport] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Reset what is open and take nothing more."""
        self._server.close()
        for link in self._links:
            link.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._links += [writer.transport, back.transport]
        with suppress(ConnectionError):
            await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer))

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


async def all_of(stream: Stream) -> list[Frame]:
    frames = []
    while (frame := await stream.receive()) is not None:
        frames.append(frame)
    return frames


async def state_of(net: Net, timeout_s: float, into: list[StatePosition | StateChunk]) -> None:
    request = StateRequest(RUN, b"layout", b"h" * 48)
    async for item in net.transport.state(net.address, request, timeout_s):
        into.append(item)  # noqa: PERF401  # what came before a failure matters


# exchanges


def test_frames_of_every_kind_go_there_and_back_in_order():
    async def body(net):
        frames = [OPEN, chunk(1), chunk(2, PAYLOAD), Done(Part.CONTRIBUTION)]
        stream = await net.exchange()
        for frame in frames:
            await stream.send(frame)
        await stream.finish()
        await stream.finish()
        assert await all_of(stream) == frames
        assert await stream.receive() is None
        assert await net.peer.ended.get() == "in order"
        with pytest.raises(StreamClosed):
            await stream.send(OPEN)
        assert (net.dropped, net.dropped_here) == ([], [])

    on_sockets(body)


def test_bad_frames_are_counted_by_reason_and_the_stream_goes_on():
    async def body(net):
        good = wire.encode_frame(chunk(4))
        answers = await raw_call(
            net, EXCHANGE, wire.encode_frame(OPEN), b"\xff\xff", b"x" * (MAX_FRAME + 1), good, wire.END, stream=True
        )
        assert answers == [wire.encode_frame(OPEN), good, wire.END]
        assert net.dropped == ["malformed", "oversized"]

    on_sockets(body)


def test_the_largest_frame_may_be_set_once_the_run_is_known():
    async def body(net):
        net.server.max_frame_bytes = 1000
        stream = await net.exchange()
        for frame in (OPEN, chunk(1, 1000), chunk(2)):
            await stream.send(frame)
        await stream.finish()
        assert await all_of(stream) == [OPEN, chunk(2)]
        assert net.dropped == ["oversized"]

    on_sockets(body)


def test_bad_frames_from_the_server_are_counted_too():
    class Fouls(Peer):
        async def on_exchange(self, stream):
            await stream._do(stream._context.write(b"\xff\xff"))
            await stream.send(chunk(1, MAX_FRAME + 1))
            await stream.send(chunk(2))

    async def body(net):
        stream = await net.exchange()
        assert await all_of(stream) == [chunk(2)]
        assert net.dropped_here == ["malformed", "oversized"]

    on_sockets(body, Fouls())


@pytest.mark.parametrize("from_server", [False, True])
def test_a_frame_past_what_grpc_takes_ends_only_its_stream(from_server):
    far_too_large = chunk(1, 9 << 20)

    class Fouls(Peer):
        async def on_exchange(self, stream):
            await stream.send(far_too_large)
            await super().on_exchange(stream)

    async def body(net):
        stream = await net.exchange()
        if not from_server:
            await stream.send(far_too_large)
        with pytest.raises(StreamClosed):
            await all_of(stream)
        assert net.dropped_here == (["oversized"] if from_server else [])
        assert await net.transport.top_k(net.address, RUN, 1, 5.0) is None

    on_sockets(body, Fouls() if from_server else None)


def test_a_sender_waits_while_the_other_side_does_not_read():
    class Deaf(Peer):
        async def on_exchange(self, stream):
            await asyncio.Event().wait()

    async def send_for_ever(stream, sent):
        while True:
            await stream.send(chunk(1, PAYLOAD))
            sent.append(1)

    async def body(net):
        stream, sent = await net.exchange(), []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send_for_ever(stream, sent), 0.5)
        assert len(sent) < 64
        with pytest.raises(StreamClosed):  # a cancelled send is the end of its stream
            await stream.send(OPEN)

    on_sockets(body, Deaf())


def test_cancelling_is_heard_on_the_other_side_and_may_be_repeated():
    async def body(net):
        stream = await net.exchange()
        await stream.send(OPEN)
        assert await stream.receive() == OPEN
        stream.cancel()
        stream.cancel()
        with pytest.raises(StreamClosed):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(OPEN)
        await stream.finish()
        assert await net.peer.ended.get() == "closed"

    on_sockets(body)


def test_cancelling_ends_a_receive_that_waits():
    async def body(net):
        stream = await net.exchange()
        waiting = asyncio.create_task(stream.receive())
        await net.peer.started.wait()
        stream.cancel()
        with pytest.raises(StreamClosed):
            await waiting

    on_sockets(body)


def test_the_server_may_cancel_while_it_receives_and_its_service_goes_on():
    class Drops(Peer):
        async def on_exchange(self, stream):
            asyncio.get_running_loop().call_soon(stream.cancel)
            await super().on_exchange(stream)
            stream.cancel()
            with pytest.raises(StreamClosed):
                await stream.send(OPEN)
            await stream.finish()
            self.ended.put_nowait("gone on")

    async def body(net):
        stream = await net.exchange()
        with pytest.raises(StreamClosed):
            await all_of(stream)
        assert [await net.peer.ended.get(), await net.peer.ended.get()] == ["closed", "gone on"]

    on_sockets(body, Drops())


def test_what_was_sent_before_finish_arrives_although_the_sender_then_lets_go():
    class Slow(Peer):
        async def on_exchange(self, stream):
            await stream.send(OPEN)
            await released.wait()
            self.seen += await all_of(stream)
            await stream.send(Done(Part.RESULT))
            await stream.finish()
            stream.cancel()

    async def body(net):
        released.clear()
        stream = await net.exchange()
        assert await stream.receive() == OPEN
        for index in range(3):
            await stream.send(chunk(index, 10_000))
        await stream.finish()
        stream.cancel()
        with pytest.raises(StreamClosed):
            await stream.receive()
        released.set()
        while net.transport._partings:
            await asyncio.wait(list(net.transport._partings))
        assert net.peer.seen == [chunk(index, 10_000) for index in range(3)]

    released = asyncio.Event()
    on_sockets(body, Slow())


def test_what_the_server_sent_before_finish_arrives_although_it_then_lets_go():
    class Brief(Peer):
        async def on_exchange(self, stream):
            for index in range(3):
                await stream.send(chunk(index, 10_000))
            await stream.finish()
            stream.cancel()
            await asyncio.Event().wait()

    async def body(net):
        stream = await net.exchange()
        assert await all_of(stream) == [chunk(index, 10_000) for index in range(3)]

    on_sockets(body, Brief())


def test_a_finished_stream_that_is_let_go_takes_only_a_few_more_frames():
    class Talkative(Peer):
        async def on_exchange(self, stream):
            try:
                while True:
                    await stream.send(chunk(1))
            except StreamClosed:
                self.ended.put_nowait("closed")

    async def body(net):
        stream = await net.exchange()
        await stream.finish()
        stream.cancel()
        assert await net.peer.ended.get() == "closed"

    on_sockets(body, Talkative())


def test_each_side_may_say_first_that_it_has_nothing_more():
    class Short(Peer):
        async def on_exchange(self, stream):
            await stream.finish()
            self.seen += await all_of(stream)
            self.ended.put_nowait("in order")

    async def body(net):
        stream = await net.exchange()
        assert await stream.receive() is None
        await stream.send(OPEN)
        await stream.finish()
        assert await net.peer.ended.get() == "in order"
        assert net.peer.seen == [OPEN]

    on_sockets(body, Short())


def test_a_stream_that_stops_without_saying_so_was_cut():
    async def body(net):
        assert await raw_call(net, EXCHANGE, wire.encode_frame(OPEN), stream=True) == [
            wire.encode_frame(OPEN),
            wire.END,
        ]
        assert await net.peer.ended.get() == "closed"

    on_sockets(body)


def test_a_bug_in_the_service_closes_the_stream_and_is_logged_with_its_traceback(caplog):
    class Faulty(Peer):
        async def on_exchange(self, stream):
            await stream.receive()
            raise ZeroDivisionError("/secret/path")

        async def on_gossip(self, message):
            raise ZeroDivisionError("/secret/path")

    async def body(net):
        stream = await net.exchange()
        await stream.send(OPEN)
        with pytest.raises(StreamClosed, match="internal error"):
            await stream.receive()
        with pytest.raises(StreamClosed, match="internal error"):
            await net.transport.gossip(net.address, Gossip(RUN, "a", ()), 5.0)

    on_sockets(body, Faulty())
    bugs = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info and record.exc_info[0] for record in bugs] == [ZeroDivisionError] * 2


def test_exchanges_beyond_the_limit_are_declined_and_the_place_is_free_again_afterwards():
    async def body(net):
        first = await net.exchange()
        with pytest.raises(Declined):
            await net.exchange()
        assert await net.transport.gossip(net.address, Gossip(RUN, "a", ()), 5.0)
        first.cancel()
        assert await net.peer.ended.get() == "closed"
        second = await net.exchange()
        await second.finish()
        assert await second.receive() is None

    on_sockets(body, limits=Limits(exchanges_a_host=1))


def test_many_streams_do_not_starve_the_small_calls():
    async def body(net):
        streams = [await net.exchange() for _ in range(40)]
        assert await net.transport.top_k(net.address, RUN, 1, 1.0) is None
        for stream in streams:
            await stream.finish()
            assert await stream.receive() is None

    on_sockets(body)


# the other calls


def test_gossip_join_and_probe_arrive_whole():
    async def body(net):
        message = Gossip(RUN, "a", (ME, Member("b", "", state=State.DEAD)))
        assert await net.transport.gossip(net.address, message, 5.0) == message
        request = JoinRequest(1, ME, "run", {"round.steps": "50"}, b"layout")
        assert await net.transport.join(net.address, request, 5.0) == JoinReply('{"seed":0}', (ME,))
        assert await net.transport.top_k(net.address, RUN, 7, 5.0) == TopK(7, 2, 1, b"i" * 8, b"p" * 4, b"t" * 8)
        assert await net.transport.top_k(net.address, RUN, 8, 5.0) is None

    on_sockets(body)


def test_a_refusal_names_the_fields_that_differ():
    async def body(net):
        with pytest.raises(RefusedError) as refused:
            await net.transport.gossip(net.address, Gossip(b"x" * 16, "a", ()), 5.0)
        assert refused.value.reason == "another run"
        assert refused.value.fields["name"] == ('"theirs"', '"ours"')
        assert len(refused.value.fields["round.steps"][1]) == 80

    on_sockets(body)


def test_a_malformed_request_is_refused_and_counted():
    async def body(net):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await raw_call(net, GOSSIP, b"\xff\xff")
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert net.dropped == ["malformed"]

    on_sockets(body)


def test_a_malformed_answer_is_a_failed_link():
    async def body(net):
        request = JoinRequest(1, ME, "run", {}, b"")
        with pytest.raises(StreamClosed):
            await net.transport.join(net.address, request, 5.0)
        assert net.dropped_here == ["malformed"]

    class Verbose(Peer):
        async def on_join(self, request):
            return JoinReply("x" * (2 << 20), ())

    on_sockets(body, Verbose())


def test_state_is_streamed_whole():
    async def body(net):
        items = []
        await state_of(net, 5.0, items)
        assert items == [item async for item in net.peer.on_state(StateRequest(RUN, b"", b""))]

    on_sockets(body)


def test_a_silent_donor_is_left_after_the_longest_silence():
    closed = asyncio.Event()

    class Stalls(Peer):
        async def on_state(self, request):
            yield POSITION
            try:
                await asyncio.Event().wait()
            finally:
                closed.set()

    async def body(net):
        items = []
        with pytest.raises(StreamClosed, match="silent"):
            await state_of(net, 0.1, items)
        assert items == [POSITION]
        await closed.wait()

    on_sockets(body, Stalls())


def test_downloads_beyond_the_limit_are_declined():
    class Slow(Peer):
        async def on_state(self, request):
            yield POSITION
            await asyncio.Event().wait()

    async def body(net):
        download = net.transport.state(net.address, StateRequest(RUN, b"", b""), 5.0)
        assert await anext(download) == POSITION
        with pytest.raises(Declined):
            await state_of(net, 5.0, [])
        await download.aclose()

    on_sockets(body, Slow(), Limits(donations=1))


def test_a_refused_download_says_why():
    class Foreign(Peer):
        async def on_state(self, request):
            if request.run == RUN:
                raise RefusedError("not while I join myself")
            yield POSITION

    async def body(net):
        with pytest.raises(RefusedError, match="join myself"):
            await state_of(net, 5.0, [])

    on_sockets(body, Foreign())


# reaching, leaving, stopping


def test_an_address_where_nobody_listens_is_unreachable_for_every_call():
    async def body(net):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            net.address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(Unreachable):
                await net.exchange()
            with pytest.raises(Unreachable):
                await net.transport.gossip(net.address, Gossip(RUN, "a", ()), 5.0)
            with pytest.raises(Unreachable):
                await state_of(net, 5.0, [])

    on_sockets(body)


def test_a_listener_that_never_answers_is_given_up_in_time():
    async def body(net):
        with socket.create_server(("127.0.0.1", 0)) as tarpit:
            net.address = f"127.0.0.1:{tarpit.getsockname()[1]}"
            with pytest.raises(Unreachable):
                await net.exchange(0.1)
            with pytest.raises(Unreachable):
                await net.transport.top_k(net.address, RUN, 1, 0.1)

    on_sockets(body)


@pytest.mark.parametrize("address", ["unix:1", "http://127.0.0.1:1", "127.0.0.1", "127.0.0.1:99999", "", "::1:1"])
def test_a_rumoured_address_that_is_none_is_unreachable(address):
    async def body(net):
        with pytest.raises(Unreachable):
            await net.transport.gossip(address, Gossip(RUN, "a", ()), 5.0)

    on_sockets(body)


def test_ipv6_addresses_are_served_and_dialled():
    async def body(net):
        server = Server(MAX_FRAME)
        try:
            port = await server.start(net.peer, "[::1]:0")
        except AddressError:
            pytest.skip("no IPv6 here")
        assert await net.transport.top_k(f"[::1]:{port}", RUN, 1, 5.0) is None
        await server.stop(0)

    on_sockets(body)


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")

    async def body(net):
        assert await net.transport.top_k(net.address, RUN, 1, 5.0) is None

    on_sockets(body)


def test_a_port_in_use_is_named():
    async def body(net):
        with pytest.raises(AddressError, match=f"{net.address}: address already in use"):
            await Server().start(net.peer, net.address)

    on_sockets(body)


def test_a_server_that_restarts_on_its_port_is_reached_again_at_once():
    async def body(net):
        assert await net.transport.top_k(net.address, RUN, 1, 5.0) is None
        for _ in range(3):
            await net.server.stop(0)
            assert await net.server.start(net.peer, net.address) == int(net.address.rpartition(":")[2])
            stream = await net.exchange()
            assert await net.transport.top_k(net.address, RUN, 1, 5.0) is None
            stream.cancel()

    on_sockets(body)


def test_a_link_that_is_cut_is_heard_of_on_both_sides():
    async def body(net):
        relay = Relay(int(net.address.rpartition(":")[2]))
        async with relay as net.address:
            stream = await net.exchange()
            await stream.send(OPEN)
            assert await stream.receive() == OPEN
            relay.cut()
            with pytest.raises(StreamClosed):
                await stream.receive()
            assert await net.peer.ended.get() == "closed"
            with pytest.raises(Unreachable):
                await net.exchange()

    on_sockets(body)


def test_forgetting_an_address_closes_its_streams_and_a_later_call_connects_anew():
    async def body(net):
        stream = await net.exchange()
        await net.transport.forget(net.address)
        with pytest.raises(StreamClosed):
            await stream.receive()
        assert await net.transport.top_k(net.address, RUN, 1, 5.0) is None
        await net.transport.forget("127.0.0.1:1")

    on_sockets(body)


def test_a_closed_transport_reaches_nobody():
    async def body(net):
        await net.transport.close()
        with pytest.raises(Unreachable):
            await net.exchange()

    on_sockets(body)


def test_stopping_ends_streams_in_progress_even_those_that_do_not_listen():
    class Stubborn(Peer):
        async def on_exchange(self, stream):
            try:
                await super().on_exchange(stream)
            finally:
                await asyncio.Event().wait()

        async def on_state(self, request):
            yield POSITION
            await asyncio.Event().wait()

    async def body(net):
        stream = await net.exchange()
        download = net.transport.state(net.address, StateRequest(RUN, b"", b""), 30.0)
        assert await anext(download) == POSITION
        await net.peer.started.wait()
        started_s = asyncio.get_running_loop().time()
        await net.server.stop(0.1)
        assert asyncio.get_running_loop().time() - started_s < 4
        with pytest.raises(StreamClosed):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await anext(download)
        await net.server.stop(0.1)

    on_sockets(body, Stubborn())


def test_health_and_reflection_answer():
    async def body(net):
        async with grpc.aio.insecure_channel(net.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "peer.v1.Mixing"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    on_sockets(body)


# admin


def test_the_operator_gets_the_status_and_only_on_loopback():
    async def body(net):
        admin = AdminServer()
        with pytest.raises(AddressError, match="loopback"):
            await admin.start(lambda: "{}", "0.0.0.0:0")
        port = await admin.start(lambda: '{"round":3}', ANYWHERE)
        assert await asyncio.to_thread(ask_admin, f"127.0.0.1:{port}", 5.0) == '{"round":3}'
        with pytest.raises(StreamClosed, match="does not speak"):
            await asyncio.to_thread(ask_admin, net.address, 5.0)
        await admin.stop()
        with pytest.raises(Unreachable):
            await asyncio.to_thread(ask_admin, f"127.0.0.1:{port}", 1.0)

    on_sockets(body)
