r"""A linear layer over a vocabulary, the log-probabilities of some of its classes, and their entropy.

Sources: the reference is the composition of a linear layer, a log-softmax and a gather, with what
`trl.trainer.utils.selective_log_softmax` and `entropy_from_logits` of TRL compute of whole logits; `softmax.py` has
the numbers of a row.

Forward, for x [N, H], W [V, H] and K candidates a token, a chunk of tokens at a time:

    E = exp(x_chunk @ W^T + b - c)            [C, V], c the logit of the target or of the most likely candidate
    log-probabilities [C, K], entropy [C]     from the sums of E and of E log E

Backward, for any gradient of either, alone or together. Where one candidate's log-probability alone has a gradient, and
the exponentials of all tokens fit 2 GiB, they are kept and read as they are: three products in all. Else the logits are
made once more, and what they end in is the gradient of the logits, G, rounded to the dtype of x for its products

    dx     = G @ W                            rows of the chunk
    dW    += G^T @ x_chunk                    and db += the column sums of G

which are four products, and one less without a gradient of W.

A sampler that cuts by top-k or top-p draws from the softmax over the classes that it keeps, the support of a token.
With supports [N, L] the softmax is over these alone (`support.py`), and G is zero at all others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._patterns import LINEAR_LOGPROBS
from llmk.ops.linear_loss._records import (
    Make,
    keeps_exponentials,
    linear_cost,
    logits_reference,
    one_rank,
    rows_plan,
    token_resized,
    token_workload,
    workloads,
)
from llmk.ops.linear_loss.chunked import local_fields, with_shard
from llmk.ops.linear_loss.drivers.logprobs import CandidatesCall, linear_logprobs_bwd, linear_logprobs_fwd
from llmk.ops.linear_loss.head import DIFFERENTIABLE
from llmk.registry import BatchDependent, Cost, Sample, public_op


@one_rank
def linear_logprobs_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = True, chunk_size: int = 0, logits_dtype: torch.dtype | None = None,
    support: Tensor | None = None, add_tail: bool = False, entropy: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scaled = {"logit_scale": logit_scale, "softcap": softcap}
    logits = logits_reference(input, linear_weight, linear_bias, logits_dtype, **scaled) / temperature
    if support is not None:
        logits = logits.masked_fill(~_in_support(support.long(), logits.shape[-1]), float("-inf"))
    candidates = target.long() if target.dim() == input.dim() else target.long().unsqueeze(-1)
    counts = candidates != ignore_index
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(-1, candidates * counts)
    # 0 * log(0) is 0 for a class without probability.
    entropies = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == float("-inf"), 0.0)).sum(-1)
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    logprobs = torch.where(counts, logprobs, zero)
    if add_tail:
        # A column more takes what ignored candidates would leave out.
        V = logits.shape[-1]
        others = torch.nn.functional.pad(log_softmax, (0, 1), value=float("-inf"))
        tail = others.scatter(-1, torch.where(counts, candidates, V), float("-inf")).logsumexp(-1)
        logprobs = torch.cat((logprobs, torch.where(counts.any(-1), tail, zero).unsqueeze(-1)), -1)
    else:
        logprobs = logprobs.view(target.shape)
    return logprobs, torch.where(counts.any(-1), entropies, zero) if entropy else logprobs.flatten()[:0]


def _in_support(support: Tensor, V: int) -> Tensor:
    """Return the mask of the classes in a support, `[..., V]`, all of them where it has no id."""
    mask = torch.zeros((*support.shape[:-1], V + 1), dtype=torch.bool, device=support.device)
    mask.scatter_(-1, torch.where(support < 0, V, support), True)
    return mask[..., :V] | (support < 0).all(-1, keepdim=True)


def linear_logprobs_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn, classes, tokens = make.randn, make.classes, make.tokens
    everything = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 4.0, "ignore_index": 5}
    yield Sample(tokens(32, 8, H=16), why="powers of two")
    yield Sample(tokens(37, 2, 5), {"chunk_size": 4}, why="three chunks, odd sizes")
    yield Sample(tokens(37, 11), {"chunk_size": 2}, why="six chunks: float32 sums")
    yield Sample(tokens(37, 11), {"logits_dtype": dtype, "chunk_size": 4}, why="logits of the input's dtype")
    kwargs: dict[str, Any] = {"linear_bias": randn(37), "chunk_size": 5, **everything}
    yield Sample((randn(11, 12), randn(37, 12), classes(37, 11, ignore_index=5)), kwargs, why="every option")
    yield Sample((randn(2, 5, 12), randn(37, 12), classes(37, 2, 5, 3)), why="three candidates")
    kwargs = {"entropy": False, "linear_bias": randn(37), "chunk_size": 4}
    yield Sample(tokens(37, 2, 5), kwargs, why="no entropies")
    twice = torch.tensor([[7, 7, 2, -100], [0, 1, 0, 36], [-100, -100, -100, -100]], device=device, dtype=torch.int64)
    kwargs = {"linear_bias": randn(37), "softcap": 4.0, "temperature": 2.0}
    yield Sample((randn(3, 12), randn(37, 12), twice), kwargs, why="a candidate twice, and none that counts")
    yield Sample((randn(2, 12), randn(80, 12), classes(80, 2, 64)), why="64 candidates")
    yield Sample(tokens(37, 9, H=16), {"skip_ignored": False}, why="ignored tokens not skipped")
    kwargs = {"skip_ignored": False, "chunk_size": 2, "softcap": 4.0}
    yield Sample((randn(2, 4, 16), randn(37, 16), classes(37, 2, 4, 1)), kwargs, why="not skipped, a candidate, chunks")
    nothing = make.ignored(4)
    yield Sample((randn(4, 8), randn(32, 8), nothing), why="every target ignored")
    yield Sample((randn(4, 8), randn(32, 8), nothing), {"skip_ignored": False}, why="every target ignored, not skipped")
    yield Sample(tokens(32, 0, H=16), why="no tokens")
    yield Sample(tokens(32, H=16), why="one token, one dimension")
    yield Sample((randn(5, 1), randn(1, 1), torch.zeros(5, device=device, dtype=torch.int64)), why="one feature, class")
    yield Sample((randn(12, 9).t(), randn(12, 37).t(), classes(37, 18)[::2]), why="everything strided")
    yield Sample((randn(6, 8), randn(32, 8), classes(32, 6).int()), {"temperature": 0.1}, why="int32, peaked")
    yield Sample(tokens(32, 6, H=8), {"temperature": 10.0}, why="flat")
    yield Sample(tokens(12_304, 3, H=4), why="12,304 classes: whole blocks and a part")
    yield Sample(tokens(100_003, 2, H=4), {"softcap": 4.0}, why="100,003 classes")
    # Large, and near each other: 1 - exp(-40) is 1 in float64, which then is no exact reference.
    yield Sample((randn(5, 8), randn(37, 8), classes(37, 5)), {"linear_bias": 3e3 + randn(37)}, why="large values")
    yield from tail_samples(make, everything)
    yield from support_samples(make, everything)
    masked = randn(40).masked_fill(torch.arange(40, device=device, dtype=torch.int64) < 20, float("-inf"))
    target = torch.randint(20, 40, (4,), device=device)
    yield Sample((randn(4, 8), randn(40, 8), target), {"linear_bias": masked}, why="half the classes at -inf")


def tail_samples(make: Make, everything: dict[str, Any]) -> Iterator[Sample]:
    randn, classes = make.randn, make.classes
    kwargs = {"add_tail": True, "linear_bias": randn(37), "chunk_size": 4, **everything}
    args = randn(2, 5, 12), randn(37, 12), classes(37, 2, 5, 3, ignore_index=5)
    yield Sample(args, kwargs, why="a tail, every option")
    sure = torch.arange(80, device=make.device, dtype=torch.int64) < 6
    kwargs = {"add_tail": True, "linear_bias": 30.0 * sure.to(make.dtype)}
    rows = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [7, 7, 0, 1, 2, -100]]
    args = randn(3, 12), randn(80, 12), torch.tensor(rows, device=make.device, dtype=torch.int64)
    yield Sample(args, kwargs, why="a tail of probability 1e-11, one with repeated ids")
    yield Sample(make.tokens(32, 3, H=8), {"add_tail": True}, why="a tail beside one class")


def support_samples(make: Make, everything: dict[str, Any]) -> Iterator[Sample]:
    randn, classes, support = make.randn, make.classes, make.support
    target = classes(37, 9)
    kwargs = {"support": support(target.unsqueeze(-1), 37, 6)}
    yield Sample((randn(9, 12), randn(37, 12), target), kwargs, why="supports, repeated ids, padding, a row without")
    target = classes(37, 2, 5, 3, ignore_index=5)
    kwargs = {"support": support(target, 37, 20).int(), "chunk_size": 4, "linear_bias": randn(37), **everything}
    yield Sample((randn(2, 5, 12), randn(37, 12), target), kwargs, why="supports, three candidates, every option")
    target = classes(80, 9)
    kwargs = {"support": support(target.unsqueeze(-1), 80, 64), "skip_ignored": False, "logits_dtype": make.dtype}
    yield Sample((randn(9, 16), randn(80, 16), target), kwargs, why="supports of 64, ignored tokens not skipped")


def linear_logprobs_cost(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Cost:
    return linear_cost(input, linear_weight, reads=3, products=4 - keeps_exponentials(input, linear_weight))


def linear_logprobs_plan(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> str:
    kept = ", the exponentials of all kept" if keeps_exponentials(input, linear_weight) else ""
    return rows_plan(input, linear_weight, **options) + kept


@public_op(
    reference=linear_logprobs_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(linear_logprobs_fwd.op, linear_logprobs_bwd.op),
    samples=linear_logprobs_samples,
    resized=token_resized,
    workloads=workloads(token_workload, (8192, 2048, 151936), (8192, 4096, 128256), (4096, 4096, 32000)),
    sized=token_workload,
    cost=linear_logprobs_cost,
    plan=linear_logprobs_plan,
    patterns=LINEAR_LOGPROBS,
    batch_dependent=BatchDependent.float32_products("output 0", "output 1", "gradient of input"),
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
    skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    support: Tensor | None = None,
    add_tail: bool = False,
    entropy: bool = True,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> tuple[Tensor, Tensor]:
    """Log-probability of the target and entropy of each token, from hidden states, without ever holding all the logits.

    Both are differentiable, together or alone, for any incoming gradient: what losses of preference, of reinforcement
    learning and of distillation are made of. Logits are `linear(input, linear_weight, linear_bias)`, multiplied by
    `logit_scale`, capped, and divided by `temperature`.

    From the forward to the backward pass, where a gradient is wanted and each token has one candidate, the exponentials
    of the logits of all tokens are kept if they fit 2 GiB; else they are made again. Calls whose backward passes are
    still to come add up.

    Where `linear_weight` is a DTensor whose classes are sharded, `Shard(0)`, over one dimension of its mesh, each rank
    keeps its own, and the ranks gather 4 + K float32 numbers of each token; see `fused_linear_ce`. So they do where
    each rank of the group `group_name` has some rows of it in a plain tensor; `llmk.functional.vocab_slice` gives the
    three arguments for it. Every rank then makes the call, with tensors that are alike but for its rows of the weight
    and of the bias, has the same results, and gets the whole gradient of `input`, summed over the ranks in float32.

    Args:
        input: `[..., H]`, float32, float16 or bfloat16, any strides.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices, int64 or int32: `[...]`, or `[..., K]` for K candidates a token.
        linear_bias: `[V]`, dtype of `input`.
        temperature: Divides the logits, after the cap; positive.
        logit_scale: Factor of the logits, before the cap.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        ignore_index: A candidate of this index has log-probability 0 and no gradient. A token all of whose candidates
            have it has entropy 0 too, whatever its logits are.
        skip_ignored: Do no work for tokens none of whose candidates counts, as `fused_linear_ce` does it. The passes
            over the logits leave them out with or without this.
        chunk_size: As in `fused_linear_ce`.
        logits_dtype: As in `fused_linear_ce`.
        support: Classes `[..., L]` over which each token's softmax is, int64 or int32: those that a sampler kept, which
            cut by top-k or top-p. L is from 1 to 1024. Negative ids are padding, an id that occurs twice counts once,
            and a token without any is over all classes. A target outside of its support has no probability: -inf.
        add_tail: Return one log-probability more of each token, after those of its candidates: that of all other
            classes together. It is the logsumexp of their own logits, which 1 minus a sum of probabilities near 1 is
            not. Without a support.
        entropy: Compute the entropies. Without them the sums over the classes take less time.
        vocab_start: The class of the first row of `linear_weight`. The ranks' slices cover every class once, in any
            order and of any lengths; a rank may have none.
        num_classes: Number of classes of all ranks together; 0 without a group: those of `linear_weight`.
        group_name: The `group_name` of a `torch.distributed.ProcessGroup`; "" is one rank, which has all classes.

    Returns:
        Log-probabilities in the shape of `target`, with `add_tail` `[..., K + 1]`, and entropies `[...]` in nats, or an
        empty tensor `[0]` without `entropy`; both float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`, or an id of a support is past the last
            class. On a GPU its token's log-probability and gradients are NaN.

    Sources: `torch.nn.functional.log_softmax`; TRL's `selective_log_softmax` and `entropy_from_logits`,
    https://github.com/huggingface/trl.
    """
    local, as_given, _ = local_fields(with_shard(locals()), [DIFFERENTIABLE], ["target", "support"])
    logprobs, entropies, *_ = linear_logprobs_fwd(CandidatesCall.checked(local))
    return as_given(logprobs), as_given(entropies)
