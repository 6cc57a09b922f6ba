"""Checks of llmk's layers in transformers' slots: run by hub_checks.py, in a process of their own.

transformers asks for `kernels` when it is imported, and makes slots of its classes then. Where the version installed
here is not among those that it asks for, its check of the version, and nothing else, is widened to it first.
"""

import copy
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from transformers.utils import import_utils

VERSION = metadata.version("kernels")
if not import_utils.is_kernels_available():
    import_utils.is_kernels_available.__wrapped__.__defaults__ = (VERSION, VERSION + ".post1")
    import_utils.is_kernels_available.cache_clear()

import kernels  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaMLP  # noqa: E402
from transformers.models.kimi_linear.modeling_kimi_linear import (  # noqa: E402
    KimiLinearRMSNormGated,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan  # noqa: E402
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm  # noqa: E402
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import (  # noqa: E402
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from compile_tests.helpers.families import assert_equal, loss_and_gradients, small_model, tokens  # noqa: E402
from compile_tests.helpers.observers import GraphOperators, Operators  # noqa: E402
from compile_tests.helpers.recurrence_functions import DeltaRule, Scan  # noqa: E402
from llmk.opcheck import accuracy_violation  # noqa: E402
from llmk.registry import OPS  # noqa: E402
from llmk.transformers import kernel_config, patch  # noqa: E402
from llmk.transformers.slots import LAYERS  # noqa: E402


def own_model(family: str, **overrides: Any) -> Any:
    """A small model, the same each time, that runs its own layers.

    A function in a slot is one object for all models of its kind, except of those that were copied from another.
    """
    model = small_model(family, **overrides)
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        return kernels.kernelize(model, mode=kernels.Mode.TRAINING)


def filled(layer: nn.Module, mode: kernels.Mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE) -> Any:
    """A module with its slots filled by `kernels` itself, which raises where a slot cannot be."""
    config = kernel_config()
    config.create_compatible_mapping(layer)
    with kernels.use_kernel_mapping(config.kernel_mapping, inherit_mapping=False):
        return kernels.kernelize(layer, mode=mode, device="cpu", use_fallback=False)


def is_left(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether a call runs the model's own code alone."""
    with Operators() as seen:
        module(*args, **kwargs)
    return not seen.found


def assert_same_as_own(family: str, operators: dict[str, int], **overrides: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients of the model's own layers, eager and compiled, and these operators in the graph.

    Return the model with its own layers, the other one, and this compiled.
    """
    own, model, ids = own_model(family, **overrides), own_model(family, **overrides), tokens(2, 12)
    inputs = {"input_ids": ids, "labels": ids}
    want = loss_and_gradients(own, own, inputs)
    model.set_use_kernels(True, kernel_config())
    assert_equal(loss_and_gradients(model, model, inputs), want)
    seen = GraphOperators()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    assert_equal(loss_and_gradients(model, compiled, inputs), want)
    assert seen.graphs == [operators], seen.graphs
    return own, model, compiled


def check_llama_trains_in_one_graph_with_equal_losses() -> None:
    def losses(model: Any, run: Any) -> list[float]:
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(10):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    own, model, compiled = assert_same_as_own("Llama", {"rms_norm": 5, "rope": 2})
    ids = tokens(2, 12)
    want, got = losses(own, own), losses(model, compiled)
    assert want[-1] < want[0]
    assert all(abs(a - b) <= 1e-3 * b for a, b in zip(got, want, strict=True)), (got, want)


def check_layers_marked_by_the_user() -> None:
    """transformers 5.23 has these slots in its mapping and no layer in them."""
    hub_kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
    hub_kernels.replace_kernel_forward_from_hub(GemmaMLP, "GeGLUMLP")
    try:
        of_llama = {"rms_norm": 3, "rope": 1, "swiglu": 1}
        assert_same_as_own("Llama", of_llama, num_hidden_layers=1)
        assert_same_as_own("Gemma", {"rope": 1, "geglu": 1}, num_hidden_layers=1)
    finally:
        for cls in (LlamaMLP, GemmaMLP):
            del cls.kernel_layer_name, cls.kernel_condition


def check_a_slot_with_another_function_keeps_it() -> None:
    with pytest.warns(UserWarning, match="rotary_pos_emb: the model's own layer stays in this slot: "):
        assert_same_as_own("GptOss", {"rms_norm": 3}, num_hidden_layers=1)


def check_a_model_without_slots_is_refused() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    with pytest.raises(ValueError, match=r"model: expected one with a slot among RMSNorm, .* got GPT2LMHeadModel"):
        transformers.GPT2LMHeadModel(config).set_use_kernels(True, kernel_config())


def check_evaluation_generation_and_training_again() -> None:
    own, ids = own_model("Llama").eval(), tokens(2, 6)
    want = own.generate(ids, max_new_tokens=5)
    with tempfile.TemporaryDirectory() as folder:
        own.save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, use_kernels=True, kernel_config=kernel_config()
        )
    for training in (False, True, False):
        assert model.train(training).model.norm.forward.__func__ is LAYERS["RMSNorm"].forward
    assert torch.equal(model.generate(ids, max_new_tokens=5), want)
    assert model.state_dict().keys() == own.state_dict().keys()


def check_zero_centered_norm() -> None:
    norm, x = Qwen3_5RMSNorm(24), torch.randn(3, 24, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_()
    ours = filled(norm)
    assert GraphOperators().of(ours, x.float()) == {"rms_norm": 1}
    exact = nn.functional.rms_norm(x, (24,), 1.0 + norm.weight.double(), 1e-6)
    plain = nn.functional.rms_norm(x.float(), (24,), 1.0 + norm.weight, 1e-6)
    assert accuracy_violation(ours(x.float()), plain, exact) is None


def check_gated_norms() -> None:
    for cls, activation in ((Qwen3NextRMSNormGated, "silu"), (KimiLinearRMSNormGated, "sigmoid")):
        norm, (x, gate) = cls(24), torch.randn(2, 3, 24, dtype=torch.float64)
        with torch.no_grad():
            norm.weight.normal_()
        ours = filled(norm)
        assert ours.activation == activation
        assert GraphOperators().of(ours, x.float(), gate.float()) == {"rms_norm_gated": 1}
        eps, reference = norm.variance_epsilon, OPS["rms_norm_gated"].reference
        exact = reference(x, gate, norm.weight.double(), eps, activation=activation)
        plain = reference(x.float(), gate.float(), norm.weight, eps, activation=activation)
        assert accuracy_violation(ours(x.float(), gate.float()), plain, exact) is None
        for others in ((x.float(), gate), (x, gate)):  # other dtypes run the model's own code
            assert is_left(ours, *others)


def check_the_router() -> None:
    config = transformers.Qwen3_5MoeTextConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3)
    router, x = Qwen3_5MoeTopKRouter(config), torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        router.weight.normal_()
    ours, wide = filled(copy.deepcopy(router)), copy.deepcopy(router).double()
    assert GraphOperators().of(ours, x.float()) == {"router_topk": 1}
    (*got, experts), (*plain, _), (*exact, chosen) = ours(x.float()), router(x.float()), wide(x)
    assert torch.equal(experts, chosen)
    for values in zip(got, plain, exact, strict=True):
        assert accuracy_violation(*values) is None
    gradients = [
        torch.autograd.grad(r(y)[1].pow(2).sum(), r.weight)[0]
        for r, y in ((ours, x.float()), (router, x.float()), (wide, x))
    ]
    assert accuracy_violation(*gradients) is None
    assert is_left(filled(wide), x)


def check_a_router_of_another_score_stays() -> None:
    config = transformers.LagunaConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3)
    config.moe_router_logit_softcapping = 0.0
    with pytest.raises(ValueError, match="expected one with a slot"), pytest.warns(UserWarning, match="does not comp"):
        filled(LagunaTopKRouter(config))


def calling(function: Any) -> Any:
    """A module that calls a function of transformers, where `kernels` finds it."""

    class Calling(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return hub_kernels.use_kernelized_func(function)(Calling)()


def check_the_short_convolution() -> None:
    model = filled(calling(causal_conv1d_fn))
    x, weight, bias = torch.randn(2, 9, 6).transpose(1, 2), torch.randn(6, 4), torch.randn(6)
    for given, options in (((x, weight, bias), {"activation": "silu"}), ((x, weight), {"seq_idx": None})):
        assert GraphOperators().of(model, *given, **options) == {"causal_conv1d": 1}
        conv = nn.functional.conv1d
        results = [model(*given, **options)]
        for dtype in (torch.float32, torch.float64):
            a, w, *b = (t.to(dtype) for t in given)
            y = conv(a, w.unsqueeze(1), *b, padding=3, groups=6)[..., :9]
            results.append(nn.functional.silu(y) if "activation" in options else y)
        assert accuracy_violation(*results) is None
    assert is_left(model, x.double(), weight.double(), activation="silu")


def check_a_step_of_the_short_convolution() -> None:
    own, model, state = calling(causal_conv1d_update), calling(causal_conv1d_update), torch.randn(2, 6, 4)
    args = [torch.randn(2, 6, 1), state, torch.randn(6, 4), torch.randn(6)]

    def outputs(module: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x, state, weight, bias = (t.to(dtype, copy=True) for t in args)
        return module(x, state, weight, bias, activation="silu"), state

    plain, want = outputs(own, torch.float32), outputs(own, torch.float64)
    model = filled(model)
    for got, plain_one, want_one in zip(outputs(model, torch.float32), plain, want, strict=True):
        assert accuracy_violation(got, plain_one, want_one) is None
    assert GraphOperators().of(model, *args, activation="silu") == {"causal_conv1d_step": 1}
    assert is_left(model, *(t.double() for t in args), activation="silu")


def assert_slot(operator: str, layer: nn.Module, exact: Any, args: list[torch.Tensor], **options: Any) -> None:
    """The slot runs the operator in float32, as right as the model's own, and the model's own in float64."""
    own = layer(*args, **options)
    ours = filled(layer)
    assert GraphOperators().of(ours, *args, **options) == {operator: 1}
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    for got, plain, want in zip(ours(*args, **options), own, exact(*(x.double() for x in args), **wide), strict=True):
        assert accuracy_violation(got, plain, want) is None
    assert is_left(ours, *(x.double() for x in args), **wide)


def check_the_gated_delta_rule() -> None:
    q, k, v = torch.randn(2, 70, 2, 8), torch.randn(2, 70, 2, 8), torch.randn(2, 70, 4, 6)
    g, beta, state = -torch.rand(2, 70, 4), torch.rand(2, 70, 4), torch.randn(2, 4, 8, 6)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    assert_slot("gated_delta_rule", calling(torch_chunk_gated_delta_rule), DeltaRule(), [q, k, v, g, beta], **options)


def check_the_gated_delta_rule_with_a_decay_for_each_channel() -> None:
    q, k, v, g = *torch.randn(3, 2, 70, 2, 8), -torch.rand(2, 70, 2, 8)
    options = {"initial_state": torch.randn(2, 2, 8, 8), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    assert_slot(
        "gated_delta_rule",
        calling(chunk_kimi_delta_attention),
        DeltaRule(),
        [q, k, v, g, torch.rand(2, 70, 2)],
        **options,
    )


def check_steps_of_the_gated_delta_rule() -> None:
    for layer, channels in (
        (calling(torch_recurrent_gated_delta_rule), False),
        (calling(recurrent_kimi_delta_attention), True),
    ):
        heads = 2 if channels else 4
        q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, heads, 8)
        g, beta = -torch.rand(2, 1, heads, *[8] * channels), torch.rand(2, 1, heads)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        state = torch.randn(2, heads, 8, 8)
        assert_slot("gated_delta_rule_step", layer, DeltaRule(), [q, k, v, g, beta], initial_state=state, **options)
        more = [x.expand(-1, 3, *x.shape[2:]) for x in (q, k, v, g, beta)]  # several tokens are not a step
        assert is_left(filled(layer), *more, initial_state=state, **options)


def check_the_scan_of_mamba2() -> None:
    x, dt, A, state = torch.randn(2, 70, 4, 6), torch.randn(2, 70, 4), -torch.rand(4), torch.randn(2, 4, 6, 8)
    B, C, D, bias = torch.randn(2, 70, 2, 8), torch.randn(2, 70, 2, 8), torch.randn(4), torch.randn(4)
    options = {"D": D, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "return_final_states": True}
    assert_slot(
        "gated_linear_attention", calling(mamba2_chunk_scan), Scan(), [x, dt, A, B, C], chunk_size=16, **options
    )


def check_hybrids() -> None:
    one = {"num_hidden_layers": 1}
    for family, operator, options in (
        ("Qwen3Next", "gated_delta_rule", one | {"layer_types": ["linear_attention"]}),
        ("FalconH1", "gated_linear_attention", one),
    ):
        own, model, ids = own_model(family, **options), own_model(family, **options), tokens(2, 12)
        inputs, seen = {"input_ids": ids, "labels": ids}, GraphOperators()
        want = loss_and_gradients(own, own, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slots that keep the model's own layer
            model.set_use_kernels(True, kernel_config())
        assert_equal(loss_and_gradients(model, torch.compile(model, fullgraph=True, backend=seen), inputs), want)
        assert seen.graphs[0][operator] == 1


def check_packed_rows() -> None:
    """The loss and gradients of a row are those of its sequences, each by itself in the model's own layers."""
    for family in ("Qwen3Next", "FalconH1"):
        own, model, ids = own_model(family), own_model(family), tokens(1, 12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slots that keep the model's own layer
            model.set_use_kernels(True, kernel_config())
        parts = [{"input_ids": part, "labels": part, "num_items_in_batch": 10} for part in ids.split([5, 7], 1)]
        losses, gradients = zip(*(loss_and_gradients(own, own, part) for part in parts), strict=True)
        want = sum(losses), {name: sum(g[name] for g in gradients) for name in gradients[0]}
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        row = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
        numbers, boundaries = torch.tensor([[0] * 5 + [1] * 7]), torch.tensor([0, 5, 12])
        for packing in ({"seq_idx": numbers}, {"cu_seq_lens_q": boundaries}):
            assert_equal(loss_and_gradients(model, model, row | packing), want)


def check_patch_finds_functions_that_are_modules_here() -> None:
    one = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    own, model, ids = own_model("Qwen3Next", **one), own_model("Qwen3Next", **one), tokens(2, 12)
    assert isinstance(torch_chunk_gated_delta_rule, nn.Module)
    replaced = patch(model).replaced
    assert replaced["convolution"] == replaced["recurrence"] == 1
    inputs, seen = {"input_ids": ids, "labels": ids}, GraphOperators()
    want = loss_and_gradients(own, own, inputs)
    assert_equal(loss_and_gradients(model, torch.compile(model, fullgraph=True, backend=seen), inputs), want)
    assert seen.graphs[0]["gated_delta_rule"] == 1


def check_other_dtypes_run_the_models_own_code() -> None:
    own, ours = own_model("Llama").model.norm, filled(own_model("Llama").model.norm)
    for x in (torch.randn(3, 32).bfloat16(), torch.randn(3, 32).double()):
        assert is_left(ours, x)
        torch.testing.assert_close(ours(x), own(x), rtol=0, atol=0)


loss_function: Any = hub_kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)


def in_float64(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
    """The loss of ForCausalLMLoss, which makes float32 of its logits."""
    targets = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index) if shift_labels is None else shift_labels
    total = nn.functional.cross_entropy(
        logits.view(-1, vocab_size), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    return total / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def check_the_loss() -> None:
    logits, labels = torch.randn(2, 7, 11), tokens(2, 7) % 11
    labels[0, 2:4] = -100
    model = filled(calling(loss_function))
    others = labels.masked_fill(labels == -100, -1)
    for options in (
        {},
        {"num_items_in_batch": torch.tensor(5)},
        {"shift_labels": labels.roll(-1, 1)},
        {"shift_labels": others, "ignore_index": -1},
    ):
        found = GraphOperators().of(model, logits, labels, 11, **options)
        assert found == {"cross_entropy": 1}, found
        inputs = [
            logits.to(dtype, copy=True).requires_grad_() for dtype in (torch.float32, torch.float32, torch.float64)
        ]
        losses = [
            loss(x, labels, 11, **options) for loss, x in zip((model, ForCausalLMLoss, in_float64), inputs, strict=True)
        ]
        gradients = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, inputs, strict=True)]
        assert accuracy_violation(*losses) is None
        assert accuracy_violation(*gradients) is None


def checks_of(names: Mapping[str, Any]) -> list[Callable[[], None]]:
    return [value for name, value in names.items() if name.startswith("check_")]


def error_of(check: Callable[[], None]) -> str:
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""
