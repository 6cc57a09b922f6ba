"""Programs of the backend's fuzzer: straight lines of ATen calls, in segments, with their inputs and outputs.

A program can be run line by line, and written out as Python that runs anywhere.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
SEGMENTS = {
    "no_grad": "torch.no_grad()",
    "enable_grad": "torch.enable_grad()",
    "autocast": 'torch.autocast("cpu", torch.bfloat16)',
}


@dataclass(frozen=True)
class Ref:
    """A value by its name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Input:
    """A tensor that goes in. `kind` says what is in it; a normal one is scaled and moved, and a number is `plus`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    scale: float = 1.0
    plus: float = 0.0
    high: int = 2
    grad: bool = True

    def in_dtype(self, dtype: torch.dtype) -> "Input":
        """Return the input in another dtype, if it is one of real numbers."""
        return replace(self, dtype=dtype) if self.kind in ("normal", "positive") else self

    def code(self) -> str:
        shape = "(" + "".join(f"{n}, " for n in self.shape).rstrip() + ")"
        if self.kind == "number":
            return repr(self.plus)
        if self.kind == "classes":
            return f"torch.randint({self.high}, {shape})"
        if self.kind == "targets":
            return f"torch.randint({self.high}, {shape}).where(torch.arange({self.shape[-1]}) != 1, -100)"
        if self.kind == "angles":
            return f"torch.polar(torch.ones{shape}, torch.randn{shape})"
        text = {"normal": f"torch.randn({shape})", "positive": f"torch.rand({shape})"}[self.kind]
        text += f" * {self.scale:g}" * (self.scale != 1) + f" + {self.plus:g}" * (self.plus != 0)
        if self.dtype == torch.float16 and (self.scale > 1e4 or abs(self.plus) > 6e4):
            text = f"({text}).clamp(-6e4, 6e4)"
        text = f"({text}).to({self.dtype})" if self.dtype != torch.float32 else f"({text})"
        return text + ".requires_grad_()" * (self.grad and self.dtype.is_floating_point)


@dataclass(frozen=True)
class Line:
    """A call of an operator, and the segment that it is in: consecutive lines of one segment are one block."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    segment: str = ""

    def refs(self) -> list[str]:
        return refs_of((self.args, self.kwargs))


@dataclass(frozen=True)
class Program:
    """Inputs, lines and the names of what is returned, and how it is called: a name in `fuzz_calls.CALLS`."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    called: str = ""

    def fresh(self, prefix: str = "v") -> str:
        taken = {x.name for x in (*self.inputs, *self.lines)}
        return next(name for i in itertools.count() if (name := f"{prefix}{i}") not in taken)

    def with_line(self, at: int, line: Line) -> "Program":
        return replace(self, lines=(*self.lines[:at], line, *self.lines[at:]))

    def pruned(self) -> "Program":
        """Return the program without inputs that nothing reads."""
        read = set(itertools.chain.from_iterable(line.refs() for line in self.lines)) | set(self.outputs)
        return replace(self, inputs=tuple(x for x in self.inputs if x.name in read))

    def source(self) -> str:
        """A function `program`, as Python."""
        text = [f"def program({', '.join(x.name for x in self.inputs)}):"]
        place = 0
        for segment, group in itertools.groupby(self.lines, key=lambda line: line.segment):
            lines = list(group)
            place += len(lines)
            calls = [f"{line.name} = {call_code(line)}" for line in lines]
            kind = segment.rstrip("0123456789")
            if kind == "checkpoint":
                text += _checkpoint_code(segment, lines, calls, self._read_after(place))
            elif kind == "break":
                text += ["    torch._dynamo.graph_break()", *(f"    {call}" for call in calls)]
            elif kind in SEGMENTS:
                text += [f"    with {SEGMENTS[kind]}:", *(f"        {call}" for call in calls)]
            else:
                text += [f"    {call}" for call in calls]
        text.append(f"    return {', '.join(self.outputs)}" + "," * (len(self.outputs) == 1))
        return "\n".join(text)

    def _read_after(self, place: int) -> set[str]:
        return {*self.outputs, *itertools.chain.from_iterable(line.refs() for line in self.lines[place:])}

    def snippet(self) -> str:
        """The program and its arguments, to paste."""
        text = "import operator, torch\nfrom math import inf, nan\nfrom torch.utils.checkpoint import checkpoint\n"
        values = "".join(f"    {x.code()},\n" for x in self.inputs)
        called = f"# called: {self.called}\n" * bool(self.called)
        return f"{text}aten = torch.ops.aten\n{called}{self.source()}\ntorch.manual_seed(0)\nargs = [\n{values}]\n"

    def function(self) -> Callable[..., Any]:
        names = {"torch": torch, "aten": aten, "operator": operator, "checkpoint": checkpoint, "inf": math.inf}
        names["nan"] = math.nan
        exec(self.source(), names)
        return names["program"]  # type: ignore[return-value]

    def args(self, seed: int = 0) -> list[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return [eval(x.code(), {"torch": torch}) for x in self.inputs]

    def values(self, change: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Any]:
        """Return the value of each line, run one by one without segments; raises what a line raises."""
        given = zip(self.inputs, self.args(), strict=True)
        found: dict[str, Any] = {x.name: change(y) if isinstance(y, Tensor) else y for x, y in given}
        for line in self.lines:
            found[line.name] = run_line(line, found)
        return found


def run_line(line: Line, values: Mapping[str, Any]) -> Any:
    args, kwargs = (map_refs(lambda ref: values[ref.name], x) for x in (line.args, dict(line.kwargs)))
    return line.target(*args, **kwargs)


def map_refs(fn: Callable[[Ref], Any], x: Any) -> Any:
    if isinstance(x, Ref):
        return fn(x)
    if isinstance(x, list | tuple):
        return type(x)(map_refs(fn, y) for y in x)
    return {key: map_refs(fn, y) for key, y in x.items()} if isinstance(x, dict) else x


def refs_of(x: Any) -> list[str]:
    found: list[str] = []
    map_refs(lambda ref: found.append(ref.name), x if not isinstance(x, Mapping) else dict(x))
    return list(dict.fromkeys(found))


def target_code(target: Any) -> str:
    if target is torch.tensor:
        return "torch.tensor"
    return f"operator.{target.__name__}" if getattr(target, "__module__", "") == "_operator" else f"torch.ops.{target}"


def call_code(line: Line) -> str:
    args = [repr(x) for x in line.args] + [f"{name}={x!r}" for name, x in line.kwargs.items()]
    return f"{target_code(line.target).replace('torch.ops.aten', 'aten')}({', '.join(args)})"


def _checkpoint_code(segment: str, lines: list[Line], calls: list[str], wanted: set[str]) -> Iterator[str]:
    made = [line.name for line in lines]
    given = dict.fromkeys(name for line in lines for name in line.refs() if name not in made)
    gives = [name for name in made if name in wanted] or made[-1:]
    yield f"    def {segment}({', '.join(given)}):"
    yield from (f"        {call}" for call in calls)
    yield f"        return {', '.join(gives)},"
    arguments = ", ".join([segment, *given, "use_reentrant=False"])
    yield f"    {', '.join(gives)}, = checkpoint({arguments})"


def resolved(name: str, args: Any, kwargs: Any) -> Any:
    """The overload of an ATen operator that takes these arguments, tensors themselves."""
    overload = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    return getattr(getattr(aten, name), overload or "default")
