"""How cross entropy is written in plain PyTorch, of whatever its logits are."""

from collections.abc import Mapping
from typing import Any

import torch

from llmk.registry.patterns import Call, Cast, Left, Number, Pattern, Value, value_of

REDUCTIONS = ("none", "mean", "sum")
"""By the numbers that ATen has for them."""


def capped(x: Any) -> Pattern:
    """The pattern, or `softcap * tanh(x / softcap)` of it."""
    cap = Number("softcap")
    return Cast(Call("mul", Cast(Call("tanh", Cast(Call("div", Cast(x), cap)))), cap)) | Cast(x)


def cross_entropy_of(logits: Any) -> Pattern:
    """`F.cross_entropy`, or `F.nll_loss` of `F.log_softmax`."""
    options = Value("target"), Value("weight"), Value("reduction"), Value("ignore_index")
    logprobs = Call("log_softmax", logits, Value("dim"), dtype=Value("dtype"))
    return (
        Call("cross_entropy_loss", logits, *options, label_smoothing=Value("label_smoothing"))
        | Call("nll_loss", Cast(logprobs), *options)
        | Call("nll_loss_nd", Cast(logprobs), *options)
    )


def loss_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The operators' keywords.

    Raises:
        Left: The target is no class for each row, or the softmax is not over classes, or in float64, or the cap is
            not positive.
    """
    target = values["target"]
    if value_of(target).is_floating_point():
        raise Left("its target is probabilities, and the operator's is classes")
    if value_of(target).dim() > 1:
        raise Left("classes are on the second axis, and the operator's on the last")
    if values.get("dim", -1) not in (-1, value_of(target).dim()):
        raise Left(f"its softmax is over axis {values['dim']}, and the operator's over the last")
    if values.get("dtype") == torch.float64:
        raise Left("its softmax is float64, and the operator's float32")
    return {
        "softcap": softcap_of(values),
        "weight": values["weight"],
        "ignore_index": values["ignore_index"],
        "reduction": REDUCTIONS[values["reduction"]],
        "label_smoothing": values.get("label_smoothing", 0.0),
    }


def softcap_of(values: Mapping[str, Any]) -> float:
    """The cap on logits, 0 for none.

    Raises:
        Left: It is 0 or less, where PyTorch divides by it all the same.
    """
    if "softcap" in values and not values["softcap"] > 0:
        raise Left(f"its logits are capped at {values['softcap']}, and the operator's cap is positive")
    return values.get("softcap", 0.0)
