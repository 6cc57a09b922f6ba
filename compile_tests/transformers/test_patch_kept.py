"""Uses of a model before and after `llmk.transformers.patch`: each works, or says why it does not."""

import copy
import functools
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

transformers = pytest.importorskip("transformers")

import llmk.transformers  # noqa: E402
from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402
from llmk.transformers import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


def plain_classes(model: nn.Module) -> bool:
    """Return True if every module has its own class, found by its name."""
    return all(getattr(__import__(c.__module__, fromlist="_"), c.__name__) is c for c in map(type, model.modules()))


# ---- patch() itself


def test_each_kind_can_be_left_out():
    kinds = {"norms": "norm", "mlps": "mlp", "rope": "rope", "residuals": "residual", "loss": "loss", "masks": "mask"}
    kinds |= {"projections": "projection"}
    model = small_model("Llama")
    for option, kind in kinds.items():
        report = patch(model, **{option: False})
        assert kind not in report.replaced
        missing = {"norms": 3}.get(option, 1)  # without norms nothing could add a residual, or be made again
        assert len(report.replaced) == len(kinds) - missing
        report.unpatch()
        assert plain_classes(model)


def test_a_second_call_returns_the_report():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        patch("llama")  # type: ignore[arg-type]
    model = small_model("Llama")
    report = patch(model, loss=False)
    assert patch(model) is report
    assert patch(nn.Sequential(model)) is report
    assert "loss" not in report.replaced
    report.unpatch()
    assert "loss" in patch(model).replaced


def test_what_is_not_patched_yet_is_patched():
    """Around a part that is, and beside a model that is; each of two models has its loss fused."""
    whole = patch(small_model("Llama"))
    model, ids = small_model("Llama"), tokens(2, 7)
    part = patch(model.model, rope=False)
    report = patch(model)
    assert report.replaced == {kind: count for kind, count in whole.replaced.items() if kind != "rope"}
    names = {entry.name: entry.kind for entry in report.entries}
    assert names["model.norm"] == "norm"
    assert names[""] == "loss"
    assert patch(model) is report
    assert part.replaced == {kind: count for kind, count in report.replaced.items() if kind != "loss"}
    assert model(input_ids=ids, labels=ids).logits is None
    report.unpatch()
    assert patch(model).replaced == whole.replaced
    both = nn.ModuleDict({"teacher": small_model("Llama"), "student": model})
    assert patch(both).replaced == {kind: 2 * count for kind, count in whole.replaced.items()}
    assert both["teacher"](input_ids=ids, labels=ids).logits is None


def test_parameters_need_not_be_there():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(small_model("Llama").config)
    assert patch(model).replaced == patch(small_model("Llama")).replaced


SETTINGS: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}


def test_nothing_around_it_changes_or_matters(device: torch.device):
    """Random numbers, default dtype and device, autocast, inference mode, grad mode."""
    want = patch(small_model("Llama")).entries
    for name, setting in SETTINGS.items():
        model = small_model("Llama")
        with setting():
            assert patch(model).entries == want, name
    for dtype in (torch.bfloat16, torch.float64):
        model = small_model("Llama")
        torch.set_default_dtype(dtype)
        try:
            assert patch(model).entries == want
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        model = small_model("Llama")  # its parameters are inference tensors
        assert patch(model).entries == want
    before = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device.type == "cuda" else [])]
    patch(small_model_after(before))
    after = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device.type == "cuda" else [])]
    assert all(map(torch.equal, before, after))


def small_model_after(states: list[torch.Tensor]) -> Any:
    """A model, with the random state set back."""
    model = small_model("SeedOss")
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])
    return model


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_model_as_it_was(error: type[BaseException]):
    class Unwilling(nn.RMSNorm):
        """A norm whose class cannot be set."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__" and value is not Unwilling:
                raise error
            super().__setattr__(name, value)

    model = small_model("Llama")
    model.model.norm = Unwilling(32)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error):
        patch(model)
    assert [type(module) for module in model.modules()] == classes
    assert patch(nn.Linear(2, 2)).replaced == {}


def test_a_model_whose_parts_raise_is_left_with_the_reason():
    class Strange(nn.Module):
        def get_output_embeddings(self) -> Any:
            raise ValueError("no head here")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert patch(Strange()).left == {"": "its output projection is not to be had: ValueError: no head here"}
    config = transformers.DistilBertConfig(vocab_size=50, dim=16, hidden_dim=32, n_layers=1, n_heads=2)
    model = transformers.DistilBertForMaskedLM(config)
    original, ids = copy.deepcopy(model), torch.randint(1, 50, (2, 5))
    assert patch(model).replaced["norm"] == 4
    assert_same_training(model.eval(), original.eval(), input_ids=ids, labels=ids)


def test_the_report_says_where_nothing_will_run():
    """In float64 every call is left to the model's own code; a weight that operators take is enough for the others."""
    model = small_model("Llama").double()
    text = " ".join(str(patch(model)).split())
    assert text.startswith(
        "The weights are torch.float64, operators take torch.bfloat16, torch.float16, torch.float32: "
    )
    assert "the model's own code runs" in text
    model.model.norm.float()
    assert "own code runs" not in str(patch(model))


