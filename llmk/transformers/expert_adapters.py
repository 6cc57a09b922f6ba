"""LoRA on packed experts, as PEFT puts it there: each product of an expert has two small ones beside it.

Source: Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685. With adapters A_i `[E, r, H]` and B_i `[E, D, r]` of
scales s_i, a row x of expert e becomes

    x W_e^T + sum of s_i (x A_ie^T) B_ie^T

by grouped products alone. PEFT adds s_i B_i A_i to W for all experts in each call, which is a second copy of the
experts, kept for the backward pass, and a gradient as large. It wraps the experts once for each of their parameters
that has adapters, one wrapper around the other; what is changed is the outermost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmk.transformers.adapters import PEFT_LAYERS, adding
from llmk.transformers.classes import Change, changes_of
from llmk.transformers.experts import Adapters, is_packed, weight_names
from llmk.transformers.guards import KEPT, METHOD, PLAIN, guarded, is_hooked, why_no_weight
from llmk.transformers.mixtures import Experts, takes
from llmk.transformers.probe import Differs


@dataclass(frozen=True)
class AdaptedExperts(Change):
    """PEFT's outermost wrapper of a mixture's experts, which gives them the adapters."""

    @property
    def what(self) -> str:
        return "grouped_linear of the experts and of their adapters"

    def methods(self, base: type) -> dict[str, Any]:
        def forward(self: Any, x: Tensor, *routing: Any, **named: Any) -> Tensor:
            if named or not _is_apart(self, x):
                return base.forward(self, x, *routing, **named)
            return self.get_base_layer()(x, *routing, adapters=_adapters(self))

        return guarded(base, "forward", forward, ())


def is_wrapper(module: Any) -> bool:
    """Return True for PEFT's LoRA of a parameter, patched or not; PEFT is not imported."""
    return (type(module).__module__, type(module).__qualname__) == (PEFT_LAYERS, "ParamWrapper")


def find_adapted_experts(module: Any) -> AdaptedExperts | None:
    """The outermost wrapper of a mixture's experts; None where it is no candidate.

    Raises:
        Differs: Its adapters are no products beside those of the experts.
    """
    if not is_wrapper(module) or not is_packed(module.get_base_layer()):
        return None
    if type(module).forward.__module__ != PEFT_LAYERS:
        raise Differs("its forward is not PEFT's")
    if why := why_added(module):
        raise Differs(why)
    return AdaptedExperts()


def wrappers(outermost: Any) -> Iterator[Any]:
    """Yield the wrappers of the same experts, from the outermost on."""
    while is_wrapper(outermost):
        yield outermost
        outermost = outermost.base_layer


def why_added(outermost: Any) -> str | None:
    """The reason for which PEFT's own code adds the adapters to the experts' weights, in words."""
    experts = outermost.get_base_layer()
    if experts.down_proj.shape[0] == 1:
        return "has one expert, whose adapters PEFT reads as those of a linear layer"
    tensors = [getattr(experts, name) for name in weight_names(experts)]
    for wrapper in wrappers(outermost):
        if not hasattr(wrapper, "get_delta_factors"):
            return "has adapters of a PEFT that does not give their factors: 0.21 and later do"
        if wrapper is not outermost and is_hooked(wrapper):
            return "has adapters, and a hook looks at one of their wrappers"
        tensors += [part.weight for name in adding(wrapper) for part in (wrapper.lora_A[name], wrapper.lora_B[name])]
    for tensor in tensors:
        if why := why_no_weight(tensor):
            return f"has adapters, and {why}"
        if type(tensor) not in PLAIN or hasattr(tensor, "ds_id"):
            return "has adapters, and weights that are sharded"
    return None


def _is_apart(outermost: Any, x: Tensor) -> bool:
    """Return True if the adapters' products can stand beside those of the experts; say so in the report if not."""
    if any(wrapper.merged for wrapper in wrappers(outermost)):  # PEFT takes them out of the weights, or leaves them
        return False
    if why := why_added(outermost):
        getattr(outermost, METHOD)("forward", why)
        return False
    experts = outermost.get_base_layer()
    patched = any(isinstance(change, Experts) for change in changes_of(experts))
    return patched and getattr(experts, f"{KEPT}forward")() and takes(experts, x)


def _adapters(outermost: Any) -> Adapters:
    """The factors of all adapters that add to a weight, by its name, laid out as grouped products take them."""
    found: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for wrapper in wrappers(outermost):
        for name in adding(wrapper):
            a, b, scale = wrapper.get_delta_factors(name)
            found.setdefault(wrapper.parameter_name, []).append((a.contiguous(), b.contiguous(), scale))
    return found
