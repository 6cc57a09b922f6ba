r"""Cross entropy of a student's logits and their total variation distance from a teacher's, in one pass.

Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", 2023,
https://arxiv.org/abs/2307.15190, for the distance in distillation.

Of each token, with x the student's logits, y the teacher's, t the class, q = softmax(x) and p = softmax(y),

    ce  = log(sum(exp(x - m))) - (x_t - m)       m = max(x)
    tvd = sum(|q - p|) / 2

Backward, given g for ce and h for tvd, with s_j = sign(q_j - p_j) and S = sum(s_j * q_j),

    dx_j = g * (q_j - [j = t]) + h * q_j * (s_j - S) / 2

where the differences that cancel in a row that is certain of a class are sums of what is left of q:

    1 - q_t = sum over j != t of q_j        1 - S = sum(q_j * (1 - s_j))        1 + S = sum(q_j * (1 + s_j))

A program goes over a row of both twice, first for the maxima and sums of exponentials, then for the differences. It
keeps seven numbers a token; the backward pass makes q and p of the logits again.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.loss._cross_entropy_cpu import class_index, row_sum_cpu
from llmk.ops.loss.cross_entropy_kernels import counts_of, row_statistics
from llmk.ops.loss.cross_entropy_options import check_classes, counted
from llmk.ops.loss.divergence_math import exp_of
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_like,
    check_rows,
    empty,
    jit,
    next_power_of_2,
    public_op,
    split_rows,
    wrap_triton,
)

STATS = 7
"""Maximum and sum of exponentials of the student and of the teacher, 1 - q_t, 1 - S and 1 + S."""


def ce_tvd_reference(
    input: Tensor, teacher: Tensor, target: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(input.dtype, torch.float32)
    logs, q, p = input.to(wide).log_softmax(-1), input.to(wide).softmax(-1), teacher.to(wide).softmax(-1)
    target = target.long()
    ce = torch.nn.functional.nll_loss(
        logs.reshape(-1, logs.shape[-1]), target.reshape(-1), ignore_index=ignore_index, reduction="none"
    )
    # Not of exp(logs): of equal logits it leaves its rounding, whose sign would be a gradient.
    tvd = 0.5 * (q - p).abs().sum(-1)
    return ce.view(target.shape), torch.where(target != ignore_index, tvd, 0.0)


@jit
def _probabilities(x_ptr, cols, read, m, total, EXACT: tl.constexpr):
    """Probabilities of some classes of a row; equal logits give equal ones."""
    x = tl.load(x_ptr + cols, mask=read, other=0.0).to(tl.float32)
    return exp_of(x - m, EXACT) * tl.div_rn(1.0, total)


@jit
def ce_tvd_kernel(
    x_ptr, y_ptr, target_ptr, ce_ptr, tvd_ptr, stats_ptr, V, x_stride, y_stride, ignore_index,
    EXACT: tl.constexpr, NUM_STATS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    counts, valid, _ = counts_of(target, None, V, ignore_index)
    m, total, _, _ = row_statistics(x_ptr, row * x_stride, None, V, counts, None, False, False, BLOCK_V)
    n, mass, _, _ = row_statistics(y_ptr, row * y_stride, None, V, counts, None, False, False, BLOCK_V)
    x_t = tl.load(x_ptr + row * x_stride + target, mask=valid, other=0.0).to(tl.float32)
    ce = tl.where(valid, tl.log(total) - (x_t - m), float("nan"))
    distance = tl.zeros((BLOCK_V,), dtype=tl.float32)
    larger = tl.zeros((BLOCK_V,), dtype=tl.float32)
    smaller = tl.zeros((BLOCK_V,), dtype=tl.float32)
    equal = tl.zeros((BLOCK_V,), dtype=tl.float32)
    end = tl.where(counts, V, 0)
    for start in range(0, end, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        q = _probabilities(x_ptr + row * x_stride, cols, cols < end, m, total, EXACT)
        p = _probabilities(y_ptr + row * y_stride, cols, cols < end, n, mass, EXACT)
        # Most blocks are whole and have no class that is left out: comparing all takes a tenth of the time.
        if (start + BLOCK_V > end) | ((target >= start) & (target < start + BLOCK_V)):
            is_other = (cols < end) & (cols != target)
            q, p = tl.where(is_other, q, 0.0), tl.where(is_other, p, 0.0)
        distance += tl.abs(q - p)
        # Not by the sign of q - p, which is compiled to a fused multiply and add: of equals it leaves p's rounding.
        larger += tl.where(q > p, q, 0.0)
        smaller += tl.where(q < p, q, 0.0)
        equal += tl.where((q > p) | (q < p), 0.0, q)
    q_t = tl.where(valid, _probabilities(x_ptr + row * x_stride, target, valid, m, total, EXACT), 0.0)
    p_t = tl.where(valid, _probabilities(y_ptr + row * y_stride, target, valid, n, mass, EXACT), 0.0)
    tl.store(ce_ptr + row, tl.where(counts, ce, 0.0))
    tl.store(tvd_ptr + row, 0.5 * (tl.sum(distance, axis=0) + tl.abs(q_t - p_t)))
    stats_ptr += row * NUM_STATS
    tl.store(stats_ptr, m)
    tl.store(stats_ptr + 1, total)
    tl.store(stats_ptr + 2, n)
    tl.store(stats_ptr + 3, mass)
    tl.store(stats_ptr + 4, tl.sum(larger + smaller + equal, axis=0))  # lane by lane first: one rounding less
    own_below = tl.where(q_t > p_t, 0.0, tl.where(q_t < p_t, 2.0 * q_t, q_t))
    own_above = tl.where(q_t < p_t, 0.0, tl.where(q_t > p_t, 2.0 * q_t, q_t))
    tl.store(stats_ptr + 5, tl.sum(2.0 * smaller + equal, axis=0) + own_below)
    tl.store(stats_ptr + 6, tl.sum(2.0 * larger + equal, axis=0) + own_above)


@jit
def ce_tvd_backward_kernel(
    ce_grad_ptr, tvd_grad_ptr, x_ptr, y_ptr, target_ptr, stats_ptr, dx_ptr,
    V, ce_grad_stride, tvd_grad_stride, x_stride, y_stride, ignore_index,
    EXACT: tl.constexpr, NUM_STATS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of a row to a program."""
    program, blocks = tl.program_id(0), tl.cdiv(V, BLOCK_V)
    row, block = (program // blocks).to(tl.int64), program % blocks
    target = tl.load(target_ptr + row).to(tl.int64)
    counts, valid, _ = counts_of(target, None, V, ignore_index)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    read = cols < tl.where(counts, V, 0)
    stats_ptr += row * NUM_STATS
    m, total = tl.load(stats_ptr), tl.load(stats_ptr + 1)
    n, mass = tl.load(stats_ptr + 2), tl.load(stats_ptr + 3)
    others, below, above = tl.load(stats_ptr + 4), tl.load(stats_ptr + 5), tl.load(stats_ptr + 6)
    q = _probabilities(x_ptr + row * x_stride, cols, read, m, total, EXACT)
    p = _probabilities(y_ptr + row * y_stride, cols, read, n, mass, EXACT)
    centered_sign = tl.where(q > p, below, tl.where(q < p, -above, 0.5 * (below - above)))
    g = tl.where(valid, tl.load(ce_grad_ptr + row * ce_grad_stride), float("nan"))
    h = tl.load(tvd_grad_ptr + row * tvd_grad_stride)
    dx = g * tl.where(cols == target, -others, q) + 0.5 * h * (q * centered_sign)
    dx = tl.where(read, dx, 0.0)
    tl.store(dx_ptr + row * V + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < V)


def _options(x: Tensor) -> dict[str, int]:
    # H200, bfloat16, forward and backward of 4096 rows of 32,000 and 128,256 classes: 0.73 and 2.54 ms, with blocks of
    # 2048 and 8 warps 0.73 and 2.78. Short rows are a guess.
    V = x.shape[1]
    block, warps = min(1024, next_power_of_2(V)), 2 if V <= 8192 else 4
    return {"EXACT": x.dtype == torch.float32, "NUM_STATS": STATS, "BLOCK_V": block, "num_warps": warps}


def _ce_tvd_fwd(input: Tensor, teacher: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = as_rows(input), as_rows(teacher)
    M, V = x.shape
    ce, tvd = (empty(target.shape, torch.float32, x.device) for _ in range(2))
    stats = empty((*target.shape, STATS), torch.float32, x.device)
    wrap_triton(ce_tvd_kernel)[(M,)](
        x, y, target.contiguous(), ce, tvd, stats, V, x.stride(0), y.stride(0), ignore_index, **_options(x)
    )
    return ce, tvd, stats


def _ce_tvd_bwd(
    grad_ce: Tensor, grad_tvd: Tensor, input: Tensor, teacher: Tensor, target: Tensor, stats: Tensor, ignore_index: int
) -> Tensor:
    x, y, g, h = as_rows(input), as_rows(teacher), grad_ce.reshape(-1), grad_tvd.reshape(-1)
    (M, V), options = x.shape, _options(x)
    dx = empty(input.shape, x.dtype, x.device)
    strides = g.stride(0), h.stride(0), x.stride(0), y.stride(0)
    wrap_triton(ce_tvd_backward_kernel)[(M * cdiv(V, options["BLOCK_V"]),)](
        g, h, x, y, target.contiguous(), stats.contiguous(), dx, V, *strides, ignore_index, **options
    )
    return dx


ce_tvd_fwd = KernelOp(_ce_tvd_fwd, launch_cached=True)
ce_tvd_bwd = KernelOp(_ce_tvd_bwd, launch_cached=True)


def _softmax_cpu(x: Tensor, m: Tensor, total: Tensor) -> Tensor:
    return (x.float() - m.unsqueeze(-1)).exp() / total.unsqueeze(-1)


@ce_tvd_fwd.register_kernel("cpu")
def _(input, teacher, target, ignore_index):
    counts, index = class_index(target, input.shape[-1], ignore_index)
    stats = []
    for logits in (input.float(), teacher.float()):
        m = logits.amax(-1)
        stats += [m, row_sum_cpu((logits - m.unsqueeze(-1)).exp())]
    q, p = _softmax_cpu(input, *stats[:2]), _softmax_cpu(teacher, *stats[2:])
    sign = (q - p).sgn()
    column = index.unsqueeze(-1)
    x_t = input.float().gather(-1, column).squeeze(-1)
    ce, tvd = stats[1].log() - (x_t - stats[0]), 0.5 * row_sum_cpu((q - p).abs())
    stats += map(row_sum_cpu, (q.scatter(-1, column, 0.0), q * (1 - sign), q * (1 + sign)))
    return torch.where(counts, ce, 0.0), torch.where(counts, tvd, 0.0), torch.stack(stats, -1)


@ce_tvd_bwd.register_kernel("cpu")
def _(grad_ce, grad_tvd, input, teacher, target, stats, ignore_index):
    counts, index = counted(target, ignore_index)
    m, total, n, mass, others, below, above = stats.unbind(-1)
    q, p = _softmax_cpu(input, m, total), _softmax_cpu(teacher, n, mass)
    d, below, above = q - p, below.unsqueeze(-1), above.unsqueeze(-1)
    centered_sign = torch.where(d > 0, below, torch.where(d < 0, -above, 0.5 * (below - above)))
    classes = torch.arange(q.shape[-1], dtype=torch.int64, device=q.device)
    dx = grad_ce.unsqueeze(-1) * torch.where(classes == index.unsqueeze(-1), -others.unsqueeze(-1), q)
    dx = dx + 0.5 * grad_tvd.unsqueeze(-1) * (q * centered_sign)
    return torch.where(counts.unsqueeze(-1), dx, 0.0).to(input.dtype).contiguous()


@ce_tvd_fwd.register_fake
def _(input, target):
    ce, tvd = (input.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    return ce, tvd, input.new_empty((*target.shape, STATS), dtype=torch.float32)


ce_tvd_fwd.register_backward(ce_tvd_bwd, outputs=("ce", "tvd", "stats"), depends_on=[["input"], ["input"]])
ce_tvd_fwd.register_sharding(split_rows(outputs=3, inputs=3))


def ce_tvd_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def logits(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, device=device, dtype=dtype)

    target = torch.tensor([3, -100, 0, 5, -100], device=device, dtype=torch.int64)
    yield Sample((logits(5, 32), logits(5, 32), target), why="powers of two, ignored tokens")
    yield Sample((logits(1, 5, 37), logits(1, 5, 37), target.view(1, 5)), why="three dimensions, odd width")
    yield Sample((logits(17), logits(17), target[0]), why="one token, one dimension")
    yield Sample((logits(3, 1), logits(3, 1), torch.zeros_like(target[:3])), why="one class")
    yield Sample((logits(0, 16), logits(0, 16), target[:0]), why="no tokens")
    yield Sample((logits(21, 5).t(), logits(5, 42)[:, ::2], target), why="strided")
    others = target.abs().clamp(max=7).int()
    yield Sample((logits(5, 16), logits(5, 16), others), {"ignore_index": 3}, why="int32, another ignore_index")
    same = logits(5, 40)
    yield Sample((same, same.clone(), target), why="student and teacher the same: no gradient of the distance")
    certain = torch.where(torch.arange(24, device=device, dtype=torch.int64) == 3, 30.0, logits(5, 24)).to(dtype)
    yield Sample((certain, logits(5, 24), target), why="a student that is certain")
    yield Sample((logits(2, 9_000), logits(2, 9_000), target[2:4]), why="9,000 classes: whole blocks and a part")


def ce_tvd_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, y = (torch.randn(rows, 48, device=device, dtype=dtype) for _ in range(2))
    return Sample((x, y, torch.randint(0, 48, (rows,), device=device)), why="resized")


def ce_tvd_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, classes in [(4096, 32000), (4096, 128256)]:
        x, y = (torch.randn(rows, classes, device=device, dtype=dtype) for _ in range(2))
        yield Sample((x, y, torch.randint(0, classes, (rows,), device=device)), why=f"{rows}x{classes}")


@public_op(
    reference=ce_tvd_reference,
    differentiable=("input",),
    kernel_ops=(ce_tvd_fwd, ce_tvd_bwd),
    samples=ce_tvd_samples,
    resized=ce_tvd_resized,
    workloads=ce_tvd_workloads,
    cost=Cost.passes(2, 5),
)
def ce_tvd(input: Tensor, teacher: Tensor, target: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Cross entropy of a student's logits, and the total variation distance of its softmax from a teacher's.

    For a sum of both, weighted as one likes: what `cross_entropy` and `tvd` of two softmaxes give, with neither softmax
    in memory.

    Args:
        input: The student's logits `[..., V]`, float32, float16 or bfloat16, any strides.
        teacher: The teacher's, the shape and dtype of `input`. They get no gradient.
        target: Class indices `[...]`, int64 or int32.
        ignore_index: The target of tokens that do not count.

    Returns:
        The cross entropy and the distance of each token, both float32 `[...]`, 0 for tokens that do not count. On a GPU
        the cross entropy of a target out of range is NaN.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit.
        IndexError: On a CPU, a target is no class and not `ignore_index`.
        NotImplementedError: `teacher` requires a gradient.

    Sources: Wen et al., 2023, https://arxiv.org/abs/2307.15190; Liger Kernel's `LigerFusedCETVDLoss`,
    https://github.com/linkedin/Liger-Kernel.
    """
    check_rows("input", input, "V")
    check_like("teacher", teacher, "input", input)
    check_classes("target", target, input)
    ce, tvd, _ = ce_tvd_fwd(input, teacher, target, ignore_index)
    return ce, tvd
