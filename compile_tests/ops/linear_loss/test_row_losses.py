"""The losses over a vocabulary: rows that do not count, class weights of zero, numbers that do not fit in 32 bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmk.accuracy.rule import accuracy_violation
from llmk.ops.linear_loss.fused_linear_preference import PreferenceCall
from llmk.ops.loss.ce_tvd import ce_tvd_reference
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT

ops = torch.ops.llmk
VOCABULARIES = pytest.mark.parametrize("V", [10, LONGEST_SHORT + 1])
EVERYTHING = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 1e-2}


def of_logits(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A fused loss that makes the logits it is given: their product with the identity is exact."""
    return lambda x, target, **options: loss(
        x, torch.eye(x.shape[1], dtype=x.dtype, device=x.device), target, **options
    )


LOSSES = {
    "cross_entropy": ops.cross_entropy,
    "fused_linear_ce": of_logits(ops.fused_linear_ce),
    "vocab_parallel_linear_ce": of_logits(ops.vocab_parallel_linear_ce),
}


CAPPED = {
    **LOSSES,
    "linear_logprobs": of_logits(lambda *args, **options: ops.linear_logprobs(*args, **options)[0]),
    "fused_linear_jsd": lambda x, target, **options: of_logits(ops.fused_linear_jsd)(
        x, torch.zeros_like(x), teacher_linear_weight=torch.zeros(x.shape[1], x.shape[1], device=x.device), **options
    ),
}


@VOCABULARIES
@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.kernels
def test_the_slope_of_a_cap_far_beyond_it(name: str, V: int, device: torch.device) -> None:
    """1 - tanh^2 of a rounded tanh is off by 2e-4 of itself at 4 caps, by 5% at 7.

    The exact slope moves by 2 |u| units where u moves by one: 2e-6 of itself at 8 caps.
    """
    softcap = 3.0
    caps = torch.tensor([0.0, 0.3, 0.5, 0.7, 1.0, 2.0, 4.0, 6.0, 7.0, 8.0], dtype=torch.float64, device=device)
    x = (softcap * torch.cat((caps, -caps[1:])) * 1.01).float().repeat(V)[:V].view(1, V)
    target = torch.tensor([4], device=device)

    def gradient(x: Tensor, softcap: float) -> Tensor:
        x = x.detach().requires_grad_()
        out = CAPPED[name](x, target, softcap=softcap)
        return torch.autograd.grad(out.sum(), x)[0].double()

    capped = (softcap * torch.tanh(x.double() / softcap)).float()
    right = gradient(capped, 0.0) / torch.cosh(x.double() / softcap).square()
    assert ((gradient(x, softcap) - right).abs() <= 1e-5 * right.abs()).all()


