"""Losses whose gradients are made in the forward pass: what they refuse, and how often logits are made."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.loss_references import batch
from llmk import losses
from llmk.functional import fused_linear_preference
from llmk.ops.linear_loss.chunked import plan
from llmk.ops.linear_loss.fused_linear_preference import PreferenceCall
from llmk.ops.linear_loss.kernels import KERNELS
from llmk.ops.linear_loss.objectives.policy import LOSSES as POLICY_LOSSES
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms
from llmk.ops.linear_loss.objectives.preference import LOSSES
from llmk.registry import gradient_of


@pytest.mark.parametrize("smoothing", [0.0, 1e-300, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_a_smoothing_that_a_type_does_not_have_is_refused(name: str, smoothing: float) -> None:
    """Everything else has a finite loss and finite gradients; 0 is the operator's default."""
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((2, LOSSES[name].sequences, 3, 8), (10, 8)))
    target = torch.randint(0, 10, x.shape[:3])
    options: dict[str, Any] = {"loss_type": name, "label_smoothing": smoothing}
    low, high = {"robust": (0.0, 0.4), "exo_pair": (1e-300, 0.9)}.get(name, (0.0, 1.0))
    if not low <= smoothing <= high:
        with pytest.raises(ValueError, match=f"label_smoothing: expected .* with loss_type '{name}', got {smoothing}"):
            fused_linear_preference(x, weight, target, **options)
        return
    loss, *_ = fused_linear_preference(x, weight, target, **options)
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert all(bool(t.isfinite().all()) for t in (loss, x.grad, weight.grad))


@pytest.mark.parametrize("of_sequence", [False, True])
@pytest.mark.parametrize("delta", [None, 1.1, 3.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratios_that_overflow(name: str, delta: float | None, of_sequence: bool) -> None:
    """A ratio past e**88.7 is infinite in float32: derivatives that are finite there are what they are in float64."""
    log_ratio = torch.tensor([0.1, 0.5, -0.5, 80.0, 91.0, 120.0, 300.0, -89.0, -300.0])
    log_ratio, advantages, weight = torch.cartesian_prod(
        log_ratio, torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 0.0])
    ).T.contiguous()
    logps = log_ratio.clamp(max=0.0) - 1.0
    terms = PolicyTerms(
        advantages=advantages,
        token_weight=weight,
        old_logps=logps - log_ratio,
        options=PolicyOptions(name, delta=delta),
        level=(lambda values: values.mean().expand(values.shape)) if of_sequence else lambda values: values,
    )
    tensors = {key: getattr(terms, key).double() for key in ("advantages", "token_weight", "old_logps")}
    (got, none), (exact, _) = (
        gradient_of(each.loss, x, torch.zeros_like(x))[1]
        for each, x in ((terms, logps), (replace(terms, **tensors), logps.double()))
    )
    assert none is None
    assert got is not None
    assert exact is not None
    finite = exact.abs() < torch.finfo(torch.float32).max
    assert finite.sum() > 40
    torch.testing.assert_close(got[finite], exact[finite].float(), rtol=1e-4, atol=1e-12)


@pytest.fixture
def multiplications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of products of each kind that are computed."""
    found: list[int] = []
    for owner, name in ((torch, "mm"), (torch, "addmm"), (torch.Tensor, "addmm_")):
        original = getattr(owner, name)

        def product(*args, original=original, **kwargs):
            a, b = args[-2:]
            found.append(a.shape[0] * a.shape[1] * b.shape[1])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, product)
    return found


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def keeps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if exponentials fit that are kept for a second pass."""
    if not request.param:
        monkeypatch.setattr(plan, "KEPT_BUDGET", 0)
    return request.param


on_a_cpu = pytest.mark.skipif("config.getoption('device') != 'cpu'", reason="a GPU's own products are no calls")


@on_a_cpu
@pytest.mark.parametrize("chunk_size", [0, 32, 16, 23, 15, 3])
@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_products_of_a_group(
    device: torch.device, multiplications: list[int], loss_type: str, chunk_size: int, keeps: bool
) -> None:
    """Four where a pair of 2 * 8 tokens, or a sequence, fits into no chunk and nothing is kept, else three."""
    x, weight, target = batch([5, 3, 6, 6], device)
    sequences = LOSSES[loss_type].sequences
    one, args = x.numel() * len(weight), (x.unflatten(0, (-1, sequences)), weight, target.unflatten(0, (-1, sequences)))
    options: dict[str, Any] = {"loss_type": loss_type, "chunk_size": chunk_size}
    fused_linear_preference(*args, **options)
    assert sum(multiplications) == one
    again = 0 < chunk_size < 8 * sequences and not keeps
    args = args[0].requires_grad_(), weight.requires_grad_(), args[2]
    multiplications.clear()
    with FlopCounterMode(display=False) as counter:
        fused_linear_preference(*args, **options)[0].backward()
    assert sum(multiplications) == one * (3 + again)
    assert counter.get_total_flops() == 2 * one * (3 + again)


