"""The walks: tiles of which ptxas makes wrong code for sm_90, that no plan has them, and what is added to a state."""

import itertools
import re

import pytest
import torch
import triton

from compile_tests.helpers import aot
from compile_tests.helpers.uniform_registers import undefined_descriptors
from compile_tests.helpers.walks import forward_walk, makes_outputs
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET
from llmk.registry.launch import Launch
from llmk.registry.private.tensors import FakeTensorMode

SIZES = (16, 48, 64, 128, 256)
"""Sizes of keys and of values that have tiles of their own."""


@pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: the kernels are interpreted, not compiled")
@pytest.mark.skipif(not triton.__version__.startswith(("3.6.", "3.7.")), reason="seen with Triton 3.6 and 3.7.1")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("corrected", "K"), [(True, 64), (False, 128)])
def test_one_step_in_shared_memory_is_built_wrong(corrected: bool, K: int, stages: int) -> None:
    """On an H200 the walk with a correction has wrong final states, or an access is illegal."""
    walk = forward_walk("sm_90", K, 128, corrected=corrected)
    assert makes_outputs(walk)
    tile = {"BLOCK_V": 32, "num_warps": 4, "num_stages": stages}
    with FakeTensorMode():
        launch = Launch(walk.kernel, walk.grid, walk.args, walk.kwargs | tile)
        compiled = aot.compile_for(launch, aot.TARGETS["sm_90"])
    assert bool(undefined_descriptors(compiled)) == (stages == 1)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
def test_no_plan_makes_outputs_with_a_correction_of_one_step(target: str, per_channel: bool) -> None:
    for K, V, dtype in itertools.product(SIZES, SIZES, (torch.bfloat16, torch.float32)):
        walk = forward_walk(target, K, V, dtype, corrected=True, per_channel=per_channel)
        assert walk.kwargs["num_stages"] > 1 or not makes_outputs(walk), aot.describe(walk)


def test_no_plan_of_sm_90_makes_outputs_without_a_correction_of_one_step() -> None:
    """A walk in parts of keys has one step, and its products are of other shapes."""
    for K, V in itertools.product(SIZES, SIZES):
        walk = forward_walk("sm_90", K, V, corrected=False)
        assert makes_outputs(walk)
        assert walk.kwargs["num_stages"] > 1 or walk.kwargs["PART"] > 0, aot.describe(walk)


def _chunks(launch: Launch) -> int:
    return dict(zip(launch.kernel.arg_names, launch.args, strict=False)).get("N", 0)


@pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: the kernels are interpreted, not compiled")
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_linear_attention"])
def test_a_float32_product_begins_with_zero(name: str) -> None:
    """One that began with the state would round each term to the state's last place, which the interpreter does not."""
    launches = sorted(aot.every_launch(OPS[name], torch.float32, workloads=False, alone=False), key=_chunks)
    walks = {launch.kernel: launch for launch in launches if "_states_" in launch.kernel.__name__}
    assert len(walks) == 2
    for walk in walks.values():
        with FakeTensorMode():
            code = aot.compile_for(walk, aot.TARGETS["sm_90"]).asm["ttir"]
        first = dict(re.findall(r"(%\w+) = (%cst\w*)[,)]", code))  # what sums begin with that loops carry
        begins = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", code)
        assert begins
        assert all(first.get(begin, begin).startswith("%cst") for begin in begins), aot.describe(walk)
