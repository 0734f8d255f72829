"""What heads learn from and how: data rules, the order of reading, the optimiser, recorded chats, blocks and losses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.config.model import read_tokenizer
from coppice.config.sections import TRAINED_KINDS, DrafterSettings
from coppice.engine.engine import default_feature_layers
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, with_tree_shape
from coppice.heads.checkpoints import TargetParts, load_head
from coppice.speculation.sampling import SamplingParams
from coppice.training import losses
from coppice.training.answers import Answer, TargetAnswers, draw, record_answers, repeats
from coppice.training.data import MAX_EPOCHS, DataError, Domain, Reader, is_held_out, read_corpora
from coppice.training.heads import Muon, build_student, head_config
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, SLOW, VOCAB, SlowEagle3, SlowMaskedBlock, Text, save_random


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


def test_a_bad_data_line_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for line, named in {
        "words": "NAME=GLOB",
        "words=a.txt:heavy": "WEIGHT",
        "words=a.txt:-1": "WEIGHT",
        "words=no-such-*.txt": "no-such-",
        "words=hf:ORG/NAME": "NAME=hf:ORG/NAME:SPLIT",
        "words=hf:ORG/NAME:train": "pip install datasets",
    }.items():
        with pytest.raises(InvalidField, match=re.escape(named)) as caught:
            read_corpora([line])
        assert (caught.value.field, "words" in str(caught.value)) == ("--data", True)


def test_no_corpus_is_read_more_than_eight_times_and_weights_share_the_rows() -> None:
    ids = np.arange(1000)
    reader = Reader([Domain("small", 0.5, ids[:150], ids[:0]), Domain("large", 0.5, ids, ids[:0])], seed=1, block=32)
    for _ in range(20):
        reader.next_row(32)
    assert reader.drawn["small"] == reader.drawn["large"] == 320
    while reader.next_row(16) is not None:
        pass
    assert all(drawn == MAX_EPOCHS * reader.usable[name] for name, drawn in reader.drawn.items())


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


TURNS = ("system", "be short"), ("human", "first"), ("gpt", "an answer"), ("human", "second"), ("gpt", "another one")
CHATS = [
    *(
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "no"}]}
        for n in range(60)
    ),
    *({"conversations": [{"from": who, "value": f"{said} {n}"} for who, said in TURNS]} for n in range(60)),
]


def test_a_chat_is_a_prompt_for_each_turn_of_its_user_which_the_target_answers(tmp_path: Path) -> None:
    path, folder = tmp_path / "chats.jsonl", make_target(tmp_path / "target")
    path.write_text("\n".join(map(json.dumps, CHATS)), encoding="utf-8")
    plan = {"tokens": 2048, "length": 128}
    answers = record_answers([f"chat={path}"], folder, tmp_path / "lessons", **plan)
    tokenizer = read_tokenizer(folder)
    prompts = {f"user: say {n}\nassistant:" for n in range(60)}
    prompts |= {f"system: be short {n}\nuser: first {n}\nassistant:" for n in range(60)}
    ends = {f"assistant: an answer {n}\nuser: second {n}\nassistant:" for n in range(60)}
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


@pytest.mark.parametrize("vocabulary", [7, 100])
def test_what_is_drawn_has_the_law_of_its_temperature(vocabulary: int) -> None:
    noise = torch.Generator().manual_seed(vocabulary)
    logits, draws = 2 * torch.randn(1, vocabulary, generator=noise), 10_000
    for heat in (1.0, 0.7):
        drawn = draw(logits.repeat(draws, 1), torch.tensor([heat, 0.0]).repeat(draws // 2), noise).view(-1, 2)
        law = (logits[0] / heat).softmax(-1)
        found = torch.bincount(drawn[:, 0], minlength=vocabulary) / len(drawn)
        assert (law - found).abs().sum() < 1.3 * (2 / torch.pi * law * (1 - law) / len(drawn)).sqrt().sum() + 0.01
        assert (drawn[:, 1] == logits.argmax()).all()


def test_an_answer_that_repeats_itself_is_noticed() -> None:
    assert all(map(repeats, ([5] * 49, [*range(48)] * 3, [7, *[1, 2, 3] * 17])))
    assert not any(map(repeats, ([5] * 48, [*range(48)] * 2, [*[1, 2, 3] * 17, 7], [*range(49)] * 3, [])))


def refuse(messages: object) -> str:
    raise ValueError("roles must alternate\nhere")


@pytest.mark.parametrize(
    ("rows", "render", "why"),
    [
        ([{"messages": []}], str, "line 1: field 'messages' has no message of a user"),
        ([{"messages": "hello"}], str, "line 1: field 'messages' must be a list of messages"),
        ([{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}], str, "message 2 has no role"),
        (CHATS[:1], refuse, "words=.*: the target's chat template: roles must alternate$"),
        (CHATS[:1], None, "chats teach heads"),
        ([*CHATS[:1], {"text": "words"}], str, "holds chats and texts"),
        ([{"nothing": 1}], str, "none of the fields messages, conversations, text"),
        ([{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": 3}], str, "line 2: field 'answer'"),
    ],
)
def test_unusable_chats_are_errors_with_their_place(
    rows: list[object], render: object, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(InvalidField, match=why) as caught:
        read_corpora([f"words={path}"], render)
    assert caught.value.field == "--data"


# --- what a block sees in training is what it sees when it serves, and the losses say what heads would draft ---


WHOLE = losses.LOSSES["specblock"] | {"every": 1}
"""with later blocks behind every row"""
Lesson = tuple[losses.Student, losses.Teacher, Answer]
"""a student, its teacher, and some texts"""


def test_later_blocks_of_some_rows_are_those_of_all(specblock: Lesson) -> None:
    student, teacher, texts = specblock
    states: list[torch.Tensor] = []
    student.model.register_forward_hook(lambda module, args, out: states.append(out.detach()))
    losses.HeadLoss(teacher, **WHOLE)(student, texts)
    whole, first = list(states), int(texts.ids.sum()) % 3
    states.clear()
    losses.HeadLoss(teacher, **losses.LOSSES["specblock"])(student, texts)
    assert torch.equal(states[0], whole[0])
    for block in (1, 2):
        assert torch.allclose(states[block], whole[block][:, first::3], atol=1e-4)


@torch.no_grad()
def answer(folder: Path, head: torch.nn.Module) -> tuple[losses.Teacher, Answer]:
    """A teacher, and texts as Hugging Face's own forward reads them."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))
    out = model.model(input_ids=ids, output_hidden_states=True)
    layers = default_feature_layers(len(out.hidden_states) - 1)
    features = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
    draft_ids = torch.arange(head.config.draft_vocab_size) + head.d2t
    return losses.Teacher(TargetParts(folder).output, draft_ids), Answer(ids, features, out.last_hidden_state)


