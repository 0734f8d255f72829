"""Chunks of a fixed size say the same as those of steps."""

from __future__ import annotations

import pytest

from coppice.wire.generation import Chunk, Origin
from orchestrator.answer import Chunks


def commit(start: int, size: int) -> Chunk:
    """Tokens start..start+size-1."""
    ids = tuple(range(start, start + size))
    pieces = tuple(f"<{token}>" for token in ids)
    origins = (*(Origin.DRAFT for _ in ids[1:]), Origin.ROOT)
    return Chunk("".join(pieces), ids, origins, pieces, tuple(-float(token) for token in ids))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 100])
def test_the_tokens_are_the_same_and_the_size_is_fixed(size: int) -> None:
    sizes = (1, 4, 2, 7, 1, 1, 3)
    commits = [commit(sum(sizes[:at]), one) for at, one in enumerate(sizes)]
    sent: list[Chunk] = []
    chunks = Chunks(sent.append, size)
    for one in commits:
        chunks.add(one)
    chunks.flush()
    chunks.flush()
    for field in ("ids", "origins", "pieces", "log_probs"):
        said = [value for chunk in sent for value in getattr(chunk, field)]
        assert said == [value for chunk in commits for value in getattr(chunk, field)]
    assert all(chunk.text == "".join(chunk.pieces) for chunk in sent)
    lengths = [len(chunk.ids) for chunk in sent]
    if size:
        assert set(lengths[:-1]) <= {size}
        assert 0 < lengths[-1] <= size
    else:
        assert tuple(lengths) == sizes


def test_a_chunk_is_sent_as_soon_as_it_is_full() -> None:
    sent: list[Chunk] = []
    chunks = Chunks(sent.append, 3)
    chunks.add(commit(0, 2))
    assert not sent
    chunks.add(commit(2, 5))
    assert [chunk.ids for chunk in sent] == [(0, 1, 2), (3, 4, 5)]
