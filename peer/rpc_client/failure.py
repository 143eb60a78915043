"""What grpc raises, as our errors: whether nobody answers, the other side says no, or the stream is lost.

The one thing to get wrong: grpc.aio raises CancelledError for a call that was cancelled, not only for a cancelled task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from peer import wire
from peer.errors import Declined, FrameError, PeerError, StreamClosed, TransportError, Unreachable
from peer.rpc_client.channel import REFUSAL

_SHOWN = 200  # characters of another peer's words in our messages

OnDrop = Callable[[str], None]


def uncounted(_reason: str) -> None:
    """Take a dropped frame's reason where nobody counts them."""


@contextmanager
def translated(address: str, under_way: bool, on_drop: OnDrop = uncounted) -> Iterator[None]:
    """Turn what grpc.aio raises into our errors. `under_way`: the other side had answered already."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if "CLIENT: Received message larger than max" in (error.details() or ""):  # it has no code of its own
            on_drop("oversized")
        raise failure(address, error, under_way) from None
    except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        raise StreamClosed(f"{address}: {error}") from None
    except asyncio.CancelledError:
        # grpc.aio raises this for a call that was cancelled, too; only a cancelled task may see it.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StreamClosed(f"{address}: dropped by this side") from None


def failure(address: str, error: Any, under_way: bool = False) -> PeerError:
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


def silence(address: str, timeout_s: float, under_way: bool) -> TransportError:
    said = f"{address}: silent for {timeout_s:g} s"
    return StreamClosed(said) if under_way else Unreachable(said)
