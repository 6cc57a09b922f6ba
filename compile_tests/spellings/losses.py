"""Losses of logits in plain PyTorch, those of a projection and log-probabilities."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import CLASSES as V
from compile_tests.spellings.registry import classes, spelling, targets

N, H = 4, 8


@spelling("cross_entropy", (6, V), targets(6))
def torch_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), t)


@spelling("cross_entropy", (6, V), targets(6))
def smoothed_sum(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1)


@spelling("cross_entropy", (6, V), targets(6))
def log_softmax_and_nll(x: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.float(), dim=-1), t, reduction="none")


@spelling("fused_linear_ce", (6, 16), (V, 16), targets(6))
def projection_and_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


@spelling("fused_linear_ce", (2, 4, 16), (V, 16), (V,), targets(6))
def shifted_projection(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x, w, b).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), t, reduction="sum") / 5


@spelling("fused_linear_ce", (2, 3, 16), (V, 16), (1, V), targets(6))
def bias_added_later(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(x, w) + b).view(-1, V), t)


@spelling("fused_linear_ce", (2, 3, 16), (V, 16), targets(6))
def capped_projection(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = (x @ w.t()) / 2
    logits = torch.tanh(logits / 5.0) * 5.0
    return F.nll_loss(F.log_softmax(logits.view(-1, V).float(), -1), t)


@spelling("linear_logprobs", (6, 16), (V, 16), classes(6))
def gathered_log_softmax(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, w).float().log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)


@spelling("linear_logprobs", (2, 4, 16), (V, 16), (V,), classes(2, 3, 2))
def gathered_candidates(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x, w, b)[:, :-1, :] / 0.7
    return torch.gather(F.log_softmax(logits, dim=-1, dtype=torch.float32), 2, t)


@spelling("linear_logprobs", (6, 16), (V, 16), classes(6))
def gathered_logits_less_their_logsumexp(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = (x @ w.t()).float()
    return logits.gather(-1, t[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


@spelling("kl_div", (2, 3, V), (2, 3, V))
def divergence_by_hand(x: Tensor, y: Tensor) -> Tensor:
    student = F.log_softmax(x.float(), -1)
    y = y.float()
    return (F.softmax(y, -1) * (F.log_softmax(y, -1) - student)).sum(-1).mean()


@spelling("kl_div", (6, V), (6, V))
def divergence_of_logarithms(x: Tensor, y: Tensor) -> Tensor:
    student, teacher = F.log_softmax(x.float(), -1), F.log_softmax(y.float(), -1)
    return 0.25 * torch.sum(teacher.exp() * (teacher - student))


@spelling("kl_div", (6, V), (6, V))
def divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True)


@spelling("fused_linear_ce", (N, H), (V, H), classes(N))
def mm(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.mm(x, v.t()), t)


@spelling("fused_linear_ce", (N, H), (V, H), (V,), classes(N))
def addmm(x: Tensor, v: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, x, v.t()), t)


@spelling("fused_linear_ce", (N, H), (V, H), classes(N))
def einsum(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nd,vd->nv", x, v), t)


@spelling("fused_linear_ce", (2, 2, H), (V, H), classes(N))
def einsum_the_other_way_round(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("v d, ... d -> ... v", v, x).view(-1, V), t)


@spelling("fused_linear_ce", (N, H), (H, V), classes(N))
def a_matrix_of_columns(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ v, t)


@spelling("fused_linear_ce", (N, H), (H, V), classes(N))
def einsum_with_columns(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nd,dv->nv", x, v), t)


@spelling("fused_linear_ce", (N, H), (V, H), classes(N))
def a_matrix_permuted(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.matmul(v.permute(1, 0)), t)


@spelling("fused_linear_ce", (N, H), (V, H), classes(N))
def scaled_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v).mul_(0.5).div_(3.0), t)


@spelling("fused_linear_ce", (N, H), (V, H), classes(N))
def capped_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v).div_(5.0).tanh_() * 5.0, t)


@spelling("fused_linear_ce", (2, 4, H), (V, H), classes(2))
def the_last_token(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v)[:, -1], t)


@spelling("linear_logprobs", (2, 3, H), (V, H), classes(2, 3))
def trl(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """`selective_log_softmax` of float32 logits."""
    z = F.linear(x, v) / 0.7
    chosen = torch.gather(z, dim=-1, index=t.unsqueeze(-1))
    sums = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
    return (chosen - sums.unsqueeze(-1)).squeeze(-1)


@spelling("linear_logprobs", (2, 3, H), (V, H), classes(2, 3, 2))
def trl_of_several(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t) - torch.stack([torch.logsumexp(row, dim=-1) for row in z]).unsqueeze(-1)


@spelling("linear_logprobs", (2, 3, H), (V, H), classes(2, 3))
def trl_row_by_row(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """`selective_log_softmax` of logits in 16 bits."""
    z, found = F.linear(x, v), []
    for row, index in zip(z, t.unsqueeze(-1), strict=True):
        found.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=index))
    return torch.stack(found).squeeze(-1)


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def less_the_sum(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t[:, None])[:, 0] - z.logsumexp(-1)


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def the_sum_less_the_chosen(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return (z.logsumexp(-1) - z.gather(-1, t[:, None]).squeeze(-1)).mean()


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def the_sum_less_the_chosen_at_their_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return (torch.logsumexp(z, -1) - z[torch.arange(N), t]).mean()


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def at_their_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N), t]


@spelling("linear_logprobs", (2, 3, H), (V, H), classes(2, 3))
def at_their_places_in_a_batch(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(2)[:, None], torch.arange(3)[None], t]


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def along_an_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.take_along_dim(F.linear(x, v).log_softmax(-1), t[:, None], -1)


@spelling("linear_logprobs", (N, H), (V, H), classes(N))
def along_an_axis_and_squeezed(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return -torch.take_along_dim(torch.log_softmax(x @ v.T, dim=1), t.view(-1, 1), dim=1).squeeze(1)
