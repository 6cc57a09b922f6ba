"""Models with linear recurrences, patched: what they compute in training and generation, and what is no recurrence."""

import copy
import inspect
import itertools
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.breadth import some_of  # noqa: E402
from compile_tests.helpers.families import (  # noqa: E402
    COMMON,
    FAMILIES,
    assert_equal,
    loss_and_gradients,
    small_model,
    tokens,
)
from compile_tests.helpers.observers import GraphOperators, Operators  # noqa: E402
from compile_tests.helpers.recurrence_functions import (  # noqa: E402
    OTHER_DELTA_RULES,
    OTHER_SCANS,
    DeltaRule,
    Scan,
)
from llmk.transformers import patch  # noqa: E402
from tools.families_sweep import built  # noqa: E402

DELTA_RULES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp", "OlmoHybrid", "KimiLinear", "BailingHybrid")
SCANS = ("Mamba2", "Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH", "Zamba2")
OPERATORS: dict[str, str] = {name: "gated_delta_rule" for name in DELTA_RULES}
OPERATORS |= {name: "gated_linear_attention" for name in SCANS}
FOUND = {
    "gated_delta_rule": "gated_delta_rule, gated_delta_rule_step",
    "gated_linear_attention": "gated_linear_attention",
}
PLAIN: dict[str, Any] = {
    "torch_chunk_gated_delta_rule": DeltaRule(),
    "chunk_kimi_delta_attention": DeltaRule(),
    "mamba2_chunk_scan": Scan(),
}
"""The plain functions by transformers' names, the same token by token."""

PACKED = [family for family in OPERATORS if family != "Mamba2"]
"""transformers' Mamba2ForCausalLM does not hand on to its layers how a row is packed."""

KEPT = ("Qwen3Next", "OlmoHybrid", "KimiLinear", "Mamba2", "FalconH1")


pytestmark = pytest.mark.usefixtures("on_device")


def pair(family: str) -> tuple[Any, Any]:
    """A patched hybrid and the same one unpatched."""
    torch.manual_seed(0)
    original = small_model(family) if family in FAMILIES else built(getattr(transformers, f"{family}ForCausalLM"))
    model = copy.deepcopy(original)
    found = {e.text for e in patch(model).entries if e.kind == "recurrence"}
    assert found == {FOUND[OPERATORS[family]]}
    return model, original


