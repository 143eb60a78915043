"""Structured logs on stderr, one event with fields a line, and append-only journals.

`log.get(__name__).info("round done", round=3, loss=2.31)`. People on a terminal get a short line, everything else JSON
lines. The one thing you would get wrong: what is in a field may come from a stranger or be no number, so fields are
escaped, and NaN is written as null (JSON has none).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from peer.errors import UsageError

_FIELDS = "peer_fields"  # attribute of a LogRecord
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_RESERVED = frozenset({"time", "level", "logger", "event", "traceback"})


class Logger:
    """Events of one module. Safe in every thread."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def bug(self, event: str, **fields: Any) -> None:
        """Log the exception being handled with its traceback: for our faults, never for a failure that is expected."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(self, level: int, event: str, fields: Mapping[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, exc_info=exc_info, extra={_FIELDS: fields})


def get(name: str) -> Logger:
    """Return the logger of a module; pass `__name__`."""
    return Logger(logging.getLogger(name))


def configure(level: str, format_: str, stream: TextIO | None = None) -> None:
    """Send all logs, warnings of other libraries included, to `stream` (stderr). The last call counts."""
    stream = sys.stderr if stream is None else stream
    human = format_ == "human" or (format_ == "auto" and stream.isatty())
    handler = _Output(stream)
    handler.setFormatter(_Human() if human else _JsonLine())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Output)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    logging.getLogger("peer").setLevel(_LEVELS[level])
    logging.captureWarnings(True)


def to_json(value: Any) -> str:
    """Return one line of strict JSON whatever comes in: no NaN, bytes as hex, what JSON does not know as text."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Journal:
    """An append-only file of JSON lines that outlives crashes and full disks. Safe in every thread.

    A record is one write, so a crash leaves at most one torn line at the end; it is cut off when the file is opened. A
    write that fails is undone, counted in `lost` and warned of once: training goes on without its journal. Raises
    UsageError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._cut_torn_end()
        except OSError as error:
            raise UsageError(f"cannot write the journal {path}: {error.strerror or error}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. It is in the file, though not synced, when this returns."""
        line = (to_json(record) + "\n").encode()
        with self._lock:
            start = os.fstat(self._file).st_size
            try:
                whole = os.write(self._file, line) == len(line)
                problem = "" if whole else "the disk is full"
            except OSError as error:
                whole, problem = False, error.strerror or str(error)
            if not whole:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, start)
                self.lost += 1
                if self.lost == 1:
                    get(__name__).warning("journal not written, going on without it", path=self.path, problem=problem)

    def read(self) -> list[dict[str, Any]]:
        """Return every whole record, in order."""
        with self._lock:
            return read_journal(self.path)

    def keep(self, predicate: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the records that `predicate` does not hold for. All or nothing: OSError leaves the file as it was."""
        with self._lock:
            records = read_journal(self.path)
            kept = [record for record in records if predicate(record)]
            if len(kept) < len(records):
                self._replace("".join(to_json(record) + "\n" for record in kept).encode())

    def close(self) -> None:
        """Close the file; nothing may be written after."""
        with self._lock:
            os.close(self._file)

    def _replace(self, content: bytes) -> None:
        file, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(content)
                out.flush()
                os.fchmod(out.fileno(), 0o644)
                os.fsync(out.fileno())
            Path(name).replace(self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def _cut_torn_end(self) -> None:
        size = os.fstat(self._file).st_size
        while size:
            block = os.pread(self._file, min(size, 1 << 16), max(0, size - (1 << 16)))
            newline = block.rfind(b"\n")
            size -= len(block) - newline - 1
            if newline >= 0:
                break
        os.ftruncate(self._file, size)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return every whole record of a journal, also of one another process writes; lines that are none are left out.

    A file that is not there holds no records: its peer never got that far.
    """
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class _Output(logging.StreamHandler[TextIO]):
    """stderr. When it is gone or its disk is full, lines are lost in silence: nothing is left to complain to."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handleError(record)


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in getattr(record, _FIELDS, {}).items():
            line[f"{name}_" if name in _RESERVED else name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_json(line)


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f"  {name}={_short(value)}" for name, value in getattr(record, _FIELDS, {}).items())
        line = f"{moment} {record.levelname.lower():7} {_safe(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, bytes):
        return value.hex()
    text = str(value)
    return text if text and text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


def _safe(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
