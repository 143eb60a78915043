"""Domain types to protobuf and back: the one place where what another peer sent is measured and believed.

Everything is bounded here, sizes before contents, so the rest of the code may take a decoded message at its word about
shape. Not about truth: that the run, the round or the checksum is right is for whoever knows better.
"""

from __future__ import annotations

from peer.wire.frames import END, decode_frame, encode_frame, frame_bytes
from peer.wire.messages import (
    decode_gossip,
    decode_join_reply,
    decode_join_request,
    decode_refusal,
    decode_state_item,
    decode_state_request,
    decode_status,
    decode_top_k_reply,
    decode_top_k_request,
    encode_gossip,
    encode_join_reply,
    encode_join_request,
    encode_refusal,
    encode_state_item,
    encode_state_request,
    encode_status,
    encode_top_k_reply,
    encode_top_k_request,
)

PROTOCOL = 1  # grows when an older peer could no longer take part

__all__ = [
    "END",
    "PROTOCOL",
    "decode_frame",
    "decode_gossip",
    "decode_join_reply",
    "decode_join_request",
    "decode_refusal",
    "decode_state_item",
    "decode_state_request",
    "decode_status",
    "decode_top_k_reply",
    "decode_top_k_request",
    "encode_frame",
    "encode_gossip",
    "encode_join_reply",
    "encode_join_request",
    "encode_refusal",
    "encode_state_item",
    "encode_state_request",
    "encode_status",
    "encode_top_k_reply",
    "encode_top_k_request",
    "frame_bytes",
]
