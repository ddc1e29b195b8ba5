"""Generates shared/pagewire/v1 from protos/, or with --check reports whether it is up to date."""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
STUBS = ROOT / "shared" / "pagewire" / "v1"


def generate(out: Path) -> None:
    """Writes the stubs of every .proto under `out`/pagewire/v1."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"-I{well_known}", *outputs, *sources]):
        sys.exit("protoc failed, see above")


def stale_stubs() -> list[str]:
    """Names of the committed stubs that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted((Path(folder) / "pagewire" / "v1").iterdir())
        names = {path.name for path in fresh}
        wrong = [p.name for p in fresh if not _same(p, STUBS / p.name)]
        extra = [p.name for p in STUBS.glob("*_pb2*") if p.name not in names]
    return wrong + extra


def _same(fresh: Path, committed: Path) -> bool:
    return committed.is_file() and committed.read_bytes() == fresh.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when stale")
    if not parser.parse_args().check:
        generate(ROOT / "shared")
        return
    stale = stale_stubs()
    if stale:
        sys.exit(f"stale stubs: {', '.join(stale)}; run `make protos`")


if __name__ == "__main__":
    main()
