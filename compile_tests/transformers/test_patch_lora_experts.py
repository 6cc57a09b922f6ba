"""`patch` where PEFT has a LoRA on packed experts: its products beside theirs, and no other weights of their size."""

import copy
import functools
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", "0.21")

from peft.tuners.lora.layer import _LoraParameterProxy  # noqa: E402

from compile_tests.helpers.backend_checks import require_right  # noqa: E402
from compile_tests.helpers.families import assert_same_training, small_model, tokens  # noqa: E402
from compile_tests.helpers.lora import lora_config, with_lora  # noqa: E402
from llmk.accuracy.neighbours import Change  # noqa: E402
from llmk.transformers import Report, patch  # noqa: E402

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALONE = dict.fromkeys(("norms", "mlps", "rope", "residuals", "loss", "masks"), False)
"""All but the experts is left, so that they alone are compared."""


pytestmark = pytest.mark.usefixtures("on_device")


OPTIONS: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": BOTH, "r": 8, "lora_alpha": 12}
config = functools.partial(lora_config, **OPTIONS)
adapted = functools.partial(with_lora, **OPTIONS)


def pair(family: str = "Qwen3Moe", **options: Any) -> tuple[Any, Any]:
    """A patched model with adapters, and the same one unpatched."""
    original = adapted(small_model(family, use_cache=False, experts_implementation="eager"), **options)
    model = copy.deepcopy(original)
    assert patch(model, **ALONE).replaced == {"experts": 2 * len(original.get_base_model().model.layers)}
    return model, original


def experts_of(model: Any) -> Any:
    """The outermost wrapper of a layer's experts."""
    return model.get_base_model().model.layers[0].mlp.experts


def packed(model: Any) -> list[Tensor]:
    experts = experts_of(model).get_base_layer()
    return [experts.gate_up_proj, experts.down_proj]


