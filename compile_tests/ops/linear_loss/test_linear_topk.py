"""The largest log-probabilities: what the samples of `linear_topk` do not reach."""

from collections.abc import Callable, Sequence
from math import inf, nan

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.right_calls import require_call
from llmk import losses
from llmk.functional import linear_topk
from llmk.nn import LinearTopK
from llmk.ops.linear_loss.drivers.logprobs import TopkCall
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH, Candidates, _topk
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

OP = OPS["linear_topk"]
REFERENCE = OP.reference
RANDOM = torch.Generator().manual_seed(0)
X, W, B = torch.randn(5, 8, generator=RANDOM), torch.randn(300, 8, generator=RANDOM), torch.randn(300, generator=RANDOM)
Results = tuple[Tensor, Tensor, Tensor]


def integers(tokens: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose logits are integers: many are equal, and every product is exact."""
    x, weight = (torch.randint(-2, 3, (rows, 6), generator=RANDOM).float() for rows in (tokens, classes))
    return x.to(device), weight.to(device)


def require_exact(found: Results, right: Results) -> None:
    """Indices are the float64 reference's, and numbers as near to it as float32's roundings of the largest."""
    assert torch.equal(found[1], right[1])
    for ours, exact in ((found[0], right[0]), (found[2], right[2])):
        bound = 4 * torch.finfo(torch.float32).eps * (1 + exact[exact.isfinite()].abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=float(bound), equal_nan=True)


def check_ties(
    fn: Callable[..., Results], k: int, classes: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    x, weight = integers(3, classes, device)
    require_exact(fn(x.to(dtype), weight.to(dtype), k), REFERENCE(x.double(), weight.double(), k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "classes"), [(1, 129), (3, 1), (7, 128), (64, 1000), (256, 700), (5, 5000)])
@pytest.mark.kernels
def test_equal_logits_are_in_the_order_of_the_classes(
    k: int, classes: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_ties(linear_topk, min(k, classes), classes, device, dtype)


@pytest.mark.parametrize("k", [1, 8, 100])
@pytest.mark.kernels
def test_largest_logits_in_one_tile(k: int, device: torch.device) -> None:
    """More of them reach the least maximum of k tiles than a row has slots: the k-th largest is found by bisection."""
    x, weight = (torch.randn(rows, 8, generator=RANDOM, dtype=torch.float64) for rows in (3, 4000))
    weight[500:1000] *= 3
    x, weight = x.float().to(device), weight.float().to(device)
    require_exact(linear_topk(x, weight, k), REFERENCE(x.double(), weight.double(), k))


@pytest.mark.kernels
def test_slices_of_the_classes(device: torch.device) -> None:
    """Some ranks have fewer classes than k, or none; equal logits are on several."""
    impl = (KERNELS if device.type == "cuda" or INTERPRET else PYTORCH).topk
    logits, parts = torch.randint(-9, 9, (3, 400), generator=RANDOM).float().to(device), []
    for start, end in ((0, 10), (10, 10), (10, 170), (170, 400)):
        y = logits[:, start:end] / 2.0
        m = y.amax(-1) if end > start else torch.full((3,), -inf, device=device)
        sums = torch.stack(((y - m.unsqueeze(-1)).exp().sum(-1), m))
        parts.append(impl.candidates(y, sums, None, 40, start))
    logprobs, indices, logsumexp, _ = impl.combine(
        Candidates(*(torch.cat(each) for each in zip(*parts, strict=True))), 40
    )
    identity = torch.eye(400, dtype=torch.float64, device=device)
    require_exact((logprobs, indices, logsumexp), REFERENCE(logits.double(), identity, 40, temperature=2.0))


@pytest.mark.kernels
def test_a_bound_that_too_few_elements_reach(device: torch.device) -> None:
    """A row gets its k elements even where the bound is NaN's, which a tile has for an infinity too."""
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("no kernel runs")
    logits = torch.randn(2, 300, generator=RANDOM).to(device)
    chosen = torch.arange(3, dtype=torch.int32, device=device).repeat(2, 1)
    bound, counts = (torch.full((2,), 2**31 - 1, dtype=torch.int32, device=device) for _ in range(2))
    keys = torch.empty((2, 128), dtype=torch.int64, device=device)
    _topk.topk_collect_kernel[(2,)](
        logits, chosen, bound, keys, counts, 300, 3, 40, 128, 300, 0, TILE=128
    )  # fmt: skip
    assert counts.tolist() == [40, 40]
    classes = (~keys[:, :40] & 0x7FFFFFFF).sort().values
    assert torch.equal(classes, logits.topk(40).indices.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.kernels
def test_numbers_that_are_not_finite(dtype: torch.dtype, device: torch.device) -> None:
    """NaN is the largest, as in `torch.topk`, and its row's log-probabilities are NaN."""
    bias = torch.zeros(400, device=device, dtype=dtype)
    x, weight = torch.zeros(1, 2, device=device, dtype=dtype), torch.zeros(400, 2, device=device, dtype=dtype)
    bias[[3, 130, 399]] = torch.tensor([2.0, nan, inf], device=device, dtype=dtype)
    logprobs, indices, logsumexp = linear_topk(x, weight, 4, linear_bias=bias)
    assert indices.tolist() == [[130, 399, 3, 0]]
    assert linear_topk(x, weight, 1, linear_bias=bias)[1].tolist() == [[130]]
    assert logprobs.isnan().all()
    assert logsumexp.isnan().all()
    for masked in (torch.full_like(bias, -inf), torch.where(bias.isnan(), 0.0, bias)):  # logsumexp -inf, and inf
        found, right = linear_topk(x, weight, 4, linear_bias=masked), REFERENCE(x, weight, 4, linear_bias=masked)
        for ours, exact in zip(found, right, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernels
def test_a_logsumexps_gradient_beside_a_large_one(device: torch.device) -> None:
    """The gradient of a log-probability near 0 cancels, and the logsumexp's is what is left."""

    def unlike(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full_like(outputs[0], 1234.5), torch.full_like(outputs[1], 0.3)]

    x, weight = torch.full((3, 1), 20.0, device=device), torch.tensor([[1.0], [-1.0]], device=device)
    sample = Sample((x, weight, 1), why="one class has all of the probability")
    require_call(OP, sample, grads=unlike)


def test_a_teacher_of_distill_topk() -> None:
    """Its results are the arguments, and the loss is that of the same classes of the teacher's whole softmax."""
    hidden, target = torch.randn(2, 4, 8), torch.randint(0, 300, (2, 4))
    logprobs, ids, _ = linear_topk(hidden, W.flip(0), 16, temperature=2.0)
    student = torch.randn(2, 4, 8)
    loss, _ = losses.distill_topk(student, W, target, ids, logprobs, temperature=2.0)
    whole = ((hidden @ W.flip(0).t()) / 2.0).log_softmax(-1)
    right, _ = losses.distill_topk(student, W, target, ids, whole.gather(-1, ids), temperature=2.0)
    torch.testing.assert_close(loss, right)
    assert torch.equal(ids.sort().values, whole.topk(16).indices.sort().values)


def test_module() -> None:
    module = LinearTopK(3, 0.5, softcap=2.0)
    expected = REFERENCE(X, W, 3, linear_bias=B, temperature=0.5, softcap=2.0)
    for ours, right in zip(module(X, W, B), expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert "k=3" in repr(module)


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="k: expected at most 9, the number of classes, got 10"):
        linear_topk(X, W[:9], 10)


def test_a_call_has_no_option_that_the_operator_does_not_offer() -> None:
    """The head's own defaults are for operators that have the option: every token has its largest classes."""
    options = {"temperature": 2.0, "logit_scale": 1.0, "softcap": 0.0, "chunk_size": 0}
    call = TopkCall.checked(
        {"input": torch.ones(4, 8), "linear_weight": torch.ones(16, 8), "linear_bias": None, "k": 3, **options}
    )
    assert (call.temperature, call.skip_ignored, call.shard) == (2.0, False, None)
