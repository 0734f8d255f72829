"""An engine from a folder, checked against the model's own attention before anybody is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from coppice.engine.engine import DTYPES, Engine
from coppice.engine.kv_cache import BLOCK_SIZE
from coppice.engine.linear import compile_ahead
from coppice.engine.self_check import self_check


def load_engine(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_tokens: int,
    block_size: int = BLOCK_SIZE,
    feature_layers: tuple[int, ...] | None = None,
) -> Engine:
    """Load the model of a local folder (config.json and safetensors; no code of its own), and check it.

    dtype: float32, bfloat16 or float16. Raises ValueError for another one, OSError when the folder has no such model,
    UnsupportedModel, and SelfCheckError.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    model: Any = AutoModelForCausalLM.from_pretrained(
        Path(path), dtype=DTYPES[dtype], local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    engine = Engine(model.to(device), kv_tokens=kv_tokens, block_size=block_size, feature_layers=feature_layers)
    self_check(engine)
    compile_ahead(engine.model)
    return engine
