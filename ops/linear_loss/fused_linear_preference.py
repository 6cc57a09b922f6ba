r"""A linear layer over a vocabulary and a preference loss of pairs of completions, or of single ones.

Sources: `objectives/preference.py` has those of the losses; Hsu et al., "Liger Kernel", 2024,
https://arxiv.org/abs/2410.10989, for making the gradients in the forward pass.

For group g with M sequences, whose tokens t have the log-probabilities log p, weights w and v:

    l_gm = sum_t w_t log p_t - ref_gm
    loss = sum_g u_g f(s(l_g1), .., s(l_gM)) - sum_t v_t log p_t

with a loss f and a reward s, so that the gradient of log p_t of sequence m is w_t u_g df/ds_m s'(l_gm) - v_t. It is
known once the group's log-probabilities are. So forward, a chunk of whole groups at a time, autograd makes the gradient
of each log-probability, and the chunk's exponentials those of the inputs as in `fused_linear_ce.py`: three products.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, linear_cost, one_rank, resized, workloads
from llmk.ops.linear_loss.drivers.logprobs import GroupsCall, groups_op
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs_reference
from llmk.ops.linear_loss.objectives.preference import (
    F_DIVERGENCES,
    LOSSES,
    MARGIN_LOSSES,
    PreferenceTerms,
    check_label_smoothing,
)
from llmk.registry import (
    BatchDependent,
    Sample,
    check_finite,
    check_option,
    check_parameter,
    check_positive,
    check_shape,
    public_op,
)


@one_rank
def fused_linear_preference_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, ref_logps: Tensor | None = None,
    token_weight: Tensor | None = None, nll_weight: Tensor | None = None, group_weight: Tensor | None = None,
    loss_type: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0, simpo_gamma: float = 0.0,
    discopop_tau: float = 0.05, f_divergence_type: str = "reverse_kl", f_divergence_coef: float = 0.5,
    ignore_index: int = -100, **linear: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    terms = PreferenceTerms.of(locals())
    logprobs, entropy = linear_logprobs_reference(input, linear_weight, target, ignore_index=ignore_index, **linear)
    return terms.loss(logprobs, target.long() != ignore_index), logprobs.detach(), entropy.detach()


@dataclass(frozen=True, kw_only=True)
class PreferenceCall(GroupsCall):
    """The tokens are `[G, M, S]`: G groups of M sequences."""

    terms: PreferenceTerms

    @cached_property
    def group(self) -> torch.Size:
        return self.tokens[1:]

    def loss(self, groups: slice) -> Callable[[Tensor, Tensor], Tensor]:
        counts = self.target[groups].long() != self.ignore_index  # int32 would wrap an index that it does not hold
        return lambda logprobs, entropy: self.terms.loss(logprobs, counts, groups)


forward, KERNEL_OPS = groups_op("fused_linear_preference", PreferenceCall)


def fused_linear_preference_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn, rand, classes = make.randn, make.rand, make.classes

    def pairs(G: int = 3, S: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        return randn(G, 2, S, 12), randn(37, 12), classes(37, G, 2, S)

    ref = randn(3, 2) - 15
    yield Sample(pairs(), {"ref_logps": ref}, why="three pairs")
    kwargs = {
        "ref_logps": ref,
        "linear_bias": randn(37),
        "token_weight": rand(3, 2, 4),
        "nll_weight": rand(3, 2, 4),
        "group_weight": rand(2, 3),
        "loss_type": "robust+sigmoid_norm",
        "label_smoothing": 0.1,
        "temperature": 0.7,
        "logit_scale": 0.5,
        "softcap": 4.0,
        "f_divergence_type": "js_divergence",
    }
    yield Sample(pairs(), kwargs | {"chunk_size": 9}, why="every option, a pair to a chunk")
    yield Sample(pairs(), kwargs | {"chunk_size": 5}, why="every option, logits made twice")
    skipped = randn(3, 2, 4, 16), randn(37, 16), classes(37, 3, 2, 4)
    skipped[2][1] = -100
    options = kwargs | {"skip_ignored": False, "chunk_size": 9}
    yield Sample(
        skipped, options, why="every option, ignored tokens not skipped, a pair to a chunk, of one all of them"
    )
    kwargs = {"loss_type": "kto", "ref_logps": ref[:, :1], "group_weight": rand(3), "chunk_size": 4}
    yield Sample((randn(3, 1, 4, 12), randn(37, 12), classes(37, 3, 1, 4)), kwargs, why="single completions")
    nothing = make.ignored(2, 2, 3)
    yield Sample((randn(2, 2, 3, 12), randn(37, 12), nothing), {"loss_type": "orpo"}, why="no token counts")
    yield Sample(pairs(), {"logits_dtype": dtype}, why="logits of the input's dtype")
    yield Sample(pairs(0), why="no pair")
    yield Sample(pairs(2, 0), why="no token")
    strided = randn(2, 3, 4, 12).transpose(0, 1), randn(12, 37).t(), classes(37, 2, 3, 4).transpose(0, 1).int()
    yield Sample(strided, {"loss_type": "simpo", "beta": 2.0}, why="strided, int32")


def fused_linear_preference_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of G pairs of sequences of S tokens, H features and V classes, the sizes."""
    make, (G, S, H, V) = Make(device, dtype), sizes
    args = make.randn(G, 2, S, H), make.randn(V, H) / H**0.5, torch.randint(0, V, (G, 2, S), device=device)
    ref_logps = torch.full((G, 2), -S * math.log(V), dtype=torch.float32, device=device)
    return Sample(args, {"ref_logps": ref_logps}, why=f"{G}x2x{S}x{H}x{V}")


