"""A peer's folder: who it is, whom it knew last, where it can be asked, and that nobody else uses it.

    identity.json   id, and how often it was started: others tell an old life from a new one by it
    members.json    addresses that others had; with them a restarted first peer finds its swarm again
    admin.json      where `peer status` finds the running daemon
    checkpoints/    see checkpoint
    cache/          tokens

The one thing to get wrong: two processes with one identity. The folder is locked for as long as a peer runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import log
from peer.errors import UsageError

logger = log.get(__name__)

_LOCK, _IDENTITY, _MEMBERS, _ADMIN = "lock", "identity.json", "members.json", "admin.json"
_MOST_REMEMBERED = 64


@dataclass(slots=True)
class Home:
    """The folder of a running peer. Made by `open_home`."""

    path: Path
    id: str
    incarnation: int
    _lock: int

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def remembered(self) -> list[str]:
        """Return the addresses that members had last, none if that is not known."""
        content = _read(self.path / _MEMBERS)
        addresses = content.get("addresses") if content else None
        return [a for a in addresses if isinstance(a, str)] if isinstance(addresses, list) else []

    def remember(self, addresses: Iterable[str]) -> None:
        """Keep where members can be reached. A full disk is no reason to stop."""
        try:
            _write(self.path / _MEMBERS, {"addresses": sorted(set(addresses))[:_MOST_REMEMBERED]})
        except OSError as error:
            logger.warning("members not remembered", why=str(error))

    def show_admin(self, address: str) -> None:
        _write(self.path / _ADMIN, {"address": address, "pid": os.getpid()})

    def close(self) -> None:
        """Give the folder back. Idempotent."""
        if self._lock >= 0:
            try:
                (self.path / _ADMIN).unlink(missing_ok=True)
            except OSError as error:  # a disk that turned read-only is no reason to end in error
                logger.warning("admin address not removed", why=str(error))
            os.close(self._lock)
            self._lock = -1


def open_home(path: Path) -> Home:
    """Lock the folder, made if missing, and count this start. Raises UsageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"storage.dir {path} cannot be used: {error.strerror}; choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UsageError(f"storage.dir {path} is in use by another peer; give each peer a folder of its own") from None
    try:
        identity = _read(path / _IDENTITY) or {}
        id_ = identity.get("id")
        started = identity.get("started")
        if not (isinstance(id_, str) and 0 < len(id_) <= 64 and id_.isprintable()):
            id_ = secrets.token_hex(6)
        incarnation = started + 1 if isinstance(started, int) and 0 <= started < 2**62 else 1
        _write(path / _IDENTITY, {"id": id_, "started": incarnation})
    except OSError as error:
        os.close(lock)
        raise UsageError(
            f"storage.dir {path} cannot be written: {error.strerror}; free space or choose another"
        ) from error
    return Home(path, id_, incarnation, lock)


def admin_address(path: Path) -> str | None:
    """Return where the peer that runs in a folder answers, None if none does."""
    content = _read(path / _ADMIN)
    address = content.get("address") if content else None
    return address if isinstance(address, str) else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("file ignored", path=str(path), why=str(error))
        return None
    return content if isinstance(content, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a small file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
