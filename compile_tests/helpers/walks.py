"""The launch of the recurrence's walk from chunk to chunk, as a target's plan has it, on fake tensors."""

import torch
from torch import Tensor

from compile_tests.helpers import aot
from llmk.ops.recurrence._chunk_kernels import chunk_states_kernel
from llmk.ops.recurrence._chunk_launches import launch_forward
from llmk.ops.recurrence._chunks import Call
from llmk.registry.launch import Launch, record_launches
from llmk.registry.private.tensors import FakeTensorMode

B, T, H = 4, 4096, 256
"""So many heads that the walk makes outputs on every device, where its plan lets it."""


def forward_walk(
    target: str, K: int, V: int, dtype: torch.dtype = torch.bfloat16, *, corrected: bool, per_channel: bool = False
) -> Launch:
    """The walk of a forward pass with keys of K values and values of V."""

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty((B, T, H, *sizes), dtype=dtype, device="cpu")

    with FakeTensorMode(), record_launches(*aot.limits(target)) as recorded:
        g = empty(*((K,) if per_channel else ()), dtype=torch.float32)
        call = Call(empty(K), empty(K), empty(V), g, empty() if corrected else None)
        launch_forward(call, keep=False)
    (walk,) = [launch for launch in recorded if launch.kernel is chunk_states_kernel]
    return walk


def makes_outputs(walk: Launch) -> bool:
    return dict(zip(walk.kernel.arg_names, walk.args, strict=False))["out_ptr"] is not None
