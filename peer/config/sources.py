"""Where values come from: TOML file < PEER_ environment < flags, merged key by key, each with its origin.

The one thing you would get wrong: values from the environment and from --set are text. They are read as TOML where the
field is not text itself, so `PEER_NAME=7` names the run "7" and `PEER_SEED=7` is a number.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from peer.config.complain import gathered, unknown_key
from peer.config.sections import Key, Section, sections, walk
from peer.config.spec import OPEN_KEYS
from peer.errors import ConfigError, UsageError

PREFIX = "PEER_"
# A Kubernetes service or a linked container called "peer" puts these into every environment beside it.
_NOT_OURS = re.compile(
    r"PEER_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|NAME_.*)"
)


@dataclass
class Merged:
    """Dotted name -> value, and where it came from. A later source replaces an earlier one."""

    root: type[Section]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    complaints: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keys: dict[str, Key] = {key.dotted: key for key in walk(self.root)}
        self._sections = frozenset(sections(self.root))
        self._by_env = {name.replace(".", "_"): name for name in self._keys}

    def add_file(self, path: Path) -> None:
        """Merge a TOML file. Raises UsageError where it cannot be read."""
        self._add_table(_read_toml(path), "", f"file {path}")

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """Merge every PEER_ variable."""
        for variable, text in sorted(environment.items()):
            if variable.startswith(PREFIX) and not _NOT_OURS.fullmatch(variable):
                self._add_variable(variable, text)

    def add_overrides(self, overrides: Iterable[str]) -> None:
        """Merge --set a.b=c items. Raises ConfigError where there is no name."""
        for item in overrides:
            dotted, equals, text = item.partition("=")
            if not equals or not dotted.strip():
                raise ConfigError("--set", f"must be section.key=value, got {item!r}")
            self._add_text(dotted.strip(), text, "flag")

    def add_flags(self, flags: Mapping[str, Any]) -> None:
        """Merge values of flags with a name of their own; None and () mean that the flag was not given."""
        for dotted, value in flags.items():
            if value is not None and value != () and value != []:
                self._put(dotted, list(value) if isinstance(value, tuple) else value, "flag")

    def nested(self) -> dict[str, Any]:
        """Return the values as nested sections. Raises ConfigError for the keys that do not exist."""
        if self.complaints:
            raise gathered(self.complaints)
        tree: dict[str, Any] = {}
        for dotted, value in self.values.items():
            *path, leaf = dotted.split(".")
            place = tree
            for section in path:
                place = place.setdefault(section, {})
            place[leaf] = value
        return tree

    def _add_table(self, table: Mapping[str, Any], prefix: str, origin: str) -> None:
        for name, value in table.items():
            dotted = prefix + name
            if isinstance(value, Mapping) and dotted in self._sections:
                self._add_table(value, f"{dotted}.", origin)
            elif dotted in self._sections:
                self.complaints.append((dotted, f"must be a section, got {value!r} ({origin})"))
            elif isinstance(value, Mapping) and dotted not in self._keys:
                for key in value or [""]:
                    self._unknown(f"{dotted}.{key}".removesuffix("."), origin)
            else:
                self._put(dotted, value, origin)

    def _add_variable(self, variable: str, text: str) -> None:
        name = variable.removeprefix(PREFIX).lower()
        dotted = name.replace("__", ".")
        if not self._is_known(dotted):
            guess = (
                dotted if "." in dotted else name.replace("_", ".", 1)
            )  # for the message: the first word is the section
            dotted = self._by_env.get(name.replace("__", "_"), guess)
        self._add_text(dotted, text, f"env {variable}")

    def _add_text(self, dotted: str, text: str, origin: str) -> None:
        key = self._keys.get(dotted)
        if key is None and not self._is_known(dotted):
            self._unknown(dotted, origin)
            return
        self._put(dotted, _typed(key, text), origin)

    def _put(self, dotted: str, value: Any, origin: str) -> None:
        if not self._is_known(dotted):
            self._unknown(dotted, origin)
        elif dotted in OPEN_KEYS and isinstance(value, Mapping):
            for name, item in value.items():
                self._put(f"{dotted}.{name}", item, origin)
        elif dotted in OPEN_KEYS:
            self.complaints.append((dotted, f"must be a table of keys and values, got {value!r} ({origin})"))
        else:
            self.values[dotted] = value
            self.origins[dotted] = origin

    def _is_known(self, dotted: str) -> bool:
        head, _, leaf = dotted.rpartition(".")
        return dotted in self._keys or (head in OPEN_KEYS and bool(leaf))

    def _unknown(self, dotted: str, origin: str) -> None:
        name, problem = unknown_key(self.root, dotted)
        self.complaints.append((name, f"{problem} ({origin})"))


def _typed(key: Key | None, text: str) -> Any:
    kind = key.annotation if key else None
    if kind is str and text[:1] not in ("'", '"'):
        return text
    if get_origin(kind) is list and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the configuration file {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the configuration file {path} is not TOML: {error}") from None
