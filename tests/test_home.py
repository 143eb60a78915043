"""A peer's folder whose disk fails: what was there is given back all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.home import open_home


def test_a_folder_on_a_disk_that_turned_read_only_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = open_home(tmp_path)
    home.show_admin("127.0.0.1:1")

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", read_only)
        home.close()
    open_home(tmp_path).close()
