"""`peer run`: one peer in the foreground."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer import log
from peer.cli.options import ConfigFile, Overrides

if TYPE_CHECKING:
    from peer.waiting import Stop


def run(
    config: ConfigFile = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", help="Address of a member to join through; repeatable.", metavar="HOST:PORT"),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="Where other peers connect; port 0 is any.", metavar="HOST:PORT")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="Folder for identity, checkpoints and logs.", metavar="DIR")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", help='Where /metrics is served; "" for nowhere.', metavar="HOST:PORT")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Allow unencrypted traffic off this machine.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train until the run ends, alone or with the members of a swarm.

    The first Ctrl-C (or SIGTERM) ends in order: the step is finished, the state
    saved, the members told; a second one ends at once with 130. Started again
    with the same folder, the peer goes on where it was.

    Example: peer run --bootstrap 192.0.2.7:7400 --data-dir ~/peer-data
    """
    from peer.config import load

    flags = {
        "network.bootstrap": bootstrap or None,
        "network.listen": listen,
        "network.insecure": insecure,
        "storage.dir": data_dir,
        "metrics.listen": metrics,
    }
    merged = load(config, overrides=overrides or (), flags=flags)
    log.configure(merged.settings.log.level, merged.settings.log.format)

    _end_on_signals(None)
    from peer.daemon import Daemon  # torch takes seconds; a wrong flag should not
    from peer.waiting import Stop

    stop = Stop()
    _end_on_signals(stop)
    Daemon(merged, stop).run()


def _end_on_signals(stop: Stop | None) -> None:
    """Ask to end on the first signal, end at once on a second Ctrl-C. Without a `stop` nothing has begun: end now."""

    def handle(number: int, _frame: Any) -> None:
        if stop is None:
            os._exit(0)
        if stop.asked.is_set() and number == signal.SIGINT:
            os._exit(130)
        if not stop.asked.is_set():
            log.get(__name__).info("asked to end: finishing the step, saving, telling the others")
        stop.ask()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
