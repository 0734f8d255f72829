"""What the HTTP server needs of the service behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from coppice.client.completion import StreamEvent
from coppice.config.settings import Settings
from coppice.telemetry import OrchestratorMetrics
from coppice.wire.generation import ChatMessage, ModelDescription
from coppice.wire.verifier import TargetDescription

P = TypeVar("P")


class TokenBytes(Protocol):
    """The orchestrator's TokenBytes, which says what each of these is."""

    @property
    def tokenizer(self) -> object: ...

    def of(self, token: int, special: bool = False, /) -> bytes: ...

    def of_prompt(self, ids: Sequence[int], text: str | None = None) -> list[bytes]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Served(Protocol):
    """The orchestrator's GenerationServicer, which says what each of these is."""

    settings: Settings
    target: TargetDescription
    metrics: OrchestratorMetrics

    @property
    def token_bytes(self) -> TokenBytes: ...

    @property
    def ready(self) -> bool: ...

    def describe(self) -> ModelDescription: ...

    def check_seats(self) -> None: ...

    async def encode(self, prompt: str | Sequence[ChatMessage]) -> list[int]: ...

    def answer(
        self, message: Any, pack: Callable[[StreamEvent], P], size: Callable[[P], int]
    ) -> AsyncGenerator[P, None]: ...
