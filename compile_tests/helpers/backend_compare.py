"""One program run eagerly, through AOTAutograd and through the backend, and everything that a caller can see compared.

Values are held to the accuracy rule: the reference is the same program in float64, casts included. Beside them stand
dtypes, shapes, strides, which results share memory, inputs and buffers after the call, and the random state.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD, Compiler, rewriting
from llmk.accuracy.neighbours import NEIGHBOURS, Change, copy_with_layout, nudged
from llmk.accuracy.rule import accuracy_violation
from llmk.compiler import Report

Way = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function that runs in some way, such as compiled, of one that runs eagerly."""

LOW = (torch.float16, torch.bfloat16, torch.float32)
CAST_METHODS = (Tensor.half, Tensor.bfloat16, Tensor.float)
REINTERPRETING = (Tensor.view, torch.ops.aten.view.dtype)
"""Operators that read the bits of a tensor as another dtype, if they are given one."""


class ExactTanh(torch.autograd.Function):
    """tanh whose slope is 1 / cosh^2: PyTorch's 1 - tanh^2 cancels, in float64 to 0 from 19 on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / x.cosh().square()


def exact_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU without the sums 1 + erf and 1 + tanh, which cancel where x is negative."""
    if approximate == "tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


EXACT = dict.fromkeys((torch.tanh, Tensor.tanh, torch.ops.aten.tanh.default), ExactTanh.apply) | dict.fromkeys(
    (torch.nn.functional.gelu, torch.ops.aten.gelu.default), exact_gelu
)
"""Functions whose value or gradient PyTorch's float64 form loses, and a form that keeps it."""


def eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def through(backend: Any) -> Way:
    """Compiled anew with a backend."""

    def way(fn: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend)

    return way


AOT = through("aot_eager")
INDUCTOR = through("inductor")


def whole_aot(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as one graph, or not at all."""
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def with_backend(report: Report | None = None, then: Compiler = THROUGH_AUTOGRAD, verify: bool = True) -> Way:
    """The backend's rewriting, with AOTAutograd's graphs run as they are in Inductor's place, or something else."""
    return through(rewriting(Report() if report is None else report, then=then, verify=verify))


def to_float64(tensor: Tensor) -> Tensor:
    """A copy in double precision; whole numbers stay."""
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128, copy=True)
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


