"""Every message survives its bytes, every field is sent and bounded, and every bound refuses by the field's name."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from coppice import limits
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from coppice.wire import drafter, generation, verifier
from coppice.wire.codec import CODECS, Among, AsLongAs, Conversion, Length, Within
from coppice.wire.common import FeatureRef, Features, Fence, Grammar, Rejection, Row, TopLogProbs, committed_hash
from coppice.wire.drafter import Advance, DraftStep, OpenDraft, TreeDelta
from coppice.wire.generation import ChatMessage, Chunk, Finished, GenerationRequest, Origin, StepTree, Timings
from coppice.wire.verifier import Commit, NextRoot, OpenSession, SessionOpened, Verdict, VerifyStep, VerifyTimings

VOCAB, MAX_LEN = 100, 512
FENCE = Fence(7, 12, committed_hash([1, 2, 3]), weights_version=2**53 - 1, deadline_ns=5 * 10**8)
PENALTIES: Any = {"repetition_penalty": 1.3, "frequency_penalty": -0.5, "presence_penalty": 0.75}
DRAWS: Any = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "logit_bias": {99: -100.0, 3: 2.5}}
SAMPLING = SamplingParams(**PENALTIES, **DRAWS, seed=2**64 - 1)
WEIGHTS = drafter.WeightsHeader("code", 2**40, 2**39, bytes(32), b"\1" * 32)
TREE = DraftTree(np.array([5, 6, 7]), np.array([0, 1, 1]), np.array([-0.5, -1.0, -2.5], np.float32))
ROW = Row(np.array([3, 9]), np.array([math.log(0.3), math.log(0.7)]), np.array([-2.5, -0.25], np.float32))
REJECTION = Rejection(14, 2, 9)
TOP = TopLogProbs(np.array([9, 4]), np.array([-0.25, -3.0], np.float32))
REF = FeatureRef("127.0.0.1:50052", "session-1", 3, 9, (4, 2))
INLINE = Features(10, 2, "bfloat16", inline=bytes(range(24)))
BY_REF = Features(3, 9, "float32", ref=REF)
COMMIT = Commit(FENCE, (5, 99), 0, INLINE)  # of the positions 10 and 11
Q_ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
TIMES = VerifyTimings(1, 2, 3, 4, 5, 6, 7)
GRAMMAR = Grammar("json", "{}")
CALLS = ChatMessage("assistant", "", "so", "bob", "[{}]"), ChatMessage("tool", "", tool_call_id="c")
CHAT = (ChatMessage("system", "be short"), ChatMessage("user", "hé"), *CALLS)
ASKED: Any = {"include_stop": True, "keep_special_tokens": True, "want_prompt_ids": True, "stop_token_ids": (7, 99)}
ASKED |= {"ignore_eos": True, "want_log_probs": True, "want_trees": True, "want_prompt_log_probs": True, "pq": True}
LENGTHS: Any = {"max_new_tokens": 9, "top_log_probs": 20, "min_tokens": 4, "budget": 0}
IDS: Any = {"ids": (1, 2), "resume_ids": (3, 4), "prediction_ids": (5, 99)}
REQUEST = GenerationRequest(
    **IDS, sampling=SAMPLING, stop=("\n", "end"), policy="single:a", coupled=False, **LENGTHS, **ASKED
)
TIMINGS = Timings(*range(1, 11), step_ns=[10, 11], split_ns=[1, 2])
STEP_TREE = StepTree(3, (4, 5), (0, 1), (-0.5, -1.0), (1, 2), ("a", "b"), (1,), "r", (3, 1), (2,), 0, 5, 2**40)
OTHER_TREE = StepTree(3, (6,), (0,), (-0.25,), (1,), ("c",), (), "r", (2,), routed=1)

Read = Callable[[Any], object]


def read_verify(message: Message) -> Any:
    return verifier.read_verify_request(message, VOCAB, MAX_LEN)


def read_request(message: Message) -> Any:
    return generation.read_request(message, VOCAB, Limits())


VERIFY = verifier.verify_request_to_wire, read_verify
VERDICT = verifier.verify_response_to_wire, verifier.read_verify_response
FOLLOW = verifier.fetch_to_wire, verifier.read_fetch
FED = (
    lambda item: verifier_pb2.FetchFeaturesResponse.FromString(b"".join(verifier.fed_to_wire(item))),
    lambda message: verifier.read_fed(message, VOCAB),
)
DRAFT = drafter.draft_request_to_wire, lambda message: drafter.read_draft_request(message, VOCAB)
DELTA = drafter.draft_response_to_wire, drafter.read_draft_response
PUSH = drafter.weights_to_wire, drafter.read_weights
ASK = generation.request_to_wire, read_request
ANSWER = generation.response_to_wire, generation.read_response

# Values with every field away from its default; where a field is a choice, one for each.
SAMPLES: dict[str, tuple[Any, Callable[[Any], Message], Read]] = {
    "open session": (
        OpenSession(
            "s.1", [1, 2, 99], SAMPLING, frozenset({0, 7}), 20, (2, 3), True, 2, 20, True, 9, "0" * 64, GRAMMAR
        ),
        *VERIFY,
    ),
    "verify step": (VerifyStep(FENCE, 99, TREE, Q_ROWS, True), *VERIFY),
    "verify step without q rows": (VerifyStep(FENCE, 0, TREE), *VERIFY),
    "verify step without a tree": (VerifyStep(FENCE, 4, DraftTree.empty()), *VERIFY),
    "opened": (SessionOpened(FENCE, NextRoot(ROW), BY_REF, TIMES, (TOP,), (-0.5, -2.0), (TOP, TOP), 32), *VERDICT),
    "opened without raw log-probs": (
        SessionOpened(FENCE, NextRoot(replace(ROW, raw_log_probs=None)), None, TIMES, forced=(5, 99)),
        *VERDICT,
    ),
    "verdict": (
        Verdict(FENCE, (1, 3), NextRoot(None, 17, -0.5), TIMES, (1, 3, 4), (-0.5, -1.5), True, 0, (TOP,) * 3, (5,)),
        *VERDICT,
    ),
    "verdict of a text that ended": (Verdict(FENCE, (), None, TIMES), *VERDICT),
    "follow": (replace(REF, count=0), *FOLLOW),
    "follow from": (REF, *FOLLOW),
    "feature part": (INLINE, *FED),
    "commit": (COMMIT, *FED),
    "commit of a text that ended": (Commit(FENCE, (5,)), *FED),
    "target": (
        verifier.TargetDescription(
            *("t", 100, 512, 6, 32, (0, 7), "bfloat16", 2**40, 2**39, 3, 2**33, 2**32),
            *(1.05, bytes(32), 2**38, bytes(32)),
        ),
        *(verifier.target_to_wire, verifier.read_target),
    ),
    "open draft": (OpenDraft("s", [1, 2], SAMPLING, True, BY_REF, True, True, (7, 99), "0" * 64), *DRAFT),
    "uncoupled open draft": (OpenDraft("s", [1], SamplingParams(), False), *DRAFT),
    "draft step": (DraftStep(FENCE, 99, 64, Advance([4, 5], BY_REF, REJECTION)), *DRAFT),
    "draft step without news": (DraftStep(FENCE, 1, 0, Advance()), *DRAFT),
    "weights header": (WEIGHTS, *PUSH),
    "weights part": (drafter.WeightsPart(b"abc"), *PUSH),
    "weights synced": (drafter.WeightsSynced(7, bytes(32), 9), drafter.synced_to_wire, drafter.read_synced),
    "delta": (TreeDelta(FENCE, TREE, True, 8, 9, Q_ROWS, 0.5, (3, 0, limits.MAX_CONTEXT), (2, 0, 1)), *DELTA),
    "empty delta": (TreeDelta(FENCE, DraftTree.empty(), False), *DELTA),
    "draft opened": (drafter.DraftOpened(limits.MAX_VERSION, 4, 8, (0.5, -1.0)), *DELTA),
    "head": (
        drafter.HeadDescription("a", "lm", 100, 2**52, (2, 3), 4, 5, 6, bytes(32), (0.5, 0.25), bytes(32)),
        *(drafter.head_to_wire, drafter.read_head),
    ),
    "request of ids": (REQUEST, *ASK),
    "request of text": (GenerationRequest(text="hé", prediction_text="ja"), *ASK),
    "request of a chat": (GenerationRequest(chat=CHAT, budget=256, template_arguments="{}", grammar=GRAMMAR), *ASK),
    "started": (
        generation.Started(3, "route", ("a", "b"), 31, 2**64 - 1, (5, 6, 7), (-0.5, -1.0), (TOP, TOP)),
        *ANSWER,
    ),
    "chunk": (Chunk("hé!", (1, 2), (Origin.DRAFT, Origin.ROOT), ("h", "é!"), (-0.5, -2.0), None, (TOP, TOP)), *ANSWER),
    "chunk with its tree": (Chunk("", (1,), (Origin.ROOT,), ("",), (), STEP_TREE, (), (OTHER_TREE,)), *ANSWER),
    "finished": (Finished("stop", 3, 4, [1, 2], [-2, 0], [5, 31], 1, 2, TIMINGS, 7, 8, 2), *ANSWER),
    "model": (
        generation.ModelDescription("t", 9, 512, ("a",), ("plain", "x"), "route", 31, True, True, 4, "0.1", 1.05),
        *(generation.model_to_wire, generation.read_model),
    ),
}
SENT = {name: write(value) for name, (value, write, _) in SAMPLES.items()}


def plain(value: object) -> object:
    """Something that compares by value: arrays with their dtype, trees and records as tuples."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(plain(getattr(value, part.name)) for part in dataclasses.fields(value)))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def through_bytes(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_survives_its_bytes(name: str) -> None:
    value, _, read = SAMPLES[name]
    assert plain(read(through_bytes(SENT[name]))) == plain(value)


