r"""A linear layer over a vocabulary and a policy loss of its log-probabilities and entropies.

Sources: Shao et al., GRPO, 2024, https://arxiv.org/abs/2402.03300, and those of `objectives/policy.py` for the losses;
Hsu et al., "Liger Kernel", 2024, https://arxiv.org/abs/2410.10989, for making the gradients in the forward pass.

For tokens t with log-probabilities l_t, old ones o_t, reference ones q_t, advantages A_t and entropies H_t:

    r_t  = exp(level(l - o)_t)                the token's own, or its sequence's mean or sum
    loss = sum_t w_t f(l_t, r_t, A_t) + k_t KL(l_t - q_t) [r_t] - h_t H_t

with a loss f and an estimator KL. So the gradient of l_t is, with level its own transpose,

    w_t df/dl_t + k_t KL'(l_t - q_t) [r_t] + level(r_u (w_u df/dr_u + k_u [KL(l_u - q_u)]))_t

which is known once the token's log-probability is, or its sequence's are, and that of H_t is -h_t: autograd makes it of
the loss. In the forward pass `drivers/logprobs.py` makes the gradients from these with the chunk's exponentials, and
the backward pass multiplies them by that of the loss.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import Make, linear_cost, one_rank, resized, workloads
from llmk.ops.linear_loss.drivers.logprobs import GroupsCall, groups_op
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs_reference
from llmk.ops.linear_loss.objectives.policy import (
    ESTIMATORS,
    LEVELS,
    LOSSES,
    PER_TOKEN,
    PolicyOptions,
    PolicyTerms,
    check_above_one,
)
from llmk.registry import (
    BatchDependent,
    Sample,
    check_number,
    check_option,
    check_parameter,
    check_positive,
    check_shape,
    public_op,
)


def outside_support(target: Tensor, support: Tensor, ignore_index: int, num_classes: int) -> Tensor:
    """Return the mask of the tokens that count and whose target is a class, but none of its support's `[..., L]`.

    A support without ids has all classes.
    """
    classes = target.long()  # int32 would wrap an ignore_index that it does not hold
    inside = (support == classes.unsqueeze(-1)).any(-1) | (support < 0).all(-1)
    return ~inside & (classes != ignore_index) & (classes >= 0) & (classes < num_classes)


@one_rank
def fused_linear_policy_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, ignore_index: int = -100, support: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = {name: options.pop(name, None) for name in PER_TOKEN}
    policy = PolicyOptions(**{name: options.pop(name) for name in PolicyOptions.__annotations__ if name in options})
    outside = torch.zeros_like(target, dtype=torch.bool)
    if support is not None:
        outside = outside_support(target, support, ignore_index, linear_weight.shape[0])
    target = target.long().masked_fill(outside, ignore_index)
    options |= {"ignore_index": ignore_index, "support": support}
    logprobs, entropy = linear_logprobs_reference(input, linear_weight, target, **options)
    terms = PolicyTerms.of_rows(policy, target != ignore_index, given, logprobs.dtype)
    returned = logprobs.detach().masked_fill(outside, float("-inf"))
    return terms.loss(logprobs, entropy), returned, entropy.detach()


@dataclass(frozen=True, kw_only=True)
class PolicyCall(GroupsCall):
    """The tokens are `[..., S]`, rows of which are sequences where the ratio is that of a whole one."""

    advantages: Tensor | None  # [..., S]
    token_weight: Tensor | None  # [..., S]
    old_logps: Tensor | None  # [..., S]
    ref_logps: Tensor | None  # [..., S]
    kl_weight: Tensor | None  # [..., S]
    entropy_weight: Tensor | None  # [..., S]
    options: PolicyOptions

    @property
    def has_entropies(self) -> bool:
        return self.entropy_weight is not None

    @cached_property
    def group(self) -> torch.Size:
        return torch.Size(()) if self.options.importance_sampling_level == "token" else self.tokens[-1:]

    @property
    def token_tensors(self) -> tuple[str, ...]:
        return "input", "target", "support", *(PER_TOKEN if len(self.group) == 0 else ())

    def loss(self, groups: slice) -> Callable[[Tensor, Tensor], Tensor]:
        counts = self.grouped(self.target)[groups].long() != self.ignore_index  # int32 would wrap what it does not hold
        given = {name: getattr(self, name) for name in PER_TOKEN}
        parts = {name: None if each is None else self.grouped(each)[groups] for name, each in given.items()}
        return PolicyTerms.of_rows(self.options, counts, parts).loss


forward, KERNEL_OPS = groups_op("fused_linear_policy", PolicyCall)


def fused_linear_policy_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    make = Make(device, dtype)
    randn, classes = make.randn, make.classes

    def logps(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Return log-probabilities near the policy's, so that some ratios are clipped and others not."""
        log_probs = torch.nn.functional.linear(x.float(), weight.float()).log_softmax(-1)
        own = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return own + 0.3 * torch.randn(own.shape, device=device, dtype=torch.float32)

    def tokens(*shape: int, H: int = 12) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        args = randn(*shape, H), randn(37, H), classes(37, *shape)
        per_token = {name: torch.rand(shape, device=device, dtype=dtype) for name in ("token_weight", "kl_weight")}
        per_token |= {"advantages": randn(*shape), "entropy_weight": 0.1 * randn(*shape)}
        return args, per_token | {"old_logps": logps(*args), "ref_logps": logps(*args)}

    args, given = tokens(3, 5)
    yield Sample(args, {"advantages": given["advantages"], "old_logps": given["old_logps"]}, why="clipped ratios")
    yield Sample(args, why="nothing but log-probabilities, the first step")
    yield Sample(args, {"logits_dtype": dtype}, why="logits of the input's dtype")
    everything = {"linear_bias": randn(37), "temperature": 1.7, "logit_scale": 0.5}
    everything |= {"softcap": 4.0, "epsilon_high": 0.28, "delta": 1.5, "max_log_ratio": 0.4}
    everything |= {"clip_ratio_c": 1.2}
    for loss_type, estimator in (("sapo", "k1"), ("cispo", "k2"), ("clipped", "k3+")):
        kwargs = given | everything | {"loss_type": loss_type, "kl_estimator": estimator}
        yield Sample(args, kwargs | {"chunk_size": 8}, why=f"every option, {loss_type}, two chunks")
    kwargs |= {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    yield Sample(args, kwargs | {"chunk_size": 11}, why="ratios of sequences, two to a chunk")
    yield Sample(args, kwargs | {"chunk_size": 4, "loss_type": "gmpo"}, why="ratios of sequences, logits made twice")
    support = {"support": make.support(args[2].unsqueeze(-1), 37, 9)}
    yield Sample(args, kwargs | support | {"chunk_size": 4}, why="supports, ratios of sequences, logits made twice")
    yield Sample(args, given | support | {"chunk_size": 8}, why="supports, two chunks")
    skipped, skipped_kwargs = tokens(3, 5, H=16)
    kwargs = skipped_kwargs | everything | {"skip_ignored": False}
    kwargs["support"] = make.support(skipped[2].unsqueeze(-1), 37, 9)
    yield Sample(skipped, kwargs | {"loss_type": "dft", "chunk_size": 8}, why="ignored tokens not skipped, supports")
    kwargs |= {"importance_sampling_level": "sequence_sum", "epsilon": 0.5}
    yield Sample(skipped, kwargs | {"chunk_size": 11}, why="ignored tokens not skipped, two sequences to a chunk")
    yield Sample((randn(0, 12), randn(37, 12), classes(37, 0)), why="no token")
    strided = randn(5, 3, 12).transpose(0, 1), randn(12, 37).t(), classes(37, 5, 3).t().int()
    kwargs = {"loss_type": "reinforce", "advantages": randn(3, 1).expand(3, 5)}
    yield Sample(strided, kwargs, why="strided, int32, an advantage for each sequence")


def fused_linear_policy_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of B sequences of S tokens, H features and V classes, the sizes."""
    make, (B, S, H, V) = Make(device, dtype), sizes
    args = make.randn(B, S, H), make.randn(V, H) / H**0.5, torch.randint(0, V, (B, S), device=device)
    advantages = torch.randn(B, 1, device=device, dtype=torch.float32).expand(B, S)
    old_logps = torch.full((B, S), -math.log(V) - 0.5, dtype=torch.float32, device=device)
    return Sample(args, {"advantages": advantages, "old_logps": old_logps}, why=f"{B}x{S}x{H}x{V}")


@public_op(
    reference=fused_linear_policy_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS,
    samples=fused_linear_policy_samples,
    resized=resized(fused_linear_policy_workload, 4, 16, 40),
    workloads=workloads(fused_linear_policy_workload, (8, 512, 4096, 128256), (8, 4096, 2048, 151936)),
    cost=linear_cost,
    batch_dependent=BatchDependent.float32_products("output 1", "output 2", "gradient of input"),
)
def fused_linear_policy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    advantages: Tensor | None = None,
    token_weight: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    kl_weight: Tensor | None = None,
    entropy_weight: Tensor | None = None,
    loss_type: str = "clipped",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = False,
    max_log_ratio: float | None = None,
    clip_ratio_c: float | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    support: Tensor | None = None,
    vocab_start: int = 0,
    num_classes: int = 0,
    group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a policy from hidden states, a sum over tokens, without ever holding all the logits.

    The term of a token is

        token_weight * f(log pi, ratio, advantage) + kl_weight * KL(pi, ref) - entropy_weight * entropy

    `grpo`, `reinforce`, `rloo`, `ppo`, `sft` and `dft` of `llmk.losses` use it. The gradients that are needed are made
    in the forward pass and scaled in the backward pass. The logits are made once, or twice in float16, with `support`,
    with `entropy_weight` in 16 bits or with `softcap`, and where ratios are per sequence and one does not fit into a
    chunk.

    Args:
        input: `[..., S, H]`, or `[H]`; float32, float16 or bfloat16, any strides. Rows of S tokens are sequences where
            ratios are theirs.
        linear_weight: `[V, H]`, as in `torch.nn.Linear`, dtype of `input`.
        target: Class indices `[..., S]`, int64 or int32.
        linear_bias: `[V]`, dtype of `input`.
        advantages: In the target's shape, as the next five; None for 1.
        token_weight: Weight of each token's policy loss; None for 1.
        old_logps: Log-probabilities of the old policy; None for those of `input`, detached.
        ref_logps: Log-probabilities of the reference model; needed with `kl_weight`.
        kl_weight: Weight of each token's divergence; None for 0.
        entropy_weight: Weight of each token's entropy, which is subtracted from the loss; None for 0.
        loss_type: "clipped", "cispo" or "sapo", as in `grpo` of `llmk.losses`; "reinforce", -A log pi; "dft", with pi
            as a constant factor besides; "surrogate", -A r; "gmpo", the same of ratios that are clipped in their
            logarithms before the level is taken; "dppo_tv" and "dppo_kl", as in `grpo`.
        importance_sampling_level: The ratio of a token: "token", its own, "sequence", the geometric mean over its
            sequence, or "sequence_sum", the product.
        epsilon: The ratio is clipped from below at 1 - epsilon.
        epsilon_high: The ratio is clipped from above at 1 + epsilon_high; "cispo" clips at epsilon_high itself.
        delta: Upper bound of the unclipped ratio in "clipped".
        sapo_temperature_pos, sapo_temperature_neg: Temperatures of "sapo" for positive and for other advantages;
            positive.
        kl_estimator: "k1", "k2", "k3" or "k3+", as in `grpo`.
        use_bias_correction_kl: Multiply the divergence by the ratio.
        max_log_ratio: Clamp the logarithm of the ratio, and log pi / ref in the divergence, to this distance from 0;
            None for no bound. No gradient goes through a logarithm that is farther.
        clip_ratio_c: Upper bound, above 1, of the ratio in "clipped" where the advantage is negative; None for none.
        temperature, logit_scale, softcap: As in `linear_logprobs`.
        ignore_index: A token with this target has no part in the loss and no gradient, whatever its values are.
        skip_ignored: Do no work for tokens that do not count, as `fused_linear_ce` does it, but on a CPU where ratios
            are those of sequences.
        chunk_size: As in `fused_linear_ce`, or the most tokens that are whole sequences where ratios are theirs.
        logits_dtype: As in `fused_linear_ce`.
        support: Classes `[..., S, L]` over which each token's softmax is, as in `linear_logprobs`. A token whose target
            is not in it has no part in the loss, as one that is ignored, and log-probability -inf.
        vocab_start, num_classes, group_name: As in `linear_logprobs`, for a weight that is sharded over ranks.

    Returns:
        The loss, a sum, scalar; and detached the log-probabilities and entropies of tokens `[..., S]`; all float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`, or an id of a support is past the last
            class. On a GPU it makes the loss NaN.
        NotImplementedError: A tensor beside the linear layer requires a gradient.

    Sources: Shao et al., 2024, https://arxiv.org/abs/2402.03300; TRL, https://github.com/huggingface/trl; each type in
    `objectives/policy.py`. Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    call = PolicyCall.checked(locals())
    _check_call(call)
    meaning = "one for each token of input"
    check_shape("target", target, call.tokens, meaning)
    for name in PER_TOKEN:
        check_parameter(name, getattr(call, name), call.tokens, meaning, "input", call.input)
    outside = None if support is None else outside_support(target, support, ignore_index, call.num_classes)
    if outside is not None:
        call = replace(call, target=target.long().masked_fill(outside, ignore_index))
    loss, logprobs, entropy, *_ = forward(call)
    return loss, logprobs if outside is None else logprobs.masked_fill(outside, float("-inf")), entropy


def check_policy_options(options: PolicyOptions) -> None:
    check_option("loss_type", options.loss_type, tuple(LOSSES))
    check_option("importance_sampling_level", options.importance_sampling_level, LEVELS)
    check_option("kl_estimator", options.kl_estimator, tuple(ESTIMATORS))
    if options.clip_ratio_c is not None:
        check_above_one("clip_ratio_c", options.clip_ratio_c)
    for name in ("epsilon", "epsilon_high", "delta"):
        if getattr(options, name) is not None:
            check_number(name, getattr(options, name), 0.0, float("inf"), "a number of at least 0")
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "max_log_ratio"):
        if getattr(options, name) is not None:
            check_positive(name, getattr(options, name))


def _check_call(call: PolicyCall) -> None:
    check_policy_options(call.options)
    level = call.options.importance_sampling_level
    if level != "token" and call.input.dim() < 2:
        expected = f"[..., S, H] with importance_sampling_level {level!r}"
        raise ValueError(f"input: expected shape {expected}, got {tuple(call.input.shape)}")
    if (call.kl_weight is None) != (call.ref_logps is None):
        name, other = ("ref_logps", "kl_weight") if call.ref_logps is None else ("kl_weight", "ref_logps")
        raise ValueError(f"{name}: expected a tensor with {other}, got None")
