r"""Causal convolution over time, one filter for each channel: the short convolution of linear attention and Mamba-2.

Sources: the short convolution before a recurrence is H3's: Fu et al., 2022, https://arxiv.org/abs/2212.14052; with SiLU
Mamba's: Gu and Dao, 2023, https://arxiv.org/abs/2312.00752.

Forward, for each channel with K taps w, bias b and activation f, where m(t, s) is 1 if the tokens t and s are of one
sequence and else 0, and x_s is for s < 0 the initial state, or 0:

    z_t = b + sum over k of w_k * m(t, t - K + 1 + k) * x_(t - K + 1 + k)
    y_t = f(z_t)

The final state is m(T - 1, s) * x_s for the last K - 1 tokens s. Backward, given dy and dfinal, with
g_t = dy_t * f'(z_t) for a token t and 0 elsewhere:

    dx_s = sum over k of w_k * m(s + K - 1 - k, s) * g_(s + K - 1 - k)  +  m(T - 1, s) * dfinal_s
    dw_k = sum over rows and t of g_t * m(t, t - K + 1 + k) * x_(t - K + 1 + k)
    db   = sum over rows and t of g_t

The gradient of the initial state is dx_s for s < 0. All in float32; z is computed again, so that the input is all that
is kept.

Where channels are side by side in memory, a program walks over tokens, with the last K inputs, and backward the
gradients of the last K, in registers, so that everything is read and computed once. Where tokens are side by side it
has a block of them, which it loads once for each tap, shifted, from the cache; backward it computes z again at the
K - 1 tokens after each. Each program sums the gradients of weight and bias in float32 over its own tokens, and the
programs' sums are added in a fixed order: no atomics.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.activations import activation as activated
from llmk.ops.common.activations import activation_with_grad
from llmk.ops.common.collectives import exchange_with_ranks, place_in
from llmk.ops.common.rows import swapped
from llmk.ops.convolution import _causal_conv1d_kernels as kernels
from llmk.ops.convolution._patterns import CAUSAL_CONV1D
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_option,
    check_parameter,
    check_same,
    check_shape,
    no_gradient,
    public_op,
)
from llmk.registry.private.compilers import known

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
MOST_TAPS = 8


def causal_conv1d_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    sequence_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    context_group: str = "",
) -> tuple[Tensor, Tensor]:
    (B, D, T), K, dtype = input.shape, weight.shape[1], input.dtype
    state = input.new_zeros(B, D, K - 1) if initial_state is None else initial_state
    x = torch.cat([state, input], -1)
    ids = input.new_zeros(B, T) if sequence_ids is None else sequence_ids
    ids = torch.cat([ids[:, :1].expand(-1, K - 1), ids], 1)
    apart = ids.unfold(1, K, 1) != ids[:, K - 1 :, None]
    taps = x.unfold(2, K, 1).masked_fill(apart[:, None], 0)
    z = torch.einsum("bdtk,dk->bdt", taps, weight.to(dtype))
    if bias is not None:
        z = z + bias.to(dtype)[:, None]
    final_state = x[..., T:].masked_fill((ids[:, T:] != ids[:, -1:])[:, None], 0)
    return z if activation is None else torch.nn.functional.silu(z), final_state


def _causal_conv1d_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_ids: Tensor | None,
    initial_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return kernels.forward(input, weight, bias, sequence_ids, initial_state, activation)


def _causal_conv1d_bwd(
    grad: Tensor,
    grad_state: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_ids: Tensor | None,
    initial_state: Tensor | None,
    activation: str,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels.backward(
        grad, grad_state, input, weight, bias, sequence_ids, initial_state, activation, need_weight, need_bias
    )


causal_conv1d_fwd = KernelOp(_causal_conv1d_fwd, launch_cached=True)
causal_conv1d_bwd = KernelOp(_causal_conv1d_bwd, launch_cached=True)


def _with_state(input: Tensor, state: Tensor | None, K: int) -> Tensor:
    """The initial state, or zeros, and the input in float32: `[B, D, K - 1 + T]`."""
    if state is None:
        return torch.nn.functional.pad(input.float(), (K - 1, 0))
    return torch.cat([state.float(), input.float()], -1)


def _masked(value: Tensor, sequence_ids: Tensor | None, distance: int) -> Tensor:
    """Return the value `[B, D, T]` so many tokens before each token, 0 where that is in another sequence."""
    if sequence_ids is None or distance == 0:
        return value
    T = sequence_ids.shape[1]
    before = torch.cat([sequence_ids[:, :1].expand(-1, distance), sequence_ids], 1)[:, :T]
    return torch.where((before == sequence_ids)[:, None], value, 0.0)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, sequence_ids: Tensor | None, T: int) -> Tensor:
    """The convolution of `_with_state`, without the activation."""
    K = weight.shape[1]
    z = torch.zeros_like(x[..., :T]) if bias is None else bias.float()[:, None].expand(*x.shape[:2], T)
    for k in range(K):
        z = torch.addcmul(z, _masked(x[..., k : k + T], sequence_ids, K - 1 - k), weight[:, k, None].float())
    return z


def _of_last_sequence(state: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """The last K - 1 of `[B, D, K - 1]`, 0 where they are not of the last token's sequence."""
    if sequence_ids is None:
        return state
    n = state.shape[-1]
    ids = torch.cat([sequence_ids[:, :1].expand(-1, n), sequence_ids], 1)[:, -n:]
    return torch.where((ids == sequence_ids[:, -1:])[:, None], state, 0.0)