def parts_of(message: Message) -> Iterator[Message]:
    """A message and those inside it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                yield from parts_of(part)


MESSAGES = [
    message
    for file in (common_pb2, drafter_pb2, generation_pb2, verifier_pb2)
    for message in file.DESCRIPTOR.message_types_by_name.values()
    if message.name not in ("Frame", "Item", "End")  # of links
]
PARTS = [part for sent in SENT.values() for part in parts_of(through_bytes(sent))]
EXAMPLES = {part.DESCRIPTOR.full_name: part for part in PARTS}
"""a good message of each kind"""


def test_every_field_of_the_contract_is_sent_by_a_sample() -> None:
    sent = {field.full_name for part in PARTS for field, _ in part.ListFields()}
    declared = {
        field.full_name for message in MESSAGES for field in message.fields if not field.GetOptions().deprecated
    }
    assert declared - sent == set()


def test_the_hash_rolls_and_is_fnv_1a_over_little_endian_words() -> None:
    def slow(ids: list[int]) -> int:
        state = 0xCBF29CE484222325
        for token in ids:
            for shift in (0, 8, 16, 24):
                state = (state ^ token >> shift & 255) * 0x100000001B3 % 2**64
        return state

    ids = [0, 1, 255, 256, 2**31, 2**32 - 1]
    assert committed_hash(ids) == slow(ids) == committed_hash(ids[2:], committed_hash(ids[:2]))
    assert committed_hash([]) == slow([])


# Bounds, generated from the descriptors and the annotations of the plain values.

NAN, INF = math.nan, math.inf
MANY = [1] * (limits.MAX_CONTEXT + 1)

BY_HAND = {"Sampling", "Tree", "TokenIds", "Chat"}
"""Messages that are read by hand: REFUSED below has what they refuse"""
OF_THE_WHOLE_MESSAGE = {"Started", "Chunk", "StepTree", "Finished", "GenerateTimings", "DescribeModelResponse"}
"""Answers of a server that the client chose: the bytes of the message are their bound"""
ELSEWHERE = {
    # any value means something, or is compared with the one that is right
    *("Fence.committed_hash", "OpenSession.stop_ids", "OpenSession.feature_layers"),
    # below the vocabulary's width
    *("OpenSession.ids", "OpenDraft.ids", "OpenDraft.prediction", "Advance.ids", "GenerateRequest.resume_ids"),
    *("VerifyStep.root", "DraftStep.root", "Commit.ids"),
    # by other fields, or by the deployment's limits
    *("OpenSession.max_len", "OpenSession.prompt_tokens", "OpenSession.min_len", "VerifyStep.q_rows"),
    *("TreeDelta.q_rows", "Features.inline", "GenerateRequest.text"),
    *("GenerateRequest.prediction_text", "GenerateRequest.max_new_tokens", "GenerateRequest.accept_rule"),
    *("ChatMessage.content", "ChatMessage.name", "ChatMessage.reasoning_content"),
    *("ChatMessage.tool_calls", "ChatMessage.tool_call_id"),
}
"""Fields whose bound is no annotation"""
NOT_NUMBERS = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_BOOL)


def notes_of(field: FieldDescriptor) -> list[Any]:
    codec = CODECS.get(field.containing_type.full_name)
    return codec.notes.get(field.name, []) if codec else []


def is_bounded(field: FieldDescriptor) -> bool:
    """Whether annotations bound a field's length, if it has one, and its numbers, if it holds any."""
    has_length = field.is_repeated or field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    has_numbers = field.cpp_type not in NOT_NUMBERS
    bounds_numbers = any(isinstance(note, Within) for note in notes_of(field))
    bounds_length = any(not isinstance(note, Within | Conversion) for note in notes_of(field))
    return (bounds_length or not has_length) and (bounds_numbers or not has_numbers)


