"""The `peer` command: finds the command's module, runs it and turns errors into exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 could not join, 4 refused by the swarm, 130 forced by a
second Ctrl-C. The one thing you would get wrong: `peer --help` must stay fast, so a command's module is imported only
when that command is run, and its line in the help stands here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from peer.errors import PeerError


class Entry(NamedTuple):
    """Where a command lives: a function of its name or, with commands of its own, a typer app named `app`."""

    module: str
    help: str


COMMANDS = {
    "run": Entry("peer.cli.run", "Train, alone or with the members of a swarm."),
    "swarm": Entry("peer.cli.swarm", "Start several peers on this machine and report on them."),
    "status": Entry("peer.cli.status", "Show what the peer running here is doing."),
    "members": Entry("peer.cli.members", "List the members that the peer running here knows."),
    "export": Entry("peer.cli.export", "Write a checkpoint as a folder that transformers loads."),
    "init": Entry("peer.cli.init", "Write a commented configuration file."),
    "config": Entry("peer.cli.config", "Check a configuration and show where each value comes from."),
    "version": Entry("peer.cli.version", "Show the version."),
}


class LazyGroup(TyperGroup):
    """Commands by name. Listing them imports none. (The context's type is one that typer keeps to itself.)"""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]  # noqa: ARG002
        """Return a stand-in that carries the name and the help line."""
        entry = COMMANDS.get(cmd_name)
        return TyperCommand(cmd_name, help=entry.help) if entry else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:  # type: ignore[override]
        """Return the command that is about to run, imported now."""
        entry = COMMANDS.get(args[0])
        if entry is None:
            return super().resolve_command(ctx, args)
        return args[0], load_command(args[0]), args[1:]


def load_command(name: str) -> Any:
    """Import a command's module and return its command."""
    module = importlib.import_module(COMMANDS[name].module)
    if hasattr(module, "app"):
        group: typer.Typer = module.app
    else:
        group = typer.Typer(add_completion=False)
        group.command(name)(getattr(module, name))
    command = typer.main.get_command(group)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one language model on many machines over slow, unreliable links, with no coordinator.",
    epilog="Example: peer swarm --peers 4 --rounds 8",
)


@app.callback()
def _root() -> None:
    """Hold the group together; there is nothing to do before a command."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. A traceback on stderr is our bug, never the operator's fault."""
    try:
        app(args=args, prog_name="peer")
    except PeerError as error:
        typer.echo(f"peer: {error}", err=True)
        return error.exit_code
    except SystemExit as done:  # typer has told what is wrong with the arguments, or a command raised typer.Exit
        return done.code if isinstance(done.code, int) else 0
    return 0
