"""What a verifier and drafters in one process know of each other, as no service imports another one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from coppice.stack.spec import module_of
from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import Commit


class Subscription(Protocol):
    """Hears what a session commits."""

    def close(self) -> None:
        """Hear no more."""


class NearbyVerifier(Protocol):
    """The verifier of a drafter's own process."""

    @property
    def address(self) -> str:
        """What a FeatureRef calls it."""

    async def follow(self, ref: FeatureRef, heard: Callable[[Commit], None]) -> tuple[Features | None, Subscription]:
        """Inline rows up to a window's end, if it has positions; `heard` is told every commit from then on.

        Raises NotFound, InvalidField.
        """


class NearbyDrafters(Protocol):
    """The drafters of a verifier's own process; the servicer of DrafterService, too."""

    async def start(self) -> None:
        """Load the heads. Raises what a head's builder raises."""

    async def stop(self) -> None:
        """End them."""


def nearby_drafters(*arguments: Any) -> NearbyDrafters:
    """The heads of `verifier.drafters`, which the drafter's package knows how to serve."""
    found: NearbyDrafters = import_module(f"{module_of('services.drafter')}.nearby").Drafters(*arguments)
    return found