@pytest.fixture
def specblock(target: Path, tmp_path: Path) -> Lesson:
    """A random SpecBlock head, and what it learns from."""
    loaded = load_head("specblock", save_random(tmp_path, "specblock"), target)
    return losses.Student(loaded.model, loaded.embedding), *answer(target, loaded.model)


def trained_states(
    slow: Any, target: Path, fields: dict[str, Any]
) -> tuple[list[torch.Tensor], losses.Student, losses.Teacher, Answer]:
    """Every block's states in a loss of these fields, the student, its teacher, and the texts."""
    teacher, texts = answer(target, slow.model)
    states: list[torch.Tensor] = []
    slow.model.register_forward_hook(lambda module, args, out: states.append(out.detach()))
    student = losses.Student(slow.model, slow.embedding)
    assert losses.HeadLoss(teacher, **fields)(student, texts).item() > 0
    return list(states), student, teacher, texts


def check_last_block(states: list[torch.Tensor], slow: Any, text: Text, number: int, row: int) -> None:
    """A row's last block against the slow reference; `number` is the sum of the batch's ids."""
    job = DraftJob(0, text.ids[row + 1], row + 1, 8, SamplingParams())
    blocks, depth = [], 0
    for block, before in enumerate(states[:-1]):
        cut = 1 + (number + 7919 * block) % slow.slots
        depth += cut
        blocks.append((before[0, row, cut - 1], text.ids[row + 1 + depth], depth, cut))
    assert torch.allclose(states[-1][0, row], slow.states(text, 0, job, blocks), atol=1e-4)


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_training_computes_the_states_that_serving_does(kind: str, target: Path, tmp_path: Path) -> None:
    """Every row's last block, against the slow reference of the served head on the same prefix."""
    folder = save_random(tmp_path, kind, block_rope_advance=True)
    settings = with_tree_shape(DrafterSettings(kind=kind, path=str(folder), target=str(target)))
    slow = SLOW[kind](folder, target, settings)
    changes: dict[str, Any] = {"specblock": {"every": 1}, "eagle3": {"blocks": 3, "every": 1}}
    states, student, teacher, read = trained_states(slow, target, losses.LOSSES[kind] | changes.get(kind, {}))
    text = Text(read.ids[0].tolist(), read.features[0])
    for row in (0, 3, 6):
        job = DraftJob(0, text.ids[row + 1], row + 1, 8, SamplingParams())
        if isinstance(slow, SlowMaskedBlock):
            targets = replace(losses.Targets.of(read, teacher), rows=torch.tensor([0, 3, 6]))
            blocks = losses.block_states(student, read, targets)[0, row // 3]
            assert torch.allclose(slow.model.norm(blocks), slow.states(text, 0, job), atol=1e-4)
        elif isinstance(slow, SlowEagle3):
            path = [(states[step][0, row], text.ids[row + 2 + step]) for step in range(2)]
            assert torch.allclose(states[-1][0, row], slow.state(text, 0, job, path), atol=1e-4)
        else:
            check_last_block(states, slow, text, int(read.ids.sum()), row)


def check_learning(kind: str, target: Path, fields: dict[str, Any]) -> None:
    """Of texts that go round in a circle of 16 tokens, whose features say which one each is, a head learns the next."""
    parts = TargetParts(target)
    codes = torch.randn(VOCAB, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    strong = torch.nn.functional.normalize(parts.output, dim=-1)
    teacher = losses.Teacher(strong, torch.arange(VOCAB))
    config = head_config(kind, parts, draft_vocab_size=VOCAB)
    student = build_student(config, parts, torch.arange(VOCAB), seed=0)
    loss = losses.HeadLoss(teacher, **fields | {"every": 1})
    ids = (torch.arange(20)[None] + torch.arange(0, 16, 2)[:, None]) % 16
    texts = Answer(ids, codes[ids], 20 * strong[(ids + 1) % 16])
    untrained = losses.accepted_length(losses.measure(student, loss, texts))
    optimiser, course = torch.optim.AdamW(student.parameters(), lr=5e-3), []
    for _ in range(40):
        optimiser.zero_grad()
        course.append(loss(student, texts))
        course[-1].backward()
        optimiser.step()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in student.parameters())
    assert course[-1] < 0.5 * course[0]
    assert untrained < 2 < 4 < losses.accepted_length(losses.measure(student, loss, texts))


def test_a_head_learns_a_text_that_repeats(target: Path) -> None:
    check_learning("dspark", target, losses.LOSSES["dspark"])


def test_every_distance_falls_to_its_least_at_the_targets_distribution() -> None:
    draws = torch.Generator().manual_seed(1)
    taught = (2 * torch.randn(3, 20, generator=draws)).softmax(-1)
    for distance, share in ((losses.soft_loss, 0.0), (losses.l1_loss, 0.9)):
        away = torch.randn(3, 20, generator=draws)
        logits = (taught.log() + away).requires_grad_()
        loss = distance(logits, taught)
        assert loss > distance(taught.log(), taught)
        entropy, q = -(taught * logits.log_softmax(-1)).sum(-1).mean(), logits.softmax(-1)
        slow = (1 - share) * entropy + share * (taught - q).abs().sum(-1).mean()
        assert torch.allclose(loss, slow, atol=1e-6)
        gradients = (torch.autograd.grad(of, logits)[0] for of in (2 * loss, 2 * slow))
        assert torch.allclose(*gradients, atol=1e-6)
    assert torch.allclose(losses.overlap(taught.log(), taught), torch.ones(3))


def test_targets_are_the_tokens_behind(specblock: Lesson, target: Path) -> None:
    _, teacher, texts = specblock
    ids, targets = texts.ids, losses.Targets.of(texts, teacher)
    logits = LlamaForCausalLM.from_pretrained(target)(input_ids=ids).logits[..., teacher.draft_ids].softmax(-1)
    for offset in range(3):
        gold = targets.behind(offset)
        for row in range(ids.shape[1] - 1):
            inside = row + 2 + offset < ids.shape[1]
            wanted = int(teacher.draft_number[ids[0, row + 2 + offset]]) if inside else -1
            assert int(gold[0, row]) == wanted
        admitted = gold >= 0
        text, rows = admitted.nonzero(as_tuple=True)
        assert torch.allclose(targets.taught(admitted, offset), logits[text, rows + 1 + offset], atol=1e-4)


def test_the_valid_prefix_mask_admits_only_what_was_right_so_far(specblock: Lesson) -> None:
    student, teacher, texts = specblock

    def counts(masked: bool) -> list[tuple[int, int]]:
        """(rows, right ones) of each slot."""
        slots = losses.HeadLoss(teacher, **WHOLE).slots(student, texts, masked=masked)
        return [(len(slot.gold), int(slot.right.sum())) for slot in slots]

    masked, whole, slots = counts(True), counts(False), student.model.config.slots
    for place, (rows, _) in enumerate(masked):
        assert place % slots == 0 or rows <= masked[place - 1][1]
    assert whole[0] == masked[0]
    assert whole[3][0] > masked[3][0]


def test_gradients_reach_what_they_should(specblock: Lesson, target: Path, tmp_path: Path) -> None:
    student, teacher, texts = specblock
    losses.HeadLoss(teacher, **WHOLE)(student, texts).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in student.parameters())
    student.zero_grad()
    losses.HeadLoss(teacher, **WHOLE)(student, texts, share=0.0).backward()
    without = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    losses.HeadLoss(teacher, **WHOLE)(student, texts, share=losses.RANK_AFTER).backward()
    for name, p in student.named_parameters():
        if "rank_head" in name:
            assert name not in without or not without[name].any()
        else:
            assert torch.allclose(p.grad, without[name], atol=1e-6)  # equation 4: no rank gradient in the trunk
    eagle = load_head("eagle3", save_random(tmp_path / "e", "eagle3"), target)
    learner = losses.Student(eagle.model, eagle.embedding)
    losses.HeadLoss(teacher, **losses.LOSSES["eagle3"])(learner, texts).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in learner.parameters())


