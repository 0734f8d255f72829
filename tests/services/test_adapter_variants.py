"""Policy `bandit` over real processes: a variant for a kind of text, and none that is worse than what was there."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from coppice.adaptation.client import AdapterClient
from coppice.adaptation.records import (
    QueryRecord,
    Sample,
    demand_key,
    queries_key,
    query_to_fields,
    sample_to_fields,
    samples_key,
)
from coppice.limits import SKETCH
from coppice.weights.versions import Weights
from coppice.wire.adapter import HeadStatus, KindStatus
from services.adapter.branching import YOUNG_SHARE
from services.adapter.state import PROVEN_SHARE
from tests.processes import Service
from tests.services.test_adapter import HEAD, Bench, bench, first, head, kind, target
from tests.services.test_signal_stream import redis
from tests.signals import eventually
from tests.unit.test_feature_heads import HIDDEN

__all__ = ["bench", "first", "head", "kind", "redis", "target"]  # fixtures

LENGTH = 40
numbers = itertools.count()


def sketch(of: int) -> tuple[float, ...]:
    """Sketches of kinds of text that have nothing in common."""
    return tuple(np.eye(SKETCH)[of].tolist())


def text(session: str, ids: list[int], learnable: bool) -> Sample:
    """A text of one token that is followed by the next one of a few, or of any tokens by chance."""
    rng = np.random.default_rng(abs(hash(session)) % 2**32)
    tokens = np.array([ids[at % 5] if learnable else int(rng.choice(ids)) for at in range(LENGTH)])
    features = rng.standard_normal((LENGTH - 1, 3 * HIDDEN)).astype("<f4")
    empty = np.empty(0, np.int64)
    return Sample(
        kind="full",
        version=0,
        session=session,
        position=LENGTH,
        target_id=int(tokens[-1]),
        miss=0.0,
        tail=0.0,
        top_ids=empty,
        top_log_probs=empty.astype(np.float32),
        hidden=empty.astype(np.float32),
        tokens=tokens,
        features=features.tobytes(),
    )


def ask(
    made: Bench, status: HeadStatus, of: int = 0, tau: tuple[float, float] = (2.0, 2.0), learnable: bool = True
) -> None:
    """A query of a kind of text, as a drafter with the live routes would serve it, and its text.

    tau: with the variant that drafts for a share of the kind, and with the other one.
    """
    number, store = next(numbers), made.store
    session, known = f"text{number}", status.kinds[of] if of < len(status.kinds) else None
    drafter = known.variant if known and known.share and number % 2 else known.other if known else 0
    first = known is not None and known.share > 0 and drafter == known.variant
    drafted = tau[0] if first else tau[1]
    told = QueryRecord(
        session=session,
        s=0.0,
        rejections=0,
        tau=drafted + 0.01 * (number % 7),
        new_tokens=LENGTH,
        steps=20,
        tokens_per_s=20.0,
        step_ns=10**7,
        draft_ns=10**6,
        versions=(status.version, status.version),
        load=1.0,
        policy=f"single:{HEAD}",
        kind=known.kind if known and status.version else 0,
        variant=drafter,
        sketch=sketch(of),
    )
    store.xadd(samples_key("coppice", HEAD), sample_to_fields(text(session, made.draft_ids, learnable)))
    store.xadd(queries_key("coppice", HEAD), query_to_fields(told))


def kind_of(status: HeadStatus, number: int = 1) -> KindStatus:
    return status.kinds[number - 1]


def adapter_of(made: Bench, *flags: str) -> Service:
    return made.adapter("bandit.policy", "bandit", "adapter.cpu_share", "1", *flags)


@pytest.mark.parametrize("kind", ["specblock", "dspark"], indirect=True)
def test_a_variant_of_a_kind_of_text_is_made_proven_and_kept(bench: Bench, first: Weights, kind: str) -> None:
    bench.drafter()
    bench.drafter()
    adapter = adapter_of(bench)
    assert eventually(lambda: bench.store.get(demand_key("coppice", HEAD)) == b"text")
    status = bench.until(adapter, lambda now: bool(now.changes), lambda now: ask(bench, now))
    assert [change.what for change in status.changes] == ["variant"]
    assert (kind_of(status).variant, kind_of(status).share, kind_of(status).other) == (1, YOUNG_SHARE, 0)
    bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert {one.weights_hash for one in bench.live()} == {status.weights_hash} != {first.hash}
    status = bench.until(
        adapter, lambda now: kind_of(now).share == PROVEN_SHARE, lambda now: ask(bench, now, tau=(3.0, 2.0))
    )
    assert [change.what for change in status.changes][:2] == ["variant", "pays"]
    with AdapterClient(adapter.address) as client:
        client.rollback(HEAD, 0)
    status = bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert (kind_of(status).variant, kind_of(status).share) == (0, 0.0)
    assert {one.weights_hash for one in bench.live()} == {first.hash}
    assert adapter.stop() == 0


@pytest.mark.parametrize("learnable", [True, False], ids=["poisoned", "random"])
def test_a_variant_of_bad_samples_never_drafts_for_more_than_its_first_share(
    bench: Bench, first: Weights, learnable: bool
) -> None:
    bench.drafter()
    adapter = adapter_of(bench)
    shares = set[float]()

    def feed(status: HeadStatus) -> None:
        shares.update(kind.share for kind in status.kinds)
        ask(bench, status, tau=(1.2, 2.0), learnable=learnable)

    status = bench.until(
        adapter, lambda now: any(one.what == "loses" for one in now.changes) or now.queries > 120, feed
    )
    shares.update(kind.share for kind in status.kinds)
    assert shares <= {0.0, YOUNG_SHARE}
    if learnable:  # texts that teach something, and not what is asked for
        assert status.reverts >= 1
        assert kind_of(status).share == 0.0
    else:  # nothing is learnt that held-out texts show
        assert not status.changes


def test_a_restart_keeps_the_variants_and_what_is_known_of_them(bench: Bench) -> None:
    bench.drafter()
    adapter = adapter_of(bench)
    before = bench.until(adapter, lambda now: bool(now.changes), lambda now: ask(bench, now))
    bench.until(adapter, lambda now: now.doing == "idle")
    assert adapter.stop() == 0
    adapter = adapter_of(bench)
    after = bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert (after.version, after.weights_hash) == (before.version, before.weights_hash)
    assert [(kind.variant, kind.share) for kind in after.kinds] == [(kind.variant, kind.share) for kind in before.kinds]
    assert (Path(bench.state_file)).exists()
