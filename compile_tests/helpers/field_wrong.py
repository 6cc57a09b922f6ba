"""Wrong operators, as people and code generators write them: one fault each, and how opcheck's report begins for it."""

import re
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op, triton_op, wrap_triton

from compile_tests.helpers.field_right import calls
from compile_tests.helpers.strangers import implement, record
from llmk.opcheck.report.causes import Cause
from llmk.registry import Op, Sample


@dataclass(frozen=True)
class Wrong:
    """An operator, and what the first paragraph of its report says: a pattern of the headline and the message."""

    op: Op
    words: str

    def is_named_by(self, found: list[Cause]) -> bool:
        return bool(found) and re.search(self.words, f"{found[0].headline} {found[0].first.message}") is not None


WRONG: dict[str, Wrong] = {}
IN_TRITON: dict[str, Wrong] = {}
SLOW = ("compiled", "no_recompile", "default_dtype", "default_device")
"""The checks that take most of the time; `python -m llmk.opcheck FILE` runs them."""


def wrong(words: str, reference: Any, wanted: str = "", *, in_triton: bool = False, **fields: Any) -> Any:
    """Record the function below as an operator with this reference."""

    def decorate(operator: Any) -> Any:
        name = getattr(operator, "__name__", None) or operator._qualname.rpartition("::")[2]
        known = {"dtypes": (torch.float32,), "differentiable": tuple(wanted.split())} | fields
        op = Op(**(vars(record(operator, reference, **known)) | {"name": name}))
        (IN_TRITON if in_triton else WRONG)[name] = Wrong(op, words)
        return operator

    return decorate


def square(x):
    return x * x


# Values that samples of normal numbers do not have: large, far from 0, tiny, NaN.


@wrong("breaks harsh_values.* times 64 .*nan", lambda x: x.softmax(-1))
def softmax_without_maximum(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


@wrong("breaks harsh_values.* times 64 .*inf", lambda x: x.logsumexp(-1))
def logsumexp_without_maximum(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log()


@wrong("breaks harsh_values.* times 64 .*inf", lambda x: x.log_softmax(-1))
def log_of_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1).log()


@wrong("breaks harsh_values.* times 64 .*nan", torch.sigmoid)
def sigmoid_of_one_exponential(x: Tensor) -> Tensor:
    return x.exp() / (1 + x.exp())


@wrong("breaks harsh_values.* far ", lambda x: F.layer_norm(x, x.shape[-1:]))
def variance_of_squares(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) * (var.clamp(min=0) + 1e-5).rsqrt()


@wrong("breaks harsh_values.* times 2\\^-14", lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6))
def eps_outside_the_root(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 5e-7)


@wrong("breaks harsh_values.* times 2\\^-14", lambda x: F.normalize(x, dim=-1, eps=1e-12))
def large_clamp(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)


@wrong("breaks harsh_values.*far below 0", lambda x: x.amax(-1))
def maximum_from_a_floor(x: Tensor) -> Tensor:
    return x.clamp(min=-1e4).amax(-1)


@wrong("wrong values.*0 where nan is right", torch.relu)
def nan_is_zero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


@wrong("wrong values.*nan is right", lambda x: x.amax(-1))
def nan_is_skipped(x: Tensor) -> Tensor:
    return x.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)


@wrong("wrong values", torch.exp)
def flushes_below_minus_four(x: Tensor) -> Tensor:
    return torch.where(x < -4, 0.0, x.exp())


# Values that any sample shows.


@wrong("wrong values", F.gelu)
def other_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@wrong("wrong values", lambda x, keep, p: x * keep / (1 - p), samples=calls((3, 7), (3, 7), more=(0.3,)), resized=None)
def dropout_without_scale(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return x * keep


@wrong("wrong values", lambda x: x.sum(-1), dtypes=(torch.bfloat16,), samples=calls((4, 300)), resized=None)
def sums_in_bfloat16(x: Tensor) -> Tensor:
    total = x[:, 0].clone()
    for column in range(1, x.shape[-1]):
        total += x[:, column]
    return total


def reference_round(x):
    return x.round().to(torch.int32)


def halves(device, dtype):
    yield Sample((torch.tensor([[0.5, 1.5, 2.5], [-0.5, 1.2, 3.7]], device=device, dtype=dtype),), why="halves")


@wrong("wrong values.*output 0: element 0 is 1 where 0", reference_round, samples=halves, resized=None, exact=True)
def rounds_halves_up(x: Tensor) -> Tensor:
    return (x + 0.5).floor().to(torch.int32)


def tied(device, dtype):
    yield Sample((torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]], device=device, dtype=dtype),), why="ties")


