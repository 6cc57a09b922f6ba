"""Uses of the logits in a model's forward: the loss is fused where all are known, and no argument makes logits."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

from compile_tests.helpers.families import assert_same_training, small_model, tokens  # noqa: E402
from llmk.transformers import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


class Model(transformers.LlamaForCausalLM):
    """A model with what the forwards below read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale, self.coefficient, self.table = 2.0, 0.0, {"scale": 2.0}
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.seen: list[Any] = []

    def hidden(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids)[0]


class InPlace(Model):
    def forward(self, input_ids=None, labels=None, temperature=2.0):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        logits /= temperature
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class ByALocal(Model):
    def forward(self, input_ids=None, labels=None, power=1):  # type: ignore[override]
        factor = 2.0**power
        logits = factor * self.lm_head(self.hidden(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class Learned(Model):
    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids)) * self.gain
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class Appended(Model):
    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        self.seen.append(logits.detach())
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class Inside(Model):
    """A use of the logits in a function of its own."""

    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        sure = lambda: logits.softmax(-1).amax(-1).mean()  # noqa: E731
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        self.seen = [None if loss is None else sure().item()]
        return CausalLMOutput(loss=loss, logits=logits)


class Weighed(Model):
    """A loss weighed by another argument of its call."""

    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=logits.argmax(-1).sum()
            )
        return CausalLMOutput(loss=loss, logits=logits)


class OfATable(Model):
    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids)) * self.table["scale"]
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class ReturnedAsAMember(Model):
    def forward(self, input_ids=None, labels=None, return_dict=True, mask=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        out = (logits,)
        if mask is not None:
            self.seen = [(out[0].exp() * mask).sum().item()]
        return CausalLMOutput(loss=loss, logits=logits)


class InALoop(Model):
    def forward(self, input_ids=None, labels=None, times=1):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        for _ in range(times):
            logits = logits * 2
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


LEFT: dict[type[Model], tuple[str, dict[str, Any]]] = {
    InPlace: ("temperature, an argument", {"temperature": 0.1}),
    ByALocal: ("power, an argument", {"power": 3}),
    Learned: (r"self\.gain, a Parameter", {}),
    Appended: (r"more than the loss: self\.seen\.append", {}),
    Inside: ("more than the loss: sure = lambda", {}),
    Weighed: (r"more than the loss: loss = self\.loss_function", {}),
    OfATable: (r"self\.table, a dict", {}),
    ReturnedAsAMember: (r"more than the loss: self\.seen = ", {"mask": 2.0}),
    InALoop: ("in a block of its own", {"times": 3}),
}


@pytest.mark.parametrize("cls", LEFT)
def test_logits_with_another_use_or_of_an_argument(cls: type[Model]) -> None:
    reason, more = LEFT[cls]
    model = cls(small_model("Llama").config).train()
    original, ids = copy.deepcopy(model), tokens(2, 7)
    report = patch(model)
    assert_same_training(model, original, input_ids=ids, **more)
    assert str(model.seen) == str(original.seen)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(report.left[""])


class Known(Model):
    """Dtype, device, None, sizes in the loss, its own numbers, and a term that a coefficient switches on."""

    def forward(self, input_ids=None, labels=None, more=None, return_dict=True):  # type: ignore[override]
        hidden = self.hidden(input_ids)
        logits = hidden
        logits = self.lm_head(logits)
        factor = self.scale / 2
        if self.scale is not None:
            logits = (logits * factor).to(hidden.dtype)
        loss = None
        if labels is not None and logits is not None:
            labels = labels.to(logits.device)
            criterion = nn.CrossEntropyLoss()
            loss = criterion(logits.view(-1, logits.size(-1)), labels.view(-1))
            if self.coefficient > 0:
                loss = loss + self.coefficient * logits.logsumexp(-1).square().mean()
        if not return_dict:
            output = (logits,) + (hidden,)
            return output if loss is None else (loss, *output)
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.filterwarnings("ignore:llmk:UserWarning")
def test_known_uses_are_fused_until_a_number_changes() -> None:
    model = Known(small_model("Llama").config).train()
    original, ids = copy.deepcopy(model), tokens(2, 7)
    assert patch(model).replaced["loss"] == 1
    assert assert_same_training(model, original, input_ids=ids).logits is None
    for name, value in (("coefficient", 0.5), ("scale", 3.0)):
        setattr(model, name, value), setattr(original, name, value)
        assert assert_same_training(model, original, input_ids=ids).logits is not None
    assert set(patch(model).fell_back[""].split("; ")) == {
        "bool(self.coefficient > 0) is True, and was False: the loss comes from logits",
        "self.scale is 3.0, and was 2.0: the loss comes from logits",
    }


def test_a_tuple_has_none_in_the_place_of_logits() -> None:
    model = Known(small_model("Llama").config).train()
    original, ids = copy.deepcopy(model), tokens(2, 7)
    patch(model)
    loss, logits, hidden = model(input_ids=ids, labels=ids, return_dict=False)
    assert logits is None
    want = original(input_ids=ids, labels=ids, return_dict=False)
    torch.testing.assert_close((loss, hidden), (want[0], want[2]))
    torch.testing.assert_close(model(input_ids=ids, return_dict=False), original(input_ids=ids, return_dict=False))


class ByNames(Model):
    """Losses of arguments by their names, of logits whose width is asked for."""

    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        loss = None
        if labels is not None:
            criterion = nn.CrossEntropyLoss()
            loss = criterion(logits.view(-1, logits.size(-1)), target=labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


class ByNamesOfTransformers(Model):
    def forward(self, input_ids=None, labels=None):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        loss = None
        if labels is not None:
            rows = {"vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits.view(-1, logits.size(-1)), labels=labels.view(-1), **rows)
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("cls", [ByNames, ByNamesOfTransformers])
def test_a_loss_of_arguments_by_their_names(cls: type[Model]) -> None:
    model = cls(small_model("Llama").config).train()
    original = copy.deepcopy(model)
    assert patch(model).replaced["loss"] == 1
    assert assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None


class OtherLoss(Model):
    @staticmethod
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, smoothing: float = 0.0) -> Tensor:  # type: ignore[override]
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), label_smoothing=smoothing)

    def forward(self, input_ids=None, labels=None, smoothing=0.0):  # type: ignore[override]
        logits = self.lm_head(self.hidden(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, smoothing)
        return CausalLMOutput(loss=loss, logits=logits)


def test_a_loss_function_with_other_arguments_is_left() -> None:
    model = OtherLoss(small_model("Llama").config).train()
    original = copy.deepcopy(model)
    assert "takes other arguments than transformers' own" in patch(model).left[""]
    assert_same_training(model, original, input_ids=tokens(2, 7), smoothing=0.2)
