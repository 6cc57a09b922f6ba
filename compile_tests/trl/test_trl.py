"""`llmk.trl.patch`: TRL's trainers give the same losses and metrics with it, and the gradients come from llmk."""

import copy
import importlib
import math
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

trl = pytest.importorskip("trl")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

import llmk.trl  # noqa: E402
from compile_tests.helpers.families import small_model  # noqa: E402
from llmk.trl.logprobs import LogProbs  # noqa: E402

WORDS = [f"w{i}" for i in range(98)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def sentences(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, len(WORDS), (count, 6), generator=generator)
    return [" ".join(WORDS[i] for i in row) for row in rows.tolist()]


PAIRS = {"prompt": sentences(4, 0), "chosen": sentences(4, 1), "rejected": sentences(4, 2)}
UNPAIRED = {"prompt": sentences(4, 0), "completion": sentences(4, 1), "label": [True, False, True, False]}


def words_in(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [float(len(set(text.split())) + len(text) % 3) for text in completions]


TRAINERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sft": ("SFT", {"text": sentences(4, 0)}, {}, {}),
    "dpo": ("DPO", PAIRS, {}, {}),
    "kto": ("KTO", UNPAIRED, {"per_device_train_batch_size": 4}, {}),
    "grpo": (
        "GRPO",
        {"prompt": sentences(4, 0)},
        {"num_generations": 2, "max_completion_length": 5, "beta": 0.1},
        {"reward_funcs": words_in},
    ),
    "rloo": (
        "RLOO",
        {"prompt": sentences(4, 0)},
        {"num_generations": 2, "max_completion_length": 5, "beta": 0.1},
        {"reward_funcs": words_in},
    ),
}
"""The trainer, its data, and what else its configuration and itself are given."""


def trainer_of(kind: str, model: Any, tokenizer: Any, folder: Path, **config: Any) -> Any:
    name, data, more_config, more = TRAINERS[kind]
    options = {"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "seed": 3}
    options |= {"report_to": "none", "save_strategy": "no", "bf16": False, "use_cpu": True, **more_config, **config}
    args = getattr(trl, f"{name}Config")(output_dir=str(folder), **options)
    trainer = getattr(trl, f"{name}Trainer")
    return trainer(model, args=args, train_dataset=Dataset.from_dict(data), processing_class=tokenizer, **more)


def model_of(peft: bool, folder: Path) -> Any:
    """Loaded from a folder, as the reference will be."""
    small_model("Llama").save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    if peft:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    return model


CANCELLED = 4 * torch.finfo(torch.float32).eps * 5 * math.log(101)
"""The error that a difference of losses may have: advantages add up to zero, and each multiplies the exponential of a
difference between sums of 5 log-probabilities of about log(101), with a rounding of such a sum in four places."""
TIMES = ("runtime", "per_second", "step_time", "epoch", "flos", "time")


def logged(trainer: Any) -> list[dict[str, float]]:
    """The losses and metrics of each step, without those that are times."""
    transformers.set_seed(0)  # completions are sampled
    trainer.train()
    return [{k: v for k, v in step.items() if not any(t in k for t in TIMES)} for step in trainer.state.log_history]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the calls of llmk's function."""
    calls, apply = [], LogProbs.apply
    monkeypatch.setattr(LogProbs, "apply", lambda self, *args: calls.append(args) or apply(self, *args))
    return calls


@pytest.mark.parametrize("peft", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_losses_and_metrics(kind: str, peft: bool, tokenizer: Any, tmp_path: Path, calls: list[Any]):
    model = model_of(peft, tmp_path / "model")
    original = trainer_of(kind, copy.deepcopy(model), tokenizer, tmp_path)
    trainer = trainer_of(kind, model, tokenizer, tmp_path)
    report = llmk.trl.patch(trainer)
    assert set(report.heads) == ({"model"} if peft or kind == "sft" else {"model", "ref_model"})
    want, got = logged(original), logged(trainer)
    assert len(calls) == sum(count for count, _ in report.calls.values()) >= 2
    assert report.calls["model"][1] >= 2
    assert len(want) >= 2
    assert want[0]["loss"] != 0 or want[0]["grad_norm"] != 0
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=CANCELLED)
    for p, q in zip(trainer.model.parameters(), original.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("peft", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation(beta: float, peft: bool, tokenizer: Any, tmp_path: Path):
    """Accumulated, from a wider teacher with a soft cap, while completions have different lengths."""
    model, teacher = model_of(peft, tmp_path / "model"), small_model("Gemma2", hidden_size=48).eval()

    def trainer_for(model: Any) -> Any:
        config = trl.DistillationConfig(
            output_dir=str(tmp_path), max_completion_length=5, beta=beta, temperature=0.7, seed=3, max_steps=2,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1,
            report_to="none", save_strategy="no", bf16=False, use_cpu=True,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": sentences(4, 0)})
        return trl.DistillationTrainer(
            model, teacher_model=teacher, args=config, train_dataset=data, processing_class=tokenizer
        )

    original, trainer = trainer_for(copy.deepcopy(model)), trainer_for(model)
    report = llmk.trl.patch(trainer)
    with pytest.raises(RuntimeError, match="patched already"):
        llmk.trl.patch(trainer)
    want, got = logged(original), logged(trainer)
    assert report.calls["model"][1] >= 4
    assert "the divergence by fused_linear_jsd, called" in str(report)
    assert want[0]["loss"] != 0
    assert want[0]["entropy"] > 0
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    for p, q in zip(trainer.model.parameters(), original.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    report.unpatch()
    assert trainer._compute_loss.__func__ is trl.DistillationTrainer._compute_loss


def fused(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    model.zero_grad()
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    (output.loss + 0.1 * output.entropy.sum()).backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GraniteMoe", "Phi"])
def test_every_output_and_unpatch(family: str):
    """With a scale, a softcap and a bias too, and a temperature."""
    model = small_model(family)
    other = copy.deepcopy(model)
    for m in (model, other):
        add_fused_lm_head(m, temperature=0.7, outputs=ALL)
    ids = torch.randint(3, 101, (2, 7))
    labels = ids.masked_fill(ids % 3 == 0, -100)
    want = fused(model, ids, labels)
    forward = vars(model)["forward"].__func__
    before = forward.__code__, forward.__kwdefaults__
    report = llmk.trl.patch(model)
    words = "model: log-probabilities and entropy by linear_logprobs, called {} times, {} of them with gradients"
    assert str(report) == words.format(0, 0)
    for m in (model, other):  # the other one is not patched, and computes the same
        got = fused(m, ids, labels)
        for name in (*ALL, "loss"):
            torch.testing.assert_close(got[0][name], want[0][name], rtol=1e-4, atol=1e-5)
        for p, q in zip(got[1], want[1], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert str(report) == words.format(1, 1)
    with torch.no_grad():
        model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert str(report) == words.format(2, 1)
    assert vars(other)["forward"].__func__.__code__ is before[0]
    report.unpatch()
    assert (forward.__code__, forward.__kwdefaults__) == before
    assert "llmk" not in str(vars(other)["forward"].__func__.__code__.co_varnames)


def test_compiled_in_one_graph():
    """Counting calls does not break the graph, nor make another."""
    model = small_model("Llama")
    add_fused_lm_head(model)
    report = llmk.trl.patch(model)
    run = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(3, 101, (2, 7))
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = [run(input_ids=ids, labels=ids, fused_lm_head=True).loss for _ in range(3)]
    assert losses[0] == losses[2]
    assert report.calls == {"model": (1, 1)}


def test_no_labels_at_all():
    model = small_model("Llama")
    add_fused_lm_head(model, outputs=ALL)
    llmk.trl.patch(model)
    ids = torch.randint(3, 101, (2, 7))
    output, gradients = fused(model, ids, torch.full_like(ids, -100))
    assert float(output.loss) == 0
    assert not any(g.any() for g in gradients)


def test_under_what_accelerate_wraps_around_it(calls: list[Any]):
    """As `Accelerator.prepare_model` does for mixed precision."""
    convert = pytest.importorskip("accelerate.utils").convert_outputs_to_fp32
    model = small_model("Llama")
    add_fused_lm_head(model, outputs=ALL)
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)
    model.forward = MethodType(convert(model.forward.__func__), model)
    ids = torch.randint(3, 101, (2, 7))
    want, _ = fused(model, ids, ids)
    llmk.trl.patch(model)
    got, _ = fused(model, ids, ids)
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-2, atol=1e-2)  # of logits in bfloat16
    assert len(calls) == 1


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"trainer: expected a trainer of TRL 1\.16"):
        llmk.trl.patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got str"):
        llmk.trl.patch("trainer")
    model = small_model("Llama")
    add_fused_lm_head(model)
    llmk.trl.patch(model)
    with pytest.raises(RuntimeError, match="patched already"):
        llmk.trl.patch(model)
    model.lm_head.weight.ds_id = 0
    ids = torch.randint(3, 101, (2, 7))
    with pytest.raises(RuntimeError, match="partitioned by ZeRO-3"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("experimental.gkd.GKDTrainer", "llmk.losses.distill,"),
        ("experimental.gold.GOLDTrainer", "llmk.losses.distill,"),
        ("experimental.cpo.CPOTrainer", "llmk.losses.cpo,"),
        ("experimental.online_dpo.OnlineDPOTrainer", "llmk.losses.dpo,"),
        ("experimental.orpo.ORPOTrainer", "llmk.losses.orpo,"),
        ("trainer.reward_trainer.RewardTrainer", "llmk.losses,"),
    ],
)
def test_trainers_that_do_not_ask_for_the_head(path: str, instead: str, monkeypatch: pytest.MonkeyPatch):
    """They are refused by name, also where the class they come from puts a fused head into the model."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module, _, name = path.rpartition(".")
    trainer = object.__new__(getattr(importlib.import_module(f"trl.{module}"), name))
    trainer.model = small_model("Llama")
    add_fused_lm_head(trainer.model)
    with pytest.raises(TypeError, match=f"trainer: compute_loss of {name} does not call .*override it with {instead}"):
        llmk.trl.patch(trainer)


def test_overrides_that_lead_to_the_head_and_past_it(tokenizer: Any, tmp_path: Path):
    """`super().compute_loss` leads there. What does so by name alone warns at the end of training."""

    class Watched(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Unled(Watched):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss if self.args.max_steps else super().compute_loss(model, inputs, **kwargs)

    for trainer_class, warns in ((Watched, False), (Unled, True)):
        trainer = trainer_of("sft", model_of(False, tmp_path / "model"), tokenizer, tmp_path)
        trainer.__class__ = trainer_class
        report = llmk.trl.patch(trainer)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.train()
        told = [str(w.message) for w in seen if "no gradient came from llmk" in str(w.message)]
        assert len(told) == warns, told
        assert ("called 0 times" in str(report)) == warns
        report.unpatch()
        assert not any("WarnIfNeverCalled" in type(c).__name__ for c in trainer.callback_handler.callbacks)


def test_a_first_steps_ratio_is_1(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Log-probabilities without gradients, of the old policy, have the bits of those with gradients, of the new one."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)  # a CPU's rows keep bits
    trainer = trainer_of("grpo", model_of(False, tmp_path / "model"), tokenizer, tmp_path, num_iterations=2, beta=0.0)
    llmk.trl.patch(trainer)
    passes: list[tuple[bool, torch.Tensor]] = []
    original = trainer._get_per_token_logps_and_entropies

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results = original(*args, **kwargs)
        passes.append((torch.is_grad_enabled(), results[0].detach().clone()))
        return results

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", recorded)
    logged(trainer)
    assert [with_gradients for with_gradients, _ in passes] == [False, True, True]
    old, first, second = (logps for _, logps in passes)
    assert torch.equal((first - old).exp(), torch.ones_like(old))
    assert not torch.equal(second, old)  # after a step of the optimizer
