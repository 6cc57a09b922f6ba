"""`patch` where PEFT has a LoRA on the output projection: the loss comes of hidden states, projection and adapters."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", "0.16")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from compile_tests.helpers.backend_checks import require_right  # noqa: E402
from compile_tests.helpers.families import assert_same_training, small_model, tokens  # noqa: E402
from compile_tests.helpers.lora import lora_config, with_lora  # noqa: E402
from llmk.accuracy.neighbours import Change  # noqa: E402
from llmk.transformers import Report, patch  # noqa: E402
from tools.families_sweep import built  # noqa: E402

ALONE = dict.fromkeys(("norms", "mlps", "experts", "rope", "residuals", "masks"), False)
"""All but the loss is left, so that it alone is compared."""


pytestmark = pytest.mark.usefixtures("on_device")


OPTIONS: dict[str, Any] = {"target_modules": ["q_proj", "lm_head"], "r": 3, "lora_alpha": 8}
config = functools.partial(lora_config, **OPTIONS)
adapted = functools.partial(with_lora, **OPTIONS)


def pair(family: str = "Llama", first: str = "peft", overrides: Any = None, **options: Any) -> tuple[Any, Any]:
    """A patched model with adapters, of one layer where `overrides` has no other number, and the same one unpatched."""
    overrides = {"tie_word_embeddings": False, "num_hidden_layers": 1} | (overrides or {})
    model = small_model(family, use_cache=False, **overrides)
    original = adapted(copy.deepcopy(model), **options)
    if first == "peft":
        model = adapted(model, **options)
    assert patch(model, **ALONE).replaced == {"loss": 1}
    return (model if first == "peft" else adapted(model, **options)), original


def head_of(model: Any) -> Any:
    return model.get_base_model().lm_head


Batch = dict[str, Tensor]


def batch() -> Batch:
    ids = tokens(3, 11)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 4 == 0, -100)}


def from_logits(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers, which would round logits in float64 to float32."""
    logits = model(input_ids=input_ids).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def step(model: Any, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The loss, and every gradient by its name, with PEFT's dropout the same each time."""
    model.zero_grad()
    torch.manual_seed(2)
    value = loss()
    value.backward()
    return {"loss": value.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def require_fused(model: Any, original: Any, run: Any = None, autocast: bool = False, **inputs: Any) -> None:
    """Require no logits of the patched model, and its loss and gradients by the accuracy rule beside the unpatched."""
    inputs = inputs or batch()
    device, outputs = inputs["input_ids"].device.type, []

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast), warnings.catch_warnings():
            warnings.filterwarnings("error", message="the loss comes from logits")
            outputs.append((model if run is None else run)(**inputs))
        return outputs[0].loss

    got = step(model, loss)
    assert outputs[0].logits is None

    def plain(change: Change) -> list[Tensor]:
        changed = copy.deepcopy(original)
        for parameter in changed.parameters():
            parameter.data = change(parameter.data)
        exact = next(changed.parameters()).dtype == torch.float64
        with torch.autocast(device, torch.bfloat16, enabled=autocast and not exact):
            value = step(changed, lambda: from_logits(changed, **inputs))
        assert value.keys() == got.keys()
        return list(value.values())

    require_right(list(got.values()), plain)


def require_equal(model: Any, original: Any) -> None:
    """Require no logits of the patched model, and the unpatched one's loss."""
    inputs = batch()
    got, want = (m(**inputs) for m in (model, original))
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss)


def require_logits(model: Any, original: Any, words: str) -> None:
    """Require that the patched model does as before, and says so."""
    inputs = batch()
    with pytest.warns(UserWarning, match=rf"the loss comes from logits, .*: the projection {words}"):
        output = model(**inputs)
    assert output.logits is not None
    torch.testing.assert_close(output.loss, original(**inputs).loss)


FIRST = pytest.mark.parametrize("first", ["peft", "patch"])
COMPILED = pytest.mark.parametrize(
    ("first", "compiled"),
    [("peft", False), ("patch", False), ("peft", True), pytest.param("patch", True, marks=pytest.mark.breadth)],
)


