"""Turns what pydantic found, or a key that is not there, into one ConfigError an operator can act on.

Every message names the key, the rule and the value it got. The one thing you would get wrong: all faults are told at
once, the first one as the error's field; mending a file one run at a time is no fun.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from peer.config.sections import Section, section_type, sections, walk
from peer.errors import ConfigError

_RULES = {
    "greater_than_equal": "must be >= {ge}",
    "greater_than": "must be > {gt}",
    "less_than_equal": "must be <= {le}",
    "less_than": "must be < {lt}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a table of keys and values",
    "model_type": "must be a section",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters",
}

_COMPARISONS = frozenset({"greater_than_equal", "greater_than", "less_than_equal", "less_than"})


def config_error(
    kind: type[Section], error: ValidationError, origins: Mapping[str, str] | None = None, prefix: str = ""
) -> ConfigError:
    """Return one error for everything pydantic found below `kind`; `origins` says where each value came from."""
    complaints: dict[str, str] = {}
    for details in error.errors(include_url=False):
        field, problem = _complaint(kind, details, prefix)
        origin = (origins or {}).get(field, "default")
        complaints.setdefault(field, problem if origin == "default" else f"{problem} ({origin})")
    return gathered(complaints.items())


def gathered(complaints: Iterable[tuple[str, str]]) -> ConfigError:
    """Return (field, problem) pairs as one error, one a line."""
    (field, problem), *rest = complaints
    return ConfigError(field, "\n".join([problem, *(f"{other} {what}" for other, what in rest)]))


def _complaint(kind: type[Section], details: ErrorDetails, prefix: str) -> tuple[str, str]:
    # pydantic appends the branch of a union ("float", "literal['auto']") to the place; the field's name is enough
    names = _field_path(kind, details["loc"])
    dotted = prefix + ".".join(names)
    context = details.get("ctx", {})
    if details["type"] == "value_error":
        message = str(context["error"])
        first, _, rest = message.partition(" ")
        if rest.startswith(("must ", "may ")) and first != "must":  # raised by the section, names its own field
            return f"{dotted}.{first}".lstrip("."), rest
        return dotted, message
    if details["type"] == "extra_forbidden":
        return unknown_key(kind, ".".join(str(part) for part in details["loc"]), prefix)
    if details["type"] == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        alike = difflib.get_close_matches(str(details["input"]), choices, n=1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        return dotted, f"must be one of {', '.join(choices)}, got {_shown(details['input'])}{hint}"
    rule = _RULES.get(details["type"])
    text_of = next((key.text_of for key in walk(kind) if key.dotted == ".".join(names)), None)
    bounds = {name: _quantity(bound, text_of) for name, bound in context.items()}
    problem = rule.format(**bounds) if rule else details["msg"][:1].lower() + details["msg"][1:]
    got = details["input"]
    shown = _quantity(got, text_of) if details["type"] in _COMPARISONS else _shown(got)
    return dotted, f"{problem}, got {shown}"


def _field_path(kind: type[Section], loc: tuple[int | str, ...]) -> list[str]:
    path: list[str] = []
    section: type[Section] | None = kind
    for part in loc:
        if section is None or not isinstance(part, str) or part not in section.model_fields:
            break
        path.append(part)
        section = section_type(section.model_fields[part])
    return path


def unknown_key(kind: type[Section], dotted: str, prefix: str = "") -> tuple[str, str]:
    """Return (field, problem) for a key that `kind` has not, naming the nearest one it has."""
    known = [key.dotted for key in walk(kind)]
    named = list(sections(kind))
    if dotted in named:
        return prefix + dotted, f"is a section; its keys are {_keys_of(known, dotted)}"
    section, _, leaf = dotted.replace("-", "_").lower().rpartition(".")
    nearest = _nearest(known, section, leaf)
    if nearest:
        return prefix + dotted, f"is not a setting; did you mean {prefix}{nearest}?"
    if section in named:
        return prefix + dotted, f"is not a setting; the keys of [{section}] are {_keys_of(known, section)}"
    return prefix + dotted, f"is not a setting; the sections are {', '.join(named)}"


def _keys_of(known: list[str], section: str) -> str:
    return ", ".join(name.removeprefix(f"{section}.") for name in known if name.startswith(f"{section}."))


def _nearest(known: list[str], section: str, leaf: str) -> str:
    """Return the key most likely meant: same section first, then the same key elsewhere, then anything alike."""
    dotted = f"{section}.{leaf}".lstrip(".")
    if dotted in known:
        return dotted
    head = f"{section}." if section else ""
    siblings = [name.removeprefix(head) for name in known if name.startswith(head) and "." not in name[len(head) :]]
    alike = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.75)
    if alike:
        return head + alike[0]
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return max(elsewhere, key=lambda name: difflib.SequenceMatcher(None, name, dotted).ratio())
    alike = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if alike:
        return head + alike[0]
    alike = [] if siblings else difflib.get_close_matches(dotted, known, n=1, cutoff=0.7)
    if alike:
        return alike[0]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    alike = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[alike[0]] if alike else ""


def _quantity(value: Any, text_of: Callable[[Any], str] | None) -> str:
    if text_of and isinstance(value, int | float):
        return text_of(value)
    return f"{value:g}" if isinstance(value, float) else _shown(value)


def _shown(value: Any) -> str:
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
