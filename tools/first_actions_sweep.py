"""Tells which first actions leave a fresh model right, for every mixture of transformers and ten other families.

`python -m tools.first_actions_sweep`, some hours of a core. Each family and way has a process of its own, each action a
fresh model. The results go to docs/first_actions.json, which the documentation shows.
"""

import argparse
import copy
import datetime
import json
import os
import signal
import warnings
from collections import Counter
from typing import Any

import torch
import transformers

from compile_tests.helpers.first_actions import ACTIONS, WAYS, NotRun, first_action, words
from tools.families_sweep import RESULT as FAMILIES
from tools.families_sweep import built, families
from tools.tiny_configs import CLASSES

RESULT = FAMILIES.with_name("first_actions.json")
OTHERS = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3", "granite", "cohere", "gpt_neox")
LONGEST = 300
"""Seconds for a case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", help="model types; the other results stay as they are")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--actions", nargs="*", choices=list(ACTIONS), default=list(ACTIONS))
    args = parser.parse_args()
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))  # Dynamo is imported once, for all processes
    kept = json.loads(RESULT.read_text())["families"] if RESULT.exists() else {}
    mixtures = mixtures_of_transformers()
    for kind in args.only or (*mixtures, *OTHERS):
        of_kind = kept.setdefault(kind, {})
        torch.manual_seed(0)
        model = built(getattr(transformers, families("causal")[kind]))
        for way in args.ways:
            if way != "experts_implementation" or kind in mixtures:
                found = in_process_of_its_own(model, way, args.actions)
                of_kind[way] = of_kind.get(way, {}) | found
                print(kind, way, dict(Counter(found.values())), sep="  ", flush=True)
        keep(kept)


def mixtures_of_transformers() -> list[str]:
    """The model types whose experts `tools.families_sweep` saw replaced."""
    found = json.loads(FAMILIES.read_text())["causal"]["families"]
    return sorted(kind for kind, one in found.items() if "experts" in one.get("replaced", {}))


def keep(found: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"date": datetime.date.today().isoformat(), "versions": versions, "families": found}
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


def in_process_of_its_own(model: Any, way: str, actions: list[str]) -> dict[str, str]:
    """Return for each action the word "right"; "not run: " and why not, without llmk; or what is wrong."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(write, "w") as out:
            for action in actions:
                signal.alarm(LONGEST)
                print(result_of(model, way, action), file=out, flush=True)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        found = dict(zip(actions, answers.read().splitlines(), strict=False))
    _, status = os.waitpid(child, 0)
    return dict.fromkeys(actions, f"died: {os.waitstatus_to_exitcode(status)}") | found


def result_of(model: Any, way: str, action: str) -> str:
    torch.compiler.reset()
    ids = torch.randint(3, CLASSES, (2, 12))
    try:
        return first_action(action, way, copy.deepcopy(model), {"input_ids": ids, "labels": ids}) or "right"
    except NotRun as why:
        return f"not run: {why}"
    except Exception as why:
        return f"not run: a plain step: {words(why)}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