@VOCABULARIES
@pytest.mark.kernels
def test_rows_that_do_not_count_have_no_gradient(V: int, device: torch.device) -> None:
    """Whatever they hold; in plain PyTorch 0 * NaN is NaN."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
    logits = torch.cat((torch.randn(2, V, device=device), special[:, None].expand(3, V))).requires_grad_()
    targets = torch.tensor([1, 2, -100, -100, -100], device=device)
    loss = ops.cross_entropy(logits, targets, **EVERYTHING)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient != 0).any(dim=1).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("name", ["fused_linear_ce", "vocab_parallel_linear_ce"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.kernels
def test_logits_that_overflow_where_nothing_counts(name: str, reduction: str, device: torch.device) -> None:
    """The gradients are those without these tokens: hidden states are finite, only their logits are not."""
    x, weight = (3 * torch.randn(n, 8, device=device) for n in (5, 12))
    x[3:] = 3e38
    targets = torch.tensor([1, 2, 0, -100, -100], device=device)

    def gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(t.clone().requires_grad_() for t in inputs)
        losses = loss(*inputs, targets[: len(inputs[0])], reduction=reduction)
        return torch.autograd.grad(losses.sum(), inputs)

    def composed(x: Tensor, weight: Tensor, target: Tensor, **options: str) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target, **options)

    dx, dw = gradients(getattr(ops, name), x, weight)
    assert (dx[3:] == 0).all()
    alone = gradients(composed, x[:3], weight)
    exact = gradients(composed, x[:3].double(), weight.double())
    for triple in zip((dx[:3], dw), alone, exact, strict=True):
        assert accuracy_violation(*triple, factor=3.0) is None  # the losses' own, whose sums are BLAS's


TARGETS = [0, 1, -100, 0]
DIVISOR_ZERO = {
    "nothing counts": ([-100] * 4, None),
    "nothing counts, with weights": ([-100] * 4, [0.5, 1.0, 2.0, 1.0, 1.0]),
    "no rows": ([], [0.5, 1.0, 2.0, 1.0, 1.0]),
    "all weights zero": (TARGETS, [0.0] * 5),
    "weights of the targets zero": (TARGETS, [0.0, 0.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", DIVISOR_ZERO)
@pytest.mark.parametrize("wanted", ["both", "linear_weight"])
@pytest.mark.kernels
def test_a_mean_whose_divisor_is_zero(name: str, case: str, wanted: str, device: torch.device) -> None:
    """NaN, and gradients that are 0 or NaN where PyTorch's are."""
    if name == "cross_entropy" and wanted != "both":
        pytest.skip("has no linear_weight")
    targets, weights = DIVISOR_ZERO[case]
    target = torch.tensor(targets, dtype=torch.int64, device=device)
    weight = None if weights is None else torch.tensor(weights, device=device)
    x, linear_weight = torch.randn(len(targets), 5, device=device), torch.eye(5, device=device)

    def run(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_(wanted == "both"), linear_weight.clone().requires_grad_()]
        value = loss(*inputs, target, weight=weight)
        return value.detach(), *torch.autograd.grad(value, [t for t in inputs if t.requires_grad], allow_unused=True)

    def composed(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, target, **options: loss(torch.nn.functional.linear(x, w), target, **options)

    ours = composed(ops.cross_entropy) if name == "cross_entropy" else getattr(ops, name)
    for a, b in zip(run(ours), run(composed(torch.nn.functional.cross_entropy)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@VOCABULARIES
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignore_index", [2**31, 2**32 + 3, -(2**31) - 1, -(2**32) + 3])
@pytest.mark.kernels
def test_ignore_index_of_64_bits(
    ignore_index: int, dtype: torch.dtype, name: str, V: int, device: torch.device
) -> None:
    """No class looks like it, whose lower half is a class."""
    logits = torch.randn(4, V, device=device, requires_grad=True)
    targets = torch.tensor([3, 1, 3, 0], dtype=dtype, device=device)
    loss, plain = (LOSSES[name](logits, targets, **kw) for kw in ({"ignore_index": ignore_index}, {}))
    assert torch.equal(loss, plain)
    assert torch.equal(*(torch.autograd.grad(value, logits)[0] for value in (loss, plain)))


@VOCABULARIES
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.kernels
def test_a_weighted_mean_divides_z_loss_by_the_weights_too(name: str, V: int, device: torch.device) -> None:
    """The mean is the sum of the rows' losses, which hold z_loss, divided by the targets' weights, as documented."""
    logits, weight = torch.randn(6, V, device=device), torch.rand(V, device=device) + 0.5
    targets = torch.tensor([1, 0, -100, 4, 9, 2], device=device)
    counts = targets != -100

    def mean(dtype: torch.dtype) -> Tensor:
        x, w = logits.to(dtype), weight.to(dtype)
        losses = torch.nn.functional.cross_entropy(x, targets, weight=w, reduction="none")
        z = torch.where(counts, 0.5 * x.logsumexp(-1).square(), 0)
        return (losses + z).sum() / torch.where(counts, w[targets.clamp_min(0)], 0).sum()

    actual = LOSSES[name](logits, targets, weight=weight, z_loss=0.5)
    assert accuracy_violation(actual, mean(torch.float32), mean(torch.float64)) is None


@pytest.mark.kernels
def test_a_class_that_has_nearly_all(device: torch.device) -> None:
    """Other classes with equal logits: as each rounds the sum of exponentials in one direction, p - 1 loses most."""
    logits = torch.zeros(64, 16, device=device)
    logits[:, 0] = torch.linspace(8.0, 12.0, 64, device=device)
    targets = torch.zeros(64, dtype=torch.int64, device=device)

    def gradient(loss: Callable[..., Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x, targets, reduction="sum"), x)[0]

    # A thread of a GPU adds up its four classes one after the other, and four threads' sums are added in pairs: the 1
    # is in five sums, each between 1 and 2, which rounds by 2^-24 at most. 1 / total rounds by half of that, and the
    # other exponentials, 15 e^-8 in all and 2^-20 off, lose a tenth: 5.6 in all. On a CPU the lanes of a vector, one
    # after the other, lost 7.1.
    exact = gradient(torch.nn.functional.cross_entropy, logits.double())
    assert (gradient(ops.cross_entropy, logits).double() - exact).abs().max() <= 5.6 * 2**-24


@pytest.mark.kernels
def test_classes_of_equal_logits(device: torch.device) -> None:
    """So are the sums of what is left of a student's probabilities, here all but one twentieth of them."""
    x = torch.zeros(256, 16, device=device)
    x[:, 5], x[:, 8] = torch.linspace(-1.0, -0.7, 256, device=device), -0.0662
    y = torch.full_like(x, -30.0)
    y[:, [1, 3, 7, 9, 10, 11, 12, 14]] = 30.0
    target = torch.full((256,), 5, device=device)

    def gradient(loss: Callable[..., tuple[Tensor, Tensor]], x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        ce, tvd = loss(x, y, target)
        return torch.autograd.grad((ce + tvd).sum(), x)[0]

    exact = gradient(ce_tvd_reference, x.double(), y.double())
    assert (gradient(ops.ce_tvd, x, y).double() - exact).abs().max() <= 2.5 * 2**-24


def test_a_loss_whose_tensors_are_not_skipped_with_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new loss that leaves the targets where they are would take those of other tokens, in 16 bits on a GPU alone."""
    inputs = torch.randn(2, 2, 3, 8), torch.randn(10, 8), torch.randint(0, 10, (2, 2, 3))
    with monkeypatch.context() as patched:
        patched.setattr(PreferenceCall, "token_tensors", ("target",))
        with pytest.raises(TypeError, match=r"PreferenceCall.token_tensors: expected \('input', 'target', 'support'\)"):
            ops.fused_linear_preference(*inputs)
        patched.setattr(PreferenceCall, "token_tensors", ("input", "target", "support", "ref_logps"))
        with pytest.raises(TypeError, match="and more only where a group is one token"):
            ops.fused_linear_preference(*inputs)
    assert ops.fused_linear_preference(*inputs)[0].isfinite()
