"""Operators that the backend finds in a small model of each family of transformers, and in models that are nobody's.

`python -m tools.backend_sweep`, three minutes of a core. The table goes to docs/found.txt, which the documentation
shows. What is there is counted while the unchanged model runs: calls of modules that are called a norm, of modules with
a gate and an up projection, of functions that are called after rotation, of convolutions with a group for each channel,
and the loss. Of attention it is the calls in the compiled graphs, and found are those that no mask keeps from the fast
kernels.
"""

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch import nn
from torch.fx import GraphModule

from compile_tests.helpers.backend_checks import rewritten
from compile_tests.helpers.families import FAMILIES, small_model, tokens
from compile_tests.helpers.plain_models import MODELS
from llmk.compiler import Report

RESULT = Path(__file__).resolve().parents[1] / "docs" / "found.txt"
KINDS = {
    "norms": ("rms_norm", "add_rms_norm", "rms_norm_gated", "layer_norm"),
    "gated units": ("swiglu", "geglu", "moe_experts"),
    "rotations": ("rope",),
    "short convolutions": ("causal_conv1d",),
    "loss": ("fused_linear_ce",),
}
ATTENTION = "attention without a mask"
ROTATION = re.compile(r"_?apply_.*rot")


def counted(run: Callable[[], Any]) -> Counter[str]:
    """The calls of each kind while something runs; of a rotation inside a rotation the outer."""
    found: Counter[str] = Counter()
    inside = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        name, step = frame.f_code.co_name, {"call": 1, "return": -1}.get(event, 0)
        if ROTATION.match(name):
            found["rotations"] += step == 1 and inside == 0
            inside += step
        elif step == 1 and name == "causal_conv1d_fn":
            found["short convolutions"] += 1
        elif step == 1 and name == "forward" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            found["norms"] += "Norm" in type(owner).__name__
            found["gated units"] += has_gate(owner)
            found["short convolutions"] += isinstance(owner, nn.Conv1d) and owner.groups > 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found + Counter({"loss": 1})


def has_gate(module: nn.Module) -> bool:
    """Return True if it is a feed-forward layer with a gate, or all experts of a layer."""
    names = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    return {"gate_proj", "up_proj"} <= names or "gate_up_proj" in names or {"w1", "w2", "w3"} <= names


@dataclass
class Found:
    """The operators found in a model, how many there are of each kind, and which calls of attention have no mask."""

    report: Report = field(default_factory=Report)
    there: Counter[str] = field(default_factory=Counter)
    attention: list[bool] = field(default_factory=list)

    def look(self, gm: GraphModule) -> None:
        """Look at a graph that has been rewritten."""
        for node in gm.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                options = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | node.kwargs
                self.attention.append(options.get("attn_mask") is None)

    def cells(self) -> list[tuple[int, int]]:
        """Return for each kind how many were found and how many are there: all that were found, at least."""
        found = {kind: sum(self.report.replaced.get(name, 0) for name in names) for kind, names in KINDS.items()}
        counts = [(found[kind], max(self.there[kind], found[kind])) for kind in KINDS]
        return [*counts, (sum(self.attention), len(self.attention))]


def of_family(family: str) -> Found:
    model, ids, found = small_model(family), tokens(2, 12), Found()
    found.there = counted(lambda: model(input_ids=ids, labels=ids))
    rewritten(model, found.report, drop_logits=True, look=found.look)(input_ids=ids, labels=ids)
    return found


def of_nobody(name: str) -> Found:
    example, found = MODELS[name], Found()
    rewritten(example.model(), found.report, look=found.look)(*example.inputs())
    for kind, names in KINDS.items():
        found.there[kind] = sum(example.found.get(operator, 0) for operator in names)
    return found


def table(rows: dict[str, list[tuple[int, int]]]) -> str:
    kinds = [*KINDS, ATTENTION]
    lines = [f"| | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{got} of {all_}' if all_ else '-' for got, all_ in row)} |")
    sums = [[sum(row[i][j] for row in rows.values()) for j in range(2)] for i in range(len(kinds))]
    lines.append(f"| **all** | {' | '.join(f'{100 * got / all_:.0f}%' for got, all_ in sums)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="families; without them all, and the table is kept")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAMILIES) - set(MODELS):
        parser.error(f"names: expected some of {', '.join([*FAMILIES, *MODELS])}, got {', '.join(sorted(unknown))}")
    rows = {}
    for name in args.names or sorted([*FAMILIES, *MODELS]):
        torch.manual_seed(0)
        found = of_family(name) if name in FAMILIES else of_nobody(name)
        rows[name] = found.cells()
        kinds = zip([*KINDS, ATTENTION], rows[name], strict=True)
        print(name, *(f"{kind} {got}/{all_}" for kind, (got, all_) in kinds), sep="  ", flush=True)
        if args.names:
            print(found.report)
    if not args.names:
        RESULT.write_text(f"torch {torch.__version__}, transformers {transformers.__version__}:\n\n{table(rows)}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
