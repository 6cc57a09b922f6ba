"""Shows what the backend makes of the graphs of twenty public models: `python -m tools.gallery`.

Each is a small model of the family, unchanged, with its loss. docs/gallery.json gets how many operations its graph had,
and the graph after the rewriting as a list: the name of each operator of llmk, and between them numbers of others.
"""

import json
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.fx import GraphModule

from compile_tests.helpers.backend_checks import rewriting
from compile_tests.helpers.families import small_model, tokens
from llmk.compiler import Report
from llmk.compiler.patterns import name_of
from llmk.compiler.segments import Segment, segments
from llmk.compiler.trace import traced

RESULT = Path(__file__).resolve().parents[1] / "docs" / "gallery.json"
PUBLIC = (
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3Text", "Phi3"),
    *("Olmo2", "Olmoe", "GptOss", "DeepseekV3", "Cohere", "Glm4Moe", "Granite", "FalconH1", "GPTNeoX", "Starcoder2"),
)


def names(gm: GraphModule) -> list[str]:
    return [name for node in gm.graph.nodes if (name := name_of(node))]


def graphs_of(family: str) -> dict[str, Any]:
    """The number of operations before, and what is there after."""
    model, ids = small_model(family), tokens(2, 12)
    before, after = 0, list[str]()

    def look(gm: GraphModule) -> None:
        after.extend(names(gm))

    rewrite = rewriting(Report(), drop_logits=True, look=look)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal before
        before += sum(len(names(traced(gm, part))) for part in segments(gm) if isinstance(part, Segment))
        return rewrite(gm, inputs)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(input_ids=ids, labels=ids)
    return {"before": before, "after": shortened(after)}


def shortened(found: list[str]) -> list[str | int]:
    """Neighbours that are not llmk's as their number."""
    groups = groupby(found, lambda name: name if name.startswith("llmk::") else "")
    runs: list[str | int] = []
    for name, group in groups:
        members = list(group)
        runs += [name.removeprefix("llmk::")] * len(members) if name else [len(members)]
    return runs


def main() -> None:
    models = {}
    for family in PUBLIC:
        torch.manual_seed(0)
        models[family] = graphs_of(family)
        print(family, models[family]["before"], *models[family]["after"], flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in models.items())
    RESULT.write_text(f'{{\n "versions": {json.dumps(versions)},\n "models": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
