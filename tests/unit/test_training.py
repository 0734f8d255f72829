"""Training on real, tiny models: data rules, exact resumption, the optimiser, and the commands from end to end."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coppice.errors import InvalidField
from coppice.heads.models.expectation import warning_of
from coppice.training import cli, export, heads, progress, run_folder, target, trainer
from coppice.training.data.corpora import is_held_out, load_corpus, parse_spec, parse_specs
from coppice.training.data.packing import MAX_EPOCHS, Packed, Reader
from coppice.training.data.target_answers import AnswerPlan, record_answers
from coppice.training.losses.feature_losses import next_token_loss, soft_target_loss
from coppice.training.trainer import Muon, Rates, RunOptions, Schedule
from tests.tiny import make_target

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "small", "birds", "near", "my", "old", "tree")
SHAPE = target.Shape(vocab=300, hidden=32, layers=2, intermediate=48, heads=2, kv_heads=1, head_dim=16, positions=128)
HEAD_SHAPE = target.Shape(hidden=16, layers=1, intermediate=32, heads=2, kv_heads=2, head_dim=8)
RATES = Rates(eval_tokens=256, eval_rows=2, micro_tokens=64)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=40)) + "." for _ in range(200)]
    path = tmp_path / "texts.txt"
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


def schedule(tokens: int) -> Schedule:
    return Schedule(
        tokens=tokens,
        warmup=128,
        length=32,
        long_length=64,
        long_share=0.25,
        batch=128,
        small_batch=64,
        small_until=256,
    )


def train(lines: list[str], work: Path, tokens: int, **options) -> bool:
    return target.train_target(lines, work, schedule(tokens), shape=SHAPE, rates=RATES, options=RunOptions(**options))


def last_weights(work: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((work / "checkpoints").iterdir())[-1] / "model.safetensors")


def test_documents_whose_hash_is_a_multiple_of_20_are_held_out_and_no_other(text: Path) -> None:
    corpus = load_corpus(parse_spec(f"words={text}"))
    assert corpus.held_out
    assert all(is_held_out(document) for document in corpus.held_out)
    assert not any(is_held_out(document) for document in corpus.train)
    assert len(corpus.train) + len(corpus.held_out) == 200


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("words", "NAME=GLOB"),
        ("words=a.txt:heavy", "WEIGHT"),
        ("words=a.txt:-1", "WEIGHT"),
        ("words=no-such-*.txt", "no-such-"),
    ],
)
def test_a_bad_data_line_is_an_error_that_names_it(line: str, named: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(named)) as caught:
        [load_corpus(spec) for spec in parse_specs([line])]
    assert caught.value.field == "--data"
    assert "words" in str(caught.value)


def test_a_bad_row_is_an_error_that_names_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "1 + 2?", "answer": 3}\n', encoding="utf-8")
    with pytest.raises(InvalidField, match="line 2: field 'answer'"):
        load_corpus(parse_spec(f"sums={path}"))


def test_questions_become_text_without_calculator_marks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "What is 1 + 1?", "answer": "It is <<1+1=2>>2.\\n#### 2"}\n', encoding="utf-8")
    corpus = load_corpus(parse_spec(f"sums={path}:0.5"))
    assert corpus.train + corpus.held_out == ["Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2"]


def test_no_corpus_is_read_more_than_eight_times_and_weights_share_the_rows() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    small = Packed("small", 0.5, ids[:150], ids[:0])
    large = Packed("large", 0.5, ids, ids[:0])
    reader = Reader([small, large], seed=1, block=32)
    for _ in range(20):
        reader.next_row(32)
    assert reader.drawn["small"] == reader.drawn["large"] == 320
    while reader.next_row(16) is not None:
        pass
    assert reader.epochs("small") == reader.epochs("large") == MAX_EPOCHS


def test_an_epoch_reads_every_window_once() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    reader = Reader([Packed("all", 1.0, ids, ids[:0])], seed=1, block=20)
    starts = {int(row[0]) for row in (reader.next_row(20) for _ in range(reader.usable["all"] // 20))}
    assert len(starts) == reader.usable["all"] // 20
    assert max(starts) + 20 < 1000


def test_a_resumed_run_ends_with_the_very_weights_of_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    lines = [f"words={text}"]
    assert train(lines, tmp_path / "whole", 1024)
    stopped = []

    class Stopper(trainer.Progress):
        def reach(self, done: int, total: int) -> None:
            if done >= 512 and not stopped:
                stopped.append(done)
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Progress", Stopper)
        assert not train(lines, tmp_path / "parts", 1024)
        assert train(lines, tmp_path / "parts", 1024, resume=True)
    whole, parts = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_in_float32_goes_where_torchs_goes(shape: tuple[int, int]) -> None:
    """But for bfloat16's rounding, which torch iterates in."""
    draws = torch.Generator().manual_seed(0)
    begin = torch.randn(shape, generator=draws)
    weights = [torch.nn.Parameter(begin.clone()) for _ in range(2)]
    optimisers = [made([weight], lr=0.1) for made, weight in zip((Muon, torch.optim.Muon), weights, strict=True)]
    for _ in range(5):
        gradient = torch.randn(shape, generator=draws)
        for optimiser, weight in zip(optimisers, weights, strict=True):
            weight.grad = gradient.clone()
            optimiser.step()
    ours, theirs = (weight.detach() - begin for weight in weights)
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_several_workers_learn_what_one_learns(text: Path, tmp_path: Path) -> None:
    train([f"words={text}"], tmp_path / "one", 256, num_workers=1)
    train([f"words={text}"], tmp_path / "two", 256, num_workers=2)
    one, two = last_weights(tmp_path / "one"), last_weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)


