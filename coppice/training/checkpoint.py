"""Atomic training checkpoints: safetensors for weights and optimiser state, JSON for counters. Nothing is pickled."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.training.run_folder import checkpoints, replacing

KEEP = 2
Named = dict[str, Tensor]


def optimiser_tensors(optimisers: list[torch.optim.Optimizer], named: Named) -> Named:
    """Return all optimiser state as tensors called `PARAMETER|KEY`; `named` maps names to the model's parameters."""
    names = {id(p): name for name, p in named.items()}
    tensors: Named = {}
    for optimiser in optimisers:
        for p, state in optimiser.state.items():
            for key, value in state.items():
                tensors[f"{names[id(p)]}|{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def load_optimisers(optimisers: list[torch.optim.Optimizer], named: Named, tensors: Named) -> None:
    """Restore the optimisers' state from the tensors of `optimiser_tensors`."""
    owners = {id(p): opt for opt in optimisers for group in opt.param_groups for p in group["params"]}
    for key, value in tensors.items():
        name, _, field = key.rpartition("|")
        p = named[name]
        owners[id(p)].state[p][field] = value.clone() if field == "step" else value.to(p.device).clone()


def save_weights(path: Path, named: Named) -> None:
    """Write one safetensors file atomically."""
    temporary = path.with_suffix(".partial")
    save_file({name: p.detach().cpu().contiguous() for name, p in named.items()}, temporary)
    os.replace(temporary, path)


def load_weights(path: Path, named: Named) -> None:
    """Copy a safetensors file into the parameters. Raises ValueError for missing or unknown names."""
    tensors = load_file(path)
    if tensors.keys() != named.keys():
        raise ValueError(f"{path}: names differ from the model's: {sorted(tensors.keys() ^ named.keys())[:4]}")
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])


def save_checkpoint(
    folder: Path, step: int, named: Named, optimisers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> Path:
    """Write `folder/step-NNNNNNN` (complete or not there at all) and delete all but the last KEEP."""
    final = folder / f"step-{step:07d}"
    with replacing(final) as partial:
        save_weights(partial / "model.safetensors", named)
        save_file(optimiser_tensors(optimisers, named), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    for old in checkpoints(folder)[:-KEEP]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path, named: Named, optimisers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Restore weights and optimisers in place and return the counters."""
    load_weights(path / "model.safetensors", named)
    load_optimisers(optimisers, named, load_file(path / "optimizer.safetensors"))
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state
