r"""A linear layer over a vocabulary, and of its outputs the log-probabilities of some classes and the entropy.

Sources: the reference is the composition of a linear layer, a log-softmax and a gather, with what
`trl.trainer.utils.selective_log_softmax` and `entropy_from_logits` of TRL compute of whole logits; the row kernels,
`_logprob_rows.py`, have their own.

Forward, for x [N, H], W [V, H] and K candidates a token, a chunk of tokens at a time:

    logits = x_chunk @ W^T + b                [C, V], the only buffer of that width
    log-probabilities [C, K], entropy [C]     in one pass over the logits

Backward, for any gradient of either, alone or together: the logits are made again and

    G      = the logits' gradient             over the logits, in place
    dx     = G @ W                            rows of the chunk
    dW    += G^T @ x_chunk                    and db += the column sums of G

which are four products in all, and two where nobody wants the gradient of W. Nothing is kept of the vocabulary's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from llmk.ops.linear_loss._call import CallOp, LinearCall, fake_gradients, product_flops, saved_dtypes
from llmk.ops.linear_loss._chunked_linear import REMADE_BUDGET, ChunkedLinear, LinearGradients
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss._logprob_rows import CPU, KERNELS, LogprobRows
from llmk.ops.linear_loss._logprob_rows_cpu import STATISTICS, Scores
from llmk.ops.linear_loss._plain import LINEAR_LOGPROBS
from llmk.ops.linear_loss._ranks import gather, group_size, sum_over
from llmk.ops.linear_loss.checks import check_chunk_size, check_temperature, checked_linear
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    Sample,
    cdiv,
    check_dtype,
    check_finite,
    check_same,
    check_switch,
    public_op,
    row_axes,
)
from llmk.registry.eager.bypass import PLAIN_TENSORS


def linear_logprobs_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = torch.nn.functional.linear(input, linear_weight, linear_bias)
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    candidates = target.long() if target.dim() == input.dim() else target.long().unsqueeze(-1)
    counts = candidates != ignore_index
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(-1, candidates * counts)
    # Of a class without probability 0 * log(0) is 0.
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == float("-inf"), 0.0)).sum(-1)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    return (
        torch.where(counts, logprobs, zero).view(target.shape),
        torch.where(counts.any(-1), entropy, zero),
    )


@dataclass(frozen=True)
class LogprobsCall(LinearCall):
    """The classes of `linear_weight` begin at `vocab_start`; others are on the other ranks of a group."""

    target: Tensor  # [...] or [..., K]
    ignore_index: int
    logit_scale: float
    softcap: float
    temperature: float
    skip_ignored: bool
    chunk_size: int
    vocab_start: int
    num_classes: int
    group_name: str  # "" where there is none
    dx_group_name: str  # over which the gradient of the input is summed

    @property
    def dx_dtype(self) -> torch.dtype:
        return torch.float32 if self.dx_group_name else self.input.dtype

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of gradients that are made in the forward pass."""
        return saved_dtypes(self.input.dtype, self.dx_group_name)

    def scores(self, linear: ChunkedLinear) -> Scores:
        return Scores(
            self.ignore_index, self.logit_scale, self.softcap, self.temperature, self.vocab_start, self.num_classes,
            linear.leaves_rows_past_count,
        )  # fmt: skip

    def linear(self, kept: Kept | None) -> ChunkedLinear:
        classes = cdiv(self.num_classes, group_size(self.group_name))  # on all ranks the same chunks
        return ChunkedLinear(
            self.input, self.linear_weight, self.linear_bias, self.chunk_size, classes, REMADE_BUDGET,
            Kept.count_of(kept),
        )  # fmt: skip

    def candidates(self) -> Tensor:
        """The targets `[N, K]`."""
        K = self.target.shape[-1] if self.target.dim() == self.input.dim() else 1
        return self.target.reshape(-1, K).contiguous()

    def kept(self, rows: LogprobRows) -> Kept | None:
        """The tokens that count, where that is asked for and can be made use of."""
        if not self.skip_ignored:
            return None
        counts = self.target.long() != self.ignore_index  # int32 would wrap an index that it does not hold
        counts = counts.any(-1) if self.target.dim() == self.input.dim() else counts
        return Kept.of(counts, (self.input, self.linear_weight), on_host=rows is CPU)

    def of_kept(self, kept: Kept | None) -> Self:
        return self if kept is None else kept.call(self, "input", "target")


def _forward(rows: LogprobRows, call: LogprobsCall) -> tuple[Tensor, Tensor, Tensor]:
    kept = call.kept(rows)
    logprobs, entropy, stats = _forward_of(rows, call.of_kept(kept), kept)
    if kept is None:
        return logprobs, entropy, stats
    return kept.spread(logprobs), kept.spread(entropy), kept.spread(stats.t()).movedim(-1, 0).contiguous()


def _forward_of(rows: LogprobRows, call: LogprobsCall, kept: Kept | None) -> tuple[Tensor, Tensor, Tensor]:
    linear = call.linear(kept)
    target, scores, parts = call.candidates(), call.scores(linear), []
    for chunk, logits in linear.chunks():
        part = gather(rows.statistics(logits, target[chunk], scores), call.group_name)
        parts.append(rows.combine(part, target[chunk], scores))
    logprobs, entropy, stats = (torch.cat(of, -1 if i == 2 else 0) for i, of in enumerate(zip(*parts, strict=True)))
    return logprobs.view(call.target.shape), entropy.view(call.tokens), stats.view(STATISTICS, *call.tokens)


def _backward(
    rows: LogprobRows, call: LogprobsCall, grad: Tensor | None, entropy_grad: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kept, need = call.kept(rows), (need_dx, need_dw, need_db)
    if kept is not None:
        grad, entropy_grad = (None if g is None else kept.rows(g) for g in (grad, entropy_grad))
        stats = kept.rows(stats.movedim(0, -1)).t()
    dx, dw, db = _backward_of(rows, call.of_kept(kept), kept, grad, entropy_grad, stats, need)
    return dx if kept is None or not need_dx else kept.spread(dx), dw, db


def _backward_of(
    rows: LogprobRows, call: LogprobsCall, kept: Kept | None, grad: Tensor | None, entropy_grad: Tensor | None,
    stats: Tensor, need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    linear = call.linear(kept)
    target, scores = call.candidates(), call.scores(linear)
    gradients = LinearGradients(linear, need, call.dx_dtype)
    grad = None if grad is None else grad.reshape(target.shape)
    entropy_grad = None if entropy_grad is None else entropy_grad.reshape(-1)
    stats = stats.reshape(STATISTICS, -1)
    for chunk, logits in linear.chunks():
        if logits.shape[1] > 0:
            of_logprobs, of_entropy = (None if g is None else g[chunk] for g in (grad, entropy_grad))
            rows.gradients(of_logprobs, of_entropy, logits, target[chunk], stats[:, chunk], scores)
        gradients.add(chunk, logits)
    dtype = call.input.dtype
    return gradients.dx, gradients.dw.to(dtype), gradients.db.to(dtype)


def _fake_forward(call: LogprobsCall) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy, stats = (
        call.input.new_empty(shape, dtype=torch.float32)
        for shape in (call.target.shape, call.tokens, (STATISTICS, *call.tokens))
    )
    return logprobs, entropy, stats


def _fake_backward(call: LogprobsCall, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(call, rest[-3:], [call.dx_dtype, call.input.dtype, call.input.dtype])


linear_logprobs_fwd = CallOp(
    "_linear_logprobs_fwd", LogprobsCall, _forward,
    kernels=KERNELS, cpu=CPU, fake=_fake_forward, products=lambda call: 1,
)  # fmt: skip
linear_logprobs_bwd = CallOp(
    "_linear_logprobs_bwd", LogprobsCall, _backward,
    kernels=KERNELS, cpu=CPU, fake=_fake_backward, products=lambda call, *rest: 1 + rest[-3] + rest[-2],
)  # fmt: skip


@linear_logprobs_fwd.op.register_sharding
def _(input, *_):
    return [([axis, axis, 1 + axis], [axis, REPLICATE, REPLICATE, axis]) for axis in row_axes(input)]


@linear_logprobs_bwd.op.register_sharding
def _(input, *args):
    need_dx = args[-3]
    return [
        ([axis if need_dx else REPLICATE, PARTIAL, PARTIAL], [axis, REPLICATE, REPLICATE, axis, axis, axis, 1 + axis])
        for axis in row_axes(input)
    ]


def _setup_context(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:4], inputs[4:]
    *_, stats = output
    ctx.save_for_backward(*tensors, stats)


def _gradients(ctx, grad, entropy_grad):
    *tensors, stats = ctx.saved_tensors
    call, need = LogprobsCall(*tensors, *ctx.options), ctx.needs_input_grad[:3]
    dx, dw, db = linear_logprobs_bwd(call, grad, entropy_grad, stats, *need)
    dx = sum_over(call.dx_group_name, dx).to(call.input.dtype) if need[0] else None
    return dx, dw if need[1] else None, db if need[2] else None, *[None] * (len(ctx.options) + 1)


_DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]
linear_logprobs_fwd.op.register_autograd(
    _gradients, setup_context=_setup_context, depends_on=[_DIFFERENTIABLE, _DIFFERENTIABLE], takes_none=True
)


def linear_logprobs_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def classes(V: int, *shape: int, ignore_index: int = -100) -> Tensor:
        target = torch.randint(0, V, shape, device=device)
        places = torch.arange(target.numel(), device=device, dtype=torch.int64).view(shape)
        return target.masked_fill(places % 4 == 3, ignore_index)

    everything = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0, "ignore_index": 5}
    yield Sample((randn(8, 16), randn(32, 16), classes(32, 8)), why="powers of two")
    yield Sample((randn(2, 5, 12), randn(37, 12), classes(37, 2, 5)), {"chunk_size": 4}, why="three chunks, odd sizes")
    yield Sample((randn(11, 12), randn(37, 12), classes(37, 11)), {"chunk_size": 2}, why="six chunks: float32 sums")
    kwargs = {"linear_bias": randn(37), "chunk_size": 5, **everything}
    yield Sample((randn(11, 12), randn(37, 12), classes(37, 11, ignore_index=5)), kwargs, why="every option")
    yield Sample((randn(2, 5, 12), randn(37, 12), classes(37, 2, 5, 3)), why="three candidates")
    twice = torch.tensor([[7, 7, 2, -100], [0, 1, 0, 36], [-100, -100, -100, -100]], device=device, dtype=torch.int64)
    kwargs = {"linear_bias": randn(37), "softcap": 4.0, "temperature": 2.0}
    yield Sample((randn(3, 12), randn(37, 12), twice), kwargs, why="a candidate twice, and none that counts")
    yield Sample((randn(2, 12), randn(80, 12), classes(80, 2, 64)), why="64 candidates")
    yield Sample((randn(9, 16), randn(37, 16), classes(37, 9)), {"skip_ignored": True}, why="ignored tokens skipped")
    kwargs = {"skip_ignored": True, "chunk_size": 2, "softcap": 4.0}
    yield Sample((randn(2, 4, 16), randn(37, 16), classes(37, 2, 4, 1)), kwargs, why="skipped, one candidate, chunks")
    nothing = torch.full((4,), -100, device=device, dtype=torch.int64)
    yield Sample((randn(4, 8), randn(32, 8), nothing), why="every target ignored")
    yield Sample((randn(4, 8), randn(32, 8), nothing), {"skip_ignored": True}, why="every target ignored and skipped")
    yield Sample((randn(0, 16), randn(32, 16), classes(32, 0)), why="no tokens")
    yield Sample((randn(16), randn(32, 16), classes(32, 1)[0]), why="one token, one dimension")
    yield Sample((randn(5, 1), randn(1, 1), torch.zeros(5, device=device, dtype=torch.int64)), why="one feature, class")
    yield Sample((randn(12, 9).t(), randn(12, 37).t(), classes(37, 18)[::2]), why="everything strided")
    yield Sample((randn(6, 8), randn(32, 8), classes(32, 6).int()), {"temperature": 0.1}, why="int32, peaked")
    yield Sample((randn(6, 8), randn(32, 8), classes(32, 6)), {"temperature": 10.0}, why="flat")
    yield Sample((randn(3, 4), randn(12_304, 4), classes(12_304, 3)), why="12,304 classes: whole blocks and a part")
    yield Sample((randn(2, 4), randn(100_003, 4), classes(100_003, 2)), {"softcap": 4.0}, why="100,003 classes")
    # Large, and near each other: 1 - exp(-40) is 1 in float64, which then is not the truth.
    yield Sample((randn(5, 8), randn(37, 8), classes(37, 5)), {"linear_bias": 3e3 + randn(37)}, why="large values")
    masked = randn(40).masked_fill(torch.arange(40, device=device, dtype=torch.int64) < 20, float("-inf"))
    target = torch.randint(20, 40, (4,), device=device)
    yield Sample((randn(4, 8), randn(40, 8), target), {"linear_bias": masked}, why="half the classes at -inf")


def linear_logprobs_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, linear_weight = (torch.randn(n, 16, device=device, dtype=dtype) for n in (rows, 40))
    return Sample((x, linear_weight, torch.randint(0, 40, (rows,), device=device)), {"chunk_size": 32}, why="resized")


def linear_logprobs_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for N, H, V in [(8192, 2048, 151936), (8192, 4096, 128256), (4096, 4096, 32000)]:
        x = torch.randn(N, H, device=device, dtype=dtype)
        linear_weight = torch.randn(V, H, device=device, dtype=dtype) / H**0.5
        yield Sample((x, linear_weight, torch.randint(0, V, (N,), device=device)), why=f"{N}x{H}x{V}")


def linear_logprobs_cost(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Cost:
    tensors = (input.numel() + linear_weight.numel()) * input.element_size()
    product = product_flops(input, linear_weight)
    return Cost(tensors, 3 * tensors, product, 4 * product)


@public_op(
    "linear_logprobs(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    "float temperature=1.0, float logit_scale=1.0, float softcap=0.0, int ignore_index=-100, "
    "bool skip_ignored=False, int chunk_size=0) -> (Tensor, Tensor)",
    reference=linear_logprobs_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(linear_logprobs_fwd.op, linear_logprobs_bwd.op),
    samples=linear_logprobs_samples,
    resized=linear_logprobs_resized,
    workloads=linear_logprobs_workloads,
    cost=linear_logprobs_cost,
    plain=LINEAR_LOGPROBS,
)
def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    skip_ignored: bool = False,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of each token, from hidden states, without ever holding all the logits.

    Both are differentiable, together or alone, for any incoming gradient: what losses of preference, of reinforcement
    learning and of distillation are made of. Logits are `linear(input, linear_weight, linear_bias)`, multiplied by
    `logit_scale`, capped, and divided by `temperature`. The backward pass makes them again.

    Where `linear_weight` is a DTensor whose classes are sharded, `Shard(0)`, over one dimension of its mesh, each rank
    keeps its own, and the ranks gather 3 + K float32 numbers of each token; see `fused_linear_ce`.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices, int64 or int32: `[...]`, or `[..., K]` for K candidates a token.
        linear_bias: `[V]`, dtype of `input`.
        temperature: What the logits are divided by, after the cap; positive.
        logit_scale: What the logits are multiplied by, before the cap.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        ignore_index: A candidate of this index has log-probability 0 and no gradient. A token all of whose candidates
            have it has entropy 0 too, whatever its logits are.
        skip_ignored: Do no work for tokens none of whose candidates counts, as `fused_linear_ce` does it. The passes
            over the logits leave them out with or without this.
        chunk_size: Tokens whose logits exist at a time. 0 chooses: on a GPU the fewest equal chunks of at most 0.8 GiB
            of logits, on a CPU a million logits. Beyond three chunks the gradient of `linear_weight` is summed in
            float32, which takes a buffer of that size.

    Returns:
        Log-probabilities in the shape of `target`, and entropies `[...]` in nats; both float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU its log-probability and the
            gradients of its token are NaN.

    Sources: `torch.nn.functional.log_softmax`; TRL's `selective_log_softmax` and `entropy_from_logits`,
    https://github.com/huggingface/trl.
    """
    if type(linear_weight) not in PLAIN_TENSORS:
        from llmk.ops.linear_loss._vocab_shards import mesh_dim_of_classes, slices_of  # which imports torch.distributed

        dim = mesh_dim_of_classes(input, linear_weight)
        if dim is not None:
            slices = slices_of(dim, input, linear_weight, linear_bias, target)
            of_slices = _logprobs(
                slices.input, slices.linear_weight, slices.linear_bias, slices.target,
                ignore_index, logit_scale, softcap, temperature, skip_ignored, chunk_size,
                slices.vocab_start, slices.num_classes, slices.group_name, slices.dx_group_name,
            )  # fmt: skip
            return slices.whole(of_slices[0]), slices.whole(of_slices[1])
    return _logprobs(
        input, linear_weight, linear_bias, target,
        ignore_index, logit_scale, softcap, temperature, skip_ignored, chunk_size, 0, linear_weight.shape[0], "", "",
    )  # fmt: skip


def _logprobs(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Any, *options: Any
) -> tuple[Tensor, Tensor]:
    input, linear_weight, linear_bias = checked_linear(input, linear_weight, linear_bias, fewest_classes=0)
    call = LogprobsCall(input, linear_weight, linear_bias, target, *options)
    if call.num_classes == 0:
        raise ValueError(f"linear_weight: expected at least one class, got shape {tuple(linear_weight.shape)}")
    check_dtype("target", target, (torch.int64, torch.int32))
    check_same("target", target, "input", input)
    tokens, shape = tuple(call.tokens), tuple(target.shape)
    if shape != tokens and (target.dim() != input.dim() or shape[:-1] != tokens or shape[-1] == 0):
        raise ValueError(f"target: expected shape {tokens}, or {tokens} and K candidates, got {shape}")
    check_temperature(call.temperature)
    check_finite("logit_scale", call.logit_scale)
    check_switch("softcap", call.softcap)
    check_chunk_size(call.chunk_size)
    logprobs, entropy, _ = linear_logprobs_fwd(call)
    return logprobs, entropy
