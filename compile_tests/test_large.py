"""Tensors past 2**31 elements: the last rows are as right as the first."""

import pytest
import torch

from llmk.opcheck import accuracy_violation
from llmk.registry import OPS

ROWS, COLUMNS, TAIL = 2**31 // 4096 + 100, 4096, 8
MEMORY = 40 * 2**30


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "cross_entropy", "rope"])
def test_past_two_to_the_31(name: str, device: torch.device) -> None:
    if device.type == "cpu" or torch.cuda.get_device_properties(device).total_memory < MEMORY:
        pytest.skip("needs a GPU with 40 GiB; opcheck covers smaller sizes everywhere")
    op = OPS[name]
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    assert x.numel() > 2**31
    if name == "rope":
        x = x.view(1, ROWS, 32, 128).transpose(1, 2)  # [1, H, S, D]
        angles = torch.rand(1, ROWS, 128, device=device)
        rest = (torch.randn(1, ROWS, 1, 128, device=device, dtype=x.dtype).transpose(1, 2), angles, angles)
        tail_of_rest = tuple(t[..., -TAIL:, :] for t in rest)
        tail = (slice(None), slice(None), slice(-TAIL, None))
    else:
        rest = {
            "rms_norm": (torch.randn(COLUMNS, device=device, dtype=x.dtype),),
            "swiglu": (),
            "cross_entropy": (torch.randint(0, COLUMNS, (ROWS,), device=device),),
        }[name]
        tail_of_rest = (rest[0][-TAIL:],) if name == "cross_entropy" else rest
        tail = (slice(-TAIL, None),)
    kwargs = {"reduction": "none"} if name == "cross_entropy" else {}
    x.requires_grad_()
    output = op.overload(x, *rest, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    (dx,) = torch.autograd.grad(output, x, torch.ones((), device=device, dtype=output.dtype).expand(output.shape))

    def reference(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        part = x.detach()[tail].to(dtype).requires_grad_()
        cast = [t.to(dtype) if t.is_floating_point() else t for t in tail_of_rest]
        y = op.reference(part, *cast, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        return y, torch.autograd.grad(y, part, torch.ones_like(y))[0]

    results = zip((output[tail], dx[tail]), reference(x.dtype), reference(torch.float64), strict=True)
    for ours, composition, exact in results:
        assert accuracy_violation(ours, composition, exact) is None
