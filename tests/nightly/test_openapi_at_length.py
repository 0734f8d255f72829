"""Schemathesis against the HTTP front: it keeps what its own description says, whatever it is sent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.stack.spec import HeadSpec
from tests.stacks import serving
from tests.tiny import make_target

EXAMPLES = int(os.environ.get("EXAMPLES", 1000))  # of each operation
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)
# Not positive_data_acceptance: a schema does not say which models are served, nor which fields exclude one another.
COMMAND = shutil.which("schemathesis", path=f"{sys.prefix}/bin/schemathesis-env/bin:{os.environ['PATH']}")
pytestmark = [pytest.mark.timeout(0), pytest.mark.skipif(COMMAND is None, reason="make nightly installs schemathesis")]


def test_the_front_keeps_what_it_describes(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", 300)
    extra = {"orchestrator": {"limits.max_new_tokens": 4}}
    with serving(tmp_path, target, HeadSpec("lookup", "lookup"), http_port=0, extra=extra) as stack:
        options = ["--max-examples", EXAMPLES, "--checks", ",".join(CHECKS), "--seed", 1, "--workers", 4]
        options += ["--continue-on-failure", "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
        command = [COMMAND, "run", f"http://{stack.orchestrator.http}/openapi.json", *options]
        ended = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
        stack.check()
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr
    assert not re.search("unexpected error|Traceback", (tmp_path / "orchestrator.log").read_text())
