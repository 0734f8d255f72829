"""What an orchestrator makes of a replica's trouble."""

from __future__ import annotations

import pytest

from coppice.rpc.channels import Dialer
from orchestrator import replicas
from orchestrator.replicas import Replica


async def test_trouble_that_comes_back_is_left_alone_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now)
    replica = Replica("127.0.0.1:1", Dialer())
    pauses = []
    for well_s in (0.0, 0.1, 0.1, 9.0, 11.0):
        now = max(now, replica.cooling_until) + well_s
        assert replica.fit
        assert replica.cool_down()
        assert not replica.cool_down()
        pauses.append(replica.cooling_until - now)
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 0.5])
    await replica.channel.close()
