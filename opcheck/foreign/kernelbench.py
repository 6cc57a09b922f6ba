"""KernelBench problems: a file with `Model`, a module `ModelNew` that is to compute the same, and `get_inputs`.

Both are called as functions of their inputs and, where their parameters have the same names and shapes, of these, so
that gradients and other weights are checked too. Otherwise each has the weights that one seed gives it.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llmk.opcheck.foreign.comparison import Comparison
from llmk.opcheck.foreign.signatures import Unrecorded
from llmk.opcheck.promises.process_state import OWNERS, functions, restore_functions, seeded
from llmk.registry import Sample

_WEIGHTS = 0
"""The seed before each construction."""


class ModuleFunction:
    """A module as a function of its inputs and of some of its parameters.

    Each thread and dtype has an instance of its own, as a call puts its parameters into it; it keeps what it caches.
    """

    def __init__(self, make: Callable[[], nn.Module], inputs: Sequence[str], parameters: Sequence[str]) -> None:
        self.make, self.inputs, self.parameters = make, inputs, parameters
        self.instances = threading.local()
        self.__wrapped__ = inspect.unwrap(type(make()).forward)  # where kernels and the line to show are found
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [*inputs, *(f"self_{name.replace('.', '_')}" for name in parameters)]
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any) -> Any:
        inputs, parameters = args[: len(self.inputs)], args[len(self.inputs) :]
        first = next((x for x in args if isinstance(x, Tensor) and x.is_floating_point()), None)
        module = self._instance() if first is None else self._instance(first.device, first.dtype)
        return functional_call(module, dict(zip(self.parameters, parameters, strict=True)), inputs)

    def _instance(self, *where: Any) -> nn.Module:
        known = vars(self.instances)
        if str(where) not in known:
            known[str(where)] = self.make().to(*where)
        return known[str(where)]


def problem_of(module: ModuleType, before: dict[str, Any]) -> Unrecorded:
    """Return a problem's record: `ModelNew` is the operator, `Model` the reference.

    What the file replaces of PyTorch's functions, or `ModelNew` when it is constructed, is put back: `before` has those
    before the file was loaded.

    Raises:
        ValueError: The file lacks a part of a problem.
    """
    for name in ("Model", "get_inputs"):
        if not hasattr(module, name):
            raise ValueError(f"it has ModelNew, and no {name}")
    names = _input_names(module)
    reference_class = {f"{module.__name__}.Model": module.Model}
    OWNERS.update(reference_class)  # which is not the operator's to replace either
    before = before | functions(reference_class)
    makes = [partial(_made, module, name) for name in ("Model", "ModelNew")]
    shapes = [{name: parameter.shape for name, parameter in make().named_parameters()} for make in makes]
    parameters = dict(makes[0]().named_parameters()) if shapes[0] == shapes[1] else {}
    reference, operator = (ModuleFunction(make, names, list(parameters)) for make in makes)
    restore_functions(before)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for seed, why in enumerate(("its inputs", "other inputs and weights")):
            with seeded(seed):
                given = [*module.get_inputs(), *(_moved(parameter, seed / 10) for parameter in parameters.values())]
            yield Sample(tuple(_on(value, device, dtype) for value in given), why=why)

    return Unrecorded(
        name=Path(module.__file__ or "").stem,
        overload=operator,
        reference=Comparison(reference),
        samples=samples,
        differentiable=(),
        dtypes=(torch.float32,),
        origin=module.__name__,
        traced=False,
    )


def _made(module: ModuleType, name: str) -> nn.Module:
    with seeded(_WEIGHTS):
        arguments = getattr(module, "get_init_inputs", list)()
    with seeded(_WEIGHTS):
        return getattr(module, name)(*arguments)


def _input_names(module: ModuleType) -> list[str]:
    """Return the names that `forward` has for the inputs; those of `*args` are numbered."""
    count = len(module.get_inputs())
    parameters = list(inspect.signature(module.Model.forward).parameters.values())[1 : count + 1]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return names if len(names) == count else [f"input_{place}" for place in range(count)]


def _moved(parameter: nn.Parameter, by: float) -> nn.Parameter:
    """Other weights, where the initial ones are 0 and 1, which a formula may leave out."""
    return nn.Parameter(parameter.detach() + by * torch.randn_like(parameter))


def _on(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    moved = value.detach().to(device, dtype if value.is_floating_point() else value.dtype)
    return nn.Parameter(moved) if isinstance(value, nn.Parameter) else moved
