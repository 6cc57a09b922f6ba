r"""A linear layer and the cross entropy of its outputs, without ever holding logits.

Sources: `torch.nn.functional.linear_cross_entropy` for the semantics; Hsu et al., "Liger Kernel", 2024,
https://arxiv.org/abs/2410.10989, for making the gradients in the forward pass; `softmax.py` for the numbers of a row.

Forward, for x [N, H], W [V, H] and targets t [N], a chunk of C rows at a time:

    c      = the targets' logits, x_i . W_t                              float32
    E      = exp(x_chunk @ W^T + b - c), 0 at t, with its sums s         [C, V], rounded to the dtype of x
    losses = log1p(s), and what the options add
    r      = the gradient of the loss by log p, over -(1 + s)
    dx     = r (E @ W - s W_t)                                           rows of the chunk
    dW    += E^T @ (r x_chunk)      with -s at t                         and db += E^T @ r

E is what the gradients read, as it is: it is never normalized, and logits are in memory in no precision. `products.py`
has the three kernels. In float32, and on a CPU, the products are PyTorch's, and E takes the place of a chunk's logits.

A mean or a sum needs no more of the upstream gradient than one factor, so the backward pass only multiplies by it;
gradients that nobody wants are not made. With reduction "none" each row has its own upstream gradient: the forward pass
keeps a few numbers of each row, and the backward pass makes the logits again.

The driver is one opaque node under Inductor: inlined, its number of chunks would be part of the graph, and a batch of
another size would need another graph. Tensor descriptors cannot be captured in a traced body either.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._patterns import FUSED_LINEAR_CE
from llmk.ops.linear_loss._records import (
    Make,
    linear_cost,
    linear_reference,
    rows_plan,
    token_resized,
    token_workload,
    workloads,
)
from llmk.ops.linear_loss.drivers.cross_entropy import CrossEntropyOps
from llmk.ops.loss.cross_entropy import cross_entropy_reference
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import BatchDependent, Sample, public_op


def fused_linear_ce_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, chunk_size: int = 0,
    row_weight: Tensor | None = None, skip_ignored: bool = True, logits_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    logits = linear_reference(input, linear_weight, linear_bias, logits_dtype)
    if row_weight is None:
        return cross_entropy_reference(logits, target, **options)
    reduction = options.pop("reduction", "mean")
    losses = cross_entropy_reference(logits, target, reduction="none", **options)
    counts = target != options.get("ignore_index", -100)
    weights = torch.where(counts, row_weight.to(losses.dtype), 0.0)
    losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    weight = options.get("weight")
    return losses.sum() / (weights if weight is None else weights * weight.to(losses.dtype)[target * counts]).sum()


KERNEL_OPS = CrossEntropyOps("fused_linear_ce", splits_tokens=True)


def fused_linear_ce_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn, classes, tokens = make.randn, make.classes, make.tokens
    everything = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2}
    yield Sample(tokens(32, 8, H=16), why="powers of two")
    yield Sample(tokens(37, 2, 5), {"chunk_size": 4}, why="three chunks, odd sizes")
    yield Sample(tokens(37, 11), {"chunk_size": 2}, why="six chunks: float32 sums")
    kwargs: dict[str, Any] = {"logits_dtype": dtype, "linear_bias": randn(37), "chunk_size": 4, **everything}
    yield Sample(tokens(37, 11), kwargs, why="logits of the input's dtype")
    for reduction in ("none", "sum", "mean"):
        weight = make.rand(37) + 0.5
        kwargs = {"weight": weight, "linear_bias": randn(37), "reduction": reduction, "chunk_size": 5, **everything}
        yield Sample(tokens(37, 11), kwargs, why=f"every option, {reduction}")
        target = classes(37, 2, 5)
        yield Sample((randn(2, 5, 12), randn(37, 12), target), {"reduction": reduction}, why=f"no option, {reduction}")
    V = LONGEST_SHORT + 1
    kwargs = {"weight": make.rand(V) + 0.5, "chunk_size": 4, **everything}
    yield Sample(tokens(V, 5), kwargs, why=f"every option, {V} classes")
    for reduction in ("none", "sum", "mean"):
        row_weight = make.rand(11).masked_fill(classes(2, 11) == 0, 0.0)
        kwargs = {"row_weight": row_weight, "reduction": reduction, "chunk_size": 5}
        yield Sample(tokens(37, 11), kwargs, why=f"a weight a token, {reduction}")
        kwargs = {"row_weight": row_weight, "weight": weight, "skip_ignored": False, "reduction": reduction}
        yield Sample(tokens(37, 11, H=16), kwargs | everything, why=f"ignored tokens not skipped, {reduction}")
    kwargs = {"linear_bias": randn(37), "skip_ignored": False, "chunk_size": 4}
    yield Sample(tokens(37, 11, H=16), kwargs, why="not skipped, three chunks and a bias")
    nothing = make.ignored(4)
    yield Sample((randn(4, 8), randn(32, 8), nothing), {"skip_ignored": False}, why="every target ignored, not skipped")
    yield Sample(tokens(32, 0, H=16), {"reduction": "sum"}, why="no tokens")
    yield Sample(tokens(32, H=16), why="one token, one dimension")
    yield Sample((randn(5, 1), randn(1, 1), torch.zeros(5, device=device, dtype=torch.int64)), why="one feature, class")
    yield Sample((randn(12, 9).t(), randn(12, 37).t(), classes(37, 18)[::2]), why="everything strided")
    yield Sample((randn(4, 8), randn(32, 8), nothing), why="every target ignored: NaN")
    yield Sample(tokens(100_003, 2, H=4), why="100,003 classes")
    yield Sample((1e4 * randn(5, 8), 0.1 * randn(37, 8), classes(37, 5)), why="large values")


WORKLOADS = workloads(
    token_workload, (8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 151936), (4096, 4096, 32000),
    (4096, 2048, 50257), (32768, 4096, 128256), (1024, 4096, 128256), (16384, 1152, 262144),
)  # fmt: skip


@public_op(
    reference=fused_linear_ce_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=fused_linear_ce_samples,
    resized=token_resized,
    workloads=WORKLOADS,
    sized=token_workload,
    cost=linear_cost,
    plan=rows_plan,
    patterns=FUSED_LINEAR_CE,
    choices=(
        "bfloat16 logits are never stored, only exponentials of them, which become the gradient's matrix by factors of "
        "rows: on an H200, behind other work, 8192x4096x128256 takes as long as its three products by cuBLAS, which "
        "with passes over logits took 1.10, and 8192x2048x151936 1.03, which took 1.17. 4096x1024x262144 takes 1.07: "
        "its products are so short that the exponentials are a part of the work",
        "a chunk's matrix takes no more than dW where it can, so that one chunk costs little memory: 2,196 MiB at "
        "8192x4096x128256, 1,900 at 8192x2048x151936",
        "skip_ignored is the default, since the products read how many rows count, and where the GPU is the slower one "
        "that costs nothing",
        "in eager mode a call of few rows waits for the host, whose launches take 3 to 6 ms of a busy one: "
        "8192x2048x32000 takes 1.06 times its products behind other work of an H200, up to 1.16 where there is none",
    ),
    batch_dependent=BatchDependent.float32_products("output 0", "gradient of input"),
)
def fused_linear_ce(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int = 0,
    row_weight: Tensor | None = None,
    skip_ignored: bool = True,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)` without ever holding all the logits.

    The gradients that are wanted are made in the forward pass, chunk by chunk, and scaled in the backward pass; with
    reduction "none" the backward pass makes the logits again. Under autocast the linear layer runs in its dtype.

    Where `linear_weight` is a DTensor whose classes are sharded, `Shard(0)`, over one dimension of its mesh and
    replicated over the others, each rank keeps its own: the ranks gather a few numbers for each token, as in
    `vocab_parallel_linear_ce`, never weights or logits. `input` may be a plain tensor, the same on these ranks, or a
    DTensor of that mesh, which is made whole over the dimension (a sharded sequence is gathered, its gradient
    reduce-scattered in its dtype) and replicated over the others; the loss is a plain tensor or a replicated DTensor
    accordingly. `linear_bias` is a DTensor like `linear_weight`; `target` and `weight` may be either.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices `[...]`, int64 or int32.
        linear_bias: `[V]`, dtype of `input`.
        weight: `[V]`, a weight for each class; None for 1.
        ignore_index: Rows with this target have loss 0 and gradient 0, and do not count in the mean, whatever their
            hidden states hold: NaN and infinity too.
        reduction: "none", "sum", or "mean": the sum over the rows divided by the sum of their targets' weights.
        label_smoothing: Probability, 0 to 1, that the target spreads evenly over all classes.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        z_loss: `z_loss * logsumexp(logits)**2` is added to the loss of every row that counts; 0 is off. It has no class
            weight, but the mean divides the whole sum by the weights, where Liger divides z_loss by the number of rows.
        chunk_size: Tokens whose exponentials, `[chunk_size, V]` in the dtype of `input`, exist at a time. 0 chooses: on
            a CPU a million numbers; on a GPU so that time and memory are least by a model of both. Beyond two chunks
            the gradient of `linear_weight` is summed in float32.
        row_weight: Weight of each token's loss, in the target's shape; the mean divides by the sum of
            these, times the class weights if given, over the tokens that count. None for 1. It has no gradient.
        skip_ignored: Do no work for tokens that do not count. On a CPU they are left out. On a GPU, where only the
            device knows how many count, the products of 16-bit matrices stop at that number; those of float32 are of
            all tokens. It takes memory for a copy of the hidden states.
        logits_dtype: Dtype of the logits: None or `torch.float32`, which the products make and nothing rounds, or the
            dtype of `input`, to which they are rounded then. Their exponentials are rounded once, to the dtype of
            `input`, either way.

    Returns:
        float32: a scalar, or `[...]` with reduction "none". The mean over no row is NaN.
        Where the weights of all rows that count are 0, neither the mean nor its gradients are finite.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU such a row makes the loss NaN.
        NotImplementedError: `weight` requires a gradient.

    Sources: `torch.nn.functional.linear_cross_entropy`; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    (loss,) = KERNEL_OPS(locals())
    return loss
