"""Write peer/proto/peer_pb2.py and its types from peer.proto; with --check, only say whether they are up to date.

No gRPC stubs are generated: the client and the server name the methods themselves, so that frames can pass undecoded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
TARGET = PROTOS.parent / "peer" / "proto"
GENERATED = ("peer_pb2.py", "peer_pb2.pyi")


def generate(target: Path) -> None:
    """Compile peer.proto into `target`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{well_known}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            str(PROTOS / "peer.proto"),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc ended with {status}")


def stale() -> list[str]:
    """Return the generated files that differ from what peer.proto gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [
            name
            for name in GENERATED
            if not (TARGET / name).exists() or (TARGET / name).read_bytes() != (Path(folder) / name).read_bytes()
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the generated files are out of date")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    out_of_date = stale()
    for name in out_of_date:
        print(f"{TARGET / name} is out of date: run python protos/generate.py", file=sys.stderr)
    return 1 if out_of_date else 0


if __name__ == "__main__":
    raise SystemExit(main())
