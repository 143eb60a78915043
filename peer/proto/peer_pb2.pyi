from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_MIX1: _ClassVar[Stage]
    STAGE_MIX2: _ClassVar[Stage]

class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PART_UNSPECIFIED: _ClassVar[Part]
    PART_CONTRIBUTION: _ClassVar[Part]
    PART_RESULT: _ClassVar[Part]

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_UNSPECIFIED: _ClassVar[Form]
    FORM_PLAIN: _ClassVar[Form]
    FORM_DIFFERENCE: _ClassVar[Form]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_ALIVE: _ClassVar[MemberState]
    MEMBER_STATE_SUSPECT: _ClassVar[MemberState]
    MEMBER_STATE_DEAD: _ClassVar[MemberState]
    MEMBER_STATE_LEFT: _ClassVar[MemberState]

class Vector(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VECTOR_UNSPECIFIED: _ClassVar[Vector]
    VECTOR_Z: _ClassVar[Vector]
    VECTOR_V: _ClassVar[Vector]
    VECTOR_X: _ClassVar[Vector]
STAGE_UNSPECIFIED: Stage
STAGE_MIX1: Stage
STAGE_MIX2: Stage
PART_UNSPECIFIED: Part
PART_CONTRIBUTION: Part
PART_RESULT: Part
FORM_UNSPECIFIED: Form
FORM_PLAIN: Form
FORM_DIFFERENCE: Form
MEMBER_STATE_ALIVE: MemberState
MEMBER_STATE_SUSPECT: MemberState
MEMBER_STATE_DEAD: MemberState
MEMBER_STATE_LEFT: MemberState
VECTOR_UNSPECIFIED: Vector
VECTOR_Z: Vector
VECTOR_V: Vector
VECTOR_X: Vector

class Frame(_message.Message):
    __slots__ = ("open", "accept", "decline", "chunk", "done", "end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    open: Open
    accept: Accept
    decline: Decline
    chunk: Chunk
    done: Done
    end: End
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("run", "round", "stage", "sender", "plan", "chunks", "references")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    stage: Stage
    sender: str
    plan: bytes
    chunks: _containers.RepeatedScalarFieldContainer[int]
    references: bytes
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., sender: _Optional[str] = ..., plan: _Optional[bytes] = ..., chunks: _Optional[_Iterable[int]] = ..., references: _Optional[bytes] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("chunks", "references")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    references: bytes
    def __init__(self, chunks: _Optional[_Iterable[int]] = ..., references: _Optional[bytes] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("reason", "round")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    reason: str
    round: int
    def __init__(self, reason: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("run", "round", "stage", "chunk", "part", "form", "codec", "values", "contributors", "checksum", "payload")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    stage: Stage
    chunk: int
    part: Part
    form: Form
    codec: int
    values: int
    contributors: int
    checksum: int
    payload: bytes
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ..., chunk: _Optional[int] = ..., part: _Optional[_Union[Part, str]] = ..., form: _Optional[_Union[Form, str]] = ..., codec: _Optional[int] = ..., values: _Optional[int] = ..., contributors: _Optional[int] = ..., checksum: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: Part
    def __init__(self, part: _Optional[_Union[Part, str]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "address", "incarnation", "state", "beat", "round", "step", "from_round", "upload_bps")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BPS_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    incarnation: int
    state: MemberState
    beat: int
    round: int
    step: int
    from_round: int
    upload_bps: int
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[MemberState, str]] = ..., beat: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., from_round: _Optional[int] = ..., upload_bps: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("run", "sender", "members")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    sender: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, run: _Optional[bytes] = ..., sender: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "member", "name", "fields", "layout")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    member: Member
    name: str
    fields: _containers.ScalarMap[str, str]
    layout: bytes
    def __init__(self, protocol: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., name: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., layout: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("spec", "members")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    spec: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, spec: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "differences")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    def __init__(self, reason: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("field", "asked", "swarm")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    field: str
    asked: str
    swarm: str
    def __init__(self, field: _Optional[str] = ..., asked: _Optional[str] = ..., swarm: _Optional[str] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("run", "layout", "have")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    layout: bytes
    have: bytes
    def __init__(self, run: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., have: _Optional[bytes] = ...) -> None: ...

class StateItem(_message.Message):
    __slots__ = ("position", "chunk")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    position: Position
    chunk: StateChunk
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., chunk: _Optional[_Union[StateChunk, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("round", "step", "step_seconds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    step_seconds: float
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("round", "vector", "chunk", "checksum", "payload")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    round: int
    vector: Vector
    chunk: int
    checksum: int
    payload: bytes
    def __init__(self, round: _Optional[int] = ..., vector: _Optional[_Union[Vector, str]] = ..., chunk: _Optional[int] = ..., checksum: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class TopKRequest(_message.Message):
    __slots__ = ("run", "round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class TopKReply(_message.Message):
    __slots__ = ("probe",)
    PROBE_FIELD_NUMBER: _ClassVar[int]
    probe: TopK
    def __init__(self, probe: _Optional[_Union[TopK, _Mapping]] = ...) -> None: ...

class TopK(_message.Message):
    __slots__ = ("round", "tokens", "k", "ids", "log_probs", "tail")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    round: int
    tokens: int
    k: int
    ids: bytes
    log_probs: bytes
    tail: bytes
    def __init__(self, round: _Optional[int] = ..., tokens: _Optional[int] = ..., k: _Optional[int] = ..., ids: _Optional[bytes] = ..., log_probs: _Optional[bytes] = ..., tail: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