def test_only_the_last_two_checkpoints_stay_and_nothing_is_pickled(text: Path, tmp_path: Path) -> None:
    for tokens in (128, 256, 384):
        train([f"words={text}"], tmp_path / "run", tokens, resume=True)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jsonl", ".npy"}
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(target.__file__).parent.glob("*.py"))
    assert not re.search(r"import pickle|torch\.(load|save)\(|allow_pickle=True", sources)


def test_losses_in_chunks_equal_losses_at_once() -> None:
    torch.manual_seed(0)
    hidden, embedding, labels = torch.randn(1100, 8), torch.randn(50, 8), torch.randint(0, 50, (1100,))
    logits = hidden @ embedding.T
    assert torch.allclose(next_token_loss(hidden, embedding, labels), torch.nn.functional.cross_entropy(logits, labels))
    taught, taught_embedding = torch.randn(1100, 6), torch.randn(50, 6)
    wanted = (taught @ taught_embedding.T).softmax(-1)
    expected = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    assert torch.allclose(soft_target_loss(hidden, embedding, taught, taught_embedding), expected, atol=1e-5)


def test_the_rate_warms_up_stays_and_falls_to_zero() -> None:
    plan = Schedule(tokens=1_000_000, warmup=60_000)
    rates = [plan.rate(seen) for seen in (0, 100_000, 690_000, 850_000, 1_000_000)]
    assert rates[0] < 0.1
    assert rates[1] == rates[2] == 1
    assert rates[3] == pytest.approx(0.5)
    assert rates[4] == 0


def test_a_target_and_its_head_are_trained_and_exported(text: Path, tmp_path: Path) -> None:
    lines, work, out = [f"words={text}:0.5"], tmp_path / "target.work", tmp_path / "target"
    run_folder.write_run(work, "target", lines, {"out": out.name, "tokens": "768"})
    assert train(lines, work, 768)
    export.export(work, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= {
        path.name for path in out.iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer("the cat  saw\n    two.")["input_ids"]) == "the cat  saw\n    two."
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "--data 'words=texts.txt:0.5'" in card
    assert str(tmp_path) not in card

    head_work, head_out = tmp_path / "lm.work", tmp_path / "lm"
    run_folder.write_run(head_work, "head", lines, {"kind": "lm", "target": out.name, "out": "lm", "tokens": "512"})
    plan = AnswerPlan(tokens=700, length=32, sessions=4)
    done: list[tuple[int, int]] = []
    answers = record_answers(lines, out, head_work / "lessons", plan, progress=lambda *told: done.append(told))
    assert done == sorted(set(done))
    assert done[0] == (0, done[-1][0])
    assert done[-1] == (len(answers.ids()) + 4 * 32, done[0][1])  # held-out texts, one a temperature, too
    answers.describe(head_work / "data")
    config = heads.TrainingConfig("lm", out, answers, head_work)
    student = heads.LanguageModelInTraining(config, HEAD_SHAPE)
    assert heads.train_head(student, config, schedule(512), RATES)
    heads.export_head(student, config, head_out)
    head = AutoModelForCausalLM.from_pretrained(head_out)
    assert head.config.vocab_size == model.config.vocab_size
    assert (head_out / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


def test_an_unknown_kind_of_head_is_a_usage_error(tmp_path: Path) -> None:
    flags = ["--data", "words=a.txt", "--out", str(tmp_path / "x"), "--target", str(tmp_path), "--kind", "oracle"]
    result = CliRunner().invoke(cli.app, ["head", *flags])
    assert result.exit_code == 2
    assert "oracle" in result.output


def test_the_shipped_prompts_are_sixty_in_three_kinds() -> None:
    path = Path(target.__file__).parents[1] / "prompts" / "demo.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["question_id"] for row in rows] == list(range(1, 61))
    assert [sum(row["category"] == kind for row in rows) for kind in ("code", "maths", "story")] == [20, 20, 20]
    assert all(len(row["turns"]) == 1 and row["turns"][0] == row["turns"][0].strip() for row in rows)


CHATS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "no"}]} for n in range(60)
] + [
    {
        "conversations": [
            {"from": "system", "value": "be short"},
            {"from": "human", "value": f"first {n}"},
            {"from": "gpt", "value": "an answer"},
            {"from": "human", "value": f"second {n}"},
            {"from": "gpt", "value": "another one"},
        ]
    }
    for n in range(60)
]


