"""Every message survives its bytes, every field of the contract is sent, and every check names what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coppice import limits
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from coppice.wire import drafter, generation, verifier
from coppice.wire.common import FeatureRef, Features, Fence, Rejection, Row, TopLogProbs, committed_hash
from coppice.wire.drafter import (
    Advance,
    DraftOpened,
    DraftStep,
    HeadDescription,
    OpenDraft,
    TreeDelta,
    WeightsHeader,
    WeightsPart,
    WeightsSynced,
)
from coppice.wire.generation import (
    ChatMessage,
    Chunk,
    Finished,
    GenerationRequest,
    ModelDescription,
    Origin,
    Started,
    StepTree,
    Timings,
)
from coppice.wire.verifier import (
    Commit,
    NextRoot,
    OpenSession,
    SessionOpened,
    TargetDescription,
    Verdict,
    VerifyStep,
    VerifyTimings,
)

VOCAB, MAX_LEN = 100, 512
FENCE = Fence(7, 12, committed_hash([1, 2, 3]), weights_version=2**53 - 1, deadline_ns=5 * 10**8)
SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    repetition_penalty=1.3,
    frequency_penalty=-0.5,
    presence_penalty=0.75,
    logit_bias={99: -100.0, 3: 2.5},
    seed=2**64 - 1,
)
WEIGHTS = WeightsHeader("code", 2**40, 2**39, bytes(32), b"\1" * 32, b"\2" * 32, 2**31, 2048)
TREE = DraftTree(np.array([5, 6, 7]), np.array([0, 1, 1]), np.array([-0.5, -1.0, -2.5], np.float32))
ROW = Row(np.array([3, 9]), np.array([math.log(0.3), math.log(0.7)]), np.array([-2.5, -0.25], np.float32))
REJECTION = Rejection(14, 2, 9, np.array([9, 4]), np.array([-0.25, -3.0], np.float32), 0.125)
TOP = TopLogProbs(np.array([9, 4]), np.array([-0.25, -3.0], np.float32))
REF = FeatureRef("127.0.0.1:50052", "session-1", 3, 9, (4, 2))
INLINE = Features(10, 2, "bfloat16", inline=bytes(range(24)))
BY_REF = Features(3, 9, "float32", ref=REF)
COMMIT = Commit(FENCE, (5, 99), 0, INLINE)  # of the positions 10 and 11
Q_ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) + 1
TIMES = VerifyTimings(1, 2, 3, 4, 5, 6, 7)
CHAT = (ChatMessage("system", "be short"), ChatMessage("user", "hé"), ChatMessage("assistant", "", "so", "bob"))
REQUEST = GenerationRequest(
    ids=(1, 2),
    resume_ids=(3, 4),
    sampling=SAMPLING,
    max_new_tokens=9,
    stop=("\n", "end"),
    policy="single:a",
    budget=0,
    ignore_eos=True,
    want_log_probs=True,
    want_trees=True,
    top_log_probs=20,
    want_prompt_log_probs=True,
    min_tokens=4,
    pq=True,
    coupled=False,
    prediction_ids=(5, 99),
)
FINISHED = Finished(
    "stop",
    3,
    4,
    [1, 2],
    [-2, 0],
    [5, 31],
    1,
    2,
    Timings(*range(1, 11), step_ns=[10, 11], split_ns=[1, 2]),
    accepted_prediction_tokens=7,
    cached_tokens=2,
    rejected_prediction_tokens=8,
)

Read = Callable[[Any], object]


def read_verify(message: Message) -> object:
    return verifier.read_verify_request(message, VOCAB, MAX_LEN)


def follow_to_wire(ref: FeatureRef) -> Message:
    return verifier.fetch_to_wire(ref, follow=True)


def read_commit(message: Message) -> object:
    return verifier.read_commit(message, VOCAB)


def read_draft(message: Message) -> object:
    return drafter.read_draft_request(message, VOCAB)


def read_weights(message: Message) -> object:
    return drafter.read_weights(message, Limits().weights_bytes)


def read_request(message: Message) -> object:
    return generation.read_request(message, VOCAB, Limits())


Case = tuple[object, Callable[[Any], Message], Read]

# Samples with every field away from its default; where a field is a choice, one for each.
SAMPLES: dict[str, Case] = {
    "open session": (
        OpenSession("s.1", [1, 2, 99], SAMPLING, frozenset({0, 7}), 20, (2, 3), 64, True, 2, 20, True, 9, "0" * 64),
        verifier.verify_request_to_wire,
        read_verify,
    ),
    "verify step": (VerifyStep(FENCE, 99, TREE, Q_ROWS, True), verifier.verify_request_to_wire, read_verify),
    "verify step without q rows": (VerifyStep(FENCE, 0, TREE), verifier.verify_request_to_wire, read_verify),
    "verify step without a tree": (
        VerifyStep(FENCE, 4, DraftTree.empty()),
        verifier.verify_request_to_wire,
        read_verify,
    ),
    "opened": (
        SessionOpened(FENCE, NextRoot(ROW), BY_REF, TIMES, (TOP,), (-0.5, -2.0), (TOP, TOP), 32),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "opened with a row without raw log-probs": (
        SessionOpened(FENCE, NextRoot(dataclasses.replace(ROW, raw_log_probs=None)), None, TIMES),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "verdict": (
        Verdict(
            *(FENCE, (1, 3), NextRoot(None, 17, -0.5), TIMES, (1, 3, 4), REJECTION),
            *((-0.5, -1.5), True, 0, (TOP, TOP, TOP)),
        ),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "verdict of a text that ended": (
        Verdict(FENCE, (), None, TIMES),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "verdict with empty rejection lists": (
        Verdict(
            FENCE,
            (),
            NextRoot(ROW),
            TIMES,
            rejection=Rejection(3, 0, 1, np.empty(0, np.int64), np.empty(0, np.float32), 1.0),
        ),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "fetch": (REF, verifier.fetch_to_wire, verifier.read_fetch),
    "follow": (
        dataclasses.replace(REF, count=0),
        lambda ref: verifier.fetch_to_wire(ref, follow=True),
        verifier.read_fetch,
    ),
    "feature part": (INLINE, verifier.feature_part_to_wire, verifier.read_feature_part),
    "commit": (COMMIT, verifier.commit_to_wire, read_commit),
    "commit of a text that ended": (Commit(FENCE, (5,)), verifier.commit_to_wire, read_commit),
    "target": (
        TargetDescription(
            *("t", 100, 512, 6, 32, (0, 7), "bfloat16"),
            2**40,
            2**39,
            3,
            2**33,
            2**32,
            1.05,
            bytes(32),
            2**38,
            bytes(32),
        ),
        verifier.target_to_wire,
        verifier.read_target,
    ),
    "open draft": (
        OpenDraft("s", [1, 2], SAMPLING, True, BY_REF, True, True, (7, 99), "0" * 64),
        drafter.draft_request_to_wire,
        read_draft,
    ),
    "uncoupled open draft": (OpenDraft("s", [1], SamplingParams(), False), drafter.draft_request_to_wire, read_draft),
    "draft step": (
        DraftStep(FENCE, 99, 64, Advance([4, 5], INLINE, REJECTION)),
        drafter.draft_request_to_wire,
        read_draft,
    ),
    "draft step without news": (DraftStep(FENCE, 1, 0, Advance()), drafter.draft_request_to_wire, read_draft),
    "weights header": (WEIGHTS, drafter.weights_to_wire, read_weights),
    "weights part": (WeightsPart(3, b"abc"), drafter.weights_to_wire, read_weights),
    "weights synced": (WeightsSynced(7, bytes(32), 9), drafter.synced_to_wire, drafter.read_synced),
    "delta": (
        TreeDelta(FENCE, TREE, True, 8, 9, Q_ROWS, 0.5, (3, 0, limits.MAX_CONTEXT), (2, 0, 1)),
        drafter.draft_response_to_wire,
        drafter.read_draft_response,
    ),
    "empty delta": (
        TreeDelta(FENCE, DraftTree.empty(), False),
        drafter.draft_response_to_wire,
        drafter.read_draft_response,
    ),
    "draft opened": (
        DraftOpened(limits.MAX_VERSION, 4, 8, (0.5, -1.0)),
        drafter.draft_response_to_wire,
        drafter.read_draft_response,
    ),
    "head": (
        HeadDescription("a", "lm", 100, 2**52, (2, 3), 4, 5, 6, bytes(32), (0.5, 0.25), bytes(32)),
        drafter.head_to_wire,
        drafter.read_head,
    ),
    "request of ids": (REQUEST, generation.request_to_wire, read_request),
    "request of text": (GenerationRequest(text="hé", prediction_text="ja"), generation.request_to_wire, read_request),
    "request of a chat": (GenerationRequest(chat=CHAT, budget=256), generation.request_to_wire, read_request),
    "started": (
        Started(3, "route", ("a", "b"), 31, 2**64 - 1, (5, 6, 7), (-0.5, -1.0), (TOP, TOP)),
        generation.response_to_wire,
        generation.read_response,
    ),
    "chunk": (
        Chunk("hé!", (1, 2), (Origin.DRAFT, Origin.ROOT), ("h", "é!"), (-0.5, -2.0), None, (TOP, TOP)),
        generation.response_to_wire,
        generation.read_response,
    ),
    "chunk with its tree": (
        Chunk(
            "",
            (1,),
            (Origin.ROOT,),
            ("",),
            (),
            StepTree(3, (4, 5), (0, 1), (-0.5, -1.0), (1, 2), ("a", "b"), (1,), "r", (3, 1), (2,), 0, 5, 2**40),
            (),
            (StepTree(3, (6,), (0,), (-0.25,), (1,), ("c",), (), "r", (2,), routed=1),),
        ),
        generation.response_to_wire,
        generation.read_response,
    ),
    "finished": (FINISHED, generation.response_to_wire, generation.read_response),
    "model": (
        ModelDescription("t", 100, 512, ("a",), ("plain", "route"), "route", 31, True, True, 4, "0.1", 1.05),
        generation.model_to_wire,
        generation.read_model,
    ),
}


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
    value, write, read = SAMPLES[name]
    assert plain(read(through_bytes(write(value)))) == plain(value)


def set_fields(message: Message) -> Iterator[str]:
    """Names of the fields, inner ones too, that a message carries."""
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                yield from set_fields(part)


def test_every_field_of_the_contract_is_sent_by_a_sample() -> None:
    sent = {field for value, write, _ in SAMPLES.values() for field in set_fields(through_bytes(write(value)))}
    declared = {
        field.full_name
        for module in (common_pb2, drafter_pb2, generation_pb2, verifier_pb2)
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if not field.GetOptions().deprecated
    }
    assert declared - sent == set()


# The fields that must exist from the first version on, and the samples that send them.
CONTRACT = {
    "request of ids": "resume_ids sampling.seed policy budget",
    "open session": "open.rejection_top_n open.feature_layers",
    "opened": "opened.next.row.ids opened.features.ref.verifier opened.features.ref.session opened.features.ref.start"
    " opened.features.ref.count",
    "verify step": "step.q_rows",
    "verdict": "verdict.next.drawn_id verdict.verified verdict.rejection.position"
    " verdict.rejection.parent verdict.rejection.target_id verdict.rejection.top_ids verdict.rejection.top_log_probs"
    " verdict.rejection.tail",
    "delta": "delta.q_rows",
}
FENCED = {"verify step": "step", "verdict": "verdict", "opened": "opened", "draft step": "step", "delta": "delta"}
FENCE_FIELDS = ("step", "committed_len", "committed_hash", "weights_version", "deadline_ns")
SENT_FROM_THE_START = [(sample, path) for sample, paths in CONTRACT.items() for path in paths.split()]
SENT_FROM_THE_START += [(sample, f"{kind}.fence.{field}") for sample, kind in FENCED.items() for field in FENCE_FIELDS]


@pytest.mark.parametrize(("sample", "path"), SENT_FROM_THE_START)
def test_a_field_of_the_first_version_travels(sample: str, path: str) -> None:
    value, write, _ = SAMPLES[sample]
    message = through_bytes(write(value))
    *outer, name = path.split(".")
    for part in outer:
        message = getattr(message, part)
    assert name in {field.name for field, _ in message.ListFields()}


def test_a_budget_of_0_is_not_the_servers_default() -> None:
    assert generation.request_to_wire(REQUEST).HasField("budget")
    assert not generation.request_to_wire(GenerationRequest(text="x")).HasField("budget")


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


# Any message, not only the samples.

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
token = st.integers(0, VOCAB - 1)
ns = st.integers(0, limits.MAX_DEADLINE_NS)
version = st.integers(0, limits.MAX_VERSION)
count = st.integers(0, limits.MAX_COUNT)
token_id = st.integers(0, limits.MAX_TOKEN_ID)
log_prob = st.floats(max_value=0, width=32, allow_nan=False)
position = st.integers(0, limits.MAX_CONTEXT)
float32 = st.floats(width=32, allow_nan=False)
session_name = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
fence = st.builds(Fence, count, position, uint64, version, ns)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, limits.MAX_TEMPERATURE),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=uint32,
    min_p=st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(limits.LEAST_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=5),
    seed=uint64,
)
layers = st.lists(st.integers(0, limits.MAX_LAYERS), max_size=limits.MAX_FEATURE_LAYERS).map(tuple)
feature_ref = st.builds(
    FeatureRef, st.text(max_size=256), session_name, position, st.integers(1, limits.MAX_CONTEXT), layers
)
dtype = st.sampled_from(["float32", "bfloat16"])
features = st.none() | st.one_of(
    st.builds(Features, position, position, dtype, st.binary(max_size=64)),
    st.builds(Features, position, position, dtype, st.none(), feature_ref),
)


def array(kind: type, size: int, elements: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return hnp.arrays(kind, size, elements=elements)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Unjudged: any numbers, as a drafter may send them."""
    size = draw(st.integers(0, 6))
    return DraftTree(
        draw(array(np.int64, size, uint32)), draw(array(np.int64, size, uint32)), draw(array(np.float32, size, float32))
    )


