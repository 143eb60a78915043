"""What every configuration section has in common, and the field types that take units.

A section is frozen, refuses keys it does not know and takes no value of another type: `true` is not 1, "5" is not 5.
The one thing you would get wrong: a value is kept in its base unit (seconds, bytes, bits per second), whatever it was
written in; the `Unit` beside the type says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from peer.config.units import (
    format_duration,
    format_rate,
    format_size,
    parse_address,
    parse_duration,
    parse_rate,
    parse_size,
)
from peer.errors import AddressError


class Section(BaseModel):
    """A named group of fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Unit:
    """How a quantity is written back for people."""

    name: str
    text: Callable[[Any], str]


def matching(pattern: str, rule: str) -> AfterValidator:
    """Return a check that text matches `pattern`; `rule` says in words what would."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {rule}, got {text[:80]!r}")
        return text

    return AfterValidator(check)


def _check_listen(text: str) -> str:
    return _check_address(text, any_port=True)


def _check_dial(text: str) -> str:
    address = _check_address(text, any_port=False)
    if address and parse_address(address).is_any:
        raise ValueError(f"must be an address that others can dial, got {text!r}")
    return address


def _check_address(text: str, *, any_port: bool) -> str:
    if not text:
        return text
    try:
        return str(parse_address(text, any_port=any_port))
    except AddressError as error:
        raise ValueError(f"must be host:port: {error}") from None


def _parse_deadline(value: object) -> object:
    return value if value == "auto" else parse_duration(value)


def _check_deadline(value: float | str) -> float | str:
    if isinstance(value, str) or value > 0:
        return value
    raise ValueError(f'must be "auto" or > 0s, got {value:g}')


Seconds = Annotated[float, BeforeValidator(parse_duration), Unit("duration", format_duration)]
Bytes = Annotated[int, BeforeValidator(parse_size), Unit("size", format_size)]
Rate = Annotated[int, BeforeValidator(parse_rate), Unit("rate", format_rate)]
Deadline = Annotated[
    float | Literal["auto"],
    AfterValidator(_check_deadline),
    BeforeValidator(_parse_deadline),
    Unit("duration", lambda v: v if isinstance(v, str) else format_duration(v)),
]
Listen = Annotated[str, AfterValidator(_check_listen)]
Dial = Annotated[str, AfterValidator(_check_dial)]


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration field as an operator sees it."""

    dotted: str
    info: FieldInfo

    @property
    def annotation(self) -> Any:
        """The plain type: pydantic keeps `Annotated` extras apart."""
        return self.info.annotation

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def text_of(self) -> Callable[[Any], str] | None:
        """How the value is written with its unit, None for a plain one."""
        extras = [item for item in self.info.metadata if isinstance(item, Unit)]
        return extras[0].text if extras else None


def section_type(info: FieldInfo) -> type[Section] | None:
    """Return the section a field holds, None for a plain value."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def walk(kind: type[Section], prefix: str = "") -> Iterator[Key]:
    """Yield every field below a section in the order written, nested sections included."""
    for name, info in kind.model_fields.items():
        nested = section_type(info)
        if nested is None:
            yield Key(prefix + name, info)
        else:
            yield from walk(nested, f"{prefix}{name}.")


def sections(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every section below a section."""
    for name, info in kind.model_fields.items():
        nested = section_type(info)
        if nested is not None:
            yield prefix + name
            yield from sections(nested, f"{prefix}{name}.")


def flatten(values: Mapping[str, Any], open_keys: frozenset[str], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted name -> value. The mappings named in `open_keys` are split one level deep."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        dotted = prefix + name
        if isinstance(value, Mapping) and dotted in open_keys:
            flat.update({f"{dotted}.{key}": item for key, item in value.items()})
        elif isinstance(value, Mapping) and prefix.removesuffix(".") not in open_keys:
            flat.update(flatten(cast("Mapping[str, Any]", value), open_keys, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat
