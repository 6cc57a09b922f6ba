r"""A linear layer over a vocabulary, the K largest log-probabilities of each token, and their classes.

Sources: the reference is the composition of a linear layer, a log-softmax and a stable sort; the row kernels,
`kernels/_topk.py`, have their own, and the proof that what they choose is exact.

Forward, for x [N, H] and W [V, H], a block of tokens at a time:

    logits = x_block @ W^T + b                            [R, V], float32
    candidates of the K largest, logsumexp [R]            in one pass over the logits
    log-probabilities [R, K], classes [R, K]              of the largest of them, sorted

Backward, for any gradient g of the log-probabilities and h of the logsumexp, where the classes j_k are constants:

    dlogits_j = sum_k(g_k * [j_k = j]) - p_j * (sum_k(g_k) - h)

which is that of the log-probabilities of K given classes, as `linear_logprobs` has it: the logits of the first tokens
are kept, those of the others made again.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.math import cap_reference
from llmk.ops.linear_loss._records import (
    Make,
    kept_tokens,
    linear_cost,
    linear_plan,
    linear_reference,
)
from llmk.ops.linear_loss.chunked import DIFFERENTIABLE, CallOp, CompactedTokens, local_fields, recomputing_op
from llmk.ops.linear_loss.drivers.logprobs import (
    LogprobsCall,
    SoftmaxCall,
    backward_sharding,
    keeps,
    linear_gradients,
)
from llmk.ops.linear_loss.kernels import MOST, STATISTICS, Candidates, Implementation
from llmk.registry import REPLICATE, Cost, Sample, check_number, public_op, row_axes


def linear_topk_reference(
    input: Tensor, linear_weight: Tensor, k: int, *, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = logit_scale * linear_reference(input, linear_weight, linear_bias)
    logits = cap_reference(logits, softcap) / temperature
    indices = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return logits.log_softmax(-1).gather(-1, indices), indices, logits.logsumexp(-1)


def check_k(k: int) -> None:
    check_number("k", k, 1, MOST, f"1 to {MOST}")


NOT_IGNORED = -1
"""An index to ignore that no class has."""


@dataclass(frozen=True, kw_only=True)
class TopkCall(SoftmaxCall):
    """A linear layer and the number of its largest outputs that are returned."""

    k: int

    @classmethod
    def checked(cls, **fields: Any) -> Any:
        call = super().checked(**fields)
        check_k(call.k)
        if call.k > call.num_classes:
            raise ValueError(f"k: expected at most {call.num_classes}, the number of classes, got {call.k}")
        return call

    def given(self, indices: Tensor) -> LogprobsCall:
        """Return the call for the log-probabilities of given classes."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(SoftmaxCall)}
        return LogprobsCall(**fields, target=indices, ignore_index=NOT_IGNORED)


