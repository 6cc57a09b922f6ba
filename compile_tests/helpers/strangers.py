"""Operators as people write them who have never seen llmk, registered in every way that PyTorch has.

All of them are right: `python -m llmk.opcheck FILE --device cpu` checks every promise of each on both paths. The Triton
kernels have no code for a CPU unless one says so.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from llmk.registry import Op, Sample

library = torch.library.Library("strangers", "DEF")


def implement(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Register an implementation for every device on which tests run."""
    for key in ("CPU", "CUDA"):
        library.impl(name, function, key)


def matrices(count: int) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for shape, why in (((3, 37), "odd width"), ((4, 16), "powers of two")):
            yield Sample(tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(count)), why=why)

    return samples


def rows_of(count: int) -> Callable[[int, torch.device, torch.dtype], Sample]:
    def resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
        return Sample(tuple(torch.randn(rows, 24, device=device, dtype=dtype) for _ in range(count)), why="resized")

    return resized


def record(operator: Any, reference: Callable[..., Any], *, tensors: int = 1, **fields: Any) -> Op:
    name = getattr(reference, "__name__", "a_function").removeprefix("reference_")
    known: dict[str, Any] = {"samples": matrices(tensors), "resized": rows_of(tensors), "differentiable": ()}
    return Op(name=name, overload=operator, reference=reference, **(known | fields))


# The first tutorial of Triton's documentation, as an operator.


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


