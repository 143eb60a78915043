"""Quantities with units and addresses, as an operator writes them: "30s", "1MiB", "100mbit", "[::1]:7700".

One unit per quantity inside: seconds, bytes, bits per second. The one thing you would get wrong: link rates are in bits
and sizes in bytes, and neither word is ever guessed from the other, so "100MB" is no rate.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from peer.errors import AddressError

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z/]*)")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_BITS_PER_SECOND = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")


def parse_duration(value: object) -> object:
    """Return seconds for "250ms", "30s", "2m" or "1h"; what is no string passes through. Raises ValueError."""
    if not isinstance(value, str):
        return value
    return _scaled(value, _SECONDS, 'a duration such as "250ms", "30s" or "2m"', str.lower)


def parse_size(value: object) -> object:
    """Return bytes for "64KiB", "1MiB" or "5MB"; what is no string passes through. Raises ValueError."""
    if not isinstance(value, str):
        return value
    return round(_scaled(value, _BYTES, 'a size such as "64KiB", "1MiB" or "5MB"', str.lower))


def parse_rate(value: object) -> object:
    """Return bits per second for "100mbit" or "1gbit"; what is no string passes through. Raises ValueError."""
    if not isinstance(value, str):
        return value
    return round(_scaled(value, _BITS_PER_SECOND, 'a rate in bits such as "100mbit" or "1gbit"', _plain_rate_unit))


def format_duration(seconds: float) -> str:
    """Return the shortest exact spelling that `parse_duration` reads back."""
    if seconds and abs(seconds) < 1:
        return f"{_trim(seconds * 1000)}ms"
    if seconds >= 60 and seconds % 60 == 0:
        return f"{_trim(seconds / 60)}m"
    return f"{_trim(seconds)}s"


def format_size(size: int) -> str:
    """Return the shortest exact spelling that `parse_size` reads back."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def format_rate(bits_per_second: int) -> str:
    """Return the shortest exact spelling that `parse_rate` reads back."""
    for unit, factor in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if bits_per_second and bits_per_second % factor == 0:
            return f"{bits_per_second // factor}{unit}"
    return f"{bits_per_second}bit"


class Address(NamedTuple):
    """Where to listen or dial. Port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        if self.host.rstrip(".").lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_any(self) -> bool:
        """True for 0.0.0.0 and [::]: good to listen on, meaningless to dial."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(text: str, *, any_port: bool = True) -> Address:
    """Return the address in "host:port" or "[ipv6]:port". Port 0 only with `any_port`. Raises AddressError.

    Names are not resolved here: a name that nobody can resolve yet is redialled, not refused.
    """
    problem = _address_problem(text, any_port)
    if problem:
        raise AddressError(f"{text!r} is not an address: {problem}")
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def _address_problem(text: str, any_port: bool) -> str:
    host, colon, port = text.rpartition(":")
    if not text.isascii() or any(c.isspace() or not c.isprintable() for c in text):
        return "only printable ASCII without spaces (write an international name in its xn-- form)"
    if "://" in text or "/" in text:
        return "leave out the scheme and the path, write host:port"
    if not colon:
        return "the port is missing, write host:port"
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        return "the port must be a number from 0 to 65535" if any_port else "the port must be a number from 1 to 65535"
    if int(port) == 0 and not any_port:
        return "the port must be a number from 1 to 65535"
    return _host_problem(host)


def _host_problem(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        return "" if _is_ip(host[1:-1], 6) else "what is in brackets must be an IPv6 address"
    if ":" in host:
        return "put an IPv6 address in brackets, such as [::1]:7700"
    if not host:
        return "the host is missing, write host:port"
    looks_numeric = re.fullmatch(r"[0-9.]+", host) is not None
    if (looks_numeric and not _is_ip(host, 4)) or not _HOST_NAME.fullmatch(host):
        return "the host is neither a name nor an IP address"
    return ""


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _scaled(text: str, units: dict[str, float] | dict[str, int], would_do: str, unit_of: Callable[[str], str]) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = units.get(unit_of(match[2])) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be {would_do}, got {text!r}")
    number = float(match[1]) * factor
    if not math.isfinite(number):
        raise ValueError(f"must be {would_do}, got {text!r}")
    return number


def _plain_rate_unit(unit: str) -> str:
    if "B" in unit:  # bytes: 100 MBps is 800 mbit
        return unit
    unit = unit.lower().removesuffix("/s")
    return f"{unit[:-3]}bit" if unit.endswith("bps") else unit


def _trim(number: float) -> str:
    return f"{number:.12g}"
