"""The fused loss in models whose projection is nested, whose labels are not shifted, or that add a bias."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from compile_tests.helpers.breadth import some_of  # noqa: E402
from compile_tests.helpers.families import assert_same_training, tokens  # noqa: E402
from llmk.transformers import patch  # noqa: E402
from tools.families_sweep import built, difference, further_away, outcome  # noqa: E402

CLASSES = {
    "BertForMaskedLM": "cls.predictions.decoder",
    "BertLMHeadModel": "cls.predictions.decoder",
    "RobertaForMaskedLM": "lm_head.decoder",
    "AlbertForMaskedLM": "predictions.decoder",
    "ElectraForMaskedLM": "generator_lm_head",
    "DistilBertForMaskedLM": "vocab_projector",
    "ModernBertForMaskedLM": "decoder",
    "OPTForCausalLM": "lm_head",
    "Gemma4ForCausalLM": "lm_head",
    "BartForConditionalGeneration": "lm_head",
    "MBartForConditionalGeneration": "lm_head",
    "T5ForConditionalGeneration": "lm_head",
    "BartForCausalLM": "lm_head",
}
"""Models, and the names of their projections."""


pytestmark = pytest.mark.usefixtures("on_device")


def pair(name: str) -> tuple[Any, Any]:
    """A model whose every parameter and bias is random, patched, and the same one unpatched."""
    model = built(getattr(transformers, name))
    if "final_logits_bias" in dict(model.named_buffers()):
        model.final_logits_bias.normal_()
    original = copy.deepcopy(model)
    assert patch(model).replaced["loss"] == 1
    return model, original


def batch() -> dict[str, torch.Tensor]:
    ids = tokens(2, 9).clamp(max=98)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


@pytest.mark.parametrize("name", CLASSES)
def test_losses_gradients_and_logits(name: str):
    """The patched model is as near to float64 in float32 as unpatched."""
    model, original = pair(name)
    inputs = batch()
    assert model(**inputs).logits is None
    got, want = (outcome(m, *inputs.values()) for m in (model, original))
    assert not difference(got, want) or not further_away(got, want, outcome(original.double(), *inputs.values()))
    assert model.get_submodule(CLASSES[name]) is model.get_output_embeddings()


@pytest.mark.parametrize(
    "name", some_of(["BertForMaskedLM", "BartForConditionalGeneration"], ["BartForConditionalGeneration"])
)
def test_compiled_as_one_graph(name: str):
    model, original = pair(name)
    counter = CompileCounterWithBackend("eager")
    assert_same_training(model, original, run=torch.compile(model, backend=counter, fullgraph=True), **batch())
    assert counter.frame_count == 1


def test_copies_of_a_nested_head_and_unpatch():
    model, original = pair("BertForMaskedLM")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert assert_same_training(twin, original, **batch()).logits is None
    patch(model).unpatch()
    assert type(model.cls) is type(original.cls)
    assert assert_same_training(model, original, **batch()).logits is not None


def hook_the_head(model: Any) -> None:
    model.cls.predictions.register_forward_hook(lambda module, args, output: 2 * output)


def replace_the_head(model: Any) -> None:
    torch.manual_seed(0)
    model.cls = nn.Linear(32, 99)


@pytest.mark.parametrize("change", [hook_the_head, replace_the_head])
def test_a_nested_head_that_changed(change: Any):
    model, original = pair("BertForMaskedLM")
    change(model), change(original)
    with pytest.warns(UserWarning, match="the loss comes from logits, as before patch"):
        assert_same_training(model, original, **batch())


def test_another_loss_type():
    """transformers chooses the loss function by it."""
    model, original = pair("LlamaForCausalLM")
    model.loss_type = original.loss_type = "ForMaskedLM"
    assert assert_same_training(model, original, **batch()).logits is not None


def test_another_criterion():
    model, original = pair("DistilBertForMaskedLM")
    for m in (model, original):
        m.mlm_loss_fct = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert assert_same_training(model, original, **batch()).logits is not None


def test_a_resized_vocabulary_brings_its_bias():
    model, original = pair("BartForConditionalGeneration")
    for m in (model, original):
        torch.manual_seed(0)
        m.resize_token_embeddings(120)
    assert model.final_logits_bias.shape == (1, 120)
    assert assert_same_training(model, original, **batch()).logits is None


class SomeRows(transformers.LlamaForCausalLM):
    """A model whose loss leaves the first token out."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        loss = None if labels is None else nn.CrossEntropyLoss()(logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Smoothed(transformers.LlamaForCausalLM):
    """A model whose loss has an option."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        loss = None if labels is None else criterion(logits.view(-1, logits.shape[-1]), labels.view(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Added(transformers.LlamaForCausalLM):
    """A model whose loss has a second term."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        loss = None
        if labels is not None:
            criterion = nn.CrossEntropyLoss()
            loss = criterion(logits.view(-1, logits.shape[-1]), labels.view(-1)) + 0.1 * logits.square().mean()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Kept(transformers.LlamaForCausalLM):
    """A model that has its logits for somebody else."""

    def forward(self, input_ids=None, labels=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        self.last_logits = logits
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class AddedAtTimes(transformers.LlamaForCausalLM):
    """A model whose loss has a second term where a teacher is given."""

    def forward(self, input_ids=None, labels=None, teacher=None, **kwargs):  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids)[0])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        if teacher is not None:
            loss += (logits - teacher).square().mean()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (SomeRows, "takes a part of the logits"),
        (Smoothed, r"neither self.loss_function nor nn.CrossEntropyLoss\(\)"),
        (Added, "uses its logits for more than the loss: loss = criterion"),
        (Kept, "uses its logits for more than the loss: self.last_logits = logits"),
        (AddedAtTimes, r"uses its logits for more than the loss: loss \+= \(logits - teacher\)"),
        ("MobileBertForMaskedLM", "does not just return what its decoder gives"),
        ("ProphetNetForCausalLM", "takes a part of the logits"),
        ("Blip2ForConditionalGeneration", "does not call self.language_model once"),
    ],
)
def test_what_is_left_and_why(name: Any, reason: str):
    config = built(transformers.LlamaForCausalLM).config
    model = built(getattr(transformers, name)) if isinstance(name, str) else name(config).train()
    left = patch(model).left[""]
    assert re.search(reason, left), left