@triton_op("strangers::add", mutates_args={})
def add(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    output = torch.empty_like(x)
    n_elements = output.numel()
    if n_elements:
        wrap_triton(add_kernel)[(triton.cdiv(n_elements, 1024),)](x, y, output, n_elements, BLOCK_SIZE=1024)
    return output


add.register_autograd(lambda ctx, grad: (grad.clone(), grad.clone()))


def reference_add(x, y):
    return x + y


ADD = record(add, reference_add, tensors=2, differentiable=("x", "y"))


# PyTorch's tutorial on user-defined Triton kernels: a sine with a CPU kernel and a formula.


@triton.jit
def sin_kernel(in_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(in_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.sin(x.to(tl.float32)), mask=mask)


@triton_op("strangers::mysin", mutates_args={})
def mysin(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        wrap_triton(sin_kernel)[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), BLOCK_SIZE=4096)
    return out


@mysin.register_kernel("cpu")
def _(x):
    return torch.sin(x.contiguous())


def sin_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * x.cos()


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


mysin.register_autograd(sin_backward, setup_context=save_inputs)


def reference_mysin(x):
    return torch.sin(x)


MYSIN = record(mysin, reference_mysin, differentiable=("x",))


# A fused softmax whose backward pass is plain PyTorch.


@triton.jit
def softmax_kernel(output_ptr, input_ptr, input_row_stride, output_row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(input_ptr + row * input_row_stride + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    softmax = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * output_row_stride + cols, softmax, mask=cols < n_cols)


@triton_op("strangers::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    if n_rows:
        block = triton.next_power_of_2(n_cols)
        wrap_triton(softmax_kernel)[(n_rows,)](out, x, x.stride(0), out.stride(0), n_cols, BLOCK_SIZE=block)
    return out


def softmax_backward(ctx, grad):
    (out,) = ctx.saved_tensors
    grad, y = grad.float(), out.float()
    return ((grad - (grad * y).sum(-1, keepdim=True)) * y).to(out.dtype)


softmax.register_autograd(softmax_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


def reference_softmax(x):
    return torch.softmax(x, -1)


SOFTMAX = record(softmax, reference_softmax, differentiable=("x",), dtypes=(torch.float32,))


# PyTorch's custom operators manual: NumPy behind an operator, and its gradient behind another.


@custom_op("strangers::numpy_cos", mutates_args=())
def numpy_cos(x: Tensor) -> Tensor:
    return torch.from_numpy(np.cos(x.detach().cpu().numpy())).to(x.device)


@custom_op("strangers::numpy_sin", mutates_args=())
def numpy_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.detach().cpu().numpy())).to(x.device)


numpy_cos.register_fake(torch.empty_like)
numpy_sin.register_fake(torch.empty_like)
numpy_sin.register_autograd(lambda ctx, grad: grad * numpy_cos(ctx.saved_tensors[0]), setup_context=save_inputs)


def reference_numpy_sin(x):
    return torch.sin(x)


NUMPY_SIN = record(numpy_sin, reference_numpy_sin, differentiable=("x",), dtypes=(torch.float32,))


@custom_op("strangers::crop", mutates_args=())
def crop(pic: Tensor, left: int, right: int) -> Tensor:
    return pic[..., left:right].clone(memory_format=torch.contiguous_format)


@crop.register_fake
def _(pic, left, right):
    return pic.new_empty((*pic.shape[:-1], right - left))


def crops(device, dtype):
    yield Sample((torch.randn(3, 9, device=device, dtype=dtype), 2, 7), why="the middle")
    yield Sample((torch.randn(2, 4, 8, device=device, dtype=dtype), 0, 8), why="everything")


def reference_crop(pic, left, right):
    return pic[..., left:right]


CROP = record(crop, reference_crop, samples=crops, resized=None)


# torch.library's older way, for its dispatch keys.

library.define("mul(Tensor a, Tensor b) -> Tensor")
implement(library, "mul", lambda a, b: torch.mul(a, b).contiguous())
torch.library.register_fake("strangers::mul", lambda a, b: torch.empty(a.shape, dtype=a.dtype, device=a.device))
torch.library.register_autograd(
    "strangers::mul",
    lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
    setup_context=save_inputs,
)


def reference_mul(a, b):
    return a * b


MUL = record(torch.ops.strangers.mul, reference_mul, tensors=2, differentiable=("a", "b"))

library.define("swish(Tensor x) -> Tensor")
library.impl("swish", lambda x: (x.float() * torch.sigmoid(x.float())).to(x.dtype), "CompositeImplicitAutograd")


def reference_swish(x):
    return torch.nn.functional.silu(x)


SWISH = record(torch.ops.strangers.swish.default, reference_swish, differentiable=("x",))

library.define("tile_rows(Tensor x, SymInt n) -> Tensor")
implement(library, "tile_rows", lambda x, n: x.unsqueeze(0).expand(n, *x.shape).contiguous().clone())
torch.library.register_fake("strangers::tile_rows", lambda x, n: x.new_empty((n, *x.shape)))


def tiles(device, dtype):
    yield Sample((torch.randn(5, 7, device=device, dtype=dtype), 3), why="three times")
    yield Sample((torch.randn(2, 8, device=device, dtype=dtype), 1), why="once")


def reference_tile_rows(x, n):
    return x.unsqueeze(0).expand(n, *x.shape)


TILE_ROWS = record(torch.ops.strangers.tile_rows.default, reference_tile_rows, samples=tiles, resized=None)


# Operators that mutate their arguments.


@custom_op("strangers::sin_inplace", mutates_args={"x"})
def sin_inplace(x: Tensor) -> None:
    x.copy_(torch.from_numpy(np.sin(x.cpu().numpy())))


def reference_sin_inplace(x):
    x.sin_()


SIN_INPLACE = record(sin_inplace, reference_sin_inplace, dtypes=(torch.float32,))


@custom_op("strangers::add_out", mutates_args=("out",))
def add_out(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.add(x, y, out=out)


def outs(device, dtype):
    x, y, out = (torch.randn(3, 7, device=device, dtype=dtype) for _ in range(3))
    yield Sample((x, y), {"out": out}, why="an output is given")


def reference_add_out(x, y, out):
    out.copy_(x + y)


ADD_OUT = record(add_out, reference_add_out, samples=outs, resized=None)


@triton.jit
def scale_kernel(x_ptr, scale, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * scale, mask=mask)


@triton_op("strangers::scale_", mutates_args={"x"})
def scale_(x: Tensor, scale: float) -> None:
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    if x.numel():
        wrap_triton(scale_kernel)[(triton.cdiv(x.numel(), 256),)](x, scale, x.numel(), BLOCK_SIZE=256)


def scaled(device, dtype):
    yield Sample((torch.randn(3, 37, device=device, dtype=dtype), 0.5), why="halved")


def reference_scale_(x, scale):
    x.mul_(scale)


SCALE = record(scale_, reference_scale_, samples=scaled, resized=None)


# Several outputs, optional tensors, lists of tensors.


@custom_op("strangers::max_and_index", mutates_args=())
def max_and_index(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.max(-1)
    return values, indices


@max_and_index.register_fake
def _(x):
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)


def max_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.shape = inputs[0].shape
    ctx.mark_non_differentiable(output[1])


def max_backward(ctx, grad, _):
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.shape).scatter(-1, indices.unsqueeze(-1), grad.unsqueeze(-1))


max_and_index.register_autograd(max_backward, setup_context=max_setup)


def reference_max_and_index(x):
    return tuple(x.max(-1))


MAX_AND_INDEX = record(max_and_index, reference_max_and_index, differentiable=("x",))


@custom_op("strangers::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@linear.register_fake
def _(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_setup(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def linear_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.T @ x, grad.sum(0) if ctx.has_bias else None


linear.register_autograd(linear_backward, setup_context=linear_setup)


def linears(device, dtype):
    x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in ((5, 12), (7, 12), (7,)))
    yield Sample((x, weight), why="no bias")
    yield Sample((x, weight, bias), why="a bias")


def reference_linear(x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


LINEAR = record(linear, reference_linear, samples=linears, resized=None, differentiable=("x", "weight", "bias"))


@custom_op("strangers::concat", mutates_args=())
def concat(xs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


@concat.register_fake
def _(xs, dim):
    return torch.cat(list(xs), dim)


def concat_setup(ctx, inputs, output):
    xs, ctx.dim = inputs
    ctx.sizes = [x.shape[ctx.dim] for x in xs]


concat.register_autograd(
    lambda ctx, grad: ([part.clone() for part in grad.split(ctx.sizes, ctx.dim)], None), setup_context=concat_setup
)


def lists(device, dtype):
    a, b, c = (torch.randn(rows, 6, device=device, dtype=dtype) for rows in (2, 3, 3))
    yield Sample(([a, b], 0), why="two")
    yield Sample(([b, c, c.clone()], 1), why="three, side by side")


def reference_concat(xs, dim):
    return torch.cat(list(xs), dim)


CONCAT = record(concat, reference_concat, samples=lists, resized=None, differentiable=("xs",))


@custom_op("strangers::halves", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    middle = x.shape[-1] // 2
    return [x[..., :middle].clone(), x[..., middle:].clone()]


halves.register_fake(lambda x: [x[..., : x.shape[-1] // 2].clone(), x[..., x.shape[-1] // 2 :].clone()])


def reference_halves(x):
    return [x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]]


HALVES = record(halves, reference_halves)


@custom_op("strangers::unpack_nibbles", mutates_args=())
def unpack_nibbles(packed: Tensor, scale: float) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() * scale


@unpack_nibbles.register_fake
def _(packed, scale):
    return torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.float32, device=packed.device)


def nibbles(device, dtype):
    yield Sample((torch.arange(24, dtype=torch.uint8, device=device).reshape(3, 8) * 10, 0.25), why="bytes")


def reference_unpack_nibbles(packed, scale):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() * scale


UNPACK_NIBBLES = record(
    unpack_nibbles, reference_unpack_nibbles, samples=nibbles, resized=None, dtypes=(torch.float32,)
)


@custom_op("strangers::quantized", mutates_args=())
def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@quantized.register_fake
def _(x):
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


def reference_quantized(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


QUANTIZED = record(quantized, reference_quantized, dtypes=(torch.float32,))


@custom_op("strangers::phase", mutates_args=())
def phase(x: Tensor) -> Tensor:
    return torch.complex(x.cos(), x.sin())


phase.register_fake(lambda x: torch.empty_like(x, dtype=torch.complex64))
phase.register_autograd(
    lambda ctx, grad: grad.imag * ctx.saved_tensors[0].cos() - grad.real * ctx.saved_tensors[0].sin(),
    setup_context=save_inputs,
)


def reference_phase(x):
    return torch.complex(x.cos(), x.sin())


PHASE = record(phase, reference_phase, differentiable=("x",), dtypes=(torch.float32,))


@custom_op("strangers::positive", mutates_args=())
def positive(x: Tensor) -> tuple[Tensor, int]:
    return (x > 0).sum(-1), x.shape[0]


positive.register_fake(lambda x: (x.new_empty(x.shape[:-1], dtype=torch.int64), x.shape[0]))


def reference_positive(x):
    return (x > 0).sum(-1), x.shape[0]


POSITIVE = record(positive, reference_positive)


# An autograd.Function behind a function, which the dispatcher does not know.


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out


def exp(x: Tensor) -> Tensor:
    return Exp.apply(x)


def reference_exp(x):
    return x.exp()


EXP = record(exp, reference_exp, differentiable=("x",))
