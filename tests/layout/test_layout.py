"""How the repository is laid out: who imports whom, what is never used, and that nothing on the wire is unbounded."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

import coppice.wire.adapter
import coppice.wire.drafter
import coppice.wire.generation
import coppice.wire.verifier  # noqa: F401
from coppice import limits
from coppice.wire.codec import CODECS, Within

ROOT = Path(__file__).parents[2]
PACKAGES = ("coppice", "services", "orchestrator", "lab")
SERVICES = sorted(folder.name for folder in (ROOT / "services").iterdir() if (folder / "__main__.py").exists())
PURE = (
    "coppice/speculation/",
    "orchestrator/auto/",
    "services/verifier/node_budget.py",
    "services/adapter/bandit.py",
)
"""Folders and files that load no framework, but for the twin of sampling that runs on tensors."""
HEAVY = ("torch", "transformers", "tokenizers", "ray", "redis")

STUB_USERS = {
    *("coppice/adaptation", "coppice/client", "coppice/wire"),
    *("orchestrator", "services/adapter", "services/drafter", "services/verifier"),
}
"""Folders that may import the generated stubs. Beside coppice/wire they only register or call a service, name its
messages in annotations, and make messages that hold nothing."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every file of the product, by its path in the repository; generated ones are left out."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = {str(file.relative_to(ROOT)): file for file in files if "coppice/v1/" not in str(file)}
    trees = {path: ast.parse(file.read_text(encoding="utf-8")) for path, file in found.items()}
    for path, tree in trees.items():
        make_absolute(tree, Path(path).parent.parts)
    return trees


def make_absolute(tree: ast.Module, package: tuple[str, ...]) -> None:
    """Write the relative imports of a file, wherever in it, as absolute ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = package[: len(package) - node.level + 1]
            node.module, node.level = ".".join([*parents, *([node.module] if node.module else [])]), 0


def imports(tree: ast.Module) -> set[str]:
    """Modules and names that a file imports, wherever in it, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def importing(folder: str, *roots: str) -> set[tuple[str, str]]:
    """(file, name) of every import below `folder` that begins with one of the roots."""
    return {
        (path, name)
        for path, tree in sources().items()
        if path.startswith(f"{folder}/")
        for name in imports(tree)
        if any(f"{name}.".startswith(f"{root}.") for root in roots)
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_neither_another_one_nor_the_orchestrator(service: str) -> None:
    own = f"services.{service}"
    foreign = importing(f"services/{service}", "services", "orchestrator", "tests")
    assert {(path, name) for path, name in foreign if name != own and not name.startswith(f"{own}.")} == set()
    assert importing(f"services/{service}", "coppice")


def test_the_orchestrator_imports_no_service() -> None:
    assert importing("orchestrator", "services", "tests") == set()


def test_services_and_the_orchestrator_import_their_own_modules_relatively() -> None:
    """In a wheel they are parts of coppice, and have other names."""
    named = re.compile(r"^\s*(from|import) (services|orchestrator)\b", re.MULTILINE)
    assert [path for path in sources() if named.search((ROOT / path).read_text(encoding="utf-8"))] == []


def test_coppice_imports_neither_services_nor_the_orchestrator() -> None:
    assert importing("coppice", "services", "orchestrator", "tests") == set()


def test_nothing_imports_the_laboratory() -> None:
    assert {path for package in PACKAGES[:-1] for path, _ in importing(package, "lab")} == set()


def test_one_file_knows_of_ray() -> None:
    assert {path for package in PACKAGES for path, _ in importing(package, "ray")} == {"orchestrator/ray_app.py"}


def test_only_these_folders_import_the_stubs() -> None:
    users = {str(Path(path).parent) for package in PACKAGES for path, _ in importing(package, "coppice.v1")}
    assert users == STUB_USERS


def stub_uses(tree: ast.Module) -> Iterator[str]:
    """Uses of the message modules other than annotations, descriptors and messages that hold nothing."""
    modules = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "coppice.v1"
        for name in node.names
    }
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        notes: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            notes = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            notes = [node.annotation]
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            notes = [node.func]
        harmless |= {part for note in notes if note is not None for part in ast.walk(note)}
    for node in ast.walk(tree):
        of_stub = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if of_stub and node not in harmless and node.attr != "DESCRIPTOR":
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_wire_is_the_only_package_that_builds_or_reads_messages() -> None:
    outside = sorted(path for path in sources() if not path.startswith("coppice/wire/"))
    assert {path: uses for path in outside if (uses := list(stub_uses(sources()[path])))} == {}
    assert list(stub_uses(ast.parse("from coppice.v1 import common_pb2 as c\nx = c.Fence(step=1)")))


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.partition(".")[0] for name in output.split()}


