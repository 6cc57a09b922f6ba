"""`llmk.transformers`: what `patch` promises beside equal losses, on a small Llama."""

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import llmk.transformers  # noqa: E402
from compile_tests.helpers.breadth import some_of  # noqa: E402
from compile_tests.helpers.families import assert_same_training, pair, small_model, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


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


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_ignored_labels_are_skipped_unless_that_is_declined(skip_ignored: bool):
    original = small_model("Llama", use_cache=False)
    model = copy.deepcopy(original)
    report = llmk.transformers.patch(model, skip_ignored=skip_ignored)
    assert ("fused_linear_ce, skip_ignored=False" in str(report)) != skip_ignored
    ids = tokens(2, 7)
    assert_same_training(model, original, input_ids=ids, labels=ids.masked_fill(ids % 3 == 0, -100))


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
    """An adapter around a linear layer, as PEFT has one; without rank it only passes on."""

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
    once = pytest.warns(UserWarning, match=r"the loss comes from logits, .* now of \S*test_transformers\.Adapter")
    for rank, warning in ((0, once), (2, contextlib.nullcontext())):
        for m in (model, original):
            torch.manual_seed(0)
            m.lm_head = Adapter(getattr(m.lm_head, "base", m.lm_head), rank)
        with warning:
            output = assert_same_training(model, original, input_ids=ids, labels=ids)
        assert output.logits is not None


class Wrapper(nn.Module):
    """A wrapper around a model, as PEFT and DDP have one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_a_wrapped_model_with_adapters_inside():
    model = small_model("Llama", use_cache=False)
    for layer in model.model.layers:
        layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj, rank=2)
    model = Wrapper(model)
    original = copy.deepcopy(model)
    replaced = llmk.transformers.patch(model).replaced
    assert (replaced["loss"], replaced["mlp"]) == (1, 2)
    assert assert_same_training(model, original, input_ids=tokens(2, 7)).logits is None


# ---- training as it is done


def test_packed_rows():
    """Position ids that start again keep attention within each sequence, eager and compiled."""
    model, original = pair(num_hidden_layers=1)
    ids, positions = tokens(2, 12), torch.cat((torch.arange(5), torch.arange(7))).expand(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for run in (model, compiled):
        assert_same_training(model, original, run, input_ids=ids, labels=ids, position_ids=positions)


def test_padded_rows():
    """Padding is on the left, then on the right."""
    model, original = pair(num_hidden_layers=1)
    ids, left = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    left[1, :4] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for mask, run in itertools.product((left, left.flip(1)), (model, compiled)):
        labels = ids.masked_fill(mask == 0, -100)
        assert_same_training(model, original, run, input_ids=ids, labels=labels, attention_mask=mask)


@pytest.mark.parametrize("family", some_of(["Llama", "Mistral", "Gemma3Text"], ["Llama", "Gemma3Text"]))
def test_no_mask_is_built_when_compiled(family: str):
    """A mask would be an [S, S] boolean tensor in the graph."""
    S = 24
    seen: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        seen.extend(tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool)
        return graph.forward

    window = {} if family == "Llama" else {"sliding_window": 32}
    model, original = pair(family, num_hidden_layers=1, **window)
    ids = tokens(1, S)
    torch.compile(original, fullgraph=True, backend=backend)(input_ids=ids, labels=ids)
    assert any(shape[-2:] == (S, S) for shape in seen)
    seen.clear()
    torch.compile(model, fullgraph=True, backend=backend)(input_ids=ids, labels=ids)
    assert not any(shape[-2:] == (S, S) for shape in seen)


def test_a_window_that_reaches_less_far_than_the_row_is_kept():
    model, original = pair("Mistral", sliding_window=6, num_hidden_layers=1)
    ids = tokens(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same_training(model, original, compiled, input_ids=ids, labels=ids)


def test_no_recompile_when_batch_and_sequence_vary():
    model, _ = pair(num_hidden_layers=1)
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows, columns in [(2, 12), (3, 17), (5, 9)]:
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
    model, original = pair(num_hidden_layers=1)
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
            _forward,
            *args,
            **kwargs,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
    ids = tokens(2, 9)
    assert_same_training(model, original, input_ids=ids, labels=ids)
    assert {"llmk._rms_norm_fwd.default", "llmk._add_rms_norm_fwd.default", "llmk._swiglu_fwd.default"} <= seen


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_with_float32_weights(compiled: bool, device: torch.device):
    """Within bfloat16's own error of the unpatched model's float32 gradients."""
    model, original = pair(num_hidden_layers=1)
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
