"""The estimate of `llmk.estimate` beside the training steps that were measured."""

from collections.abc import Iterator
from typing import NamedTuple

import transformers

from benchmarks.estimate_figures import WAYS, read
from benchmarks.models import MODELS
from llmk.estimate import Sizes, estimate, sizes_of

STEPS = ("train-step-h200.json", "train-step-moe-h200.json")
OF_STEPS = {"PyTorch": "eager", "PyTorch compiled": "compiled"}
"""The names of `benchmarks.train_step` for those of the estimate, where they differ."""


class Check(NamedTuple):
    """A measured training step beside its estimate."""

    model: str
    way: str
    gib: float
    measured_gib: float
    ms: float
    measured_ms: float

    @property
    def memory_off(self) -> float:
        return self.gib / self.measured_gib - 1

    @property
    def time_off(self) -> float:
        return self.ms / self.measured_ms - 1


def checks() -> Iterator[Check]:
    """Every step of models that were measured in a way that is estimated."""
    for row in (row for name in STEPS for row in read(name)["rows"] if "error" not in row):
        way = next((way for way in WAYS if OF_STEPS.get(way, way) == row["variant"]), None)
        if way is not None:
            tokens = row["batch_size"] * row["seq_len"]
            step = estimate(sizes_of_model(row["model"]), tokens, row["seq_len"])[way]["step"]
            yield Check(row["model"], way, step["gib"], row["peak_gib"], step["ms"], row["ms"])


def sizes_of_model(name: str) -> Sizes:
    """The sizes of one of MODELS, from the configuration that transformers makes."""
    model = MODELS[name]
    config = getattr(transformers, model.config)(**model.sizes, tie_word_embeddings=True)
    return sizes_of(config.to_dict())
