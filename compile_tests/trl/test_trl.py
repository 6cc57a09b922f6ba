"""`llmk.trl.patch` on TRL's fused head: every output and gradient, what is refused, and what it costs a graph."""

import copy
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

trl = pytest.importorskip("trl")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from trl.trainer.utils import add_fused_lm_head  # noqa: E402

import llmk.transformers  # noqa: E402
import llmk.trl  # noqa: E402
from compile_tests.helpers.families import small_model  # noqa: E402
from compile_tests.helpers.trl_trainers import make_trainer, train  # noqa: E402
from llmk.trl.logprobs import LogProbs  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the calls of llmk's function."""
    calls, apply = [], LogProbs.apply
    monkeypatch.setattr(LogProbs, "apply", lambda self, *args: calls.append(args) or apply(self, *args))
    return calls


def fused(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    model.zero_grad()
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    (output.loss + 0.1 * output.entropy.sum()).backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GraniteMoe", "Phi"])
def test_every_output_and_unpatch(family: str):
    """The outputs are right with a scale, a softcap and a bias too, and a temperature."""
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
    """The wrappers are those of `Accelerator.prepare_model` for mixed precision."""
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


def test_overrides_that_lead_to_the_head_and_past_it(tmp_path: Path):
    """`super().compute_loss` leads there. What does so by name alone warns at the end of training."""

    class Watched(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Unled(Watched):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss if self.args.max_steps else super().compute_loss(model, inputs, **kwargs)

    for trainer_class, warns in ((Watched, False), (Unled, True)):
        trainer = make_trainer("sft", tmp_path)
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


@pytest.mark.parametrize("kind", ["sft", "distillation"])
def test_unpatch_twice(kind: str, tmp_path: Path):
    trainer = make_trainer(kind, tmp_path)
    for _ in range(2):
        report = llmk.trl.patch(trainer)
        report.unpatch()
        report.unpatch()


def test_a_hybrid_trains_without_padding(tmp_path: Path):
    """The losses are those with padding: TRL's collator says where sequences begin, and the patched layers listen."""
    losses = []
    for padding_free in (True, False):
        model = small_model("Qwen3Next", use_cache=False)
        llmk.transformers.patch(model)
        trainer = make_trainer("sft", tmp_path, model=model, padding_free=padding_free, max_length=None)
        losses.append([step["loss"] for step in train(trainer) if "loss" in step])
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)


def test_a_first_steps_ratio_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Log-probabilities without gradients, of the old policy, have the bits of those with gradients, of the new one."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)  # a CPU's rows keep bits
    trainer = make_trainer("grpo", tmp_path, beta=0.0, max_steps=2)
    llmk.trl.patch(trainer)
    passes: list[tuple[bool, torch.Tensor]] = []
    original = trainer._get_per_token_logps_and_entropies

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results = original(*args, **kwargs)
        passes.append((torch.is_grad_enabled(), results[0].detach().clone()))
        return results

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", recorded)
    train(trainer)
    assert [with_gradients for with_gradients, _ in passes] == [False, True, True]
    old, first, second = (logps for _, logps in passes)
    assert torch.equal((first - old).exp(), torch.ones_like(old))
    assert not torch.equal(second, old)  # after a step of the optimizer


def test_policy_and_reference_are_patched_alike(tmp_path: Path):
    """The rewards of a first step are 0 in bfloat16, where the models round."""
    trainer = make_trainer("dpo", tmp_path, max_steps=1, model_init_kwargs={"dtype": "bfloat16"})
    callback = llmk.transformers.PatchCallback()
    trainer.add_callback(callback)
    first = next(step for step in train(trainer) if "rewards/chosen" in step)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert callback.report is not None
    assert callback.reference_report is not None
    assert callback.reference_report.model is trainer.ref_model
    assert callback.reference_report.replaced["norm"] == callback.report.replaced["norm"] > 0
