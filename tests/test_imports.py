"""Imports point one way, and each outside library has its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import peer

ROOT = Path(peer.__file__).parent

# A part imports only parts that stand before it.
ORDER = (
    "errors",
    "waiting",
    "log",
    "config",
    "home",
    "metrics",
    "layout",
    "outer",
    "codec",
    "plan",
    "deadline",
    "consensus",
    "membership",
    "model",
    "data",
    "trainer",
    "learner",
    "tensorfile",
    "checkpoint",
    "export",
    "transport",
    "loopback",
    "proto",
    "wire",
    "mixing",
    "agreement",
    "probe",
    "catchup",
    "network",
    "joining",
    "rounds",
    "course",
    "neighbours",
    "status",
    "service",
    "rpc_client",
    "rpc_server",
    "report",
    "swarm",
    "daemon",
    "cli",
    "__main__",
)

# Parts that may import less than what stands before them.
ONLY = {"config": {"errors"}, "metrics": {"errors"}}

# Where each library may be imported; a part not listed may import any library that is not named here.
HOME = {
    "grpc": {"rpc_client", "rpc_server"},
    "grpc_health": {"rpc_client", "rpc_server"},
    "grpc_reflection": {"rpc_client", "rpc_server"},
    "prometheus_client": {"metrics"},
    "google": {"proto", "wire", "rpc_client", "rpc_server"},
    "pydantic": {"config"},
    "typer": {"cli"},
    "rich": {"cli", "report", "swarm"},
    "matplotlib": {"report"},
}
PURE = ("layout", "outer", "codec", "plan", "deadline", "consensus", "membership")
IMPURE = {"asyncio", "socket", "threading", "time", "subprocess", "concurrent"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


SOURCES = sorted(path for path in ROOT.rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))
INSIDE = [path for path in SOURCES if path != ROOT / "__init__.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted module, line) of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "peer":
            yield from ((f"peer.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or "", node.lineno


def test_every_part_has_its_place_in_the_order():
    assert {part_of(path) for path in INSIDE} - set(ORDER) == set()


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_imports_point_one_way(path):
    part = part_of(path)
    before = set(ORDER[: ORDER.index(part)] if part in ORDER else ORDER)
    allowed = ONLY.get(part, before) | {part, "__version__"}
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for module, line in imported(path)
        if module.startswith("peer.") and module.split(".")[1] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_each_library_is_imported_only_where_it_belongs(path):
    part = part_of(path)
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for module, line in imported(path)
        if part not in HOME.get(module.split(".")[0], {part})
    ]
    assert wrong == []


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_generated_messages_are_read_only_at_the_edge(path):
    if part_of(path) in ("proto", "wire", "rpc_client", "rpc_server"):
        return
    assert [f"{module} in line {line}" for module, line in imported(path) if module.startswith("peer.proto")] == []


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_the_environment_is_read_only_by_config(path):
    if part_of(path) == "config":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {"environ", "environb", "getenv", "putenv"}
    uses = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names})
    ]
    assert uses == []


@pytest.mark.parametrize("path", [path for path in INSIDE if part_of(path) in PURE], ids=name_of)
def test_the_pure_parts_know_no_clock_thread_or_socket(path):
    assert [module for module, _ in imported(path) if module.split(".")[0] in IMPURE] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_holds_one_idea(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 350, f"{name_of(path)} has {lines} lines; split it where its ideas part"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_opens_with_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