@wrong("wrong values.*element 0 is 2 where 1", lambda x: x.argmax(-1), samples=tied, resized=None, exact=True)
def last_of_ties(x: Tensor) -> Tensor:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


# Sizes that no sample has.


@wrong("breaks other_sizes.*(1025|4097)", lambda x: x.sum(-1))
def one_block_of_columns(x: Tensor) -> Tensor:
    return x[..., :1024].sum(-1)


@wrong("breaks other_sizes.*4097", lambda x: x * 2.0)
def rows_past_a_grid(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:4096] = x[:4096] * 2
    return out


@wrong("breaks other_sizes.*, 1\\)\\]", lambda x: F.layer_norm(x, x.shape[-1:]))
def divides_by_one_less(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    var = x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) * (x.shape[-1] - 1) / x.shape[-1]
    return x * (var + 1e-5).rsqrt()


@wrong("wrong values.*\\(1, ", lambda x: x.cumsum(0))
def squeezes_one_row(x: Tensor) -> Tensor:
    return x.squeeze().cumsum(0)


@wrong("wrong values.*\\(0, ", lambda x: x / max(len(x), 1))
def divides_by_the_rows(x: Tensor) -> Tensor:
    return x * (1 / len(x))


# Gradients.


def unary(name: str, words: str, reference: Any, backward: Any, forward: Any = None) -> None:
    """An `autograd.Function` of one input; the backward pass gets the incoming gradient and the input."""

    class Unary(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (forward or reference)(x)

        @staticmethod
        def backward(ctx, *grads):
            return backward(*grads, *ctx.saved_tensors)

    def operator(x: Tensor) -> Tensor:
        return Unary.apply(x)

    operator.__name__ = name
    wrong(words, reference, "x")(operator)


unary("missing_factor", "wrong gradients.*breaks values_and_gradients.*gradient of x", square, lambda grad, x: grad * x)
unary("ignores_incoming", "wrong gradients.*gradient of x", square, lambda grad, x: 2 * x)


class Affine(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x * weight + bias

    @staticmethod
    def backward(ctx, *grads):
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return grad * weight, (grad * x).sum(0), grad.mean(0)


@wrong(
    "wrong gradients.*gradient of bias",
    lambda x, weight, bias: x * weight + bias,
    "x weight bias",
    samples=calls((5, 6), (6,), (6,)),
    resized=None,
)
def mean_for_sum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return Affine.apply(x, weight, bias)


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


@wrong("wrong gradients.*gradient of x", lambda x: (x.sin(), x.cos()), "x")
def forgets_the_second_output(x: Tensor) -> tuple[Tensor, Tensor]:
    return TwoOutputs.apply(x)


unary("gradient_at_the_kink", "wrong gradients.*gradient of x", torch.relu, lambda grad, x: grad * (x >= 0))
unary(
    "views_the_gradient",
    "wrong gradients.*(view size|contiguous|stride)",
    square,
    lambda grad, x: (2 * x.reshape(-1) * grad.view(-1)).view(x.shape),
)

LAST: list[Tensor] = []


def remember(x: Tensor) -> Tensor:
    LAST[:] = [x.detach()]
    return square(x)


unary("saves_in_a_global", "breaks two_calls", square, lambda grad, x: 2 * grad * LAST[0], remember)


# Memory.


@wrong("memory.*breaks no_mutation.*input x was mutated", torch.relu)
def mutates_its_input(x: Tensor) -> Tensor:
    return x.relu_().clone()


unary(
    "mutates_the_gradient",
    "memory.*breaks no_mutation.*incoming gradient 0 was mutated",
    square,
    lambda grad, x: grad.mul_(2 * x).clone(),
)

library = torch.library.Library("field_wrong", "FRAGMENT")
library.define("returns_a_view(Tensor x) -> Tensor")
implement(library, "returns_a_view", lambda x: x.view(-1))
torch.library.register_fake("field_wrong::returns_a_view", lambda x: x.new_empty(x.numel()))
wrong("memory.*shares memory with input x", lambda x: x.reshape(-1), resized=None)(torch.ops.field_wrong.returns_a_view)

BUFFERS: dict[Any, Tensor] = {}


@wrong("memory.*shares memory with output 0 of the call before", lambda x: x.double().square().to(x.dtype))
def returns_a_buffer(x: Tensor) -> Tensor:
    buffer = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.mul(x, x, out=BUFFERS.setdefault((x.shape, x.dtype), buffer))


@wrong("memory.*breaks every_element_written.*never written", square)
def leaves_the_last_column(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., : x.shape[-1] // 4 * 4] = square(x[..., : x.shape[-1] // 4 * 4])
    return out


@wrong("wrong values.*breaks strided_inputs", square)
def reads_without_strides(x: Tensor) -> Tensor:
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset()) if x.numel() else x.reshape(-1)
    return square(flat).view(x.shape)


# Results of other kinds than tensors of real numbers.

library.define("returns_nothing(Tensor x) -> ()")
implement(library, "returns_nothing", lambda x: None)
torch.library.register_fake("field_wrong::returns_nothing", lambda x: None)
wrong("wrong values.*it returns nothing", lambda x: None)(torch.ops.field_wrong.returns_nothing)


@custom_op("field_wrong::a_row_too_many", mutates_args=())
def a_row_too_many(x: Tensor) -> tuple[Tensor, int]:
    return 2 * x, x.shape[0] + 1


a_row_too_many.register_fake(lambda x: (torch.empty_like(x), x.shape[0] + 1))
wrong("wrong values.*output 1: element 0 is", lambda x: (2 * x, x.shape[0]))(a_row_too_many)


@wrong("wrong values.*output 1: element", lambda x: {"halves": [x / 2, -x / 2], "mean": float(x.mean())})
def in_a_dictionary(x: Tensor) -> dict[str, Any]:
    return {"halves": [x / 2, x / 2], "mean": float(x.mean())}


@wrong("wrong values.*the results are 2, where the reference returns 1", lambda x: x / 2)
def one_too_many(x: Tensor) -> tuple[Tensor, Tensor]:
    return x / 2, x / 2


def phase(x: Tensor) -> Tensor:
    return torch.complex(x.cos(), x.sin())


@wrong("wrong values.*output 0: element", phase)
def a_conjugate(x: Tensor) -> Tensor:
    return torch.complex(x.cos(), -x.sin())


unary(
    "a_complex_gradient",
    "wrong gradients.*gradient of x",
    phase,
    lambda grad, x: grad.imag * x.cos() + grad.real * x.sin(),
)


@wrong("wrong values.*output 0: element", lambda x: x.to(torch.float8_e4m3fn))
def another_scale(x: Tensor) -> Tensor:
    return (1.25 * x).to(torch.float8_e4m3fn)


# Fakes and graphs.


def fake_op(name: str, forward: Any, fake: Any, words: str, reference: Any = square, **fields: Any) -> None:
    operator: Any = custom_op(f"field_wrong::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor")
    if fake is not None:
        operator.register_fake(fake)
    wrong(words, reference, **fields)(operator)


fake_op(
    "fake_of_float64",
    square,
    lambda x: x.new_empty(x.shape, dtype=torch.float64),
    "compile.*breaks torch_opcheck.*Dtypes",
)
fake_op(
    "fake_of_a_row_more",
    square,
    lambda x: x.new_empty((len(x) + 1, x.shape[1])),
    "compile.*breaks torch_opcheck.*Shapes",
)
fake_op(
    "fake_of_other_strides",
    lambda x: square(x).contiguous(),
    torch.empty_like,
    "compile.*[Ss]trides",
)
fake_op("no_fake", square, None, "compile.*(no_fake|[Ff]ake)")


@wrong("compile.*does not compile", torch.relu)
def asks_for_a_number(x: Tensor) -> Tensor:
    return x if x.numel() and x.min().item() > 0 else x.clamp(min=0)


# What a call leaves behind, and what goes on around it.


@wrong("breaks side_effects.*random", square)
def seeds_the_generator(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return square(x)


@wrong("breaks side_effects.*default dtype", square)
def sets_the_default_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    return square(x)


@wrong("breaks side_effects.*(precision|benchmark)", square)
def sets_a_flag(x: Tensor) -> Tensor:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    return square(x)


@wrong("breaks side_effects.*replaces torch.nn.functional.relu6", square)
def patches_a_function(x: Tensor) -> Tensor:
    F.relu6 = lambda x, inplace=False: x
    return square(x)


SCRATCH: dict[str, Tensor] = {}


@wrong("breaks another_thread", square)
def shares_scratch_between_threads(x: Tensor) -> Tensor:
    SCRATCH["x"] = x
    time.sleep(0.001)
    return square(SCRATCH["x"])


def reference_projection(x, weight, bias):
    return x @ weight + bias


@wrong("breaks autocast", reference_projection, "x weight bias", samples=calls((5, 8), (8, 6), (6,)), resized=None)
def forgets_the_bias_under_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        return x.bfloat16() @ weight.bfloat16() + 0 * bias.bfloat16()
    return x @ weight + bias


SEEN: list[int] = [0]


class SavesLess(Function):
    @staticmethod
    def forward(ctx, x):
        is_known, SEEN[0] = SEEN[0] == x.data_ptr(), x.data_ptr()
        ctx.save_for_backward(*[x] * (1 if is_known else 2))
        return square(x)

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0] * ctx.saved_tensors[0]


@wrong("breaks checkpointed", square, "x")
def saves_less_the_second_time(x: Tensor) -> Tensor:
    return SavesLess.apply(x)


# Triton's kernels.


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if HAS_MASK:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < N), mask=offsets < N)
    else:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


