"""Every family of transformers, patched: is it still right, and what was replaced?

`python -m tools.families_sweep`, most of an hour of a core. For each model type of transformers' mappings that builds
from a tiny configuration, in a process of its own: loss and gradients in training, and logits in evaluation, patched
and unpatched. The results go to docs/families.json, which the documentation shows.
"""

import argparse
import copy
import datetime
import json
import os
import resource
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from llmk.transformers import Report, patch
from tools.tiny_configs import CLASSES, tiny_config

RESULT = Path(__file__).resolve().parents[1] / "docs" / "families.json"

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}

MEMORY = 12 << 30
LARGEST = 20_000_000
"""Parameters of a model that counts as tiny."""


def families(mapping: str) -> dict[str, str]:
    """Model types and the names of their classes."""
    classes = getattr(modeling_auto, MAPPINGS[mapping])
    return {kind: name if isinstance(name, str) else name[0] for kind, name in classes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("mappings", nargs="*", metavar="MAPPING", help=f"of {', '.join(MAPPINGS)}; all without")
    parser.add_argument("--only", nargs="*", help="model types; the other results stay as they are")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for a family")
    args = parser.parse_args()
    if unknown := set(args.mappings) - set(MAPPINGS):
        parser.error(f"mappings: expected some of {', '.join(MAPPINGS)}, got {', '.join(sorted(unknown))}")
    for mapping in args.mappings or MAPPINGS:
        names = families(mapping)
        found = {}
        for kind in args.only or names:
            if kind in names:
                found[kind] = in_process_of_its_own(names[kind], args.timeout)
                print(mapping, kind, *line(found[kind]), sep="  ", flush=True)
        print(mapping, dict(Counter(one["outcome"] for one in found.values())))
        keep(mapping, found, whole=args.only is None)


def line(one: dict[str, Any]) -> list[str]:
    left = [text for text in one.get("left", []) if text.startswith("loss")]
    loss = left or (["loss fused"] if "loss" in one.get("replaced", {}) else [])
    return [one["outcome"], one["why"], *loss]


def keep(mapping: str, found: dict[str, Any], whole: bool) -> None:
    """Put the results of one mapping, or of some of its families, into the file."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if not whole:
        found = kept.get(mapping, {}).get("families", {}) | found
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    kept[mapping] = {"date": datetime.date.today().isoformat(), "versions": versions, "families": found}
    RESULT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def in_process_of_its_own(class_name: str, timeout: int) -> dict[str, Any]:
    """The result of one family, whatever becomes of the process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(timeout)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(write, "w") as out:
            json.dump(result_of(class_name), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    why = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status}"
    return {"outcome": "died", "why": why}


def result_of(class_name: str) -> dict[str, Any]:
    """The result for one family: outcome, why, what was replaced, what was left and why."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model = built(getattr(transformers, class_name))
    except Exception as error:
        return {"outcome": "not built", "why": words(error)}
    ids = torch.randint(3, CLASSES, (2, 12))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    original = copy.deepcopy(model)
    try:
        want, again = (outcome(original, ids, labels) for _ in range(2))
    except Exception as error:
        return {"outcome": "not run", "why": f"from text alone: {words(error)}"}
    if difference(again, want):
        return {"outcome": "not run", "why": "two runs of the unpatched differ"}
    try:
        report = patch(model)
        got = outcome(model, ids, labels)
    except Exception as error:
        return {"outcome": "crashed", "why": words(error)}
    why = difference(got, want)
    if why:
        exact = outcome(original.double(), ids, labels)
        why = why if further_away(got, want, exact) else ""
    return {"outcome": "wrong" if why else "equal", "why": why, **shown(report)}


def built(model_class: Any) -> Any:
    """A tiny model in training mode, of which no norm is at its start."""
    config = tiny_config(model_class.config_class)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count // 1_000_000} million parameters")
    model = model_class(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


Outcome = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def outcome(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Outcome:
    """Loss, logits in evaluation, gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model.train()(input_ids=ids, labels=labels).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.numel()}
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, labels=labels).logits
    return loss.detach(), logits, gradients


def difference(got: Outcome, want: Outcome) -> str:
    """Tell where two outcomes differ by more than float32 explains, or nothing."""
    if not torch.isclose(got[0], want[0], rtol=1e-5, atol=1e-7, equal_nan=True):
        return f"loss {float(got[0]):.7g}, unpatched {float(want[0]):.7g}"
    if distance(got[1], want[1]) > 1e-4:
        return "logits in evaluation"
    largest = max((float(g.abs().max()) for g in want[2].values()), default=0.0)
    for name in got[2].keys() | want[2].keys():
        a, b = (g.get(name) for g in (got[2], want[2]))
        if a is None or b is None:
            if float((b if a is None else a).abs().max()) > 1e-6 * largest:  # type: ignore[union-attr]
                return f"gradient of {name} missing"
        elif float((a - b).abs().max()) > 1e-5 * float(b.abs().max()) + 1e-6 * largest:
            return f"gradient of {name}"
    return ""


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to the largest entry of b."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def further_away(got: Outcome, want: Outcome, exact: Outcome) -> bool:
    """True if the patched model is further from float64 than the unpatched, by more than rounding elsewhere does."""
    pairs = [(got[0], want[0], exact[0]), (got[1], want[1], exact[1])]
    pairs += [(got[2][n], want[2][n], exact[2][n]) for n in got[2].keys() & want[2].keys() & exact[2].keys()]
    largest = max(float(g.abs().max()) for g in exact[2].values())

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x.double() - y.double()).abs().max())

    return any(error(g, e) > 4 * error(w, e) + 1e-6 * largest for g, w, e in pairs)


def shown(report: Report) -> dict[str, Any]:
    left = sorted({f"{e.kind}, {e.place}: {e.text}" for e in report.entries if not e.replaced})
    return {"replaced": report.replaced, "left": left}


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    main()
