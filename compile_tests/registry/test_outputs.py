"""An output is the caller's: arithmetic in place on it is what PyTorch's own functionals allow."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from llmk.opcheck.calls import call, incoming_gradients, representatives
from llmk.opcheck.inputs import as_list, differentiable_inputs, prepare, same_bits
from llmk.registry import OPS, Op, Sample, set_short_path_enabled

KEPT = "modified by an inplace operation"
"""The words in which autograd refuses a change of an output that the backward pass reads."""
KEEPS_ITS_OUTPUT = {"add_rms_norm", "linear_act", "rms_linear", "softmax", "sparsemax", "splade_head"}
"""The backward pass reads h, which `add_rms_norm` returns beside its norm, and the others' result as those of
`torch.relu` and `torch.softmax` do."""


def doubled(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [2 * grad for grad in incoming_gradients(outputs)]


def in_place(op: Op, sample: Sample) -> dict[str, Tensor | None]:
    """The gradients through outputs that are doubled where they are, each in turn."""
    wanted = differentiable_inputs(op, sample)
    args, kwargs, tensors = prepare(op, sample, wanted)
    outputs = [output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad]
    for output in outputs:
        output *= 2
    torch.autograd.backward(outputs, incoming_gradients(outputs))
    return {name: tensors[name].grad for name in wanted}


@pytest.mark.parametrize("short_path", [True, False], ids=["short path", "dispatcher"])
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.differentiable))
def test_arithmetic_in_place(name: str, short_path: bool, device: torch.device) -> None:
    op, refused = OPS[name], False
    for sample in representatives(op, list(op.samples(device, torch.float32)), layouts=True):
        if not differentiable_inputs(op, sample):
            continue
        with set_short_path_enabled(short_path):
            try:
                found = in_place(op, sample)
            except RuntimeError as error:
                if KEPT not in str(error):
                    raise
                refused = True
                continue
            right = call(op, sample, grads=doubled).gradients
        for of, gradient in found.items():
            want = right[of]
            assert (gradient is None) == (want is None)
            assert gradient is None or want is None or same_bits(gradient, want), f"{sample}: the gradient of {of}"
    assert refused == (name in KEEPS_ITS_OUTPUT)
