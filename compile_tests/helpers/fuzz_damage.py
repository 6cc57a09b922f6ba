"""Changes of a program after which a rule may no longer hold: each gives another program, or None if it has no place.

A changed program need not run: who asks for one tries it.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from compile_tests.helpers.fuzz_calls import CALLS
from compile_tests.helpers.fuzz_program import Input, Line, Program, Ref, aten, map_refs, resolved
from compile_tests.helpers.fuzz_spelled import as_program

SEGMENTS_OF_DAMAGE = "no_grad", "no_grad", "checkpoint", "autocast", "enable_grad", "break", "break"
Damage = Callable[[Random, Program], Program | None]
DAMAGES: dict[str, Damage] = {}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ALIKE = (
    ("mean", "sum", "amax", "std", "var"),
    ("rsqrt", "sqrt", "reciprocal", "sin", "cos", "neg", "abs", "exp", "square", "clone", "alias"),
    ("silu", "relu", "sigmoid", "tanh", "gelu", "softplus", "mish"),
    ("add", "sub", "mul", "div", "maximum", "remainder", "hypot", "rsub"),
    ("log_softmax", "softmax"),
    ("tril", "triu"),
    ("ge", "gt", "le", "lt", "eq", "ne"),
)
"""Operators of which one is written for another."""

OTHERWISE: dict[str, tuple[Callable[..., Any], ...]] = {
    "add": (lambda x, y: y + x,),
    "mul": (lambda x, y: y * x,),
    "div": (lambda x, y: x * (1 / y),),
    "pow": (lambda x, n: x * x if n == 2 else torch.pow(x, n), lambda x, n: x.square() if n == 2 else torch.pow(x, n)),
    "square": (lambda x: x * x, lambda x: x**2),
    "sqrt": (lambda x: x**0.5, lambda x: x.rsqrt().reciprocal()),
    "rsqrt": (lambda x: 1 / x.sqrt(), lambda x: x**-0.5, lambda x: x.sqrt() ** -1),
    "mean": (
        lambda x, dim, keepdim=False: x.sum(dim, keepdim) / x.shape[-1],
        lambda x, dim, keepdim=False: x.sum(dim, keepdim) * (1 / x.shape[-1]),
        lambda x, dim, keepdim=False: x.mean(dim).unsqueeze(-1) if keepdim else x.mean(dim),
    ),
    "silu": (lambda x: x * x.sigmoid(),),
    "linear": (
        lambda x, w, b=None: x @ w.t() if b is None else x @ w.permute(1, 0) + b,
        lambda x, w: torch.einsum("...d,vd->...v", x, w),
    ),
    "log_softmax": (lambda x, dim, dtype=None: x.to(dtype or x.dtype) - x.logsumexp(dim, keepdim=True),),
    "gather": (lambda x, dim, index: torch.take_along_dim(x, index, dim),),
}
"""Other ways to write a call of an operator."""


def damage(fn: Damage) -> Damage:
    DAMAGES[fn.__name__] = fn
    return fn


def tensors(program: Program) -> dict[str, Tensor]:
    return {name: x for name, x in program.values().items() if isinstance(x, Tensor)}


def defined_at(program: Program, name: str) -> int:
    """The first line that may read the value."""
    places = [i + 1 for i, line in enumerate(program.lines) if line.name == name]
    return places[0] if places else 0


def _overload(name: str, *args: Any, values: dict[str, Any], **kwargs: Any) -> Any:
    return resolved(name, *map_refs(lambda ref: values[ref.name], (args, kwargs)))


def _replaced(program: Program, at: int, line: Line) -> Program:
    return replace(program, lines=(*program.lines[:at], line, *program.lines[at + 1 :]))


@damage
def argument(random: Random, program: Program) -> Program | None:
    """An argument of a call is another one."""
    places = [i for i, line in enumerate(program.lines) if hasattr(line.target, "_schema")]
    if not places:
        return None
    at = random.choice(places)
    line = program.lines[at]
    arguments = line.target._schema.arguments  # type: ignore[attr-defined]
    which = random.randrange(len(arguments))
    name, kind = arguments[which].name, str(arguments[which].type)
    given = line.args[which] if which < len(line.args) else line.kwargs.get(name, arguments[which].default_value)
    there = [x.name for x in program.inputs] + [x.name for x in program.lines[:at]]
    value = other_value(random, name, kind, given, there)
    if which < len(line.args):
        return _replaced(program, at, replace(line, args=(*line.args[:which], value, *line.args[which + 1 :])))
    return _replaced(program, at, replace(line, kwargs={**line.kwargs, name: value}))


def other_value(random: Random, name: str, kind: str, given: Any, there: list[str]) -> Any:
    """Something else of an argument's type in the schema."""
    if isinstance(given, Ref):
        return Ref(random.choice(there)) if there else given
    if name == "rounding_mode":
        return random.choice(("floor", "trunc"))
    if name == "approximate":
        return "none" if given == "tanh" else "tanh"
    if name == "dtype":
        return random.choice((*DTYPES, None))
    if name == "memory_format":  # any other number ends the process, in PyTorch's own tracing
        return random.choice((torch.contiguous_format, torch.preserve_format, None))
    if isinstance(given, bool):
        return not given
    if isinstance(given, list | tuple):
        return _other_list(random, list(given), there)
    if isinstance(given, int):
        return random.choice((given + 1, given - 1, -given, 0, 1, -1, 2, 2 * given))
    if isinstance(given, float):
        return random.choice((0.0, -given, 2 * given, given + 1, 1.0, 0.5))  # inf times a rounded 0 is no baseline
    if "Tensor" in kind:
        return Ref(random.choice(there)) if there else None
    return random.choice((0, 1, -1, 0.5, None, True))