def test_a_chat_is_a_prompt_for_each_turn_of_its_user_which_the_target_answers(tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", make_target(tmp_path / "target")
    path.write_text("\n".join(map(json.dumps, CHATS)), encoding="utf-8")
    plan = AnswerPlan(tokens=2048, length=128, sessions=16)
    answers = record_answers([f"chat={path}"], folder, tmp_path / "lessons", plan)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {f"user: say {n}\nassistant:" for n in range(60)}
    prompts |= {f"system: be short\nuser: first {n}\nassistant:" for n in range(60)}
    ends = {f"assistant: an answer\nuser: second {n}\nassistant:" for n in range(60)}
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in answers.ids().view(-1, 128)]
    begun = [re.match(r".*\nassistant:(?! an answer\nuser)", text, re.DOTALL) for text in texts]
    assert all(begun)
    found = [next((p for p in prompts if text.startswith(p)), "") for text in texts]
    later = [text for text in texts if any(end in text[:128] for end in ends)]
    assert len(set(found)) > 5
    assert later
    assert "no" not in {text[len(prompt) :].strip() for text, prompt in zip(texts, found, strict=True)}
    corpus = load_corpus(parse_spec(f"chat={path}"), lambda messages: "|".join(m["content"] for m in messages))
    assert len(corpus.train) + len(corpus.held_out) == 60 + 2 * 60
    held = {text.split("|")[1] for text in corpus.held_out if "|" in text}
    assert held
    assert not held & {text.split("|")[1] for text in corpus.train if "|" in text}


def test_the_end_of_a_long_chat_is_read_and_no_more_than_half_a_text(tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", make_target(tmp_path / "target")
    rows = [{"messages": [{"role": "user", "content": f"{'long ' * 50}{n}"}]} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    plan = AnswerPlan(tokens=256, length=64, sessions=4)
    answers = record_answers([f"chat={path}"], folder, tmp_path / "lessons", plan)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begun = [tokenizer.decode(ids[:32]) for ids in answers.ids().view(4, 64)]
    assert all(re.search(r"long \d+\nassistant:$", text) for text in begun), begun


def refuse(messages: object) -> str:
    raise ValueError("roles must alternate\nhere")


@pytest.mark.parametrize(
    ("rows", "render", "why"),
    [
        ([{"messages": []}], str, "line 1: field 'messages' has no message of a user"),
        ([{"messages": "hello"}], str, "line 1: field 'messages' must be a list of messages"),
        ([{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}], str, "message 2 has no role"),
        ([{"conversations": [{"from": "gpt", "value": "a"}]}], str, "'conversations' has no message of a user"),
        (CHATS[:1], refuse, "words=.*: the target's chat template: roles must alternate$"),
        (CHATS[:1], None, "chats teach heads"),
        ([*CHATS[:1], {"text": "words"}], str, "holds chats and texts"),
        ([{"nothing": 1}], str, "none of the fields messages, conversations, text"),
    ],
)
def test_chats_that_cannot_be_used_are_errors_that_name_the_place(
    rows: list[object], render: object, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(InvalidField, match=why) as caught:
        load_corpus(parse_spec(f"words={path}"), render)
    assert caught.value.field == "--data"


def test_a_target_without_a_template_takes_no_chats(tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", make_target(tmp_path / "target", chat=False)
    path.write_text("\n".join(map(json.dumps, CHATS)), encoding="utf-8")
    with pytest.raises(InvalidField, match=r"--data: chat=.*the target's chat template: .*chat_template"):
        record_answers([f"chat={path}"], folder, tmp_path / "lessons", AnswerPlan(tokens=256))
    assert not list((tmp_path / "lessons").glob("*.safetensors"))


def test_progress_stays_within_its_total_and_counts_the_rate_of_this_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    told, deadline = "", time.monotonic() + 20
    with progress.Progress("tokens") as shown:
        shown.say("working")
        shown.reach(2_000, 3_000)
        shown.reach(2_001, 3_000)
        while "tokens/s" not in told and time.monotonic() < deadline:
            told += capsys.readouterr().out
        shown.reach(3_072, 3_000)
        while "3000 of" not in told and time.monotonic() < deadline:
            told += capsys.readouterr().out
    assert re.search(r"working: 2001 of 3000 tokens, .*tokens/s", told)
    assert "3072" not in told


@pytest.mark.parametrize(
    ("texts", "warns"), [({}, False), ({"chat": [0.02, 0.0]}, True), ({"chat": [0.0], "code": [0.5, 0.5]}, False)]
)
def test_a_head_that_does_not_pay_is_warned_of(texts: dict[str, list[float]], warns: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"acceptance": {"texts": texts}}))
    assert warning_of(tmp_path) == ("expected tau 1.02: drafting with it costs time" if warns else "")
    assert warning_of(tmp_path / "nowhere") == ""
