"""The commented configuration file that `peer init` writes, made from the fields themselves so that it cannot drift."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from peer.config.sections import Key, Section, section_type
from peer.config.settings import Settings
from peer.config.spec import OPEN_KEYS, RunSpec

_HEAD = """\
# Configuration of a peer. Every line that begins with "#" and a key shows the default: take the "# " away to change it.
# The environment beats this file (PEER_ROUND__STEPS=20), flags beat both (--set round.steps=20).
# Times: "250ms", "30s", "2m". Sizes: "64KiB", "1MiB". Rates, in bits: "20mbit", "1gbit".
"""
_SPEC = """
# ---- The run spec: what all peers of a run agree on. A joiner needs none of it: it takes over the swarm's.
"""
_SETTINGS = """
# ---- Local settings: each peer may choose its own.
"""


def template() -> str:
    """Return the file's text. Read back as it is, or with every default taken in, it gives the defaults."""
    # what stands in no section must come before the first one
    loose = [*_loose(RunSpec), "", *_loose(Settings)]
    return "\n".join([_HEAD, *loose, _SPEC, *_sections(RunSpec), _SETTINGS, *_sections(Settings)]).rstrip() + "\n"


def _loose(kind: type[Section]) -> Iterator[str]:
    for name, info in kind.model_fields.items():
        if section_type(info) is None:
            yield from _setting(name, info)


def _sections(kind: type[Section], prefix: str = "") -> Iterator[str]:
    for name, info in kind.model_fields.items():
        section = section_type(info)
        if section is None:
            continue
        dotted = prefix + name
        yield from _comment(section.__doc__ or "")
        yield f"[{dotted}]"
        open_tables = []
        for key, field in section.model_fields.items():
            if f"{dotted}.{key}" in OPEN_KEYS:
                open_tables.append((f"{dotted}.{key}", field))
            elif section_type(field) is None:
                yield from _setting(key, field)
        yield ""
        for table, field in open_tables:
            yield from _comment(field.description or "")
            yield f"[{table}]"
            yield from (f"# {key} = {_toml(value)}" for key, value in Key(table, field).default.items())
            yield ""
        yield from _sections(section, f"{dotted}.")


def _setting(name: str, info: FieldInfo) -> Iterator[str]:
    key = Key(name, info)
    value = key.text_of(key.default) if key.text_of else key.default
    yield from _comment(info.description or "")
    yield f"# {name} = {_toml(value)}"


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, 110, initial_indent="## ", subsequent_indent="## ")


def _toml(value: Any) -> str:
    # TOML and JSON spell strings, booleans, numbers and flat lists alike
    return json.dumps(value)