def test_pure_modules_load_no_framework() -> None:
    paths = [path for path in sources() if path.startswith(PURE) and path != "coppice/speculation/sampling_torch.py"]
    loaded = loaded_by("\n".join(f"import {path[:-3].replace('/', '.')}" for path in paths))
    assert len(paths) > 10
    assert loaded.isdisjoint({"grpc", "google", *HEAVY})
    assert {"coppice", "numpy"} <= loaded


def test_the_sdk_and_the_command_line_load_no_framework() -> None:
    loaded = loaded_by("import coppice\nfrom coppice import AsyncClient, Client, SamplingParams\nimport coppice.cli")
    assert loaded.isdisjoint(HEAVY)
    assert "grpc" in loaded


def test_importing_coppice_alone_loads_nothing_else() -> None:
    assert loaded_by("import coppice").isdisjoint({"grpc", "google", "numpy", "pydantic", *HEAVY})


# What bounds each repeated, string and bytes field: a constant of coppice.limits, a setting of Limits, or one of two
# words: "choice" is one of a few values, "session" the pattern of session names. The whole message, `message_bytes`,
# is the bound of bytes whose size follows from other fields, and of what a client reads of the server it chose.
BOUNDS = {
    "MAX_TREE_NODES": """
        Tree.tokens Tree.parents Tree.log_probs TreeDelta.predicted TreeDelta.made Verdict.accepted Verdict.verified
        Verdict.log_probs Verdict.top SessionOpened.top
    """,
    "MAX_ROW_SUPPORT": "Row.ids Row.log_probs Row.raw_log_probs",
    "MAX_TOP_N": "Rejection.top_ids Rejection.top_log_probs",
    "MAX_TOP_LOG_PROBS": "TopLogProbs.ids TopLogProbs.log_probs",
    "MAX_CONTEXT": """
        OpenDraft.ids OpenDraft.prediction Advance.ids OpenSession.ids TokenIds.ids GenerateRequest.resume_ids
        SessionOpened.prompt_log_probs SessionOpened.prompt_top
    """,
    "MAX_STOP_IDS": "OpenSession.stop_ids DescribeTargetResponse.eos_ids",
    "MAX_BIASES": "Sampling.logit_bias",
    "MAX_FEATURE_LAYERS": "OpenSession.feature_layers DescribeHeadResponse.feature_layers FeatureRef.layers",
    "MAX_TREE_DEPTH": "DescribeHeadResponse.expected_acceptance Commit.ids",
    "SKETCH": "DraftOpened.sketch",
    "MAX_STOP_STRINGS": "GenerateRequest.stop",
    "MAX_CHAT_MESSAGES": "Chat.messages",
    "MAX_POLICY_CHARS": "GenerateRequest.policy",
    "MAX_ADDRESS_CHARS": "FeatureRef.verifier",
    "MAX_SALT_CHARS": "OpenDraft.salt OpenSession.salt",
    "prompt_chars": "GenerateRequest.text GenerateRequest.prediction_text ChatMessage.content ChatMessage.name "
    "ChatMessage.reasoning_content",
    "session": """
        FeatureRef.session OpenDraft.session OpenSession.session WeightsHeader.head
        GetStatusRequest.head PauseRequest.head ResumeRequest.head RollbackRequest.head
    """,
    "HASH_BYTES": """
        WeightsHeader.parent_hash WeightsHeader.weights_hash WeightsHeader.sha256 SyncWeightsResponse.weights_hash
    """,
    "CHUNK_BYTES": "WeightsPart.data",
    "choice": "Features.dtype ChatMessage.role",
    "message_bytes": """
        Features.inline TreeDelta.q_rows VerifyStep.q_rows
        Started.policy Started.heads Started.prompt_ids Started.prompt_log_probs Started.prompt_top StepTree.root_piece
        Chunk.text Chunk.ids Chunk.origins Chunk.log_probs Chunk.pieces Chunk.top
        Chunk.others
        StepTree.tokens StepTree.parents StepTree.log_probs StepTree.forwards StepTree.pieces StepTree.accepted
        StepTree.owners StepTree.cut
        Finished.accept_lengths Finished.routed Finished.verified_nodes
        GenerateTimings.step_ns GenerateTimings.split_ns
        DescribeModelResponse.name DescribeModelResponse.heads DescribeModelResponse.policies
        DescribeModelResponse.default_policy DescribeModelResponse.version
        DescribeHeadResponse.name DescribeHeadResponse.kind DescribeHeadResponse.weights_hash
        DescribeHeadResponse.tokenizer_hash
        DescribeTargetResponse.name DescribeTargetResponse.dtype DescribeTargetResponse.weights_hash
        DescribeTargetResponse.bits_hash
        GetStatusResponse.heads HeadStatus.head HeadStatus.policy HeadStatus.doing HeadStatus.weights_hash
        HeadStatus.actions HeadStatus.kinds HeadStatus.replicas HeadStatus.versions HeadStatus.history
        HeadStatus.changes
        ActionStatus.action ReplicaStatus.address QueryPoint.action Change.what Change.why
    """,
}


