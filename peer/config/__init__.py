"""The run spec (what all peers agree on) and the local settings (what a peer may choose).

`load` merges file, environment and flags, checks them and remembers where each value came from. The one thing you would
get wrong: a joiner's spec is only what its operator asked for; the swarm's spec replaces it (`Config.adopt`), and the
settings are then checked against that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peer.config.complain import config_error
from peer.config.presets import PRESETS
from peer.config.sections import flatten, walk
from peer.config.settings import (
    AdminSettings,
    CheckpointSettings,
    DeviceSettings,
    EvalSettings,
    LogSettings,
    MetricsSettings,
    NetworkSettings,
    Settings,
    StartSettings,
    StorageSettings,
    TrainerSettings,
)
from peer.config.sources import PREFIX, Merged
from peer.config.spec import (
    OPEN_KEYS,
    SMALL_LLAMA,
    DataSpec,
    InnerSpec,
    Mix1Spec,
    Mix2Spec,
    MixingSpec,
    ModelSpec,
    OuterSpec,
    ProbeSpec,
    RoundSpec,
    RunSpec,
    TokenizerSpec,
    canonical_json,
    differing,
)
from peer.config.template import template
from peer.config.units import (
    Address,
    format_duration,
    format_rate,
    format_size,
    parse_address,
    parse_duration,
    parse_rate,
    parse_size,
)
from peer.errors import ConfigError

__all__ = [
    "OPEN_KEYS",
    "PREFIX",
    "PRESETS",
    "SMALL_LLAMA",
    "Address",
    "AdminSettings",
    "CheckpointSettings",
    "Config",
    "DataSpec",
    "DeviceSettings",
    "EvalSettings",
    "Everything",
    "InnerSpec",
    "LogSettings",
    "MetricsSettings",
    "Mix1Spec",
    "Mix2Spec",
    "MixingSpec",
    "ModelSpec",
    "NetworkSettings",
    "OuterSpec",
    "ProbeSpec",
    "RoundSpec",
    "RunSpec",
    "Settings",
    "StartSettings",
    "StorageSettings",
    "TokenizerSpec",
    "TrainerSettings",
    "canonical_json",
    "differing",
    "environment",
    "format_duration",
    "format_rate",
    "format_size",
    "load",
    "parse_address",
    "parse_duration",
    "parse_rate",
    "parse_size",
    "spec_fields_set",
    "template",
]


class Everything(Settings, RunSpec):
    """Both in one file: their sections have different names."""


@dataclass(frozen=True, slots=True)
class Config:
    """What one peer runs with. `origins`: dotted name -> "default", "preset P", "file F", "env PEER_X" or "flag"."""

    spec: RunSpec
    settings: Settings
    origins: Mapping[str, str]

    def adopt(self, spec: RunSpec) -> Config:
        """Return this configuration with the swarm's spec. Raises ConfigError where the settings do not fit it."""
        _check_fit(spec, self.settings)
        origins = {name: origin for name, origin in self.origins.items() if name not in self.spec.fields()}
        return replace(self, spec=spec, origins={**dict.fromkeys(spec.fields(), "swarm"), **origins})

    def for_json(self) -> dict[str, Any]:
        """Return every value, sections nested, in base units."""
        return {**self.spec.model_dump(mode="json"), **self.settings.model_dump(mode="json")}

    def shown(self) -> dict[str, Any]:
        """Return dotted name -> value, quantities with their units, in the order of the template."""
        texts = {key.dotted: key.text_of for key in walk(Everything)}
        flat = flatten(self.for_json(), OPEN_KEYS)
        return {name: text(value) if (text := texts.get(name)) else value for name, value in flat.items()}


def load(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Merge defaults < file < environment < overrides ("a.b=c") < flags (dotted name -> value, None: not given).

    `env` defaults to this process's environment. Raises ConfigError, or UsageError for an unreadable file.
    """
    merged = Merged(Everything)
    if file is not None:
        merged.add_file(Path(file))
    merged.add_environment(os.environ if env is None else env)
    merged.add_overrides(overrides)
    merged.add_flags(flags or {})
    try:
        everything = Everything.model_validate(merged.nested())
    except ValidationError as error:
        raise config_error(Everything, error, merged.origins) from None
    spec = RunSpec.of({name: getattr(everything, name) for name in RunSpec.model_fields})
    settings = Settings(**{name: getattr(everything, name) for name in Settings.model_fields})
    _check_fit(spec, settings)
    return Config(spec, settings, _all_origins(spec, settings, merged.origins))


def spec_fields_set(config: Config) -> dict[str, str]:
    """Return the spec fields the operator set on purpose, dotted name -> canonical JSON.

    A joiner sends these, and the swarm refuses it where one differs; all others it takes over. What a preset filled in
    is not among them: the preset itself is.
    """
    return {name: value for name, value in config.spec.fields().items() if _is_set(config.origins.get(name, ""))}


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, to change and hand to a child."""
    return dict(os.environ)


def _is_set(origin: str) -> bool:
    return origin.startswith(("file ", "env ", "flag"))


def _all_origins(spec: RunSpec, settings: Settings, given: Mapping[str, str]) -> dict[str, str]:
    names = [*spec.fields(), *flatten(settings.model_dump(mode="json"), OPEN_KEYS)]
    origins = dict.fromkeys(names, "default")
    if "mixing.preset" in given:
        filled = flatten(PRESETS[spec.mixing.preset], frozenset(), "mixing.")
        origins.update(dict.fromkeys(filled, f"preset {spec.mixing.preset}"))
    return {**origins, **given}


def _check_fit(spec: RunSpec, settings: Settings) -> None:
    micro_batch = settings.device.micro_batch
    if micro_batch and spec.inner.batch % micro_batch:
        raise ConfigError("device.micro_batch", f"must divide inner.batch ({spec.inner.batch}), got {micro_batch}")
