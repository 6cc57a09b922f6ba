"""Writes one page for every operator, from its record alone: `python docs/op_pages.py [folder]`."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmark_page import benchmark_tables, draw_plots, plots_of
from family_page import family_table
from sphinx.ext.napoleon import Config, GoogleDocstring
from sweep_page import sweep_tables
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from version_page import version_table

import llmk
from llmk.opcheck.promises import GPU_PROMISES, INTERPRETER_PROMISES, PROMISES
from llmk.registry import OPS, RULE, Op, Sample


def write_pages(folder: Path) -> None:
    """Write `folder/NAME.md` for every registered operator and `folder/index.md`; remove pages of operators that went.

    A page that did not change is left alone, so that the next build need not read it again.
    """
    folder.mkdir(exist_ok=True)
    draw_plots(folder / "plots")
    pages = {f"{name}.md": op_page(op) + _plots(op, folder / "plots") for name, op in OPS.items()}
    pages |= {"index.md": index_page(list(OPS.values())), "_checks.md": checks_table()}
    pages |= {"_benchmarks.md": benchmark_tables(folder / "plots"), "_families.md": family_table()}
    pages |= {"_versions.md": version_table(), "_sweep.md": sweep_tables()}
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def index_page(ops: list[Op]) -> str:
    rows = [f"| [`{op.name}`]({op.name}.md) | {_summary(op)} |" for op in sorted(ops, key=lambda op: op.name)]
    return "\n".join([
        "# Operators",
        "",
        "Each is `torch.ops.llmk.NAME`, and a typed function `llmk.functional.NAME`. These pages are",
        "written from the operators' own records; the calls on them were run when the site was built.",
        "",
        "| operator | what it computes |",
        "|---|---|",
        *rows,
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *sorted(op.name for op in ops),
        "```",
        "",
    ])  # fmt: skip


def op_page(op: Op) -> str:
    parts = [
        f"# {op.name}",
        _python_function(op),
        "## Math",
        *_math(op),
        "## Example",
        f"The first sample of the record ({_prose(_first_sample(op).why)}), run when this page was built:",
        _fence("python", _example(op)),
        "## Record",
        _fence("text", _schema(op)),
        *_record(op),
    ]
    return "\n\n".join(parts) + "\n"


def checks_table() -> str:
    """The checks of `llmk.opcheck`, for the page about it to include."""
    rows = ["| check | what it asks |", "|---|---|"]
    groups = (INTERPRETER_PROMISES, " (in Triton's interpreter)"), (PROMISES, ""), (GPU_PROMISES, " (on a GPU)")
    for promises, where in groups:
        for promise in promises:
            summary = (inspect.getdoc(promise) or "").split("\n\n")[0].replace("\n", " ")
            rows.append(f"| `{promise.__name__}` | {_prose(summary.rstrip('.'))}{where} |")
    return "\n".join(rows) + "\n"


def _plots(op: Op, folder: Path) -> str:
    images = list(plots_of(op.name, folder, folder.name))
    about = "[How this was measured](../benchmarks.md), with every operator's times as a table."
    return "\n\n".join(["", "## Benchmark", about, *images]) + "\n" if images else ""


def _summary(op: Op) -> str:
    return _prose(op.doc.split("\n\n")[0].replace("\n", " "))


def _code_list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _schema(op: Op) -> str:
    """As PyTorch writes it, with Python's defaults, and one argument on a line if it is long."""
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


def _python_function(op: Op) -> str:
    """The docstring as Sphinx renders a Python function's."""
    function = getattr(sys.modules[op.module], op.name)
    prefix = "llmk.functional" if hasattr(llmk.functional, op.name) else "torch.ops.llmk"
    signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor")
    docstring = GoogleDocstring(op.doc, Config(napoleon_use_param=True, napoleon_use_rtype=False), what="function")
    body = "\n".join(f"   {line}".rstrip() for line in str(docstring).splitlines())
    return _fence("{eval-rst}", f".. py:function:: {prefix}.{op.name}{signature}\n\n{body}")


def _math(op: Op) -> Iterator[str]:
    """The docstring of the operator's file, and of the files it names that hold no operator."""
    files = {name.rpartition(".")[2]: module for name, module in sys.modules.items() if name.startswith("llmk.ops.")}
    operators = {op.module for op in OPS.values()}
    docs = [inspect.getdoc(sys.modules[op.module]) or ""]
    for shared in dict.fromkeys(re.findall(r"\b(\w+)\.py\b", docs[0])):
        if shared in files and files[shared].__name__ not in operators:
            docs.append(inspect.getdoc(files[shared]) or "")
    for doc in docs:
        for block in re.split(r"\n\n(?=\S)|\n\n(?= )", doc):
            indented = all(line.startswith("    ") for line in block.splitlines() if line)
            yield _fence("text", inspect.cleandoc(block)) if indented else _prose(block)