# What bounds each number that is read, besides the annotations in coppice/wire: as above, or one of
# these words. "vocabulary" is the width of the logits, "fence" that any other value than the expected one is refused,
# "tree" what a tree is validated by, "unit" 0 to 1, "any" that each value means something (a seed, ids that are only
# compared).
NUMBERS = {
    "any": "Sampling.seed Sampling.top_k OpenSession.stop_ids RollbackRequest.version",
    "vocabulary": """
        OpenSession.ids OpenDraft.ids OpenDraft.prediction Advance.ids TokenIds.ids GenerateRequest.resume_ids
        VerifyStep.root DraftStep.root LogitBiasEntry.key Commit.ids
    """,
    "fence": "Fence.committed_hash WeightsPart.number",
    "tree": "Tree.tokens Tree.parents Tree.log_probs",
    "unit": "Sampling.top_p Sampling.min_p",
    "choice": "GenerateRequest.accept_rule OpenSession.feature_layers",
    "MAX_CONTEXT": "OpenSession.max_len OpenSession.prompt_tokens OpenSession.min_len",
    "MAX_TEMPERATURE": "Sampling.temperature",
    "MAX_REPETITION_PENALTY": "Sampling.repetition_penalty",
    "MAX_PENALTY": "Sampling.frequency_penalty Sampling.presence_penalty",
    "MAX_BIAS": "LogitBiasEntry.value",
    "MAX_HISTORY": "GetStatusRequest.history",
    "weights_bytes": "WeightsHeader.size WeightsHeader.parts",
    "max_new_tokens": "GenerateRequest.max_new_tokens",
}
WORDS = {"choice", "session", "any", "vocabulary", "fence", "tree", "unit"}


def protos() -> list[FileDescriptor]:
    """Every file of the contract."""
    names = sorted(file.stem for file in (ROOT / "protos" / "coppice" / "v1").glob("*.proto"))
    return [importlib.import_module(f"coppice.v1.{name}_pb2").DESCRIPTOR for name in names]


