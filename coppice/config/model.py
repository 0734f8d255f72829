"""What a model's folder must hold, what its files say, and the memory that it takes, before any weight is read."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from operator import mul
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coppice.config.sections import VerifierSettings
from coppice.errors import InvalidField
from coppice.limits import BLOCK_SIZE, MAX_STOP_IDS, MAX_TOKEN_ID, MAX_TREE_DEPTH, check_count

GIB = 2**30
ACCEPTANCE = "acceptance"
RESERVE = 2 * GIB
"""bytes of a CUDA device beside weights and KV: CUDA itself, its libraries, and a forward of some hundred rows"""
KV_SHARE, LEAST_KV = 0.5, 1024
"""of what is free after the weights, as much may KV take whose size nobody chose; no fewer tokens"""
DEVICE_SHARE = 0.9
"""of a CUDA device that verifier.kv_tokens 0 fills with weights, heads and KV; the rest is for graphs and forwards"""
_DEFAULT = VerifierSettings.model_fields["kv_tokens"].default
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
FLOATS = ("F64", "F32", "F16", "BF16")
"""dtypes of safetensors that become the served one; others, as quantised weights have, stay"""
_STATE_WIDTHS = ("linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size", "state_size", "head_dim")
"""numbers of a recurrent state for each of its channels, the first of these names that a configuration has"""
_STATE_OUTPUTS = ("out_proj", "o_proj", "dense")  # how the projection behind a recurrent state is called
_BITS = {"I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
CONFIG, GENERATION, NESTED = "config.json", "generation_config.json", "text_config of config.json"
TOKENIZER, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_EACH = {"architectures", "model_type", "transformers_version", "_name_or_path", "eos_token_id"}
"""what a configuration and the one in it may say each for itself"""
EMBEDDINGS, OUTPUT = ("embed_tokens.weight", "wte.weight"), "lm_head.weight"
"""how the names of a target's tensors end that heads share"""
INDEX = "model.safetensors.index.json"
_NO_LENGTH = int(1e30)  # model_max_length of a tokenizer that knows none


def why_no_model(folder: str | Path | None, typed: bool = False) -> str:
    """Why a folder's config.json is not a model's; empty when it is. `typed`: it must say the model's type."""
    if not folder:
        return "names no model folder"
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        file = next(path.glob("*.gguf"), None)
        return f"{folder} holds no model (no config.json)" + (f"; name its GGUF file, {file}" if file else "")
    except OSError as error:
        return f"{folder} holds no model (config.json: {error.strerror})"
    except (ValueError, RecursionError):
        return f"{folder} holds no model (config.json is no JSON)"
    if not isinstance(config, dict) or (typed and not isinstance(config.get("model_type"), str)):
        return f"{folder} holds no model (config.json has no model_type)"
    if typed and any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        return f"{folder} holds no model that is loaded (its weights are pickles, *.bin, and no safetensors)"
    return ""


def check_model(setting: str, folder: str | Path | None, typed: bool = False) -> None:
    """Raise InvalidField, which names the setting, unless a folder holds a Hugging Face model."""
    if reason := why_no_model(folder, typed):
        raise InvalidField(setting, reason)


def shared_shards(folder: str | Path) -> tuple[str, ...]:
    """Patterns of the files whose tensors heads share, by a folder's index. Raises InvalidField."""
    files: dict[str, str] = _read(folder, INDEX).get("weight_map") or {}
    shipped = mtp_prefixes(files)
    ends = (*EMBEDDINGS, OUTPUT, *(["model.norm.weight"] if any(name.startswith(shipped) for name in files) else ()))
    shared = {file for name, file in files.items() if name.endswith(ends) or name.startswith(shipped)}
    return tuple(shared) or ("*.safetensors",)


def tensors_in(folder: str | Path, framework: str = "np") -> Iterator[tuple[str, Any]]:
    """The names of a checkpoint's tensors, each with the open file that has it; none of a file that cannot be read."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(folder).glob("*.safetensors")):
        with suppress(SafetensorError, OSError), safe_open(path, framework) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file


def unscaled(folder: str | Path) -> set[str]:
    """Weights that a scale would be needed for: transformers casts them in silence."""
    weights = (
        (name, file.get_slice(name).get_dtype()) for name, file in tensors_in(folder) if name.endswith(".weight")
    )
    return {name for name, dtype in weights if dtype not in FLOATS}


class MtpLayout(NamedTuple):
    """What the tensors of an MTP head are called in its target's checkpoint, and what it computes."""

    root: str  # how all begin; empty: as the layer that has an `eh_proj`
    parts: tuple[str, ...]  # how each of MTP_PARTS goes on
    hidden_first: bool = False  # the hidden state comes before the embedding in what is projected
    reads_normed: bool = True  # the target's last hidden state is that behind the final norm
    norm_output: bool = True  # the next level reads the head's own state behind its norm