def _other_list(random: Random, given: list[Any], there: list[str]) -> list[Any]:
    if given and random.random() < 0.5:
        return random.sample(given, len(given))
    if given and all(isinstance(x, Ref) for x in given):
        return [*given[:-1], Ref(random.choice(there))]
    at = random.randrange(len(given)) if given else 0
    return [*given[:at], random.choice((-1, 0, 1, 2)), *given[at + random.randrange(2) :]]


def _name(line: Line) -> str:
    return str(getattr(line.target, "__name__", "")).split(".")[0]


@damage
def operator(random: Random, program: Program) -> Program | None:
    """An operator is one that looks alike."""
    names = [_name(line) for line in program.lines]
    places = [i for i, name in enumerate(names) if any(name in group for group in ALIKE)]
    if not places:
        return None
    at, values = random.choice(places), program.values()
    line = program.lines[at]
    name = random.choice(next(group for group in ALIKE if names[at] in group))
    return _replaced(program, at, replace(line, target=_overload(name, *line.args, values=values, **line.kwargs)))


@damage
def spelling(random: Random, program: Program) -> Program | None:
    """A call is written in another way, which the backend may know or not."""
    places = [i for i, line in enumerate(program.lines) if _name(line) in OTHERWISE and not line.kwargs]
    if not places:
        return None
    at, values = random.choice(places), program.values()
    line, way = program.lines[at], random.choice(OTHERWISE[_name(program.lines[at])])
    names = {f"in{i}": name for i, name in enumerate(line.refs())}
    inputs = [Input(name, tuple(values[old].shape), values[old].dtype) for name, old in names.items()]

    def call(*args: Any) -> Any:
        given = dict(zip(line.refs(), args, strict=True))
        return way(*map_refs(lambda ref: given[ref.name], line.args))

    made = as_program(call, inputs)
    taken = {x.name for x in (*program.inputs, *program.lines)}
    fresh = (name for i in itertools.count() if (name := f"v{i}") not in taken)
    names |= {x.name: line.name if x.name == made.outputs[0] else next(fresh) for x in made.lines}

    def known(ref: Ref) -> Ref:
        return Ref(names[ref.name])

    lines = [
        Line(names[x.name], x.target, map_refs(known, x.args), map_refs(known, dict(x.kwargs)), line.segment)
        for x in made.lines
    ]
    return replace(program, lines=(*program.lines[:at], *lines, *program.lines[at + 1 :]))


def _on_an_edge(random: Random, program: Program, make: Callable[[Ref, Tensor], tuple[Any, ...]]) -> Program | None:
    """Put a call between a value and one of its readers."""
    values = tensors(program)
    edges = [(i, name) for i, line in enumerate(program.lines) for name in line.refs() if name in values]
    edges += [(len(program.lines), name) for name in program.outputs if name in values]
    if not edges:
        return None
    at, name = random.choice(edges)
    call, *args = make(Ref(name), values[name])
    made = program.fresh()
    inserted = Line(made, _overload(call, *args, values=values), tuple(args))

    def other(ref: Ref) -> Ref:
        return Ref(made) if ref.name == name else ref

    if at == len(program.lines):
        outputs = tuple(made if x == name else x for x in program.outputs)
        return replace(program, lines=(*program.lines, inserted), outputs=outputs)
    line = program.lines[at]
    inserted = replace(inserted, segment=line.segment)
    line = replace(line, args=map_refs(other, line.args), kwargs=map_refs(other, dict(line.kwargs)))
    return _replaced(program, at, line).with_line(at, inserted)


@damage
def cast(random: Random, program: Program) -> Program | None:
    dtype = random.choice(DTYPES)
    return _on_an_edge(random, program, lambda x, _: ("to", x, dtype))