@on_a_cpu
@pytest.mark.parametrize("chunk_size", [0, 3, 16])
@pytest.mark.parametrize(
    ("level", "options", "chunks"),
    [
        ("token", {"beta": 0.3}, ()),
        ("sequence", {"beta": 0.3}, (3,)),
        ("token", {"beta": 0.3, "entropy_coef": 0.1}, ()),
        ("token", {"beta": 0.3, "entropy_coef": 0.1, "softcap": 4.0}, (0, 3, 16)),
        ("token", {"loss_type": "vespo"}, (0, 3, 16)),
    ],
    ids=str,
)
def test_products_of_a_policy(
    device: torch.device,
    multiplications: list[int],
    level: str,
    options: dict[str, Any],
    chunks: tuple[int, ...],
    chunk_size: int,
    keeps: bool,
) -> None:
    """Four where a sequence of 8 fits into no chunk, or a weight is known after it, and nothing is kept, else three.

    In float32 that of an entropy is made of exponentials too, but with a cap, whose slope they do not have: four.
    """
    x, weight, target = batch([5, 3, 6, 6], device)
    assert target.shape == (4, 8)
    advantages, ref = torch.ones(4, device=device), torch.zeros(4, 8, device=device)
    given = {"importance_sampling_level": level, "ref_per_token_logps": ref, "chunk_size": chunk_size, **options}
    args = x.requires_grad_(), weight.requires_grad_(), target, advantages
    again = chunk_size in chunks and (not keeps or "softcap" in options)
    with FlopCounterMode(display=False) as counter:
        losses.grpo(*args, skip_ignored=False, **given)[0].backward()
    assert sum(multiplications) == x.numel() * len(weight) * (3 + again)
    assert counter.get_total_flops() == 2 * sum(multiplications)


@pytest.mark.parametrize("skips", [False, True])
def test_chunks_on_a_gpu_hold_whole_pairs(skips: bool) -> None:
    """The chunks are chosen from sizes alone, of tensors that are nowhere: whole pairs where one fits."""
    for B, S, H, V, fits in [
        (8, 512, 4096, 128256, True),
        (8, 512, 2048, 128256, True),
        (8, 1024, 2048, 151936, True),
        (8, 4096, 2048, 151936, True),
        (8, 8192, 2048, 151936, True),
        (8, 16384, 2048, 151936, False),
        (16, 1000, 2048, 151936, True),
        (2, 1000, 512, 32000, True),
    ]:
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((B // 2, 2, S, H), (V, H)))
        target = torch.empty((B // 2, 2, S), dtype=torch.int64, device="meta")
        fields = {field.name: None for field in dataclasses.fields(PreferenceCall)} | {
            "input": x,
            "linear_weight": weight,
            "target": target,
            "chunk_size": 0,
            "shard": None,
            "float32_logits": True,
            "skip_ignored": skips,
        }
        call = PreferenceCall(**fields)  # type: ignore[arg-type]
        assert call.can_compact(KERNELS) == skips
        found = call.plan_of_groups(KERNELS)
        assert (found is not None) == fits
        if found is not None:
            assert found.chunk_rows % (2 * S) == 0


def test_what_was_made_in_inference_mode(device: torch.device) -> None:
    """Weights and a reference's log-probabilities are constants of the loss, which autograd does not refuse."""
    x, weight = torch.randn(2, 2, 3, 8, device=device).requires_grad_(), torch.randn(10, 8, device=device)
    target = torch.randint(0, 10, (2, 2, 3)).to(device)

    def gradient() -> torch.Tensor:
        loss, *_ = fused_linear_preference(x, weight, target, **constants)
        return torch.autograd.grad(loss, x)[0]

    constants: dict[str, Any] = {"group_weight": torch.rand(2).to(device), "ref_logps": torch.randn(2, 2).to(device)}
    right = gradient()
    with torch.inference_mode():
        constants = {name: tensor.clone() for name, tensor in constants.items()}
    assert torch.equal(gradient(), right)