def _like_layout(values: Tensor, like: Tensor) -> Tensor:
    """Return the values in the dtype of `like`, channels or tokens side by side as in that."""
    if kernels.channels_last(like):
        return swapped(values.transpose(1, 2), like.dtype)
    return values.to(like.dtype).contiguous()


@causal_conv1d_fwd.register_kernel("cpu")
def _(input, weight, bias, sequence_ids, initial_state, activation):
    T, x = input.shape[2], _with_state(input, initial_state, weight.shape[1])
    y = activated(_convolved(x, weight, bias, sequence_ids, T), activation)
    final = _of_last_sequence(x[..., T:], sequence_ids).to(input.dtype)
    return _like_layout(y, input), final.clone(memory_format=torch.contiguous_format)


@causal_conv1d_bwd.register_kernel("cpu")
def _(grad, grad_state, input, weight, bias, sequence_ids, initial_state, activation, need_weight, need_bias):
    T, K = input.shape[2], weight.shape[1]
    x = _with_state(input, initial_state, K)
    _, slope = activation_with_grad(_convolved(x, weight, bias, sequence_ids, T), activation)
    g = grad.float() * slope
    dx = torch.nn.functional.pad(_of_last_sequence(grad_state.float(), sequence_ids), (T, 0))
    dw = []
    for k in range(K):
        through = _masked(g * weight[:, k, None].float(), sequence_ids, K - 1 - k)
        dx = dx + torch.nn.functional.pad(through, (k, K - 1 - k))
        if need_weight:
            dw.append((g * _masked(x[..., k : k + T], sequence_ids, K - 1 - k)).sum((0, 2)))
    dstate = dx[..., : K - 1]
    return (
        _like_layout(dx[..., K - 1 :], input),
        torch.stack(dw, 1).to(weight.dtype) if need_weight else no_gradient(grad),
        g.sum((0, 2)).to(bias.dtype) if bias is not None and need_bias else no_gradient(grad),
        no_gradient(grad)
        if initial_state is None
        else dstate.to(initial_state.dtype).clone(memory_format=torch.contiguous_format),
    )


@causal_conv1d_fwd.register_fake
def _(input, weight):
    B, D, _ = input.shape
    return kernels.empty_like_layout(input), input.new_empty((B, D, weight.shape[1] - 1))


@causal_conv1d_bwd.register_fake
def _(grad, input, weight, bias, initial_state, need_weight, need_bias):
    none = grad.new_empty((0,))
    return (
        kernels.empty_like_layout(input),
        weight.new_empty(weight.shape) if need_weight else none,
        bias.new_empty(bias.shape) if bias is not None and need_bias else grad.new_empty((0,)),
        grad.new_empty((0,)) if initial_state is None else initial_state.new_empty(initial_state.shape),
    )


causal_conv1d_fwd.register_backward(
    causal_conv1d_bwd,
    outputs=("output", "final_state"),
    depends_on=[("input", "weight", "bias", "initial_state"), ("input", "initial_state")],
)


@causal_conv1d_fwd.register_sharding
def _():
    return [([0, 0], [0, REPLICATE, REPLICATE, 0, 0]), ([1, 1], [1, 0, 0, REPLICATE, 1])]


