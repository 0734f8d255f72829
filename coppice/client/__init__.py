"""The SDK: a synchronous and an asynchronous client of the generation service."""

from coppice.client.client import AsyncClient, Client
from coppice.client.completion import Completion, StreamEvent
from coppice.client.request import Options

__all__ = ["AsyncClient", "Client", "Completion", "Options", "StreamEvent"]
