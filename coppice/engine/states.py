"""Layers that keep a state of the text, over packed rows: recurrent states and windows of convolutions.

A state layer of transformers asks a cache for its state. Here it is given a stand-in, so that its own code computes
every family. Rows that are certain to stay, a prompt's chunk, go through the layer's own chunked form, with the
session's state in the cache. All other rows of all sessions are given to it as a batch of single tokens: their
projections are one product, and the functions that step a state compute them level by level of their trees, each row
from its parent's state.

No row's state is kept. A session has its state behind `tokens` tokens, and the inputs of those functions for the rows
of its latest forward; its next forward first steps over the rows that were accepted, which are levels in front of its
own. What was rejected is never stepped over, so that nothing has to be rolled back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coppice.engine.attention import UnsupportedModel
from coppice.engine.kv_cache import BlockTable
from coppice.engine.modules import derived
from coppice.engine.ordered import ROWS
from coppice.engine.rows import NOTHING, Ints, PackedBatch, Tail


class Rule(NamedTuple):
    """A function of transformers' modules that steps recurrent states by one token for each row of a batch."""

    rows: tuple[str, ...]  # the arguments that have a row for each token, (rows, ...)
    state: str  # the argument that is the states, (rows, ...)
    returned: bool  # whether it returns the new states behind its output; otherwise it writes them in place


_DELTA = Rule(("query", "key", "value", "g", "beta"), "initial_state", returned=True)
_SELECTIVE = Rule(("hidden_states", "dt", "B", "C", "z"), "state", returned=False)
RULES = {
    "torch_recurrent_gated_delta_rule": _DELTA,
    "recurrent_kimi_delta_attention": _DELTA,
    "mamba2_selective_state_update": _SELECTIVE,
    "mamba_selective_state_update": _SELECTIVE,
}
_CONVOLVE = "causal_conv1d_update"  # steps a convolution's window
_FROM_NOTHING = "mamba_selective_scan"  # a chunked form that reads no state
_ASKS = ("get_conv_state", "get_recurrent_state")
CACHES = ("cache_params", "past_key_values")
_CHUNK = 64  # tokens of a chunk of the chunked form, where a layer does not say


class Form(NamedTuple):
    """How a class of state layers computes rows of one text, and rows of many texts."""

    whole: Callable[..., Tensor]  # its own forward, (1, n, H) -> (1, n, H)
    single: Callable[..., Tensor]  # the same code over a batch of single tokens, (R, 1, H) -> (R, 1, H)
    cache: str  # the argument that takes the cache
    resumes: bool  # whether `whole` continues a state


def adopt(model: nn.Module) -> list[Any]:
    """Have a model's state layers run packed where a forward is `using` a plan; returns them. Raises UnsupportedModel.

    A state layer is what asks a cache for a state in its forward.
    """
    layers, modules = list[Any](), cast(Iterable[Any], model.modules())
    for module in modules:
        kind: Any = type(module)
        if not hasattr(kind, "form"):
            code = getattr(inspect.unwrap(kind.forward), "__code__", None)
            if code is None or not set(_ASKS) & set(code.co_names):
                continue
            module.__class__ = _packed(kind)
            if not module.form.resumes and hasattr(module, "dt_proj"):
                module.dt_proj.forward = module.dt_proj.forward  # its weight is read by itself, and must not be packed
        module.__dict__["state_number"] = len(layers)
        layers.append(module)
    return layers


