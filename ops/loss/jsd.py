r"""The generalized Jensen-Shannon divergence of log-probabilities, as distillation uses it.

Sources: Lin, "Divergence measures based on the Shannon entropy", 1991, https://doi.org/10.1109/18.61115; Agarwal et
al., "On-Policy Distillation of Language Models", 2023, https://arxiv.org/abs/2306.13649, for beta as here.

With Q = exp(input), the student's, P = exp(target), the teacher's, and M = beta * P + (1 - beta) * Q, of each token

    loss = beta * KL(P || M) + (1 - beta) * KL(Q || M)

whose limits in the sense of the papers, divided by beta or 1 - beta, are KL(P || Q) at 0 and KL(Q || P) at 1. The terms
of one class and their derivatives are in `divergence_math.py`, the kernels in `_divergence_kernels.py`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from llmk.ops.loss._divergence_kernels import DivergenceOps, divergence_resized, divergence_workloads
from llmk.ops.loss.divergence_math import BETWEEN, Mixture
from llmk.registry import Cost, Sample, check_number, is_sharded, public_op
from llmk.registry.devices import runs_kernels

KERNEL_OPS = DivergenceOps("jsd")


def _times_log(p: Tensor, log_ratio: Tensor) -> Tensor:
    """p * log_ratio, 0 for a class whose p is 0 in float32, whatever the ratio."""
    return p * torch.where(p.float() == 0, 0.0, log_ratio)


def _log_ratios(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The logarithms of Q / M and of P / M of each class."""
    if x.dtype != torch.float64:
        m = torch.logaddexp(y + math.log(beta), x + math.log1p(-beta))
        return x - m, y - m
    # In float64, where it is what is right, without the logarithm of M, which loses differences below 1e-16.
    rises = y > x
    gap, share = torch.where(rises, x - y, y - x), beta + (1 - 2 * beta) * rises.double()
    rest = torch.where(gap > -1, torch.log1p(share * gap.expm1()), (1 - share + share * gap.exp()).log())
    return torch.where(rises, gap - rest, -rest), torch.where(rises, -rest, gap - rest)


