"""Muon: momentum whose step is made orthogonal, for the hidden matrices of a transformer (Jordan et al., 2024)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# The quintic of the original write-up: fast at small singular values, lands in about [0.7, 1.2], which is enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STACK = 10
"""Matrices multiplied at once: enough for batched kernels, few enough to share between threads."""


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: U V^T of each (M, N) of a (B, M, N) stack, by Newton-Schulz.

    Iterates on the Gram matrices X X^T, whose polynomials commute, and multiplies by X once at the end: a third less
    work than the textbook loop when N is several times M. Runs in the dtype of `stack`, which should be float32 (the
    Gram matrix squares the condition number).
    """
    a, b, c = COEFFICIENTS
    wide = stack.size(-2) <= stack.size(-1)
    x = stack if wide else stack.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = torch.bmm(x, x.mT)
    product = None
    for step in range(steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else torch.bmm(polynomial, product)
        if step + 1 < steps:
            gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
    x = x if product is None else torch.bmm(product, x)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised over stacks of same-shaped matrices.

    A step has the size lr * sqrt(max(1, rows / columns)) in spectral norm, whatever the gradient's scale.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        steps: int = 4,
        run: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
    ) -> None:
        """`run(function, stacks)` may update the stacks in parallel."""
        params = list(params)
        if any(p.ndim != 2 for p in params):
            raise ValueError("Muon takes matrices only")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})
        self.run = run

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            stacks = [params[i : i + STACK] for params in by_shape.values() for i in range(0, len(params), STACK)]
            list(self.run(partial(self._step_stack, group), stacks))

    @torch.no_grad()
    def _step_stack(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
        update = orthogonalise(torch.stack(nesterov).float(), group["steps"]).to(params[0].dtype)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = max(1.0, params[0].shape[0] / params[0].shape[1]) ** 0.5
        torch._foreach_add_(params, list(update.unbind()), alpha=-group["lr"] * scale)