def padded(side: str) -> dict[str, Tensor]:
    ids, mask = tokens(2, 70) % 97 + 2, torch.ones(2, 70, dtype=torch.long)  # longer than one chunk
    mask[0, :9] = 0
    mask = mask if side == "left" else mask.flip(1)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def exact(original: Any, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loss and gradients with the recurrence token by token, in float64 but for what the model makes float32."""
    model, module = copy.deepcopy(original).double(), sys.modules[type(original).__module__]
    model.set_experts_implementation("eager")  # PyTorch's grouped products take no float64
    with monkeypatch.context() as replaced:
        for name in PLAIN.keys() & vars(module).keys():
            replaced.setattr(module, name, PLAIN[name])
        loss, gradients = loss_and_gradients(model, model, inputs)
    return loss.float(), {name: gradient.float() for name, gradient in gradients.items()}


def packed(*lengths: int) -> dict[str, Tensor]:
    """A row of sequences, with all that says so: positions and a mask for attention, the rest for recurrences."""
    ids, seq_idx = tokens(1, sum(lengths)) % 97 + 2, torch.repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    alike = seq_idx[:, None, :, None] == seq_idx[:, None, None, :]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "attention_mask": (alike & torch.ones(alike.shape, dtype=torch.bool).tril()),
        "seq_idx": seq_idx.int(),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def sequences(row: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Each sequence of a packed row by itself; their losses add up to the row's."""
    lengths, count = row["cu_seq_lens_q"].diff().tolist(), int((row["labels"] != -100).sum())
    parts = zip(row["input_ids"].split(lengths, 1), row["labels"].split(lengths, 1), strict=True)
    return [{"input_ids": ids, "labels": labels, "num_items_in_batch": count} for ids, labels in parts]


SIDES = list(itertools.product(OPERATORS, ("left", "right")))
FEW = [("Qwen3Next", "right"), ("KimiLinear", "left"), ("Mamba2", "left"), ("FalconH1", "right")]


@pytest.mark.parametrize("case", some_of(SIDES, FEW), ids="-".join)
def test_a_hybrid_trains_as_before(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    """Padding is on either side, eager and in one graph: the gradients of decays are nearer than they were."""
    family, side = case
    model, original = pair(family)
    layers, inputs = patch(model).replaced["recurrence"], padded(side)
    want = exact(original, inputs, monkeypatch)
    plain = loss_and_gradients(original, original, inputs)
    torch.testing.assert_close(want[0], plain[0], rtol=1e-5, atol=0)
    assert_equal(loss_and_gradients(model, model, inputs), want, plain)
    if family == "Qwen4Exp":  # Dynamo has no Tensor.unflatten under a device context, whoever patches
        return
    graphs = GraphOperators()
    assert_equal(loss_and_gradients(model, torch.compile(model, fullgraph=True, backend=graphs), inputs), want, plain)
    (found,) = graphs.graphs
    assert found[OPERATORS[family]] == layers


@pytest.mark.parametrize("family", some_of(PACKED, ("Qwen3Next", "KimiLinear", "FalconH1")))
def test_a_packed_row_is_its_sequences(family: str, monkeypatch: pytest.MonkeyPatch):
    """Eager and in one graph; without patch transformers' own functions refuse it, or mix the sequences."""
    model, original = pair(family)
    row = packed(5, 66, 1, 8)
    parts = [exact(original, part, monkeypatch) for part in sequences(row)]
    want = sum(loss for loss, _ in parts), {name: sum(g[name] for _, g in parts) for name in parts[0][1]}
    # transformers makes masks of positions for attention, but in Granite 4, where they must be given.
    attention = "attention_mask" if family == "GraniteMoeHybrid" else "position_ids"
    inputs = {name: row[name] for name in ("input_ids", "labels", attention)}
    by_number, by_boundary = (inputs | {name: row[name]} for name in ("seq_idx", "cu_seq_lens_q"))
    assert_equal(loss_and_gradients(model, model, by_number), want)
    assert_equal(loss_and_gradients(model, model, by_boundary), want)
    by_position = inputs | {"position_ids": row["position_ids"]}
    assert_equal(loss_and_gradients(model, model, by_position), want)
    if family != "Qwen4Exp":  # as above
        # The operators are those of a row that is not packed, and Dynamo alone has more to trace: of positions most.
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_equal(loss_and_gradients(model, compiled, by_position), want)


def test_convolutions_alone_are_kept_apart_by_positions():
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        **COMMON, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"], conv_L_cache=3
    )
    model = transformers.Lfm2ForCausalLM(config).train()
    report, row = patch(model), packed(5, 66, 1, 8)
    assert report.replaced["packing"] == 1
    assert "sequences apart by position_ids" in str(report)
    parts = [loss_and_gradients(model, model, part) for part in sequences(row)]
    want = sum(loss for loss, _ in parts), {name: sum(g[name] for _, g in parts) for name in parts[0][1]}
    inputs = {name: row[name] for name in ("input_ids", "labels", "position_ids")}
    assert_equal(loss_and_gradients(model, model, inputs), want)


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("Mamba2", False), ("Jamba", False), ("Mamba2", True), pytest.param("Jamba", True, marks=pytest.mark.breadth)],
)
def test_where_positions_do_not_reach_the_layers_it_is_said_once(family: str, compiled: bool):
    """Not where there is one sequence, in generation, or with keywords that say more."""
    model = built(getattr(transformers, f"{family}ForCausalLM")).train()
    report, row = patch(model), packed(4, 5)
    why = report.left[""]
    assert why in ("Mamba2Model takes no position_ids", "JambaMambaDecoderLayer does not hand on seq_idx")
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    inputs, said = {name: row[name] for name in ("input_ids", "labels")}, []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*states run on")
        run(**inputs, use_cache=False)
        with torch.no_grad():
            model(**inputs, position_ids=row["position_ids"], use_cache=False)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(**inputs, position_ids=row["position_ids"], use_cache=False)
        said += [str(each.message) for each in caught if "states run on" in str(each.message)]
    assert len(said) == 1
    assert report.fell_back == {"": f"{why}: states run on from one sequence of a packed row into the next"}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["OlmoHybrid", "Mamba2"])
def test_gradient_checkpointing(family: str, reentrant: bool):
    model, original = pair(family)
    inputs = padded("left")
    want = loss_and_gradients(model, model, inputs)
    assert_equal(want, loss_and_gradients(original, original, inputs))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(loss_and_gradients(model, model, inputs), want)


