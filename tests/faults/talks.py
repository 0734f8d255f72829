"""What good clients say to each method, chosen by a source of randomness: the ground that `fuzzing` spoils."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from google.protobuf.message import Message

from coppice.limits import CHUNK_BYTES
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.v1 import adapter_pb2 as pb
from coppice.v1.common_pb2 import End, Frame
from coppice.wire.common import FeatureRef, Features, Fence, Rejection, committed_hash
from coppice.wire.drafter import Advance, DraftStep, OpenDraft, WeightsPart, draft_request_to_wire, weights_to_wire
from coppice.wire.generation import ChatMessage, GenerationRequest, request_to_wire
from coppice.wire.verifier import OpenSession, VerifyStep, fetch_to_wire, verify_request_to_wire
from tests.faults.fuzzing import Talk
from tests.pushes import Push

VOCAB, LAYERS, HIDDEN = 300, (2, 4, 5), 32
HELD = OpenSession("held", list(range(1, 25)), SamplingParams(), frozenset(), 64, LAYERS)
"""a session that stays open beside the fuzzing, for those who fetch its features"""
Says = Callable[[Random, str], Talk]


def _ids(random: Random, most: int = 12) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(random.randint(1, most))]


def _sampling(random: Random) -> SamplingParams:
    return SamplingParams(
        temperature=random.choice((0.0, 0.0, 0.7, 1.0)),
        top_p=random.choice((1.0, 0.9)),
        top_k=random.choice((0, 0, 20)),
        min_p=random.choice((0.0, 0.0, 0.05)),
        repetition_penalty=random.choice((None, 1.0, 1.3)),
        frequency_penalty=random.choice((0.0, 0.0, 0.5)),
        presence_penalty=random.choice((0.0, 0.0, -0.5)),
        logit_bias=random.choice(({}, {3: 2.0, 7: -100.0})),
        seed=random.getrandbits(64),
    )


def _tree(random: Random, chain: bool) -> DraftTree:
    nodes = random.randint(1 if chain else 0, 8)
    parents = [number if chain else random.randint(0, number) for number in range(nodes)]
    scores: list[float] = []
    for parent in parents:
        scores.append((scores[parent - 1] if parent else 0.0) - random.random())
    tokens = [random.randrange(VOCAB) for _ in range(nodes)]
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))


def verifying(random: Random, name: str) -> Talk:
    """Open, then steps; one in four with p/q rejection."""
    committed, chain = _ids(random), random.random() < 0.25
    yield (
        verify_request_to_wire(
            OpenSession(
                session=name,
                ids=list(committed),
                sampling=_sampling(random),
                stop_ids=frozenset(random.choice(((), (0,), (0, 7, 2**32 - 1)))),
                max_len=len(committed) + random.choice((1, 3, 40)),
                feature_layers=random.choice(((), LAYERS, (5,))),
                want_log_probs=random.random() < 0.3,
            )
        ),
        True,
    )
    for number in range(1, random.randint(2, 5)):
        root, tree = random.randrange(VOCAB), _tree(random, chain)
        q_rows = np.full((len(tree), VOCAB), 1 / VOCAB, np.float32) if chain else None
        fence = Fence(number, len(committed), committed_hash(committed))
        answer = yield verify_request_to_wire(VerifyStep(fence, root, tree, q_rows)), True
        nodes = answer.verdict.accepted if answer is not None else ()  # type: ignore[attr-defined]
        committed += [root, *(int(tree.tokens[node - 1]) for node in nodes if node <= len(tree))]


def fetching(random: Random, name: str) -> Talk:
    """A window of the held session."""
    start = random.randrange(len(HELD.ids))
    layers = random.choice(((), LAYERS, LAYERS[-1:]))
    yield fetch_to_wire(FeatureRef("", HELD.session, start, random.randint(1, len(HELD.ids) - start), layers)), True


def drafting(verifier: str = "", features: bool = False, samples: bool = False) -> Says:
    """Open, then steps. `features`: the head reads them, of the session held at `verifier`, which commits nothing."""

    def says(random: Random, name: str) -> Talk:
        committed = list(HELD.ids) if features else _ids(random)
        rows: Features | None = None
        if features:
            start = random.randrange(len(committed))
            ref = FeatureRef(verifier, HELD.session, start, len(committed) - start)
            rows = Features(start, ref.count, "float32", None, ref)
        opening = OpenDraft(
            session=name,
            ids=list(committed),
            sampling=_sampling(random),
            coupled=random.random() < 0.8,
            features=rows,
            want_q_rows=samples and random.random() < 0.2,
            want_misses=features and random.random() < 0.5,
            prediction=tuple(_ids(random)) if random.random() < 0.3 else (),
            salt=random.choice(("", "a", "b")),
        )
        yield draft_request_to_wire(opening), True
        ids: list[int] = []
        for number in range(1, random.randint(2, 5)):
            root = random.randrange(VOCAB)
            committed += ids
            missed = None
            if opening.want_misses and ids:
                missed = Rejection(len(committed), 0, root)
            fence = Fence(number, len(committed), committed_hash(committed))
            step = DraftStep(fence, root, random.choice((0, 1, 8, 31, 64)), Advance(list(ids), None, missed))
            yield draft_request_to_wire(step), True
            ids = [] if features else [root, *_ids(random, 4)]

    return says


def linking(**methods: Says) -> Says:
    """Frames of a few sessions of these methods, which begin and end together or one behind the other."""

    def frames(random: Random, name: str) -> Talk:
        chosen = {number: random.choice(list(methods)) for number in range(1, random.randint(2, 5))}
        running = {number: methods[method](random, f"{name}-{number}") for number, method in chosen.items()}
        begun = set[int]()
        while running:
            frame = Frame()
            for number in random.sample(list(running), random.randint(0, len(running))):
                item = frame.items.add(session=number, method="" if number in begun else chosen[number])
                begun.add(number)
                said = next(running[number], None)
                if said is None:
                    item.end.CopyFrom(End(code=random.choice((0, 1))))
                    del running[number]
                else:
                    item.message = said[0].SerializeToString()
            yield frame, random.random() < 0.3  # the others are answered together

    return frames


_ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
_FILE_HEADERS = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"\\ud800": {}}',
    b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    b"[" * 100_000,
    b'{"a":' * 5000,
    b'{"a": 1, "a": 2}',
    b'{"a": 1' + b"0" * 5000 + b"}",
    b"\xff\xfe",
    json.dumps({"lm_head.weight": _ENTRY | {"shape": [10**18, 10**18]}}).encode(),
    json.dumps({"lm_head.weight": _ENTRY | {"shape": [[]]}}).encode(),
    json.dumps({"lm_head.weight": _ENTRY | {"dtype": "é\n" * 500}}).encode(),
    json.dumps({"lm_head.weight": _ENTRY | {"data_offsets": [4, 0]}}).encode(),
    json.dumps({"lm_head.weight": _ENTRY | {"data_offsets": [True, 4.0]}}).encode(),
    json.dumps({"é" * 5000: _ENTRY}).encode(),
    json.dumps({"__metadata__": {"a": [1]}}).encode(),
    json.dumps({str(number): _ENTRY for number in range(5000)}).encode(),
)


def _another_file(random: Random, file: bytes) -> bytes:
    """A file that is announced as it is, and is not as it should be."""
    way = random.random()
    if way < 0.3:
        header = random.choice(_FILE_HEADERS)
        return len(header).to_bytes(8, "little") + header + file[: random.choice((0, 4, 100))]
    changed = bytearray(file)
    if way < 0.7:  # where the file says what it holds
        changed[random.randrange(300)] ^= 1 << random.randrange(8)
    elif way < 0.8:
        changed[random.randrange(len(file))] ^= 1 << random.randrange(8)
    else:
        del changed[random.randrange(len(file)) :]
    return bytes(changed) or b"\0"


def syncing(pushes: Sequence[Push]) -> Says:
    """A push of whole weights as a higher version than those before; half of the files are spoiled inside."""

    def says(random: Random, name: str) -> Talk:
        push = random.choice(pushes)
        if random.random() < 0.5:
            push = push.with_file(_another_file(random, push.file))
        size = random.choice((CHUNK_BYTES, CHUNK_BYTES, 1 + len(push.file) // 3))
        version = 10 + int(name.rpartition("-")[2])
        yield weights_to_wire(push.announcing(version=version).header), False
        for at in range(0, len(push.file), size):
            yield weights_to_wire(WeightsPart(push.file[at : at + size])), False

    return says


def generating(random: Random, name: str) -> Talk:
    """Short answers to every kind of prompt, under every policy."""
    kind = random.choice(("ids", "ids", "text", "chat"))
    request = GenerationRequest(
        ids=tuple(_ids(random)) if kind == "ids" else None,
        text="Once upon a time" if kind == "text" else None,
        chat=(ChatMessage("system", "Be brief."), ChatMessage("user", "Who?")) if kind == "chat" else None,
        resume_ids=random.choice(((), (), (5,))),
        sampling=_sampling(random),
        max_new_tokens=random.randint(2, 4),
        stop=random.choice(((), (), ("the", "é"))),
        policy=random.choice(("", "", "", "plain", "plain", "single:lm", "route", "merge", "auto")),
        budget=random.choice((None, 0, 4, 31)),
        ignore_eos=random.random() < 0.5,
        want_log_probs=random.random() < 0.2,
        coupled=random.random() < 0.8,
        want_trees=random.random() < 0.2,
        top_log_probs=random.choice((0, 0, 20)),
        want_prompt_log_probs=random.random() < 0.2,
        min_tokens=random.choice((0, 0, 3)),
        prediction_ids=tuple(_ids(random)) if random.random() < 0.2 else None,
    )
    yield request_to_wire(request), True


def saying(*messages: Message) -> Says:
    """One message, one of these."""

    def says(random: Random, name: str) -> Talk:
        yield random.choice(messages), True

    return says


asking_status = saying(
    pb.GetStatusRequest(head="", history=0),
    pb.GetStatusRequest(head="block", history=10),
    pb.GetStatusRequest(head="block", history=2000),
)
pausing = saying(pb.PauseRequest(head=""), pb.PauseRequest(head="block"))
resuming = saying(pb.ResumeRequest(head=""), pb.ResumeRequest(head="block"))
rolling_back = saying(
    pb.RollbackRequest(head="", version=None),
    pb.RollbackRequest(head="block", version=0),
    pb.RollbackRequest(head="block", version=10**6),
)
