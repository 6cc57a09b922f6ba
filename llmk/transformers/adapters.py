"""LoRA on the output projection, as PEFT puts it there: projection and adapters are one linear layer, a little wider.

Source: Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685. With adapters A_i `[r_i, H]` and B_i `[V, r_i]` of
scales s_i the logits are

    x W^T + sum of s_i (x A_i^T) B_i^T = [x, s_1 x A_1^T, s_2 x A_2^T, ...] [W, B_1, B_2, ...]^T

so that a loss that takes hidden states and a projection takes these two. `x A_i^T` is what the adapter's own module
gives, dropout before it. What of the wider layer is a gradient of W is made where W is frozen too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk.registry import autocast_dtype
from llmk.transformers.guards import PLAIN, is_hooked, why_no_weight

PEFT_LAYERS = "peft.tuners.lora.layer"
ALIGNED = 16
"""Columns of zeros make the wider layer's rows a multiple of this long: cuBLAS is slow where they are odd."""


class Linear(NamedTuple):
    """The tensors of a linear layer."""

    weight: Tensor
    bias: Tensor | None


def is_lora(module: Any) -> bool:
    """Return True for PEFT's LoRA of a linear layer, 0.16 and later, and not for a kind of it; PEFT is not imported."""
    cls = type(module)
    named = (cls.__module__, cls.__qualname__) == (PEFT_LAYERS, "Linear")
    return named and cls.forward.__module__ == PEFT_LAYERS and "lora_variant" in vars(module)


def linear_of(head: Any) -> Any:
    """The projection that adapters are around, or the one that has none."""
    return head.base_layer if is_lora(head) else head


def adding(head: Any) -> list[str]:
    """The names of the adapters that add to what the projection gives: the active ones, unless merged or disabled."""
    if head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def why_apart(head: Any) -> str | None:
    """The reason for which a projection and the adapters that add to it are not one linear layer, in words."""
    if is_hooked(head):
        return "has an adapter that a hook looks at"
    names = adding(head)
    for name in names:
        if name in head.lora_variant:
            return f"has an adapter that is no plain LoRA but {type(head.lora_variant[name]).__name__}"
        if type(head.lora_A[name]) is not nn.Linear or type(head.lora_B[name]) is not nn.Linear:
            return f"has an adapter whose parts are no linear layers but {type(head.lora_B[name]).__name__}"
    for module in [head.base_layer, *(head.lora_B[name] for name in names)] if names else []:
        if is_hooked(module):
            return "has an adapter, and a hook looks at a part of it"
        if why := why_no_weight(module.weight):
            return f"has an adapter, and {why}"
        if type(module.weight) not in PLAIN or hasattr(module.weight, "ds_id"):
            return "has an adapter, and weights that are sharded"
    return None


def as_one_layer(head: Any, x: Tensor) -> tuple[Tensor, Linear]:
    """Return what goes into the wider layer instead of x `[..., H]`, and its tensors."""
    base, dtype, parts = head.base_layer, autocast_dtype(x.device), []
    x, weight, bias = x.to(dtype or x.dtype), base.weight.to(dtype or base.weight.dtype), base.bias
    for name in adding(head):
        down, up, scale = head.lora_A[name], head.lora_B[name], head.scaling[name]
        parts.append((down(head.lora_dropout[name](x.to(down.weight.dtype))) * scale, up.weight))
        if up.bias is not None:
            bias = up.bias * scale if bias is None else bias + up.bias * scale
    x, weight = side_by_side(x, weight, parts)
    return x, Linear(weight, bias)


def side_by_side(x: Tensor, weight: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return `[x, u_1, ...]` and `[W, U_1, ...]`, whose product is that of x and W and those of all parts, added up."""
    missing = -(x.shape[-1] + sum(low.shape[-1] for low, _ in parts)) % ALIGNED
    inputs = [x, *(low.to(x.dtype) for low, _ in parts), x.new_zeros((*x.shape[:-1], missing))]
    weights = [weight, *(up.to(weight.dtype) for _, up in parts), weight.new_zeros((weight.shape[0], missing))]
    return torch.cat(inputs, -1), torch.cat(weights, -1)
