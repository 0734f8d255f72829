"""Texts until they are learnt from, and the training copy of a head, which gives way to what serves beside it.

Every token of a text teaches once a pass, by its cross-entropy: what the target said is certain. All of this runs on
the one thread that owns torch.
"""

import copy
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from coppice.adaptation.signals import Sample
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import InvalidField
from coppice.heads.checkpoints import kind_in, load_head, public_weights
from coppice.training.answers import Answer
from coppice.training.losses import LOSSES, HeadLoss, Student, Teacher, accepted_length, autocast, measure, soft_loss

from .decide import Arm, Trained, passes_over

Samples = Sequence[Sample]
_BETAS = (0.9, 0.95)
_RATES = {Arm.HEAD: 1e-2, Arm.FULL: 2e-3}
_BATCH = 4  # texts of each optimiser step
_CLIP = 0.5  # largest norm of a gradient
_LOSSES: dict[str, dict[str, Any]] = {
    "eagle3": LOSSES["eagle3"] | {"every": 1},
    "specblock": {"blocks": 1, "every": 4},
    # Of a text's own tokens cross-entropy teaches several times as much as L1.
    "dspark": LOSSES["dspark"] | {"every": 4, "distance": soft_loss},
}
_NOTHING = -1  # stands behind the end of a text; no draft id
_LONGEST_S = 1.0  # between two rests; what is longer was no computing: the process was stopped
_OUTPUT = ("lm_head", "markov_head", "rank_head", "confidence_head")  # modules that a head-only update changes
SESSIONS = 512  # ended queries whose late samples are still taken
SAMPLES = 2048  # samples that wait for their query's end
_LEARNT, _HELD_OUT = 128, 8  # texts of a group, the latest ones
_HELD_OUT_EVERY = 6  # of the texts one is held out, to measure by


class Groups:
    """The texts of a head: until their query has ended, then in its group (SpecBlock, algorithm 1, lines 9 to 15)."""

    def __init__(self, drop: Callable[[str], None]) -> None:
        """`drop` counts a sample that teaches nothing, with the reason."""
        self._drop = drop
        self._waiting: deque[Sample] = deque(maxlen=SAMPLES)
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._taken = 0
        self._texts: dict[int, tuple[deque[Sample], deque[Sample]]] = {}

    def take(self, sample: Sample) -> None:
        """Hold a sample until `claim`; one that comes after it joins its group at once."""
        if sample.session in self._ended:
            self._add(self._ended[sample.session], sample)
            return
        if len(self._waiting) == SAMPLES:
            self._drop("unclaimed")
        self._waiting.append(sample)

    def claim(self, session: str, group: int) -> None:
        """Put the samples of a query that ended into a group; 0: drop them."""
        self._ended[session] = group
        if len(self._ended) > SESSIONS:
            self._ended.popitem(last=False)
        for _ in range(len(self._waiting)):
            self.take(self._waiting.popleft())

    def forget(self, group: int) -> None:
        self._texts.pop(group, None)

    def counts(self) -> dict[int, int]:
        """Return how many texts there are to learn from, by group."""
        return {group: len(texts) for group, (texts, _) in self._texts.items()}

    def of(self, group: int) -> tuple[list[Sample], list[Sample]]:
        """Return the texts of a group to learn from, and those held out."""
        texts, held_out = self._texts.get(group, ((), ()))
        return list(texts), list(held_out)

    def _add(self, group: int, sample: Sample) -> None:
        if not group:
            self._drop("skipped")
            return
        self._taken += 1
        texts, held_out = self._texts.setdefault(group, (deque(maxlen=_LEARNT), deque(maxlen=_HELD_OUT)))
        (texts if self._taken % _HELD_OUT_EVERY else held_out).append(sample)


class Texts(Teacher):
    """Samples as target answers: what the losses of training read. Their own tokens are certain.

    Rotary attention sees differences of positions alone, so every text starts at 0. Shorter ones end early.
    """

    def __init__(self, samples: Samples, draft_number: Tensor, size: int) -> None:
        """draft_number: (V + 1,) draft id of each target id, -1 at those that have none. size: D, draft ids."""
        self.draft_number, device = draft_number, draft_number.device
        tokens = [torch.from_numpy(sample.tokens) for sample in samples]
        rows = [torch.from_numpy(sample.feature_rows()) for sample in samples]
        ids = pad_sequence(tokens, batch_first=True, padding_value=_NOTHING).to(device)
        features = pad_sequence(rows, batch_first=True).to(device)
        numbers = draft_number[ids.roll(-1, dims=1)]
        final = torch.zeros(*numbers.shape, size, device=device)
        final.scatter_(-1, numbers.clamp(min=0)[..., None], 1.0)
        self.answer = Answer(ids, features, final)  # `final` is (S, T, D) probabilities of the token behind each

    def draft_probs(self, final: Tensor) -> Tensor:
        return final


