"""Slices of the classes in one process: their statistics combined, and their gradients, are those of whole rows."""

import pytest
import torch

from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.ops.loss.cross_entropy_options import Columns, Options
from llmk.registry.devices import INTERPRET

OPTIONS = [
    Options(None, -100, 0.0, 0.0, 0.0),
    Options(None, -100, 0.1, 0.0, 0.0),
    Options(torch.empty(0), 3, 0.1, 4.0, 1e-2),  # weights for as many classes as there are
]


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed", "everything"])
@pytest.mark.parametrize("widths", [[37], [16, 21], [0, 1, 30, 0, 6], [36, LONGEST_SHORT + 1]], ids=str)
@pytest.mark.kernels
def test_slices_in_one_process(widths: list[int], options: Options, scale: float, device: torch.device) -> None:
    """Statistics of slices combined, and gradients of slices, beside those of whole rows."""
    kernels = INTERPRET or device.type == "cuda"
    impl = KERNELS if kernels else PYTORCH
    whole, slices = impl.cross_entropy, impl.vocab_parallel
    V = sum(widths)
    if options.weight is not None:
        options = options._replace(weight=torch.linspace(1.0, 37.0, V, device=device))
    logits, target = scale * torch.randn(9, V, device=device), torch.arange(0, V - 1, V // 9, device=device)[:9]
    target[2:4] = options.ignore_index
    logits[5:7, :16] = float("-inf")
    target[5:7] = 20
    rows = whole.losses(logits, target, options)
    parts, starts = [], [sum(widths[:i]) for i in range(len(widths))]
    for start, width in zip(starts, widths, strict=True):
        own = options._replace(columns=Columns(start, V))
        parts.append(slices.statistics(logits[:, start : start + width], target, own))
    combined = slices.combine(torch.cat(parts), target, options._replace(columns=Columns(0, V)))
    counts = target != options.ignore_index  # whoever does not count has no statistics that anyone reads
    torch.testing.assert_close(combined[:2], rows[:2])
    torch.testing.assert_close(combined[2][:, counts], rows[2][:, counts])
    grad, gradient = torch.rand(9, device=device), torch.full_like(logits, float("nan"))
    whole.gradients(grad, None, logits, target, rows.stats, gradient, options)
    for start, width in zip(starts, widths, strict=True):
        own, part = options._replace(columns=Columns(start, V)), logits[:, start : start + width].contiguous()
        if width:
            whole.gradients(grad, None, part, target, rows.stats, part, own)
        torch.testing.assert_close(part, gradient[:, start : start + width])