class RoundedOnce(TorchFunctionMode):
    """Each function of the program is computed in float64 and rounded once to the dtype that it gives.

    It is a second reference: in float64 alone nothing rounds the values between two functions, which every way rounds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").split(".")[0]
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not isinstance(result, Tensor) or result.dtype not in LOW or name.endswith("_") or is_random:
            return result
        try:
            args, kwargs = tree_map(_doubled, (tuple(args), kwargs or {}))
            return func(*args, **kwargs).to(result.dtype)
        except (RuntimeError, NotImplementedError):  # of dtypes that must not change
            return result


def _doubled(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.double()
    return _wider(x)


class InFloat64(TorchFunctionMode):
    """Casts to a narrower floating-point dtype give float64, and so do tensors that are made in one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CAST_METHODS and args[0].is_floating_point():
            return args[0].double()
        if func in EXACT and args[0].dtype == torch.float64:
            return EXACT[func](*args, **(kwargs or {}))
        if func not in REINTERPRETING:
            args, kwargs = tree_map(_wider, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def _wider(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in LOW else x


@dataclass
class Outcome:
    """Everything that a call shows.

    Attributes:
        values: Outputs, gradients, inputs and buffers after the call, by name.
        layout: Strides of the outputs, and whether they want gradients.
        shares: For each output the first output, input or buffer that has the same memory.
        incoming: The gradients that came in, by output, before they were changed as the arguments are.
        random: The generator's state after the call.
        error: What it raised instead.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, str] = field(default_factory=dict)
    incoming: dict[str, Tensor] = field(default_factory=dict)
    random: bytes = b""
    error: str = ""


def outcome(
    way: Way,
    fn: Any,
    args: Sequence[Any],
    change: Change = copy_with_layout,
    incoming: Mapping[str, Tensor] | None = None,
) -> Outcome:
    """The outcome of a function or module, run in some way on changed copies of the arguments; errors are kept.

    The gradients that come in are changed as well. They are drawn, if another outcome's are not given.
    """
    try:
        return _outcome(way, fn, args, change, incoming)
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {str(error).strip()}")


def _outcome(way: Way, fn: Any, args: Sequence[Any], change: Change, incoming: Mapping[str, Tensor] | None) -> Outcome:
    args = [change(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
    inputs = {f"input {i}": x for i, x in enumerate(args) if isinstance(x, Tensor)}
    if isinstance(fn, nn.Module):
        fn = copy.deepcopy(fn)
        for tensor in (*fn.parameters(), *fn.buffers()):
            tensor.data = change(tensor.data)
        inputs |= dict(fn.named_parameters()) | dict(fn.named_buffers())
    torch.manual_seed(0)
    leaves = tree_leaves(way(fn)(*args))
    found = Outcome(random=torch.get_rng_state().numpy().tobytes())
    outputs = {f"output {i}": torch.as_tensor(x) for i, x in enumerate(leaves) if isinstance(x, Tensor | int | float)}
    first: dict[int, str] = {}
    for name, tensor in (inputs | outputs).items():
        found.shares[name] = first.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), name)
    for name, tensor in outputs.items():
        strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
        found.layout[name] = (strides if tensor.numel() else [], tensor.requires_grad)
    found.values = {name: copy_with_layout(tensor) for name, tensor in (outputs | inputs).items()}
    found.incoming = _drawn(outputs) if incoming is None else dict(incoming)
    found.values |= _gradients(outputs, inputs, {name: change(grad) for name, grad in found.incoming.items()})
    return found


def _drawn(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a gradient for each output that wants one, the same for the same shapes and dtypes in the same order."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        for name, y in outputs.items()
        if y.requires_grad
    }


def _gradients(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor], incoming: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    wanted = {name: x for name, x in inputs.items() if x.requires_grad and x.is_leaf}
    given = [name for name in incoming if outputs[name].requires_grad]
    if not wanted or not given:
        return {}
    ends, grads = [outputs[name] for name in given], [incoming[name].to(outputs[name].dtype) for name in given]
    found = torch.autograd.grad(ends, list(wanted.values()), grads, allow_unused=True)
    return {f"gradient of {name}": g for name, g in zip(wanted, found, strict=True) if g is not None}


def exact_outcome(fn: Any, args: Sequence[Any], change: Change, incoming: Mapping[str, Tensor]) -> Outcome:
    """The reference result: the same program in double precision, with another outcome's incoming gradients."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return outcome(eager, fn, args, change, incoming)
    finally:
        torch.set_default_dtype(before)


def difference(got: Outcome, fn: Any, args: Sequence[Any]) -> str | None:
    """Describe what of a call is neither as in eager mode nor as AOTAutograd or Inductor has it, or return None.

    Each property is compared by itself: compiled code may leave out an unused random draw, or merge equal results.
    """
    plain = outcome(eager, fn, args)
    if plain.error:
        return None
    left = _visible(got, plain)
    for way in (AOT, INDUCTOR):
        if left:
            other = outcome(way, fn, args)
            left = {} if other.error else {what: left[what] for what in left.keys() & _visible(got, other).keys()}
    if "random" in left and outcome(whole_aot, fn, args).error:
        del left["random"]  # in eager pieces an unused draw is drawn, in a graph it is not
    return next(iter(left.values()), None) or wrong_values(got, plain, fn, args)


def _visible(got: Outcome, right: Outcome) -> dict[str, str]:
    """Describe the differences that can be seen without looking at numbers, one for each property."""
    if got.error:
        return {"error": f"raises {_first_words(got.error)}"}
    if got.values.keys() != right.values.keys():
        return {"values": f"gives {sorted(got.values.keys() ^ right.values.keys())} in one of the two only"}
    found: dict[str, str] = {}
    for name, y in right.values.items():
        x = got.values[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            found["values"] = f"{name} is {x.dtype} {tuple(x.shape)}, right is {y.dtype} {tuple(y.shape)}"
        elif not (x.is_floating_point() or x.is_complex()) and not torch.equal(x, y):
            found["values"] = f"{name} is {x.flatten()[:8].tolist()}, right is {y.flatten()[:8].tolist()}"
    for what, word in (("shares", "has the memory of"), ("layout", "has strides and requires_grad")):
        mine, theirs = getattr(got, what), getattr(right, what)
        for name, value in theirs.items():
            if mine[name] != value:
                found[f"{what} of {name}"] = f"{name} {word} {mine[name]}, right is {value}"
    if got.random != right.random:
        found["random"] = "leaves the random generator in another state"
    return found


def _first_words(error: str) -> str:
    """Return the first words, without the line in which Dynamo says who raised."""
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith("BackendCompilerFailed")]
    return lines[0] if lines else error


def wrong_values(got: Outcome, plain: Outcome, fn: Any, args: Sequence[Any]) -> str | None:
    """Tell where the accuracy rule is broken."""
    if got.error or got.values.keys() != plain.values.keys():
        return None
    suspects = [name for name, x in plain.values.items() if not _same_bits(got.values[name], x)]
    if not suspects:
        return None
    exact, near = exact_outcome(fn, args, to_float64, plain.incoming), None
    for name in suspects:
        if name not in exact.values or _real(exact.values[name]).shape != _real(plain.values[name]).shape:
            return None  # no program in float64 to hold it against, or one that saw the bits as another dtype
        if _violation(name, got, plain, exact, []) is None:
            continue
        if near is None:
            near = [_neighbour(fn, args, seed, plain.incoming) for seed in range(NEIGHBOURS)]
        violation = _violation(name, got, plain, exact, near)
        if violation is not None:
            with RoundedOnce():
                rounded = outcome(eager, fn, args)
            if name not in rounded.values or _violation(name, got, plain, rounded, near) is not None:
                return f"{name}: {violation}"
    return None


def _neighbour(fn: Any, args: Sequence[Any], seed: int, incoming: Mapping[str, Tensor]) -> tuple[Outcome, Outcome]:
    """Return the program's outcome near its arguments and incoming gradients, and the reference there."""
    here = outcome(eager, fn, args, nudged(seed), incoming)
    return here, exact_outcome(fn, args, nudged(seed, torch.float64), incoming)


def _violation(name: str, got: Outcome, plain: Outcome, exact: Outcome, near: Sequence[tuple[Outcome, Outcome]]) -> Any:
    x, y, z = (_real(found.values[name]) for found in (got, plain, exact))
    if not x.is_floating_point():
        return None
    overflowed = ~y.isfinite() & z.isfinite()  # in PyTorch, which is no baseline there
    same = (x == y) | (x.isnan() & y.isnan()) | (overflowed & ~x.isfinite())
    if name.startswith("gradient"):  # whose formulas may order products of 0, infinity and NaN in any way
        same |= overflowed | (~x.isfinite() & (~y.isfinite() | z.isnan().any()))
    x = torch.where(same, y, x)
    # Where only float64 is past the dtype's range (an RMS norm with its dtype's eps), it is no reference.
    z = torch.where((same & ~y.isfinite()) | (y.isfinite() & (z.abs() > torch.finfo(y.dtype).max)), y.double(), z)
    pairs = [(_real(a.values[name]), _real(b.values[name])) for a, b in near if name in a.values and name in b.values]
    return accuracy_violation(x, y, z, neighbours=pairs)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _same_bits(x: Tensor, y: Tensor) -> bool:
    x, y = _real(x), _real(y)
    return bool(((x == y) | (x.isnan() & y.isnan())).all()) if x.is_floating_point() else torch.equal(x, y)


def require_unchanged(fn: Any, args: Sequence[Any], way: Way | None = None) -> Report:
    """Require that the backend changes nothing that a caller can see; return what was found."""
    report = Report()
    got = outcome(with_backend(report) if way is None else way, fn, args)
    say = difference(got, fn, args)
    assert say is None, say
    return report
