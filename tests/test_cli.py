"""The command line: exit codes, what goes to stdout and stderr, and that help costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import peer
from peer.cli import main as cli
from peer.config import RunSpec, load, template
from peer.errors import CheckpointError, JoinError, PeerError, RefusedError, UsageError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, tmp_path):
    from peer.config import environment

    for name in environment():
        if name.startswith("PEER_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    def call(*args: str):
        code = cli.main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def failing(monkeypatch):
    """Replace `peer version` by a command that raises."""

    def install(error: BaseException):
        def fail() -> None:
            raise error

        monkeypatch.setattr("peer.cli.version.version", fail)

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerError("broken"), 1),
        (CheckpointError("torn"), 1),
        (UsageError("mend it"), 2),
        (JoinError([("a:1", "refused")]), 3),
        (RefusedError("other run", {"round.steps": ("1", "2")}), 4),
    ],
)
def test_an_expected_failure_is_a_message_and_an_exit_code_not_a_traceback(run, failing, error, code):
    failing(error)
    got, out, err = run("version")
    assert (got, out) == (code, "")
    assert err == f"peer: {error}\n"


def test_a_refusal_shows_the_fields_that_differ(run, failing):
    failing(RefusedError("this run has other settings", {"round.steps": ("20", "50")}))
    assert "round.steps: ours 20, the swarm's 50" in run("version")[2]


def test_an_interrupt_exits_130(run, failing):
    failing(KeyboardInterrupt())
    assert run("version")[0] == 130


def test_a_command_may_choose_its_exit_code(run, failing):
    failing(typer.Exit(3))
    assert run("version")[0] == 3


def test_a_bug_is_never_swallowed(run, failing):
    failing(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        run("version")


@pytest.mark.parametrize("args", [["nonsense"], ["version", "--nonsense"], ["config", "nonsense"], ["init", "a", "b"]])
def test_wrong_usage_exits_2_on_stderr(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "nonsense" in err or "b" in err


def test_help_lists_every_command_and_imports_none_of_them():
    script = (
        "import sys; from peer.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'transformers', 'datasets', 'grpc', 'numpy', 'pydantic'} & set(sys.modules);"
        "print('imported:', sorted(heavy), [m for m in sys.modules if m.startswith('peer.cli.')]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "imported: [] ['peer.cli.main']" in done.stdout
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_config_and_version_do_not_import_torch():
    script = (
        "import sys; from peer.cli.main import main; codes = [main(['version']), main(['config', 'check'])];"
        "print('imported:', sorted({'torch', 'transformers', 'grpc'} & set(sys.modules)), codes)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("imported: [] [0, 0]")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module_with_help_and_an_example(run, name):
    arguments = ["config", "check"] if name == "config" else [name]
    code, out, _ = run(*arguments, "--help")
    assert code == 0
    assert f"Example: peer {name}" in out


def test_no_arguments_show_the_help(run):
    assert "Commands" in "".join(run()[1:])


# ---- version


def test_version_is_the_packages_and_json_holds_the_libraries(run):
    code, out, _ = run("version", "--json")
    versions = json.loads(out)
    assert code == 0
    assert versions["peer"] == peer.__version__
    assert versions["torch"].startswith("2.")
    assert run("version")[1].startswith(f"peer          {peer.__version__}\n")


def test_a_library_that_is_not_there_is_said_to_be_so(run, monkeypatch):
    monkeypatch.setattr("peer.cli.version.LIBRARIES", ("no-such-library",))
    assert "no-such-library not installed" in run("version")[1]


# ---- init


def test_init_writes_the_template_and_says_what_comes_next(run):
    code, out, _ = run("init")
    assert (code, out) == (0, "wrote peer.toml; next: peer run --config peer.toml\n")
    assert Path("peer.toml").read_text(encoding="utf-8") == template()
    assert run("config", "check", "--config", "peer.toml")[0] == 0


def test_init_never_replaces_a_file_unless_told_to(run):
    Path("peer.toml").write_text("seed = 5\n")
    code, _, err = run("init")
    assert (code, err) == (2, "peer: peer.toml exists; --force replaces it\n")
    assert Path("peer.toml").read_text() == "seed = 5\n"
    assert run("init", "--force")[0] == 0
    assert Path("peer.toml").read_text(encoding="utf-8") == template()


def test_init_into_a_folder_that_is_not_there_says_so(run):
    code, _, err = run("init", "gone/peer.toml")
    assert (code, err) == (2, "peer: cannot write gone/peer.toml: No such file or directory\n")


def test_init_to_stdout_writes_nothing_else(run):
    assert run("init", "-")[1] == template()


# ---- config check


def test_config_check_shows_every_value_with_its_origin(run, monkeypatch):
    Path("a.toml").write_text("[round]\nsteps = 20\n")
    monkeypatch.setenv("PEER_SEED", "3")
    code, out, _ = run("config", "check", "--config", "a.toml", "--set", "network.upload=20mbit")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if line and "." in line.split()[0]}
    assert code == 0
    assert rows["round.steps"] == ["20", "file a.toml"]
    assert rows["network.upload"] == ['"20mbit"', "flag"]
    assert rows["inner.batch"] == ["8", "default"]
    assert "seed                              3" in out
    assert "env PEER_SEED" in out


def test_config_check_as_json_is_one_object_with_the_fingerprint(run):
    code, out, _ = run("config", "check", "--json", "--set", "round.steps=20")
    checked = json.loads(out)
    config = load(env={}, overrides=["round.steps=20"])
    assert code == 0
    assert checked["config"] == config.for_json()
    assert checked["origins"] == dict(config.origins)
    assert checked["fingerprint"] == config.spec.fingerprint != RunSpec().fingerprint


def test_config_check_refuses_what_run_would_refuse(run):
    code, out, err = run("config", "check", "--set", "round.stepz=1", "--set", "inner.batch=0")
    assert (code, out) == (2, "")
    assert err == "peer: round.stepz is not a setting; did you mean round.steps? (flag)\n"
    assert run("config", "check", "--config", "gone.toml")[2].startswith(
        "peer: cannot read the configuration file gone"
    )