CACHES = ("cache", "past_key_values", "cache_params")
"""The names of a model's cache, the newest of transformers first: outputs keep old names beside it."""


# Where no layer is attention, as in the small Qwen4Exp, transformers does not count the tokens in a cache.
@pytest.mark.parametrize("family", some_of([f for f in OPERATORS if f != "Qwen4Exp"], KEPT))
def test_a_hybrid_goes_on_from_its_cache_as_before(family: str):
    """The model goes on with padding on the left, after a prompt in two chunks and token by token."""
    model, original = (m.eval() for m in pair(family))
    ids = tokens(2, 11) % 97 + 2
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    for chunked in ({},) if family == "Mamba2" else ({}, {"prefill_chunk_size": 5}):
        got, want = (m.generate(ids, **options, **chunked) for m in (model, original))
        assert torch.equal(got, want)
    results = []
    with torch.no_grad():
        for m in (model, original):
            first = m(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
            name = next(name for name in CACHES if name in first)
            rest = m(ids[:, 6:], attention_mask=mask, use_cache=True, **{name: first[name]})
            results.append(torch.cat([first.logits, rest.logits], 1)[mask.bool()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Mamba2", "FalconH1"])
def test_gradients_go_back_through_a_cache(family: str):
    """The model writes each chunk's state over that of the chunk before, which the operator was given."""
    model, original = pair(family)
    ids, found = tokens(2, 12) % 97 + 2, []
    for m in (model, original):
        first = m(ids[:, :4], use_cache=True)
        name = next(name for name in CACHES if name in first)
        for chunk in (ids[:, 4:9], ids[:, 9:]):
            last = m(chunk, use_cache=True, **{name: first[name]})
        loss = last.logits.square().mean()
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in m.named_parameters() if p.grad is not None}))
    assert_equal(*found)


@pytest.mark.parametrize("family", ["Qwen3_5", "KimiLinear", "Bamba"])
def test_tokens_are_generated_by_steps(family: str):
    """Each layer calls the operators of one token, which leave the states that its own functions leave."""
    model, original = (m.eval() for m in pair(family))
    ids, results = tokens(2, 12) % 97 + 2, []
    with torch.no_grad(), Operators() as seen:
        for m in (model, original):
            cache = m(ids[:, :9], use_cache=True).past_key_values
            steps = [m(token, past_key_values=cache, use_cache=True).logits for token in ids[:, 9:].split(1, 1)]
            results.append(torch.cat(steps, 1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert seen.found["_causal_conv1d_step_fwd.default"] == 3
    assert seen.found["_gated_delta_rule_step_fwd.default"] == (0 if family == "Bamba" else 3)


@pytest.mark.parametrize("family", ["Qwen3_5", "FalconH1"])
def test_in_bfloat16_a_hybrid_is_as_near_to_float64(family: str, monkeypatch: pytest.MonkeyPatch):
    """The operators round what goes into products, which the models' own functions do not; the layers around do."""
    model, original = pair(family)
    inputs = padded("right")
    _, want = exact(original, inputs, monkeypatch)
    errors = []
    for m in (model.bfloat16(), original.bfloat16()):
        _, got = loss_and_gradients(m, m, inputs)
        errors.append(sum(float((got[name] - want[name]).square().sum()) for name in want) ** 0.5)
    assert errors[0] <= 1.5 * errors[1]


# ---- functions of one's own

rule: Any = DeltaRule()
scan: Any = Scan()


class DeltaLayer(nn.Module):
    """A delta-rule layer, by the function that its source calls `rule`."""

    operator, called = "gated_delta_rule", "llmk_gated_delta_rule_0(self, rule, q, k, v, g="

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(16, 3 * 16, bias=False), nn.Linear(16, 2 * 2, bias=False)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).chunk(3, -1)
        g, beta = self.gates(x).chunk(2, -1)
        return rule(q, k, v, g=-nn.functional.softplus(g), beta=beta.sigmoid(), output_final_state=True, **kwargs)


class ScanLayer(nn.Module):
    """A scan layer, by the function that its source calls `scan`."""

    operator, called = "gated_linear_attention", "llmk_gated_linear_attention_0(self, scan, x, dt, "

    def __init__(self) -> None:
        super().__init__()
        self.BCx, self.dt = nn.Linear(16, 3 * 16, bias=False), nn.Linear(16, 2, bias=False)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.randn(2)) for _ in range(3))

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        B, C, x, dt = *self.BCx(x).unflatten(-1, (2, -1)).chunk(3, -1), self.dt(x)
        kwargs = {"chunk_size": 16, "dt_softplus": True, "return_final_states": True, **kwargs}
        return scan(x, dt, -self.A_log.exp(), B, C, D=self.D, dt_bias=self.dt_bias, **kwargs)


