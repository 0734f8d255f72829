"""`bench services`: real services on a target and a head that sleep, in small numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coppice.client.client import Client
from coppice.stack.launch import Stack
from lab.measuring import Bench, Report
from lab.options import Options
from lab.services import ASLEEP, HEAD, Asleep, run_services, spec_of

SMALL = Asleep(t_m_ms=2, t_d_ms=1, vocab_size=1000, hidden_size=8, layers=6)
OPTIONS = Options(n=2, max_new_tokens=24, budget=12)
SESSIONS = (1, 3)
METHODS = ("plain", f"single:{HEAD}")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A verifier and a drafter that sleep, and an orchestrator."""
    spec = spec_of(SMALL, tmp_path_factory.mktemp("asleep"), SESSIONS, OPTIONS.max_new_tokens)
    with Stack(spec, ASLEEP, log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running
    assert not running.unclean


def test_steps_take_the_time_slept_and_more_and_every_process_works_for_them(stack: Stack, client: Client) -> None:
    report = Report("bench services", "bfloat16", 1)
    run_services(Bench(stack, client, report, OPTIONS), SMALL, SESSIONS, (0.0, 1.0))
    lines = report.figures["services"]
    cells = [(line["T"], line["sessions"], line["method"]) for line in lines]
    assert cells == [(t, count, method) for t in (0.0, 1.0) for count in SESSIONS for method in METHODS]
    for line in lines:
        drafts = line["method"] != "plain"
        assert line["T_M"] >= SMALL.t_m_ms
        assert (line["T_D"] > 0.1 * SMALL.t_d_ms) == drafts  # steps whose draft is late go on without it
        assert line["step"] > SMALL.t_m_ms + SMALL.t_d_ms * drafts
        assert line["p99"] >= line["beside"] > 0
        assert min(line[name] for name in ("verifier", "orchestrator", "client", "steps/s", "sessions/core")) > 0
        assert (line["tau"] > 1.3, line["nodes"] > 6) == (drafts, drafts)
    (wrong,) = report.checks
    assert wrong.ok


def test_a_wrong_answer_is_found(stack: Stack, client: Client) -> None:
    report = Report("bench services", "bfloat16", 1)
    other = Asleep(SMALL.t_m_ms, SMALL.t_d_ms, SMALL.vocab_size - 1)
    run_services(Bench(stack, client, report, OPTIONS), other, (1,), (0.0,))
    assert [(check.value, check.ok) for check in report.checks] == [(len(METHODS) * OPTIONS.n, False)]
