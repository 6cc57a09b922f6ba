"""Programs of the fuzzer: spellings of what the backend finds, with inputs of any dtype, perhaps two in one program."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from compile_tests.helpers.fuzz_program import Input, Line, Program, Ref
from compile_tests.spellings.every import SPELLINGS
from compile_tests.spellings.registry import Spelling

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
AFTER: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.sum,
    lambda y: y + y.amax(),
    lambda y: y.transpose(0, -1) if y.dim() else y,
    lambda y: y @ torch.ones(y.shape[-1], 3, dtype=y.dtype) if y.dim() else y,
)
"""What a model might do with a result."""


def as_program(fn: Callable[..., Any], inputs: Sequence[Input]) -> Program:
    """The calls of ATen's operators that a function makes."""
    args = Program(tuple(inputs), (), ()).args()
    gm = make_fx(fn, pre_dispatch=True)(*(x.detach() if isinstance(x, Tensor) else x for x in args))
    names = {node: x.name for node, x in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)}
    lines: list[Line] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            names[node] = f"v{len(lines)}"
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: Ref(names[n]))  # type: ignore[misc]
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
            lines.append(Line(names[node], node.target, tuple(args), kwargs))
    returned = gm.graph.output_node().args[0]
    outputs = tuple(names[x] for x in (returned if isinstance(returned, tuple | list) else [returned]))
    return Program(tuple(inputs), tuple(lines), outputs)


def spelled(random: Random) -> Program:
    """A program of one spelling or two, the results of which something reads or nothing."""
    chosen, dtype = [_any_spelling(random)], random.choice(DTYPES)
    if random.random() < 0.3:
        chosen.append(_any_spelling(random))
    inputs: list[Input] = []
    reads = [[_input(random, x, dtype, inputs) for x in each.inputs] for each in chosen]
    after = random.choice((*AFTER, *[lambda y: y] * len(AFTER)))

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for each, places in zip(chosen, reads, strict=True):
            found = each.fn(*(args[i] for i in places))
            results += map(after, found if isinstance(found, tuple) else [found])
        return tuple(results)

    return as_program(run, inputs)


def _any_spelling(random: Random) -> Spelling:
    """Each operator as often as another, whatever its number of spellings."""
    operator = random.choice(sorted({each.operator for each in SPELLINGS.values()}))
    return random.choice([each for each in SPELLINGS.values() if each.operator == operator])


def _input(random: Random, template: Input, dtype: torch.dtype, inputs: list[Input]) -> int:
    """The place of an input: one that is there and alike, or a new one, which is small, large or far from 0."""
    alike = [i for i, x in enumerate(inputs) if (x.shape, x.kind) == (template.shape, template.kind)]
    if alike and random.random() < 0.1:
        return random.choice(alike)
    made = replace(template.in_dtype(dtype), name=f"x{len(inputs)}")
    if made.kind == "normal":
        made = replace(made, grad=random.random() < 0.8)
        if not inputs and made.scale == 1:
            large = 1e3 if dtype == torch.float16 else 1e5
            scale, plus = random.choice((1.0, 1.0, 1.0, 1e-3, 30.0, large)), random.choice((0.0, 0.0, 0.0, 100.0, 1e3))
            made = replace(made, scale=scale, plus=plus)
    inputs.append(made)
    return len(inputs) - 1
