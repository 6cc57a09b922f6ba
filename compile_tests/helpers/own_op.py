"""A file with an operator of a user's own, which opcheck is given as a path."""

OWN_OP = """
import torch
from llmk.registry import Op, Sample

@torch.library.custom_op("mylib::half", mutates_args=())
def half(input: torch.Tensor) -> torch.Tensor:
    return input / {divisor}

half.register_fake(lambda input: torch.empty_like(input))

HALF = Op(
    name="half",
    overload=torch.ops.mylib.half.default,
    reference=lambda input: input / 2,
    samples=lambda device, dtype: [Sample((torch.randn(3, 5, device=device, dtype=dtype),), why="plain")],
    differentiable=(),
)
"""
