"""`llmk.transformers`: what `patch` promises beside equal losses, on a small Llama."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from families import small_model  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import llmk.transformers  # noqa: E402
from llmk.transformers import patch  # noqa: E402


@pytest.fixture(autouse=True)
def _on_device(device: torch.device):
    torch._dynamo.reset()
    with device:
        yield


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 101, shape)


def pair(family: str = "Llama", **overrides: Any) -> tuple[Any, Any]:
    """A patched model and the same one unpatched."""
    model = small_model(family, use_cache=False, **overrides)
    original = copy.deepcopy(model)
    patch(model)
    return model, original


def assert_same_training(model: Any, original: Any, run: Any = None, **inputs: Any) -> Any:
    """Loss and gradients; the patched model's output."""
    want = original(**inputs)
    want.loss.backward()
    got = (model if run is None else run)(**inputs)
    got.loss.backward()
    torch.testing.assert_close(got.loss.float(), want.loss.float(), rtol=1e-5, atol=0)
    assert got.loss.dim() == 0
    for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)
    model.zero_grad()
    original.zero_grad()
    return got


# ---- the loss


def test_no_logits_in_training_all_of_them_in_evaluation():
    model, original = pair()
    ids = tokens(2, 7)
    assert model(input_ids=ids, labels=ids).logits is None
    assert model(input_ids=ids).logits.shape == (2, 7, 101)
    model.eval(), original.eval()
    output = model(input_ids=ids, labels=ids)
    assert output.logits.shape == (2, 7, 101)
    torch.testing.assert_close(output.loss, original(input_ids=ids, labels=ids).loss)
    assert torch.equal(model.generate(ids, max_new_tokens=5), original.generate(ids, max_new_tokens=5))


def test_tuple_output():
    model, original = pair()
    ids = tokens(2, 7)
    loss, *_ = model(input_ids=ids, labels=ids, return_dict=False)
    torch.testing.assert_close(loss, original(input_ids=ids, labels=ids, return_dict=False)[0])


@pytest.mark.parametrize("count", [7, torch.tensor(9, device="cpu")], ids=["int", "tensor"])
def test_num_items_in_batch(count: Any):
    ids = tokens(2, 7)
    assert_same_training(*pair(), input_ids=ids, labels=ids, num_items_in_batch=count)


def test_ignored_labels_and_labels_shifted_before():
    model, original = pair()
    ids = tokens(2, 7)
    assert_same_training(model, original, input_ids=ids, labels=ids.masked_fill(ids % 3 == 0, -100))
    assert_same_training(model, original, input_ids=ids, labels=ids, shift_labels=ids.roll(-1, 1))
    assert_same_training(model, original, input_ids=ids, labels=ids.masked_fill(ids % 3 == 0, -1), ignore_index=-1)