@damage
def view(random: Random, program: Program) -> Program | None:
    """A view, an alias or a copy stands on an edge."""

    def make(x: Ref, value: Tensor) -> tuple[Any, ...]:
        last = value.dim() - 1
        ways: list[tuple[Any, ...]] = [("alias", x), ("detach", x), ("clone", x), ("contiguous", x), ("neg", x)]
        if last >= 0:
            ways += [("view", x, list(value.shape)), ("slice", x, last, 0, 2**63 - 1), ("flip", x, [last])]
            ways += [("slice", x, 0, -1, 2**63 - 1), ("slice", x, last, -2 * value.shape[last], 2**63 - 1)]
            ways += [("expand", x, list(value.shape)), ("reshape", x, [-1]), ("roll", x, [1], [0])]
        if last >= 1:
            ways += [("transpose", x, 0, 1), ("transpose", x, last, last - 1), ("transpose", x, 0, 0)]
            ways += [("unsqueeze", x, 0), ("select", x, 0, 0)]
        same_width = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
        if value.dtype in same_width:  # no whole numbers: those are compared bit by bit, and a rounding is no fault
            ways.append(("view", x, same_width[value.dtype]))
        return random.choice(ways)

    return _on_an_edge(random, program, make)


def _with_a_view(random: Random, program: Program, at: int, name: str, value: Tensor) -> tuple[Program, int, str]:
    """Perhaps through a view of it, from another line on."""
    if value.dim() == 0 or random.random() < 0.5:
        return program, at, name
    ways: list[tuple[Any, ...]] = [("select", 0, 0), ("slice", 0, 0, 1), ("unsqueeze", 0), ("alias",), ("detach",)]
    ways += [("reshape", [-1]), ("slice", value.dim() - 1, 1, 2**63 - 1), ("transpose", 0, value.dim() - 1)]
    call, *args = random.choice(ways)
    made = program.fresh()
    target = _overload(call, value, *args, values={})
    return program.with_line(at, Line(made, target, (Ref(name), *args))), at + 1, made


@damage
def write(random: Random, program: Program) -> Program | None:
    """Something is written in place, or through a view, maybe where no gradients are recorded."""
    values = tensors(program)
    name = random.choice(list(values))
    at = random.randint(defined_at(program, name), len(program.lines))
    program, at, name = _with_a_view(random, program, at, name, values[name])
    ways: list[tuple[Any, ...]] = [("mul_", 0.5), ("add_", 1.0), ("zero_",), ("fill_", 2.0), ("sin_",), ("neg_",)]
    ways.append(("copy_", Ref(random.choice(list(values)))))
    call, *args = random.choice(ways)
    target = _overload(call, values.get(name, torch.ones(1)), *args, values=values)
    segment = random.choice(("", "", f"no_grad{at}"))
    program = program.with_line(at, Line(program.fresh(), target, (Ref(name), *args), segment=segment))
    if random.random() < 0.5:
        return replace(program, outputs=tuple(dict.fromkeys((*program.outputs, name))))
    return program


@damage
def output(random: Random, program: Program) -> Program | None:
    """A value on the way, or a view of it, is returned too."""
    values = tensors(program)
    name = random.choice(list(values))
    at = random.randint(defined_at(program, name), len(program.lines))
    program, _, name = _with_a_view(random, program, at, name, values[name])
    outputs = list(dict.fromkeys((*program.outputs, name)))
    random.shuffle(outputs)
    return replace(program, outputs=tuple(outputs))


@damage
def twice(random: Random, program: Program) -> Program | None:
    """A value is computed twice in the same way, and both, or views of them, are returned."""
    if not program.lines:
        return None
    at, values = random.randrange(len(program.lines)), tensors(program)
    line = program.lines[at]
    if line.name not in values or line.target is aten.empty_like.default:  # whose numbers are any
        return None
    copy = replace(line, name=program.fresh())
    program = program.with_line(random.randint(at + 1, len(program.lines)), copy)
    names = []
    for name in (line.name, copy.name):
        program, _, made = _with_a_view(random, program, len(program.lines), name, values[line.name])
        names.append(made)
    return replace(program, outputs=tuple(dict.fromkeys((*program.outputs, *names))))


