"""Every family of transformers, patched: the same losses and gradients as before, eager and compiled."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch._dynamo.exc import TorchDynamoException  # noqa: E402

from compile_tests.helpers.breadth import some_of  # noqa: E402
from compile_tests.helpers.families import (  # noqa: E402
    FAMILIES,
    assert_equal,
    loss_and_gradients,
    small_model,
    small_vision_model,
)
from llmk.transformers import patch  # noqa: E402

KEPT = ("Llama", "Qwen3Moe", "Gemma2", "GptOss", "DeepseekV3", "Qwen3Next", "GPTNeoX", "Cohere")
"""The families of a run of the tests: a dense model, mixtures, a hybrid, and those that are least like these."""
ALIKE = ("Llama", "Qwen3Moe", "GPTNeoX", "Cohere")
"""Those of which one layer is as another, so that one is trained and compiled; the tests below have two."""
INDUCTOR = ["Llama", "Gemma2", "GraniteMoe"]
COMPILED = [
    "Llama",
    "Llama4Text",
    "Qwen3Moe",
    "Gemma2",
    "Phi",
    "Olmo",
    "Olmo2",
    "Granite",
    "Glm4",
    "GptOss",
    "DeepseekV3",
    "Cohere",
    "StableLm",
    "FalconH1",
    "GPTNeoX",
    "Exaone4",
]
"""One of each way to rotate, to normalize, to cap or scale logits and to route to experts."""


pytestmark = [pytest.mark.usefixtures("on_device"), pytest.mark.filterwarnings("ignore")]


def inputs_of(model: Any, rows: int = 2, columns: int = 12) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, model.get_input_embeddings().num_embeddings, (rows, columns))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    return {"input_ids": ids, "labels": labels}


def assert_compiled_equal(model: Any, original: Any, inputs: dict[str, Any], want: Any, **options: Any) -> None:
    try:
        got = loss_and_gradients(model, torch.compile(model, **options), inputs)
    except TorchDynamoException:  # some versions of transformers have parts that do not compile, whoever patches
        torch._dynamo.reset()
        with pytest.raises(TorchDynamoException):
            loss_and_gradients(original, torch.compile(original, **options), inputs)
    else:
        assert_equal(got, want)


@pytest.mark.parametrize("family", some_of(FAMILIES, KEPT))
def test_outputs_and_gradients_equal_the_unpatched(family: str, request: pytest.FixtureRequest):
    model = small_model(family, **({"num_hidden_layers": 1} if family in ALIKE else {}))
    original, inputs = copy.deepcopy(model), inputs_of(model)
    report = patch(model)
    assert report.replaced["loss"] == 1, report
    assert report.replaced.get("norm", 0) + report.replaced.get("mlp", 0) > 0, report
    want = loss_and_gradients(original, original, inputs)
    assert_equal(loss_and_gradients(model, model, inputs), want)
    if family in COMPILED or request.config.getoption("--breadth"):
        assert_compiled_equal(model, original, inputs, want, fullgraph=True, backend="eager")


@pytest.mark.parametrize("family", some_of(["Llama", "Gemma2", "Olmo", "GptOss", "DeepseekV3"], ["Llama", "GptOss"]))
def test_thirty_steps_give_the_same_losses(family: str):
    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(30):
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model = small_model(family)
    original, inputs = copy.deepcopy(model), inputs_of(model)
    patch(model)
    want = losses(original)
    assert want[-1] < want[0]
    assert losses(model) == pytest.approx(want, rel=1e-3)  # Adam divides by small numbers: differences grow


@pytest.mark.parametrize("family", some_of(FAMILIES, KEPT))
def test_evaluation_and_unpatch(family: str):
    model = small_model(family).eval()
    inputs, state = inputs_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        before = model(**inputs, use_cache=False)
        report = patch(model)
        patched = model(**inputs, use_cache=False)
        report.unpatch()
        after = model(**inputs, use_cache=False)
    torch.testing.assert_close(patched.logits, before.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(patched.loss, before.loss, rtol=1e-5, atol=0)
    assert torch.equal(after.logits, before.logits)
    assert not any("forward" in vars(module) for module in model.modules())
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("family", some_of(INDUCTOR, ["Gemma2"]))
def test_with_inductor(family: str):
    model = small_model(family, num_hidden_layers=1)
    original, inputs = copy.deepcopy(model), inputs_of(model)
    patch(model)
    want = loss_and_gradients(original, original, inputs)
    assert_compiled_equal(model, original, inputs, want, fullgraph=True)


@pytest.mark.parametrize("family", some_of(["Llava", "Qwen2_5_VL", "Gemma3"], ["Gemma3"]))
def test_vision_language(family: str):
    model, inputs = small_vision_model(family)
    original = copy.deepcopy(model)
    assert patch(model).replaced["loss"] == 1
    want = loss_and_gradients(original, original, inputs)
    assert_equal(loss_and_gradients(model, model, inputs), want)
    fullgraph = family != "Qwen2_5_VL"  # unpatched, its vision tower breaks the graph
    assert_compiled_equal(model, original, inputs, want, fullgraph=fullgraph, backend="eager")