@COMPILED
def test_head_and_adapter(first: str, compiled: bool):
    model, original = pair(first=first)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else None
    require_fused(model, original, run)
    assert head_of(model).base_layer.weight.grad is None
    assert head_of(model).lora_B["default"].weight.grad is not None


def test_any_number_of_tokens_is_one_graph():
    model, _ = pair()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    for shape in ((2, 12), (3, 17), (5, 9)):
        ids = tokens(*shape)
        assert run(input_ids=ids, labels=ids).logits is None
    assert counter.frame_count <= 2


@FIRST
def test_several_adapters_are_added(first: str):
    model, original = pair(first=first)
    for m in (model, original):
        torch.manual_seed(3)
        m.add_adapter("other", config(r=5, use_rslora=True))
        m.add_adapter("elsewhere", config(target_modules=["q_proj"]))
        for names in (["default", "other", "elsewhere"], ["other"], ["elsewhere"]):
            m.base_model.set_adapter(names)
    for names in (["default", "other", "elsewhere"], ["other"], ["elsewhere"]):
        for m in (model, original):
            m.base_model.set_adapter(names)
        require_fused(model, original)


@COMPILED
def test_dropout_of_what_goes_into_an_adapter(first: str, compiled: bool):
    model, original = pair(first=first, lora_dropout=0.3)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else None
    require_fused(model, original, run)


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_logits_that_are_scaled_or_capped(family: str):
    require_fused(*pair(family))


def test_adapters_with_a_bias():
    require_fused(*pair(lora_bias=True))


@FIRST
def test_tied_embeddings(first: str):
    require_fused(*pair(first=first, overrides={"tie_word_embeddings": True}))


def test_tied_adapters():
    """The adapter's parameters are views of those of the embedding's, which no copy can be made of."""
    tied = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    inputs, results = batch(), []
    for model in pair(overrides={"tie_word_embeddings": True, "num_hidden_layers": 2}, **tied):
        results.append(step(model, lambda model=model: model(**inputs).loss))
        embedding = model.get_base_model().get_input_embeddings().lora_embedding_B["default"]
        assert head_of(model).lora_A["default"].weight.data_ptr() == embedding.data_ptr()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_a_projection_that_learns_too():
    model, original = pair(overrides={"tie_word_embeddings": True})
    for m in (model, original):
        head_of(m).base_layer.weight.requires_grad_(True)
    require_fused(model, original)
    assert head_of(model).base_layer.weight.grad is not None


def test_a_nested_head():
    model = built(transformers.BertForMaskedLM)
    options = {"target_modules": ["decoder"]}
    original = adapted(copy.deepcopy(model), **options)
    model = adapted(model, **options)
    assert patch(model, **ALONE).replaced == {"loss": 1}
    inputs = batch()
    inputs = {name: ids.clamp(max=98) for name, ids in inputs.items()}

    def loss_of(model: Any) -> dict[str, Tensor]:
        return step(model, lambda: model(**inputs).loss)

    got, want = loss_of(model), loss_of(original)
    assert got.keys() == want.keys()
    assert len(got) == 3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert model(**inputs).logits is None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16(adapters: torch.dtype, autocast: bool):
    """PEFT gives a bfloat16 model adapters in float32."""
    model, original = pair()
    for m in (model, original):
        m.bfloat16()
        for name, parameter in m.named_parameters():
            parameter.data = parameter.data.to(adapters) if "lora_" in name else parameter.data
    require_fused(model, original, autocast=autocast)


def test_autocast_of_a_float32_model():
    """Its gradients' errors together; one loss is one rounding's luck."""
    model, original = pair()
    inputs, wide = batch(), copy.deepcopy(original).double()
    exact = step(wide, lambda: from_logits(wide, **inputs))

    def error(model: Any) -> float:
        def loss() -> Tensor:
            with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
                return model(**inputs).loss

        found = step(model, loss)
        assert found.keys() == exact.keys()
        return sum(float((found[name] - exact[name]).square().sum()) for name in exact if name != "loss")

    assert 0 < error(model) <= 1.5**2 * error(original)
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
        assert model(**inputs).logits is None


# ---- what else PEFT does with a layer


