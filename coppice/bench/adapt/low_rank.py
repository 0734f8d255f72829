"""Learning deltas of a low rank (LoRA) to a head's matrices: an experiment, which no policy of adaptation uses."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from coppice.adaptation.learner import Learner
from coppice.heads.public_state import public_weights

RANK = 8


class LowRankLearner(Learner):
    """Learns deltas of a low rank to the matrices of a head, and nothing else."""

    def __init__(self, folder: Path, target: Path) -> None:
        """Load the head of `folder` for the target of another folder. Raises InvalidField."""
        super().__init__(folder, target)
        model, generator = self.student.model.requires_grad_(False), torch.Generator().manual_seed(0)
        for name, layer in list(model.named_modules()):
            # The target's output layer is no parameter, and of so small a matrix a delta is as large.
            if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter) and min(layer.weight.shape) > RANK:
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, _LowRank(layer, generator))

    def tensors(self) -> dict[str, Tensor]:
        """Return the deployed tensors by their public names with the deltas added: copies."""
        merged = deepcopy(self.frozen.model)
        with torch.no_grad():
            for name, layer in self.student.model.named_modules():
                if isinstance(layer, _LowRank):
                    merged.get_parameter(f"{name}.weight").add_(layer.up @ layer.down)
        return public_weights(merged, self.config)


class _LowRank(nn.Module):
    """A frozen layer, and the two factors of a delta that is 0 at first."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        down = torch.randn(RANK, layer.in_features, generator=generator)
        self.down = nn.Parameter(down / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, states: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor = self.layer(states) + states @ self.down.T @ self.up.T
        return out
