"""Coppice: exact speculative decoding as a pipeline of services. Importing this needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from coppice.client import AsyncClient, Client, Completion, Options, StreamEvent
    from coppice.errors import (
        Cancelled,
        CoppiceError,
        DeadlineExceeded,
        InternalError,
        InvalidField,
        NotFound,
        Overloaded,
        PermissionDenied,
        StaleFence,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )
    from coppice.speculation.sampling import SamplingParams
    from coppice.wire.generation import ChatMessage, Chunk, Finished, Started

__all__ = ["ChatMessage", "Chunk", "Finished", "SamplingParams", "Started", "__version__"]
__all__ += ["AsyncClient", "Client", "Completion", "Options", "StreamEvent"]
__all__ += ["Cancelled", "CoppiceError", "DeadlineExceeded", "InternalError", "InvalidField", "NotFound", "Overloaded"]
__all__ += ["PermissionDenied", "StaleFence", "Unauthenticated", "Unavailable", "Unimplemented"]

_HOMES = {
    "coppice.client": ("AsyncClient", "Client", "Completion", "Options", "StreamEvent"),
    "coppice.wire.generation": ("ChatMessage", "Chunk", "Finished", "Started"),
    "coppice.speculation.sampling": ("SamplingParams",),
}
"""where names are defined; all others are errors"""


def __getattr__(name: str) -> Any:
    """Load what is named on first use, so that a service importing one module does not pay for all."""
    if name not in __all__:
        raise AttributeError(f"module 'coppice' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "coppice.errors")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """What is here and what would be loaded."""
    return sorted({*globals(), *__all__})
