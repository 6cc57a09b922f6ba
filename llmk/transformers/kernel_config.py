"""`kernel_config`: llmk's layers in the slots that transformers' `use_kernels` fills."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import KernelConfig

from llmk.apart import apart_from_caller
from llmk.registry.private.modules import children_of, parameters_of
from llmk.transformers.probe import (
    Differs,
    agree,
    apart,
    gradients,
    identity,
    randoms,
    rows_of_all_scales,
    run,
    same,
    tried,
    without_parameters,
)
from llmk.transformers.slots import FUNCTIONS, LAYERS

DEVICES = ("cpu", "cuda", "rocm")


def kernel_config() -> KernelConfig:
    """The configuration with which transformers' `use_kernels` takes its layers from the installed llmk.

    `from_pretrained(..., use_kernels=True, kernel_config=kernel_config())` loads a model with them, and
    `model.set_use_kernels(True, kernel_config())` gives them to one that exists. They serve training, inference and
    `torch.compile`; nothing is downloaded. Take a new configuration for each model.

    What a model has in a slot is tried on random input first, and a slot where it is not what llmk's layer computes
    keeps the model's own, with a warning. Needs the package `kernels`, of the versions that transformers asks for.

    Raises:
        ValueError: From the two calls above, where a model has no slot that llmk has a layer for.
    """
    return _InstalledKernels()


@dataclass(frozen=True)
class InstalledLayer:
    """The source of a layer for `kernels`: a class of the installed package, in place of a repository."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"llmk, layer `{self.layer_name}`"


class _InstalledKernels(KernelConfig):
    def __init__(self) -> None:
        super().__init__()
        self.inherit_mapping = False  # what transformers has for other slots would be downloaded

    def sanitize_kernel_mapping(self, model: nn.Module) -> None:
        """There is nothing of the user's to look at: the mapping is made for the model."""
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        """A layer without a mode serves all of them; a slot without a device keeps the model's own layer."""
        served = served_slots(model)
        self.kernel_mapping = {
            slot: {device: InstalledLayer(slot) for device in DEVICES if slot in served} for slot, _ in _slots(model)
        }


def served_slots(model: nn.Module) -> list[str]:
    """The slots that the model has and that compute what llmk's layer does.

    Raises:
        ValueError: There is none.
    """
    found: dict[str, dict[Any, nn.Module]] = {}
    for slot, module in _slots(model):
        found.setdefault(slot, {}).setdefault(identity(module), module)  # those that are alike are tried once
    served = []
    for slot in sorted(found.keys() & LAYERS.keys()):
        try:
            apart_from_caller(_try_all, slot, found[slot].values())
        except Differs as why:
            warnings.warn(f"{slot}: the model's own layer stays in this slot: {why}", stacklevel=2)
        else:
            served.append(slot)
    if not served:
        names = ", ".join(LAYERS)
        raise ValueError(f"model: expected one with a slot among {names}, got {type(model).__name__} with {[*found]}")
    return served


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The contents of the model's slots: modules, and functions that `kernels` made modules of."""
    for module in model.modules():
        for holder in (module, *getattr(module, "_kernel_funcs", {}).values()):
            slot = getattr(type(holder), "kernel_layer_name", None)
            if slot is not None:
                yield slot, holder


# ---- what a slot's module computes


def _try_all(slot: str, modules: Iterable[nn.Module]) -> None:
    """
    Raises:
        Differs: One of the modules does not compute what llmk's layer does.
    """
    for module in modules:
        _try(slot, module)


def _try(slot: str, module: nn.Module) -> None:
    """
    Raises:
        Differs: The module's own forward is not what llmk's layer computes, outputs or gradients.
    """
    if slot in FUNCTIONS:
        FUNCTIONS[slot].attempt(functools.partial(type(module).forward, module))
        return
    own, layer, inputs = type(module).forward, LAYERS[slot].forward, _inputs(slot, module)
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    for training in (True, False):
        twin = _twin(module, training)
        given = [*wanted, *parameters_of(twin).values()]
        want, got = _outputs(_run_of(slot), own, twin, inputs), _outputs(tried, layer, twin, inputs)
        if len(want) != len(got) or not all(map(agree, got, want)):
            raise Differs(f"{type(module).__name__} does not compute what llmk's layer does")
        if not all(map(same, gradients(_flat(got), given), gradients(_flat(want), given))):
            raise Differs(f"{type(module).__name__} has other gradients than llmk's layer")


def _outputs(run: Callable[..., Any], forward: Any, twin: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    outputs = run(forward, twin, *inputs)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _flat(outputs: list[Tensor]) -> Tensor:
    return torch.cat([output.flatten() for output in outputs])


def _run_of(slot: str) -> Callable[..., Any]:
    """A loss looks at its labels and a router chooses, which is no arithmetic."""
    return tried if slot in ("ForCausalLMLoss", "SoftmaxTopKRouter") else run


def _twin(module: nn.Module, training: bool) -> nn.Module:
    """A module of the same class and attributes, with random parameters and its projections replaced."""
    parameters = {name: None if p is None else _random(p) for name, p in parameters_of(module).items()}
    twin = apart(module, parameters, training)
    vars(twin)["_modules"] = without_parameters(children_of(twin))
    return twin


def _random(parameter: Tensor) -> Tensor:
    return randoms(2)(*parameter.shape).requires_grad_()


def _inputs(slot: str, module: nn.Module) -> tuple[Any, ...]:
    randn = randoms(3)
    if slot == "rotary_pos_emb":
        q, k, cos, sin = randn(2, 4, 5, 16), randn(2, 2, 5, 16), randn(2, 5, 16), randn(2, 5, 16)
        return q.requires_grad_(), k.requires_grad_(), cos, sin
    if slot == "ForCausalLMLoss":
        labels = torch.tensor([[1, 2, -100, 3], [4, 0, 5, -100]], dtype=torch.int64, device="cpu")
        return randn(2, 4, 6).requires_grad_(), labels, 6
    widths = {p.shape[-1] for p in parameters_of(module).values() if p is not None}
    width = min(widths, default=16)
    if slot == "SoftmaxTopKRouter":  # of large rows most experts have a score of 0, and any of them may be chosen
        return (randn(6, width).requires_grad_(),)
    rows = rows_of_all_scales(width).requires_grad_()
    return (rows, randn(*rows.shape).requires_grad_()) if slot == "RMSNormGated" else (rows,)