@public_op(
    reference=fused_linear_preference_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS,
    samples=fused_linear_preference_samples,
    resized=resized(fused_linear_preference_workload, 4, 16, 40),
    workloads=workloads(fused_linear_preference_workload, (4, 512, 4096, 128256), (4, 512, 2048, 151936)),
    cost=linear_cost,
    batch_dependent=BatchDependent.float32_products("output 1", "output 2", "gradient of input"),
)
def fused_linear_preference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ref_logps: Tensor | None = None,
    token_weight: Tensor | None = None,
    nll_weight: Tensor | None = None,
    group_weight: Tensor | None = None,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence_type: str = "reverse_kl",
    f_divergence_coef: float = 0.5,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss of pairs of completions, or of single ones, from hidden states, without ever holding all the logits.

    `dpo`, `cpo`, `simpo`, `orpo` and `kto` of `llmk.losses` use it; their docstrings have the formulas. The gradients
    that are needed are made in the forward pass and scaled in the backward pass. Where the logits of a group fit into a
    chunk they are made once, else twice, as in float16.

    Args:
        input: `[G, M, S, H]`, G groups of M sequences of S tokens; float32, float16 or bfloat16, any strides. M is 2,
            the chosen and the rejected completion, or 1 with "kto".
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices `[G, M, S]`, int64 or int32.
        linear_bias: `[V]`, dtype of `input`.
        ref_logps: Log-probabilities `[G, M]` of the reference model, summed over each sequence; None for 0.
        token_weight: Weight `[G, M, S]` of each log-probability in a sequence's sum; None for 1.
        nll_weight: Weight `[G, M, S]` of each token's negative log-likelihood, which is added; None for 0.
        group_weight: Weight `[G]` of each group's loss, or `[types, G]` with several types; None for 1.
        loss_type: "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "nca_pair", "bco_pair",
            "sppo_hard", "apo_zero", "apo_down", "cpo", "simpo", "orpo" or "kto", or several joined by "+", which are
            added.
        beta: Factor of the rewards; positive.
        label_smoothing: Assumed fraction of pairs with flipped labels, used by "robust" (from 0 to below 0.5),
            "exo_pair" (between 0 and 1), "cpo" and "simpo" (from 0 to 1).
        simpo_gamma: Target margin, which "cpo" and "simpo" subtract from beta times the margin.
        discopop_tau: Temperature of "discopop"; positive.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", for types that
            depend on the difference of rewards alone.
        f_divergence_coef: Coefficient of the alpha divergence.
        temperature, logit_scale, softcap: As in `linear_logprobs`.
        ignore_index: A token with this target has log-probability 0 and no gradient, whatever its values are.
        skip_ignored: Do no work for tokens that do not count, as `fused_linear_ce` does it, but on a CPU.
        chunk_size: As in `fused_linear_ce`, or the most tokens that are whole groups.
        logits_dtype: As in `fused_linear_ce`.
        vocab_start, num_classes, group_name: As in `linear_logprobs`, for a weight that is sharded over ranks.

    Returns:
        The loss, a sum, scalar; and detached the log-probabilities and entropies of tokens `[G, M, S]`; all float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU it makes the loss NaN.
        NotImplementedError: A tensor beside the linear layer requires a gradient.

    Sources: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; TRL, https://github.com/huggingface/trl; each
    type in `objectives/preference.py`. Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    call = PreferenceCall.checked(locals())
    _check_loss(call)
    _check_tensors(call)
    check_positive("beta", beta)
    check_positive("discopop_tau", discopop_tau)
    check_label_smoothing(loss_type.split("+"), label_smoothing)
    check_finite("simpo_gamma", simpo_gamma)
    check_finite("f_divergence_coef", f_divergence_coef)
    loss, logprobs, entropy, *_ = forward(call)
    return loss, logprobs, entropy


def _check_loss(call: PreferenceCall) -> None:
    terms, names = call.terms, call.terms.loss_type.split("+")
    for name in names:
        check_option("loss_type", name, tuple(LOSSES))
    check_option("f_divergence_type", terms.f_divergence_type, tuple(F_DIVERGENCES))
    M = LOSSES[names[0]].sequences
    for name in names:
        if LOSSES[name].sequences != M:
            raise ValueError(f"loss_type: expected types of {M} sequences a group like {names[0]!r}, got {name!r}")
        if terms.f_divergence_type != "reverse_kl" and name not in MARGIN_LOSSES:
            expected = f"expected 'reverse_kl' with loss_type {name!r}"
            raise ValueError(f"f_divergence_type: {expected}, got {terms.f_divergence_type!r}")
    if call.input.dim() != 4 or call.input.shape[1] != M:
        expected = f"[G, {M}, S, H] with loss_type {terms.loss_type!r}"
        raise ValueError(f"input: expected shape {expected}, got {tuple(call.input.shape)}")


def _check_tensors(call: PreferenceCall) -> None:
    tokens, (G, M) = call.tokens, call.tokens[:2]
    types = call.terms.loss_type.count("+") + 1
    check_shape("target", call.target, tokens, "one for each token of input")
    for name, shape, meaning in (
        ("ref_logps", (G, M), "one for each sequence"),
        ("token_weight", tokens, "one for each token"),
        ("nll_weight", tokens, "one for each token"),
        ("group_weight", (G,) if types == 1 else (types, G), "one for each group"),
    ):
        check_parameter(name, getattr(call.terms, name), shape, meaning, "input", call.input)
