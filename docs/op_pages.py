"""Writes one page for every operator, from its record alone: `python docs/op_pages.py [folder]`."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmark_page import benchmark_of, draw_plots, overview, targets, training_steps, when_not
from estimate_page import estimate_checks, estimate_form, estimate_formula
from experts_page import experts_table, ranks_table
from family_page import family_table
from first_actions_page import first_actions_table
from formulas import FORMULAS
from gallery_page import draw_gallery, gallery_table
from graph_picture import graph_picture
from layers_page import layers_table
from markdown_parts import doc_parts, fence, folded, literal_blocks, prose
from op_example import example
from op_record import record
from sphinx.ext.napoleon import Config, GoogleDocstring
from sweep_page import sweep_tables
from usual_causes import USUAL_CAUSES
from version_page import version_table

import llmk
from llmk.opcheck.promises.table import GPU_PROMISES, INTERPRETER_PROMISES, ON_REQUEST, PROMISES
from llmk.registry import OPS, Op


def write_pages(folder: Path) -> None:
    """Write `folder/NAME.md` for every registered operator and `folder/index.md`; remove pages of operators that went.

    A page that did not change is left alone, so that the next build need not read it again.
    """
    folder.mkdir(exist_ok=True)
    draw_plots(folder / "plots")
    draw_gallery(folder / "pictures")
    pages = {f"{name}.md": op_page(op, folder / "plots") for name, op in OPS.items()}
    pages |= {"index.md": index_page(list(OPS.values())), "_checks.md": checks_table(), "_targets.md": targets()}
    pages |= {"_benchmarks.md": overview(), "_steps.md": training_steps(), "_families.md": family_table()}
    pages |= {"_experts.md": experts_table(), "_experts_over_ranks.md": ranks_table()}
    pages |= {
        "_versions.md": version_table(),
        "_sweep.md": sweep_tables(),
        "_layers.md": layers_table(),
        "_first.md": first_actions_table(),
        "_graphs.md": graph_picture(),
        "_gallery.md": gallery_table(),
        "_estimate_form.md": estimate_form(),
        "_estimate_checks.md": estimate_checks(),
        "_estimate_formula.md": estimate_formula(),
    }
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def index_page(ops: list[Op]) -> str:
    """List the operators by family, which is the folder that an operator's file is in."""
    families: dict[str, list[Op]] = {}
    for op in sorted(ops, key=lambda op: op.name):
        families.setdefault(op.module.rpartition(".")[0], []).append(op)
    lists = []
    for family, members in sorted(families.items()):
        title = (inspect.getdoc(sys.modules[family]) or family).split("\n")[0].rstrip(".")
        lists += ["", f"## {prose(title)}", "", *(f"- [`{op.name}`]({op.name}.md): {_summary(op)}" for op in members)]
    return "\n".join(
        [
            "# Operators",
            "",
            "Each operator is `torch.ops.llmk.NAME`, and a typed function `llmk.functional.NAME`. These pages are",
            "generated from the operators' records, and their examples ran when the site was built.",
            *lists,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *sorted(op.name for op in ops),
            "```",
            "",
        ]
    )


def op_page(op: Op, plots: Path) -> str:
    parts = [
        f"# {op.name}",
        f"{_summary(op).rstrip('.')}.",
        *([f"$$\n{FORMULAS[op.name]}\n$$"] if op.name in FORMULAS else []),
        fence("python", example(op)),
        "## Reference",
        _python_function(op),
        "## Speed",
        *benchmark_of(op.name, plots, plots.name),
        "## When not to use it",
        when_not(op.name),
        "## Math",
        *_math(op),
        *folded("What it promises, and how it was tuned", record(op)),
    ]
    return "\n\n".join(parts) + "\n"


def checks_table() -> str:
    """The checks of `llmk.opcheck`, for the page about it to include."""
    rows = ["| promise | what it asks | usual cause of a failure |", "|---|---|---|"]
    groups = (
        (INTERPRETER_PROMISES, " (in Triton's interpreter)"),
        (PROMISES, ""),
        (ON_REQUEST, " (only where `--only` names it)"),
        (GPU_PROMISES, " (on a GPU)"),
    )
    for promises, where in groups:
        for promise in promises:
            summary = (inspect.getdoc(promise) or "").split("\n\n")[0].replace("\n", " ")
            asks = prose(re.sub(r"^\d: ", "", summary).rstrip("."))
            if not asks.startswith("torch."):
                asks = asks[0].upper() + asks[1:]
            rows.append(f"| `{promise.__name__}` | {asks}{where} | {USUAL_CAUSES[promise.__name__]} |")
    return "\n".join(rows) + "\n"


def _summary(op: Op) -> str:
    return prose(op.doc.split("\n\n")[0].replace("\n", " "))


def _python_function(op: Op) -> str:
    """The docstring as Sphinx renders a Python function's, without the summary, with which the page begins."""
    function = getattr(sys.modules[op.module], op.name)
    prefix = "llmk.functional" if hasattr(llmk.functional, op.name) else "torch.ops.llmk"
    signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor").replace("collections.abc.", "")
    rest = literal_blocks(op.doc.partition("\n\n")[2])
    docstring = GoogleDocstring(rest, Config(napoleon_use_param=True, napoleon_use_rtype=False), what="function")
    body = "\n".join(f"   {line}".rstrip() for line in str(docstring).splitlines())
    return fence("{eval-rst}", f".. py:function:: {prefix}.{op.name}{signature}\n\n{body}")


def _math(op: Op) -> Iterator[str]:
    """The docstring of the operator's file, and of the files and packages it names that hold no operator."""
    files = {name.rpartition(".")[2]: module for name, module in sys.modules.items() if name.startswith("llmk.ops.")}
    operators = {op.module for op in OPS.values()}
    docs = [inspect.getdoc(sys.modules[op.module]) or ""]
    for shared in dict.fromkeys(re.findall(r"\b(\w+)\.py\b", docs[0])):
        if shared == "__init__":
            docs.append(inspect.getdoc(sys.modules[op.module.rpartition(".")[0]]) or "")
        elif shared in files and files[shared].__name__ not in operators:
            docs.append(inspect.getdoc(files[shared]) or "")
    for doc in docs:
        yield from doc_parts(doc)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "ops")