def causal_conv1d_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    silu = {"activation": "silu"}

    def last(B: int, D: int, T: int) -> Tensor:
        return randn(B, T, D).transpose(1, 2)

    def packed(*lengths: int) -> Tensor:
        sequences = [torch.full((1, n), i, dtype=torch.int64, device=device) for i, n in enumerate(lengths)]
        return torch.cat(sequences, 1)

    yield Sample((last(2, 16, 8), randn(16, 4), randn(16)), silu, why="channels last")
    yield Sample((randn(2, 16, 8), randn(16, 4), randn(16)), silu, why="channels first")
    yield Sample((last(2, 5, 7), randn(5, 3)), why="odd sizes, no bias, no activation")
    yield Sample((randn(2, 5, 7), randn(5, 3), randn(5)), {"activation": "swish"}, why="odd sizes, channels first")
    state = {"initial_state": randn(2, 6, 3)}
    yield Sample((last(2, 6, 9), randn(6, 4), randn(6)), silu | state, why="an initial state")
    yield Sample((randn(2, 6, 9), randn(6, 4)), state, why="an initial state, channels first")
    yield Sample((last(2, 6, 1), randn(6, 4), randn(6)), silu | state, why="one token after an initial state")
    yield Sample((randn(1, 3, 2), randn(3, 8)), {"initial_state": randn(1, 3, 7)}, why="fewer tokens than taps")
    yield Sample((last(1, 3, 2), randn(3, 7), randn(3)), silu, why="fewer tokens than taps, channels last")
    yield Sample((randn(3, 1, 1), randn(1, 2), randn(1)), silu, why="one channel, one token")
    ids = {"sequence_ids": packed(1, 2, 5, 3)}
    yield Sample((last(1, 6, 11), randn(6, 4), randn(6)), silu | ids, why="packed sequences")
    ids |= {"initial_state": randn(1, 6, 4)}
    yield Sample((randn(1, 6, 11), randn(6, 5), randn(6)), silu | ids, why="packed sequences with a state")
    short = {"sequence_ids": packed(1, 1).int(), "initial_state": randn(1, 6, 5)}
    yield Sample((last(1, 6, 2), randn(6, 6)), short, why="two sequences of one token with a state")
    wide = randn(2, 9, 48)[..., 16:32].transpose(1, 2)
    yield Sample((wide, randn(16, 4), randn(16)), silu, why="a slice of a packed projection")
    yield Sample((randn(2, 48, 9)[:, 16:32], randn(16, 4), randn(16)), silu, why="a slice, channels first")
    yield Sample((randn(2, 6, 18)[..., ::2], randn(6, 2), randn(6)), silu, why="every other token")
    yield Sample((randn(1, 6, 9).expand(2, 6, 9), randn(6, 4).t().contiguous().t()), silu, why="input expanded")
    yield Sample((last(0, 16, 8), randn(16, 4), randn(16)), silu, why="no rows")
    yield Sample((10 * last(2, 6, 9), 10 * randn(6, 4), randn(6)), silu, why="large values")
    ids = {"sequence_ids": packed(30, 97, 5, 3)}
    yield Sample((last(1, 3, 135), randn(3, 4), randn(3)), silu | ids, why="more tokens than a program's")
    ids |= {"initial_state": randn(1, 3, 3)}
    yield Sample(
        (randn(1, 3, 135), randn(3, 4), randn(3)), silu | ids, why="more tokens than a block's, channels first"
    )
    yield Sample((last(1, 270, 3), randn(270, 4), randn(270)), silu, why="more channels than a program's")


def causal_conv1d_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    randn = partial(torch.randn, device=device, dtype=dtype)
    return Sample((randn(rows, 5, 24).transpose(1, 2), randn(24, 4), randn(24)), {"activation": "silu"}, why="resized")


def causal_conv1d_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    for B, T, D in ((4, 4096, 8192), (1, 65536, 4096), (8, 2048, 3072)):
        args = (randn(B, T, D).transpose(1, 2), randn(D, 4), randn(D))
        yield Sample(args, {"activation": "silu"}, why=f"{B}x{T}x{D}")


def _state_before(
    input: Tensor, taps: int, sequence_ids: Tensor | None, initial_state: Tensor | None, context_group: str
) -> Tensor:
    """The inputs before this rank's first token `[B, D, taps]`: the last ones of the rank before, by one exchange."""
    (B, D, T), (rank, ranks) = input.shape, place_in(context_group, input)
    if taps > T:
        raise ValueError(f"context_group: expected at least {taps} tokens on every rank, got {T}")
    sends = [B if other == rank + 1 else 0 for other in range(ranks)]
    receives = [B if other == rank - 1 else 0 for other in range(ranks)]

    def from_rank_before(last: Tensor) -> Tensor:
        return exchange_with_ranks(last[: sum(sends)], sends, receives, context_group)

    state = from_rank_before(input[..., T - taps :])
    if sequence_ids is not None:
        ids = from_rank_before(sequence_ids[:, T - taps :])
        state = torch.where((ids == sequence_ids[: ids.shape[0], :1])[:, None], state, 0.0)
    if rank > 0:
        return state
    # The first rank gets nothing, and takes part in the backward pass as the others do.
    given = (
        torch.zeros((B, D, taps), dtype=input.dtype, device=input.device) if initial_state is None else initial_state
    )
    return state.sum(0) + given