def _prose(text: str) -> str:
    """Plain text with code in backticks, as Markdown."""
    spans = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(spans), 2):
        escaped = re.sub(r"([*_#|<>$\[\]])", r"\\\1", spans[i])
        spans[i] = re.sub(r"https?://[^\s,;)]*[^\s,;).]", lambda m: f"<{m[0].replace(chr(92), '')}>", escaped)
    return "".join(spans)


def _first_sample(op: Op) -> Sample:
    torch.manual_seed(0)
    return next(iter(op.samples(torch.device("cpu"), op.dtypes[0])))


def _example(op: Op) -> str:
    """The first sample called, forward and backward, with what went in and what came out."""
    sample = _first_sample(op)
    bound = {name: _leaf(value, name in op.differentiable) for name, value in op.bind(sample).items()}
    arguments = [_argument(name, value, name in sample.kwargs) for name, value in bound.items()]
    outputs = op.overload(**bound)
    named = {"y": outputs} if isinstance(outputs, Tensor) else {f"y{i}": y for i, y in enumerate(outputs)}
    lines = [f"# {name}: {_describe(value)}" for name, value in bound.items() if isinstance(value, Tensor)]
    call = f"{', '.join(named)} = torch.ops.{op.qualified_name.replace('::', '.')}({', '.join(arguments)})"
    lines += [call, *(f"# {name}: {_describe(y)}" for name, y in named.items())]
    wanted = {name: value for name, value in bound.items() if isinstance(value, Tensor) and value.requires_grad}
    if wanted:
        sums = {name: y.sum() for name, y in named.items() if y.requires_grad}
        torch.autograd.backward(list(sums.values()))
        total = " + ".join(f"{name}.sum()" for name in sums)
        lines.append(f"({total}).backward()" if len(sums) > 1 else f"{total}.backward()")
        lines += [f"# {name}.grad: {_describe(value.grad)}" for name, value in wanted.items()]
    return "\n".join(lines)


def _leaf(value: Any, wants_gradient: bool) -> Any:
    return value.detach().requires_grad_(wants_gradient) if isinstance(value, Tensor) else value


def _argument(name: str, value: Any, by_keyword: bool) -> str:
    text = name if isinstance(value, Tensor) else repr(value)
    return f"{name}={text}" if by_keyword else text


def _describe(tensor: Tensor | None) -> str:
    assert tensor is not None
    if tensor.dim() == 0:
        return f"{_name(tensor.dtype)} {tensor.item():.4f}"
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _record(op: Op) -> Iterator[str]:
    items = {
        "Gradients for": _code_list(op.differentiable),
        "Kernel operators": _code_list(kernel_op.overload._schema.name for kernel_op in op.kernel_ops),
        "Dtypes": _code_list(_name(dtype) for dtype in op.dtypes),
        "Accuracy": f"at most {RULE.factor} times the error of PyTorch's composition, plus one unit in the last place"
        + "".join(f"; in `{_name(d)}` {t.factor} times ({_prose(t.reason)})" for d, t in op.tolerances.items()),
        "Source": f"`{op.module.removeprefix('llmk.').replace('.', '/')}.py`",
    }
    yield "\n".join(f"- {name}: {text}" for name, text in items.items())
    if op.choices:
        yield "### Measured choices"
        yield "\n".join(f"- {_prose(choice)}" for choice in op.choices)
    if op.workloads is not None and op.cost is not None:
        yield "### The least that it must move and do"
        yield "\n".join(_cost_table(op))
    yield "### What the checks call"
    samples = op.samples(torch.device("cpu"), op.dtypes[0])
    yield "\n".join(f"- {_prose(sample.why)}: `{_shapes(op, sample)}`" for sample in samples)


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
            yield f"| {_prose(sample.why)} | {forward} | {full} |"


def _amount(size: int, flops: int) -> str:
    return f"{size / 1e9:.2f} GB" + (f", {flops / 1e12:.2f} TFLOP" if flops else "")


def _shapes(op: Op, sample: Sample) -> str:
    return ", ".join(
        f"{name} {list(value.shape)}" if isinstance(value, Tensor) else f"{name}={value!r}"
        for name, value in op.bind(sample).items()
    )


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "ops")
