"""Checks of the kernel that `python -m llmk.hub` writes: run by test_hub.py, in a process with the package.

`python -m compile_tests.helpers.hub_checks FOLDER`. The loader is that of `kernels`, and so is the mapping, because
transformers' own names no CPU.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

# isort: off
from compile_tests.helpers import kernel_slots_checks as slots_checks  # which widens transformers' check of the version

# isort: on
import kernels
import torch
import transformers
from kernels.layer import layer as kernels_layer
from torch import nn

import llmk.functional
from compile_tests.helpers.families import assert_equal, loss_and_gradients, tokens
from compile_tests.helpers.garbage import collect_seldom
from compile_tests.helpers.observers import GraphOperators
from llmk.transformers.slots import LAYERS

FOLDER = Path(sys.argv[1])
KERNEL: Any = kernels.get_local_kernel(FOLDER)


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
    seen = GraphOperators(KERNEL.__name__)
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
    warnings.simplefilter("ignore")
    checks = [value for name, value in [*globals().items()] if name.startswith("check_")]
    sys.stdout.write(json.dumps({check.__name__: slots_checks.error_of(check) for check in checks}))