@FIRST
def test_merged_and_taken_apart_again(first: str):
    model, original = pair(first=first)
    for m in (model, original):
        m.merge_adapter()
    require_equal(model, original)
    for m in (model, original):
        m.unmerge_adapter()
    require_fused(model, original)


@FIRST
def test_disabled(first: str):
    model, original = pair(first=first)
    for merged in (False, True):
        for m in (model, original):
            if merged:
                m.merge_adapter()
        with model.disable_adapter(), original.disable_adapter():
            require_equal(model, original)
        assert not head_of(model).merged
    require_fused(model, original)


@FIRST
def test_unloaded(first: str):
    model, original = pair(first=first)
    require_equal(*(m.merge_and_unload().train() for m in (model, original)))


def test_evaluation_has_logits():
    model, original = pair()
    model.eval(), original.eval()
    ids = tokens(2, 7)
    torch.testing.assert_close(model(input_ids=ids).logits, original(input_ids=ids).logits)
    assert torch.equal(*(m.generate(input_ids=ids, max_new_tokens=5) for m in (model, original)))


@FIRST
def test_copies_and_unpatch(first: str):
    model, original = pair(first=first)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        require_fused(twin, original)
    assert model.state_dict().keys() == original.state_dict().keys()
    Report(model).unpatch()
    inputs = batch()
    got, want = (m(**inputs) for m in (model, original))
    assert torch.equal(got.logits, want.logits)


# ---- what is left, and said


def test_dora():
    model = small_model("Llama", use_cache=False, tie_word_embeddings=False)
    late = copy.deepcopy(model)
    original = adapted(copy.deepcopy(model), use_dora=True)
    report = patch(adapted(model, use_dora=True), **ALONE)
    assert report.left == {
        "base_model.model": "its output projection has an adapter that is no plain LoRA but DoraLinearVariant"
    }
    patch(late, **ALONE)
    require_logits(adapted(late, use_dora=True), original, "has an adapter that is no plain LoRA but DoraLinearVariant")


def test_a_whole_copy_of_the_projection():
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model = small_model("Llama", use_cache=False, tie_word_embeddings=False)
    late = copy.deepcopy(model)
    original = adapted(copy.deepcopy(model), **options)
    report = patch(adapted(model, **options), **ALONE)
    assert "ModulesToSaveWrapper is not a plain linear layer" in report.left["base_model.model"]
    patch(late, **ALONE)
    require_logits(adapted(late, **options), original, r"is now of peft\.utils\.other\.ModulesToSaveWrapper")


@pytest.mark.parametrize("tied", [False, True])
def test_trainable_tokens(tied: bool):
    """A tied projection has the trained rows too; one of its own is a plain layer."""
    options = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}
    model = small_model("Llama", use_cache=False, tie_word_embeddings=tied)
    original = adapted(copy.deepcopy(model), **options)
    changed = adapted(model, **options)
    report = patch(changed, **ALONE)
    if tied:
        assert "TrainableTokensWrapper is not a plain linear layer" in report.left["base_model.model"]
    else:
        assert "base_model.model" not in report.left
    assert_same_training(changed, original, input_ids=tokens(2, 7))


@pytest.mark.parametrize("part", ["", "base_layer", "lora_B.default"])
def test_a_hook(part: str):
    model, original = pair()
    for m in (model, original):
        head_of(m).get_submodule(part).register_forward_hook(lambda module, args, output: 2 * output)
    require_logits(model, original, "has an adapter")


def test_another_layer_of_adapters():
    model = small_model("Llama", use_cache=False, tie_word_embeddings=False)
    ia3 = peft.IA3Config(target_modules=["q_proj", "lm_head"], feedforward_modules=[])
    report = patch(peft.get_peft_model(model, ia3).train(), **ALONE)
    assert "is not a plain linear layer" in report.left["base_model.model"]


def test_a_part_that_is_no_linear_layer():
    model, original = pair()
    for m in (model, original):
        up = head_of(m).lora_B
        up["default"] = nn.Sequential(up["default"], nn.Tanh())
    require_logits(model, original, "has an adapter whose parts are no linear layers but Sequential")
