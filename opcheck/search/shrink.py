"""A smaller call that is wrong in the same way, and a snippet of it that can be pasted.

The shrinking is greedy: shorter axes, options at their defaults, unit incoming gradients, then zeros and short numbers,
as long as the judge says the same.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import incoming_gradients
from llmk.opcheck.inputs import as_list, prepare, rebound, same_bits
from llmk.opcheck.search.cases import Case, unit_gradients
from llmk.opcheck.search.judge import Finding, judge
from llmk.registry import Op

MOST_NUMBERS = 64
"""A tensor of more is not tried number by number, and the snippet makes it by its seed."""


def shrink(op: Op, case: Case, finding: Finding, seconds: float) -> tuple[Case, Finding]:
    """The smallest case of the same finding that was found in time."""
    until = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(op, case):
            if time.monotonic() > until:
                return case, finding
            found = judge(op, smaller, seconds=max(1.0, seconds / 5))
            if found is not None and found.key == finding.key:
                case, finding, progress = smaller, found, True
                break
    return case, finding


def _smaller(op: Op, case: Case) -> Iterator[Case]:
    bound = op.bind(case.sample)

    def with_values(values: dict[str, Any]) -> Case:
        return dataclasses.replace(case, sample=rebound(op, case.sample, values, case.sample.why))

    yield from (with_values(values) for values in _shorter(bound))
    required = {argument.name for argument in op.schema.arguments if not argument.has_default_value()}
    for name in bound.keys() - required:
        yield with_values({other: value for other, value in bound.items() if other != name})
    if case.grads is not unit_gradients:
        yield dataclasses.replace(case, grads=unit_gradients)
    for value in bound.values():
        if isinstance(value, Tensor) and value.numel():
            simpler = (other for other in _simpler(value) if _within(other, value))
            yield from (with_values(_replaced(bound, value, other)) for other in simpler)


def _replaced(bound: dict[str, Any], old: Tensor, new: Tensor) -> dict[str, Any]:
    """Arguments that are one tensor stay one."""
    return {name: new if value is old else value for name, value in bound.items()}


def _shorter(bound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All axes of one length cut to a part of it: either half, or all but one place."""
    tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
    for length in sorted({size for tensor in tensors.values() for size in tensor.shape if size > 1}, reverse=True):
        half = length // 2
        kept = [range(half), range(half, length)]
        kept += [[j for j in range(length) if j != i] for i in range(min(length, 12))] if length > 2 else []
        for places in kept:
            cut: dict[int, Tensor] = {}
            for tensor in tensors.values():
                cut[id(tensor)] = _cut(tensor, length, list(places))
            yield bound | {name: cut[id(tensor)] for name, tensor in tensors.items()}


def _cut(tensor: Tensor, length: int, places: list[int]) -> Tensor:
    index = torch.tensor(places, dtype=torch.int64, device=tensor.device)
    shorter = tensor
    for axis in range(tensor.dim()):
        if tensor.shape[axis] == length:
            shorter = shorter.index_select(axis, index)
    return shorter


def _simpler(value: Tensor) -> Iterator[Tensor]:
    plain = value.detach().clone(memory_format=torch.contiguous_format)
    if not plain.is_floating_point():
        return
    if not value.is_contiguous():
        yield plain
    for whole in (torch.zeros_like(plain), torch.ones_like(plain), plain.round(), (plain * 16).round() / 16):
        if not same_bits(whole, plain):
            yield whole
    for index in range(plain.numel() if plain.numel() <= MOST_NUMBERS else 0):
        number = float(plain.view(-1)[index])
        for short in _shorter_numbers(number):
            changed = plain.clone()
            changed.view(-1)[index] = short
            if not same_bits(changed, plain):
                yield changed


def _within(simpler: Tensor, value: Tensor) -> bool:
    """Return True if numbers stay between those that were there and 0: what is negative may have to be."""
    low, high = value.detach().min().clamp(max=0), value.detach().max().clamp(min=0)
    return bool(((simpler >= low) & (simpler <= high) | simpler.isnan()).all())


def _shorter_numbers(number: float) -> Iterator[float]:
    """Numbers with fewer digits, the shortest first: each shrinks once."""
    length = len(repr(number))
    for short in (0.0, 1.0, -1.0, float(f"{number:.0f}") if abs(number) < 1e15 else number, float(f"{number:.1e}")):
        if len(repr(short)) < length or (abs(short) < abs(number) and len(repr(short)) == length):
            yield short


def snippet(op: Op, case: Case) -> str:
    """A program that makes the call and prints its results."""
    bound, wanted = op.bind(case.sample), set(op.differentiable)
    lines, names = ["import torch", "from math import inf, nan"], dict[int, str]()
    package = (op.module or getattr(op.reference, "__module__", "") or "").partition(".")[0]
    lines.append("import llmk" if package == "llmk" else f"# first import what registers {op.qualified_name}")
    words = []
    positional = [argument.name for argument in op.schema.arguments if not argument.kwarg_only]
    for name, value in bound.items():
        text = repr(value)
        if isinstance(value, Tensor):
            text = names.setdefault(id(value), name)
            if text == name:
                lines.append(f"{name} = {_literal(value, name in wanted)}")
        words.append(text if name in positional[: len(case.sample.args)] else f"{name}={text}")
    space, _, rest = op.qualified_name.partition("::")
    lines.append(f"outputs = torch.ops.{space}.{rest}({', '.join(words)})")
    lines.append("outputs = outputs if isinstance(outputs, tuple) else (outputs,)")
    lines.append("wanting = [output for output in outputs if output.requires_grad]")
    lines.append(f"torch.autograd.backward(wanting, {_incoming(op, case)})")
    printed = [f"{names[id(v)]}.grad" for n, v in bound.items() if isinstance(v, Tensor) and n in wanted]
    lines.append(f"print(outputs, {', '.join(printed)})")
    return "\n".join(lines)


def _incoming(op: Op, case: Case) -> str:
    if case.grads is unit_gradients:
        return "[torch.ones_like(output) for output in wanting]"
    args, kwargs, _ = prepare(op, case.sample, op.differentiable)
    try:
        outputs = [output for output in as_list(op.reference(*args, **kwargs)) if output.requires_grad]
    except Exception:  # what raises has no gradient
        return "[torch.ones_like(output) for output in wanting]"
    grads = (case.grads or incoming_gradients)(outputs)
    return "[" + ", ".join(_literal(grad.detach(), False) for grad in grads) + "]"


def _literal(value: Tensor, wanted: bool) -> str:
    value = value.detach()
    gradient = ", requires_grad=True" if wanted else ""
    if value.numel() == 0:
        return f"torch.empty({tuple(value.shape)}, dtype={value.dtype}{gradient})"
    if value.numel() > 1 and value.unique().numel() == 1:
        return f"torch.full({tuple(value.shape)}, {value.flatten()[0].item()!r}, dtype={value.dtype}{gradient})"
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}{gradient})"
