"""An operator's record in words, for the folded end of its page."""

from collections.abc import Iterator
from typing import Any

import torch
from markdown_parts import code_list, dtype_name, fence, prose
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmk.registry import RULE, Op, Sample


def record(op: Op) -> Iterator[str]:
    """Paragraphs and tables without headings, which cannot be folded."""
    yield fence("text", _schema(op))
    items = {
        "Gradients for": code_list(op.differentiable),
        "Kernel operators": code_list(kernel_op.overload._schema.name for kernel_op in op.kernel_ops),
        "Dtypes": code_list(dtype_name(dtype) for dtype in op.dtypes),
        "Accuracy": f"at most {RULE.factor} times the error of PyTorch's composition, plus one unit in the last place"
        + "".join(f"; in `{dtype_name(d)}` {t.factor} times ({prose(t.reason)})" for d, t in op.tolerances.items()),
        **_batch_dependent(op),
        "Source": f"`{op.module.removeprefix('llmk.').replace('.', '/')}.py`",
    }
    yield "\n".join(f"- {name}: {text}" for name, text in items.items())
    if op.choices:
        yield "**Measured choices**"
        yield "\n".join(f"- {prose(choice)}" for choice in op.choices)
    if op.workloads is not None and op.cost is not None:
        yield "**The least that it must move and do**"
        yield "\n".join(_cost_table(op))
    yield "**What the checks call**"
    samples = op.samples(torch.device("cpu"), op.dtypes[0])
    yield "\n".join(f"- {prose(sample.why)}: `{_shapes(op, sample)}`" for sample in samples)


def _batch_dependent(op: Op) -> dict[str, str]:
    """Return what a row's bits depend on beside the row on a GPU."""
    known = {dtype: op.batch_dependent_in(dtype).items() for dtype in op.dtypes}
    reasons = []
    for result, reason in dict.fromkeys(item for items in known.values() for item in items):
        dtypes = [dtype for dtype, items in known.items() if (result, reason) in items]
        where = "" if len(dtypes) == len(op.dtypes) else f" in {code_list(dtype_name(dtype) for dtype in dtypes)}"
        reasons.append(f"`{result}`{where} ({prose(reason)})")
    return {"Rows whose bits depend on the batch on a GPU": ", ".join(reasons)} if reasons else {}


def _schema(op: Op) -> str:
    """Return the schema as PyTorch writes it, with Python's defaults, and one argument on a line if it is long."""
    arguments: list[str] = []
    for argument in op.schema.arguments:
        if argument.kwarg_only and "*" not in arguments:
            arguments.append("*")
        text = f"{str(argument.type).replace('Optional[Tensor]', 'Tensor?')} {argument.name}"
        arguments.append(text + (f"={argument.default_value!r}" if argument.has_default_value() else ""))
    result = str(op.schema).rpartition(" -> ")[2]
    line = f"{op.qualified_name}({', '.join(arguments)}) -> {result}"
    if len(line) < 70:
        return line
    return f"{op.qualified_name}(\n    " + ",\n    ".join(arguments) + f"\n) -> {result}"


def _cost_table(op: Op) -> Iterator[str]:
    assert op.workloads is not None
    assert op.cost is not None
    yield "| workload, bfloat16 | forward | forward and backward |"
    yield "|---|---|---|"
    with FakeTensorMode():  # sizes without the memory
        for sample in op.workloads(torch.device("cpu"), torch.bfloat16):
            cost = op.cost(*sample.args, **sample.kwargs)
            forward, full = (
                _amount(cost.bytes_forward, cost.flops_forward),
                _amount(cost.bytes_full, cost.flops_full),
            )
            yield f"| {prose(sample.why)} | {forward} | {full} |"


def _amount(size: int, flops: int) -> str:
    return f"{size / 1e9:.2f} GB" + (f", {flops / 1e12:.2f} TFLOP" if flops else "")


def _shapes(op: Op, sample: Sample) -> str:
    return ", ".join(_argument(name, value) for name, value in op.bind(sample).items())


def _argument(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{name} {list(value.shape)}"
    if isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
        return f"{name} [{', '.join(str(list(each.shape)) for each in value)}]"
    return f"{name}={value!r}"