@damage
def effect(random: Random, program: Program) -> Program | None:
    """A norm that keeps statistics, or a draw of random numbers, whose result is returned or not."""
    values = {name: x for name, x in tensors(program).items() if x.is_floating_point() and x.dim() > 1}
    if not values:
        return None
    name = random.choice(list(values))
    at, made = random.randint(defined_at(program, name), len(program.lines)), program.fresh()
    x, way, stats = Ref(name), random.randrange(5), []
    if way < 2:
        channels = values[name].shape[1]
        kept = [Input(program.fresh("m"), (channels,), values[name].dtype, "positive", grad=False)]
        kept.append(replace(kept[0], name=kept[0].name + "v"))
        program = replace(program, inputs=(*program.inputs, *kept))
        target, stats = (aten.batch_norm.default, aten.instance_norm.default)[way], [Ref(y.name) for y in kept]
        line = Line(made, target, (x, None, None, *stats, True, 0.1, 1e-5, False))
    elif way == 2:
        line = Line(made, aten.dropout.default, (x, 0.5, True))
    elif way == 3:
        line = Line(made, aten.rand_like.default, (x,))
    else:
        line = Line(made, aten.bernoulli_.float, (x, 0.5))
    program = program.with_line(at, line)
    if random.random() < 0.5:
        program = replace(program, outputs=(*program.outputs, made))
    if way < 2 and random.random() < 0.3:  # statistics before or after
        read = Line(program.fresh(), aten.mul.Tensor, (stats[0], 1.0))
        program = program.with_line(random.randint(0, len(program.lines)), read)
        program = replace(program, outputs=(*program.outputs, read.name))
    return program


@damage
def segment(random: Random, program: Program) -> Program | None:
    """Some consecutive lines are without gradients, in autocast, a checkpointed region, or after a graph break."""
    if not program.lines:
        return None
    first = random.randrange(len(program.lines))
    last = random.randint(first, min(len(program.lines), first + 6))
    name = random.choice(SEGMENTS_OF_DAMAGE) + str(first)
    lines = [replace(x, segment=name) if first <= i <= last else x for i, x in enumerate(program.lines)]
    return replace(program, lines=tuple(lines))


@damage
def number(random: Random, program: Program) -> Program | None:
    """A float in a call is an argument of the program, which changes between calls."""
    places = [
        (i, j)
        for i, line in enumerate(program.lines)
        for j, x in enumerate(line.args)
        if isinstance(x, float) and x < 9e9
    ]
    if not places:
        return None
    at, which = random.choice(places)
    line = program.lines[at]
    given = Input(program.fresh("n"), (), kind="number", plus=line.args[which], grad=False)
    args = (*line.args[:which], Ref(given.name), *line.args[which + 1 :])
    return _replaced(replace(program, inputs=(*program.inputs, given)), at, replace(line, args=args))


@damage
def literal(random: Random, program: Program) -> Program | None:
    """A value is multiplied by numbers that are written in the program, or some of its rows are taken by such."""
    values = {name: x for name, x in tensors(program).items() if x.dim() and x.is_floating_point() and x.shape[-1] < 20}
    if not values:
        return None
    name = random.choice(list(values))
    x, at, made = values[name], defined_at(program, name), program.fresh()
    numbers = [round(random.uniform(0.5, 2.0), 2) for _ in range(random.choice((1, x.shape[-1])))]
    program = program.with_line(at, Line(made, torch.tensor, (numbers,), {"dtype": x.dtype}))
    product = Line(program.fresh(), aten.mul.Tensor, (Ref(name), Ref(made)))
    program = program.with_line(at + 1, product)
    return replace(program, outputs=tuple(dict.fromkeys((*program.outputs, product.name))))


@damage
def call(random: Random, program: Program) -> Program | None:
    """The compiled program is called in another way, such as from a checkpointed region."""
    return replace(program, called=random.choice(list(CALLS)))


@damage
def order(random: Random, program: Program) -> Program | None:
    """A line moves as far up or down as its values allow."""
    if len(program.lines) < 2:
        return None
    at = random.randrange(len(program.lines))
    line = program.lines[at]
    first = max([defined_at(program, name) for name in line.refs()], default=0)
    readers = [i for i, other in enumerate(program.lines) if line.name in other.refs()]
    to = random.randint(first, min(readers, default=len(program.lines)) - 1)
    lines = [*program.lines[:at], *program.lines[at + 1 :]]
    return replace(program, lines=(*lines[:to], line, *lines[to:]))


@damage
def large(random: Random, program: Program) -> Program | None:
    """An input is far from 0, very large or small."""
    places = [i for i, x in enumerate(program.inputs) if x.kind == "normal"]
    if not places:
        return None
    at = random.choice(places)
    scale, plus = random.choice(((1.0, 1000.0), (1e5, 0.0), (1e-5, 0.0), (0.0, 0.0), (0.0, 1.0), (30.0, -1e3)))
    changed = replace(program.inputs[at], scale=scale, plus=plus)
    return replace(program, inputs=(*program.inputs[:at], changed, *program.inputs[at + 1 :]))


def damaged(random: Random, program: Program, kinds: list[str] | None = None) -> Program | None:
    """One damage, after which the program still runs line by line; None where it does not."""
    names = kinds or [*DAMAGES, "argument", "argument", "cast", "cast", "spelling", "spelling"]
    fn = DAMAGES[random.choice(names)]
    try:
        changed = fn(random, program)
        if changed is not None:
            changed.values()
    except Exception:
        return None
    return changed
