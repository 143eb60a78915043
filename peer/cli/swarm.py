"""`peer swarm`: a whole swarm on this machine, watched live, with a report at the end."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peer.cli.options import ConfigFile, Json, Overrides

if TYPE_CHECKING:
    from rich.table import Table

    from peer.swarm import Swarm

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.5


def swarm(
    peers: Annotated[int, typer.Option("--peers", help="How many peers.", min=1, max=256)] = 4,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds in the run; round.count.", min=1)] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="diloco, global-m1, global-m1-local-m2 or local-m1-m2.", metavar="NAME"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for peers and report. Default: runs/<time>.", metavar="DIR")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Start several real peers on this machine, show a live table, and leave a report.

    The report folder holds summary.json, loss.png, consensus.png and a folder for
    each peer with its log, its journals and its checkpoints. Ctrl-C ends all
    peers in order; a second one kills them.

    Example: peer swarm --peers 4 --rounds 8 --set round.steps=20
    """
    from peer import log
    from peer.config import load

    merged = load(config, overrides=overrides or (), flags={"round.count": rounds, "mixing.preset": preset})
    log.configure("warning", "human")
    folder = out or Path("runs") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    arguments = _arguments(config, overrides or [], rounds, preset, peers, folder, merged.origins)

    from peer import report
    from peer.swarm import Swarm

    started = time.monotonic()
    team = Swarm(peers, folder, arguments)
    end = _End(team)
    try:
        team.start(_say, end.asked)
        _watch(team, merged.spec.round.count, as_json, end)
    finally:
        team.close()
    written = report.write(
        folder, [child.folder for child in team.children], merged.spec.mixing.preset, time.monotonic() - started,
        team.exit_codes(),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(written.summary))
    else:
        _conclude(written.summary, folder, [child.name for child in team.children])
    failed = [child for child in team.children if child.process.returncode != 0]
    for child in failed:
        typer.echo(f"{child.name} ended with {child.process.returncode}:\n{child.last_words()}", err=True)
    if failed:
        raise typer.Exit(1)


def _arguments(
    config: Path | None,
    overrides: list[str],
    rounds: int | None,
    preset: str | None,
    peers: int,
    folder: Path,
    origins: Mapping[str, str],
) -> list[str]:
    """Return what every peer is started with. What the user set stands; the rest suits one machine."""
    settings = {
        "device.threads": 1,  # peers share the cores
        "storage.cache": json.dumps(str(folder / "cache")),
        "start.members": peers,
        "network.join_timeout": '"120s"',
        "log.format": '"json"',
    }
    chosen = [f"{name}={value}" for name, value in settings.items() if origins.get(name, "default") == "default"]
    chosen += overrides
    if rounds is not None:
        chosen.append(f"round.count={rounds}")
    if preset is not None:
        chosen.append(f'mixing.preset="{preset}"')
    arguments = [word for setting in chosen for word in ("--set", setting)]
    return [*arguments, "--config", str(config)] if config else arguments


class _End:
    """Ctrl-C: the first asks, the second kills."""

    def __init__(self, team: Swarm) -> None:
        self._team = team
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: Any) -> None:
        self._count += 1
        if self._count == 1:
            _say("ending all peers in order; once more to kill them")
            self._team.ask_to_end()
        else:
            for child in self._team.children:
                child.process.kill()

    def asked(self) -> bool:
        return self._count > 0


def _watch(team: Swarm, rounds: int, quiet: bool, end: _End) -> None:
    """Show progress until every peer has ended."""
    latest: dict[str, dict[str, Any]] = {}
    if sys.stdout.isatty() and not quiet:
        from rich.live import Live

        with Live(_table(latest, team, rounds), refresh_per_second=4) as live:
            while team.running():
                _ask_all(team, latest)
                live.update(_table(latest, team, rounds))
                time.sleep(LIVE_EVERY_S)
            live.update(_table(latest, team, rounds))
        return
    shown_at = 0.0
    while team.running():
        _ask_all(team, latest)
        if time.monotonic() - shown_at >= PLAIN_EVERY_S and latest and not end.asked():
            shown_at = time.monotonic()
            for name, status in sorted(latest.items()):
                _say("  ".join([name, *_cells(status, rounds)]))
        time.sleep(LIVE_EVERY_S)


def _ask_all(team: Swarm, latest: dict[str, dict[str, Any]]) -> None:
    for child in team.children:
        status = child.status()
        if status is not None:
            latest[child.name] = status


COLUMNS = ("round", "loss", "held out", "tokens/s", "utilisation", "mix1", "mix2", "JS", "members")
HEADERS = {"held out": "held\nout", "tokens/s": "tokens\n/s", "utilisation": "utili-\nsation"}


def _table(latest: dict[str, dict[str, Any]], team: Swarm, rounds: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # Nothing but a space between columns and headers of two lines keep the table within 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=0, caption="mix1, mix2: full/degraded/failed")
    for header in ("peer", *COLUMNS):
        table.add_column(HEADERS.get(header, header), no_wrap=True)
    for child in team.children:
        status = latest.get(child.name)
        ended = child.process.poll() is not None
        if status and ended and (behind := child.rounds()) is not None:
            status = {**status, "round": behind}
        cells = [cell.split(" ", 1)[-1] for cell in _cells(status, rounds)] if status else ["starting"]
        table.add_row(f"{child.name}{' (ended)' if ended else ''}", *cells)
    return table


def _cells(status: dict[str, Any], rounds: int) -> list[str]:
    """Return one text a column, each "name value"; the name is dropped in the table."""
    totals = status.get("totals")
    if totals is None:
        return ["starting"]
    alive = sum(member["state"] == "alive" for member in status["members"])
    values = (
        f"{max(status['round'], 0)}/{rounds}",
        _number(totals["loss_last"], 3),
        _number(status["eval_loss"], 3),
        _number(totals["tokens_per_second"], 0),
        _number(totals["utilization"], 2),
        *("/".join(str(totals[stage][o]) for o in ("full", "degraded", "failed")) for stage in ("mix1", "mix2")),
        _number(totals["js_distance"], 4),
        f"{alive}",
    )
    return [f"{name.replace(' ', '-')} {value}" for name, value in zip(COLUMNS, values, strict=True)]


def _conclude(summary: dict[str, Any], folder: Path, names: list[str]) -> None:
    for name, peer in zip(names, summary["peers"], strict=True):
        fell = f"loss {_number(peer['loss_first'], 3)} -> {_number(peer['loss_last'], 3)}"
        mixes = ", ".join(f"{stage} {_outcomes(peer[stage])}" for stage in ("mix1", "mix2"))
        typer.echo(
            f"{name} ({peer['id']}): {peer['rounds']} rounds, {fell}, {mixes}, "
            f"utilisation {_number(peer['utilization'], 2)}"
        )
    typer.echo(f"held-out loss of the mixed model: {_number(summary.get('eval_loss_last'), 4)}")
    typer.echo(f"JS distance between peers as the last round began: {_number(summary['js_distance_last'], 4)}")
    typer.echo(f"report: {folder}/summary.json, loss.png, consensus.png")


def _outcomes(counts: dict[str, int]) -> str:
    """Return "8 full", or "6 full 2 degraded": what did not happen goes without saying."""
    return " ".join(f"{count} {name}" for name, count in counts.items() if count or name == "full")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _say(line: str) -> None:
    typer.echo(line, err=True)
