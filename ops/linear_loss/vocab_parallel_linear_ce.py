r"""A linear layer whose classes are sharded over the ranks of a group, and the cross entropy of its outputs.

Sources: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, for the shards of the classes; the
chunks of tokens and the gradients made in the forward pass are those of `fused_linear_ce.py`.

Each rank has x [N, H], the targets [N] and a shard W_C of the weight's rows: the classes C. For a chunk of tokens:

    c      = the targets' logits              the sum over the ranks, as each target is on one
    E_C    = exp(x_chunk @ W_C^T + b_C - c)   [C, V_C], the rank's own
    losses and the rows' factors r            from the sums of E_C over all ranks
    dx     = r (E_C @ W_C)                    the term of C, with that of the target where it is
    dW_C  += E_C^T @ (r x_chunk)              and db_C += E_C^T @ r

so that the ranks exchange numbers of tokens, never logits; the math is that of `fused_linear_ce.py`. The gradient of x
is the sum over ranks, taken in the backward pass, so that a loss that is not differentiated costs no sum, in float32,
and rounded once. Rounded to bfloat16 on every rank and summed in bfloat16 its error would be 1.6 times that of one
rank's product over 4 ranks, and 1.9 times over 8 (root mean square, 4096 classes).

All ranks make the same chunks, by the classes that a rank has on average: each chunk is one exchange.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, linear_cost, one_rank, token_resized, token_workload, workloads
from llmk.ops.linear_loss.drivers.cross_entropy import CrossEntropyOps
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce_reference, fused_linear_ce_samples
from llmk.registry import BatchDependent, Sample, public_op

KERNEL_OPS = CrossEntropyOps("vocab_parallel_linear_ce")


def vocab_parallel_linear_ce_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from (each for each in fused_linear_ce_samples(device, dtype) if "row_weight" not in each.kwargs)
    tokens = Make(device, dtype).tokens
    skipped = {"skip_ignored": False, "chunk_size": 5, "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2}
    yield Sample(tokens(37, 11, H=16), skipped, why="ignored tokens not skipped")
    yield Sample(tokens(37, 7), {"label_smoothing": 0.2}, why="label smoothing without weights")


def rank_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N tokens, H features and the classes of one of several ranks."""
    N, H, V, ranks = sizes
    made = token_workload((N, H, V // ranks), device, dtype)
    return Sample(made.args, why=f"{made.why}, what one of {ranks} ranks computes")


@public_op(
    reference=one_rank(fused_linear_ce_reference),
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=vocab_parallel_linear_ce_samples,
    resized=token_resized,
    workloads=workloads(rank_workload, (8192, 4096, 128256, 2), (8192, 4096, 128256, 8)),
    cost=linear_cost,
    batch_dependent=BatchDependent.float32_products("output 0", "gradient of input"),
)
def vocab_parallel_linear_ce(
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
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
    logits_dtype: torch.dtype | None = None,
    skip_ignored: bool = True,
) -> Tensor:
    """`fused_linear_ce` where each rank of a process group holds the weights of some of the classes.

    Loss and gradients are those of all classes. In the forward pass the ranks gather five float32 numbers for each
    token, however many classes there are; in the backward pass they sum the gradient of `input`, in float32. Every rank
    makes the call, with slices of its own and the rest alike, and all of them or none want the gradient of `input`.
    `fused_linear_ce` does this by itself where its `linear_weight` is a DTensor placed `Shard(0)`.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides; the same on all ranks.
        linear_weight: `[V, H]`, dtype of `input`: this rank's classes, V of them, `vocab_start` and those that follow.
            The slices cover every class once, in any order and of any lengths; a rank may have none.
        target: Class indices `[...]` among all classes, int64 or int32; the same on all ranks.
        linear_bias: `[V]`, dtype of `input`, of this rank's classes.
        weight: `[num_classes]`, a weight for each of all classes, the same on all ranks; None for 1.
        ignore_index, reduction, label_smoothing, softcap, z_loss: As in `fused_linear_ce`.
        chunk_size: As in `fused_linear_ce`; 0 chooses for `num_classes` divided by the number of ranks.
        vocab_start, num_classes, group_name: As in `linear_logprobs`.
        logits_dtype, skip_ignored: As in `fused_linear_ce`.

    Returns:
        float32, the same bits on all ranks: a scalar, or `[...]` with reduction "none". The mean over no row is NaN.
        Where the weights of all rows that count are 0, neither the mean nor its gradients are finite.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU such a row makes the loss NaN.
        NotImplementedError: `weight` requires a gradient.

    Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; `torch.nn.functional.linear_cross_entropy`.
    """
    (loss,) = KERNEL_OPS.of_shard(locals())
    return loss
