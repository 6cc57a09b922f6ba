"""Running code to learn what it computes, where it can change nothing.

Code is run on random input in float32 on the CPU, with random parameters in place of a module's own, so that these need
not be there. Three things together say that it computes what an operator does: outputs and gradients agree at every
scale, in training and in evaluation; everything that was computed on the way is arithmetic without thresholds, without
randomness and without a look at values; and what it may meet beside (other dtypes) is tried too, or left to the
original.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmk.registry.private.modules import buffers_of, children_of, parameters_of, without_hooks
from llmk.registry.private.operators import schema_of
from llmk.registry.private.tensors import DispatchMode

AGREEMENT = 1e-5
"""The largest difference, relative to the largest value of a row, of two ways to compute the same in float32."""

SCALES = (1.0, 1e-3, 1.0, 30.0, 0.1, 1e3, 1e-5)
"""Scales of the rows of random input. In the smallest a norm's eps decides, in the largest a clamp or a saturation."""

ARITHMETIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "reciprocal", "sqrt", "rsqrt", "pow", "square", "mean", "sum", "var",
    "var_mean", "linalg_vector_norm", "native_layer_norm", "_fused_rms_norm", "rms_norm", "silu", "gelu", "sigmoid",
    "convolution", "tanh", "erf", "exp", "cos", "sin", "view_as_complex", "view_as_real", "_conj", "complex", "polar",
    "_to_copy", "to", "clone", "contiguous", "alias", "detach", "ones_like", "empty_like", "view", "_unsafe_view",
    "reshape", "expand", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes", "unbind", "chunk",
    "transpose", "permute", "t", "cat", "stack", "flip", "repeat", "repeat_interleave", "unfold", "narrow",
})  # fmt: skip
"""The operators of aten that do the same at every scale of their input: no clamp, comparison, dropout or item."""


class Differs(Exception):
    """Why something is not what it was tried for, in words for the report."""


class Once:
    """A trial whose outcome is found once for all that are alike: a result, or why it differs."""

    def __init__(self, attempt: Callable[[Any], Any]) -> None:
        self._attempt = attempt
        self._outcomes: dict[Any, Any] = {}

    def __call__(self, tried: Any) -> Any:
        """
        Raises:
            Differs: The trial raised it.
        """
        key = identity(tried) if isinstance(tried, nn.Module) else tried
        if key not in self._outcomes:
            try:
                self._outcomes[key] = self._attempt(tried)
            except Differs as why:
                self._outcomes[key] = why
        if isinstance(self._outcomes[key], Differs):
            raise self._outcomes[key]
        return self._outcomes[key]


def randoms(seed: int = 0) -> Callable[..., Tensor]:
    """`randn` of numbers of its own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def rows_of_all_scales(width: int, *batch: int, randn: Callable[..., Tensor] | None = None) -> Tensor:
    """`[*batch, rows, width]`, one row of each scale."""
    rows = (randn or randoms())(*batch, len(SCALES), width)
    return rows * torch.tensor(SCALES, dtype=torch.float32, device="cpu").unsqueeze(1)


def agree(a: Tensor, b: Tensor, tolerance: float = AGREEMENT) -> bool:
    """Return True if every row (of the last axis) of a is that of b, within what the row's largest value may lose."""
    if a.shape != b.shape:
        return False
    a, b = a.detach().double(), b.detach().double()
    if a.dim() == 0:
        a, b = a.unsqueeze(0), b.unsqueeze(0)
    error, size = (a - b).abs().amax(-1), b.abs().amax(-1)
    return bool((error <= tolerance * size).all()) if a.numel() else True


class _Seen(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = schema_of(func).name.partition("::")
        self.names.add(name.removesuffix("_") if namespace == "aten" else f"{namespace}::{name}")  # add_ is add
        return func(*args, **(kwargs or {}))


def tried(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function` returns.

    Raises:
        Differs: It could not be run: it takes other arguments, or needs what is not there.
    """
    try:
        return function(*args)
    except Exception as error:  # whatever the code raises
        raise Differs(f"could not be run: {first_line(error)}") from error


def run(function: Callable[..., Any], *args: Any, also: frozenset[str] = frozenset()) -> Any:
    """Return what `function` returns.

    Args:
        also: Operators of aten that may be on the way beside arithmetic.

    Raises:
        Differs: It could not be run, or it computed something else on the way.
    """
    with _Seen() as seen:
        result = tried(function, *args)
    if others := sorted(seen.names - ARITHMETIC - also):
        raise Differs(f"uses {', '.join(others)}")
    return result


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients for the same random gradient of the output, whatever the scale of its rows."""
    return list(torch.autograd.grad(output, inputs, randoms(1)(*output.shape).to(output.dtype), allow_unused=True))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and agree(a, b))


def apart(module: nn.Module, parameters: Mapping[str, Tensor | None], training: bool = True) -> Any:
    """A module of the same class and attributes, with other parameters: what its `forward` sets stays with it.

    So it is with its children that have no parameters, in training and in evaluation, and hooks see none of it.
    """
    twin = object.__new__(type(module))
    plain = {k: copy.copy(v) if isinstance(v, dict | list | set) else v for k, v in vars(module).items()}
    buffers = {
        k: None if b is None else b.detach().float().cpu().clone() if b.is_floating_point() else b.clone()
        for k, b in buffers_of(module).items()
    }
    children = {
        k: c if c is None or _is_elsewhere(c) else apart(c, {}, training) for k, c in children_of(module).items()
    }
    own = {"_parameters": dict(parameters), "_buffers": buffers, "_modules": children, "training": training}
    vars(twin).update(plain | own | without_hooks())
    return twin


def _is_elsewhere(module: nn.Module) -> bool:
    """Return True if what a module needs is given otherwise, or is not there."""
    return any(True for _ in module.parameters()) or any(b.is_meta for b in module.buffers())


class Scaled(nn.Module):
    """A stand-in for a module that has parameters, so that what stands around it can be tried without them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.factor = randoms(seed)(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def without_parameters(children: Mapping[str, nn.Module | None]) -> dict[str, nn.Module | None]:
    """The children of a module, with another in place of each that has parameters."""
    learns = {name for name, child in children.items() if child is not None and any(True for _ in child.parameters())}
    return {name: Scaled(i) if name in learns else child for i, (name, child) in enumerate(children.items())}


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


OWN_OF_MODULES = frozenset(vars(nn.Module()))


def identity(module: nn.Module) -> tuple[Any, ...]:
    """Equal for two modules whose `forward` does the same with their parameters, so that one of them needs to be tried.

    Plain values count by value. All else that a module may read (functions, buffers, containers, a configuration)
    counts as the object that it is.
    """
    own = parameters_of(module).items()
    parameters = tuple((n, None if p is None else (type(p), tuple(p.shape), p.dtype)) for n, p in own)
    buffers = tuple((name, id(buffer)) for name, buffer in buffers_of(module).items())
    others = tuple((k, plain(v)) for k, v in sorted(vars(module).items()) if k not in OWN_OF_MODULES)
    return type(module), parameters, buffers, tuple(map(id, children_of(module).values())), others


def plain(value: Any) -> Any:
    """A value that stands for `value` in a comparison."""
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if value is None or type(value) in (int, float, bool, str, torch.dtype, torch.Size):
        return type(value), value
    return id(value)
