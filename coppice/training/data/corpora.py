"""Where training text comes from: `--data NAME=GLOB[:WEIGHT]` lines, the documents they name and the held-out rule."""

import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from coppice.errors import InvalidField

END_OF_TEXT = "<|endoftext|>"
STDLIB_GLOB = "python:stdlib"
HELD_OUT_MODULUS = 20
TEXT_FIELDS = ("text", "content", "story", "prompt")
ANSWER_FIELDS = (("question", "answer"), ("problem", "solution"))
PURE_PACKAGES = ("typer", "click", "rich", "packaging", "h11", "anyio", "markdown-it-py", "Jinja2")
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo"}
SKIPPED_FOLDERS |= {"site-packages", "__pycache__", "pydoc_data", "encodings"}
# Tables written by programs: megabytes of code points teach a language model nothing.
GENERATED = re.compile(r"^(.*_data|.*_tables?|entities|stringprep|_unicode_.*|_emoji_.*|_cell_widths)\.py$")
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class DataError(InvalidField):
    """A `--data` line, a file or a row that cannot be used; the message names it."""

    def __init__(self, why: str) -> None:
        super().__init__("--data", why)


@dataclass(frozen=True)
class DataSpec:
    """One parsed `--data` line. `weight` is the share of the training tokens, relative to the other lines."""

    name: str
    pattern: str
    weight: float

    @property
    def public(self) -> str:
        """The line without directories, for model cards."""
        return f"{self.name}={Path(self.pattern).name}:{self.weight:g}"


@dataclass
class Corpus:
    """The documents of one domain, split by `is_held_out`; `sources` says what they are, for the model card."""

    name: str
    weight: float
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """The UTF-8 bytes of all documents, held-out ones included."""
        return sum(len(text.encode()) for text in self.train + self.held_out)


def parse_spec(line: str) -> DataSpec:
    """Parse `NAME=GLOB[:WEIGHT]`; the weight defaults to 1. Raises DataError that names the line."""
    name, equals, rest = line.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not rest:
        raise DataError(f"{line!r}: expected NAME=GLOB[:WEIGHT], such as stories=texts/*.txt:0.4")
    pattern, colon, last = rest.rpartition(":")
    if not colon or rest == STDLIB_GLOB:
        return DataSpec(name, rest, 1.0)
    try:
        weight = float(last)
    except ValueError:
        raise DataError(f"{line!r}: WEIGHT must be a number, not {last!r}") from None
    if not 0 < weight < float("inf"):
        raise DataError(f"{line!r}: WEIGHT must be positive, not {last}")
    return DataSpec(name, pattern, weight)


def parse_specs(lines: list[str]) -> list[DataSpec]:
    """Parse all `--data` lines; names must be distinct and there must be at least one."""
    if not lines:
        raise DataError("at least one NAME=GLOB[:WEIGHT] is needed")
    specs = [parse_spec(line) for line in lines]
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"the name {repeated[0]!r} is given twice")
    return specs


def is_held_out(text: str) -> bool:
    """Tell whether a document is in the twentieth of all that no model of this project is trained on."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def load_corpus(spec: DataSpec) -> Corpus:
    """Read and split one domain. Raises DataError for no files, an unreadable one or a bad row."""
    corpus = Corpus(spec.name, spec.weight)
    if spec.pattern == STDLIB_GLOB:
        documents = _python_documents(corpus.sources)
    else:
        paths = [path for path in map(Path, sorted(glob.glob(spec.pattern, recursive=True))) if path.is_file()]
        if not paths:
            raise DataError(f"{spec.name}={spec.pattern}: no file matches")
        corpus.sources.extend(path.name for path in paths[:20])
        if len(paths) > 20:
            corpus.sources.append(f"and {len(paths) - 20} more files")
        documents = (text for path in paths for text in read_documents(path))
    seen: set[str] = set()
    for text in documents:
        if text in seen:
            continue
        seen.add(text)
        (corpus.held_out if is_held_out(text) else corpus.train).append(text)
    if not corpus.train:
        raise DataError(f"{spec.name}={spec.pattern}: no training document in it")
    return corpus


def read_documents(path: Path) -> Iterator[str]:
    """Yield a .txt, .md, .py or .jsonl file's stripped, non-empty documents. Raises DataError for an unreadable one."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield _row_text(line, f"{path}, line {number}")
        return
    for part in content.split(END_OF_TEXT):
        if part.strip():
            yield part.strip()


def _row_text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object")
    known: tuple[tuple[str, ...], ...] = (*ANSWER_FIELDS, *((name,) for name in TEXT_FIELDS))
    names = next((names for names in known if names[0] in row), None)
    if names is None:
        raise DataError(f"{where}: none of the fields {', '.join(TEXT_FIELDS)} or question and answer is there")
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: field {name!r} must be a non-empty string")
    if len(names) == 1:
        return str(row[names[0]]).strip()
    question, answer = (CALCULATOR_MARK.sub("", row[name]).strip() for name in names)
    return f"Question: {question}\nAnswer: {answer}"


def _python_documents(sources: list[str]) -> Iterator[str]:
    """Yield each file of the standard library and of those PURE_PACKAGES that are installed."""
    version = ".".join(sysconfig.get_python_version().split(".")[:2])
    sources.append(f"Python {version} standard library")
    yield from _python_files(Path(sysconfig.get_paths()["stdlib"]))
    for package in PURE_PACKAGES:
        try:
            files = metadata.files(package) or []
            sources.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
        for file in sorted(files, key=str):
            if file.suffix == ".py" and _keep_python(Path(str(file))):
                yield from _python_text(Path(str(file.locate())))


def _python_files(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if _keep_python(path.relative_to(root)):
            yield from _python_text(path)


def _keep_python(relative: Path) -> bool:
    folders = set(relative.parts[:-1])
    return not (folders & SKIPPED_FOLDERS) and ".." not in folders and not GENERATED.match(relative.name)


def _python_text(path: Path) -> Iterator[str]:
    """Yield one file's text, unless it is short, not UTF-8 (a few old modules) or long lines of generated data."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if len(text) > 200 and len(text) / (text.count("\n") + 1) < 100:
        yield text
