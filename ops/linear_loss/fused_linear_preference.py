r"""A linear layer over a vocabulary, and a loss of pairs of completions, or of single ones, by their log-probabilities.

Sources: `pair_losses.py` and `divergence_scores.py` have those of the losses; Hsu et al., "Liger Kernel", 2024,
https://arxiv.org/abs/2410.10989, for making the gradients in the forward pass.

Of group g with M sequences, whose tokens t have the log-probabilities log p, weights w and v:

    l_gm = sum_t w_t log p_t - ref_gm
    loss = sum_g u_g f(s(l_g1), .., s(l_gM)) - sum_t v_t log p_t

with a loss f and a score s, so that the gradient of log p_t of sequence m is w_t u_g df/ds_m s'(l_gm) - v_t. It is
known once the group's log-probabilities are. So forward, for x [N, H] and W [V, H], a chunk of whole groups at a time:

    logits = x_chunk @ W^T + b                [C, V], the only buffer of that width
    log-probabilities, and from them the gradient of each
    G      = the logits' gradient             over the logits, in place
    dx     = G @ W                            rows of the chunk
    dW    += G^T @ x_chunk                    and db += the column sums of G

and the backward pass multiplies by the gradient of the loss: three products. Where a group does not fit into a chunk
the logits of all are made twice, in the forward pass still: four products.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import scale_op
from llmk.ops.linear_loss._call import product_flops
from llmk.ops.linear_loss._groups import groups_op
from llmk.ops.linear_loss._preference import PreferenceCall
from llmk.ops.linear_loss.checks import check_chunk_size, check_temperature, checked_linear
from llmk.ops.linear_loss.divergence_scores import DIVERGENCES
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs_reference
from llmk.ops.linear_loss.pair_losses import LOSSES, OF_SCORES, LossOptions
from llmk.registry import (
    LARGEST,
    Cost,
    Sample,
    check_dtype,
    check_finite,
    check_number,
    check_option,
    check_same,
    check_shape,
    check_switch,
    public_op,
)
from llmk.registry.checks import TINY


def fused_linear_preference_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ref_logps: Tensor | None = None, token_weight: Tensor | None = None, nll_weight: Tensor | None = None,
    group_weight: Tensor | None = None, loss_type: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0, discopop_tau: float = 0.05, f_divergence_type: str = "reverse_kl",
    f_divergence_coef: float = 0.5, temperature: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logprobs, entropy = linear_logprobs_reference(
        input, linear_weight, target, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index,
    )  # fmt: skip
    counts = target.long() != ignore_index
    weighted = logprobs if token_weight is None else torch.where(counts, token_weight.to(logprobs.dtype), 0) * logprobs
    logratios = weighted.sum(-1)
    if ref_logps is not None:
        logratios = logratios - ref_logps.to(logprobs.dtype)
    scores = DIVERGENCES[f_divergence_type][0](logratios, f_divergence_coef)
    options = LossOptions(beta, label_smoothing, simpo_gamma, discopop_tau)
    names, losses = loss_type.split("+"), []
    for name in names:
        averaged = scores / counts.sum(-1).clamp(min=1) if LOSSES[name].averages else scores
        losses.append(LOSSES[name].value(options, *averaged.unbind(-1)))
    each = torch.stack(losses)
    loss = (each if group_weight is None else each * group_weight.reshape(len(names), -1).to(each.dtype)).sum()
    if nll_weight is not None:
        loss = loss - torch.where(counts, nll_weight.to(logprobs.dtype) * logprobs, 0).sum()
    return loss, logprobs.detach(), entropy.detach()


scale = scale_op("_fused_linear_preference_scale")
fused_linear_preference_fwd = groups_op("_fused_linear_preference_fwd", PreferenceCall, scale)


def fused_linear_preference_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def classes(V: int, *shape: int) -> Tensor:
        target = torch.randint(0, V, shape, device=device)
        places = torch.arange(target.numel(), device=device, dtype=torch.int64).view(shape)
        return target.masked_fill(places % 4 == 3, -100)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype)

    def pairs(G: int = 3, S: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        return randn(G, 2, S, 12), randn(37, 12), classes(37, G, 2, S)

    ref = randn(3, 2) - 15
    yield Sample(pairs(), {"ref_logps": ref}, why="three pairs")
    kwargs = {
        "ref_logps": ref, "linear_bias": randn(37), "token_weight": rand(3, 2, 4), "nll_weight": rand(3, 2, 4),
        "group_weight": rand(2, 3), "loss_type": "robust+sigmoid_norm", "label_smoothing": 0.1, "temperature": 0.7,
        "softcap": 4.0, "f_divergence_type": "js_divergence",
    }  # fmt: skip
    yield Sample(pairs(), kwargs | {"chunk_size": 9}, why="every option, a pair to a chunk")
    yield Sample(pairs(), kwargs | {"chunk_size": 5}, why="every option, logits made twice")
    skipped = randn(3, 2, 4, 16), randn(37, 16), classes(37, 3, 2, 4)
    yield Sample(skipped, kwargs | {"skip_ignored": True}, why="every option, ignored tokens skipped")
    kwargs = {"loss_type": "kto", "ref_logps": ref[:, :1], "group_weight": rand(3), "chunk_size": 4}
    yield Sample((randn(3, 1, 4, 12), randn(37, 12), classes(37, 3, 1, 4)), kwargs, why="single completions")
    nothing = torch.full((2, 2, 3), -100, device=device, dtype=torch.int64)
    yield Sample((randn(2, 2, 3, 12), randn(37, 12), nothing), {"loss_type": "orpo"}, why="no token counts")
    yield Sample(pairs(0), why="no pair")
    yield Sample(pairs(2, 0), why="no token")
    strided = randn(2, 3, 4, 12).transpose(0, 1), randn(12, 37).t(), classes(37, 2, 3, 4).transpose(0, 1).int()
    yield Sample(strided, {"loss_type": "simpo", "beta": 2.0}, why="strided, int32")


def fused_linear_preference_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, linear_weight = (torch.randn(*n, 16, device=device, dtype=dtype) for n in ((rows, 2, 4), (40,)))
    target = torch.randint(0, 40, (rows, 2, 4), device=device)
    return Sample((x, linear_weight / 4, target), {"chunk_size": 32}, why="resized")


def fused_linear_preference_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for G, S, H, V in [(4, 512, 4096, 128256), (4, 512, 2048, 151936)]:
        x = torch.randn(G, 2, S, H, device=device, dtype=dtype)
        linear_weight = torch.randn(V, H, device=device, dtype=dtype) / H**0.5
        target = torch.randint(0, V, (G, 2, S), device=device)
        ref_logps = torch.full((G, 2), -12.0 * S, dtype=torch.float32, device=device)
        yield Sample((x, linear_weight, target), {"ref_logps": ref_logps}, why=f"{G}x2x{S}x{H}x{V}")


def fused_linear_preference_cost(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Cost:
    tensors = (input.numel() + linear_weight.numel()) * input.element_size()
    product = product_flops(input, linear_weight)
    return Cost(tensors, 2 * tensors, product, 3 * product)


@public_op(
    "fused_linear_preference(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    "Tensor? ref_logps=None, Tensor? token_weight=None, Tensor? nll_weight=None, Tensor? group_weight=None, "
    'str loss_type="sigmoid", float beta=0.1, float label_smoothing=0.0, float simpo_gamma=0.0, '
    'float discopop_tau=0.05, str f_divergence_type="reverse_kl", float f_divergence_coef=0.5, '
    "float temperature=1.0, float softcap=0.0, int ignore_index=-100, bool skip_ignored=False, int chunk_size=0) "
    "-> (Tensor, Tensor, Tensor)",
    reference=fused_linear_preference_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=(fused_linear_preference_fwd.op, scale),
    samples=fused_linear_preference_samples,
    resized=fused_linear_preference_resized,
    workloads=fused_linear_preference_workloads,
    cost=fused_linear_preference_cost,
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
    softcap: float = 0.0,
    ignore_index: int = -100,
    skip_ignored: bool = False,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss of pairs of completions, or of single ones, from hidden states, without ever holding all the logits.

    What `llmk.losses` has of this kind is made of it: `dpo`, `cpo`, `simpo`, `orpo` and `kto`, whose docstrings have
    the formulas. The gradients that are wanted are made in the forward pass and scaled in the backward pass. Where the
    logits of a group fit into a chunk they are made once, else twice.

    Args:
        input: `[G, M, S, H]`, G groups of M sequences of S tokens; float32, float16 or bfloat16, any strides. M is 2,
            the chosen and the rejected completion, or 1 with "kto".
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices `[G, M, S]`, int64 or int32.
        linear_bias: `[V]`, dtype of `input`.
        ref_logps: `[G, M]`, what is taken off the sum of a sequence's log-probabilities; None for 0.
        token_weight: `[G, M, S]`, what each log-probability is multiplied by in that sum; None for 1.
        nll_weight: `[G, M, S]`, what each log-probability is multiplied by and then taken off the loss; None for 0.
        group_weight: `[G]`, what the loss of each group is multiplied by; None for 1. Of several types `[types, G]`.
        loss_type: "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "nca_pair", "bco_pair",
            "sppo_hard", "apo_zero", "apo_down", "cpo", "simpo", "orpo" or "kto", or several joined by "+", which are
            added.
        beta: How strongly scores count; positive.
        label_smoothing: Of "robust", "exo_pair", "cpo" and "simpo".
        simpo_gamma: What "cpo" and "simpo" take off beta times the margin.
        discopop_tau: Of "discopop"; positive.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", for types of a difference
            of scores.
        f_divergence_coef: Of "alpha_divergence".
        temperature: What the logits are divided by, after the cap; positive.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        ignore_index: A token with this target has log-probability 0 and no gradient; nothing else is read of it.
        skip_ignored: Do no work for tokens that do not count, as `fused_linear_ce` does it; the logits of the others
            are made twice.
        chunk_size: Tokens whose logits exist at a time, or the most that are whole groups. 0 chooses as
            `fused_linear_ce` does.

    Returns:
        The loss, a sum, scalar; and detached the log-probabilities and entropies of tokens `[G, M, S]`; all float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU it makes the loss NaN.
        NotImplementedError: A tensor beside the linear layer requires a gradient.

    Sources: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; TRL, https://github.com/huggingface/trl; of each
    type in `pair_losses.py`. Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    input, linear_weight, linear_bias = checked_linear(input, linear_weight, linear_bias, fewest_classes=1)
    call = PreferenceCall(
        input, linear_weight, linear_bias, target, ignore_index, 1.0, softcap, temperature, skip_ignored, chunk_size,
        0, linear_weight.shape[0], "", "", ref_logps, token_weight, nll_weight, group_weight, loss_type, beta,
        label_smoothing, simpo_gamma, discopop_tau, f_divergence_type, f_divergence_coef,
    )  # fmt: skip
    _check_loss(call)
    _check_tensors(call)
    check_number("beta", beta, TINY, LARGEST, "a finite positive number")
    check_number("discopop_tau", discopop_tau, TINY, LARGEST, "a finite positive number")
    check_number("label_smoothing", label_smoothing, 0.0, 1.0, "a number from 0 to 1")
    check_finite("simpo_gamma", simpo_gamma)
    check_finite("f_divergence_coef", f_divergence_coef)
    check_temperature(temperature)
    check_switch("softcap", softcap)
    check_chunk_size(chunk_size)
    loss, logprobs, entropy, *_ = fused_linear_preference_fwd(call)
    return loss, logprobs, entropy


def _check_loss(call: PreferenceCall) -> None:
    names = call.loss_type.split("+")
    for name in names:
        check_option("loss_type", name, tuple(LOSSES))
    check_option("f_divergence_type", call.f_divergence_type, tuple(DIVERGENCES))
    M = LOSSES[names[0]].sequences
    for name in names:
        if LOSSES[name].sequences != M:
            raise ValueError(f"loss_type: expected types of {M} sequences a group like {names[0]!r}, got {name!r}")
        if call.f_divergence_type != "reverse_kl" and name not in OF_SCORES:
            expected = f"expected 'reverse_kl' with loss_type {name!r}"
            raise ValueError(f"f_divergence_type: {expected}, got {call.f_divergence_type!r}")
    if call.input.dim() != 4 or call.input.shape[1] != M:
        expected = f"[G, {M}, S, H] with loss_type {call.loss_type!r}"
        raise ValueError(f"input: expected shape {expected}, got {tuple(call.input.shape)}")


def _check_tensors(call: PreferenceCall) -> None:
    check_dtype("target", call.target, (torch.int64, torch.int32))
    tokens, (G, M) = tuple(call.tokens), call.tokens[:2]
    types = call.loss_type.count("+") + 1
    for name, shape, meaning in (
        ("target", tokens, "one for each token of input"),
        ("ref_logps", (G, M), "one for each sequence"),
        ("token_weight", tokens, "one for each token"),
        ("nll_weight", tokens, "one for each token"),
        ("group_weight", (G,) if types == 1 else (types, G), "one for each group"),
    ):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if name != "target":
            check_dtype(name, tensor)
        check_shape(name, tensor, shape, meaning)
        check_same(name, tensor, "input", call.input)
