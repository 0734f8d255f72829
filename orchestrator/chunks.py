"""Chunks of a fixed size: how many tokens a step committed says something about the text, even when it is encrypted."""

from __future__ import annotations

from collections.abc import Callable

from coppice.messages.generation import Chunk


class Chunks:
    """Passes chunks on as they come, or `size` tokens at a time; the last one holds the rest."""

    def __init__(self, emit: Callable[[Chunk], None], size: int) -> None:
        """`size` 0 passes every commit on as it is."""
        self._emit, self._size = emit, size
        self._held: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in the tokens of a commit."""
        if not self._size:
            self._emit(chunk)
            return
        held = chunk if self._held is None else _joined(self._held, chunk)
        while len(held.ids) >= self._size:
            self._emit(_part(held, slice(None, self._size)))
            held = _part(held, slice(self._size, None))
        self._held = held if held.ids else None

    def flush(self) -> None:
        """Pass on what is left."""
        if self._held is not None:
            self._emit(self._held)
            self._held = None


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return Chunk(
        text=first.text + second.text,
        ids=first.ids + second.ids,
        origins=first.origins + second.origins,
        pieces=first.pieces + second.pieces,
        log_probs=first.log_probs + second.log_probs,
        top=first.top + second.top,
    )


def _part(chunk: Chunk, part: slice) -> Chunk:
    pieces = chunk.pieces[part]
    return Chunk(
        "".join(pieces), chunk.ids[part], chunk.origins[part], pieces, chunk.log_probs[part], top=chunk.top[part]
    )
