"""The wire contract: its stubs are what the pinned compiler makes of it, and every part of it says what it is."""

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


def test_stubs_are_what_the_pinned_compiler_makes(compiler: list[str], tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    out += [f"--descriptor_set_out={tmp_path / 'coppice.binpb'}", "--include_imports"]
    ray = f"--grpc_python_out={tmp_path}", *(str(proto) for proto in PROTOS if proto.stem == "generation")
    for arguments in ([*out, *map(str, PROTOS)], ray):
        subprocess.run([*compiler, "-I", str(ROOT / "protos"), *arguments], check=True, capture_output=True)
    made = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "coppice" / "v1").iterdir()}
    committed = {
        file.name: file.read_text(encoding="utf-8")
        for file in (ROOT / "coppice" / "v1").iterdir()
        if "_pb2" in file.name and file.is_file()
    }
    assert sorted(made) == sorted(committed)
    assert {name for name, text in made.items() if text != committed[name]} == set()
    assert (tmp_path / "coppice.binpb").read_bytes() == (ROOT / "coppice" / "v1" / "coppice.binpb").read_bytes()


@pytest.mark.parametrize("module", [adapter_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2])
def test_every_rpc_and_every_message_of_a_stub_is_in_its_proto(module: object) -> None:
    descriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
    text = (ROOT / "protos" / descriptor.name).read_text(encoding="utf-8")
    assert set(re.findall(r"^message (\w+)", text, re.M)) == set(descriptor.message_types_by_name)
    methods = {method.name for service in descriptor.services_by_name.values() for method in service.methods}
    assert set(re.findall(r"^  rpc (\w+)", text, re.M)) == methods


def test_no_proto_declares_an_enum_inside_a_message() -> None:
    assert not [proto.name for proto in PROTOS if re.search(r"^\s+enum\b", proto.read_text(encoding="utf-8"), re.M)]