def test_every_field_is_bounded() -> None:
    unbounded = {
        f"{message.name}.{field.name}"
        for message in MESSAGES
        if message.name not in BY_HAND | OF_THE_WHOLE_MESSAGE
        for field in message.fields
        if not (field.GetOptions().deprecated or is_bounded(field))
    }
    assert unbounded == ELSEWHERE


def set_field(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Give a field a value in place of what it has; of a repeated field of messages, so many empty ones."""
    message.ClearField(field.name)
    if field.is_repeated and field.message_type is not None:
        for _ in value:
            getattr(message, field.name).add()
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


def values_at(field: FieldDescriptor, note: Any, example: Any) -> tuple[list[Any], list[Any]]:
    """Values of a field that a note just admits, and values that it does not."""
    is_text = field.type in (field.TYPE_STRING, field.TYPE_BYTES)
    match note:
        case Within(low, high) if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            good, bad = [high - abs(high) / 100], [high + abs(high) / 100 + 0.01, NAN]
            bad += [low - abs(low) / 100 - 0.01] if low > -INF else []
            return ([], [[value] for value in bad]) if field.is_repeated else (good, bad)
        case Within(low, high):
            bad = [int(high) + 1, int(low) - 1]
            return ([], [[value] for value in bad]) if field.is_repeated else ([int(low), int(high)], bad)
        case Length(low, high):
            one: Any = ("x" if field.type == field.TYPE_STRING else b"x") if is_text else [1]
            one = [one] if is_text and field.is_repeated else one
            return ([] if field.is_repeated else [one * high]), [one * (high + 1), *([one * (low - 1)] if low else [])]
        case AsLongAs(longest):
            return [], [["x" if is_text else 0] * (len(getattr(example, longest)) + 1)]
        case Among(choices):
            return list(choices), ["none of them"]
        case limits.check_session:
            return ["a" * 64, "a_.-"], ["", "a" * 65, "no spaces", "line\n"]
        case Conversion():
            return [], []
    raise AssertionError(f"no values are known for {note}")


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_bound_admits_its_ends_and_refuses_what_is_beyond_by_the_fields_name(name: str) -> None:
    codec = CODECS[name]
    example = EXAMPLES.get(name, codec.message())

    def refusal(field: FieldDescriptor, value: Any) -> InvalidField | None:
        message = type(example)()
        message.CopyFrom(example)
        set_field(message, field, value)
        try:
            codec.read(message, "path.")
        except InvalidField as error:
            return error
        return None

    for field in codec.message.DESCRIPTOR.fields:
        for note in notes_of(field):
            good, bad = values_at(field, note, example)
            for value in good:
                with contextlib.suppress(ValueError):  # it does not fit into the field
                    error = refusal(field, value)
                    assert error is None or error.field != f"path.{field.name}", (field.name, value, str(error))
            for value in bad:
                with contextlib.suppress(ValueError):
                    error = refusal(field, value)
                    assert error is not None, (field.name, value)
                    assert error.field == f"path.{field.name}", value
                    assert len(str(error)) < 300  # what was sent is not echoed at length


# What is refused beyond that: of a good message one field is made bad. Sample, path of the field, value, field named.


def tree_of(count: int) -> common_pb2.Tree:
    return common_pb2.Tree(tokens=[1] * count, parents=[0] * count, log_probs=[-1.0] * count)


BY_REFERENCE = common_pb2.FeatureRef(session="s", count=1)
LONG = "x" * ((1 << 20) + 1)
HALF = generation_pb2.ChatMessage(role="user", reasoning_content="x" * (1 << 19), name="x" * (1 << 19))
REFUSED: list[tuple[str, str, Any, str]] = [
    ("open session", "open.ids", [VOCAB], "open.ids"),
    ("open session", "open.ids", [1] * MAX_LEN, "open.ids"),
    *(("open session", "open.sampling.temperature", value, "sampling.temperature") for value in (-0.1, 10.5, NAN)),
    ("open session", "open.sampling.top_p", 0.0, "sampling.top_p"),
    *(
        ("open session", "open.sampling.logit_bias", bias, "sampling.logit_bias")
        for bias in ({VOCAB: 1.0}, {1: NAN}, dict.fromkeys(range(1025), 1.0))
    ),
    ("open session", "open.prompt_tokens", 4, "open.prompt_tokens"),
    ("open session", "open.max_len", 3, "open.max_len"),
    ("open session", "open.max_len", MAX_LEN + 1, "open.max_len"),
    ("open session", "open.min_len", 21, "open.min_len"),
    ("verify step", "step.root", VOCAB, "step.root"),
    ("verify step", "step.tree", tree_of(257), "step.tree.tokens"),
    ("verify step", "step.tree.tokens", [1, 2], "step.tree"),
    ("verify step", "step.tree.parents", [0], "step.tree"),
    ("verify step", "step.tree.log_probs", [], "step.tree"),
    ("verify step", "step.q_rows", b"12345", "step.q_rows"),
    ("verify step", "step.q_rows", bytes(4 * 4), "step.q_rows"),
    ("verify step without a tree", "step.q_rows", bytes(4), "step.q_rows"),
    ("verify step", "step.fence.deadline_ns", -1, "fence.deadline_ns"),
    ("opened", "opened.next", None, "next"),
    ("opened", "opened.next.row", None, "next"),
    ("opened", "opened.features.ref.session", "", "opened.features.ref.session"),
    ("verdict", "verdict", None, "kind"),
    ("commit", "commit.ids", [VOCAB, 1], "commit.ids"),
    ("commit", "commit.root", VOCAB, "commit.root"),
    ("commit", "commit.fence.committed_len", 1, "commit.fence.committed_len"),
    ("commit", "features.start", 0, "features"),
    ("commit", "features.ref", BY_REFERENCE, "features"),
    ("feature part", "features", None, "features"),
    ("feature part", "features.inline", bytes(limits.CHUNK_BYTES + 1), "features.inline"),
    ("feature part", "features.ref", BY_REFERENCE, "features"),
    ("open draft", "open.ids", [VOCAB], "open.ids"),
    ("open draft", "open.prediction", [VOCAB], "open.prediction"),
    ("open draft", "open.features.inline", b"1234", "open.features"),
    ("draft step", "step.advance.features.inline", b"1234", "step.advance.features"),
    ("draft step", "step.root", VOCAB, "step.root"),
    ("draft step", "step.advance.ids", [VOCAB], "step.advance.ids"),
    ("delta", "delta.q_rows", b"123", "delta.q_rows"),
    ("delta", "delta.predicted", [1], "delta.predicted"),
    ("delta", "delta.made", [200], "delta.made"),
    *(("request of ids", f"{name}.ids", MANY, name) for name in ("ids", "prediction_ids")),
    ("request of ids", "ids.ids", [], "ids"),
    ("request of ids", "ids.ids", [VOCAB], "ids"),
    ("request of ids", "ids", None, "prompt"),
    ("request of ids", "resume_ids", [VOCAB], "resume_ids"),
    ("request of ids", "sampling.seed", None, "sampling.seed"),
    ("request of ids", "prediction_ids.ids", [VOCAB], "prediction"),
    ("request of ids", "stop_token_ids", [VOCAB], "stop_token_ids"),
    ("request of ids", "stop_token_ids", [1] * 65, "stop_token_ids"),
    ("request of a chat", "template_arguments", LONG, "template_arguments"),
    ("request of ids", "max_new_tokens", 4097, "max_new_tokens"),
    ("request of ids", "stop", ["x" * 257], "stop"),
    ("request of ids", "stop", [""], "stop"),
    ("request of ids", "accept_rule", 7, "accept_rule"),
    ("request of text", "prediction_text", LONG, "prediction"),
    ("request of text", "text", "", "text"),
    ("request of text", "text", LONG, "text"),
    ("request of a chat", "chat.messages", [], "chat.messages"),
    ("request of a chat", "chat.messages", [HALF] * 2, "chat.messages"),
    ("request of a chat", "chat.messages", [generation_pb2.ChatMessage(role="user")] * 257, "chat.messages"),
    ("request of a chat", "chat.messages", [generation_pb2.ChatMessage(role="root")], "chat.messages.role"),
    ("chunk with its tree", "chunk.tree.parents", [0, 2], "chunk.tree.parents"),
    ("chunk with its tree", "chunk.tree.accepted", [3], "chunk.tree.accepted"),
    ("chunk with its tree", "chunk.tree.cut", [0], "chunk.tree.cut"),
    ("finished", "finished.finish_reason", 0, "finished.finish_reason"),
]


def changed(message: Message, path: str, value: Any) -> Any:
    """A copy with one field set to a value; None clears it."""
    message = through_bytes(message)
    *outer, name = path.split(".")
    owner: Any = message
    for part in outer:
        owner = getattr(owner, part)
    owner.ClearField(name)
    if isinstance(value, list):
        getattr(owner, name).extend(value)
    elif isinstance(value, dict):
        getattr(owner, name).update(value)
    elif isinstance(value, Message):
        getattr(owner, name).CopyFrom(value)
    elif value is not None:
        setattr(owner, name, value)
    return message


@pytest.mark.parametrize(("sample", "path", "value", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_by_its_fields_name(sample: str, path: str, value: Any, named: str) -> None:
    read = SAMPLES[sample][2]
    with pytest.raises(InvalidField) as refused:
        read(changed(SENT[sample], path, value))
    assert refused.value.field == named
    assert len(str(refused.value)) < 300  # what was sent is not echoed at length


def test_a_request_needs_exactly_one_prompt() -> None:
    for request in (GenerationRequest(), GenerationRequest(text="x", ids=(1,)), GenerationRequest(ids=(1,), chat=CHAT)):
        with pytest.raises(InvalidField, match="exactly one"):
            generation.request_to_wire(request)


def test_unset_sampling_is_greedy_and_a_seed_of_0_is_not_an_unset_one() -> None:
    for sampling, is_set in ((SamplingParams(seed=0), True), (SamplingParams(), False)):
        message = through_bytes(generation.request_to_wire(GenerationRequest(text="x", sampling=sampling)))
        assert message.sampling.HasField("seed") == is_set
        assert ("seed" in read_request(message).sampling.model_fields_set) == is_set
    assert read_request(generation_pb2.GenerateRequest(text="x")).sampling == SamplingParams()
    opened = read_verify(verifier_pb2.VerifyRequest(open={"session": "s", "ids": [1], "max_len": 2}))
    assert opened.sampling == SamplingParams()


def test_what_a_message_cannot_hold_is_refused_by_name() -> None:
    wide = SamplingParams().model_copy(update={"top_k": 1 << 32})
    for name, value in {"ids": (1 << 32,), "min_tokens": -1, "budget": 0.5, "policy": 5, "sampling": wide}.items():
        request: Any = replace(GenerationRequest(ids=(1,)), **{name: value})
        with pytest.raises(InvalidField) as refused:
            generation.request_to_wire(request)
        assert refused.value.field == name
