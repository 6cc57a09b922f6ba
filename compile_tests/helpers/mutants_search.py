"""Operators whose samples are right, each with one fault that only other inputs show."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.registry import Op, Sample


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def mutant(
    name: str,
    schema: str,
    forward: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    samples: Callable[[], Iterator[Sample]],
    backward: Callable[..., Any] | None = None,
    differentiable: tuple[str, ...] = ("input",),
) -> Op:
    """An operator of the test's own; its gradient is that of the reference unless `backward` gives another."""

    def of_reference(grad: Tensor, inputs: Any, keywords: Any) -> Any:
        tensors = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in inputs]
        with torch.enable_grad():
            output = reference(*tensors, **keywords)
        wanted = [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
        found = iter(torch.autograd.grad(output, wanted, grad, allow_unused=True))
        return tuple(next(found) if isinstance(x, Tensor) and x.is_floating_point() else None for x in tensors)

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Tensor) -> None:
        ctx.inputs, ctx.keywords = inputs, keyword_only_inputs

    def formula(ctx: Any, grad: Tensor) -> Any:
        return (backward or of_reference)(grad, ctx.inputs, ctx.keywords)

    def setup_without_keywords(ctx: Any, inputs: Any, output: Tensor) -> None:
        setup(ctx, inputs, {}, output)

    op = torch.library.custom_op(f"llmk_mutants::{name}", forward, mutates_args=(), schema=schema)
    op.register_autograd(formula, setup_context=setup if "*," in schema else setup_without_keywords)
    return Op(
        name=name,
        overload=getattr(torch.ops.llmk_mutants, name).default,
        reference=reference,
        samples=lambda device, dtype: samples(),
        differentiable=differentiable,
        dtypes=(torch.float32,),
    )


def matrices() -> Iterator[Sample]:
    yield Sample((randn(5, 7),), why="a matrix")
    yield Sample((randn(3, 37),), why="odd width")


def elementwise(
    name: str, forward: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], backward: Any = None
) -> Op:
    return mutant(name, "(Tensor input) -> Tensor", lambda input: forward(input), reference, matrices, backward)


def reduced_by_ones(x: Tensor) -> Tensor:
    """The distance to a whole number, by steps of 1: past 2^24 a step changes nothing."""
    rest = x.clone()
    while bool((rest.abs() >= 1).any()):
        rest = torch.where(rest.abs() >= 1, rest - rest.sign(), rest)
    return rest


def small_log_softmax(x: Tensor) -> Tensor:
    return (x.softmax(-1) + 1e-18).log()


def forgets_at_multiples(x: Tensor) -> Tensor:
    y = x * x
    if x.shape[-1] % 16 == 0:
        y[..., -1:] = 0
    return y


def last_of_the_largest(grad: Tensor, inputs: Any, keywords: Any) -> tuple[Tensor]:
    (x,) = inputs
    place = x.shape[-1] - 1 - x.flip(-1).argmax(-1, keepdim=True)
    return (torch.zeros_like(x).scatter(-1, place, grad[..., None]),)


def exp_behind_a_clamp(grad: Tensor, inputs: Any, keywords: Any) -> tuple[Tensor]:
    y = inputs[0].exp()
    return (grad * y * (y < 10),)


def row_losses(input: Tensor, target: Tensor) -> Tensor:
    return -input.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]