def check_filter(weight: Tensor, bias: Tensor | None, activation: str | None, input: Tensor) -> None:
    """Check the filter of a convolution, and what follows it, for an input `[B, D, ...]`."""
    if weight.dim() != 2 or not 2 <= weight.shape[1] <= MOST_TAPS:
        raise ValueError(f"weight: expected shape [D, K] with K from 2 to {MOST_TAPS}, got {tuple(weight.shape)}")
    D, K = input.shape[1], weight.shape[1]
    check_parameter("weight", weight, (D, K), "the channels of input, and taps", "input", input)
    check_parameter("bias", bias, (D,), "the channels of input", "input", input)
    if activation is not None:
        check_option("activation", activation, ("silu", "swish"))


@public_op(
    reference=causal_conv1d_reference,
    differentiable=("input", "weight", "bias", "initial_state"),
    kernel_ops=(causal_conv1d_fwd, causal_conv1d_bwd),
    samples=causal_conv1d_samples,
    resized=causal_conv1d_resized,
    workloads=causal_conv1d_workloads,
    cost=Cost.passes(2, 5),
    patterns=CAUSAL_CONV1D,
)
def causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    sequence_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    context_group: str = "",
) -> tuple[Tensor, Tensor]:
    """Causal convolution over time, each channel with its own filter, and the state that a next chunk begins with.

    It is `activation(F.conv1d(F.pad(input, (K - 1, 0)), weight.unsqueeze(1), bias, groups=D))`, in float32 with one
    rounding. A long sequence may be given in chunks: each takes as `initial_state` the final state of the one before.

    Args:
        input: `[B, D, T]`, float32, float16 or bfloat16, any strides: nothing is copied, with channels side by side in
            memory or with tokens.
        weight: `[D, K]`, any of these dtypes, with K from 2 to 8; the last tap is the token's own.
        bias: `[D]`, any of these dtypes; None for none.
        activation: None, "silu" or its other name, "swish".
        sequence_ids: `[B, T]`, integers: equal numbers are one sequence, and what lies in another sequence counts as
            zero. None: a row is one sequence.
        initial_state: `[B, D, K - 1]`, the last inputs before the first token, in the dtype of `input`; None for
            zeros. It belongs to the sequence of the first token.
        context_group: The `group_name` of a `torch.distributed.ProcessGroup` whose ranks have consecutive parts of the
            sequences, each at least K - 1 tokens long; "" for whole sequences. Each rank gets the last K - 1 inputs of
            the one before. The initial state is the first rank's, others' are not read; the final state is that after
            the rank's own last token. All ranks of the group have to run the backward pass.

    Returns:
        The output, `[B, D, T]` in the dtype of `input`, dense, with channels or tokens side by side as in `input`; and
        the final state, `[B, D, K - 1]`: the last inputs, before these the end of the initial state where there are
        fewer than K - 1 tokens. With `sequence_ids`, those of other sequences than the last token's are zero.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16, `initial_state` has not the dtype of `input`, or
            `sequence_ids` is not of integers.
        ValueError: A shape does not fit the others, there is no channel or no token, K is not from 2 to 8, the tensors
            are not on one device, `activation` is none of these, `context_group` is no group's name, or there are fewer
            than K - 1 tokens with one.

    Sources: Fu et al., 2022, https://arxiv.org/abs/2212.14052; Gu and Dao, 2023, https://arxiv.org/abs/2312.00752.
    """
    check_dtype("input", input)
    if input.dim() != 3 or any(known(size == 0) for size in input.shape[1:]):
        raise ValueError(f"input: expected shape [B, D, T] with D and T at least 1, got {tuple(input.shape)}")
    check_filter(weight, bias, activation, input)
    (B, D, T), K = input.shape, weight.shape[1]
    if sequence_ids is not None:
        check_dtype("sequence_ids", sequence_ids, (torch.int32, torch.int64))
        check_shape("sequence_ids", sequence_ids, (B, T), "batch and tokens of input")
        check_same("sequence_ids", sequence_ids, "input", input)
    if initial_state is not None:
        check_shape("initial_state", initial_state, (B, D, K - 1), "batch and channels of input, taps less one")
        check_same("initial_state", initial_state, "input", input, dtype=True)
    if context_group:
        initial_state = _state_before(input, K - 1, sequence_ids, initial_state, context_group)
    return causal_conv1d_fwd(input, weight, bias, sequence_ids, initial_state, ACTIVATIONS[activation])
