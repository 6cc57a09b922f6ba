"""Right operators, as people and code generators write them: opcheck has no finding in any of them.

The first five are each of a kind in which a checker easily finds a fault that is none.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import custom_op, triton_op, wrap_triton

from compile_tests.helpers.strangers import implement, record, rows_of
from llmk.registry import Op, Sample, Tolerance

library = torch.library.Library("field_right", "DEF")

RIGHT: dict[str, Op] = {}
IN_TRITON: dict[str, Op] = {}
"""Those whose kernels have no code for a CPU: they are checked in Triton's interpreter."""
BY_PYTORCH = {("rms_norm", "2.11"): "compiled_samples", ("sdpa", "2.11"): "far_rows"}
"""Those that a release of PyTorch makes wrong, by the promise that shows it.

Where the forward pass of an `autograd.Function` ends with a cast to the dtype that its number has, Dynamo's graph
returns that number too, which is the same tensor, and its gradients are 0. And the fused attention of a GPU gives
gradients with zeros for rows whose offsets pass 2^31.
"""


def right(
    name: str, operator: Any, reference: Any, wanted: str = "", *, in_triton: bool = False, **fields: Any
) -> None:
    known = {"dtypes": (torch.float32,), "differentiable": tuple(wanted.split())} | fields
    op = record(operator, reference, **known)
    (IN_TRITON if in_triton else RIGHT)[name] = dataclasses.replace(op, name=name)


def broken_by_pytorch(name: str) -> str:
    """Return the promise that this release of PyTorch breaks for a right operator; empty if it is right here."""
    return BY_PYTORCH.get((name, torch.__version__.rpartition(".")[0]), "")


def calls(*shapes: tuple[int, ...], more: tuple[Any, ...] = ()) -> Any:
    """One sample of tensors of these shapes, and what follows them."""

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        return [Sample((*tensors, *more), why="of normal numbers")]

    return samples


# A backward pass that is differentiable once, in both ways of writing one.


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return (x.float() * rstd * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        grad, xhat = grad.float(), x.float() * rstd
        scaled = grad * weight.float()
        dx = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * xhat).flatten(0, -2).sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return RMSNorm.apply(x, weight, eps)


def reference_rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


right("rms_norm", rms_norm, reference_rms_norm, "x weight", samples=calls((5, 24), (24,)), resized=None)


