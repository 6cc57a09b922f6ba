"""Operators that are broken on purpose, one way each, and the promise of opcheck's that names it first."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.registry import Op, Sample
from llmk.registry.eager.bypass import takes_fast_path

library = torch.library.Library("llmk_test", "FRAGMENT")
calls = iter(range(10**9))
home = threading.get_ident()


def square_reference(input: Tensor) -> Tensor:
    return input * input


def product_reference(input: Tensor, other: Tensor) -> Tensor:
    return input * other


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((torch.randn(5, 7, device=device, dtype=dtype),), why="a matrix")
    yield Sample((torch.randn(8, 8, device=device, dtype=dtype),), why="a larger one")


def resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample((torch.randn(rows, 6, device=device, dtype=dtype),), why="resized")


def pairs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(tuple(torch.randn(4, 6, device=device, dtype=dtype) for _ in range(2)), why="a pair")


def fake_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def record(name: str, **fields: Any) -> Op:
    known: dict[str, Any] = {
        "reference": square_reference,
        "samples": samples,
        "resized": resized,
        "differentiable": ("input",),
        "dtypes": (torch.float32,),
        "overload": getattr(torch.ops.llmk_test, name, None) and getattr(torch.ops.llmk_test, name).default,
    }
    return Op(name=name, **(known | fields))


def square(
    name: str,
    forward: Callable[[Tensor], Tensor] = lambda x: x * x,
    backward: Callable[[Tensor, Tensor], Tensor] = lambda grad, x: 2 * grad * x,
    fake: Callable[[Tensor], Tensor] = fake_like,
    **fields: Any,
) -> Op:
    """x * x as an operator of its own, from parts of which one may be broken."""
    backward_op = torch.library.custom_op(
        f"llmk_test::{name}_backward",
        lambda grad, x: backward(grad, x),
        mutates_args=(),
        schema="(Tensor grad, Tensor x) -> Tensor",
    )
    backward_op.register_fake(lambda grad, x: fake_like(x))
    return by_formula(name, lambda ctx, grad: backward_op(grad, *ctx.saved_tensors), forward, fake=fake, **fields)


def by_formula(
    name: str,
    formula: Callable[..., Any],
    forward: Callable[[Tensor], Tensor] = lambda x: x * x,
    setup: Callable[..., None] = save,
    fake: Callable[[Tensor], Tensor] = fake_like,
    **fields: Any,
) -> Op:
    """x * x whose backward formula may be broken."""
    op = torch.library.custom_op(
        f"llmk_test::{name}",
        lambda input: forward(input).contiguous(),
        mutates_args=(),
        schema="(Tensor input) -> Tensor",
    )
    op.register_fake(fake)
    op.register_autograd(formula, setup_context=setup)
    return record(name, **fields)


def product(name: str, formula: Callable[..., Any]) -> Op:
    """x * y whose backward formula may be broken."""
    op = torch.library.custom_op(
        f"llmk_test::{name}",
        lambda input, other: (input * other).contiguous(),
        mutates_args=(),
        schema="(Tensor input, Tensor other) -> Tensor",
    )
    op.register_fake(lambda input, other: fake_like(input))
    op.register_autograd(formula, setup_context=save)
    return record(name, reference=product_reference, samples=pairs, resized=None, differentiable=("input", "other"))


def composite(name: str, fn: Callable[[Tensor], Tensor]) -> Op:
    library.define(f"{name}(Tensor input) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, fn, "CompositeImplicitAutograd")
    return record(name)


def shares_memory(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    both = torch.stack([grad * y, grad * x])
    return both[0], both[1]


def save_and_count(ctx: Any, inputs: Any, output: Any) -> None:
    save(ctx, inputs, output)
    ctx.backwards = 0


def other_the_second_time(ctx: Any, grad: Tensor) -> Tensor:
    ctx.backwards += 1
    return (1 + ctx.backwards) * grad * ctx.saved_tensors[0]


def ones_where_expanded(grad: Tensor, x: Tensor) -> Tensor:
    return 2 * x if grad.stride() == (0, 0) else 2 * grad * x


def gradient_as_contiguous(grad: Tensor, x: Tensor) -> Tensor:
    if grad.stride() not in ((x.shape[1], 1), (0, 0)):
        grad = torch.as_strided(grad, x.shape, (x.shape[1], 1))
    return 2 * grad * x


def wrong_alone(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    return grad * y, grad * x if ctx.needs_input_grad[0] else grad * y


def save_unmaterialized(ctx: Any, inputs: Any, output: Any) -> None:
    save(ctx, inputs, output)
    ctx.set_materialize_grads(False)


def save_the_derivative(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(2 * inputs[0].detach())


def forgets_the_last_of_31(x: Tensor) -> Tensor:
    y = x * x
    if len(y) == 31:
        y[-1] = 0
    return y


def one_program_too_many_bits(x: Tensor) -> Tensor:
    """Its offsets have 32 bits."""
    far = (len(x) - 1) * x.stride(0) >= 2**31
    return torch.zeros_like(x, memory_format=torch.contiguous_format) if far else x * x


def other_when_compiled(x: Tensor) -> Tensor:
    return 3 * x if torch.compiler.is_compiling() else x * x


def depends_on_rows(x: Tensor) -> Tensor:
    return x * x if x.shape[0] in (64, 33, 7) else x.square()


def on_the_default_device(x: Tensor) -> Tensor:
    place = torch.get_default_device()
    return x * x * torch.ones(x.shape[1], dtype=x.dtype, device=x.device if place.type == "cpu" else place)


def clones_its_input(x: Tensor) -> Tensor:
    return x.clone() * x


def without_formula_unless_wanted(name: str) -> Op:
    """A composite that asks, while it is traced, whether a gradient is wanted."""
    trained = by_formula(f"{name}_trained", lambda ctx, grad: 2 * grad * ctx.saved_tensors[0]).overload
    plain = torch.library.custom_op(
        f"llmk_test::{name}_plain",
        lambda input: (input * input).contiguous(),
        mutates_args=(),
        schema="(Tensor input) -> Tensor",
    )
    plain.register_fake(fake_like)
    return composite(name, lambda x: trained(x) if torch.is_grad_enabled() and x.requires_grad else plain(x))


def lowered_wrong(name: str) -> Op:
    from torch._inductor.lowering import lowerings, register_lowering

    op = composite_with_formula(name)
    register_lowering(op.overload, type_promotion_kind=None)(lambda x: lowerings[torch.ops.aten.mul](x, 3.0))
    return op


def lowered_wrong_where_long(name: str) -> Op:
    from torch._inductor.lowering import lowerings, register_lowering

    def with_a_long_row(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield from samples(device, dtype)
        yield Sample((torch.randn(1, 20_000, device=device, dtype=dtype),), why="a long row")

    op = square(name, samples=with_a_long_row)
    register_lowering(op.overload, type_promotion_kind=None)(
        lambda x: lowerings[torch.ops.aten.mul](x, 3.0 if x.get_size()[-1] == 20_000 else x)
    )
    return op


def composite_with_formula(name: str) -> Op:
    return square(name)


def nan_past_the_exponent(grad: Tensor, x: Tensor) -> Tensor:
    """A term that is always 0, until its factor overflows."""
    return 2 * grad * x + 0 * x.abs().exp()


BROKEN: dict[str, tuple[str, Callable[[str], Op]]] = {
    "fake_in_float32": (
        "torch_opcheck",
        lambda n: square(n, fake=lambda x: fake_like(x).float(), dtypes=(torch.float32, torch.bfloat16)),
    ),
    "rounds_twice": ("values_and_gradients", lambda n: square(n, lambda x: (x * x).bfloat16().to(x.dtype))),
    "nan_past_the_exponent": ("finite_gradients", lambda n: square(n, backward=nan_past_the_exponent)),
    "shares_memory": ("no_alias", lambda n: product(n, shares_memory)),
    "second_is_other": ("second_backward", lambda n: by_formula(n, other_the_second_time, setup=save_and_count)),
    "gradient_with_a_graph": (
        "second_backward",
        lambda n: square(n, backward=lambda grad, x: (2 * grad * x).requires_grad_()),
    ),
    "clamps_gradient": ("scaled_gradient", lambda n: square(n, backward=lambda g, x: 2 * g.clamp(-4, 4) * x)),
    "assumes_ones": ("expanded_gradient", lambda n: square(n, backward=ones_where_expanded)),
    "gradient_strides": ("strided_gradient", lambda n: square(n, backward=gradient_as_contiguous)),
    "wrong_alone": ("input_subsets", lambda n: product(n, wrong_alone)),
    "needs_a_gradient": (
        "undefined_gradients",
        lambda n: by_formula(n, lambda ctx, grad: 2 * grad * ctx.saved_tensors[0], setup=save_unmaterialized),
    ),
    "gradient_made_early": (
        "second_derivatives",
        lambda n: by_formula(n, lambda ctx, grad: grad * ctx.saved_tensors[0], setup=save_the_derivative),
    ),
    "forgets_a_row": ("edge_rows", lambda n: square(n, forgets_the_last_of_31)),
    "offsets_of_32_bits": ("far_rows", lambda n: square(n, one_program_too_many_bits)),
    "other_each_time": ("deterministic", lambda n: square(n, lambda x: x * x * (1 + 1e-7 * (next(calls) % 3)))),
    "other_on_short_path": (
        "same_on_short_path",
        lambda n: square(n, lambda x: x * x * (1.0 if takes_fast_path([x]) else 1 + 2.4e-7)),
    ),
    "home_only": (
        "another_thread",
        lambda n: square(n, lambda x: x * x * (1.0 if threading.get_ident() == home else 3.0)),
    ),
    "default_dtype_leaks": (
        "default_dtype",
        lambda n: square(n, lambda x: x * x * torch.ones(x.shape[1], device=x.device)),
    ),
    "default_device_leaks": ("default_device", lambda n: square(n, on_the_default_device)),
    "other_when_compiled": ("compiled_samples", lambda n: composite(n, other_when_compiled)),
    "recompiles": ("no_recompile", lambda n: composite(n, depends_on_rows)),
    "clones": ("clean_graph", lambda n: composite(n, clones_its_input)),
    "trains_otherwise": ("exported_trains", without_formula_unless_wanted),
    "lowered_wrong": ("compiled", lowered_wrong),
    "forward_mode_zero": ("refuses_transforms", square),
}

BROKEN_WHERE_ASKED: dict[str, tuple[str, Callable[[str], Op]]] = {
    "lowered_wrong_where_long": ("compiled_shapes", lowered_wrong_where_long),
}