MTP_PARTS = ("enorm.", "hnorm.", "eh_proj.", "post_norm.", "mtp_block.")
"""as in transformers' module: norms of embedding and hidden state, projection, last norm, decoder layer"""
MTP_LAYOUTS = {
    "Qwen3-Next, Qwen3.5": MtpLayout(
        "mtp.", ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0.")
    ),
    "DeepSeek-V3, GLM-4 MoE": MtpLayout("", ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", "")),
    "MiMo": MtpLayout(
        "model.mtp_layers.0.",
        ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", ""),
        hidden_first=True,
        reads_normed=False,
    ),
    "Ernie 4.5": MtpLayout(
        "model.",
        ("mtp_emb_norm.0.", "mtp_hidden_norm.0.", "mtp_linear_proj.0.", "norm.", "mtp_block.0."),
        reads_normed=False,
        norm_output=False,
    ),
}
NO_MTP = f"ships no MTP head of a known layout ({'; '.join(MTP_LAYOUTS)}) without quantisation or an own embedding"
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's own


def mtp_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """How the names of MTP heads' tensors begin among those of a checkpoint, first that of a layer with `eh_proj`."""
    numbered = {name.removesuffix("eh_proj.weight") for name in names if name.endswith(".eh_proj.weight")}
    return (*sorted(sorted(numbered), key=len), "mtp.", "model.mtp_")


def find_mtp(folder: str | Path) -> tuple[MtpLayout, dict[str, str]] | None:
    """The layout of the MTP head in a target's checkpoint, and what its tensors there are called in transformers'
    module, by name; None without one that can be read. Raises InvalidField.
    """
    every = [name for name, _ in tensors_in(folder)]
    for layout in MTP_LAYOUTS.values():
        names, root = dict[str, str](), layout.root or mtp_prefixes(every)[0]
        for part, theirs in zip(MTP_PARTS, layout.parts, strict=True):
            its = (name for name in every if name.startswith(root + theirs) and not name.endswith(_COPIES))
            names = {name: part + name.removeprefix(root + theirs) for name in its} | names
        if {f"{part}weight" for part in MTP_PARTS[:-1]} <= {*names.values()}:
            config = text_config(folder)
            own = "quantization_config" in config or config.get("mtp_use_dedicated_embeddings")
            return None if own else (layout, names)
    return None


def text_ends(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """The ids that end a text, by the place that names them: the first counts. Raises InvalidField."""
    config, ends = _read(folder, CONFIG), {}
    for place, values in ((GENERATION, _read(folder, GENERATION)), (CONFIG, config), (NESTED, _nested(config))):
        named = values.get("eos_token_id")
        ids = tuple(named) if isinstance(named, list) else () if named is None else (named,)
        check_count(f"eos_token_id in {folder}, {place}", len(ids), 0, MAX_STOP_IDS)
        if odd := [token for token in ids if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID]:
            raise InvalidField("eos_token_id", f"{odd[0]!r} in {folder}, {place}, is not in 0..{MAX_TOKEN_ID}")
        ends[place] = ids
    for place in (TOKENIZER, SPECIAL):
        token = _special_id(folder, place, "eos_token")
        ends[place] = () if token is None else (token,)
    return {place: ids for place, ids in ends.items() if ids}


def ends_line(ends: Mapping[str, Sequence[int]]) -> str:
    """What ends a text, by which file, and what other files say."""
    named = [(place, ", ".join(map(str, sorted(set(ids))))) for place, ids in ends.items()]
    if not named:
        return "no file of the model names an id that ends a text"
    rest = "".join(f"; {place} says {ids}" for place, ids in named if ids != named[0][1])
    return f"a text ends at {named[0][1]}, by {named[0][0]}{rest}"


def text_config(folder: str | Path) -> dict[str, Any]:
    """What config.json says of the model of text, which may be one among others. Raises InvalidField."""
    config = _read(folder, CONFIG)
    return config | _nested(config)


def disagreements(folder: str | Path) -> Iterator[str]:
    """Where config.json, or the tokenizer's beside it, says one thing in two ways: a line each, with what counts."""
    config, text, tokenizer = _read(folder, CONFIG), text_config(folder), _read(folder, TOKENIZER)
    nested = _nested(config)
    rope, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    rotation = {"rope_type": scaling.get("type"), "rope_theta": text.get("rope_theta"), **scaling} if scaling else rope
    length = tokenizer.get("model_max_length")
    twice = sorted((config.keys() & nested.keys()) - _EACH)
    for name, value, counts, other in (
        *((name, config[name], NESTED, nested[name]) for name in twice),
        *((f"rope_parameters, {name}", rope[name], "rope_scaling", rotation.get(name) or "nothing") for name in rope),
        ("rope_theta", text.get("rope_theta"), "rope_parameters", rotation.get("rope_theta")),
        ("torch_dtype", text.get("torch_dtype"), "dtype", text.get("dtype")),
        (f"model_max_length ({TOKENIZER})", length, "max_position_embeddings", text.get("max_position_embeddings")),
        ("bos_token_id", text.get("bos_token_id"), TOKENIZER, _special_id(folder, TOKENIZER, "bos_token")),
    ):
        if None not in (value, other) and value != other and value != _NO_LENGTH:
            yield f"{folder}: {name} is {value}, but {counts} says {other}, which counts"


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of a text model among others."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _read(folder: str | Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder; empty without the file, and for a tokenizer's that is none. Raises InvalidField."""
    try:
        values = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) and name in (CONFIG, GENERATION):
        raise InvalidField("target", f"{Path(folder) / name} is no JSON object")
    return values if isinstance(values, dict) else {}


def _special_id(folder: str | Path, name: str, role: str) -> int | None:
    """The id of a special token that a file names, such as "eos_token"."""
    token = _read(folder, name).get(role)
    content = token.get("content") if isinstance(token, dict) else token
    return added_tokens(folder).get(content) if isinstance(content, str) else None


def added_tokens(folder: str | Path) -> dict[str, int]:
    """Ids of the tokens that tokenizer.json names before its vocabulary, which is not read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        _, _, rest = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8").partition('"added_tokens":')
        return {token["content"]: token["id"] for token in json.JSONDecoder().raw_decode(rest.lstrip())[0]}
    return {}


def read_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder; None without tokenizer.json. Raises InvalidField."""
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidField("drafter.path", f"{file} cannot be read: {' '.join(str(error).split())}") from None


def common_tokens(folder: str | Path, target: str | Path) -> int:
    """The highest id that names the same token for a draft model and its target, plus 1; 0 without a tokenizer.json.
    Raises InvalidField where they differ in other than added tokens that one of them does not have.
    """
    if not ((mine := read_tokenizer(folder)) and (theirs := read_tokenizer(target))):
        return 0
    first, second = mine.get_vocab(), theirs.get_vocab()
    of_one = {*mine.get_vocab(with_added_tokens=False)} ^ {*theirs.get_vocab(with_added_tokens=False)}
    odd = [token for token in first.keys() | second.keys() if first.get(token) != second.get(token)]
    odd = [token for token in odd if token in of_one or (token in first and token in second)]
    if odd:
        number, token = min((first.get(token, second.get(token, 0)), token) for token in odd)
        reason = f"its tokenizer is not the target's: they differ in token {token!r}, id {number}"
        raise InvalidField("drafter.path", f"{folder}: {reason}")
    return max((first[token] for token in first.keys() & second.keys()), default=-1) + 1


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes: `weights` of them all, `kv` of a token's keys and values, `states` of what layers keep of a session beside
    its KV; and a layer's `kv_heads`. 0 is what the folder does not tell.
    """

    weights: int
    kv: int
    kv_heads: int
    states: int = 0

    @classmethod
    def of(cls, folder: str | Path, dtype: str, *, wide_kv: bool = False) -> Self:
        """The size of a folder's model in this dtype, float32 or bfloat16; with `wide_kv` its KV is float32 anyhow."""
        each = 4 if dtype == "float32" else 2
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        shapes = dict[str, list[int]]()
        weights, kv = _weights(Path(folder), config, each, shapes), _kv(config, 4 if wide_kv else each)
        return cls(weights, *kv, _states(shapes, config | _nested(config), each))

    def fit_kv(
        self, tokens: int, device: str, room: float, ranks: int = 1, copies: int = 1, heads: int = 0, sessions: int = 0
    ) -> int:
        """The KV tokens that a verifier gets: so many; of the default number what KV_SHARE of the memory that the
        weights leave can hold; for 0 all of that, on CUDA all that DEVICE_SHARE of the devices has left. Raises
        InvalidField, which says what would do, if a model and its KV need more than there is.

        room: bytes free on each device; ranks on the CPU share its one memory. copies: verifiers that share all that.
        heads: bytes of the heads beside the target. sessions: that may be open at once, whose states are counted as
        weights are.
        """
        fixed = self.weights + sessions * self.states
        on_cuda = device.startswith("cuda")
        usable = max(0.0, room - RESERVE) if on_cuda else room
        devices = ranks if on_cuda else 1
        if tokens == 0:
            left = devices * (min(usable, DEVICE_SHARE * room) if on_cuda else room) / copies - fixed - heads
            taken = left * (1.0 if on_cuda else KV_SHARE)
            if not self.kv or taken < LEAST_KV * self.kv:
                reason = f"{left / GIB:.1f} GiB are left" if self.kv else "config.json does not tell what a token takes"
                raise InvalidField("verifier.kv_tokens", f"0 takes what the device has left for KV, and {reason}")
            return int(taken / self.kv) // BLOCK_SIZE * BLOCK_SIZE
        share = KV_SHARE * (devices * usable / copies - fixed)
        if tokens == _DEFAULT and LEAST_KV * self.kv < share < tokens * self.kv:
            return int(share / self.kv)
        kv = self.kv * tokens
        need = copies * (fixed + kv)
        if need <= devices * usable:
            return tokens
        where = f"{devices} x {device}" if devices > 1 else device
        reserve = f", of which {RESERVE / GIB:.0f} are kept for forwards" if on_cuda else ""
        counts = range(ceil(need / usable), self.kv_heads + 1) if on_cuda and usable else ()
        enough = next((count for count in counts if self.kv_heads % count == 0), 0)
        advice = f"{enough} ranks on as many such devices would hold them; " if enough else ""
        states = f" + {sessions * self.states / GIB:.1f} GiB of {sessions} sessions' states" if self.states else ""
        fewer = "limits.sessions, a lower " if self.states else ""
        raise InvalidField(
            "verifier.ranks" if enough else "target",
            f"{copies} x ({self.weights / GIB:.1f} GiB of weights{states} + {kv / GIB:.1f} GiB of KV) are more than "
            f"the {room / GIB:.1f} GiB of memory on {where}{reserve}; {advice}a lower {fewer}verifier.kv_tokens, "
            "bfloat16 or a smaller target takes less",
        )


def fit_verifier(settings: VerifierSettings, sessions: int, room: float | None = None, copies: int = 1) -> int:
    """The KV tokens of each of so many verifiers beside the states of sessions. room: bytes free on each device, where
    that is not the CPU. Raises InvalidField as `fit_kv` does, and unless each rank can hold as many of a layer's key
    heads as the others.
    """
    target, dtype, device, ranks = settings.target, settings.dtype, settings.device, settings.ranks
    size = ModelSize.of(target, dtype, wide_kv=settings.invariant and device == "cpu")
    if size.kv_heads % ranks:
        raise InvalidField("verifier.ranks", f"{ranks} ranks cannot share the model's {size.kv_heads} KV heads evenly")
    room = free_memory(device) if room is None else room
    if room is None and settings.kv_tokens:
        return settings.kv_tokens
    heads = head_bytes(settings.drafters, target, dtype)
    return size.fit_kv(settings.kv_tokens, device, room or 0.0, ranks, copies, heads, sessions)


def head_bytes(drafters: Sequence[str], target: str | Path, dtype: str) -> int:
    """Bytes of the heads NAME=KIND[:DIR] of a verifier's process: weights, KV of the default number of tokens, and the
    target's embedding for those that have a folder.
    """
    folders = [folder for drafter in drafters if (folder := drafter.partition(":")[2])]
    config = text_config(target) if folders else {}
    embedding = config.get("vocab_size", 0) * config.get("hidden_size", 0) * (4 if dtype == "float32" else 2)
    sizes = [ModelSize.of(folder, dtype) for folder in folders if (Path(folder) / CONFIG).is_file()]
    return sum(size.weights + size.kv * _DEFAULT + embedding for size in sizes)


def free_memory(device: str) -> float | None:
    """Bytes of the host's memory that may be taken, by its cgroup's limit too; None for other devices than the CPU."""
    if device != "cpu":
        return None
    import psutil

    limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.is_file() else ""
    available = float(psutil.virtual_memory().available)
    return min(available, float(limit)) if limit.isdecimal() else available


def _weights(folder: Path, config: dict[str, Any], each: int, shapes: dict[str, list[int]]) -> int:
    """Bytes of a checkpoint, and the `shapes` of its tensors; a file that cannot be read has none: loading will say
    what is wrong with it.
    """
    # These are as large as any once the first forward has made numbers of them.
    unpacked = (config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"
    total = 0
    for name, file in tensors_in(folder):
        part = file.get_slice(name)
        shapes[name], dtype = part.get_shape(), part.get_dtype()
        count = prod(shapes[name])
        if unpacked and name.endswith(".weight_shape"):
            total += prod(map(int, file.get_tensor(name))) * each
        elif dtype in FLOATS or (unpacked and name.endswith(".weight")):
            total += count * each
        elif not (unpacked and name.endswith(".weight_packed")):
            total += count * _BITS.get(dtype, 8) // 8
    return total


def _states(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], each: int) -> int:
    """Bytes of a session's states: windows as large as the convolutions, and in float32 recurrent states, of as many
    channels as the projection behind them reads.
    """
    windows = (
        shape for name, shape in shapes.items() if "conv" in name and name.endswith("weight") and len(shape) == 3
    )
    layers = [name.removesuffix("A_log") for name in shapes if name.endswith(".A_log")]
    outputs = (shapes.get(f"{layer}{output}.weight") for layer in layers for output in _STATE_OUTPUTS)
    named = {**config, **(config.get("linear_attn_config") or {})}
    width = next((named[name] for name in _STATE_WIDTHS if named.get(name)), 0)
    return each * sum(map(prod, windows)) + 4 * width * sum(shape[1] for shape in outputs if shape)


def _kv(config: dict[str, Any], each: int) -> tuple[int, int]:
    """Bytes of a token's KV, and key heads; 0 and 0 where config.json names its shape in other words than Llama's."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return int(2 * config["num_hidden_layers"] * kv_heads * dim) * each, kv_heads
    except (KeyError, TypeError, ZeroDivisionError):
        return 0, 0


Share = Annotated[float, Field(ge=0, le=1)]
LEAST_LENGTH = 1.1
"""tokens a step below which no draft pays"""


class Expectation(BaseModel):
    """How often a head's best token is right at depth 1, 2, ... when the best ones before it were, on the kind of text
    that it knows least of: `acceptance` in its config.json, which training writes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    by_depth: tuple[Share, ...] = Field((), max_length=MAX_TREE_DEPTH)
    """at least, on every text that was measured"""
    texts: dict[str, tuple[Share, ...]] = {}
    """the shares measured on each kind of text"""

    @property
    def lengths(self) -> dict[str, float]:
        """Tokens that a step commits with a chain of the head's best tokens, the root's included, by kind of text."""
        return {kind: 1 + sum(accumulate(shares, mul)) for kind, shares in self.texts.items()}


def read_expectation(folder: str | Path) -> Expectation:
    """Return what a model's folder expects, nothing if it does not say. Raises InvalidField."""
    file = Path(folder) / CONFIG
    try:
        return Expectation.model_validate(json.loads(file.read_text(encoding="utf-8")).get(ACCEPTANCE) or {})
    except (OSError, ValueError, ValidationError) as error:
        raise InvalidField("drafter.path", f"{file}: {ACCEPTANCE}: {str(error).splitlines()[0]}") from None


def warning_of(folder: Path) -> str:
    """Return why not to serve a head; empty when it may pay, or its folder is not there. Raises InvalidField."""
    lengths = read_expectation(folder).lengths.values() if (folder / CONFIG).exists() else ()
    best = max(lengths, default=LEAST_LENGTH)
    return "" if best >= LEAST_LENGTH else f"expected tau {best:.2f}: drafting with it costs time"
