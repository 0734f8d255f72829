"""Coppice: exact speculative decoding as a pipeline of services. Importing this needs no torch."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from coppice.client import AsyncClient, Client, Completion, StreamEvent
    from coppice.speculation.sampling import SamplingParams

__all__ = ["AsyncClient", "Client", "Completion", "SamplingParams", "StreamEvent", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the SDK on first use, so that a service importing one module does not pay for all."""
    if name in ("AsyncClient", "Client", "Completion", "StreamEvent"):
        from coppice import client

        return getattr(client, name)
    if name == "SamplingParams":
        from coppice.speculation.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'coppice' has no attribute {name!r}")