def step(experts: Any, run: Any, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of tokens, routing weights and all that learns."""
    generator = torch.Generator(experts.get_base_layer().down_proj.device).manual_seed(3)
    x = torch.randn(24, 32, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()
    indices = torch.rand(24, 4, generator=generator).topk(2).indices
    weights = (torch.rand(24, 2, generator=generator) + 0.1).to(torch.bfloat16).to(dtype).requires_grad_()
    grad = torch.randn(24, 32, generator=generator).to(torch.bfloat16).to(dtype)
    learning = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    output = run(x, indices, weights)
    return [output, *torch.autograd.grad(output, [x, weights, *learning], grad)]


def require_same(model: Any, original: Any, run: Any = None) -> None:
    """Require the accuracy rule of the patched model's experts, beside those of the unpatched."""
    experts = experts_of(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="llmk: ")
        got = step(experts, experts if run is None else run, experts.get_base_layer().down_proj.dtype)

    def plain(change: Change) -> list[Tensor]:
        changed = copy.deepcopy(experts_of(original))
        for parameter in changed.parameters():
            parameter.data = change(parameter.data)
        return step(changed, changed, changed.get_base_layer().down_proj.dtype)

    require_right(got, plain)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_adapted_experts(family: str, dtype: torch.dtype, compiled: bool) -> None:
    model, original = pair(family)
    for m in (model, original):
        m.to(dtype)
    run = torch.compile(experts_of(model), backend="aot_eager", fullgraph=True) if compiled else None
    require_same(model, original, run)
    assert all(weight.grad is None for weight in packed(model))


def test_adapters_in_float32() -> None:
    """The adapters that PEFT gives a bfloat16 model. It rounds them too; the error of each result is taken together."""
    model, original = pair()
    for m in (model, original):
        for name, parameter in m.named_parameters():
            parameter.data = parameter.data if "lora_" in name else parameter.data.bfloat16()
    exact = copy.deepcopy(original).double()
    runs = [(model, torch.bfloat16), (original, torch.bfloat16), (exact, torch.float64)]
    for got, plain, right in zip(*(step(experts_of(m), experts_of(m), dtype) for m, dtype in runs), strict=True):
        assert got.dtype == plain.dtype
        assert 0 < (got - right).norm() <= 1.5 * (plain - right).norm()


@pytest.mark.parametrize(
    ("targets", "compiled"),
    [(BOTH, False), (BOTH, True), (BOTH[:1], False), (BOTH[1:], False)],
    ids=["both", "both, compiled", "gate_up", "down"],
)
def test_a_model(targets: list[str], compiled: bool) -> None:
    original = adapted(small_model("Qwen3Moe", use_cache=False, num_hidden_layers=1), target_parameters=targets)
    model = copy.deepcopy(original)
    patch(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else None
    assert_same_training(model, original, run, input_ids=tokens(2, 9))


class Shapes(TorchDispatchMode):
    """Writes down the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, tuple | list) else [output]
        self.seen |= {tuple(t.shape) for t in outputs if isinstance(t, Tensor) and not t._is_view()}
        return output


def test_no_other_weights_of_their_size() -> None:
    model, original = pair(r=2)
    of_weights = {tuple(weight.shape) for weight in packed(model)}
    with Shapes() as patched:
        step(experts_of(model), experts_of(model), torch.float32)
    with Shapes() as plain:
        step(experts_of(original), experts_of(original), torch.float32)
    assert not of_weights & patched.seen
    assert of_weights <= plain.seen


# ---- what else PEFT does with a layer


def test_several_adapters_are_added() -> None:
    model, original = pair()
    for m in (model, original):
        torch.manual_seed(3)
        m.add_adapter("other", config(r=4, use_rslora=True))
    for names in (["default", "other"], ["other"]):
        for m in (model, original):
            m.base_model.set_adapter(names)
        require_same(model, original)


def test_merged_disabled_and_unloaded() -> None:
    model, original = pair()
    ids = tokens(2, 9)

    def require_equal(a: Any, b: Any) -> None:
        torch.testing.assert_close(a(input_ids=ids).logits, b(input_ids=ids).logits)

    for merged in (False, True):
        if merged:
            for m in (model, original):
                m.merge_adapter()
            require_equal(model, original)
        with model.disable_adapter(), original.disable_adapter():
            require_equal(model, original)
    require_same(model, original)
    require_equal(model.merge_and_unload(), original.merge_and_unload())


def test_copies_and_unpatch() -> None:
    model, original = pair()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        require_same(twin, original)
    assert model.state_dict().keys() == original.state_dict().keys()
    Report(model).unpatch()
    assert type(experts_of(model)) is type(experts_of(original))


# ---- what is left, and said


def require_left(model: Any, original: Any, words: str) -> None:
    """Require that the patched experts do as PEFT does, and say why."""
    with pytest.warns(UserWarning, match=f"ParamWrapper: the model's own code runs, .*: {words}"):
        got = step(experts_of(model), experts_of(model), torch.float32)
    torch.testing.assert_close(got, step(experts_of(original), experts_of(original), torch.float32))


def test_a_hook_on_what_is_no_longer_called() -> None:
    model, original = pair()
    for m in (model, original):
        experts_of(m).base_layer.register_forward_hook(lambda module, args, output: 2 * output)
    require_left(model, original, "has adapters, and a hook looks at one of their wrappers")


def test_sharded_weights() -> None:
    """ZeRO-3's parameters have a name of their own there."""
    model, original = pair()
    experts_of(model).lora_A["default"].weight.ds_id = 1
    require_left(model, original, "has adapters, and weights that are sharded")


def test_a_hook_on_the_experts() -> None:
    model, original = pair()
    for m in (model, original):
        experts_of(m).get_base_layer().register_forward_hook(lambda module, args, output: 2 * output)
    require_same(model, original)


def test_adapters_without_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PEFT before 0.21."""
    model, original = pair()
    late = copy.deepcopy(original)
    monkeypatch.delattr(type(experts_of(original)), "get_delta_factors")
    monkeypatch.setattr(type(experts_of(original)), "_activate_lora", summed)
    words = "has adapters of a PEFT that does not give their factors: 0.21 and later do"
    require_left(model, original, words)
    assert set(patch(late, **ALONE).left.values()) == {words}


@contextmanager
def summed(wrapper: Any, names: list[str]) -> Iterator[None]:
    """PEFT's context in which the experts have the sums of weights and adapters."""
    proxy = _LoraParameterProxy(wrapper.get_delta_weight(names[0]))
    nn.utils.parametrize.register_parametrization(wrapper.get_base_layer(), wrapper.parameter_name, proxy)
    yield
    wrapper._remove_parametrizations()


def test_patched_before() -> None:
    """PEFT's wrappers come around patched experts: these take the weights that they are given."""
    original = small_model("Qwen3Moe", use_cache=False, experts_implementation="eager")
    model = copy.deepcopy(original)
    patch(model, **ALONE)
    require_same(adapted(model), adapted(original))
