"""The kernels of the GIoU loss of boxes; giou_loss.py has the formulas."""

import triton.language as tl

from llmk.registry import jit


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
    """Where they overlap; (w, h) of i (0 elsewhere), of b and t outside of i, of c; U - I, U + eps, C - U, C + eps."""
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
def giou_loss_kernel(boxes_ptr, targets_ptr, loss_ptr, N, boxes_stride, targets_stride, eps, BLOCK: tl.constexpr):
    eps = tl.cast(eps, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = _load_boxes(boxes_ptr, boxes_stride, rows, N, BLOCK)
    t = _load_boxes(targets_ptr, targets_stride, rows, N, BLOCK)
    tl.store(loss_ptr + rows, _loss(b, t, eps), mask=rows < N)


@jit
def giou_loss_sum_kernel(
    boxes_ptr, targets_ptr, loss_ptr, count_ptr, partial_ptr, arrived_ptr, N, boxes_stride, targets_stride, eps,
    MEAN: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    losses = tl.zeros((BLOCK,), dtype=tl.float32)
    counts = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, N, programs * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        b = _load_boxes(boxes_ptr, boxes_stride, rows, N, BLOCK)
        t = _load_boxes(targets_ptr, targets_stride, rows, N, BLOCK)
        losses += _loss(b, t, eps)
        counts += tl.where(t[3] <= 0, 0.0, 1.0)
    loss = tl.sum(losses, axis=0)
    count = tl.sum(counts, axis=0)
    last = True
    if partial_ptr is not None:
        # Whoever arrives last adds up everybody's sums in the order of the programs: the same bits each time.
        tl.store(partial_ptr + program, loss)
        tl.store(partial_ptr + PROGRAMS + program, count)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
        if last:
            cols = tl.arange(0, PROGRAMS)
            loss = tl.sum(tl.load(partial_ptr + cols, mask=cols < programs, other=0.0), axis=0)
            count = tl.sum(tl.load(partial_ptr + PROGRAMS + cols, mask=cols < programs, other=0.0), axis=0)
    if last:
        tl.store(loss_ptr, tl.div_rn(loss, count) if MEAN else loss)
        tl.store(count_ptr, count)


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