def test_a_loss_function_of_ones_own_gets_logits():
    model, original = pair()
    ids = tokens(2, 7)
    for m in (model, original):
        m.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    assert assert_same_training(model, original, input_ids=ids, labels=ids).logits is not None


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_projections(tied: bool):
    ids = tokens(2, 7)
    model, original = pair(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert_same_training(model, original, input_ids=ids, labels=ids)


def test_frozen_projection():
    model, original = pair(tie_word_embeddings=False)
    ids = tokens(2, 7)
    for m in (model, original):
        m.lm_head.weight.requires_grad_(False)
    assert_same_training(model, original, input_ids=ids, labels=ids)
    assert model.lm_head.weight.grad is None


class Adapter(nn.Module):
    """As PEFT puts one around a linear layer; without rank it only passes on."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, rank), nn.Linear(rank, base.out_features)
        self.rank = rank

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        y = self.base(x, *args)
        return y + self.up(self.down(x)) if self.rank else y


def test_adapters_around_projections():
    model, original = pair(tie_word_embeddings=False)
    for m in (model, original):
        torch.manual_seed(0)
        for layer in m.model.layers:
            layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj, rank=2)
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj, rank=2)
        m.lm_head = Adapter(m.lm_head, rank=0)
    ids = tokens(2, 7)
    assert_same_training(model, original, input_ids=ids, labels=ids)
    model.lm_head = Adapter(model.lm_head.base, rank=2)
    with pytest.raises(RuntimeError, match=r"lm_head: expected its loss, got a tensor of shape \(2, 7, 101\)"):
        model(input_ids=ids, labels=ids)


# ---- the model stays what it was


def test_state_dict_save_and_load(tmp_path):
    model, original = pair()
    assert list(model.state_dict()) == list(original.state_dict())
    model.save_pretrained(tmp_path)
    loaded = llmk.transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    ids = tokens(2, 7)
    assert loaded(input_ids=ids, labels=ids).logits is None
    assert_same_training(loaded, original, input_ids=ids, labels=ids)


def test_from_config_is_patched():
    config = small_model("Llama").config
    assert "forward" in vars(llmk.transformers.AutoModelForCausalLM.from_config(config))


def test_nothing_global_changes():
    _, original = pair()
    assert not any("forward" in vars(module) for module in original.modules())
    ids = tokens(2, 7)
    assert original(input_ids=ids, labels=ids).logits is not None


def test_a_copy_of_a_patched_model_stands_alone():
    model, original = pair()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    ids = tokens(2, 7)
    assert_same_training(twin, original, input_ids=ids, labels=ids)


# ---- what is found and what is left


def test_each_kind_can_be_left_out():
    kinds = {"norms": "norm", "mlps": "mlp", "rope": "rope", "residuals": "residual", "loss": "loss", "masks": "mask"}
    for option, kind in kinds.items():
        replaced = patch(small_model("Llama"), **{option: False}).replaced
        assert kind not in replaced
        missing = {"norms": 2}.get(option, 1)  # without norms there is nothing that could add a residual
        assert len(replaced) == len(kinds) - missing


def test_report_is_a_table():
    report = patch(small_model("GptOss"))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("left: its gate is neither SwiGLU nor GeGLU" in " ".join(line.split()) for line in lines)
    assert set(report.left) == {f"model.layers.{i}.mlp.experts" for i in range(2)}


class NearlyRMSNorm(nn.Module):
    """Wrong in the third digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OtherEps(NearlyRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 10 * self.eps) * self.weight


class WrongGradient(NearlyRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * rstd.detach() * self.weight


class TwoInputs(NearlyRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y if gate is None else y * gate


@pytest.mark.parametrize("norm", [NearlyRMSNorm, WrongGradient, TwoInputs])
def test_what_does_not_agree_is_left(norm: type[NearlyRMSNorm]):
    report = patch(nn.Sequential(norm(16)))
    assert not report.replaced
    assert "0" in report.left


def test_eps_is_found_not_read():
    """Ten times the attribute is 1e-5, which is tried; what counts is what the module computes."""
    model = nn.Sequential(OtherEps(16))
    x = 1e-3 * torch.randn(3, 16)
    want = model(x)
    assert patch(model).replaced == {"norm": 1}
    torch.testing.assert_close(model(x), want)


class Relu(nn.Module):
    """A gated layer whose gate no operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class OddNames(Relu):
    """Named and ordered against every habit, and square, so that shapes do not tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(nn.functional.silu(self.down(x)) * self.up(x))


def test_gated_layers_are_told_by_what_they_compute():
    assert patch(nn.Sequential(Relu())).left == {"0": "computes neither SwiGLU nor GeGLU"}
    model = nn.Sequential(OddNames())
    x = torch.randn(3, 8)
    want = model(x)
    assert patch(model).replaced == {"mlp": 1}
    torch.testing.assert_close(model(x), want)


class NormInPlaceOfTheCopy(nn.Module):
    """Between sum and norm stands a copy whose name the norm takes: only the norm may remain there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + 2 * x
        y = h
        y = self.norm(h)
        return y - h


def test_a_copy_that_the_norm_replaces_is_left():
    model, x = NormInPlaceOfTheCopy(), torch.randn(3, 16)
    want = model(x)
    assert patch(model).replaced == {"norm": 1}
    torch.testing.assert_close(model(x), want)


def test_a_forward_that_another_library_replaced_is_left():
    model = small_model("Llama")
    norm = model.model.norm
    norm.forward = lambda x: x
    assert "model.norm" in patch(model).left
    assert norm(torch.ones(2)).tolist() == [1, 1]


def test_parameters_need_not_be_there():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(small_model("Llama").config)
    assert patch(model).replaced == patch(small_model("Llama")).replaced


def test_wrong_calls():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        patch("llama")  # type: ignore[arg-type]
    model = small_model("Llama")
    report = patch(model)
    with pytest.raises(ValueError, match="patched already"):
        patch(model)
    report.unpatch()
    patch(model)


# ---- training as it is done


def test_packed_rows():
    """Position ids that start again keep attention within each sequence, eager and compiled."""
    model, original = pair()
    ids, positions = tokens(2, 12), torch.cat((torch.arange(5), torch.arange(7))).expand(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (model, compiled):
        assert_same_training(model, original, run, input_ids=ids, labels=ids, position_ids=positions)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows(side: str):
    model, original = pair()
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    mask = mask if side == "left" else mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (model, compiled):
        assert_same_training(model, original, run, input_ids=ids, labels=labels, attention_mask=mask)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_no_mask_is_built_when_compiled(family: str):
    """A mask would be an [S, S] boolean tensor in the graph."""
    S = 24
    seen: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        seen.extend(tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool)
        return graph.forward

    model, original = pair(family, sliding_window=32) if family != "Llama" else pair()
    ids = tokens(1, S)
    torch.compile(original, fullgraph=True, backend=backend)(input_ids=ids, labels=ids)
    assert any(shape[-2:] == (S, S) for shape in seen)
    seen.clear()
    torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=ids)
    assert not any(shape[-2:] == (S, S) for shape in seen)


def test_a_window_that_reaches_less_far_than_the_row_is_kept():
    model, original = pair("Mistral", sliding_window=6)
    ids = tokens(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_training(model, original, compiled, input_ids=ids, labels=ids)


def test_no_recompile_when_batch_and_sequence_vary():
    model, _ = pair()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows, columns in [(2, 12), (3, 17), (5, 9), (4, 30), (2, 21)]:
        ids = tokens(rows, columns)
        compiled(input_ids=ids, labels=ids).loss.backward()
    assert backend.frame_count <= 2  # the first sizes, then any


def test_compiled_layer_by_layer_one_graph_serves_all():
    model, original = pair(num_hidden_layers=4)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    ids = tokens(2, 12)
    assert_same_training(model, original, input_ids=ids, labels=ids)
    assert backend.frame_count == 1


def test_gradient_accumulation():
    model, original = pair()
    for m in (model, original):
        for seed in range(3):
            torch.manual_seed(seed)
            ids = tokens(2, 9)
            m(input_ids=ids, labels=ids, num_items_in_batch=48).loss.backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_checkpointing(compiled: bool):
    model, original = pair()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    ids = tokens(2, 9)
    assert_same_training(model, original, run, input_ids=ids, labels=ids)


def test_selective_checkpointing_by_operator():
    """The policy sees the operators by name: kept, rms_norm's forward runs once for each norm."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(str(op))
        save = str(op) in {"llmk._rms_norm_fwd.default", "llmk._add_rms_norm_fwd.default"}
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    seen: set[str] = set()
    model, original = pair()
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, _forward=forward, **kwargs: checkpoint(
            _forward, *args, **kwargs, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
    ids = tokens(2, 9)
    assert_same_training(model, original, input_ids=ids, labels=ids)
    assert {"llmk._rms_norm_fwd.default", "llmk._add_rms_norm_fwd.default", "llmk._swiglu_fwd.default"} <= seen


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_with_float32_weights(compiled: bool, device: torch.device):
    """Within bfloat16's own error of the unpatched model's float32 gradients."""
    model, original = pair()
    ids = tokens(2, 33)
    original(input_ids=ids, labels=ids).loss.backward()
    exact = [p.grad.clone() for p in original.parameters()]
    original.zero_grad()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for f in (run, original):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = f(input_ids=ids, labels=ids).loss
        assert loss.dtype == torch.float32
        loss.backward()
    ours, theirs = (
        sum(float((p.grad - g).square().sum()) for p, g in zip(m.parameters(), exact, strict=True))
        for m in (model, original)
    )
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert ours <= 1.5**2 * theirs


def test_bfloat16_weights():
    model, original = pair()
    model.bfloat16(), original.bfloat16()
    ids = tokens(2, 9)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, original(input_ids=ids, labels=ids).loss, rtol=2e-2, atol=0)


def test_cuda_graphs(device: torch.device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    model, original = pair()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, recording, replays
        torch.compiler.cudagraph_mark_step_begin()
        ids = tokens(2, 12)
        assert_same_training(model, original, compiled, input_ids=ids, labels=ids)


def test_trainer(tmp_path: Path):
    """transformers' own loop, with the model patched by the callback: the losses of the unpatched model."""
    pytest.importorskip("accelerate")

    def losses(model: Any, *callbacks: Any) -> list[float]:
        rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=ids.device.type == "cpu",
        )  # fmt: skip
        with torch.device("cpu"):  # where batches are made
            trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=list(callbacks))
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ids = tokens(16, 12)
    original, model = small_model("Llama"), small_model("Llama")
    callback = llmk.transformers.PatchCallback()
    want, got = losses(original), losses(model, callback)
    assert callback.report is not None
    assert callback.report.replaced["loss"] == 1
    assert len(want) == 4
    assert got == pytest.approx(want, rel=1e-4)