def test_answers_are_what_the_target_says_and_sees(tmp_path: Path) -> None:
    """Recorded ids, features and states against Hugging Face's own forward; recording goes on where it stopped."""
    folder = make_target(tmp_path / "target", layers=8, hidden=HIDDEN)
    text = tmp_path / "words.txt"
    words = ["the cat saw one red bird", "a dog ran", "two birds sang to the cat and the dog all day long"]
    text.write_text("<|endoftext|>".join(f"{word} {n}" for n in range(80) for word in words), encoding="utf-8")
    lines, plan = [f"words={text}"], {"tokens": 512, "length": 128}
    answers = record_answers(lines, folder, tmp_path / "lessons", **plan)
    (domain,) = answers.domains
    assert (len(domain.train), len(domain.held_out)) == (512, 512)
    model = LlamaForCausalLM.from_pretrained(folder)
    positions = torch.from_numpy(np.stack([domain.train[:128], domain.train[128:256]]))

    def checked(answers: TargetAnswers, layers: tuple[int, ...]) -> Answer:
        read = answers.read(positions)
        for ids, *states in zip(*read, strict=True):
            ends = [at + 1 for at in range(127) if not ids[at]]
            assert ends  # another prompt follows, which the target reads by itself
            for start, end in pairwise([0, *ends, 128]):
                out = model.model(input_ids=ids[None, start:end], output_hidden_states=True)
                features = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
                for recorded, state in zip(states, (features, out.last_hidden_state), strict=True):
                    assert torch.allclose(recorded[start:end], state[0], rtol=0.02, atol=0.02)
        return read

    read = checked(answers, default_feature_layers(8))
    end = read.ids[1].tolist().index(0)
    said = model(read.ids).logits[1].argmax(-1)  # the second text is greedy
    assert torch.equal(said[end - 21 : end - 1], read.ids[1, end - 20 : end])
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "lessons").glob("*.safetensors")}
    more = record_answers(lines, folder, tmp_path / "lessons", **plan | {"tokens": 1024})
    assert len(more.domains[0].train) == 1024
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "lessons").glob("*.safetensors")}
    assert before.items() < after.items()
    with pytest.raises(DataError, match=r"holds target answers made from .*'layers': \[2, 4, 5\].*'layers': \[5, 1\]"):
        record_answers(lines, folder, tmp_path / "lessons", **plan, layers=(5, 1))
    with pytest.raises(InvalidField, match=r"--layers: 8 is not among 0\.\.7"):
        record_answers(lines, folder, tmp_path / "other", **plan, layers=(8,))