@st.composite
def rejections(draw: st.DrawFn) -> Rejection | None:
    if draw(st.booleans()):
        return None
    size = draw(st.integers(0, 5))
    ids, log_probs = draw(array(np.int64, size, token_id)), draw(array(np.float32, size, log_prob))
    tail = draw(st.floats(0, 1, width=32))
    return Rejection(draw(position), draw(st.integers(0, 256)), draw(token_id), ids, log_probs, tail)


@st.composite
def next_roots(draw: st.DrawFn) -> NextRoot:
    if draw(st.booleans()):
        return NextRoot(None, draw(token_id), draw(log_prob))
    size = draw(st.integers(1, 5))
    wide = st.floats(max_value=0, allow_nan=False)
    raw = draw(array(np.float32, size, log_prob)) if draw(st.booleans()) else None
    return NextRoot(Row(draw(array(np.int64, size, token_id)), draw(array(np.float64, size, wide)), raw))


@st.composite
def q_rows(draw: st.DrawFn, tree: DraftTree) -> Any:
    if not len(tree) or draw(st.booleans()):
        return None
    return draw(hnp.arrays(np.float32, (len(tree), draw(st.integers(1, 4))), elements=float32))


timings = st.builds(VerifyTimings, ns, ns, ns, ns, uint32, uint32)
nodes = st.lists(st.integers(0, limits.MAX_TREE_NODES), max_size=5).map(tuple)