@cache
def _packed(kind: Any) -> Any:
    """The class of a state layer whose forward is the plan's, where there is one."""
    own, form = kind.forward, _form(kind)

    def forward(self: Any, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        """(1, T, H) -> (1, T, H)."""
        plan = _active.get()
        return plan.run(self, hidden_states) if plan is not None else own(self, hidden_states, *others, **named)

    return derived(kind, forward=forward, form=form)


def _form(kind: Any) -> Form:
    function = inspect.unwrap(kind.forward)
    code, names, parameters = function.__code__, function.__globals__, inspect.signature(function).parameters
    rules, caches = [name for name in RULES if name in code.co_names], [name for name in CACHES if name in parameters]
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    needed -= {"self", "hidden_states", "attention_mask", "kwargs", *CACHES}
    asks = tuple(name in code.co_names for name in _ASKS)
    if asks != (_CONVOLVE in code.co_names, len(rules) == 1) or len(caches) != 1 or needed:
        raise UnsupportedModel(f"{kind.__name__} keeps a state of the text in a form that is not known here")
    stepping = {name: _by_level(names[name], RULES[name]) for name in rules}
    if asks[0]:
        stepping[_CONVOLVE] = _by_ancestors(names[_CONVOLVE])
    single: Any = FunctionType(
        code, {**names, **stepping}, function.__name__, function.__defaults__, function.__closure__
    )
    single.__kwdefaults__ = function.__kwdefaults__
    unmasked = {"attention_mask": None} if "attention_mask" in parameters else {}
    return Form(
        partial(kind.forward, **unmasked), partial(single, **unmasked), caches[0], _FROM_NOTHING not in code.co_names
    )


def _by_ancestors(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def update(hidden_states: Tensor, conv_state: Plan, *others: Any, **named: Any) -> Tensor:
        """hidden_states (R, C, 1) -> (R, C, 1)."""
        return convolve(hidden_states, conv_state.convolved(hidden_states), *others, **named)

    return update


def _by_level(step: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    order = tuple(inspect.signature(step).parameters)

    def update(*arguments: Any, **named: Any) -> Any:
        """As the function, over rows of which each continues its parent's state."""
        given = dict(zip(order, arguments, strict=False)) | named

        def stepped(inputs: Mapping[str, Tensor]) -> Any:
            positional = (inputs.get(name, value) for name, value in zip(order, arguments, strict=False))
            return step(*positional, **{name: inputs.get(name, value) for name, value in named.items()})

        new = {name: given[name] for name in rule.rows if given.get(name) is not None}
        plan: Plan = given[rule.state]
        return plan.step(stepped, rule, new)

    return update


class Cache:
    """Stands for transformers' cache in a state layer's own forward, and holds what the layer keeps of one text.

    conv (1, C, K): the last inputs of a convolution; recurrent (1, ...); None where there is none or no text yet, as
    zeros are what stands before a text. A Plan is in their place where it steps over rows.
    """

    def __init__(self, conv: Tensor | Plan | None = None, recurrent: Tensor | Plan | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | Plan | None:
        """As transformers' cache."""
        return self.conv

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | Plan | None:
        """As transformers' cache."""
        return self.recurrent

    def is_recording_past(self, *_: Any) -> bool:
        """As transformers' cache."""
        return False

    def update_conv_state(self, states: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """As transformers' cache."""
        if self.conv is None:
            self.conv = states.new_zeros(*states.shape[:2], conv_kernel_size)
        assert isinstance(self.conv, Tensor)
        whole = torch.cat((self.conv, states), dim=-1)
        self.conv.copy_(whole[..., -conv_kernel_size:])
        return whole

    def update_recurrent_state(self, states: Tensor, *_: Any, **__: Any) -> None:
        """As transformers' cache; a plan's states are in their slots already."""
        if self.recurrent is None:
            self.recurrent = states
        elif isinstance(self.recurrent, Tensor):
            self.recurrent.copy_(states)


class Probe:
    """Runs state layers over one new text, and has what each keeps of it, by its number."""

    def __init__(self) -> None:
        self.caches: dict[int, Cache] = {}

    def run(self, module: Any, states: Tensor) -> Tensor:
        """As Plan.run."""
        cache = self.caches[module.state_number] = Cache()
        output: Tensor = module.form.whole(module, states, **{module.form.cache: cache})
        return output


@dataclass
class _Text:
    """A session's text as its states know it: they have read `tokens` tokens; -1 while a forward changes them.

    Behind these are the rows of the latest forward that may stay: their `inputs`, by layer and argument, which other
    sessions' rows are beside, from row `first` on, and their `parents`.
    """

    slot: int
    tokens: int = 0
    inputs: dict[tuple[int, str], Tensor] | None = None
    first: int = 0
    parents: Ints = field(default_factory=lambda: NOTHING)  # (n,), -1 for a row that continues the state
    accepted: tuple[int, ...] | None = None  # the rows that did, once it is known

    def path(self, prefix: int) -> tuple[int, ...]:
        """The rows of the latest forward that lie between the state and a prefix. Raises ValueError."""
        ahead = prefix - self.tokens
        if ahead == 0:
            return ()
        rows = self.accepted
        if rows is None and np.array_equal(self.parents[: max(ahead, 0)], np.arange(-1, ahead - 1)):
            rows = tuple(range(ahead))
        if rows is None or self.inputs is None or self.tokens < 0 or len(rows) != ahead:
            raise ValueError(f"a state of {self.tokens} tokens cannot continue a text of {prefix}")
        return rows


class States:
    """The states of all sessions: of each layer a tensor of slots, one for each session that has a block table."""

    def __init__(self, kept: Sequence[tuple[Any, Cache]], device: torch.device, stepwise: bool) -> None:
        """kept: the layers, and what each keeps of a text. stepwise: chunks are stepped over like all other rows."""
        layers, caches = zip(*kept, strict=True)
        self.stepwise = stepwise
        self.resumes = all(layer.form.resumes for layer in layers)
        self.chunk = max(getattr(layer, "chunk_size", _CHUNK) for layer in layers)
        """tokens of a chunk of the chunked forms"""
        self.conv, self.recurrent = (
            [None if state is None else state.new_zeros(0, *state.shape[1:]) for state in kind]
            for kind in zip(*((cache.conv, cache.recurrent) for cache in caches), strict=True)
        )
        self.device = device
        self._texts: dict[str, _Text] = {}
        self._free: list[int] = []
        self._grow(1)

    @property
    def bytes_each(self) -> int:
        """Bytes of one session's states."""
        return sum(states[0].nbytes for states in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        return (states for states in (*self.conv, *self.recurrent) if states is not None)

    def _grow(self, count: int) -> None:
        """Make `count` more slots."""
        slots = len(next(self._tensors()))
        with torch.inference_mode(False):  # they are written outside of it, too
            for kind in (self.conv, self.recurrent):
                for number, states in enumerate(kind):  # one is copied at a time
                    if states is not None:
                        kind[number] = F.pad(states, (0, 0) * (states.dim() - 1) + (0, count))
        self._free += range(slots, slots + count)

    def open(self, table: BlockTable) -> None:
        """Give a new session a slot. There are at most twice as many as sessions were open at once."""
        if not self._free:
            self._grow(len(self._texts))
        self._texts[table.session] = _Text(self._free.pop())

    def close(self, table: BlockTable) -> None:
        """Take a session's slot back."""
        self._free.append(self._texts.pop(table.session).slot)

    def accept(self, table: BlockTable, rows: Sequence[int]) -> None:
        """Note which rows of its latest forward stay, the root's 0 first, in order."""
        self._texts[table.session].accepted = tuple(rows)

    def pretend(self, tables: Iterable[BlockTable], tokens: int) -> None:
        """Take sessions' states for those of texts of so many tokens, whatever they are: for timings."""
        for table in tables:
            self._texts[table.session].tokens = tokens

    def text(self, tail: Tail) -> _Text:
        """The text that a session's rows continue; behind no tokens it is a new one."""
        text = self._texts[tail.table.session]
        if tail.prefix == 0:
            text = self._texts[tail.table.session] = _Text(text.slot)
            for states in self._tensors():
                states[text.slot].zero_()
        return text


_active: ContextVar[Plan | Probe | None] = ContextVar("coppice_states", default=None)


@contextmanager
def using(plan: Plan | Probe) -> Iterator[None]:
    """State layers called inside run by this."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


class _Level(NamedTuple):
    """Nodes that are stepped together: which they are of all in the order of levels, and what they continue."""

    start: int
    end: int
    parents: Tensor | None  # (n,) of the nodes of the level before; None: each continues that of its own number
    kept: tuple[Tensor, Tensor] | None  # nodes of the level whose states sessions keep, and their slots


class Plan:
    """How the state layers compute one forward's rows; also what stands for their states where they step over rows.

    Stepped over are nodes: P rows of earlier forwards, which were accepted, then R rows of this one.
    """

    def __init__(self, states: States, batch: PackedBatch) -> None:
        """Raises ValueError where a session's state is not that of its prefix, and UnsupportedModel."""
        self._states, self._number = states, 0
        self._chunks: list[tuple[_Text, Tail, int]] = []  # with the first row of the batch
        self._steps: list[tuple[_Text, Tail, tuple[int, ...]]] = []  # with the accepted rows
        spans, first = list[Ints](), 0
        for tail in batch.tails:
            text, count = states.text(tail), len(tail.visible)
            if tail.visible.shape[1] != count:
                raise UnsupportedModel("a state layer takes whole trees, not a level of one a forward")
            path = text.path(tail.prefix)
            resumes = not path and (states.resumes or not text.tokens)
            if tail.certain and count > 1 and resumes and not states.stepwise:
                self._chunks.append((text, tail, first))
            else:
                self._steps.append((text, tail, path))
                spans.append(np.arange(first, first + count))
            first += count
        # Of the batch those that are stepped over; None: all, in order.
        self._rows = self._index(np.concatenate(spans)) if self._chunks and self._steps else None
        self._inputs: dict[tuple[int, str], Tensor] = {}  # of the R rows
        self._keeps = not all(tail.certain for _, tail, _ in self._steps)
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        if self._steps:
            self._lay()

    def _index(self, numbers: Ints | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, np.int64)).to(self._states.device)

    def _lay(self) -> None:
        """Lay out the nodes, and order them by level: parents before children, of all sessions together."""
        earlier = [(text, path) for text, _, path in self._steps if path]
        # Where the inputs of the P nodes are.
        self._sources = list[tuple[dict[tuple[int, str], Tensor], Tensor]]()
        for _, run in groupby(earlier, lambda pair: id(pair[0].inputs)):
            texts = list(run)
            rows = [text.first + row for text, path in texts for row in path]
            self._sources.append((texts[0][0].inputs or {}, self._index(rows)))
        node = sum(len(path) for *_, path in self._steps)
        self._count = sum(len(tail.visible) for _, tail, _ in self._steps)
        # Functions of a number a head round a row otherwise that ends inside a vector.
        self._padding = -self._count % ROWS if self._states.stepwise else 0
        self._wanted = np.pad(np.arange(node, node + self._count), (0, self._padding), "edge")
        in_front, behind, last, done = list[Any](), list[Any](), list[int](), 0
        for owner, (_, tail, path) in enumerate(self._steps):
            count, depth, end = len(tail.visible), len(path), done + len(path)
            chain = np.arange(done - 1, end - 1)
            chain[:1] = -1
            in_front.append((chain, np.arange(depth), np.full(depth, owner)))
            parents, root = parents_of(tail), end - 1 if depth else -1
            levels = depth - 1 + tail.visible.sum(axis=1)
            behind.append((np.where(parents < 0, root, node + parents), levels, np.full(count, owner)))
            last.append(node + count - 1 if tail.certain else root)
            done, node = end, node + count
        parts = zip(*in_front, *behind, strict=True)
        self._parents, level, self._owners = (np.concatenate(part) for part in parts)
        slots = np.array([text.slot for text, *_ in self._steps])
        ends = np.array(last)
        # The nodes whose states the sessions keep.
        self._last = ends[ends >= 0]
        kept_slots = slots[ends >= 0]
        self._slots, self._kept_slots = self._index(slots), self._index(kept_slots)
        order = np.argsort(level, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._order = None if np.array_equal(order, np.arange(len(order))) else self._index(order)
        self._answers = self._index(place[self._wanted])
        self._levels, start, above = list[_Level](), 0, 0
        for number, end in enumerate(np.cumsum(np.bincount(level)).tolist()):
            up = place[self._parents[order[start:end]]] - above
            same = not number or np.array_equal(up, np.arange(start - above))
            here = level[self._last] == number
            kept = (self._index(place[self._last[here]] - start), self._index(kept_slots[here])) if here.any() else None
            self._levels.append(_Level(start, end, None if same else self._index(up), kept))
            start, above = end, start
        self._begin = self._index(slots[self._owners[order[: self._levels[0].end]]])

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward runs inside; afterwards the texts have its rows. Where it fails, their states are lost."""
        for text, *_ in (*self._chunks, *self._steps):
            text.tokens = -1
        with using(self):
            yield
        for text, tail, _ in self._chunks:
            text.tokens, text.inputs = tail.prefix + len(tail.visible), None
        first = 0
        for text, tail, _ in self._steps:
            count = len(tail.visible)
            text.tokens, text.inputs = (tail.prefix + count, None) if tail.certain else (tail.prefix, self._inputs)
            text.first, text.parents, text.accepted = first, parents_of(tail), None
            first += count

    def run(self, module: Any, hidden: Tensor) -> Tensor:
        """A state layer over all rows, (1, T, H) -> (1, T, H); rows behind the batch's, which pad it, become zero."""
        form, number = module.form, module.state_number
        output = torch.zeros_like(hidden)
        for text, tail, first in self._chunks:
            part, slot = slice(first, first + len(tail.visible)), slice(text.slot, text.slot + 1)
            kept = (kind[number] for kind in (self._states.conv, self._states.recurrent))
            chunk = Cache(*(None if states is None else states[slot] for states in kept))
            output[:, part] = form.whole(module, hidden[:, part], **{form.cache: chunk})
        if self._steps:
            self._number = number
            rows = hidden[0, : self._count] if self._rows is None else hidden[0].index_select(0, self._rows)
            rows = F.pad(rows, (0, 0, 0, self._padding))
            stepped = form.single(module, rows[:, None], **{form.cache: Cache(self, self)})[: self._count, 0]
            if self._rows is None:
                output[0, : self._count] = stepped
            else:
                output[0].index_copy_(0, self._rows, stepped)
        return output

    def _nodes(self, name: str, new: Tensor) -> Tensor:
        """An argument of the N nodes, of which `new` are the R; these are kept while they may be accepted later."""
        if self._keeps:
            self._inputs[self._number, name] = new
        if not self._sources:
            return new
        parts = [inputs[self._number, name].index_select(0, rows) for inputs, rows in self._sources]
        return torch.cat((*parts, new))

    def step(self, stepped: Callable[[Mapping[str, Tensor]], Any], rule: Rule, rows: Mapping[str, Tensor]) -> Any:
        """Step the recurrent states over all nodes, level by level. rows: arguments of the R. As the function does."""
        slots = self._states.recurrent[self._number]
        assert slots is not None
        nodes = {name: self._nodes(name, new) for name, new in rows.items()}
        if self._order is not None:
            nodes = {name: every.index_select(0, self._order) for name, every in nodes.items()}
        states, outputs = slots.index_select(0, self._begin), list[Tensor]()
        for level in self._levels:
            if level.parents is not None:
                states = states.index_select(0, level.parents)
            inputs = {name: every[level.start : level.end] for name, every in nodes.items()}
            output = stepped(inputs | {rule.state: states})
            if rule.returned:
                output, states = output
            if level.kept is not None:
                slots.index_copy_(0, level.kept[1], states.index_select(0, level.kept[0]).to(slots.dtype))
            outputs.append(output)
        answer = torch.cat(outputs).index_select(0, self._answers)
        return (answer, states) if rule.returned else answer

    def convolved(self, new: Tensor) -> Tensor:
        """(R, C, 1) inputs of a convolution -> (R, C, K), those before each of them; the sessions keep their last."""
        slots = self._states.conv[self._number]
        assert slots is not None
        kernel = slots.shape[-1]
        if kernel not in self._windows:
            self._windows[kernel] = self._find(kernel)
        before, last = self._windows[kernel]
        windows = slots.index_select(0, self._slots).transpose(1, 2).flatten(0, 1)
        inputs = torch.cat((windows, self._nodes("conv", new[..., 0])))
        slots.index_copy_(0, self._kept_slots, inputs[last].transpose(1, 2))
        return inputs[before].transpose(1, 2)

    def _find(self, kernel: int) -> tuple[Tensor, Tensor]:
        """Among K inputs of each session's window and those of the N nodes: (R, K), the K before each of the R, and
        (n, K), the last K of each session that keeps others.
        """
        front = kernel * len(self._steps)
        newest = kernel * (self._owners + 1) - 1
        above = np.concatenate(
            (np.maximum(np.arange(front) - 1, 0), np.where(self._parents < 0, newest, front + self._parents))
        )
        columns = [front + np.arange(len(self._parents))]
        for _ in range(kernel):
            columns.append(above[columns[-1]])
        every = np.stack(columns[::-1], axis=1)  # a node's own input last
        return self._index(every[self._wanted, :-1]), self._index(every[self._last, 1:])


def parents_of(tail: Tail) -> Ints:
    """(n,) the row of the tail that each row continues, -1 for none: of those that it sees, the last before itself."""
    below = np.tril(tail.visible, -1)
    count = len(below)
    return np.where(below.any(axis=1), count - 1 - below[:, ::-1].argmax(axis=1), -1)
