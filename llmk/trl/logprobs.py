"""The one function through which TRL's fused head computes, by operators of llmk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.trl.counts import Counted

DIFFERENTIABLE = ("log_probs", "entropy")


class Outputs(NamedTuple):
    """The results of TRL's function for each token, None where they were not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class LogProbs(Counted):
    """Stands where TRL calls the `apply` of its `autograd.Function`.

    Args:
        original: TRL's own function. What only metrics are made of, it computes, without gradients.
    """

    what = "log-probabilities and entropy by linear_logprobs"

    def __init__(self, original: Callable[..., Any]) -> None:
        super().__init__()
        self.original = original

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> Outputs:
        """Compute from hidden states `[N, H]`, a projection `[V, H]` and targets `[N]`.

        Raises:
            RuntimeError: The projection is partitioned by ZeRO-3, which does not gather it for a backward pass.
        """
        self.count(hidden, weight)
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
        log_probs, entropy = torch.ops.llmk.linear_logprobs(
            hidden.to(dtype),
            weight.to(dtype),
            targets,
            linear_bias=None if bias is None else bias.to(dtype),
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap or 0.0,
            entropy="entropy" in outputs,
        )
        metrics = tuple(name for name in outputs if name not in DIFFERENTIABLE)
        others: tuple[Tensor | None, ...] = (None, None, None)
        if metrics:
            with torch.no_grad():
                _, _, *others = self.original(  # type: ignore[assignment]
                    hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, metrics
                )
        return Outputs(log_probs, entropy if "entropy" in outputs else None, *others)
