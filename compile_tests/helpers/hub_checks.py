"""Checks of the kernel that `python -m llmk.hub` writes, and of llmk's layers in transformers' slots.

`python -m compile_tests.helpers.hub_checks FOLDER`, which test_hub.py runs: a process of their own, with the package
`kernels` itself. The loader is that of `kernels`, and so is the mapping, because transformers' own names no CPU.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import kernels
import torch
from torch import nn

FOLDER = Path(sys.argv[1])


class Missing:
    """Neither llmk nor transformers is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("llmk", "transformers"):
            raise ModuleNotFoundError(name)


def load_without_packages() -> Any:
    """Load the kernel, which needs neither, and train with it: all of its operators are in its own namespace."""
    sys.meta_path.insert(0, missing := Missing())  # type: ignore[arg-type]
    kernel = kernels.get_local_kernel(FOLDER)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    kernel.rms_norm(x, weight).sum().backward()
    names = [name for name in torch._C._dispatch_get_all_op_names() if "llmk" in name]
    assert x.grad is not None
    assert names
    assert all(name.startswith(f"{kernel.__name__}::") for name in names), names
    sys.meta_path.remove(missing)  # type: ignore[arg-type]
    return kernel


KERNEL = load_without_packages()

# isort: off
from compile_tests.helpers import kernel_slots_checks as slots_checks  # noqa: E402  which widens transformers' check of the version

# isort: on
import transformers  # noqa: E402
from kernels.layer import layer as kernels_layer  # noqa: E402

import llmk.functional  # noqa: E402
from compile_tests.helpers.families import assert_equal, loss_and_gradients, tokens  # noqa: E402
from compile_tests.helpers.garbage import collect_seldom  # noqa: E402
from compile_tests.helpers.observers import GraphOperators  # noqa: E402
from llmk.transformers.slots import LAYERS  # noqa: E402


class FromFolder(transformers.KernelConfig):
    """All layers of the kernel, by `kernels`' own repository of a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.inherit_mapping = False

    def sanitize_kernel_mapping(self, model: nn.Module) -> None:
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        local = kernels.LocalLayerRepository
        self.kernel_mapping = {slot: {"cpu": local(FOLDER, layer_name=slot)} for slot in LAYERS}


def assert_trains_as_without(family: str, operators: dict[str, int], experts: bool, **overrides: Any) -> None:
    """Loss and gradients as of the model's own layers, eager and in one graph, by these operators of the kernel."""
    own, model = (slots_checks.own_model(family, **overrides) for _ in range(2))
    ids = tokens(2, 12)
    inputs = {"input_ids": ids, "labels": ids}
    want = loss_and_gradients(own, own, inputs)
    model.set_use_kernels(True, FromFolder())
    if experts:
        model.set_experts_implementation(KERNEL.experts_implementation())
    assert_equal(loss_and_gradients(model, model, inputs), want)
    seen = GraphOperators(KERNEL.__name__, "aot_eager")
    assert_equal(loss_and_gradients(model, torch.compile(model, fullgraph=True, backend=seen), inputs), want)
    assert seen.graphs == [operators], seen.graphs


def check_llama() -> None:
    assert_trains_as_without("Llama", {"rms_norm": 3, "rope": 1}, experts=False, num_hidden_layers=1)


def check_a_hybrid() -> None:
    """Its rotary embedding turns a part of the head: the layer calls the function of the model."""
    operators = {
        "causal_conv1d": 1,
        "gated_delta_rule": 1,
        "moe_experts": 2,
        "rms_norm": 7,
        "rms_norm_gated": 1,
        "router_topk": 2,
    }
    assert_trains_as_without("Qwen3_5MoeText", operators, experts=True)


def check_layers_of_each_slot() -> None:
    """`kernels`' own check of a layer: no constructor, nothing but the two flags, the arguments of the class."""
    for slot, layer in LAYERS.items():
        ours = getattr(KERNEL.layers, slot)
        kernels_layer._validate_layer(check_cls=layer, cls=ours, repo=slot)  # type: ignore[arg-type]
        assert ours is not layer
        assert ours.has_backward is ours.can_torch_compile is True


def check_the_packages_operators_beside_the_kernels() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    own, theirs = torch.ops.llmk.rms_norm, getattr(torch.ops, KERNEL.__name__).rms_norm
    assert own.default is not theirs.default
    assert torch.equal(own(x, weight), theirs(x, weight))
    for name in llmk.functional.__all__:
        assert getattr(KERNEL, name).__module__.startswith(f"{KERNEL.__name__}.")
    both = torch.compile(lambda: (own(x, weight), theirs(x, weight)), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(y, own(x, weight)) for y in both())


if __name__ == "__main__":
    collect_seldom()
    transformers.logging.set_verbosity_error()
    errors = {check.__name__: slots_checks.error_of(check) for check in slots_checks.checks_of(vars(slots_checks))}
    warnings.simplefilter("ignore")
    errors |= {check.__name__: slots_checks.error_of(check) for check in slots_checks.checks_of(globals())}
    sys.stdout.write(json.dumps(errors))
