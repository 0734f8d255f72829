"""The models of a head that drafts with variants of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coppice.weights.variants import Routes


@dataclass
class VariantModels:
    """The models of a head by variant, 0 the deployed one, and what each is for."""

    models: dict[int, Any]
    routes: Routes
    at_work: int = 0
    """the variant that drafts now"""

    @property
    def model(self) -> Any:
        """The model that drafts now; of a variant that is gone the deployed one."""
        return self.models.get(self.at_work, self.models[0])
