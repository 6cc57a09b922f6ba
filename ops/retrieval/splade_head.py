r"""A sparse-lexical head: of each sequence and class of a vocabulary the largest logit of its tokens, made a weight.

Source: Formal et al., "SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval", 2021,
https://arxiv.org/abs/2109.10086, equation 6.

Forward, for the tokens x_s of a sequence that count, and class v:

    z_v = max over s of W_v . x_s + b_v
    y_v = log1p(max(z_v, 0))

which is the largest log1p(max(logit, 0)), as both functions keep the order of numbers. Backward, given dy, with w_v the
token that has the maximum, the first of several:

    dz_v = dy_v / (1 + z_v) = dy_v * exp(-y_v)  where y_v > 0, and 0 elsewhere
    dW_v = sum over sequences of dz_v * x_(w_v)
    db_v = sum over sequences of dz_v
    dx_s = sum over v with w_v = s of dz_v * W_v

The logits [B, L, V] are never in memory, in float32 no more than 64 MiB of them. What is kept is y, the output, and w,
4 bytes for each sequence and class: B * V * 4 bytes, where the logits take L / 2 times as much in bfloat16.
`_maxima.py` has the kernels.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.retrieval._maxima import (
    KERNELS,
    PYTORCH,
    Implementation,
    Sequences,
    check_sequences,
    count_of,
    padded,
)
from llmk.registry import (
    BatchDependent,
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_same,
    check_shape,
    or_no_gradient,
    public_op,
    replicate_only,
)


def splade_head_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x, live = padded(input, mask, offsets)
    y = torch.nn.functional.linear(x, weight, bias).relu().log1p().masked_fill(~live.unsqueeze(-1), 0)
    y = torch.nn.functional.pad(y, (0, 0, 0, 1))  # where there are no tokens
    return y.gather(1, y.argmax(1, keepdim=True)).squeeze(1).to(torch.promote_types(y.dtype, torch.float32))


def _forward(
    impl: Implementation, input: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    vocabulary = Sequences.of("weight", weight.unsqueeze(0), None, None)
    best, winners = impl.maxima(vocabulary, Sequences.of("input", input, mask, offsets))
    y = (best if bias is None else best + bias.float()).relu().log1p()
    return y, winners.masked_fill(~(y > 0), -1)


def _backward(
    impl: Implementation, grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor,
    winners: Tensor, need_input: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, coef = input.reshape(-1, input.shape[-1]).contiguous(), _of_logits(grad, output, winners)
    dx = impl.tokens_gradient(coef, winners, weight.contiguous(), x.shape[0]).view(input.shape) if need_input else None
    dw = impl.rows_gradient(coef, winners, x) if need_weight else None
    db = coef.sum(0).to(weight.dtype) if need_bias else None
    return or_no_gradient(dx, grad), or_no_gradient(dw, grad), or_no_gradient(db, grad)


def _of_logits(grad: Tensor, output: Tensor, winners: Tensor) -> Tensor:
    return (grad * torch.exp(-output)).masked_fill(winners < 0, 0).contiguous()


def _splade_head_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _forward(KERNELS, input, weight, bias, mask, offsets)


def _splade_head_bwd(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, winners: Tensor,
    need_input: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(KERNELS, grad, input, weight, bias, output, winners, need_input, need_weight, need_bias)


# A graph keeps each as one node: on a CPU it is a loop over sequences.
splade_head_fwd = KernelOp(_splade_head_fwd, opaque=True)
splade_head_bwd = KernelOp(_splade_head_bwd, opaque=True)
splade_head_fwd.register_kernel("cpu")(partial(_forward, PYTORCH))
splade_head_bwd.register_kernel("cpu")(partial(_backward, PYTORCH))


@splade_head_fwd.register_fake
def _(input, weight, offsets):
    shape = count_of(input, offsets), weight.shape[0]
    return input.new_empty(shape, dtype=torch.float32), input.new_empty(shape, dtype=torch.int32)


@splade_head_fwd.register_flop_formula
def _(input, weight, bias, mask, offsets, out_val=None) -> int:
    return 2 * input.numel() * weight.shape[0]


splade_head_fwd.register_sharding(replicate_only)
splade_head_fwd.register_backward(
    splade_head_bwd, outputs=("output", "winners"), depends_on=[["input", "weight", "bias"]]
)


def splade_head_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def ends(*tokens: int) -> Tensor:
        return torch.tensor(tokens, device=device, dtype=torch.int32)

    mask = torch.arange(6, dtype=torch.int32, device=device) < ends(6, 1, 0).unsqueeze(1)
    yield Sample((randn(2, 4, 16), randn(32, 16)), why="powers of two")
    yield Sample((randn(3, 70, 13), randn(37, 13), randn(37)), why="odd, several tiles of tokens, bias")
    yield Sample((randn(3, 6, 24), randn(19, 24), randn(19)), {"mask": mask}, why="mask, a sequence without tokens")
    yield Sample((randn(9, 12), randn(21, 12)), {"offsets": ends(4, 4, 7)}, why="packed, tokens of none")
    yield Sample((randn(2, 3, 136) / 8, randn(70, 136), randn(70)), why="long rows, several tiles of classes")
    yield Sample((randn(2, 3, 8), randn(9, 8), randn(9) - 20), why="all weights are zero")
    yield Sample((randn(0, 3, 8), randn(9, 8), randn(9)), why="no sequences")
    yield Sample((randn(1, 1, 1), randn(1, 1)), why="one of everything")
    yield Sample((randn(8, 3, 2).permute(2, 1, 0), randn(8, 10).t()), why="strided")
    yield Sample((randn(2, 1, 8).expand(2, 3, 8).contiguous(), randn(9, 8)), why="ties: equal tokens, the first one")


def splade_head_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, weight = (torch.randn(*shape, 16, device=device, dtype=dtype) for shape in ((rows, 3), (40,)))
    return Sample((x, weight), why="resized")


def splade_head_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    for B, L, H, V in [(32, 256, 768, 30522), (16, 512, 1024, 50368)]:
        yield Sample((randn(B, L, H), randn(V, H) / H**0.5, randn(V) / 8), why=f"{B}x{L}x{H}x{V}")


def splade_head_cost(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, offsets: Tensor | None = None, **mask: Tensor | None
) -> Cost:
    """Weights and winners are written and read beside the tensors; only the forward pass has a product."""
    outputs = count_of(input, offsets) * weight.shape[0]
    tensors = (input.numel() + weight.numel()) * input.element_size()
    flops = 2 * input.shape[:-1].numel() * weight.numel()
    return Cost(tensors + 4 * outputs, 3 * tensors + 20 * outputs, flops, flops + 4 * outputs * weight.shape[1])


@public_op(
    reference=splade_head_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(splade_head_fwd, splade_head_bwd),
    samples=splade_head_samples,
    resized=splade_head_resized,
    workloads=splade_head_workloads,
    cost=splade_head_cost,
    batch_dependent=BatchDependent.float32_products("output 0", "gradient of input"),
)
def splade_head(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The largest `log1p(relu(linear(input, weight, bias)))` of each sequence's tokens, for each class.

    The logits are never in memory, in float32 64 MiB of them at a time. Each maximum passes its gradient to the token
    that has it, the first of several; a weight of zero passes none. A sequence without tokens has zeros.

    Under autocast it runs in autocast's dtype.

    Args:
        input: `[B, L, H]`, or packed `[T, H]` with `offsets`; float32, float16 or bfloat16, any strides.
        weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        bias: `[V]`, dtype of `input`.
        mask: Which tokens count `[B, L]`, bool; None is all. Not with `offsets`.
        offsets: The end of each sequence's tokens `[B]`, int32, none before the last. Tokens after the last end belong
            to none.

    Returns:
        `[B, V]`, float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, or both a mask and offsets are given.
        IndexError: On the CPU, `offsets` are not such ends. On a GPU they are made so.

    Source: Formal et al., 2021, https://arxiv.org/abs/2109.10086.
    """
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    check_sequences("input", input, mask, offsets)
    check_same("weight", weight, "input", input, dtype=True)
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(f"weight: expected shape [V, {input.shape[-1]}] to fit input, got {tuple(weight.shape)}")
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "one for each class")
        check_same("bias", bias, "input", input, dtype=True)
    y, _ = splade_head_fwd(input, weight, bias, mask, offsets)
    return y
