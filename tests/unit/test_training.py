"""What heads learn from and how: data rules, the order of reading, the optimiser, recorded chats."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.config.model import read_tokenizer, warning_of
from coppice.errors import InvalidField
from coppice.training.answers import AnswerPlan, draw, record_answers, repeats
from coppice.training.data import MAX_EPOCHS, Domain, Reader, is_held_out, read_corpora
from coppice.training.trainer import Muon, Recipe
from tests.tiny import make_target


def test_documents_whose_hash_is_a_multiple_of_20_are_held_out_and_questions_become_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n}"} for n in range(200)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (corpus,) = read_corpora([f"sums={path}:0.5"])
    assert "Question: What is 7 + 1?\nAnswer: It is 8.\n#### 7" in corpus.train + corpus.held_out
    assert corpus.held_out
    assert all(map(is_held_out, corpus.held_out))
    assert not any(map(is_held_out, corpus.train))
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
        read_corpora([line])
    assert caught.value.field == "--data"
    assert "words" in str(caught.value)


def test_no_corpus_is_read_more_than_eight_times_and_weights_share_the_rows() -> None:
    ids = np.arange(1000)
    reader = Reader([Domain("small", 0.5, ids[:150], ids[:0]), Domain("large", 0.5, ids, ids[:0])], seed=1, block=32)
    for _ in range(20):
        reader.next_row(32)
    assert reader.drawn["small"] == reader.drawn["large"] == 320
    while reader.next_row(16) is not None:
        pass
    assert {name: drawn / reader.usable[name] for name, drawn in reader.drawn.items()} == dict.fromkeys(
        ("small", "large"), MAX_EPOCHS
    )


def test_an_epoch_reads_every_window_once() -> None:
    ids = np.arange(1001)
    reader = Reader([Domain("all", 1.0, ids, ids[:0])], seed=1, block=20)
    rows = [row.tolist() for row in (reader.next_row(20) for _ in range(50)) if row is not None]
    assert sorted(rows) == [list(range(start, start + 21)) for start in range(0, 1000, 20)]
    assert rows != sorted(rows)


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


def test_the_rate_rises_and_falls_to_zero_and_the_last_rows_are_long() -> None:
    recipe = Recipe(tokens=1_000_000)
    rates = [recipe.rate(seen) for seen in (0, 20_000, 500_000, 1_000_000)]
    assert rates[0] < 0.1
    assert rates[1:] == pytest.approx([1, 0.5, 0], abs=0.01)
    assert [recipe.shape(seen) for seen in (0, 900_000)] == [(2, 256), (1, 512)]


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
    plan = AnswerPlan(tokens=2048, length=128)
    answers = record_answers([f"chat={path}"], folder, tmp_path / "lessons", plan)
    tokenizer = read_tokenizer(folder)
    prompts = {f"user: say {n}\nassistant:" for n in range(60)}
    prompts |= {f"system: be short\nuser: first {n}\nassistant:" for n in range(60)}
    ends = {f"assistant: an answer\nuser: second {n}\nassistant:" for n in range(60)}
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in answers.ids().view(-1, 128).tolist()]
    assert all(re.match(r".*\nassistant:(?! an answer\nuser)", text, re.DOTALL) for text in texts)
    found = [next((p for p in prompts if text.startswith(p)), "") for text in texts]
    later = [text for text in texts if any(end in text[:128] for end in ends)]
    assert len(set(found)) > 5
    assert later
    assert "no" not in {text[len(prompt) :].strip() for text, prompt in zip(texts, found, strict=True)}
    (corpus,) = read_corpora([f"chat={path}"], lambda messages: "|".join(m["content"] for m in messages))
    assert len(corpus.train) + len(corpus.held_out) == 60 + 2 * 60
    held = {text.split("|")[1] for text in corpus.held_out if "|" in text}
    assert held
    assert not held & {text.split("|")[1] for text in corpus.train if "|" in text}


@pytest.mark.parametrize("chat", [True, False])
def test_the_end_of_a_long_prompt_is_read_and_no_more_than_half_a_text(chat: bool, tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", make_target(tmp_path / "target")
    rows: list[object] = [{"messages": [{"role": "user", "content": f"{'long ' * 50}{n}"}]} for n in range(60)]
    if not chat:
        rows = [{"prompt": f"{'long ' * 50}{n}\nassistant: "} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    plan = AnswerPlan(tokens=256, length=64)
    answers = record_answers([f"chat={path}"], folder, tmp_path / "lessons", plan)
    begun = [read_tokenizer(folder).decode(ids[:32]) for ids in answers.ids().view(4, 64).tolist()]
    assert all(re.search(rf"long \d+\nassistant:{'' if chat else ' '}$", text) for text in begun), begun


@pytest.mark.parametrize("vocabulary", [7, 96, 1000])
def test_what_is_drawn_has_the_law_of_its_temperature(vocabulary: int) -> None:
    noise = torch.Generator().manual_seed(vocabulary)
    logits, draws = 2 * torch.randn(1, vocabulary, generator=noise), 20_000
    for heat in (1.0, 0.7):
        drawn = draw(logits.repeat(draws, 1), torch.tensor([heat, 0.0]).repeat(draws // 2), noise).view(-1, 2)
        law = (logits[0] / heat).softmax(-1)
        found = torch.bincount(drawn[:, 0], minlength=vocabulary) / len(drawn)
        assert (law - found).abs().sum() < 1.3 * (2 / torch.pi * law * (1 - law) / len(drawn)).sqrt().sum() + 0.01
        assert (drawn[:, 1] == logits.argmax()).all()


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([5] * 49, True),
        ([5] * 48, False),
        ([*range(48)] * 3, True),
        ([*range(48)] * 2, False),
        ([7, *[1, 2, 3] * 17], True),
        ([*[1, 2, 3] * 17, 7], False),
        ([*range(49)] * 3, False),
        ([], False),
    ],
)
def test_an_answer_that_repeats_itself_is_noticed(ids: list[int], loops: bool) -> None:
    assert repeats(ids) is loops


def test_a_data_set_is_read_by_its_own_package_and_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, CHATS[:60])), encoding="utf-8")
    line = f"chat=hf:{tmp_path}:train"
    with pytest.raises(InvalidField, match=r"'chat=hf:ORG/NAME': expected hf:ORG/NAME:SPLIT"):
        read_corpora(["chat=hf:ORG/NAME"])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        with pytest.raises(InvalidField, match=r"by the package datasets: pip install datasets$"):
            read_corpora([line])
    pytest.importorskip("datasets")
    (corpus,) = read_corpora([f"{line}:0.5"], lambda messages: "|".join(m["content"] for m in messages))
    assert (corpus.kind, corpus.weight, corpus.public) == ("chats", 0.5, f"{line}:0.5")
    assert sorted(corpus.train + corpus.held_out) == sorted(f"say {n}" for n in range(60))
    with pytest.raises(InvalidField, match=rf"--data: chat=hf:{tmp_path}:test: \w+: .*split"):
        read_corpora([f"chat=hf:{tmp_path}:test"])


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
        ([{"text": "words"}, {"prompt": "say "}], None, "holds texts and prompts"),
        ([{"nothing": 1}], str, "none of the fields messages, conversations, text"),
        ([{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": 3}], str, "line 2: field 'answer'"),
    ],
)
def test_chats_that_cannot_be_used_are_errors_that_name_the_place(
    rows: list[object], render: object, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(InvalidField, match=why) as caught:
        read_corpora([f"words={path}"], render)
    assert caught.value.field == "--data"


@pytest.mark.parametrize(
    ("texts", "warns"), [({}, False), ({"chat": [0.02, 0.0]}, True), ({"chat": [0.0], "code": [0.5, 0.5]}, False)]
)
def test_a_head_that_does_not_pay_is_warned_of(texts: dict[str, list[float]], warns: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"acceptance": {"texts": texts}}))
    assert warning_of(tmp_path) == ("expected tau 1.02: drafting with it costs time" if warns else "")
    assert warning_of(tmp_path / "nowhere") == ""