def test_what_the_report_says():
    assert str(patch(nn.Linear(3, 3))) == "Linear: nothing replaced, nothing found that operators compute"
    report = patch(small_model("Llama"))
    assert "llmk_add_norm(self.input_layernorm" not in report.source("model.layers.0")
    assert "llmk_add_norm(self.post_attention_layernorm, residual, hidden_states)" in report.source("model.layers.0")
    assert "# llmk_add_norm: llmk.transformers.residuals.add_norm" in report.source("model.layers.0")
    assert "rms_norm" in report.source("model.norm")
    assert "eps=1e-06" in report.source("model.norm")
    assert "llmk_swiglu(self, self.act_fn, gate=llmk_gate_proj, up=llmk_up_proj, then=self.down_proj)" in report.source(
        "model.layers.0.mlp"
    )
    assert "llmk_gate_proj, llmk_up_proj = llmk_projections(x, self.gate_proj, self.up_proj)" in report.source(
        "model.layers.0.mlp"
    )
    assert "llmk_loss(self" in report.source()
    assert "def forward" in report.source("model.embed_tokens")

    class ANormWithAVeryLongNameOfItsOwnThatFillsAlmostAWholeLineByItself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(0, 1)

    lines = str(patch(ANormWithAVeryLongNameOfItsOwnThatFillsAlmostAWholeLineByItself())).splitlines()
    assert lines[0].endswith(": nothing replaced")
    assert max(map(len, lines[1:])) <= 80
    assert lines[-1].strip() == "left: uses clamp"


# ---- copies


def test_state_dict_save_and_load(tmp_path: Path):
    model, original = pair()
    assert list(model.state_dict()) == list(original.state_dict())
    model.save_pretrained(tmp_path)
    loaded, info = llmk.transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_training(loaded.train(), original, input_ids=tokens(2, 7))
    made = llmk.transformers.AutoModelForCausalLM.from_config(model.config)
    assert "loss" in patch(made).replaced


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_stand_alone_and_stay_patched(way: str):
    model, original = pair("Phi3")
    twin = COPIES[way](model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert assert_same_training(twin, original, input_ids=tokens(2, 7)).logits is None
    report = patch(twin)
    assert report.model is twin
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    report.unpatch()
    assert plain_classes(twin)
    assert_same_training(twin, original, input_ids=tokens(2, 7))
    assert not plain_classes(model)
    assert plain_classes(type(model)(model.config))  # not patched: made anew


def test_hidden_states_are_saved_as_plain_tensors():
    """What a norm's output was made of, of which linear layers make it again, is not saved with it."""
    model = small_model("Llama").train()
    patch(model)
    hidden = model(input_ids=tokens(2, 5), output_hidden_states=True).hidden_states[-1]
    assert not vars(hidden)
    file = io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file), hidden)


def test_gradients_of_inputs_before_those_of_weights():
    """A pipeline's schedule without bubbles makes them in two passes over the graph."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        tensors = [torch.ones(2, 5, model.config.hidden_size, requires_grad=True), *model.parameters()]
        output = model(inputs_embeds=tensors[0].cos()).last_hidden_state
        incoming = torch.linspace(-1, 1, output.numel()).view_as(output)
        (first, *_), groups = stage_backward_input([output], [incoming], tensors[:1], iter(tensors[1:]))
        stage_backward_weight(iter(tensors[1:]), groups)
        return [first, *(p.grad for p in tensors[1:] if p.grad is not None)]

    patched, plain = (model.model for model in pair())
    torch.testing.assert_close(gradients(patched), gradients(plain))


def test_replicas_use_their_own_weights():
    """The replicas are made as by nn.DataParallel."""

    def replica(module: nn.Module) -> nn.Module:
        copy = module._replicate_for_data_parallel()
        for name, p in module._parameters.items():
            setattr(copy, name, None if p is None else 2 * p.detach())
        for name, child in module._modules.items():
            setattr(copy, name, replica(child))
        return copy

    model, original = pair()
    ids = tokens(2, 7)
    got, want = (replica(m)(input_ids=ids, labels=ids) for m in (model, original))
    torch.testing.assert_close(got.loss, want.loss)
    assert got.logits is None


# ---- changes


def test_new_parts_are_used():
    model, original = pair(tie_word_embeddings=False)
    for m in (model, original):
        torch.manual_seed(0)
        m.resize_token_embeddings(120)
    ids = torch.randint(3, 120, (2, 7))
    assert assert_same_training(model, original, input_ids=ids).logits is None
    for m in (model, original):
        torch.manual_seed(0)
        m.lm_head = nn.Linear(32, 120)
        m.model.norm = nn.LayerNorm(32)
        m.model.layers[0].post_attention_layernorm = nn.LayerNorm(32)
        m.model.layers[1].mlp.act_fn = nn.ReLU()
    assert assert_same_training(model, original, input_ids=ids).logits is None
    for m in (model, original):
        torch.manual_seed(0)
        m.lm_head = nn.Sequential(nn.Linear(32, 120), nn.ReLU())
    with pytest.warns(UserWarning, match="the projection is now of torch"):
        assert_same_training(model, original, input_ids=ids)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("Llama", "model.norm.variance_epsilon", 1.0),
        ("Qwen3Next", "model.layers.0.linear_attn.norm.variance_epsilon", 1.0),
        ("Gemma2", "config.final_logit_softcapping", None),
        ("Gemma2", "config.final_logit_softcapping", 1.0),
        ("Granite", "config.logits_scaling", 1.5),
        ("Cohere", "logit_scale", 2.0),
    ],
)
def test_a_number_that_changed(family: str, name: str, value: float | None):
    """The model's own code reads the number anew, of a norm or of what is done to the logits."""
    model, original = pair(family)
    *path, last = name.split(".")
    for m in (model, original):
        setattr(functools.reduce(lambda at, step: getattr(at, step), path, m), last, value)
    assert_same_training(model, original, input_ids=tokens(2, 7))