def _forward(impl: Implementation, call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, logsumexps, classes, the statistics `[3, ...]` of each token, and kept logits."""
    kept = call.kept_logits(keep)
    linear = call.linear(impl, CompactedTokens(tuple(call.tokens)), call.kept_matrix(kept))
    transform = call.transform(linear, NOT_IGNORED)
    blocks = [impl.topk.candidates(logits, call.k, transform) for _, logits in linear.blocks()]
    part, keys, counts = zip(*blocks, strict=True)
    found = torch.cat(part, -1), torch.cat(keys), torch.cat(counts)
    results = impl.topk.combine(Candidates(*(call.gather_ranks(each) for each in found)), call.k)
    logprobs, indices, logsumexp, stats = results
    shape = tuple(call.tokens)
    return (
        logprobs.view(*shape, call.k),
        logsumexp.view(shape),
        indices.view(*shape, call.k),
        stats.view(STATISTICS, *shape),
        kept,
    )


def _fake_forward(call: TopkCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    largest = (*call.tokens, call.k)
    logprobs, logsumexp, stats = (
        call.input.new_empty(shape, dtype=torch.float32) for shape in (largest, call.tokens, (STATISTICS, *call.tokens))
    )
    return logprobs, logsumexp, call.input.new_empty(largest, dtype=torch.int64), stats, call.kept_logits(keep)


def _backward(
    impl: Implementation, full_call: TopkCall, grad: Tensor | None, logsumexp_grad: Tensor | None, indices: Tensor,
    stats: Tensor, kept: Tensor, need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of the inputs from those of the outputs; logits that were not kept are recomputed."""
    call, tokens = full_call.given(indices), CompactedTokens(tuple(full_call.tokens))
    linear, need = call.linear(impl, tokens, call.kept_matrix(kept)), (need_dx, need_dw, need_db)
    stats = stats.reshape(STATISTICS, -1)
    return linear_gradients(
        impl, call, linear, grad, None, stats, need, call.recomputed_dtypes, logsumexp_grad
    ).results(tokens)


def _forward_sharding(input, *_):
    return [([axis, axis, axis, 1 + axis, REPLICATE], [axis, REPLICATE, REPLICATE]) for axis in row_axes(input)]


forward = CallOp(
    "_linear_topk_fwd", TopkCall, _forward, outputs=5, fake=_fake_forward, products=lambda impl, call, keep: 1
)
backward = recomputing_op("_linear_topk_bwd", TopkCall, _backward, keeps=True)
forward.op.register_sharding(_forward_sharding)
backward.op.register_sharding(backward_sharding)
forward.op.register_autograd(
    lambda ctx, *grads: forward.recomputed_gradients(ctx, backward, *grads),
    setup_context=lambda ctx, inputs, output: forward.save_call(ctx, inputs, *output[2:]),
    depends_on=[DIFFERENTIABLE, DIFFERENTIABLE],
    takes_none=True,
    keeps=keeps,
)


def linear_topk_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn = make.randn
    everything = {"linear_bias": randn(37), "temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0}
    yield Sample((randn(8, 16), randn(32, 16), 4), why="powers of two")
    yield Sample((randn(2, 5, 12), randn(37, 12), 3), {"chunk_size": 4}, why="three chunks, odd sizes")
    yield Sample((randn(11, 12), randn(37, 12), 5), {"chunk_size": 5, **everything}, why="every option")
    yield Sample((randn(5, 12), randn(37, 12), 1), why="the largest alone")
    yield Sample((randn(5, 12), randn(37, 12), 37), why="all classes, sorted")
    yield Sample((randn(3, 12), randn(1000, 12), 256), why="256 of 8 tiles")
    yield Sample((randn(3, 12), randn(5, 12).repeat(64, 1), 70), why="ties: equal rows of the weight, the first ones")
    yield Sample((randn(4, 8), torch.zeros(300, 8, device=device, dtype=dtype), 2), why="all equal, more than are kept")
    masked = randn(400).masked_fill(torch.arange(400, device=device, dtype=torch.int64) >= 6, float("-inf"))
    yield Sample((randn(4, 8), randn(400, 8), 9), {"linear_bias": masked}, why="fewer classes than k are not at -inf")
    yield Sample((randn(0, 16), randn(32, 16), 2), why="no tokens")
    yield Sample((randn(16), randn(32, 16), 2), why="one token, one dimension")
    yield Sample((randn(5, 1), randn(1, 1), 1), why="one feature, class")
    yield Sample((randn(12, 9).t(), randn(12, 37).t(), 6), why="everything strided")
    yield Sample((randn(6, 8), randn(200, 8), 4), {"temperature": 0.1}, why="peaked")
    yield Sample((randn(3, 4), randn(12_304, 4), 8), why="12,304 classes: whole blocks and a part")
    yield Sample((randn(2, 4), randn(100_003, 4), 64), {"softcap": 4.0}, why="100,003 classes")
    neighbours = torch.cat((2 * randn(640, 8), randn(2000, 8)))
    yield Sample((randn(3, 8), neighbours, 8), why="the largest in neighbouring tiles, more than have a slot")


def linear_topk_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, linear_weight = (torch.randn(n, 16, device=device, dtype=dtype) for n in (rows, 40))
    return Sample((x, linear_weight, 4), {"chunk_size": 32}, why="resized")


def linear_topk_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N tokens, H features and V classes, the sizes."""
    make, (N, H, V) = Make(device, dtype), sizes
    return Sample((make.randn(N, H), make.randn(V, H) / H**0.5, min(64, V)), why=f"{N}x{H}x{V}, k=64")


def linear_topk_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for sizes in [(8192, 2048, 151936), (4096, 4096, 128256)]:
        yield linear_topk_workload(sizes, device, dtype)


def linear_topk_cost(input: Tensor, linear_weight: Tensor, k: int, **options: Any) -> Cost:
    part = kept_tokens(input, linear_weight, **options) / max(input.shape[:-1].numel(), 1)
    return linear_cost(input, linear_weight, reads=3, products=4 - part)


def linear_topk_plan(input: Tensor, linear_weight: Tensor, k: int, **options: Any) -> str:
    return linear_plan(input, linear_weight, kept=kept_tokens(input, linear_weight, **options), **options)


@public_op(
    reference=linear_topk_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(forward.op, backward.op),
    samples=linear_topk_samples,
    resized=linear_topk_resized,
    workloads=linear_topk_workloads,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest log-probabilities of each token and their classes, without ever holding all the logits.

    They are exact: those of a whole softmax, the largest first, equal ones in the order of the classes. Logits are
    float32, `linear(input, linear_weight, linear_bias)`, multiplied by `logit_scale`, capped, and divided by
    `temperature`. So a teacher's are stored, 12 bytes for each of k classes instead of 4 for each of V, and
    `llmk.losses.distill_topk` takes indices and log-probabilities as they are.

    Log-probabilities and logsumexp are differentiable, together or alone, where the chosen classes are constants. What
    is kept from the forward to the backward pass is as in `linear_logprobs`.

    Where `linear_weight` is a DTensor whose classes are sharded, `Shard(0)`, over one dimension of its mesh, each rank
    keeps its own, and the ranks gather 128 to 512 numbers of 64 bits of each token; see `fused_linear_ce`.

    NaN is the largest number, as in `torch.topk`; all log-probabilities of its token are NaN. A class at -inf, masked
    by the bias, has log-probability -inf and comes last.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        k: From 1 to 256, and at most V.
        linear_bias: `[V]`, dtype of `input`.
        temperature: Divides the logits, after the cap; positive.
        logit_scale: Factor of the logits, before the cap.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        chunk_size: As in `fused_linear_ce`; the forward pass has the logits of a block and those that are kept.

    Returns:
        Log-probabilities `[..., k]`, float32, indices `[..., k]`, int64, and the logsumexp of the logits `[...]`,
        float32, to which the log-probabilities are relative.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, or there are fewer classes than `k`.

    Sources: `torch.topk` of `torch.nn.functional.log_softmax`.
    """
    fields = {
        "input": input,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
        "k": k,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "temperature": temperature,
        "skip_ignored": False,
        "logits_dtype": None,
        "chunk_size": chunk_size,
        "shard": None,
    }
    fields, as_given, _ = local_fields(fields, [DIFFERENTIABLE], [])
    logprobs, logsumexp, indices, *_ = forward(TopkCall.checked(**fields))
    return as_given(logprobs), as_given(indices), as_given(logsumexp)
