"""The recurrence in chunks, in plain PyTorch: the reference, and both passes on a CPU.

The package's docstring has the formulas; names are theirs. Tensors are `[B, H, N, C, ...]`, N chunks of C tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmk.ops.recurrence._decays import Decays, Product, decays
from llmk.registry import gradient_of, next_power_of_2

CHUNK = 64
"""Tokens of a chunk; a shorter sequence is one chunk on a CPU."""
FLOAT32_CHUNK = 32
L2_EPS = 1e-6
"""Added to the sum of squares of a query or key that is normalized."""
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state")


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens of a kernel's chunk. Products of float32 hold their operands in registers, where 64 do not fit."""
    return FLOAT32_CHUNK if dtype == torch.float32 else CHUNK


def sequence_indices(sequence_ids: Tensor) -> Tensor:
    """`[B, T]` int32: which sequence of its row a token is in, counted from 0; it changes where the id does."""
    begins = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return torch.nn.functional.pad(begins.cumsum(1, dtype=torch.int32), (1, 0))


@dataclass(frozen=True)
class Call:
    """The operands and options of both operators: without a correction `beta` is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    initial_state: Tensor | None = None
    sequence_ids: Tensor | None = None
    scale: float | None = None
    l2_norm_qk: bool = False

    @property
    def factor(self) -> float:
        """The scale."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def operands(self) -> tuple[Tensor | float | None, ...]:
        """The fields in their order, with the scale that None stands for."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.sequence_ids)
        return *inputs, self.factor, self.l2_norm_qk

    def to(self, dtype: torch.dtype) -> "Call":
        """The call in another dtype, queries and keys normalized where they are to be."""
        q, k, v, g = (x.to(dtype) for x in (self.q, self.k, self.v, self.g))
        beta, state = (x if x is None else x.to(dtype) for x in (self.beta, self.initial_state))
        wide = replace(self, q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
        return replace(wide, q=l2_normalized(wide.q), k=l2_normalized(wide.k)) if self.l2_norm_qk else wide


def l2_normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


@dataclass(frozen=True)
class Chunks:
    """The inputs in chunks, padded with tokens that change nothing; queries and keys repeated for their value heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    decays: Decays
    initial: Tensor
    tokens: int

    def joined(self, x: Tensor) -> Tensor:
        """`[B, H, N, C, ...]` as `[B, T, H, ...]`."""
        return x.flatten(2, 3)[:, :, : self.tokens].transpose(1, 2)


def in_chunks(call: Call) -> Chunks:
    """Cut a call, whose operands are of one dtype by now, into chunks."""
    q, g, v, ids, initial = call.q, call.g, call.v, call.sequence_ids, call.initial_state
    (B, T, H, V), K = v.shape, q.shape[-1]
    C = max(1, min(CHUNK, T))
    C = next_power_of_2(C) if g.dim() == 4 else C  # a decay for each channel is made of halves
    N = -(-T // C)

    def cut(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
        return x.unflatten(1, (N, C)).movedim(3, 1)

    index = None
    if ids is not None and T > 0:
        index = sequence_indices(ids)
        index = torch.cat([index, index[:, -1:].expand(B, N * C - T)], 1).view(B, 1, N, C)
    q, k = (cut(x).repeat_interleave(H // q.shape[2], 1) for x in (q, call.k))
    initial = v.new_zeros((B, H, K, V)) if initial is None else initial
    beta = None if call.beta is None else cut(call.beta)
    return Chunks(q, k, cut(v), beta, decays(cut(g), index), initial, T)


def solved(a: Tensor, r: Tensor) -> Tensor:
    """(I + the part of `a` below its diagonal)^-1 times r, by substitution."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_triangular(a.tril(-1) + one, r, upper=False, unitriangular=True)


def scan(c: Chunks, scale: float, product: Product = torch.matmul, solve: Product = solved) -> tuple[Tensor, Tensor]:
    """The outputs, in chunks, and the last state. `product` multiplies matrices, `solve` solves for U as `solved`."""
    d, a = c.decays, None
    qk = d.pairs(product, c.q, c.k)
    if c.beta is not None:
        a = d.in_one_sequence(c.beta.unsqueeze(-1) * d.pairs(product, c.k, c.k))
    none = c.v[:, :, :0]  # no chunk's, of which autograd finds all inputs where there are no tokens
    none = none if c.beta is None else c.beta[:, :, :0].unsqueeze(-1) * none
    state, states, us = c.initial, [c.initial.unsqueeze(2)[:, :, :0]], [none]
    for n in range(c.q.shape[2]):
        k, u = c.k[:, :, n], c.v[:, :, n]
        if c.beta is not None and a is not None:
            predicted = d.from_state(product, k, d.start[:, :, n], state)
            u = solve(a[:, :, n], c.beta[:, :, n, :, None] * (u - predicted))
        states.append(state.unsqueeze(2))
        us.append(u.unsqueeze(2))
        state = d.whole[:, :, n] * state + d.into_state(product, k, d.end[:, :, n], u)
    first, u = torch.cat(states, 2), torch.cat(us, 2)
    return scale * d.from_state(product, c.q, d.start, first) + product(scale * qk, u), state


class _RoundedProduct(torch.autograd.Function):
    """A product in the dtype of its operands whose operands, here and in its gradient, are rounded to `dtype` once."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        wide = a.dtype
        a, b = a.to(dtype).to(wide), b.to(dtype).to(wide)
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype).to(a.dtype)
        return grad @ b.mT, a.mT @ grad, None


def chunked_reference(call: Call) -> tuple[Tensor, Tensor]:
    """The chunked composition: each product's operands are rounded to the dtype of q, the rest float32 or float64."""
    dtype, wide = call.q.dtype, call.to(torch.promote_types(call.q.dtype, torch.float32))
    c = in_chunks(wide)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return _RoundedProduct.apply(a, b, dtype)

    def solve(a: Tensor, r: Tensor) -> Tensor:
        one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
        return product(solved(a, one), r)

    out, final = scan(c, call.factor, product, solve)
    return c.joined(out).to(dtype).contiguous(), final if final is not wide.initial_state else final.clone()


def _in_float32(call: Call) -> tuple[Tensor, Tensor]:
    c = in_chunks(call.to(torch.float32))
    out, final = scan(c, call.factor)
    return c.joined(out), final


def forward_cpu(call: Call) -> tuple[Tensor, Tensor]:
    """The forward pass on a CPU, float32 with one rounding."""
    if call.g.numel() and not bool((call.g <= 0).all() | call.g.isnan().any()):
        raise ValueError(f"g: expected log decays of at most 0, got {float(call.g.max())}")
    out, final = _in_float32(call)
    return _fresh(out, call.v.dtype), _fresh(final, torch.float32)


def backward_cpu(call: Call, grad_out: Tensor, grad_final: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the operands by name: the derivative of the forward pass, with one rounding."""
    given = {name: x for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None}

    def value(*tensors: Tensor) -> Tensor:
        out, final = _in_float32(replace(call, **dict(zip(given, tensors, strict=True))))
        return (out * grad_out).sum() + (final * grad_final).sum()

    _, found = gradient_of(value, *given.values())
    return dict.fromkeys(DIFFERENTIABLE) | dict(zip(given, found, strict=True))


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy: an op's result is nobody's memory, and has the strides that its fake says."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