def test_arguments_of_norms_by_name():
    model, original = pair("Qwen3Next")
    x, gate = torch.randn(2, 3, 32), torch.randn(2, 3, 8)
    norms, gated = (
        [m.model.norm for m in (model, original)],
        [m.model.layers[0].linear_attn.norm for m in (model, original)],
    )
    (name,) = inspect.signature(type(original.model.norm).forward).parameters.keys() - {"self"}
    torch.testing.assert_close(*(norm(**{name: x}) for norm in norms))
    want = gated[1](x[..., :8], gate)
    for args, options in (((x[..., :8],), {"gate": gate}), ((), {"hidden_states": x[..., :8], "gate": gate})):
        torch.testing.assert_close(gated[0](*args, **options), want)
    with pytest.raises(TypeError, match="unknown"):
        norms[0](x, unknown=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_dtype(dtype: torch.dtype):
    for family in ("Llama", "Phi3"):
        model, original = pair(family)
        model.to(dtype), original.to(dtype)
        ids = tokens(2, 7)
        got, want = (m(input_ids=ids, labels=ids) for m in (model, original))
        got.loss.backward()
        tolerance = {"rtol": 0, "atol": 0} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(got.loss.to(dtype), want.loss.to(dtype), **tolerance)


def test_mixed_dtypes_within_a_layer():
    """The last projection of fp16 T5 stays float32."""
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval().half()
    for block in (*model.encoder.block, *model.decoder.block):
        block.layer[-1].DenseReluDense.wo.float()
    original, ids = copy.deepcopy(model), torch.randint(3, 50, (2, 7))
    assert patch(model).replaced["mlp"] == 2
    got, want = (m(input_ids=ids, labels=ids).loss for m in (model, original))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


def test_hooks_see_what_they_saw():
    def seen_by(model: Any) -> list[Any]:
        seen = []

        def look(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
            seen.extend([args, output])
            return 2 * output

        for module in (model.model.norm, model.model.layers[1].post_attention_layernorm, model.model.layers[0].mlp):
            module.register_forward_hook(look)
        model.lm_head.register_forward_hook(look)
        model(input_ids=ids, labels=ids).loss.backward()
        return seen

    model, original = pair()
    ids = tokens(2, 7)
    want = seen_by(original)
    with pytest.warns(UserWarning, match="the projection is looked at by a hook"):
        torch.testing.assert_close(seen_by(model), want)
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_a_forward_that_another_library_replaced_is_left():
    model = small_model("Llama")
    norm = model.model.norm
    norm.forward = lambda x: x
    assert patch(model).left["model.norm"].startswith("its forward was replaced already")
    assert norm(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_accelerate(before: bool):
    """The hooks of `device_map` stay; they stand in a module's own `forward`."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = small_model("Llama")
    original = copy.deepcopy(model)
    report = patch(model) if not before else None
    for module in (model.model.norm, model.model.layers[0].mlp, model.model.layers[1].post_attention_layernorm):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=model.device))
    report = report or patch(model)
    assert report.replaced["norm"] == 5
    assert not report.left
    for m in (model, copy.deepcopy(model)):
        assert_same_training(m, original, input_ids=tokens(2, 7))
    hooks.remove_hook_from_module(model, recurse=True)
    assert_same_training(model, original, input_ids=tokens(2, 7))
    report.unpatch()
    assert_same_training(model, original, input_ids=tokens(2, 7))


def test_errors_say_what_came():
    with pytest.raises(TypeError, match=r"model: expected .* got the class LlamaForCausalLM; patch an instance of it"):
        patch(transformers.LlamaForCausalLM)
    model, ids = small_model("Llama"), tokens(2, 9)
    with pytest.raises(TypeError, match="norms: expected True or False, got 'rms'"):
        patch(model, norms="rms")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="skip_ignored: expected True or False, got None"):
        patch(model, skip_ignored=None)  # type: ignore[arg-type]
    patch(model)
    with pytest.raises(ValueError, match=r"labels: expected shape \(2, 9\) \(one for each token\), got \(2, 5\)"):
        model(input_ids=ids, labels=ids[:, :5])
