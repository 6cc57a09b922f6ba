r"""Generalized intersection over union (GIoU) of pairs of boxes, as a loss for detectors.

Source: Rezatofighi et al., "Generalized Intersection over Union", 2019, https://arxiv.org/abs/1902.09630; the formula,
eps included, is that of `torchvision.ops.generalized_box_iou_loss`.

Forward, for a box b and its target t, each (x1, y1, x2, y2), with w and h their signed widths and heights,
(iw, ih) those of the intersection and (cw, ch) those of the smallest box around both:

    I = iw * ih where both are positive, else 0       C = cw * ch       U = wb * hb + wt * ht - I
    loss = 1 - I / (U + eps) + (C - U) / (C + eps)

A target with y2 <= 0 is padding: loss 0, gradient 0, not counted by the mean.

Where boxes overlap, the differences of areas are taken from those of coordinates, which float32 keeps where the areas
would cancel. A box stands out of the intersection by bw on its left and right, a target by tw, in height by bh and th:

    bw = wb - iw = (max(x1 of b, x1 of t) - x1 of b) + (x2 of b - min(x2 of b, x2 of t)), and so on
    U - I = bw * hb + iw * bh + tw * ht + iw * th
    C - U = bw * th + tw * bh                                   since cw = iw + bw + tw
    1 - I / (U + eps) = (U - I + eps) / (U + eps)

Backward, with r = I / (U + eps), m = (U - I + eps) / (U + eps) = 1 - r, p = (C - U) / (C + eps) and
k = (U + eps) / (C + eps) = 1 - p, each in units of 1 / (U + eps) where boxes overlap, and of 1 / (C + eps) where they
do not, so that dI = 0:

    dU = p - m = r - k, or -1      dC = k^2 or k      dI = -(1 + dU)
    dx2 = dU * hb + s * dI * ih + (1 - s) * dC * ch      s the share of x2 in min(x2 of b, x2 of t): 1, 0, 1/2 if equal

Where boxes overlap, dU * hb and dC * ch cancel: of boxes that share a corner each can be a hundred times what is
left. Again hb = ih + bh, ch = hb + th and cw = wb + tw leave differences of coordinates:

    (U + eps) * ch - hb * (C + eps) = ch * (tw * (th - bh) + iw * th) + eps * th
    q   = k * (ch * (tw * (th - bh) + iw * th) + eps * th) / (C + eps)       what is left of dC * ch - k * hb
    dx2 = s * (bh * dU - ih) + (1 - s) * (hb * r + q)
        = ih * ((1 - 2 * s) - (1 - s) * m) + bh * (s * dU + (1 - s) * r) + (1 - s) * q

Of the two forms of dU the one of the smaller numbers is taken: r and k of boxes that hardly overlap, else m and p. So
is k as 1 - p where p is small: of boxes that tile the enclosing one dU and dC cancel, and a quotient of nearly 1 leaves
its rounding. dx1 is the negative of the same with its share in the maximum, a target's share is the rest, and for y
widths and heights swap.

Everything is computed again from the boxes, so that only they are kept, and the count where the mean needs it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.sums import mean_of_rows, sum_to_scalar
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_not_negative,
    check_option,
    check_same,
    check_shape,
    empty,
    grid_cap,
    is_sharded,
    jit,
    no_gradient,
    num_programs,
    public_op,
    replicate_only,
    row_axes,
    wrap_triton,
)


def giou_loss_reference(boxes: Tensor, targets: Tensor, *, reduction: str = "mean", eps: float = 1e-5) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(boxes.dtype, targets.dtype), torch.float32)
    counts = ~(targets[..., 3] <= 0)
    boxes, targets = (torch.where(counts.unsqueeze(-1), x.to(dtype), 0.0) for x in (boxes, targets))
    b, t = boxes.unbind(-1), targets.unbind(-1)
    inner = torch.maximum(b[0], t[0]), torch.maximum(b[1], t[1]), torch.minimum(b[2], t[2]), torch.minimum(b[3], t[3])
    outer = torch.minimum(b[0], t[0]), torch.minimum(b[1], t[1]), torch.maximum(b[2], t[2]), torch.maximum(b[3], t[3])
    area_b, area_t, area_i, area_c = ((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (b, t, inner, outer))
    area_i = torch.where((inner[2] > inner[0]) & (inner[3] > inner[1]), area_i, 0.0)
    union = area_b + area_t - area_i
    loss = 1 - (area_i / (union + eps) - (area_c - union) / (area_c + eps))
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum()


@jit
def _load_boxes(ptr, stride, rows, N, BLOCK: tl.constexpr):
    """The coordinates of a block of boxes in float32, (x1, y1, x2, y2), 0 past the end, which makes those padding."""
    # No stride means that they are packed, which the compiler then loads whole.
    offsets = rows * 4 if stride is None else rows * stride
    tile = tl.load(ptr + offsets[:, None] + tl.arange(0, 4)[None, :], mask=(rows < N)[:, None], other=0.0)
    x, y = tl.split(tl.reshape(tile.to(tl.float32), (BLOCK, 2, 2)))
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, x2, y2


@jit
def _compare(b, t, eps):
    """Return the overlap; (w, h) of i (0 elsewhere), of b and t outside of i, of c; U - I, U + eps, C - U, C + eps."""
    wb, hb, wt, ht = b[2] - b[0], b[3] - b[1], t[2] - t[0], t[3] - t[1]
    x1, y1, x2, y2 = tl.maximum(b[0], t[0]), tl.maximum(b[1], t[1]), tl.minimum(b[2], t[2]), tl.minimum(b[3], t[3])
    iw, ih = x2 - x1, y2 - y1
    overlap = (iw > 0) & (ih > 0)
    bw, bh = (x1 - b[0]) + (b[2] - x2), (y1 - b[1]) + (b[3] - y2)
    tw, th = (x1 - t[0]) + (t[2] - x2), (y1 - t[1]) + (t[3] - y2)
    cw = tl.maximum(b[2], t[2]) - tl.minimum(b[0], t[0])
    ch = tl.maximum(b[3], t[3]) - tl.minimum(b[1], t[1])
    excess = tl.where(overlap, bw * hb + iw * bh + tw * ht + iw * th, wb * hb + wt * ht)
    union = excess + tl.where(overlap, iw * ih, 0.0)
    gap = tl.where(overlap, bw * th + tw * bh, cw * ch - union)
    bw, bh = tl.where(overlap, bw, wb), tl.where(overlap, bh, hb)
    tw, th = tl.where(overlap, tw, wt), tl.where(overlap, th, ht)
    iw, ih = tl.where(overlap, iw, 0.0), tl.where(overlap, ih, 0.0)
    return overlap, (iw, ih), (bw, bh), (tw, th), (cw, ch), excess, union + eps, gap, cw * ch + eps


@jit
def _loss(b, t, eps):
    overlap, _, _, _, _, excess, union, gap, enclosing = _compare(b, t, eps)
    unmatched = tl.div_rn(tl.where(overlap, excess + eps, 0.0), union) + tl.where(overlap, 0.0, 1.0)  # 1 - IoU
    return tl.where(t[3] <= 0, 0.0, unmatched + tl.div_rn(gap, enclosing))


@jit
def giou_loss_kernel(
    boxes_ptr, targets_ptr, loss_ptr, count_ptr, N, boxes_stride, targets_stride, eps,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of each box or, with a place for the count, of each program the sum, or the mean of one."""
    eps = tl.cast(eps, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    losses = tl.zeros((BLOCK,), dtype=tl.float32)
    counts = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(program * BLOCK, N, tl.num_programs(0) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        b = _load_boxes(boxes_ptr, boxes_stride, rows, N, BLOCK)
        t = _load_boxes(targets_ptr, targets_stride, rows, N, BLOCK)
        loss = _loss(b, t, eps)
        if count_ptr is None:
            tl.store(loss_ptr + rows, loss, mask=rows < N)
        else:
            losses += loss
            counts += tl.where(t[3] <= 0, 0.0, 1.0)
    if count_ptr is not None:
        total, count = tl.sum(losses, axis=0), tl.sum(counts, axis=0)
        tl.store(loss_ptr + program, tl.div_rn(total, count) if MEAN else total)
        tl.store(count_ptr + program, count)


@jit
def _share(a, b):
    """The share of a in max(a, b)."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@jit
def _stretch(own_along, others, others_along, inner, around, k, per_outer, eps, overlap):
    """q of two edges, from the sizes along them and, of the other box outside of i and of i itself, across them."""
    area = others * (others_along - own_along) + inner * others_along
    left = (around * per_outer) * area + (eps * per_outer) * others_along
    return k * tl.where(overlap, left, around)


@jit
def _edge(share, inner, out, q, m, iou, d_union):
    """The gradient of an edge, up to its sign and unit, from the sizes along it: of i, and of its box outside of i."""
    rest = 1.0 - share
    return inner * ((rest - share) - rest * m) + out * (share * d_union + rest * iou) + rest * q


@jit
def _store_gradient(
    ptr, shares, own, others, inner, around, units, overlap, eps, scale, counts, rows, N, BLOCK: tl.constexpr
):
    k, per_outer, m, iou, d_union = units
    qx = _stretch(own[1], others[0], others[1], inner[0], around[1], k, per_outer, eps, overlap)
    qy = _stretch(own[0], others[1], others[0], inner[1], around[0], k, per_outer, eps, overlap)
    dx1 = -scale * _edge(shares[0], inner[1], own[1], qx, m, iou, d_union)
    dy1 = -scale * _edge(shares[1], inner[0], own[0], qy, m, iou, d_union)
    dx2 = scale * _edge(shares[2], inner[1], own[1], qx, m, iou, d_union)
    dy2 = scale * _edge(shares[3], inner[0], own[0], qy, m, iou, d_union)
    tile = tl.reshape(tl.join(tl.join(dx1, dx2), tl.join(dy1, dy2)), (BLOCK, 4))
    tile = tl.where(counts[:, None], tile, 0.0).to(ptr.dtype.element_ty)
    tl.store(ptr + rows[:, None] * 4 + tl.arange(0, 4)[None, :], tile, mask=(rows < N)[:, None])


@jit
def giou_loss_backward_kernel(
    dy_ptr, boxes_ptr, targets_ptr, count_ptr, dboxes_ptr, dtargets_ptr, N, dy_stride, boxes_stride, targets_stride,
    eps, BLOCK: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = _load_boxes(boxes_ptr, boxes_stride, rows, N, BLOCK)
    t = _load_boxes(targets_ptr, targets_stride, rows, N, BLOCK)
    dy = tl.load(dy_ptr) if dy_stride is None else tl.load(dy_ptr + rows * dy_stride, mask=rows < N, other=0.0)
    if count_ptr is not None:
        dy = tl.div_rn(dy, tl.load(count_ptr))
    overlap, inner, out_b, out_t, around, excess, union, gap, enclosing = _compare(b, t, eps)
    # One division for all that is divided by the same: what it loses once more does not show beside the differences.
    per_outer, per_own = tl.div_rn(1.0, enclosing), tl.div_rn(1.0, tl.where(overlap, union, enclosing))
    p, m, iou = gap * per_outer, (excess + eps) * per_own, (inner[0] * inner[1]) * per_own
    k = tl.where(tl.abs(p) < 0.5, 1.0 - p, union * per_outer)
    d_union = tl.where(overlap, tl.where(m > 0.5, iou - k, p - m), -1.0)
    units = (k, per_outer, tl.where(overlap, m, 0.0), tl.where(overlap, iou, -1.0), d_union)
    scale = dy * per_own
    counts = (t[3] <= 0) == 0
    x1, y1, x2, y2 = _share(b[0], t[0]), _share(b[1], t[1]), _share(t[2], b[2]), _share(t[3], b[3])
    if dboxes_ptr is not None:
        shares = (x1, y1, x2, y2)
        _store_gradient(
            dboxes_ptr, shares, out_b, out_t, inner, around, units, overlap, eps, scale, counts, rows, N, BLOCK
        )
    if dtargets_ptr is not None:
        shares = (1.0 - x1, 1.0 - y1, 1.0 - x2, 1.0 - y2)
        _store_gradient(
            dtargets_ptr, shares, out_t, out_b, inner, around, units, overlap, eps, scale, counts, rows, N, BLOCK
        )


# H200, bf16, forward and backward on the device: 17 us for 32x256 boxes by one program, 21 us for 64x8192 by many.
ONE_PROGRAM = 8192  # the most boxes that one program sums
ONE = {"BLOCK": 2048, "num_warps": 16}
MANY = {"BLOCK": 1024, "num_warps": 8}
MANY_PER_MULTIPROCESSOR = 2
TILE = {"BLOCK": 512, "num_warps": 4}


def _packed(x: Tensor) -> tuple[Tensor, int | None]:
    """Boxes as the kernels take them, and the stride from one to the next: None for packed ones."""
    if x.is_contiguous():
        return x, None
    x = as_rows(x)
    return x, x.stride(0)


def _giou_loss_fwd(boxes: Tensor, targets: Tensor, reduction: str, eps: float) -> tuple[Tensor, Tensor]:
    N, device = boxes.numel() // 4, boxes.device
    (b, b_stride), (t, t_stride) = _packed(boxes), _packed(targets)
    shape, count, programs, tile = boxes.shape[:-1], None, cdiv(N, TILE["BLOCK"]), TILE
    if reduction != "none":
        shape, programs, tile = (), 1, ONE
        # A symbolic number is not asked: that would compile once more past the limit.
        if not isinstance(N, int) or N > ONE_PROGRAM:
            programs, tile = grid_cap(N // MANY["BLOCK"] + 1, num_programs(device, MANY_PER_MULTIPROCESSOR)), MANY
            shape = (programs,)
        count = empty(shape, torch.float32, device)
    loss, mean = empty(shape, torch.float32, device), reduction == "mean"
    wrap_triton(giou_loss_kernel)[(programs,)](
        b, t, loss, count, N, b_stride, t_stride, eps, MEAN=mean and tile is ONE, **tile
    )
    if count is None:
        return loss, empty((0,), torch.float32, device)
    if tile is ONE:
        return loss, count
    return mean_of_rows(loss, count) if mean else (sum_to_scalar(loss), sum_to_scalar(count))


def _giou_loss_bwd(
    grad: Tensor,
    boxes: Tensor,
    targets: Tensor,
    count: Tensor,
    reduction: str,
    eps: float,
    need_boxes: bool,
    need_targets: bool,
) -> tuple[Tensor, Tensor]:
    N, device = boxes.numel() // 4, boxes.device
    (b, b_stride), (t, t_stride) = _packed(boxes), _packed(targets)
    dy = grad.reshape(-1) if reduction == "none" else grad
    dboxes = empty(boxes.shape, boxes.dtype, device) if need_boxes else no_gradient(grad)
    dtargets = empty(targets.shape, targets.dtype, device) if need_targets else no_gradient(grad)
    denominator = count if reduction == "mean" else None
    gradients = dboxes if need_boxes else None, dtargets if need_targets else None
    dy_stride = dy.stride(0) if reduction == "none" else None
    wrap_triton(giou_loss_backward_kernel)[(cdiv(N, TILE["BLOCK"]),)](
        dy, b, t, denominator, *gradients, N, dy_stride, b_stride, t_stride, eps, **TILE
    )
    return dboxes, dtargets


giou_loss_fwd = KernelOp(_giou_loss_fwd, launch_cached=True)
giou_loss_bwd = KernelOp(_giou_loss_bwd, launch_cached=True)


def _compare_cpu(boxes: Tensor, targets: Tensor, eps: float) -> tuple[Tensor, ...]:
    """`_compare` in plain PyTorch; after `overlap` come sizes `[..., 2]`: of i, of b and t outside of it, of c."""
    (b1, b2), (t1, t2) = boxes.float().split(2, -1), targets.float().split(2, -1)
    lower, upper = torch.maximum(b1, t1), torch.minimum(b2, t2)
    size_b, size_t, inner = b2 - b1, t2 - t1, upper - lower
    outer = torch.maximum(b2, t2) - torch.minimum(b1, t1)
    out_b, out_t = lower - b1 + (b2 - upper), lower - t1 + (t2 - upper)
    overlap = (inner > 0).all(-1)
    sizes = size_b, size_t, inner, outer, out_b, out_t
    (wb, hb), (wt, ht), (iw, ih), (cw, ch), (bw, bh), (tw, th) = (size.unbind(-1) for size in sizes)
    excess = torch.where(overlap, bw * hb + iw * bh + tw * ht + iw * th, wb * hb + wt * ht)
    union = excess + torch.where(overlap, iw * ih, 0.0)
    gap = torch.where(overlap, bw * th + tw * bh, cw * ch - union)
    both = overlap.unsqueeze(-1)
    inner = torch.where(both, inner, 0.0)
    out_b, out_t = torch.where(both, out_b, size_b), torch.where(both, out_t, size_t)
    return overlap, inner, out_b, out_t, outer, excess, union + eps, gap, cw * ch + eps


@giou_loss_fwd.register_kernel("cpu")
def _(boxes, targets, reduction, eps):
    overlap, *_, excess, union, gap, enclosing = _compare_cpu(boxes, targets, eps)
    loss = torch.where(overlap, excess + eps, 0.0) / union + (1 - overlap.float()) + gap / enclosing
    counts = ~(targets[..., 3] <= 0)
    loss = torch.where(counts, loss, 0.0)
    if reduction == "none":
        return loss, torch.empty((0,), dtype=loss.dtype, device=loss.device)
    count = counts.sum().float()
    total = loss.sum(dtype=torch.float64)  # Inductor's sums on a CPU add up one after the other
    return (total / count if reduction == "mean" else total).float(), count


@giou_loss_bwd.register_kernel("cpu")
def _(grad, boxes, targets, count, reduction, eps, need_boxes, need_targets):
    overlap, inner, out_b, out_t, outer, excess, union, gap, enclosing = _compare_cpu(boxes, targets, eps)
    per_outer, per_own = 1 / enclosing, 1 / torch.where(overlap, union, enclosing)
    p, m, iou = gap * per_outer, (excess + eps) * per_own, inner.prod(-1) * per_own
    k = torch.where(p.abs() < 0.5, 1 - p, union * per_outer)
    d_union = torch.where(m > 0.5, iou - k, p - m)
    d_union, m, iou = (torch.where(overlap, x, y).unsqueeze(-1) for x, y in ((d_union, -1.0), (m, 0.0), (iou, -1.0)))
    scale = ((grad / count if reduction == "mean" else grad) * per_own).unsqueeze(-1)
    overlap, k, per_outer = overlap.unsqueeze(-1), k.unsqueeze(-1), per_outer.unsqueeze(-1)
    counts = ~(targets[..., 3:] <= 0)

    def gradient(larger: Tensor, other: Tensor, own: Tensor, others: Tensor) -> Tensor:
        """The gradients of the two edges that make `larger` where it exceeds `other`, without sign."""
        share = (larger > other).float() + 0.5 * (larger == other).float()
        rest = 1 - share
        across, beyond, around = (size.flip(-1) for size in (own, others, outer))
        left = (around * per_outer) * (others * (beyond - across) + inner * beyond) + (eps * per_outer) * beyond
        q = k * torch.where(overlap, left, around)
        edge = inner.flip(-1) * ((rest - share) - rest * m) + across * (share * d_union + rest * iou) + rest * q
        return torch.where(counts, scale * edge, 0.0)

    (b1, b2), (t1, t2) = boxes.split(2, -1), targets.split(2, -1)
    dboxes = dtargets = no_gradient(grad)
    if need_boxes:
        dboxes = torch.cat([-gradient(b1, t1, out_b, out_t), gradient(t2, b2, out_b, out_t)], -1).to(boxes.dtype)
    if need_targets:
        dtargets = torch.cat([-gradient(t1, b1, out_t, out_b), gradient(b2, t2, out_t, out_b)], -1).to(targets.dtype)
    return dboxes, dtargets


@giou_loss_fwd.register_fake
def _(boxes, reduction):
    loss, count = (boxes.shape[:-1], (0,)) if reduction == "none" else ((), ())
    return boxes.new_empty(loss, dtype=torch.float32), boxes.new_empty(count, dtype=torch.float32)


giou_loss_fwd.register_backward(giou_loss_bwd, outputs=("loss", "count"))


@giou_loss_fwd.register_sharding
def _(boxes, reduction):
    if reduction == "mean":
        return replicate_only()
    return [
        ([axis, REPLICATE] if reduction == "none" else [PARTIAL, PARTIAL], [axis, axis]) for axis in row_axes(boxes)
    ]


def check_giou_options(reduction: str, eps: float) -> None:
    check_option("reduction", reduction, ("none", "mean", "sum"))
    check_not_negative("eps", eps)


def _pairs(
    *shape: int, device: torch.device, dtype: torch.dtype, size: float = 100.0, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Boxes that mostly overlap their targets; a target whose index `padding` divides is padding."""
    wide: dict[str, Any] = {"device": device, "dtype": torch.float32}
    corner = size * torch.rand(*shape, 2, **wide)
    targets = torch.cat([corner, corner + size * (0.3 + torch.rand(*shape, 2, **wide))], dim=-1)
    moved = 0.3 * torch.randn(*shape, 1, **wide) + 0.04 * torch.randn(*shape, 4, **wide)
    boxes = targets + size * moved
    if padding:
        targets.view(-1, 4)[::padding] = 0
    return boxes.to(dtype), targets.to(dtype)


def giou_loss_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    on: dict[str, Any] = {"device": device, "dtype": dtype}
    b, t = _pairs(24, padding=3, **on)
    for reduction in ("mean", "sum", "none"):
        yield Sample((b, t), {"reduction": reduction}, why=f"padding, {reduction}")
    yield Sample(_pairs(2, 3, 5, **on), {"eps": 1e-2}, why="three dimensions, another eps")
    yield Sample((b, t.half() if dtype == torch.float32 else t.float()), why="two dtypes")
    yield Sample((b, torch.zeros_like(t)), why="every target is padding: NaN")
    yield Sample((b[:1], t[1:2]), why="one box")
    yield Sample((b[:0], t[:0]), {"reduction": "sum"}, why="no boxes")
    yield Sample((t[1:3], t[1:3].clone()), {"reduction": "none"}, why="boxes equal to their targets")
    # Disjoint, touching, equal, inside, of no area, of no area on an edge, inverted in one direction and in both.
    cases = [(20, 20, 30, 35), (8, 0, 16, 8), (2, 3, 8, 9), (4, 4, 6, 7), (3, 3, 3, 3), (2, 4, 2, 6), (7, 4, 3, 8)]
    cases += [(9, 9, 1, 2)]
    target = torch.tensor((2, 3, 8, 9), **on).expand(len(cases), 4)
    yield Sample((torch.tensor(cases, **on), target), {"reduction": "none"}, why="edge cases, one target expanded")
    strided = _pairs(5, 9, **on)[0].mT.contiguous().mT, _pairs(5, 18, **on)[1][:, ::2]
    yield Sample(strided, {"reduction": "sum"}, why="strided")
    yield Sample(_pairs(30, size=1e4, **on), why="large coordinates")
    yield Sample(_pairs(ONE_PROGRAM + 100, padding=2, **on), why="more boxes than one program sums")


def giou_loss_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample(_pairs(rows, 5, device=device, dtype=dtype), {"reduction": "sum"}, why="resized")


def giou_loss_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for images, boxes in [(32, 256), (64, 8192)]:
        yield Sample(_pairs(images, boxes, padding=3, device=device, dtype=dtype), why=f"{images}x{boxes} boxes")


def giou_loss_cost(boxes: Tensor, targets: Tensor, *, reduction: str = "mean", eps: float = 1e-5) -> Cost:
    gradient = boxes.numel() * boxes.element_size()
    tensors = gradient + targets.numel() * targets.element_size()
    return Cost(bytes_forward=tensors, bytes_full=2 * tensors + gradient)


@public_op(
    reference=giou_loss_reference,
    differentiable=("boxes", "targets"),
    trained=("boxes",),
    kernel_ops=(giou_loss_fwd, giou_loss_bwd),
    samples=giou_loss_samples,
    resized=giou_loss_resized,
    workloads=giou_loss_workloads,
    cost=giou_loss_cost,
)
def giou_loss(boxes: Tensor, targets: Tensor, *, reduction: str = "mean", eps: float = 1e-5) -> Tensor:
    """The GIoU loss of boxes, `1 - GIoU`, in float32, with padding left out.

    Like `torchvision.ops.generalized_box_iou_loss` on the pairs that count; boxes of no area or with inverted corners
    give what its formula gives.

    Args:
        boxes: `[..., 4]`, each (x1, y1, x2, y2); float32, float16 or bfloat16, any strides.
        targets: The shape of `boxes`; any of these dtypes, also another one than that of `boxes`. One whose last
            coordinate is at most 0 is padding: its loss and its gradients are 0, and the mean does not count it.
        reduction: "none", "sum", or "mean": the sum divided by the number of targets that count.
        eps: Added to the areas that are divided by, at least 0.

    Returns:
        float32: a scalar, or `[...]` with reduction "none". The mean over no target is NaN.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: A shape, a device or an option does not fit.

    Source: Rezatofighi et al., 2019, https://arxiv.org/abs/1902.09630.
    """
    check_dtype("boxes", boxes)
    check_dtype("targets", targets)
    if boxes.dim() == 0 or boxes.shape[-1] != 4:
        raise ValueError(f"boxes: expected shape [..., 4], got {tuple(boxes.shape)}")
    check_shape("targets", targets, boxes.shape, "the shape of boxes")
    check_same("targets", targets, "boxes", boxes)
    check_giou_options(reduction, eps)
    if reduction == "mean" and is_sharded(boxes, targets):
        total, count = giou_loss_fwd(boxes, targets, "sum", eps)
        return total / count.detach()
    return giou_loss_fwd(boxes, targets, reduction, eps)[0]
