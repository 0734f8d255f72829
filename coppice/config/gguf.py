"""A GGUF file, llama.cpp's form of a model, becomes a folder: weights as plain numbers, tokenizer, chat template."""

import os
import signal
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import Any, cast

from coppice.errors import InvalidField

_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom_id|>")  # at which llama.cpp ends a text


def as_folder(field: str, model: Path) -> Path:
    """The model's folder, made of a GGUF file once in the cache of HF_HOME. Raises InvalidField over a bad file."""
    if model.suffix != ".gguf" or model.is_dir():
        return model
    if not model.is_file():
        raise InvalidField(field, f"{model}: no such file; one of the Hugging Face Hub is ORG/REPO:FILE.gguf")
    from huggingface_hub import constants

    state = model.stat()
    key = f"{model.resolve()} {state.st_size} {state.st_mtime_ns} {version('transformers')}"
    folder = Path(constants.HF_HOME) / "coppice" / sha256(key.encode()).hexdigest()[:16] / model.stem
    if not folder.is_dir():  # what it takes to read a file goes with the process that does
        command = [sys.executable, "-m", __name__, str(model.absolute()), str(folder)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, stdout=subprocess.PIPE, env=variables)
        if ended.returncode:
            reason = ended.stdout.decode() or f"its reader ended with code {ended.returncode}"
            raise InvalidField(field, f"{model} cannot be read: {reason}")
    return folder


def make_folder(file: Path, folder: Path) -> str:
    """Make the folder of a file, unless another process does, and return why that cannot be, in one line."""
    from filelock import FileLock

    partial = folder.with_name("partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name("lock")):
            try:
                if not folder.is_dir():
                    _unpack(file, partial)
                    partial.rename(folder)
            finally:
                rmtree(partial, ignore_errors=True)
    except Exception as error:  # of three libraries and the disk, over files that may hold anything
        hint = "; in a checkout pip install '.[gguf]'" if isinstance(error, ImportError) else ""
        return f"{type(error).__name__}: {' '.join(str(error).split())}{hint}"
    return ""


def _unpack(file: Path, folder: Path) -> None:
    """Write the model of a file into a folder. Raises what reading it does."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    cast(Any, logging).set_verbosity_error()
    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise ValueError(f"it is cut off, or no GGUF file ({error})") from error
    values = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    if (parts := values.get("split.count", 1)) > 1:
        raise ValueError(f"it is one of {parts} parts, which llama-gguf-split --merge joins")
    factors = {each.name: each.data.tolist() for each in reader.tensors if each.name.startswith("rope_f")}
    numbers = sum(int(each.n_elements) for each in reader.tensors if each.name not in factors)
    size = f"{4 * numbers / 2**30:.1f} GiB"
    print(f"coppice: {file.name} is unpacked, once, into {folder.parent}: {size}", file=sys.stderr, flush=True)
    load: Any = AutoModelForCausalLM.from_pretrained
    local: dict[str, Any] = {"gguf_file": str(file), "local_files_only": True, "trust_remote_code": False}
    form = {"quantization_config": GgufConfig(dequantize=True), "dtype": "auto"}
    model, report = load(file.parent, **local, **form, ignore_mismatched_sizes=True, output_loading_info=True)
    absent = {*report["missing_keys"], *report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if absent or model.num_parameters() != numbers:
        raise ValueError(f"it holds other weights than transformers' {type(model).__name__}, {sorted(absent)[:3]}")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **local)
    ids = [values.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    ends = {*ids, *map(tokenizer.added_tokens_encoder.get, _TURN_ENDS)} - {None}
    model.config.eos_token_id = model.generation_config.eos_token_id = sorted(ends) or None
    _scale(model.config, factors, values)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _scale(config: Any, factors: dict[str, list[float]], values: dict[str, Any]) -> None:
    """Configure how positions are scaled, which transformers does not. Raises ValueError over an unknown way."""
    scaling = f"{values['general.architecture']}.rope.scaling"
    kind, rope = values.get(f"{scaling}.type", "none"), getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if kind == "none" and factors.keys() == {"rope_freqs.weight"}:
        each, length = factors["rope_freqs.weight"], config.max_position_embeddings
        rope |= {"rope_type": "longrope", "short_factor": each, "long_factor": each, "factor": 1.0}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": length}
    elif kind == "linear" and not factors:
        rope |= {"rope_type": "linear", "factor": values[f"{scaling}.factor"]}
    elif kind != "none" or factors:
        raise ValueError(f"positions are scaled as {kind}, which is not read")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(reason := make_folder(Path(sys.argv[1]), Path(sys.argv[2])), end="")
    sys.exit(bool(reason))
