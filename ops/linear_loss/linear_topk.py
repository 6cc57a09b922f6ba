r"""A linear layer over a vocabulary, the K largest log-probabilities of each token, and their classes.

Sources: the reference is the composition of a linear layer, a log-softmax and a stable sort; the row kernels,
`kernels/_topk.py`, have their own, and the proof that what they choose is exact.

Forward, for x [N, H] and W [V, H], a block of tokens at a time:

    logits = x_block @ W^T + b                            [R, V], float32
    candidates of the K largest, logsumexp [R]            in one pass over the logits
    log-probabilities [R, K], classes [R, K]              of the largest of them, sorted

Backward, for any gradient g of the log-probabilities and h of the logsumexp, where the classes j_k are constants:

    dlogits_j = sum_k(g_k * [j_k = j]) - p_j * (sum_k(g_k) - h)

which is that of the log-probabilities of K given classes, as `linear_logprobs` has it. The float32 logits of all tokens
are kept where they fit `KEPT_BUDGET` and have no cap, and else made again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.math import logsumexp_reference
from llmk.ops.linear_loss._records import (
    Make,
    keeps,
    linear_cost,
    logits_reference,
    one_rank,
    resized,
    rows_plan,
    workloads,
)
from llmk.ops.linear_loss.chunked import local_fields, with_shard
from llmk.ops.linear_loss.drivers.logprobs import TopkCall, linear_topk_bwd, linear_topk_fwd
from llmk.ops.linear_loss.head import DIFFERENTIABLE
from llmk.registry import Cost, Sample, public_op


@one_rank
def linear_topk_reference(
    input: Tensor, linear_weight: Tensor, k: int, *, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = logits_reference(input, linear_weight, linear_bias, logit_scale=logit_scale, softcap=softcap) / temperature
    indices = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return logits.log_softmax(-1).gather(-1, indices), indices, logsumexp_reference(logits)


def linear_topk_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn
    everything = {"linear_bias": randn(37), "temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0}
    yield Sample((randn(4, 16), randn(32, 16), 4), why="powers of two")
    yield Sample((randn(2, 3, 12), randn(37, 12), 3), {"chunk_size": 2}, why="three chunks, odd sizes")
    yield Sample((randn(5, 12), randn(37, 12), 5), {"chunk_size": 3, **everything}, why="every option")
    yield Sample((randn(3, 12), randn(37, 12), 1), why="the largest alone")
    yield Sample((randn(3, 12), randn(37, 12), 37), why="all classes, sorted")
    yield Sample((randn(2, 12), randn(1000, 12), 256), why="256 of 8 tiles")
    yield Sample((randn(2, 12), randn(5, 12).repeat(64, 1), 70), why="ties: equal rows of the weight, the first ones")
    yield Sample((randn(2, 8), torch.zeros(300, 8, device=device, dtype=dtype), 2), why="all equal, more than are kept")
    masked = randn(400).masked_fill(torch.arange(400, device=device, dtype=torch.int64) >= 6, float("-inf"))
    yield Sample((randn(3, 8), randn(400, 8), 9), {"linear_bias": masked}, why="fewer classes than k are not at -inf")
    yield Sample((randn(0, 16), randn(32, 16), 2), why="no tokens")
    yield Sample((randn(16), randn(32, 16), 2), why="one token, one dimension")
    yield Sample((randn(3, 1), randn(1, 1), 1), why="one feature, class")
    yield Sample((randn(12, 5).t(), randn(12, 37).t(), 6), why="everything strided")
    yield Sample((randn(3, 8), randn(200, 8), 4), {"temperature": 0.25}, why="peaked")
    yield Sample((randn(2, 4), randn(12_304, 4), 64), {"softcap": 4.0}, why="12,304 classes: whole blocks and a part")
    neighbours = torch.cat((2 * randn(640, 8), randn(2000, 8)))
    yield Sample((randn(2, 8), neighbours, 8), why="the largest in neighbouring tiles, more than have a slot")


def linear_topk_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N tokens, H features and V classes, the sizes."""
    make, (N, H, V) = Make(device, dtype), sizes
    k = min(64, max(V // 10, 1))
    return Sample((make.randn(N, H), make.randn(V, H) / H**0.5, k), why=f"{N}x{H}x{V}, k={k}")


def _keeps_logits(input: Tensor, linear_weight: Tensor, softcap: float) -> bool:
    return not softcap and keeps(input, linear_weight, torch.float32.itemsize)


def linear_topk_cost(
    input: Tensor, linear_weight: Tensor, k: int, *, softcap: float = 0.0, **options: Any
) -> Cost:  # fmt: skip
    kept = _keeps_logits(input, linear_weight, softcap)
    return linear_cost(input, linear_weight, reads=3, products=4 - kept)


def linear_topk_plan(
    input: Tensor, linear_weight: Tensor, k: int, *, softcap: float = 0.0, **options: Any
) -> str:  # fmt: skip
    kept = ", those of all kept for a gradient" if _keeps_logits(input, linear_weight, softcap) else ""
    return rows_plan(input, linear_weight, matrices=1, **options) + kept


@public_op(
    reference=linear_topk_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(linear_topk_fwd.op, linear_topk_bwd.op),
    samples=linear_topk_samples,
    resized=resized(linear_topk_workload, 16, 40),
    workloads=workloads(linear_topk_workload, (8192, 2048, 151936), (4096, 4096, 128256)),
    sized=linear_topk_workload,
    cost=linear_topk_cost,
    plan=linear_topk_plan,
)
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    chunk_size: int = 0,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest log-probabilities of each token and their classes, without ever holding all the logits.

    They are exact: those of a whole softmax, the largest first, equal ones in the order of the classes. Logits are
    float32, `linear(input, linear_weight, linear_bias)`, multiplied by `logit_scale`, capped, and divided by
    `temperature`. So a teacher's are stored, 12 bytes for each of k classes instead of 4 for each of V, and
    `llmk.losses.distill_topk` takes indices and log-probabilities as they are.

    Log-probabilities and logsumexp are differentiable, together or alone, where the chosen classes are constants. Where
    a gradient is wanted, the float32 logits of all tokens are kept if they take 2 GiB at most and have no `softcap`;
    else the backward pass makes them again.

    Where `linear_weight` is a DTensor whose classes are sharded, `Shard(0)`, over one dimension of its mesh, each rank
    keeps its own, and the ranks gather 128 to 1024 numbers of 64 bits of each token; see `fused_linear_ce`. So they do
    where each rank has some rows of it in a plain tensor, as in `linear_logprobs`.

    NaN is the largest number, as in `torch.topk`; all log-probabilities of its token are NaN. A class at -inf, masked
    by the bias, has log-probability -inf and comes last.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        k: From 1 to 256, and at most V.
        linear_bias: `[V]`, dtype of `input`.
        temperature, logit_scale, softcap: As in `linear_logprobs`.
        chunk_size: Tokens whose logits, in the backward pass their gradient, exist at a time; 0 chooses.
        vocab_start, num_classes, group_name: As in `linear_logprobs`, for a weight that is sharded over ranks.

    Returns:
        Log-probabilities `[..., k]`, float32, indices `[..., k]`, int64, and the logsumexp of the logits `[...]`,
        float32, to which the log-probabilities are relative.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, or there are fewer classes than `k`.

    Sources: `torch.topk` of `torch.nn.functional.log_softmax`.
    """
    local, as_given, _ = local_fields(with_shard(locals()), [DIFFERENTIABLE], [])
    logprobs, logsumexp, indices, *_ = linear_topk_fwd(TopkCall.checked(local))
    return as_given(logprobs), as_given(indices), as_given(logsumexp)