@custom_op("field_right::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = (var + 1e-5).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


@layer_norm.register_fake
def _(x, weight, bias):
    rows = x.new_empty((*x.shape[:-1], 1))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rows, torch.empty_like(rows)


def layer_norm_setup(ctx, inputs, output):
    x, weight, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


@once_differentiable
def layer_norm_backward(ctx, grad, _, __):
    x, weight, mean, rstd = ctx.saved_tensors
    xhat, scaled = (x - mean) * rstd, grad * weight
    dx = rstd * (scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return dx, (grad * xhat).sum(0), grad.sum(0)


layer_norm.register_autograd(layer_norm_backward, setup_context=layer_norm_setup)


def only_output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, weight, bias)[0]


def reference_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


shapes = calls((6, 20), (20,), (20,))
right("layer_norm", only_output, reference_layer_norm, "x weight bias", samples=shapes, resized=None)


# A gradient that is 0 where terms cancel: the first row of causal attention has one key.


class FlashAttention(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        out = scores.softmax(-1) @ v
        ctx.save_for_backward(q, k, v, out, (scores - scores.logsumexp(-1, keepdim=True)).exp())
        return out

    @staticmethod
    @custom_bwd(device_type="cpu")
    @custom_bwd(device_type="cuda")
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        (grad,) = grads
        q, k, v, out, probs = ctx.saved_tensors
        delta = (grad * out).sum(-1, keepdim=True)
        scores = probs * (grad @ v.mT - delta) * q.shape[-1] ** -0.5
        return scores @ k, scores.mT @ q, probs.mT @ grad


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FlashAttention.apply(q, k, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def reference_attention(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


FAST = Tolerance(3.0, "exp2 of a product loses a unit of each and up to another of the product, where exp loses one")
for name, operator, reference, tolerances, heads in (
    ("flash_attention", flash_attention, reference_attention, {}, (2, 3)),
    ("flash_attention_beside_sdpa", flash_attention, sdpa, {}, (1, 1)),
    ("sdpa", sdpa, reference_attention, {torch.float32: FAST}, (1, 1)),
):
    known = {"samples": calls(*[(*heads, 17, 16)] * 3), "resized": None, "tolerances": tolerances}
    right(name, operator, reference, "q k v", **known)


# A requirement that is refused in words, and by an `assert` without any.


class Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        assert x.is_contiguous()
        ctx.save_for_backward(x)
        return (0.5 * x * torch.erfc(-x * 0.5**0.5)).view(-1).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        (grad,) = grads
        (x,) = ctx.saved_tensors
        cdf, pdf = 0.5 * torch.erfc(-x * 0.5**0.5), torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
        return grad * (cdf + x * pdf)


def gelu(x: Tensor) -> Tensor:
    return Gelu.apply(x)


right("gelu_of_contiguous", gelu, F.gelu, "x")


# Aliases that the schema declares.

library.define("relu_(Tensor(a!) x) -> Tensor(a!)")
implement(library, "relu_", lambda x: x.clamp_(min=0))
torch.library.register_fake("field_right::relu_", lambda x: x)
right("relu_", torch.ops.field_right.relu_, lambda x: x.relu_())

library.define("first_half(Tensor(a) x) -> Tensor(a)")
library.impl("first_half", lambda x: x[..., : x.shape[-1] // 2], "CompositeImplicitAutograd")
right("first_half", torch.ops.field_right.first_half, lambda x: x[..., : x.shape[-1] // 2], "x")


# Sums by atomics, whose bits depend on the order of the programs.


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr + cols, x, mask=cols < N)


@triton_op("field_right::column_sum", mutates_args=())
def column_sum(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    M, N = x.shape
    if M:
        wrap_triton(column_sum_kernel)[(M,)](x, out, N, BLOCK=triton.next_power_of_2(N))
    return out


right("column_sum", column_sum, lambda x: x.sum(0), in_triton=True)


# Losses.


@custom_op("field_right::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.float().log_softmax(-1)
    counts = target != -100
    picked = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = -torch.where(counts, picked, 0.0).sum() / counts.sum()
    grad = logp.exp().scatter_add(-1, target.clamp(min=0).unsqueeze(-1), torch.full_like(logp[:, :1], -1.0))
    return loss, torch.where(counts.unsqueeze(-1), grad, 0.0) / counts.sum()


@cross_entropy.register_fake
def _(logits, target):
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits, dtype=torch.float32)


def cross_entropy_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dtype = inputs[0].dtype


cross_entropy.register_autograd(
    once_differentiable(lambda ctx, grad, _: ((grad * ctx.saved_tensors[0]).to(ctx.dtype), None)),
    setup_context=cross_entropy_setup,
)


def cross_entropy_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target)[0]


def labelled(device, dtype):
    target = torch.tensor([1, 8, -100, 3, 0], device=device)
    yield Sample((torch.randn(5, 9, device=device, dtype=dtype), target), why="an ignored row")


right("cross_entropy", cross_entropy_loss, F.cross_entropy, "logits", samples=labelled, resized=None)


# Rows.


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    scores = x.masked_fill(~mask, -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - largest).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


def masked(device, dtype):
    mask = torch.arange(9, device=device) < torch.tensor([[9], [4], [1], [0]], device=device)
    yield Sample((torch.randn(4, 9, device=device, dtype=dtype), mask), why="a row that is masked whole")


def reference_masked_softmax(x, mask):
    return torch.where(mask.any(-1, keepdim=True), x.masked_fill(~mask, -torch.inf).softmax(-1), 0.0)


right("masked_softmax", masked_softmax, reference_masked_softmax, samples=masked, resized=None)


# Lookups and orders.


@custom_op("field_right::embedding", mutates_args=())
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, table.shape[-1])


embedding.register_fake(lambda ids, table: table.new_empty((*ids.shape, table.shape[-1])))


def embedding_setup(ctx, inputs, output):
    ids, table = inputs
    ctx.save_for_backward(ids)
    ctx.rows = table.shape[0]


def embedding_backward(ctx, grad):
    (ids,) = ctx.saved_tensors
    zeros = grad.new_zeros((ctx.rows, grad.shape[-1]))
    return None, zeros.index_add(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))


embedding.register_autograd(embedding_backward, setup_context=embedding_setup)


def lookups(device, dtype):
    ids = torch.tensor([[0, 3, 3], [10, 0, 7]], device=device)
    yield Sample((ids, torch.randn(11, 12, device=device, dtype=dtype)), why="some twice")


right("embedding", embedding, F.embedding, "table", samples=lookups, resized=None)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, order = x.sort(stable=True, dim=-1, descending=True)
    return values[..., :k].contiguous(), order[..., :k].contiguous()


right("top_k", top_k, lambda x, k: tuple(x.topk(k, -1)), "x", samples=calls((4, 21), more=(5,)), resized=None)


def reversed_cumsum(x: Tensor) -> Tensor:
    """Sum by a product, in which one NaN is in every sum: a row with NaN may be NaN throughout."""
    return x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).tril()


right("reversed_cumsum", reversed_cumsum, lambda x: x.flip(-1).cumsum(-1).flip(-1), "x")


# Other formulas.


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + cols, gate * tl.sigmoid(gate) * up, mask=cols < N)


@triton_op("field_right::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():
        N = out.shape[-1]
        wrap_triton(swiglu_kernel)[(out.numel() // N,)](x, out, N, BLOCK=triton.next_power_of_2(N))
    return out


def swiglu_backward(ctx, grad):
    gate, up = ctx.saved_tensors[0].chunk(2, -1)
    sigmoid = gate.sigmoid()
    return torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], -1)


swiglu.register_autograd(  # type: ignore[attr-defined]
    swiglu_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def reference_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


right("swiglu", swiglu, reference_swiglu, "x", samples=calls((5, 22)), resized=rows_of(1), in_triton=True)


class DropoutAdd(Function):
    @staticmethod
    def forward(ctx, x, residual, keep, p):
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p)
        return torch.where(keep, x * ctx.scale, 0.0) + residual

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        (keep,) = ctx.saved_tensors
        return torch.where(keep, grad * ctx.scale, 0.0), grad.clone(), None, None


def dropout_add(x: Tensor, residual: Tensor, keep: Tensor, p: float) -> Tensor:
    return DropoutAdd.apply(x, residual, keep, p)


def dropped(device, dtype):
    x, residual, chance = (torch.randn(4, 10, device=device, dtype=dtype) for _ in range(3))
    yield Sample((x, residual, chance > -0.5, 0.3), why="some dropped")


right(
    "dropout_add",
    dropout_add,
    lambda x, residual, keep, p: x * keep / (1 - p) + residual,
    "x residual",
    samples=dropped,
    resized=None,
)


@custom_op("field_right::adam_", mutates_args=("param", "exp_avg", "exp_avg_sq"))
def adam_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: float) -> None:
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.mul_(0.99).addcmul_(grad, grad, value=0.01)
    param.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(1e-8), value=-lr)


def reference_adam(param, grad, exp_avg, exp_avg_sq, lr):
    exp_avg.copy_(0.9 * exp_avg + 0.1 * grad)
    exp_avg_sq.copy_(0.99 * exp_avg_sq + 0.01 * grad * grad)
    param.copy_(param - lr * exp_avg / (exp_avg_sq.sqrt() + 1e-8))


def steps(device, dtype):
    param, grad, exp_avg, square = (torch.randn(3, 14, device=device, dtype=dtype) for _ in range(4))
    yield Sample((param, grad, exp_avg, square.square(), 1e-3), why="a step")


right("adam_", adam_, reference_adam, samples=steps, resized=None)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale


def reference_quantize(x):
    scale = x.abs().max(-1, keepdim=True).values / 127
    return x.div(scale).round().to(torch.int8), scale


right("quantize", quantize, reference_quantize, resized=None)