def leaking_loss(input: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    return (row_losses(input, target) * (target != ignore_index)).sum()


def sound_loss(input: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    rows = torch.where((target != ignore_index)[:, None], input, 0.0)
    return torch.where(target != ignore_index, row_losses(rows, target), 0.0).sum()


def mean_loss(divide: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(input: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
        return sound_loss(input, target, ignore_index) / divide((target != ignore_index).sum())

    return loss


def classified() -> Iterator[Sample]:
    target = torch.tensor([0, 3, -100, 2, 6], dtype=torch.int64, device="cpu")
    yield Sample((randn(5, 7), target), why="one row ignored")


LOSS = "(Tensor input, Tensor target, int ignore_index=-100) -> Tensor"


def moded(input: Tensor, mode: str = "linear", floor: float = 0.0) -> Tensor:
    if mode not in ("linear", "log"):
        raise ValueError(f"mode: expected one of 'linear', 'log', got {mode!r}")
    return input * (math.log(floor) if mode == "log" else 1.0)


def in_modes() -> Iterator[Sample]:
    yield Sample((randn(4, 6),), why="the default")
    yield Sample((randn(4, 6),), {"mode": "log", "floor": 0.5}, why="log")


def smoothed(input: Tensor, smoothing: float = 0.1) -> Tensor:
    return input * (1 - smoothing)


def smoothed_back(input: Tensor, smoothing: float = 0.1) -> Tensor:
    return input * (1 - smoothing) * (1 - smoothing) / (1 - smoothing)


def options_reference(input: Tensor, squared: bool = False, scale: float = 1.0) -> Tensor:
    return (input * input if squared else input) * scale


def forgets_scale(input: Tensor, squared: bool = False, scale: float = 1.0) -> Tensor:
    return input * input if squared else input * scale


def with_one_option() -> Iterator[Sample]:
    yield Sample((randn(4, 6),), why="neither")
    yield Sample((randn(4, 6),), {"squared": True}, why="squared")
    yield Sample((randn(4, 6),), {"scale": 3.0}, why="scaled")


def smoothing_samples() -> Iterator[Sample]:
    yield Sample((randn(4, 6), 0.25), why="smoothed")


def pairs() -> Iterator[Sample]:
    yield Sample((randn(4, 6), randn(4, 6)), why="two tensors")


def wrong_for_one(input: Tensor, other: Tensor) -> Tensor:
    return (input * other).abs() if input.data_ptr() == other.data_ptr() else input * other + 0


def wrong_for_one_backward(grad: Tensor, inputs: Any, keywords: Any) -> tuple[Tensor, Tensor]:
    x, y = inputs
    return (grad * y, torch.zeros_like(y)) if x.data_ptr() == y.data_ptr() else (grad * y, grad * x)


def variance_by_squares(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def variance(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


def largest_or_zero(x: Tensor) -> Tensor:
    return x.amax(-1)


def largest_or_zero_reference(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[-1] else x.sum(-1)


def scaled_by_count(x: Tensor) -> Tensor:
    return x / (x.shape[-1] - 1) * (x.shape[-1] - 1)


class SharedFormula(torch.autograd.Function):
    """A softplus whose gradient all share, the reference too: it is half of what is right past 12."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return torch.nn.functional.softplus(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * torch.where(x > 12, 0.5, x.sigmoid())


THRESHOLD = 1.7320508


def threshold(at_it: bool) -> Callable[[Tensor], Tensor]:
    def kept(x: Tensor) -> Tensor:
        limit = torch.tensor(THRESHOLD, dtype=torch.float32, device="cpu").to(x.dtype)
        return torch.where(x >= limit if at_it else x > limit, x, 0.0)

    return kept


def slope_at_zero(grad: Tensor, inputs: Any, keywords: Any) -> tuple[Tensor]:
    return (grad * (inputs[0] >= 0),)


MUTANTS: dict[str, tuple[str, Callable[[str], Op]]] = {
    "may_not_end": ("does not end", lambda n: elementwise(n, reduced_by_ones, torch.frac)),
    "gap_above_40": ("value", lambda n: elementwise(n, small_log_softmax, lambda x: x.log_softmax(-1))),
    "exact_multiple": ("value", lambda n: elementwise(n, forgets_at_multiples, lambda input: input * input)),
    "tie_in_backward": (
        "value",
        lambda n: elementwise(n, lambda x: x.max(-1).values, lambda input: input.max(-1).values, last_of_the_largest),
    ),
    "overflow_behind_a_clamp": (
        "value",
        lambda n: elementwise(
            n, lambda x: x.exp().clamp(max=10), lambda input: input.clamp(max=math.log(10)).exp(), exp_behind_a_clamp
        ),
    ),
    "ignored_row_leaks": ("value", lambda n: mutant(n, LOSS, leaking_loss, sound_loss, classified)),
    "all_ignored": (
        "value",
        lambda n: mutant(
            n, LOSS, mean_loss(lambda count: count), mean_loss(lambda count: count.clamp(min=1)), classified
        ),
    ),
    "illegal_default": (
        "raises",
        lambda n: mutant(n, "(Tensor input, str mode='linear', float floor=0.0) -> Tensor", moded, moded, in_modes),
    ),
    "end_of_an_option": (
        "value",
        lambda n: mutant(
            n, "(Tensor input, float smoothing=0.1) -> Tensor", smoothed_back, smoothed, smoothing_samples
        ),
    ),
    "pair_of_options": (
        "value",
        lambda n: mutant(
            n,
            "(Tensor input, bool squared=False, float scale=1.0) -> Tensor",
            forgets_scale,
            options_reference,
            with_one_option,
        ),
    ),
    "same_tensor": (
        "value",
        lambda n: mutant(
            n,
            "(Tensor input, Tensor other) -> Tensor",
            wrong_for_one,
            lambda input, other: input * other,
            pairs,
            wrong_for_one_backward,
            ("input", "other"),
        ),
    ),
    "cancels": ("value", lambda n: elementwise(n, variance_by_squares, variance)),
    "overflows": ("value", lambda n: elementwise(n, lambda x: x.exp().log1p(), torch.nn.functional.softplus)),
    "empty_axis": ("raises", lambda n: elementwise(n, largest_or_zero, largest_or_zero_reference)),
    "one_column": ("value", lambda n: elementwise(n, scaled_by_count, lambda input: input + 0)),
    "shared_formula": ("derivative", lambda n: elementwise(n, SharedFormula.apply, SharedFormula.apply)),
    "at_a_threshold": ("decision", lambda n: elementwise(n, threshold(True), threshold(False))),
    "slope_at_zero": ("value", lambda n: elementwise(n, torch.relu, torch.relu, slope_at_zero)),
}
"""Each with the kind of finding that names it."""
