"""An engine from a folder, checked against the model's own attention before anybody is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from coppice.config.model import disagreements, ends_line, find_mtp, mtp_prefixes, text_config, text_ends, unscaled
from coppice.engine.attention import UnsupportedModel, one_line
from coppice.engine.engine import DTYPES, Engine, read_layout
from coppice.engine.self_check import check_invariant, self_check
from coppice.errors import CoppiceError, InvalidField

log = structlog.get_logger()

_SHOWN = 3  # keys of a checkpoint that a message names


class UnusableFolder(CoppiceError):
    """A folder does not hold exactly the tensors of a causal language model."""

    status = "INVALID_ARGUMENT"


def load_engine(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_tokens: int,
    ranks: int = 1,
    invariant: bool = False,
    keeps_states: bool = True,
) -> Engine:
    """Load the model of a local folder (config.json and safetensors; no code of its own), and check it.

    dtype: float32, bfloat16 or float16, of what is not quantised. ranks: of torch.distributed's default group, which
    all call this at once and get an engine each, with this rank's part of the weights and key heads, and whole logits.
    keeps_states: whether the model's layers may keep states of texts beside keys and values; ranks share none.
    Raises UnusableFolder, and UnsupportedModel, where it can before the weights are read.
    """
    folder = Path(path)
    with _quiet(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_layout(folder, config, keeps_states and ranks == 1)
        ends = text_ends(folder)
        log.info(ends_line(ends), folder=str(folder))
        for line in disagreements(folder):
            log.warning(line)
        model = _load(folder, config, device, dtype, ranks)
        if ends and model.generation_config is not None:
            model.generation_config.eos_token_id = list(next(iter(ends.values())))
        if torch.device(device).type == "cuda" and (index := torch.device(device).index) is not None:
            torch.cuda.set_device(index)  # kernels are launched on the thread's device
        engine = Engine(model, kv_tokens=kv_tokens, invariant=invariant)
        reads = [engine.info.layers + mtp[0].reads_normed] if (mtp := find_mtp(folder)) else []
        if engine.steps is not None and (reason := engine.capture(reads)):
            log.warning("no CUDA graphs: steps are launched one operator at a time", why=reason)
        self_check(engine)
        if invariant:
            engine.bits_hash = check_invariant(engine)
    tensors = [*engine.model.parameters(), *engine.model.buffers()]
    if any(tensor.is_mkldnn for tensor in tensors):  # the others hold on to files with these as they were
        for tensor in tensors:
            if not tensor.is_mkldnn:
                tensor.data = tensor.data.clone()
    return engine


@contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Errors become UnusableFolder in one line, and what transformers would log about tensors is left out."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    cast(Any, logging).disable_progress_bar()  # a log is no terminal
    try:
        yield
    except (InvalidField, UnsupportedModel, UnusableFolder):
        raise
    except Exception as error:
        raise UnusableFolder(f"{folder} cannot be loaded: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _check_layout(folder: Path, config: Any, keeps_states: bool) -> None:
    """Ask the model's class, without weights, whether it can run packed. Raises UnsupportedModel."""
    fields = text_config(folder)
    for name, other in config.get_text_config().attribute_map.items():  # two names of one field
        value, again = fields.get(name), fields.get(other)
        if None not in (value, again) and value != again:
            raise UnusableFolder(f"{folder}: config.json says {name} {value} and {other} {again}, which are one thing")
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        # Products of experts run without values in bfloat16 alone; shapes are the same in every dtype.
        model: PreTrainedModel = build(config, dtype=torch.bfloat16, trust_remote_code=False)
    try:
        if read_layout(model.train(False)).states and not keeps_states:
            raise UnsupportedModel(f"{type(model).__name__} keeps states of texts: no head or rank can be of its class")
    except UnsupportedModel as error:
        # Where values decide what is computed, only tensors that have values can be asked.
        if not isinstance(error.__cause__, RuntimeError):
            raise


def _load(folder: Path, config: Any, device: str, dtype: str, ranks: int) -> PreTrainedModel:
    """The model with every tensor from the folder, and every tensor of the folder in it. Raises UnusableFolder."""
    load: Any = AutoModelForCausalLM.from_pretrained
    quantised = getattr(config, "quantization_config", None) is not None
    where: dict[str, Any] = {}
    if ranks > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        where["distributed_config"] = DistributedConfig(tp_size=ranks, tp_plan="auto")
    elif quantised:
        where["device_map"] = None if device == "cpu" else device  # some kinds cannot be moved once they are loaded
    model, report = load(
        folder,
        **where,
        dtype=DTYPES[dtype],
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # they are reported, too
        output_loading_info=True,
    )
    shipped = mtp_prefixes(report["unexpected_keys"])
    for kind, keys in (
        ("lacks", report["missing_keys"]),
        ("holds, but the model has no place for,", {k for k in report["unexpected_keys"] if not k.startswith(shipped)}),
        ("holds in another shape", {key for key, *_ in report["mismatched_keys"]}),
        ("is not quantised, but holds no floating numbers in", set() if quantised else unscaled(folder)),
    ):
        if keys:
            shown, more = sorted(keys)[:_SHOWN], len(keys) - _SHOWN
            rest = f" and {more} more" if more > 0 else ""
            raise UnusableFolder(f"{folder} {kind} {', '.join(shown)}{rest}")
    if not where:
        model = model.to(device)
    elif dtype == "float32" and not getattr(model, "is_quantized", False):
        model = model.to(torch.float32)  # quantised numbers became bfloat16 where nothing multiplies them
    return model  # type: ignore[no-any-return]
