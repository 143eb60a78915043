"""Local settings: what one peer may choose without asking the others.

Nothing here changes what the run computes on average; a swarm of peers with different settings is still one run. The
one thing you would get wrong: `network.listen` is where this peer binds, `network.advertise` is what it tells others to
dial, and neither is derived from the machine's host name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from peer.config.sections import Dial, Listen, Seconds, Section, Unit, matching
from peer.config.units import format_rate, parse_address, parse_rate

LinkRate = Annotated[
    Annotated[int, Field(ge=1000, le=10**13)] | None,
    BeforeValidator(lambda value: None if value == "" else parse_rate(value)),
    Unit("rate", lambda value: "" if value is None else format_rate(value)),
]


class NetworkSettings(Section):
    """How this peer is reached, and whom it asks first."""

    listen: Listen = Field(
        default="127.0.0.1:0", min_length=1, description="Where other peers connect. Port 0 lets the system choose."
    )
    advertise: Dial = Field(
        default="",
        description='Address others dial where it is not the one listened on (NAT, containers). "": that one.',
    )
    bootstrap: list[Dial] = Field(
        default_factory=list, description="Addresses of members to join through. None: start a run."
    )
    insecure: bool = Field(
        default=False,
        description="Allow unencrypted traffic off this machine. Anyone on the path can read and change it.",
    )
    dialable: bool = Field(
        default=True,
        description="Whether others can open connections to this peer. If not, it opens them all.",
    )
    upload: LinkRate = Field(default=None, description='Rate of the uplink, such as "20mbit". "": not known.')
    download: LinkRate = Field(default=None, description='Rate of the downlink, such as "100mbit". "": not known.')
    join_timeout: Seconds = Field(
        default=30.0, gt=0, le=86400, description="Longest time to look for a member that answers."
    )

    @model_validator(mode="after")
    def _check(self) -> NetworkSettings:
        if not self.insecure and not parse_address(self.listen).is_loopback:
            raise ValueError(
                f"listen must be a loopback address unless network.insecure is true (--insecure), got {self.listen!r}: "
                "traffic is not encrypted"
            )
        if "" in self.bootstrap:
            raise ValueError("bootstrap must hold addresses, got ''")
        return self


class DeviceSettings(Section):
    """What this peer computes on."""

    name: Annotated[str, matching(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", "auto, cpu, mps, cuda or cuda:N")] = Field(
        default="auto",
        description="auto (the best there is), cpu, mps, cuda or cuda:N.",
    )
    threads: int = Field(
        default=0, ge=0, le=4096, description="CPU threads for computing. 0: as many as there are cores."
    )
    micro_batch: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Sequences at once, gradients accumulated. Must divide inner.batch. 0: all.",
    )
    compile: bool = Field(default=False, description="Use torch.compile: minutes at the start, faster steps after.")
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Precision of the forward pass. auto: bf16 on a GPU that has it."
    )


class TrainerSettings(Section):
    """What an inner step is."""

    kind: Literal["model", "emulated"] = Field(
        default="model",
        description="model trains; emulated only takes the time and moves the parameters, for rehearsals.",
    )
    step_time: Seconds = Field(default=0.1, ge=0, le=86400, description="Time of one emulated step.")
    max_nonfinite: int = Field(
        default=10,
        ge=1,
        le=10**6,
        description="Steps in a row with a loss or gradient that is no number before giving up.",
    )


class StorageSettings(Section):
    """Where this peer keeps its identity, checkpoints, token cache and journals."""

    dir: str = Field(default="peer-data", min_length=1, description="The folder. One peer at a time.")
    cache: str = Field(
        default="", description='Folder for tokens; peers of one machine may share one. "": in storage.dir.'
    )


class CheckpointSettings(Section):
    """When state is saved."""

    every: int = Field(default=1, ge=1, le=10**6, description="Rounds between two checkpoints.")
    keep: int = Field(
        default=2, ge=1, le=10**6, description="How many to keep. The one before serves when the last is damaged."
    )


class EvalSettings(Section):
    """When the held-out loss is measured."""

    every: int = Field(default=1, ge=0, le=10**6, description="Rounds between two evaluations. 0: never.")
    batches: int = Field(
        default=8, ge=1, le=10**6, description="Held-out batches each. More: a steadier figure, more time."
    )


class MetricsSettings(Section):
    """Prometheus."""

    listen: Listen = Field(default="127.0.0.1:0", description='Where /metrics is served. "": nowhere.')


class AdminSettings(Section):
    """The service that `peer status` asks."""

    listen: Listen = Field(default="127.0.0.1:0", min_length=1, description="Loopback address of the admin service.")

    @model_validator(mode="after")
    def _check(self) -> AdminSettings:
        if not parse_address(self.listen).is_loopback:
            raise ValueError(f"listen must be a loopback address, got {self.listen!r}")
        return self


class StartSettings(Section):
    """When the first round begins."""

    members: int = Field(default=1, ge=1, le=4096, description="Wait until this many members are present.")
    timeout: Seconds = Field(
        default=120.0, gt=0, le=86400, description="Longest wait for them; then begin with those present."
    )


class LogSettings(Section):
    """What goes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe event shown.")
    format: Literal["auto", "human", "json"] = Field(
        default="auto", description="auto: for people on a terminal, JSON lines otherwise."
    )


class Settings(Section):
    """Everything local."""

    network: NetworkSettings = Field(default_factory=NetworkSettings)
    device: DeviceSettings = Field(default_factory=DeviceSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    admin: AdminSettings = Field(default_factory=AdminSettings)
    start: StartSettings = Field(default_factory=StartSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    resume: bool = Field(default=True, description="Go on from the newest checkpoint in storage.dir.")
