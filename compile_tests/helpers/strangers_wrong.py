"""Operators as people write them, each wrong in one way, and how opcheck's report has to begin for each.

`IN_PYTORCH` run on every path; the kernels of `IN_TRITON` are checked in Triton's interpreter.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from compile_tests.helpers.strangers import (
    concat_setup,
    implement,
    linear_setup,
    linears,
    lists,
    record,
    reference_exp,
    reference_linear,
    reference_mul,
    reference_softmax,
    save_inputs,
)
from llmk.registry import Op, Sample

library = torch.library.Library("strangers_wrong", "DEF")

IN_PYTORCH: dict[str, tuple[Op, str, str]] = {}
IN_TRITON: dict[str, tuple[Op, str, str]] = {}
"""The record, the kind of the first cause, and words of its message."""


def wrong(name: str, kind: str, words: str, operator: Any, reference: Any, **fields: Any) -> None:
    where = IN_TRITON if fields.pop("in_triton", False) else IN_PYTORCH
    op = record(operator, reference, **({"dtypes": (torch.float32,)} | fields))
    where[name] = dataclasses.replace(op, name=name), kind, words


def reference_square(x):
    return x * x


def square_op(name: str, backward: Any) -> Any:
    operator = custom_op(f"strangers_wrong::{name}", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(torch.empty_like)
    operator.register_autograd(backward, setup_context=save_inputs)
    return operator


# Gradients.

operator = square_op("missing_factor", lambda ctx, grad: grad * ctx.saved_tensors[0])
wrong("missing_factor", "wrong gradients", "gradient of x", operator, reference_square, differentiable=("x",))

operator = square_op("ignores_incoming", lambda ctx, grad: 2 * ctx.saved_tensors[0])
wrong("ignores_incoming", "wrong gradients", "gradient of x", operator, reference_square, differentiable=("x",))

operator = square_op(
    "wants_contiguous_gradient",
    lambda ctx, grad: (2 * ctx.saved_tensors[0].reshape(-1) * grad.view(-1)).view(grad.shape),
)
wrong(
    "wants_contiguous_gradient",
    "wrong gradients",
    "view size is not compatible",
    operator,
    reference_square,
    differentiable=("x",),
)


@custom_op("strangers_wrong::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def mean_for_sum(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.T @ x, grad.mean(0) if ctx.has_bias else None


linear.register_fake(lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0])))
linear.register_autograd(mean_for_sum, setup_context=linear_setup)
wrong(
    "mean_for_sum",
    "wrong gradients",
    "gradient of bias",
    linear,
    reference_linear,
    samples=linears,
    resized=None,
    differentiable=("x", "weight", "bias"),
)


class ExpOfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


def exp_of_input(x: Tensor) -> Tensor:
    return ExpOfInput.apply(x)


wrong("saves_the_wrong_one", "wrong gradients", "gradient of x", exp_of_input, reference_exp, differentiable=("x",))


@custom_op("strangers_wrong::concat", mutates_args=())
def concat(xs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


concat.register_fake(lambda xs, dim: torch.cat(list(xs), dim))
concat.register_autograd(
    lambda ctx, grad: (
        ([part.clone() for part in reversed(grad.split(ctx.sizes, ctx.dim))], None)
        if len(set(ctx.sizes)) == 1
        else ([part.clone() for part in grad.split(ctx.sizes, ctx.dim)], None)
    ),
    setup_context=concat_setup,
)


def reference_concat(xs, dim):
    return torch.cat(list(xs), dim)


wrong(
    "reversed_parts",
    "wrong gradients",
    "gradient of xs_0",
    concat,
    reference_concat,
    samples=lists,
    resized=None,
    differentiable=("xs",),
)


# Values.


@custom_op("strangers_wrong::index_of_max", mutates_args=())
def index_of_max(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.max(-1)
    return values, (indices + 1) % x.shape[-1]


index_of_max.register_fake(lambda x: (x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)))
wrong("next_index", "wrong values", "output 1: element 0 is", index_of_max, lambda x: tuple(x.max(-1)))


@custom_op("strangers_wrong::axpy_", mutates_args=("out",))
def axpy_(x: Tensor, out: Tensor, alpha: float) -> None:
    out.add_(x)


def reference_axpy(x, out, alpha):
    out.add_(x, alpha=alpha)


def axpys(device, dtype):
    x, out = (torch.randn(3, 7, device=device, dtype=dtype) for _ in range(2))
    yield Sample((x, out, 0.5), why="halved")


wrong("forgets_alpha", "wrong values", "output 0", axpy_, reference_axpy, samples=axpys, resized=None)


# Memory and the schema.

library.define("relu(Tensor x) -> Tensor")
implement(library, "relu", lambda x: x.relu_().clone())
torch.library.register_fake("strangers_wrong::relu", torch.empty_like)
wrong("mutates_in_silence", "memory", "input x was mutated", torch.ops.strangers_wrong.relu, torch.relu)

library.define("flat(Tensor x) -> Tensor")
implement(library, "flat", lambda x: x.view(-1))
torch.library.register_fake("strangers_wrong::flat", lambda x: x.new_empty(x.numel()))


wrong(
    "returns_a_view",
    "memory",
    "shares memory with input x",
    torch.ops.strangers_wrong.flat,
    lambda x: x.reshape(-1),
    resized=None,
)


BUFFERS: dict[Any, Tensor] = {}


def into_a_buffer(x):
    return torch.mul(x, x, out=BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x)))


library.define("buffered(Tensor x) -> Tensor")
implement(library, "buffered", into_a_buffer)
torch.library.register_fake("strangers_wrong::buffered", torch.empty_like)
wrong(
    "returns_a_buffer",
    "memory",
    "output 0 shares memory with output 0 of the call before",
    torch.ops.strangers_wrong.buffered,
    reference_square,
)

library.define("forgets_to_say(Tensor x) -> ()")
implement(library, "forgets_to_say", lambda x: None)
torch.library.register_fake("strangers_wrong::forgets_to_say", lambda x: None)
wrong(
    "returns_nothing",
    "wrong values",
    "it returns nothing",
    torch.ops.strangers_wrong.forgets_to_say,
    lambda x: None,
)


# Results of other kinds than tensors of real numbers.


@custom_op("strangers_wrong::doubled_and_rows", mutates_args=())
def doubled_and_rows(x: Tensor) -> tuple[Tensor, int]:
    return 2 * x, x.shape[0] + 1


doubled_and_rows.register_fake(lambda x: (torch.empty_like(x), x.shape[0] + 1))
wrong("a_number", "wrong values", "output 1: element 0 is", doubled_and_rows, lambda x: (2 * x, x.shape[0]))


def named_parts(x: Tensor) -> dict[str, Any]:
    return {"halves": [x / 2, x / 2], "mean": float(x.mean())}


wrong(
    "in_a_dictionary",
    "wrong values",
    "output 1: element",
    named_parts,
    lambda x: {"halves": [x / 2, -x / 2], "mean": float(x.mean())},
)
wrong("one_too_few", "wrong values", "the results are 3, where the reference returns 1", named_parts, lambda x: x / 2)

library.define("phase(Tensor x) -> Tensor")
implement(library, "phase", lambda x: torch.complex(x.cos(), -x.sin()))
torch.library.register_fake("strangers_wrong::phase", lambda x: x.new_empty(x.shape, dtype=torch.complex64))
wrong(
    "a_conjugate",
    "wrong values",
    "output 0: element",
    torch.ops.strangers_wrong.phase,
    lambda x: torch.complex(x.cos(), x.sin()),
)

library.define("phase_with_formula(Tensor x) -> Tensor")
implement(library, "phase_with_formula", lambda x: torch.complex(x.cos(), x.sin()))
torch.library.register_fake(
    "strangers_wrong::phase_with_formula", lambda x: x.new_empty(x.shape, dtype=torch.complex64)
)
torch.library.register_autograd(
    "strangers_wrong::phase_with_formula",
    lambda ctx, grad: grad.imag * ctx.saved_tensors[0].cos() + grad.real * ctx.saved_tensors[0].sin(),
    setup_context=save_inputs,
)
wrong(
    "a_complex_gradient",
    "wrong gradients",
    "gradient of x",
    torch.ops.strangers_wrong.phase_with_formula,
    lambda x: torch.complex(x.cos(), x.sin()),
    differentiable=("x",),
)

library.define("to_float8(Tensor x) -> Tensor")
implement(library, "to_float8", lambda x: (1.25 * x).to(torch.float8_e4m3fn))
torch.library.register_fake("strangers_wrong::to_float8", lambda x: x.new_empty(x.shape, dtype=torch.float8_e4m3fn))
wrong(
    "another_scale",
    "wrong values",
    "output 0: element",
    torch.ops.strangers_wrong.to_float8,
    lambda x: x.to(torch.float8_e4m3fn),
)


# The fake implementation.

library.define("mul(Tensor a, Tensor b) -> Tensor")
implement(library, "mul", torch.mul)
torch.library.register_fake("strangers_wrong::mul", lambda a, b: torch.empty(a.shape, dtype=torch.float64))
wrong("fake_of_another_dtype", "compile", "test_faketensor", torch.ops.strangers_wrong.mul, reference_mul, tensors=2)

library.define("no_fake(Tensor a, Tensor b) -> Tensor")
implement(library, "no_fake", lambda a, b: (a * b).contiguous())
wrong("no_fake", "compile", "no_fake", torch.ops.strangers_wrong.no_fake, reference_mul, tensors=2)


# Triton kernels.


@triton.jit
def copy_kernel(x_ptr, out_ptr, n_elements, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if HAS_MASK:
        mask = offsets < n_elements
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    else:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton_op("strangers_wrong::no_mask", mutates_args=())
def no_mask(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    wrap_triton(copy_kernel)[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32, HAS_MASK=False)
    return out


@triton_op("strangers_wrong::no_remainder", mutates_args=())
def no_remainder(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    wrap_triton(copy_kernel)[(x.numel() // 32,)](x, out, x.numel(), BLOCK=32, HAS_MASK=True)
    return out


wrong("no_mask", "memory", "copy_kernel loads offset 111 of x_ptr", no_mask, lambda x: x, resized=None, in_triton=True)
wrong("no_remainder", "memory", "never written", no_remainder, lambda x: x, resized=None, in_triton=True)


@triton.jit
def softmax_kernel(out_ptr, x_ptr, n_cols, LONG: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if LONG else tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * n_cols + cols, numerator / tl.sum(numerator, axis=0), mask=cols < n_cols)


@triton_op("strangers_wrong::any_strides", mutates_args=())
def any_strides(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    wrap_triton(softmax_kernel)[(x.shape[0],)](out, x, x.shape[1], LONG=True, BLOCK=block)
    return out


@triton_op("strangers_wrong::short_offsets", mutates_args=())
def short_offsets(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    wrap_triton(softmax_kernel)[(x.shape[0],)](out, x, x.shape[1], LONG=False, BLOCK=block)
    return out


wrong(
    "any_strides", "memory", "softmax_kernel loads offset", any_strides, reference_softmax, resized=None, in_triton=True
)
wrong("short_offsets", "memory", "in 32 bits", short_offsets, reference_softmax, resized=None, in_triton=True)


@triton.jit
def sum_kernel(x_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0), axis=0)
    tl.store(out_ptr, tl.load(out_ptr) + part)


@triton_op("strangers_wrong::racing_sum", mutates_args=())
def racing_sum(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.zeros((), dtype=x.dtype, device=x.device)
    wrap_triton(sum_kernel)[(triton.cdiv(x.numel(), 4),)](x, out, x.numel(), BLOCK=4)
    return out


wrong("racing_sum", "memory", "depends on the order of the programs", racing_sum, torch.sum, in_triton=True)
