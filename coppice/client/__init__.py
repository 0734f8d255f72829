"""The SDK: a synchronous and an asynchronous client of the generation service."""

from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Completion, StreamEvent

__all__ = ["AsyncClient", "Client", "Completion", "StreamEvent"]
