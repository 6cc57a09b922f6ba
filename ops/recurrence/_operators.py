"""The kernel operators of both recurrences, forward and backward, and what a call of either does with them.

Each public operator has a pair of its own, with one signature: without a correction `beta` is None, no query and key is
normalized, and of T and K K^T there is that of no chunk.
"""

from dataclasses import replace

import torch
from torch import Tensor

from llmk.ops.recurrence._call import check_call
from llmk.ops.recurrence._chunk_launches import Kept, launch_backward, launch_forward
from llmk.ops.recurrence._chunks import DIFFERENTIABLE, Call, backward_cpu, chunk_size, forward_cpu
from llmk.ops.recurrence._context import state_before
from llmk.registry import KernelOp, cdiv, differentiating, empty, or_no_gradient
from llmk.registry.devices import runs_kernels


def _kept_shape(v: Tensor, is_kept: bool) -> tuple[int, ...]:
    """A matrix of each chunk that is kept for the backward pass, `[B, H, N, C, C]`; of no chunk where it is not.

    On a CPU nothing is kept.
    """
    (B, T, H, _), C = v.shape, chunk_size(v.dtype)
    is_kept = is_kept and (not v.is_cpu or runs_kernels("recurrence", v))
    return B, H, cdiv(T, C) if is_kept else 0, C, C


def _or_not_kept(matrix: Tensor | None, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is kept, or where it is None as much of no chunk."""
    return empty(_kept_shape(v, False), dtype, v.device) if matrix is None else matrix


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    sequence_ids: Tensor | None,
    scale: float,
    l2_norm_qk: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The last three outputs are kept for the backward pass: matrices of each chunk, T, P and K K^T."""
    made = launch_forward(Call(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk), keep=keep)
    inverse, scores = _or_not_kept(made.kept.inverse, v, v.dtype), _or_not_kept(made.kept.scores, v, v.dtype)
    return made.out, made.final, inverse, scores, _or_not_kept(made.kept.kk, v, torch.float32)


def _forward_cpu(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk, keep):
    out, final = forward_cpu(Call(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk))
    return out, final, *(_or_not_kept(None, v, dtype) for dtype in (v.dtype, v.dtype, torch.float32))


def _forward_fake(q, v, g, beta, keep):
    (B, _, H, V), K, corrects, per_channel = v.shape, q.shape[3], beta is not None, g.dim() == 4
    inverse, scores = v.new_empty(_kept_shape(v, keep and corrects)), v.new_empty(_kept_shape(v, keep and per_channel))
    kk = v.new_empty(_kept_shape(v, keep and corrects and per_channel), dtype=torch.float32)
    return v.new_empty(v.shape), v.new_empty((B, H, K, V), dtype=torch.float32), inverse, scores, kk


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward(
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    sequence_ids: Tensor | None,
    scale: float,
    l2_norm_qk: bool,
    inverse: Tensor,
    scores: Tensor,
    kk: Tensor,
    need_initial_state: bool,
) -> Gradients:
    call, kept = Call(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk), Kept(inverse, scores, kk)
    return _in_order(launch_backward(call, grad, grad_state, kept, need_initial_state), grad)


@differentiating
def _backward_cpu(grad, grad_state, *args):
    *operands, _, _, _, need_initial_state = args
    found = backward_cpu(Call(*operands), grad, grad_state)
    return _in_order(found if need_initial_state else found | {"initial_state": None}, grad)


def _in_order(found: dict[str, Tensor | None], grad: Tensor) -> Gradients:
    dq, dk, dv, dg, dbeta, dinitial = (or_no_gradient(found[name], grad) for name in DIFFERENTIABLE)
    return dq, dk, dv, dg, dbeta, dinitial


def kernel_ops(name: str) -> tuple[KernelOp, KernelOp]:
    """Register those of the public operator `name`.

    A graph keeps each as one node: on a CPU it is a loop over the chunks.
    """
    forward = KernelOp(_forward, name=f"_{name}_fwd", opaque=True)
    backward = KernelOp(_backward, name=f"_{name}_bwd", opaque=True)
    forward.register_kernel("cpu")(_forward_cpu)
    backward.register_kernel("cpu")(_backward_cpu)
    forward.register_fake(_forward_fake)
    forward.register_backward(
        backward,
        outputs=("out", "final_state", "inverse", "scores", "kk"),
        depends_on=[DIFFERENTIABLE, DIFFERENTIABLE[1:]],
        keeps=lambda needs_input_grad, args: (any(needs_input_grad),),
    )
    forward.register_sharding(lambda q: [([0] * 5, [0] * 7)])  # along the batch
    return forward, backward


def run(forward: KernelOp, call: Call, context_group: str) -> tuple[Tensor, Tensor]:
    """Check a call and compute it, with a group from the state that the rank before ends with."""
    check_call(call)
    if context_group:
        state = state_before(call, lambda part: forward(*part.operands)[1], context_group)
        call = replace(call, initial_state=state)
    out, final_state, *_ = forward(*call.operands)
    return out, final_state
