"""What both sides agree on below the messages: method names, sizes, keepalive, how an address is dialled.

The one thing to get wrong: options that only one side sets. A limit raised on one side is still the other's default.
"""

from __future__ import annotations

import json
from typing import Any

import grpc.aio

from peer.config import parse_address
from peer.errors import AddressError, Unreachable

EXCHANGE = "/peer.v1.Mixing/Exchange"
GOSSIP = "/peer.v1.Membership/Gossip"
JOIN = "/peer.v1.Membership/Join"
FETCH = "/peer.v1.State/Fetch"
TOP_K = "/peer.v1.Probe/TopK"
STATUS = "/peer.v1.Admin/Status"

ADMITTED = "peer-exchange"  # initial metadata of an exchange the server has taken on
REFUSAL = "peer-refusal-bin"  # trailing metadata: why a peer is not let in

DEFAULT_MAX_FRAME_BYTES = 25 << 20  # fits the largest chunk a run may have, in fp32
CONTROL_LIMIT = 8 << 20  # longest answer to a control message
_METADATA_LIMIT = 64 << 10  # a refusal names the fields that differ

# Both sides ping a silent connection and both must allow it, or the server answers too_many_pings and hangs up.
KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # of pings gRPC sends for itself, and keepalive waits for: 60 s otherwise
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: frames are coded already, and unpacking a bomb costs
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


def client_options(receive_bytes: int) -> list[tuple[str, Any]]:
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


def target(address: str) -> str:
    """Return what gRPC dials. The scheme is ours: a rumoured "unix:1" or "xds:1" must not choose its own."""
    try:
        parse_address(address, any_port=False)
    except AddressError as error:
        raise Unreachable(str(error)) from None
    return f"dns:///{address}"


def open_channel(address: str, receive_bytes: int) -> Any:
    """Return a channel of its own; it connects when first used."""
    return grpc.aio.insecure_channel(target(address), options=client_options(receive_bytes))
