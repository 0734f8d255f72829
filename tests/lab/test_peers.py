"""`coppice bench peers` beside a llama-server that is not one: it asks our own, and answers in llama.cpp's words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coppice.client.client import Client
from coppice.errors import InvalidField, Unavailable
from coppice.stack.launch import Stack
from lab.measuring import Bench, Journal
from lab.options import Options, Question
from lab.peers import NGRAMS, VERSION, build, check_peers, run_peers
from lab.report import Report
from lab.run import LLAMA, Cell

NEW, ACCEPTED = 12, 4
LLAMA_SERVER = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

class Llama(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body.pop("cache_prompt") is False
        url = "http://" + os.environ["OURS"] + self.path
        self.send_response(200)
        self.end_headers()
        for line in urlopen(Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json"}})):
            if line.startswith(b"data: {{"):
                part = json.loads(line[6:])
                drafted = {{"draft_n_accepted": {ACCEPTED}}} if "--spec-type" in sys.argv else {{}}
                part["timings"] = {{"predicted_n": body["max_tokens"], **drafted}}
                del part["model"]
                part.pop("coppice", None)
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")

assert open(sys.argv[sys.argv.index("-m") + 1]).read() == "f32"
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Llama).serve_forever()
"""
CONVERTER = "import sys; open(sys.argv[5], 'w').write(sys.argv[3])"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder in which llama.cpp seems to be built."""
    script, server = tmp_path / "source" / VERSION / "llama.cpp", tmp_path / "build" / "bin"
    for folder in (script, server):
        folder.mkdir(parents=True)
    (script / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (server / "llama-server").write_text(LLAMA_SERVER)
    (server / "llama-server").chmod(0o755)
    return tmp_path


def test_modes_are_of_n_grams_or_name_a_models_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    drafting = f"draft-eagle3:{tmp_path}"
    assert check_peers(()) == tuple(NGRAMS)
    assert check_peers((drafting,)) == (LLAMA, drafting)
    for mode in ("x", "ngram-mod:x", "draft-eagle3", "draft-eagle3:none"):
        with pytest.raises(InvalidField, match=f"'{mode}' is not one of llama.cpp, ngram-simple"):
            check_peers((mode,))


def test_both_are_asked_and_their_texts_are_compared(
    stack: Stack, client: Client, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", stack.orchestrator.http)
    bench = Bench(stack, client, Report("bench peers", "float32", 1), Options(max_new_tokens=NEW))
    questions, modes = [Question(tuple(range(30, 50)) * 2), Question((5, 6, 7, 8))], (LLAMA, "ngram-simple")
    cells = [Cell(0.0, 6, 1), Cell(1.0, 6, 1)]
    methods = ("plain", "single:self")
    run_peers(bench, methods, modes, cells, questions, questions[:1], build(llama), Journal())
    assert [row["method"] for row in bench.report.rows] == [*methods, *modes] * 2
    assert [row["identical"] for row in bench.report.rows] == [2] * 6 + [0] * 2  # no verdict on their own draws
    assert [round(row["tau"], 3) for row in bench.report.rows[2:4]] == [1.0, round((NEW - 1) / (NEW - 1 - ACCEPTED), 3)]
    assert bench.report.rows[1]["tau"] > 1.5
    assert bench.report.ok
    assert bench.report.rows[2]["figures"]["all"]["over_llama.cpp"].value == pytest.approx(1.0)
    assert "over_best_peer" in bench.report.rows[0]["figures"]["all"]
    server, script = build(llama)
    server.write_text(f"#!{sys.executable}\nraise SystemExit('no such option')")
    with pytest.raises(Unavailable, match="did not start: no such option"):
        run_peers(bench, methods, modes, cells, questions, (), (server, script), Journal())
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(InvalidField, match=f"does not convert {stack.spec.target}: no such model"):
        run_peers(bench, methods, modes, cells, questions, (), (server, script), Journal())