def by_operator(result: Tensor, operator: str) -> bool:
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return any(operator in node.name() for node in seen)


STATES = {DeltaLayer: "initial_state", ScanLayer: "initial_states"}
OWN: dict[Any, list[dict[str, Any]]] = {  # what the functions understand and the operators do not
    DeltaLayer: [],
    ScanLayer: [{"z": torch.ones(1)}, {"dt_limit": (-1.0, 1.0)}],
}


@pytest.mark.parametrize("layer", [DeltaLayer, ScanLayer])
def test_a_recurrence_is_found(layer: Any):
    model = layer()
    assert not patch(layer(), recurrences=False).entries
    original, x = copy.deepcopy(model), torch.randn(2, 9, 16) / 2
    report = patch(model)
    assert report.replaced == {"recurrence": 1}
    assert layer.called in report.source()
    for options in ({}, {STATES[layer]: torch.randn(2, 2, 8, 8)}, {"chunk_size": 4, "cu_seqlens": None}):
        results = [m(x, **options) for m in (model, original)]
        assert by_operator(results[0][0], layer.operator)
        torch.testing.assert_close(*results)
        for out, final in results:
            (out.square().sum() + final.square().sum()).backward()
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    for given, options in ((x, {"unknown": 1}), *((x, options) for options in OWN[layer]), (x.double(), {})):
        results = [m.to(given.dtype)(given, **options) for m in (model, original)]
        assert by_operator(results[0][0], layer.operator) == ("unknown" in options)
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("layer", [DeltaLayer, ScanLayer])
@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens", "cu_seq_lens_q"])
def test_a_packed_row_in_a_layer(layer: Any, name: str):
    """Output and gradients of each sequence, and the state of the last one."""
    model = layer()
    original, x = copy.deepcopy(model), torch.randn(1, 9, 16) / 2
    patch(model)
    value = torch.tensor([[3] * 4 + [1] * 5]) if name == "seq_idx" else torch.tensor([0, 4, 4, 9])
    out, final = model(x, **{name: value})
    parts = [original(part) for part in x.split([4, 5], 1)]
    want, last = torch.cat([part for part, _ in parts], 1), parts[-1][1]
    torch.testing.assert_close((out, final), (want, last))
    (out.square().sum() + final.square().sum()).backward()
    (want.square().sum() + last.square().sum()).backward()
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    state = {STATES[layer]: torch.randn(1, 2, 8, 8)}
    if name == "seq_idx":
        want, _ = original(x[:, :4], **state)
        torch.testing.assert_close(model(x, **{name: value}, **state)[0][:, :4], want)
    else:
        with pytest.raises(ValueError, match=f"{name}: expected no cache of tokens before the packed row"):
            model(x, **{name: value}, **state)


OTHERS = [("rule", DeltaLayer, cls) for cls in OTHER_DELTA_RULES] + [("scan", ScanLayer, cls) for cls in OTHER_SCANS]


@pytest.mark.parametrize(("name", "layer", "function"), OTHERS)
def test_another_recurrence_is_left(name: str, layer: Any, function: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), name, function())
    report = patch(layer())
    assert not report.replaced
    assert name in str(report.entries)


def test_a_function_without_groups_of_heads_is_found(monkeypatch: pytest.MonkeyPatch):
    class Ungrouped(DeltaRule):
        def __call__(self, query, key, value, g, beta, chunk_size=64, *args, **kwargs):
            assert query.shape[2] == value.shape[2]
            return super().__call__(query, key, value, g, beta, chunk_size, *args, **kwargs)

        __call__.__signature__ = inspect.signature(DeltaRule.__call__)  # type: ignore[attr-defined]

    monkeypatch.setitem(globals(), "rule", Ungrouped())
    assert patch(DeltaLayer()).replaced == {"recurrence": 1}
