"""The wire contract: its descriptor set is what the pinned compiler makes of it, and holds all that it declares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.v1 import adapter_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos" / "coppice" / "v1").glob("*.proto"))


def pinned() -> list[str]:
    """The compiler's requirements as the Makefile pins them."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.findall(r"'((?:grpcio-tools|setuptools)[<=][^']*)'", recipe)


@pytest.fixture(scope="module")
def compiler(pytestconfig: pytest.Config) -> list[str]:
    """The pinned compiler: that of `make protos`, else one that is kept between test runs."""
    made = ROOT / ".venv" / "bin" / "protoc-env" / "bin" / "python"
    if made.exists():
        return [str(made), "-m", "grpc_tools.protoc"]
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        pytest.skip("without pytest's cache there is nowhere to keep the compiler")
    assert pytestconfig.cache is not None
    kept = pytestconfig.cache.mkdir(f"protoc-{'.'.join(map(str, sys.version_info[:2]))}-{pinned()[0]}")
    if not (kept / "complete").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(kept), "--upgrade", *pinned()]
        installed = subprocess.run(install, capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"the pinned compiler cannot be installed: {installed.stderr.strip()[-200:]}")
        (kept / "complete").touch()
    path = f"import sys; sys.path.insert(0, {str(kept)!r})"
    run = f"{path}; from grpc_tools import protoc; sys.exit(protoc.main(sys.argv))"
    return [sys.executable, "-c", run, "-I", str(kept / "grpc_tools" / "_proto")]


def test_the_descriptor_set_and_the_stubs_are_what_the_pinned_compiler_makes(
    compiler: list[str], tmp_path: Path
) -> None:
    made, committed = tmp_path / "coppice" / "v1", ROOT / "coppice" / "v1"
    made.mkdir(parents=True)
    out = [f"--pyi_out={tmp_path}", f"--descriptor_set_out={made / 'coppice.binpb'}", "--include_imports"]
    protos = list(map(str, PROTOS))
    subprocess.run([*compiler, "-I", str(ROOT / "protos"), *out, *protos], check=True, capture_output=True)
    names = sorted(file.name for file in committed.iterdir() if file.suffix in (".pyi", ".binpb"))
    assert sorted(file.name for file in made.iterdir()) == names
    assert [name for name in names if (made / name).read_bytes() != (committed / name).read_bytes()] == []


@pytest.mark.parametrize("module", [adapter_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2])
def test_every_rpc_and_every_message_of_a_stub_is_in_its_proto(module: object) -> None:
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    text = (ROOT / "protos" / descriptor.name).read_text(encoding="utf-8")
    assert set(re.findall(r"^message (\w+)", text, re.M)) == set(descriptor.message_types_by_name)
    methods = {method.name for service in descriptor.services_by_name.values() for method in service.methods}
    assert set(re.findall(r"^  rpc (\w+)", text, re.M)) == methods


def test_no_proto_declares_an_enum_inside_a_message() -> None:
    assert not [proto.name for proto in PROTOS if re.search(r"^\s+enum\b", proto.read_text(encoding="utf-8"), re.M)]
