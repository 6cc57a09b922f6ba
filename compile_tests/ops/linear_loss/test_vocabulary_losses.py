"""Losses over a vocabulary: what the samples of `linear_logprobs`, `jsd` and `fused_linear_jsd` do not reach."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.some_outputs import detached_but
from llmk.functional import fused_linear_ce, fused_linear_jsd, jsd, linear_logprobs, tvd
from llmk.nn import JSDLoss, LinearCrossEntropyLoss, LinearJSDLoss, LinearLogProbs, TVDLoss
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.loss.jsd import jsd_reference
from llmk.registry import OPS, Sample

RANDOM = torch.Generator().manual_seed(0)
X, W = torch.randn(5, 8, generator=RANDOM), torch.randn(11, 8, generator=RANDOM)
T = torch.tensor([3, -100, 0, 10, 7])


def of_pairs(**options: Any) -> Any:
    x, target = X[:4].view(2, 2, 1, 8), T[:4].view(2, 2, 1)
    return torch.ops.llmk.fused_linear_preference(x, W, target, **options)


def student() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


@pytest.mark.parametrize("wanted", [[0], [1], [0, 1]], ids=["log-probabilities", "entropy", "both"])
@pytest.mark.parametrize("frozen", ["nothing", "input", "linear_weight"])
@pytest.mark.kernels
def test_gradients_of_some_outputs(wanted: list[int], frozen: str) -> None:
    op, sample = OPS["linear_logprobs"], Sample((X, W, T), {"temperature": 0.7})
    inputs = [name for name in ("input", "linear_weight") if name != frozen]
    require_accurate(op, sample, call(op, sample, inputs, fn=detached_but(op, wanted)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [5, 8193])
@pytest.mark.kernels
def test_logits_whose_differences_overflow(V: int, dtype: torch.dtype, device: torch.device) -> None:
    """A class that is infinitely far below the largest has no probability, and adds 0 to the entropy, not NaN."""
    target = torch.tensor([0, 1], device=device)
    x = torch.tensor([[2.0**63], [-(2.0**63)]], dtype=dtype, device=device, requires_grad=True)
    w = torch.full((V, 1), -(2.0**64), dtype=dtype, device=device)
    w[0], w[1] = 2.0**64, -(2.0**63)
    logprobs, entropy = linear_logprobs(x, w, target)
    (gradient,) = torch.autograd.grad((logprobs.clamp(min=-1.0) + entropy).sum(), x)
    others = torch.tensor(V - 2.0).log()
    torch.testing.assert_close(entropy.cpu(), torch.stack((torch.tensor(0.0), others)))
    assert logprobs[0] == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("temperature", [0.1, 10.0])
@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("K", [1, 64])
def test_peaked_and_flat_rows(temperature: float, scale: float, K: int) -> None:
    target = torch.randint(0, 300, (4, K))
    sample = Sample((scale * torch.randn(4, 8), torch.randn(300, 8), target), {"temperature": temperature}, "scaled")
    require_accurate(OPS["linear_logprobs"], sample, call(OPS["linear_logprobs"], sample))


@pytest.mark.parametrize("name", ["linear_logprobs", "fused_linear_ce", "fused_linear_jsd"])
@pytest.mark.parametrize("counted", [0, 1, 3, 5])
def test_skipped_tokens_change_nothing(name: str, counted: int) -> None:
    """Whatever they hold: with NaN in their rows, every result and gradient is that of the tokens that count."""
    labels = torch.where(torch.arange(5) < counted, T.clamp(min=0), -100)
    x = torch.where(labels[:, None] >= 0, X, float("nan")).requires_grad_()
    w = W.clone().requires_grad_()

    def result(x: Tensor, labels: Tensor, skip: bool) -> Tensor:
        if name == "fused_linear_jsd":
            return fused_linear_jsd(x, w, X[: len(x)], W.flip(0), labels=labels, skip_ignored=skip).nan_to_num()
        if name == "fused_linear_ce":
            return fused_linear_ce(x, w, labels, reduction="sum", skip_ignored=skip)
        logprobs, entropy = linear_logprobs(x, w, labels, skip_ignored=skip)
        return logprobs.sum() + entropy.sum()

    skipped = result(x, labels, True)
    dx, dw = torch.autograd.grad(skipped, (x, w))
    short = X[:counted].clone().requires_grad_()
    plain = result(short, labels[:counted], False)
    short_dx, short_dw = torch.autograd.grad(plain, (short, w))
    torch.testing.assert_close((skipped, dx[:counted], dw), (plain, short_dx, short_dw), rtol=0, atol=0)
    assert not dx[counted:].any()


@pytest.mark.usefixtures("no_cpp")
def test_compiled_for_any_number_of_tokens() -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logprobs, entropy = linear_logprobs(2 * x, w, target)
        return logprobs.mean() - 0.1 * entropy.mean() + fused_linear_jsd(x, w, x.detach(), w.detach().flip(0))

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for tokens in (5, 3, 9):
        x, w = torch.randn(tokens, 8, requires_grad=True), W.clone().requires_grad_()
        target = torch.randint(0, 11, (tokens,))
        with torch._dynamo.config.patch(error_on_recompile=tokens != 5):
            found = torch.autograd.grad(compiled(x, w, target), (x, w))
        torch.testing.assert_close(found, torch.autograd.grad(loss(x, w, target), (x, w)))


def test_modules() -> None:
    x, w = student()
    torch.testing.assert_close(LinearLogProbs(0.5)(x, w, T), linear_logprobs(x, w, T, temperature=0.5))
    tail = linear_logprobs(x, w, T, add_tail=True)
    torch.testing.assert_close(LinearLogProbs(add_tail=True)(x, w, T), tail)
    row_weight = torch.rand(5)
    loss = LinearCrossEntropyLoss(skip_ignored=True)(x, w, T, row_weight=row_weight)
    torch.testing.assert_close(loss, fused_linear_ce(x, w, T, row_weight=row_weight, skip_ignored=True))
    logs = X.log_softmax(-1), X.flip(0).log_softmax(-1)
    torch.testing.assert_close(JSDLoss(0.1)(*logs, T), jsd(*logs, beta=0.1, labels=T))
    torch.testing.assert_close(TVDLoss("sum")(*(y.exp() for y in logs)), tvd(*(y.exp() for y in logs), reduction="sum"))
    both = (x, w, X.flip(0), W.flip(0))
    torch.testing.assert_close(
        LinearJSDLoss(0.0, 2.0)(*both, T), fused_linear_jsd(*both, labels=T, beta=0.0, temperature=2.0)
    )
    assert "skip_ignored=True" in repr(LinearCrossEntropyLoss(skip_ignored=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: linear_logprobs(X, W, T[:3]), r"target: expected shape \(5,\), or .* candidates, got \(3,\)"),
        (lambda: linear_logprobs(X, W, T.expand(2, 5).t()[:4]), "target: expected shape"),
        (lambda: linear_logprobs(X, W, T, temperature=0.0), "temperature: expected a finite positive number, got 0.0"),
        (lambda: linear_logprobs(X, W[:0], T), "linear_weight: expected at least one class"),
        (lambda: linear_logprobs(X, W[:, :7], T), r"linear_weight: expected shape \[V, 8\]"),
        (lambda: jsd(X, X, beta=1.5), "beta: expected a number from 0 to 1, got 1.5"),
        (lambda: jsd(X, W), "target: expected shape"),
        (lambda: tvd(X, X, labels=T[:2]), "labels: expected shape"),
        (lambda: tvd(X, X, reduction="batchmean"), "reduction: expected one of"),
        (lambda: fused_linear_jsd(X, W, X, W[:9]), "teacher_linear_weight: expected the classes of linear_weight, 11"),
        (lambda: fused_linear_jsd(X, W, X, W[:, :3]), "teacher_linear_weight: expected shape"),
        (lambda: fused_linear_jsd(X, W, X[:2], W), "teacher_input: expected shape"),
        (lambda: fused_linear_jsd(X, W, X, W, temperature=-1.0), "temperature: expected a finite positive number"),
        (lambda: fused_linear_ce(X, W, T, row_weight=torch.ones(4)), "row_weight: expected shape"),
        (lambda: of_pairs(loss_type="exo_pair"), "label_smoothing: expected .* with loss_type 'exo_pair', got 0.0"),
        (
            lambda: of_pairs(loss_type="robust", label_smoothing=0.5),
            "label_smoothing: expected a number from 0 to below 0.5 with loss_type 'robust', got 0.5",
        ),
    ],
)
def test_a_wrong_call_names_the_argument(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_teacher_gets_no_gradient() -> None:
    teacher = W.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="teacher_linear_weight"):
        fused_linear_jsd(X, W, X, teacher)


def test_a_class_that_is_none() -> None:
    with pytest.raises(IndexError, match=r"target: expected class indices in \[0, 11\)"):
        linear_logprobs(X, W, T + 4)


@pytest.mark.kernels
@pytest.mark.parametrize("beta", [1e-8, 1e-4, 1 - 1e-8])
@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divergence_of_almost_one_side(beta: float, scale: float, dtype: torch.dtype, device: torch.device) -> None:
    """The smaller part is less than a rounding beside M's larger one, and all that there is of the divergence."""
    x, y = (
        (scale * torch.randn(4, 40, dtype=torch.float32, device=device)).log_softmax(-1).to(dtype) for _ in range(2)
    )
    y[0, :20] = float("-inf")
    exact = jsd_reference(x.double(), y.double(), beta=beta)
    torch.testing.assert_close(jsd(x, y, beta=beta).double(), exact, rtol=2e-6, atol=0.0)
    require_accurate(OPS["jsd"], sample := Sample((x, y), {"beta": beta}), call(OPS["jsd"], sample))
