"""Modules that are called directly compute what they did, and what torch promises of them is kept where it is asked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coppice.engine.modules import call_directly


class Gate(nn.Module):
    """A layer with parts, one of them optional, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), None
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(states).relu()) * self.scale
        return out if self.norm is None else self.norm(out)


def test_the_answer_is_the_same() -> None:
    model, states = nn.Sequential(Gate(), nn.LayerNorm(4), Gate()), torch.randn(3, 4)
    expected, held = model(states), {name: value.clone() for name, value in model.state_dict().items()}
    call_directly(model)
    assert torch.equal(model(states), expected)
    assert model.state_dict().keys() == held.keys()
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert [type(module).__name__ for module in model.modules()].count("Gate") == 2
    assert isinstance(model[0], Gate)


def test_hooks_are_called_where_they_were_or_are_to_be() -> None:
    model, called = nn.Sequential(Gate(), Gate()), list[str]()
    model[0].up.register_forward_hook(lambda *_: called.append("before"))
    call_directly(model, [model[1]])
    model[1].register_forward_pre_hook(lambda *_: called.append("after"))
    model(torch.randn(2, 4))
    assert called == ["before", "after"]


def test_a_part_is_replaced_by_assignment() -> None:
    model, states = nn.Sequential(Gate()), torch.randn(2, 4)
    call_directly(model)
    whole = model(states)
    model[0].scale = nn.Parameter(torch.full((4,), 3.0))
    assert torch.equal(model(states), 2 * whole)
    model[0].down = nn.Linear(8, 4)
    assert not torch.equal(model(states), 2 * whole)
    model[0].down.weight.data.zero_()
    model[0].down.bias.data.zero_()
    assert torch.equal(model(states), torch.zeros(2, 4))
