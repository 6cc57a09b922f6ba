"""`python -m llmk.estimate CONFIG_OR_SIZES --tokens N`: memory and time of a training step, with llmk and without.

CONFIG_OR_SIZES is a `config.json` of transformers, a folder with one, or sizes such as
`hidden=2048,intermediate=8192,layers=16,heads=32,kv_heads=8,vocabulary=128256`.

Nothing runs: times are scaled from measured tables, and memory is counted. `llmk.estimate` has the formula, and the
documentation compares it with measured training steps. The exit status is 2 if the file does not exist, or is of a
model that the formula does not cover.
"""

import argparse
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llmk.estimate
from llmk.estimate import FIGURES, PARTS, WAYS, Sizes, estimate, parameters, sizes_from, sizes_of

WIDTH = 80
MEMORY_GIB = {"h100": 79, "h200": 139}
"""The memory that PyTorch reports for each GPU."""
TITLES = {"rest": "the rest", "step": "step, in all"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llmk.estimate",
        description="Estimate the memory and time of a training step of a model.",
        epilog=llmk.estimate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="CONFIG_OR_SIZES", help="a config.json, its folder, or hidden=2048,layers=16,..."
    )
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="tokens of a step on one GPU")
    parser.add_argument(
        "--sequence", type=int, metavar="S", help="tokens of a sequence (default: 2048, or N if it is less)"
    )
    parser.add_argument("--gpu", choices=sorted(FIGURES["gpus"]), default="h200", help="the GPU (default: h200)")
    parser.add_argument(
        "--checkpointing", action="store_true", help="each layer is computed again in the backward pass"
    )
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"argument --tokens: expected at least 1, got {options.tokens}")
    options.sequence = options.sequence or min(2048, options.tokens)
    if not 1 <= options.sequence <= options.tokens:
        parser.error(f"argument --sequence: expected 1 to {options.tokens}, the tokens, got {options.sequence}")
    try:
        options.sizes = sizes(options.model)
    except (OSError, ValueError) as error:
        parser.error(f"argument CONFIG_OR_SIZES: {error}")
    return options


def sizes(model: str) -> Sizes:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if "=" in model and not path.exists():
        return sizes_from(model)
    return sizes_of(with_defaults(json.loads(path.read_text())))


def with_defaults(config: Any) -> Any:
    """Add what a configuration leaves to the defaults of its class, as Gemma-3-4b's does, if transformers is there."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind is None or importlib.util.find_spec("transformers") is None:
        return config
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[kind].from_dict(config).to_dict()
    except Exception:  # of a type that it does not know, or with values that it refuses: what is there is looked at
        return config


def lines(options: argparse.Namespace) -> Iterator[str]:
    found = estimate(options.sizes, options.tokens, options.sequence, options.gpu, options.checkpointing)
    measured = FIGURES["gpus"][options.gpu]
    yield (
        f"{options.tokens:,} tokens in sequences of {options.sequence:,}, {parameters(options.sizes) / 1e9:.2f}e9 "
        f"parameters, bfloat16, AdamW"
    )
    yield f"An estimate from tables of {measured['date']}, one {measured['device']}"
    yield ""
    yield f"{'':<12}" + "".join(f"{way:>17}" for way in WAYS)
    yield f"{'':<12}" + f"{'GiB':>9}{'ms':>8}" * len(WAYS)
    for part in (*PARTS, "rest", "step"):
        if part != "step" and not any(found[way][part]["gib"] for way in WAYS):
            continue
        yield f"{TITLES.get(part, part):<12}" + "".join(cells(found[way][part]) for way in WAYS)
    yield ""
    too_large = [way for way in WAYS if found[way]["step"]["gib"] > MEMORY_GIB[options.gpu]]
    if too_large:
        yield from textwrap.wrap(
            f"Does not fit the {MEMORY_GIB[options.gpu]} GiB of one {measured['device']}: {', '.join(too_large)}.",
            WIDTH,
        )
    for note in notes(options.sizes, options.tokens, options.gpu, options.checkpointing):
        yield from textwrap.wrap(note, WIDTH)


def cells(part: dict[str, Any]) -> str:
    ms = "-" if part["ms"] is None else f"{part['ms']:.1f}"
    return f"{part['gib']:>9.2f}{ms:>8}"


def notes(sizes: Sizes, tokens: int, gpu: str, checkpointing: bool) -> Iterator[str]:
    """Return what the figures leave out, and what was assumed."""
    norms = f"{sizes.norms} norms a layer" + (", and of queries and keys" if sizes.qk_norm else "")
    yield f"Assumed: {norms}; {'' if checkpointing else 'no '}activation checkpointing; every token counts."
    if checkpointing:
        yield (
            "Checkpoints are the inputs of all layers, and the time of computing each again; beside them one layer is "
            "in memory. No step with checkpointing was measured."
        )
    yield (
        "The rest is the layers' matrix products, attention, the optimizer, and weights and moments: the same for all. "
        "The step's memory is its peak."
    )
    if gpu == "h200":
        yield "Compiled PyTorch is without the attention mask that transformers materializes, which takes longer."
    else:
        yield "A dash was not measured on this GPU. The memory does not depend on it."
    if sizes.vocabulary % 8:
        yield "The vocabulary is no multiple of 8: plain PyTorch's products take several times as long as said here."


def main(arguments: Sequence[str] | None = None) -> int:
    for line in lines(parse(arguments)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