def copied(x: Tensor, programs: Any, has_mask: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if programs:
        wrap_triton(copy_kernel)[(programs,)](x, out, x.numel(), BLOCK=32, HAS_MASK=has_mask)
    return out


@wrong("memory.*loads offset 111 of x_ptr", lambda x: x.clone(), in_triton=True)
def no_mask(x: Tensor) -> Tensor:
    return copied(x.contiguous(), triton.cdiv(x.numel(), 32), False)


@wrong("memory.*never written", lambda x: x.clone(), in_triton=True)
def no_remainder(x: Tensor) -> Tensor:
    return copied(x.contiguous(), x.numel() // 32, True)


@wrong("memory.*copy_kernel loads offset", lambda x: x.clone(), in_triton=True)
def any_strides(x: Tensor) -> Tensor:
    return copied(x, triton.cdiv(x.numel(), 32), True)


@triton.jit
def total_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + offsets, mask=offsets < N, other=0.0), axis=0)
    if ATOMIC:
        if tl.program_id(0) == 0:
            tl.store(out_ptr, 0.0)
        tl.atomic_add(out_ptr, part)
    else:
        tl.store(out_ptr, tl.load(out_ptr) + part)


def total(x: Tensor, atomic: bool) -> Tensor:
    x = x.contiguous()
    out = torch.zeros((), dtype=x.dtype, device=x.device)
    if x.numel():
        wrap_triton(total_kernel)[(triton.cdiv(x.numel(), 8),)](x, out, x.numel(), BLOCK=8, ATOMIC=atomic)
    return out


@wrong("memory.*order of the programs.*race", torch.sum, in_triton=True)
@triton_op("field_wrong::adds_without_atomics", mutates_args=())
def adds_without_atomics(x: Tensor) -> Tensor:
    return total(x, False)


@wrong("memory.*order of the programs.*race", torch.sum, in_triton=True)
@triton_op("field_wrong::clears_beside_atomics", mutates_args=())
def clears_beside_atomics(x: Tensor) -> Tensor:
    return total(x, True)