class Pace:
    """Sleeps often enough that a thread computes for no more than a share of the time. Make it on that thread."""

    def __init__(self, share: float) -> None:
        self.seconds = 0.0  # passed since it was made, as far as the process ran
        self._share = share
        self._last, self._began = time.monotonic(), time.thread_time()

    def rest(self) -> None:
        """Sleep until the share holds."""
        self._count()
        computed = time.thread_time() - self._began
        time.sleep(min(_LONGEST_S, max(0.0, computed / self._share - self.seconds)))
        self._count()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, _LONGEST_S)
        self._last = now


class Learner:
    """A head in training, and a frozen copy of it as deployed."""

    def __init__(self, folder: str | Path, target: str | Path, device: str = "cpu", cpu_share: float = 1.0) -> None:
        """Load the head of `folder` for the target of another folder. Raises InvalidField."""
        self.kind, self.device, self._cpu_share = kind_in(folder), device, cpu_share
        if self.kind not in ADAPTED_KINDS:
            kinds = ", ".join(ADAPTED_KINDS)
            raise InvalidField("adapter.heads", f"{folder} is a {self.kind} head; adapted are {kinds}, no others")
        loaded = load_head(self.kind, folder, target)
        self.config = loaded.config
        embedding = loaded.embedding.to(device)
        self.student = Student(loaded.model.to(device), embedding)
        self._frozen = Student(copy.deepcopy(loaded.model).requires_grad_(False), embedding)
        self.deployed: dict[str, Tensor] = public_weights(self._frozen.model, self.config)
        """the float tensors of the head as deployed, by their public names: version 0"""
        self._trained = [(name, weight) for name, weight in loaded.model.named_parameters() if weight.requires_grad]
        draft_ids = loaded.model.target_ids.to(device)
        self._draft_number = torch.full((loaded.config.vocab_size + 1,), _NOTHING, dtype=torch.int64, device=device)
        self._draft_number[draft_ids] = torch.arange(len(draft_ids), device=device)
        self.stopped = threading.Event()  # set by another thread: no more optimiser steps

    def texts(self, samples: Samples) -> Texts:
        return Texts(samples, self._draft_number, self.config.draft_vocab_size)

    def learn(
        self, arm: Arm, begin: Mapping[str, Tensor], texts: Samples, held_out: Samples, penalty: float = 0.0
    ) -> tuple[Trained, dict[str, Tensor]]:
        """Learn from texts, beginning with the deployed weights and the tensors of `begin` in the place of their own.

        penalty: weight of the KL to the head as deployed. Returns also copies, on the CPU, of all tensors that differ
        from the deployed ones. Raises FloatingPointError for a weight that is not finite, InterruptedError once
        stopped.
        """
        pace = Pace(self._cpu_share)
        self._begin_with(begin)
        weights = self._weights_of(arm)
        optimiser = torch.optim.AdamW(weights, lr=_RATES[arm], betas=_BETAS, weight_decay=0.0)
        order = torch.Generator().manual_seed(len(texts))
        before = self._length(held_out, pace)
        for _ in range(passes_over(len(texts))):
            for numbers in torch.split(torch.randperm(len(texts), generator=order), _BATCH):
                if self.stopped.is_set():
                    raise InterruptedError("an update was given up")
                batch = self.texts([texts[number] for number in numbers])
                with autocast(torch.device("cpu")):
                    loss = self.loss_on(batch, penalty)(self.student, batch.answer)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(weights, _CLIP, foreach=True)
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                pace.rest()
        tensors = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in public_weights(self.student.model, self.config).items()
            if not torch.equal(tensor.view(torch.int32), self.deployed[name].view(torch.int32))  # bit for bit
        }
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise FloatingPointError(f"an update of {len(texts)} texts is not finite")
        after = self._length(held_out, pace)
        return Trained(len(texts), before, after, pace.seconds), tensors

    @torch.no_grad()
    def _begin_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to the deployed weights with these tensors in the place of their own."""
        own = public_weights(self.student.model, self.config)
        for name, deployed in self.deployed.items():
            own[name].copy_(tensors.get(name, deployed))

    def _weights_of(self, arm: Arm) -> list[nn.Parameter]:
        """Let gradients flow to the weights that an arm trains alone, and return them.

        Where the output layer is the target's, the norm before it learns in its place, unless there is a Markov table.
        """
        borrowed = not self.student.model.own_output and not getattr(self.config, "markov_rank", 0)
        output = (*_OUTPUT, "norm") if borrowed else _OUTPUT
        for name, weight in self._trained:
            weight.requires_grad_(arm is Arm.FULL or name.partition(".")[0] in output)
        return [weight for _, weight in self._trained if weight.requires_grad]

    def loss_on(self, texts: Texts, penalty: float = 0.0) -> HeadLoss:
        """Return the loss that training of the head's kind descends, on these texts."""
        anchor = self._frozen if penalty else None
        return HeadLoss(texts, anchor=anchor, anchor_weight=penalty, **_LOSSES[self.kind])

    def _length(self, samples: Samples, pace: Pace) -> float:
        """Return the mean length of chains that are drafted greedily behind every token of some texts."""
        measured = []
        for sample in samples:
            text = self.texts([sample])
            measured.append(measure(self.student, self.loss_on(text), text.answer))
            pace.rest()
        return accepted_length(torch.cat(measured)) if measured else 1.0
