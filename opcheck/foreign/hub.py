"""Kernel repositories in the layout of Hugging Face's `kernels`: the functions of a package, and its `layers`.

A layer has no constructor. What its `forward` reads of `self` is the module's that it stands in for: what the class
annotates is taken as an argument. `has_backward` and `can_torch_compile` say in which modes `kernels` may use it.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from llmk.opcheck.calls import call, first_line, representatives
from llmk.opcheck.foreign.signatures import Unrecorded, record_of, unmade
from llmk.opcheck.inputs import BrokenPromise, NothingToCheck, no_reference
from llmk.opcheck.promises.compiled import compiled_call
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET


@dataclass(frozen=True, kw_only=True)
class Layer(Unrecorded):
    """A layer of a kernel repository; `traced` is its `can_torch_compile`."""

    has_backward: bool


class LayerFunction:
    """A layer as a function of what its `forward` takes and of the members that its class annotates."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer
        self.__wrapped__ = inspect.unwrap(layer.forward)  # where kernels and the line to show are found
        annotated = inspect.get_annotations(layer)
        self.members = [name for name in annotated if not hasattr(layer, name)]
        members = [_member(name, annotated[name]) for name in self.members]
        self.__signature__ = inspect.Signature([*_arguments(layer.forward), *members])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer()
        for name in self.members:
            setattr(layer, name, kwargs.pop(name))
        return layer(*args, **kwargs)


def _arguments(forward: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())[1:]


def _member(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


def package_file(folder: Path) -> Path:
    """Return the package of a repository: one that is built for this PyTorch, or else its source.

    Raises:
        ValueError: There is none.
    """
    major, minor = torch.__version__.split(".")[:2]
    fitting = ("torch-", f"torch{major}{minor}-")
    built = [path for path in sorted(folder.glob("build/*")) if path.name.startswith(fitting)]
    for place in (*built, folder / "torch-ext"):
        for file in (place / "__init__.py", *sorted(place.glob("*/__init__.py"))):
            if file.is_file():
                return file
    raise ValueError(f"no package in build/ for torch {major}.{minor}, nor in torch-ext/")


def repository(name: str) -> ModuleType:
    """Return the package of a repository of the Hub.

    Raises:
        ValueError: It cannot be loaded.
    """
    try:
        from kernels import get_kernel
    except ImportError:
        raise ValueError("there is no such folder, and `kernels`, which loads a repository, is not installed") from None
    try:
        return get_kernel(name, revision="main")
    except Exception as error:  # of the network, or the package's own
        raise ValueError(first_line(error)) from error


def ops_of(package: ModuleType) -> list[Op]:
    """Return records of the functions that a package exports, and of its layers."""
    functions = [record_of(function, origin=package.__name__) for function in _exported(package)]
    return functions + [_record(layer) for layer in _layers(getattr(package, "layers", None))]


def _exported(package: ModuleType) -> Iterator[Any]:
    """The functions of `__all__`; without it those that the package defines."""
    named = getattr(package, "__all__", None)
    for name in vars(package) if named is None else named:
        value = getattr(package, name)
        if not callable(value) or isinstance(value, type):
            continue
        if named is not None or (not name.startswith("_") and value.__module__.startswith(package.__name__)):
            yield value


def _layers(module: ModuleType | None) -> Iterator[type[nn.Module]]:
    for value in vars(module).values() if module else ():
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == vars(module)["__name__"]:
            yield value


def _record(layer: type[nn.Module]) -> Layer:
    return Layer(
        name=layer.__name__,
        overload=LayerFunction(layer),
        reference=no_reference,
        samples=unmade,
        differentiable=(),
        origin=layer.__module__,
        has_backward=getattr(layer, "has_backward", True),  # the defaults of `kernels`
        traced=getattr(layer, "can_torch_compile", False),
    )


def has_backward(op: Op, samples: Sequence[Sample]) -> str:
    """A layer of a kernel repository whose `has_backward` is True, its default, has a backward pass; that it is False
    where there is one is noted.
    """
    if not isinstance(op, Layer):
        raise NothingToCheck
    call(op, samples[0])
    if op.has_backward and not op.differentiable:
        raise BrokenPromise("has_backward is True, which is its default, and no argument gets a gradient")
    return "has_backward is False, and it has a backward pass" if op.differentiable and not op.has_backward else ""


def can_torch_compile(op: Op, samples: Sequence[Sample]) -> str:
    """A layer of a kernel repository whose `can_torch_compile` is True is traced in one graph; that it is False where
    the layer is traced is noted.
    """
    if not isinstance(op, Layer) or INTERPRET:
        raise NothingToCheck
    torch.compiler.reset()
    traced = compiled_call(op, backend="aot_eager")
    try:
        call(op, representatives(op, samples)[0], fn=traced)
    except Exception as error:
        if op.traced:
            raise BrokenPromise(f"can_torch_compile is True, and torch.compile raises {first_line(error)}") from error
        return ""
    return "" if op.traced else "can_torch_compile is False, its default, and torch.compile takes it"
