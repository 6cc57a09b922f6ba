"""`llmk.losses` beside TRL's own code, argument for argument: values, gradients and metrics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_references import batch
from llmk import losses

pytest.importorskip("trl")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")
# With a TRL that has other trainers the helper raises an ImportError.
trl_losses = pytest.importorskip("compile_tests.helpers.trl_losses", exc_type=ImportError)

LENGTHS = [5, 1, 7, 3, 4, 6]
NOT_OURS = {"num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy"}
"""TRL's metrics that these losses do not have: the trainer's own, and what asks more of the logits."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def by_one_unit(value: Any) -> Any:
    """Return a tensor of numbers moved by half a float32's distance to its neighbour, up or down."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    up = numbers(*value.shape, seed=1) > 0
    return value * (1 + torch.where(up, 1, -1) * torch.finfo(torch.float32).eps / 2)


def results(
    fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The loss and its gradients by hidden states and projection, and the metrics."""
    x, weight = (of.detach().requires_grad_() for of in args[:2])
    loss, metrics = fn(x, weight, *args[2:], **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))], metrics


def compare(
    ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple[Any, ...], *, apart: str = "", **options: Any
) -> None:
    """Compare as near as float32 comes: TRL's is in float64, but for what it has in float32 alone; one metric apart.

    Arguments are as good as float32 has them: three times what the result moves with them is allowed besides.
    """
    found, metrics = results(ours, args, options)
    if options.get("f_divergence_type") != "alpha_divergence":
        args, options = tuple(map(of_float64, args)), {name: of_float64(value) for name, value in options.items()}
    wanted, theirs_metrics = results(theirs, args, options)
    moved = [tuple(map(by_one_unit, args)), {name: by_one_unit(value) for name, value in options.items()}]
    for a, b, near in zip(found, wanted, results(theirs, *moved)[0], strict=True):
        atol = 2e-6 * float(b.abs().max()) + 3 * float((near - b).abs().max())
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=atol)
    names = set(theirs_metrics) - NOT_OURS
    assert names <= set(metrics)
    for name in names - {apart}:
        assert float(metrics[name]) == pytest.approx(float(theirs_metrics[name]), rel=2e-5, abs=2e-6), name


def given() -> tuple[Tensor, Tensor, Tensor]:
    return batch(LENGTHS, torch.device("cpu"))


def own_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Values for tokens `[B, S]`."""
    scores = torch.nn.functional.linear(x, weight).log_softmax(-1)
    return torch.where(target != -100, scores.gather(-1, target.clamp(min=0)[..., None])[..., 0], 0.0)


def ref_logps(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of a reference that is not far, `[B]`."""
    return own_logprobs(x, weight, target).sum(-1) + numbers(len(target))


@pytest.mark.parametrize("options", [{}, {"desirable_weight": 1.3, "undesirable_weight": 0.6, "beta": 0.4}], ids=str)
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("kl", [None, 0.4])
def test_kto(loss_type: str, kl: float | None, options: dict[str, Any]) -> None:
    x, weight, target = given()
    label = torch.tensor([True, False, True, True, False, False])
    options = {"ref_logps": ref_logps(x, weight, target), "kl": None if kl is None else torch.tensor(kl), **options}
    compare(losses.kto, trl_losses.kto, (x, weight, target, label), loss_type=loss_type, **options)


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_orpo(beta: float) -> None:
    compare(losses.orpo, trl_losses.orpo, given(), beta=beta)


CPO = [
    {},
    *({"loss_type": name, "beta": 0.3} for name in ("hinge", "ipo")),
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "cpo_alpha": 0.5},
    {"label_smoothing": 0.2, "cpo_alpha": 0.3},
    {"alpha": 0.1, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("options", CPO, ids=str)
def test_cpo(options: dict[str, Any]) -> None:
    compare(losses.cpo, trl_losses.cpo, given(), **options)


@pytest.mark.parametrize("options", [{}, {"beta": 1.5, "simpo_gamma": 0.2, "label_smoothing": 0.1}], ids=str)
def test_simpo(options: dict[str, float]) -> None:
    """TRL has no likelihood where it does not count; ours is a metric nevertheless."""
    compare(losses.simpo, trl_losses.simpo, given(), apart="nll_loss", **options)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1, "epsilon_high": 0.28}], ids=str)
def test_rloo(options: dict[str, float]) -> None:
    x, weight, target = given()
    old = own_logprobs(x, weight, target).sum(-1) + torch.tensor([0.02, 0.4, -0.4, 0.3, -0.3, 0.05])
    compare(losses.rloo, trl_losses.rloo, (x, weight, target, numbers(6)), old_logps=old, **options)


@pytest.mark.parametrize("num_items_in_batch", [None, 9])
def test_dft(num_items_in_batch: int | None) -> None:
    options = {} if num_items_in_batch is None else {"num_items_in_batch": torch.tensor(num_items_in_batch)}
    compare(losses.dft, trl_losses.dft, given(), **options)