@st.composite
def verify_steps(draw: st.DrawFn) -> VerifyStep:
    tree = draw(trees())
    return VerifyStep(draw(fence), draw(token), tree, draw(q_rows(tree)))


@st.composite
def deltas(draw: st.DrawFn) -> TreeDelta:
    tree = draw(trees())
    first = draw(st.integers(0, len(tree)))
    made = draw(st.sampled_from(((), (first, len(tree) - first))))
    return TreeDelta(draw(fence), tree, draw(st.booleans()), draw(ns), draw(ns), draw(q_rows(tree)), made=made)


ids = st.lists(token, min_size=1, max_size=8)
ANY: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Message], Read]] = {
    "verify step": (verify_steps(), verifier.verify_request_to_wire, read_verify),
    "opened": (
        st.builds(SessionOpened, fence, next_roots(), features, timings),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "verdict": (
        st.builds(
            Verdict,
            fence,
            nodes,
            st.none() | next_roots(),
            timings,
            nodes,
            rejections(),
            st.lists(log_prob, max_size=5).map(tuple),
        ),
        verifier.verify_response_to_wire,
        verifier.read_verify_response,
    ),
    "open draft": (
        st.builds(OpenDraft, session_name, ids, sampling, st.booleans(), features, st.booleans()),
        drafter.draft_request_to_wire,
        read_draft,
    ),
    "draft step": (
        st.builds(
            DraftStep,
            fence,
            token,
            st.integers(0, limits.MAX_HEAD_NODES),
            st.builds(Advance, st.lists(token, max_size=8), features, rejections()),
        ),
        drafter.draft_request_to_wire,
        read_draft,
    ),
    "delta": (deltas(), drafter.draft_response_to_wire, drafter.read_draft_response),
}


@pytest.mark.parametrize("name", ANY)
def test_any_message_survives_its_bytes(name: str) -> None:
    values, write, read = ANY[name]

    @settings(max_examples=40, deadline=None)
    @given(values)
    def survives(value: object) -> None:
        assert plain(read(through_bytes(write(value)))) == plain(value)

    survives()


@pytest.mark.parametrize("read", [read_verify, read_draft, read_request])
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_that_are_a_message_are_read_or_refused_by_field(read: Read, data: bytes) -> None:
    kinds = {
        read_verify: verifier_pb2.VerifyRequest,
        read_draft: drafter_pb2.DraftRequest,
        read_request: generation_pb2.GenerateRequest,
    }
    try:
        message = kinds[read].FromString(data)
    except DecodeError:  # coppice.rpc.server refuses it
        return
    with contextlib.suppress(InvalidField):
        read(message)


# Checks: a good message, what is made of one field, and the name in the refusal.

NAN, INF = math.nan, math.inf
SENT = {name: write(value) for name, (value, write, _) in SAMPLES.items()}
MANY = [1] * (limits.MAX_CONTEXT + 1)


def tree_of(count: int) -> common_pb2.Tree:
    return common_pb2.Tree(tokens=[1] * count, parents=[0] * count, log_probs=[-1.0] * count)


REFUSED: list[tuple[str, str, Any, str]] = [
    # sample, path of the field, the bad value, the field named
    ("open session", "open.session", "", "open.session"),
    ("open session", "open.session", "a" * 65, "open.session"),
    ("open session", "open.session", "no spaces", "open.session"),
    ("open session", "open.session", "line\n", "open.session"),
    ("open session", "open.ids", [], "open.ids"),
    ("open session", "open.ids", [VOCAB], "open.ids"),
    ("open session", "open.ids", [1] * MAX_LEN, "open.ids"),
    ("open session", "open.ids", MANY, "open.ids"),
    ("open session", "open.sampling.temperature", -0.1, "sampling.temperature"),
    ("open session", "open.sampling.temperature", 10.5, "sampling.temperature"),
    ("open session", "open.sampling.temperature", NAN, "sampling.temperature"),
    ("open session", "open.sampling.temperature", INF, "sampling.temperature"),
    ("open session", "open.sampling.top_p", 0.0, "sampling.top_p"),
    ("open session", "open.sampling.top_p", 1.5, "sampling.top_p"),
    ("open session", "open.sampling.top_p", NAN, "sampling.top_p"),
    ("open session", "open.sampling.min_p", 1.5, "sampling.min_p"),
    ("open session", "open.sampling.repetition_penalty", 0.0, "sampling.repetition_penalty"),
    ("open session", "open.sampling.repetition_penalty", INF, "sampling.repetition_penalty"),
    ("open session", "open.sampling.frequency_penalty", 2.5, "sampling.frequency_penalty"),
    ("open session", "open.sampling.presence_penalty", NAN, "sampling.presence_penalty"),
    ("open session", "open.sampling.logit_bias", {VOCAB: 1.0}, "sampling.logit_bias"),
    ("open session", "open.sampling.logit_bias", {1: 100.5}, "sampling.logit_bias"),
    ("open session", "open.sampling.logit_bias", {1: NAN}, "sampling.logit_bias"),
    ("open session", "open.sampling.logit_bias", dict.fromkeys(range(1025), 1.0), "sampling.logit_bias"),
    ("open session", "open.prompt_tokens", 4, "open.prompt_tokens"),
    ("open session", "open.stop_ids", [1] * 65, "open.stop_ids"),
    ("open session", "open.max_len", 3, "open.max_len"),
    ("open session", "open.max_len", MAX_LEN + 1, "open.max_len"),
    ("open session", "open.feature_layers", [1] * 17, "open.feature_layers"),
    ("open session", "open.rejection_top_n", 65, "open.rejection_top_n"),
    ("verify step", "step.root", VOCAB, "step.root"),
    ("verify step", "step.tree", tree_of(257), "step.tree.tokens"),
    ("verify step", "step.tree.tokens", [1, 2], "step.tree"),
    ("verify step", "step.tree.parents", [0], "step.tree"),
    ("verify step", "step.tree.log_probs", [], "step.tree"),
    ("verify step", "step.q_rows", b"12345", "step.q_rows"),
    ("verify step", "step.q_rows", bytes(4 * 4), "step.q_rows"),
    ("verify step without a tree", "step.q_rows", bytes(4), "step.q_rows"),
    ("verify step", "step.fence.committed_len", limits.MAX_CONTEXT + 1, "fence.committed_len"),
    ("verify step", "step.fence.deadline_ns", -1, "fence.deadline_ns"),
    ("verify step", "step.fence.deadline_ns", limits.MAX_DEADLINE_NS + 1, "fence.deadline_ns"),
    ("opened", "opened.next", None, "next"),
    ("opened", "opened.next.row", None, "next"),
    ("opened", "opened.next.row.ids", [], "next.row.ids"),
    ("opened", "opened.next.row.ids", [1] * 1025, "next.row.ids"),
    ("opened", "opened.next.row.log_probs", [0.0], "next.row.log_probs"),
    ("opened", "opened.next.row.raw_log_probs", [0.0], "next.row.raw_log_probs"),
    ("opened", "opened.features.start", limits.MAX_CONTEXT + 1, "opened.features.start"),
    ("opened", "opened.features.count", limits.MAX_CONTEXT + 1, "opened.features.count"),
    ("opened", "opened.features.dtype", "int4", "opened.features.dtype"),
    ("opened", "opened.features.ref.session", "", "opened.features.ref.session"),
    ("opened", "opened.features.ref.verifier", "a" * 257, "opened.features.ref.verifier"),
    ("opened", "opened.features.ref.start", limits.MAX_CONTEXT + 1, "opened.features.ref.start"),
    ("opened", "opened.features.ref.count", limits.MAX_CONTEXT + 1, "opened.features.ref.count"),
    ("verdict", "verdict.accepted", [1] * 257, "verdict.accepted"),
    ("verdict", "verdict.verified", [1] * 257, "verdict.verified"),
    ("verdict", "verdict.log_probs", [0.0] * 257, "verdict.log_probs"),
    ("verdict", "verdict.budget_hint", 257, "verdict.budget_hint"),
    ("verdict", "verdict.rejection.position", limits.MAX_CONTEXT + 1, "verdict.rejection.position"),
    ("verdict", "verdict.rejection.parent", 257, "verdict.rejection.parent"),
    ("verdict", "verdict.rejection.top_ids", [1] * 65, "verdict.rejection.top_ids"),
    ("verdict", "verdict.rejection.top_log_probs", [0.0], "verdict.rejection.top_log_probs"),
    ("verdict", "verdict.fence.deadline_ns", -1, "fence.deadline_ns"),
    ("verdict", "verdict", None, "kind"),
    ("fetch", "ref.session", "", "ref.session"),
    ("fetch", "ref.count", 0, "ref.count"),
    ("commit", "commit.ids", [], "commit.ids"),
    ("commit", "commit.ids", [1] * 66, "commit.ids"),
    ("commit", "commit.ids", [VOCAB, 1], "commit.ids"),
    ("commit", "commit.root", VOCAB, "commit.root"),
    ("commit", "commit.fence.committed_len", 1, "commit.fence.committed_len"),
    ("commit", "features.start", 0, "features"),
    ("commit", "features.ref", common_pb2.FeatureRef(session="s", count=1), "features"),
    ("feature part", "features", None, "features"),
    ("feature part", "features.inline", bytes(limits.CHUNK_BYTES + 1), "features.inline"),
    ("feature part", "features.ref", common_pb2.FeatureRef(session="s", count=1), "features"),
    ("target", "eos_ids", [1] * 65, "eos_ids"),
    ("open draft", "open.session", "", "open.session"),
    ("open draft", "open.ids", [], "open.ids"),
    ("open draft", "open.ids", [VOCAB], "open.ids"),
    ("open draft", "open.ids", MANY, "open.ids"),
    ("open draft", "open.prediction", [VOCAB], "open.prediction"),
    ("open draft", "open.prediction", MANY, "open.prediction"),
    ("open draft", "open.salt", "s" * 65, "open.salt"),
    ("open session", "open.salt", "s" * 65, "open.salt"),
    ("open draft", "open.features.dtype", "int4", "open.features.dtype"),
    ("open draft", "open.sampling.temperature", NAN, "sampling.temperature"),
    ("draft step", "step.budget", limits.MAX_HEAD_NODES + 1, "step.budget"),
    ("draft step", "step.root", VOCAB, "step.root"),
    ("draft step", "step.advance.ids", [VOCAB], "step.advance.ids"),
    ("draft step", "step.advance.ids", MANY, "step.advance.ids"),
    ("draft step", "step.advance.features.start", limits.MAX_CONTEXT + 1, "step.advance.features.start"),
    ("draft step", "step.advance.rejection.parent", 257, "step.advance.rejection.parent"),
    ("draft step", "step.fence.committed_len", limits.MAX_CONTEXT + 1, "fence.committed_len"),
    ("draft step", "step", None, "kind"),
    ("delta", "delta.nodes", tree_of(257), "delta.nodes.tokens"),
    ("delta", "delta.nodes.parents", [0], "delta.nodes"),
    ("delta", "delta.q_rows", b"123", "delta.q_rows"),
    ("delta", "delta", None, "kind"),
    ("delta", "delta.predicted", [1], "delta.predicted"),
    ("delta", "delta.predicted", [1] * 257, "delta.predicted"),
    ("delta", "delta.predicted", [1, 2, limits.MAX_CONTEXT + 1], "delta.predicted"),
    ("delta", "delta.made", [10**6], "delta.made"),
    ("delta", "delta.made", [0] * 257, "delta.made"),
    ("delta", "delta.miss", 1.5, "delta.miss"),
    ("delta", "delta.miss", NAN, "delta.miss"),
    ("head", "feature_layers", [1] * 17, "feature_layers"),
    ("weights header", "header.head", "", "header.head"),
    ("weights header", "header.size", 2**32 + 1, "header.size"),
    ("weights header", "header.parts", 0, "header.parts"),
    ("weights header", "header.parent_hash", b"", "header.parent_hash"),
    ("weights header", "header.weights_hash", bytes(33), "header.weights_hash"),
    ("weights header", "header.sha256", bytes(31), "header.sha256"),
    ("weights header", "header", None, "kind"),
    ("weights part", "part.data", b"", "part.data"),
    ("weights part", "part.data", bytes(limits.CHUNK_BYTES + 1), "part.data"),
    ("weights synced", "weights_hash", b"", "weights_hash"),
    ("request of ids", "ids.ids", [], "ids"),
    ("request of ids", "ids.ids", [VOCAB], "ids"),
    ("request of ids", "ids.ids", MANY, "ids"),
    ("request of ids", "ids", None, "prompt"),
    ("request of ids", "resume_ids", [VOCAB], "resume_ids"),
    ("request of ids", "resume_ids", MANY, "resume_ids"),
    ("request of ids", "prediction_ids.ids", [VOCAB], "prediction"),
    ("request of ids", "prediction_ids.ids", MANY, "prediction_ids"),
    ("request of ids", "sampling.top_p", 2.0, "sampling.top_p"),
    ("request of ids", "max_new_tokens", 4097, "max_new_tokens"),
    ("request of ids", "stop", ["x"] * 17, "stop"),
    ("request of ids", "stop", ["x" * 257], "stop"),
    ("request of ids", "stop", [""], "stop"),
    ("request of ids", "policy", "p" * 81, "policy"),
    ("request of ids", "budget", 257, "budget"),
    ("request of ids", "accept_rule", 7, "accept_rule"),
    ("request of text", "prediction_text", "x" * ((1 << 20) + 1), "prediction"),
    ("request of text", "text", "", "text"),
    ("request of text", "text", "x" * ((1 << 20) + 1), "text"),
    ("request of a chat", "chat.messages", [], "chat.messages"),
    (
        "request of a chat",
        "chat.messages",
        [generation_pb2.ChatMessage(role="user", content="x")] * 257,
        "chat.messages",
    ),
    (
        "request of a chat",
        "chat.messages",
        [generation_pb2.ChatMessage(role="user", reasoning_content="x" * (1 << 19), name="x" * (1 << 19))] * 2,
        "chat.messages",
    ),
    (
        "request of a chat",
        "chat.messages",
        [generation_pb2.ChatMessage(role="root", content="x")],
        "chat.messages.role",
    ),
    ("chunk", "chunk.origins", [0, 1], "chunk.origins"),
    ("chunk", "chunk.origins", [1], "chunk.origins"),
    ("chunk", "chunk.pieces", ["h"], "chunk.pieces"),
    ("chunk", "chunk.log_probs", [0.0], "chunk.log_probs"),
    ("finished", "finished.finish_reason", 0, "finished.finish_reason"),
    ("finished", "finished.finish_reason", 9, "finished.finish_reason"),
    ("finished", "finished", None, "kind"),
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


def _id(value: object) -> str:
    text = str(value)
    return text if len(text) < 50 else f"{text[:40]}..."


@pytest.mark.parametrize(("sample", "path", "value", "named"), REFUSED, ids=_id)
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


def test_any_id_will_do_for_a_head_without_a_vocabulary() -> None:
    message = drafter.draft_request_to_wire(OpenDraft("s", [2**32 - 1], SamplingParams()))
    read = drafter.read_draft_request(message, 0)
    assert isinstance(read, OpenDraft)
    assert read.ids == [2**32 - 1]


def test_a_seed_of_0_is_not_an_unset_one() -> None:
    for sampling, is_set in ((SamplingParams(seed=0), True), (SamplingParams(), False)):
        message = through_bytes(generation.request_to_wire(GenerationRequest(text="x", sampling=sampling)))
        assert message.sampling.HasField("seed") == is_set
        assert ("seed" in read_request(message).sampling.model_fields_set) == is_set


def test_an_unset_message_of_sampling_is_greedy() -> None:
    read = read_request(generation_pb2.GenerateRequest(text="x"))
    assert isinstance(read, GenerationRequest)
    assert read.sampling == SamplingParams()
    opened = read_verify(verifier_pb2.VerifyRequest(open={"session": "s", "ids": [1], "max_len": 2}))
    assert isinstance(opened, OpenSession)
    assert opened.sampling == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", (1 << 32,)),
        ("resume_ids", (-1,)),
        ("max_new_tokens", 1 << 32),
        ("min_tokens", -1),
        ("budget", 0.5),
        ("policy", 5),
        ("stop", (5,)),
        ("sampling", SamplingParams().model_copy(update={"top_k": 1 << 32})),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_name(name: str, value: Any) -> None:
    request = replace(GenerationRequest(ids=(1,)), **{name: value})
    with pytest.raises(InvalidField) as refused:
        generation.request_to_wire(request)
    assert refused.value.field == name