def messages_of(files: Iterable[FileDescriptor]) -> Iterator[Descriptor]:
    """Every message, those inside others included."""
    waiting = [message for file in files for message in file.message_types_by_name.values()]
    while waiting:
        message = waiting.pop()
        yield message
        waiting += message.nested_types


def messages_read(files: Iterable[FileDescriptor]) -> set[Descriptor]:
    """What is read of others: requests, the answers of all but the server that a client chose, and what is in them."""
    methods = [method for file in files for service in file.services_by_name.values() for method in service.methods]
    answers = [method.output_type for method in methods if method.containing_service.name != "GenerationService"]
    waiting = [method.input_type for method in methods] + answers
    found: set[Descriptor] = set()
    while waiting:
        message = waiting.pop()
        if message not in found:
            found.add(message)
            waiting += [field.message_type for field in message.fields if field.message_type]
    return found


def sized_fields(messages: Iterable[Descriptor]) -> list[str]:
    """Every field that has no size of its own."""
    sized = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return [
        f"{message.name}.{field.name}"
        for message in messages
        for field in message.fields
        if field.is_repeated or field.type in sized
    ]


def number_fields(messages: Iterable[Descriptor]) -> list[str]:
    """Every field that holds numbers."""
    others = (
        *(FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE),
        FieldDescriptor.CPPTYPE_BOOL,
    )
    return [
        f"{message.name}.{field.name}"
        for message in messages
        for field in message.fields
        if field.cpp_type not in others
    ]


def stated(bounds: dict[str, str]) -> list[str]:
    return sorted(field for fields in bounds.values() for field in fields.split())


def test_every_field_without_a_size_of_its_own_has_a_bound() -> None:
    assert stated(BOUNDS) == sorted(sized_fields(messages_of(protos())))


def test_every_number_that_a_service_reads_has_a_bound() -> None:
    read = messages_read(protos())
    numbers = set(number_fields(read))
    by_table = {
        f"{message.rpartition('.')[2]}.{name}"
        for message, codec in CODECS.items()
        for name, notes in codec.notes.items()
        if any(isinstance(note, Within) for note in notes)
    }
    elsewhere = stated(NUMBERS)
    assert len(set(elsewhere)) == len(elsewhere)
    assert set(elsewhere) | (by_table & numbers) == numbers
    assert not by_table & set(elsewhere)


def test_bounds_are_those_of_the_limits_module() -> None:
    known = WORDS | {*vars(limits), *limits.Limits.model_fields}
    assert BOUNDS.keys() | NUMBERS.keys() <= known


def test_a_new_field_is_found_wherever_it_lies() -> None:
    """The walk itself, over a proto that nobody has stated a bound for."""
    inside = DescriptorProto(name="Inside")
    inside.field.add(name="text", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    told = DescriptorProto(name="Told", nested_type=[inside])
    told.oneof_decl.add(name="kind")
    told.field.add(name="data", number=1, type="TYPE_BYTES", label="LABEL_OPTIONAL", oneof_index=0)
    told.field.add(name="count", number=2, type="TYPE_SINT32", label="LABEL_OPTIONAL", oneof_index=0)
    told.field.add(name="flags", number=3, type="TYPE_BOOL", label="LABEL_REPEATED")
    told.field.add(name="in", number=4, type="TYPE_MESSAGE", type_name=".new.Told.Inside", label="LABEL_OPTIONAL")
    file = FileDescriptorProto(name="new.proto", package="new", syntax="proto3", message_type=[told])
    method = {"name": "Say", "input_type": ".new.Told", "output_type": ".new.Told.Inside"}
    file.service.add(name="New").method.add(**method)
    pool = DescriptorPool()
    pool.Add(file)
    files = [pool.FindFileByName("new.proto")]
    assert sorted(sized_fields(messages_of(files))) == ["Inside.text", "Told.data", "Told.flags"]
    assert {message.name for message in messages_read(files)} == {"Told", "Inside"}
    assert number_fields(messages_read(files)) == ["Told.count"]