DPO = [
    *({"loss_type": [name]} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")),
    *({"loss_type": [name]} for name in ("apo_down", "discopop", "sigmoid_norm", "sft")),
    *({"loss_type": [name], "label_smoothing": 0.2} for name in ("robust", "exo_pair", "aot", "aot_unpaired")),
    *(
        {"loss_type": ["ipo"], "f_divergence_type": name}
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    {"loss_type": ["sigmoid"], "ld_alpha": 0.3, "beta": 0.4},
    {"loss_type": ["sigmoid", "ipo"], "use_weighting": True},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
]


@pytest.mark.parametrize("options", DPO, ids=str)
def test_dpo(options: dict[str, Any]) -> None:
    x, weight, target = given()
    compare(losses.dpo, trl_losses.dpo, (x, weight, target), ref_logps=ref_logps(x, weight, target), **options)


GRPO = [
    *({"loss_type": name} for name in ("dapo", "grpo", "bnpo", "luspo", "cispo", "sapo", "vespo")),
    {"loss_type": "dr_grpo", "max_completion_length": 11},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.01, "epsilon_high": 0.02},
    {"loss_type": "gmpo", "epsilon": 0.1, "epsilon_high": 0.15},
    {"delta": 1.1, "beta": 0.3},
    {"top_entropy_quantile": 0.3, "beta": 0.3},
    {"off_policy_mask_threshold": 0.01, "importance_sampling_ratio": 0.5 + torch.rand(6, 9)},
]


@pytest.mark.parametrize(
    "options", GRPO, ids=lambda options: " ".join(map(str, options)) + options.get("loss_type", "")
)
def test_grpo(options: dict[str, Any]) -> None:
    x, weight, target = given()
    own = own_logprobs(x, weight, target)
    of_others = {"old_per_token_logps": own + 0.3 * numbers(*target.shape)}
    if "beta" in options:
        of_others["ref_per_token_logps"] = own + 0.3 * numbers(*target.shape, seed=1)
    compare(
        losses.grpo, trl_losses.grpo, (x, weight, target, numbers(6)), num_items_in_batch=17.0, **of_others, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "sigmoid", "label_smoothing": 0.1},
        {"loss_type": "ipo"},
        {"loss_type": "tpo-l", "tpo_l_gamma": 0.3},
    ],
    ids=lambda options: options["loss_type"],
)
def test_tpo(options: dict[str, Any]) -> None:
    """The pairs' term and that of the reference completions: two functions, as `llmk.trl.patch` says."""
    as_in_cpo = {"loss_type": options["loss_type"].replace("tpo-l", "simpo")}
    as_in_cpo |= {
        "label_smoothing": options.get("label_smoothing", 0.0),
        "simpo_gamma": options.get("tpo_l_gamma", 0.5),
    }

    def ours(x: Tensor, weight: Tensor, target: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        pairs, _metrics = losses.cpo(x[:4], weight, target[:4], cpo_alpha=0.0, beta=0.3, **as_in_cpo)
        return pairs + 0.7 * losses.sft(x[4:], weight, target[4:])[0], {}

    def theirs(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        return trl_losses.tpo(x, weight, target, beta=0.3, tpo_alpha=0.7, **options)

    compare(ours, theirs, given(), **options)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("topk", [None, 4])
def test_sdft(alpha: float, topk: int | None) -> None:
    """Over the whole vocabulary, and over the classes that are largest for the student.

    Logits are small enough for the rest of the classes to have a probability of some size: it is a difference from 1.
    """
    x, weight, target = given()
    x = 0.3 * x
    teacher, head = numbers(*target.shape, 5), numbers(len(weight), 5, seed=1)
    counts = target != -100
    token_weights = (counts / counts.sum(-1, keepdim=True)).float()
    options: dict[str, Any] = {"beta": alpha, "token_weights": token_weights, "num_items_in_batch": len(target)}

    def ours(x: Tensor, weight: Tensor, target: Tensor, *of_teacher: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        if topk is None:
            return losses.distill(x, weight, target, *of_teacher, **options)
        ids = torch.nn.functional.linear(x.detach(), weight.detach()).topk(topk).indices
        logprobs = torch.nn.functional.linear(*of_teacher).log_softmax(-1).gather(-1, ids)
        return losses.distill_topk(x, weight, target, ids, logprobs, **options)

    wanted: dict[str, Any] = {"distillation_alpha": alpha}
    if topk is not None:
        wanted |= {"distillation_topk": topk, "distillation_add_tail": True}
    compare(ours, trl_losses.sdft, (x, weight, target, teacher, head), **wanted)


def test_iw_opd() -> None:
    x, weight, target = given()
    own = own_logprobs(x, weight, target)
    of_teacher, sampled = own + 0.3 * numbers(*target.shape), own + 0.3 * numbers(*target.shape, seed=1)
    a = torch.where(target != -100, of_teacher - sampled, 0.0)
    before = a.abs().cumsum(1) - a.abs()
    advantages = (1.0 + 0.5 * (1.0 - before / a.abs().sum(1, keepdim=True).clamp(min=1e-8))) * a

    def ours(x: Tensor, weight: Tensor, target: Tensor, *_: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return losses.reinforce(x, weight, target, advantages)

    compare(ours, trl_losses.iw_opd, (x, weight, target, of_teacher, sampled))
