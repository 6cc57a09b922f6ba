"""TRL's trainers on a tiny model and a few sentences: what they are given, and what a run of them logs."""

import importlib
import os
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from compile_tests.helpers.families import small_model

WORDS = [f"w{i}" for i in range(98)]
SPECIAL = ["<pad>", "<bos>", "<eos>"]
STEPS = 3


@cache
def tokenizer() -> Any:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def sentences(seed: int, lengths: tuple[int, ...] = (6, 3, 5, 8)) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randint(0, len(WORDS), (length,), generator=generator) for length in lengths)
    return [" ".join(WORDS[i] for i in row.tolist()) for row in rows]


def characters_in(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


class Rollouts:
    """A rollout worker as an AsyncGRPOTrainer calls it; all samples are there from the start."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        generator = np.random.default_rng(0)
        prompts = generator.integers(len(SPECIAL), 101, (4 * STEPS, 3))
        for i in range(8 * STEPS):  # two completions of each prompt
            ids = np.concatenate([prompts[i // 2], generator.integers(len(SPECIAL), 101, 2 + i % 4)])
            logprobs = generator.normal(-4.6, 0.3, len(ids)).astype(np.float32)
            completion = np.arange(len(ids)) >= 3
            self.rollout_buffer.put(
                RolloutSample([], [], ids, completion, logprobs, (-1.0) ** i, 0, i // 2, {"reward": float(i)})
            )

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("no sample is left")


class NoTransfer:
    """A transfer of weights to a server, as an AsyncGRPOTrainer calls it; there is no server."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass


def attention_of_segments(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """`flash_attn_varlen_func`, whose kernel runs on a GPU: the last query of a segment sees all of its keys."""
    heads, bounds = q.shape[1], [zip(s.tolist(), s.tolist()[1:], strict=False) for s in (starts_q, starts_k)]
    outputs = []
    for (a, b), (c, d) in zip(*bounds, strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        keys, values = (x.repeat_interleave(heads // x.shape[0], 0) for x in (keys, values))
        sees = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, sees, scale=softmax_scale))
    return torch.cat(outputs, 1).transpose(0, 1)


def run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give AsyncGRPOTrainer in PyTorch what it takes from the package `kernels`, and no name of a GPU to look up."""
    attention = SimpleNamespace(flash_attn_varlen_func=attention_of_segments)
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: attention)
    monkeypatch.setattr(f"{AsyncGRPOTrainer.__module__}.get_peak_flops_per_device", lambda *_: None)


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, by where it and its configuration are found, and what both are given.

    Attributes:
        wants: A function of no arguments that returns what the trainer is given besides model, data and tokenizer.
    """

    trainer: str
    data: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    wants: Callable[[], dict[str, Any]] = dict
    settings: str = ""

    def found(self) -> tuple[type, type]:
        module, _, name = self.trainer.rpartition(".")
        settings = self.settings or f"{module}.{name.removesuffix('Trainer')}Config"
        of_settings, _, settings_name = settings.rpartition(".")
        return (
            getattr(importlib.import_module(module), name),
            getattr(importlib.import_module(of_settings), settings_name),
        )


PROMPTS = {"prompt": sentences(0)}
PAIRS = {**PROMPTS, "chosen": sentences(1), "rejected": sentences(2)}
UNPAIRED = {**PROMPTS, "completion": sentences(1), "label": [True, False, True, False]}
SAMPLED = {"num_generations": 2, "num_iterations": 2, "max_completion_length": 5, "beta": 0.1}
DISTILLED = {"max_completion_length": 5, "temperature": 0.7}


def rewards() -> dict[str, Any]:
    return {"reward_funcs": characters_in}


def teacher() -> dict[str, Any]:
    """Wider than the student, with a soft cap."""
    return {"teacher_model": small_model("Gemma2", hidden_size=48).eval()}


def rollouts() -> dict[str, Any]:
    return {"reward_funcs": characters_in, "rollout_worker": Rollouts(), "weight_transfer": NoTransfer()}


KINDS: dict[str, Kind] = {
    "sft": Kind("trl.SFTTrainer", {"text": sentences(0)}),
    "sft_dft": Kind("trl.SFTTrainer", {"text": sentences(0)}, {"loss_type": "dft"}),
    "sft_packing": Kind("trl.SFTTrainer", {"text": sentences(0)}, {"packing": True, "max_length": 16}),
    "sft_padding_free": Kind("trl.SFTTrainer", {"text": sentences(0)}, {"padding_free": True, "max_length": None}),
    "dpo": Kind("trl.DPOTrainer", PAIRS),
    "dpo_padding_free": Kind("trl.DPOTrainer", PAIRS, {"padding_free": True}),
    "dpo_ref_model": Kind("trl.experimental.bema_for_ref_model.DPOTrainer", PAIRS, settings="trl.DPOConfig"),
    "kto": Kind("trl.KTOTrainer", UNPAIRED, {"per_device_train_batch_size": 4}),
    "grpo": Kind("trl.GRPOTrainer", PROMPTS, SAMPLED, rewards),
    "rloo": Kind("trl.RLOOTrainer", PROMPTS, SAMPLED, rewards),
    "gmpo": Kind("trl.experimental.gmpo.GMPOTrainer", PROMPTS, SAMPLED, rewards),
    "async_grpo": Kind(
        "trl.experimental.async_grpo.AsyncGRPOTrainer",
        PROMPTS,
        {"num_generations": 2, "token_budget": 0, "dtype": "float32"},
        rollouts,
    ),
    "distillation": Kind("trl.DistillationTrainer", PROMPTS, {**DISTILLED, "beta": 0.5}, teacher),
    "distillation_forward": Kind("trl.DistillationTrainer", PROMPTS, {**DISTILLED, "beta": 0.0}, teacher),
    "distillation_reverse": Kind("trl.DistillationTrainer", PROMPTS, {**DISTILLED, "beta": 1.0}, teacher),
}
"""Trainers that `llmk.trl.patch` takes, by a name for the test."""


@cache
def saved_model(folder: Path) -> str:
    """The folder of a model, from which each trainer loads its own and its reference's."""
    small_model("Llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def make_trainer(kind: str, folder: Path, peft: bool = False, model: Any = None, **config: Any) -> Any:
    """Make a trainer of a model, or of one in `folder`; with `peft` a LoRA in attention and MLP is what it trains."""
    given = KINDS[kind]
    trainer, settings = given.found()
    options = {"per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 1, "optim": "sgd"}
    options |= {
        "learning_rate": 0.1,
        "seed": 3,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
    }
    args = settings(output_dir=str(folder / "out"), **options | dict(given.config) | config)
    adapter = {"peft_config": LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")} if peft else {}
    transformers.set_seed(0)  # adapters are drawn
    return trainer(
        model=saved_model(folder) if model is None else model,
        args=args,
        train_dataset=Dataset.from_dict(dict(given.data)),
        processing_class=tokenizer(),
        **given.wants(),
        **adapter,
    )


TIMES = ("runtime", "per_second", "step_time", "epoch", "flos", "time", "perf/")


def train(trainer: Any) -> list[dict[str, float]]:
    """Train, and return losses and metrics of each step, without those that are times."""
    transformers.set_seed(0)  # completions are sampled
    trainer.train()
    return [{k: v for k, v in step.items() if not any(t in k for t in TIMES)} for step in trainer.state.log_history]