def jsd_terms(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """The term of each class of `[..., V]` in the divergence, in plain PyTorch."""
    gone = (x == float("-inf")) & (y == float("-inf"))  # whose logarithms have no difference
    x, y = x.masked_fill(gone, 0.0), y.masked_fill(gone, 0.0)
    if beta == 0:
        terms = _times_log(y.exp(), y - x)
    elif beta == 1:
        terms = _times_log(x.exp(), x - y)
    else:
        log_q, log_p = _log_ratios(x, y, beta)
        terms = beta * _times_log(y.exp(), log_p) + (1 - beta) * _times_log(x.exp(), log_q)
    return terms.masked_fill(gone, 0.0)


def jsd_reference(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    losses = jsd_terms(input.to(wide), target.to(wide), beta).sum(-1)
    if labels is None:
        return losses.mean()
    counts = labels != ignore_index
    return torch.where(counts, losses, 0.0).sum() / counts.sum()


def jsd_error_bound(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor | None:
    """Bound what a loss of 16-bit inputs loses where kernels take two plain exponentials and the logarithm of M.

    A GPU's exp2 is good to two units in the last place, 2^-22 of a result, and the product that it is given rounds by
    2^-24 of it, which is |x| 2^-24 of the exponential; a quarter more is the constant's. The term of a class moves by Q
    times |x - log(M) - 1| as often as Q does, and so of P. M has two roundings of its own, each of 2^-24, and its
    logarithm is in all of M. Where x and y are equal, nothing of this is in the term.
    """
    if input.dtype == torch.float32 or Mixture(beta).form() != BETWEEN.value or not runs_kernels("jsd", input):
        return None
    x, y = (tensor.detach().double().clamp(min=-1e4) for tensor in (input, target))
    log_p, log_q = y + math.log(beta), x + math.log1p(-beta)
    log_m = torch.logaddexp(log_p, log_q)
    lost = 2 * log_m.exp()
    for logs, part in ((x, log_q.exp()), (y, log_p.exp())):
        lost = lost + part * (logs - log_m - 1).abs() * (4 + 1.25 * logs.abs())
    rows = 2.0**-24 * torch.where(x == y, 0.0, lost).sum(-1)
    counts = torch.ones_like(rows, dtype=torch.bool) if labels is None else labels != ignore_index
    return torch.where(counts, rows, 0.0).sum() / counts.sum()


def jsd_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def logs(*shape: int, scale: float = 2.0) -> Tensor:
        return (scale * torch.randn(shape, device=device, dtype=torch.float32)).log_softmax(-1).to(dtype)

    labels = torch.tensor([3, -100, 0, 5, -100], device=device, dtype=torch.int64)
    for beta in (0.0, 0.1, 0.5, 1.0):
        yield Sample((logs(8, 32), logs(8, 32)), {"beta": beta}, why=f"beta {beta}")
        yield Sample((logs(5, 37), logs(5, 37)), {"beta": beta, "labels": labels}, why=f"beta {beta}, ignored tokens")
    yield Sample((logs(2, 3, 19), logs(2, 3, 19)), why="three dimensions")
    yield Sample((logs(17), logs(17)), why="one token, one dimension")
    yield Sample((logs(3, 1), logs(3, 1)), why="one class")
    yield Sample((logs(0, 16), logs(0, 16)), why="no tokens: NaN")
    yield Sample((logs(21, 6).t(), logs(6, 42)[:, ::2]), why="strided")
    yield Sample((logs(5, 16), logs(5, 16)), {"labels": torch.full_like(labels, -100)}, why="every token ignored: NaN")
    yield Sample((logs(5, 16), logs(5, 16)), {"labels": labels.int(), "ignore_index": 3}, why="int32 labels")
    same = logs(4, 40)
    yield Sample((same, same.clone()), {"beta": 0.3}, why="student and teacher the same")
    yield Sample((logs(4, 40, scale=30.0), logs(4, 40, scale=30.0)), {"beta": 0.3}, why="peaked")
    masked = logs(4, 40).masked_fill(torch.arange(40, device=device, dtype=torch.int64) < 20, float("-inf"))
    yield Sample((logs(4, 40), masked), {"beta": 0.0}, why="a teacher that rules classes out, beta 0")
    unlikely = torch.where(masked == float("-inf"), -600.0, masked)
    yield Sample((masked, unlikely), {"beta": 0.0}, why="a teacher whose probabilities are 0 in float32, beta 0")
    yield Sample((unlikely, masked), {"beta": 1.0}, why="a student whose probabilities are 0 in float32, beta 1")
    yield Sample((masked, masked), {"beta": 0.5}, why="both rule classes out")
    yield Sample((logs(2, 9_000), logs(2, 9_000)), why="9,000 classes: whole blocks and a part")
    yield Sample((logs(2, 100_003), logs(2, 100_003)), {"beta": 0.9}, why="100,003 classes")


@public_op(
    reference=jsd_reference,
    differentiable=("input",),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=jsd_samples,
    resized=divergence_resized(torch.log_softmax),
    workloads=divergence_workloads(torch.log_softmax),
    cost=Cost.passes(2, 5),
    error_bound=jsd_error_bound,
    choices=(
        "in 16 bits a beta from 1/32 to 31/32 takes the logarithm of the mixture itself, whose terms cancel where "
        "student and teacher are near: the loss has an absolute error of some 2^-23, which 16 bits of a gradient do "
        "not see",
    ),
)
def jsd(
    input: Tensor, target: Tensor, *, labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalized Jensen-Shannon divergence of a student's log-probabilities and a teacher's, mean over tokens.

    `beta * KL(teacher || m) + (1 - beta) * KL(student || m)` with `m = beta * teacher + (1 - beta) * student`, in nats.

    Args:
        input: The student's log-probabilities `[..., V]`, float32, float16 or bfloat16, any strides.
        target: The teacher's, the shape and dtype of `input`. It gets no gradient.
        labels: `[...]`, int64 or int32: which tokens count, those whose label is not `ignore_index`. None for all.
        beta: From 0 to 1. 0 is KL(teacher || student), what `torch.nn.functional.kl_div` computes of them, and 1
            KL(student || teacher).
        ignore_index: See `labels`.

    Returns:
        float32 scalar: the mean over the tokens that count; over none it is NaN. A class to which a distribution gives
        no probability, or one that is 0 in float32 (logarithms below -104), adds nothing to a divergence from it.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or `beta` does not fit.
        NotImplementedError: `target` requires a gradient.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649; Liger Kernel's `LigerJSD`,
    https://github.com/linkedin/Liger-Kernel, for the meaning of beta at 0 and 1.
    """
    check_number("beta", beta, 0.0, 1.0, "a number from 0 to 1")
    return KERNEL_OPS(input, target, labels, beta, ignore_index, "mean", is_sharded(input, target))
