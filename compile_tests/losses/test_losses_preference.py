"""`llmk.losses` of pairs and of labelled completions, against compositions in float64 written from the papers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_ops import CPO, DPO, KTO, ORPO, SIMPO
from compile_tests.helpers.loss_references import batch, packed
from llmk import losses
from llmk.losses._pairs import TYPES
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.objectives.preference import F_DIVERGENCES
from llmk.registry import Op, Sample

LENGTHS = [5, 1, 7, 3, 4, 6, 2, 7]  # of four pairs
ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # chosen and rejected by turns


def ref_logps(target: Tensor) -> Tensor:
    return -3.0 * (target != -100).sum(-1) + torch.randn(len(target)).to(target.device)


def require(op: Op, sample: Sample, fn: Callable[..., Any] | None = None) -> None:
    """The rule of accuracy for the loss and its gradients."""
    require_accurate(op, sample, call(op, sample, fn=fn))


def of_dpo(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> Sample:
    x, weight, target = batch(LENGTHS, device, dtype)
    return Sample((x, weight, target), {"ref_logps": ref_logps(target), **options}, why=f"dpo {options}")


@pytest.mark.parametrize("loss_type", TYPES)
def test_dpo_types(device: torch.device, loss_type: str) -> None:
    require(DPO, of_dpo(device, loss_type=loss_type, label_smoothing=0.2, beta=0.3))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "aot"])
def test_dpo_in_bfloat16(device: torch.device, loss_type: str) -> None:
    require(DPO, of_dpo(device, torch.bfloat16, loss_type=loss_type))


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_divergences(device: torch.device, loss_type: str, divergence: str) -> None:
    require(DPO, of_dpo(device, loss_type=loss_type, f_divergence_type=divergence, f_alpha_divergence_coef=0.7))


@pytest.mark.parametrize("ld_alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("packs", [False, True])
def test_dpo_with_a_weight_for_what_is_longer(device: torch.device, ld_alpha: float, packs: bool) -> None:
    sample = of_dpo(device, ld_alpha=ld_alpha)
    require(DPO, reordered(sample) if packs else sample)


@pytest.mark.parametrize("packs", [False, True])
def test_dpo_with_weights_of_pairs(device: torch.device, packs: bool) -> None:
    sample = of_dpo(device, use_weighting=True, loss_type=["ipo", "sft"], temperature=0.8, softcap=5.0)
    require(DPO, reordered(sample) if packs else sample)


def test_dpo_mixture_options_and_reference_model(device: torch.device) -> None:
    x, weight, target = batch(LENGTHS, device)
    bias, ref_input, ref_weight = (torch.randn(shape).to(device) for shape in ((37,), (*target.shape, 7), (37, 7)))
    kwargs = {
        "ref_input": ref_input,
        "ref_linear_weight": ref_weight,
        "linear_bias": bias,
        "temperature": 0.7,
        "softcap": 4.0,
        "loss_type": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.5],
        "skip_ignored": True,
        "chunk_size": 7,
    }
    require(DPO, Sample((x, weight, target), kwargs, why="mixture"))


def reordered(sample: Sample) -> Sample:
    """Packed, of pairs with chosen and rejected by turns."""
    kwargs: dict[str, Any] = {**sample.kwargs}
    if "label" not in kwargs:
        kwargs["pair_order"] = "interleaved"
    for name in ("ref_logps", "label"):
        if name in kwargs:
            kwargs[name] = kwargs[name][ORDER]
    return packed(Sample(sample.args, kwargs, why=sample.why), sample.args[2], (), ORDER)


ITEMS = {"num_items_in_batch": 11, "num_chosen_tokens_in_batch": 70.0}
ACCUMULATED: dict[str, tuple[Op, dict[str, Any]]] = {
    "dpo": (DPO, ITEMS | {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [0.8, 0.2, 1.5]}),
    "wpo": (DPO, {"num_items_in_batch": 11, "loss_type": ["ipo"], "use_weighting": True}),
    "cpo": (CPO, ITEMS),
    "alpha": (CPO, ITEMS | {"alpha": 0.3}),
    "simpo": (SIMPO, {"num_items_in_batch": 11}),
    "orpo": (ORPO, ITEMS),
    "kto": (KTO, {"num_items_in_batch": 11}),
}


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", ACCUMULATED)
def test_items_of_a_step(device: torch.device, name: str, packs: bool) -> None:
    """Sums are divided by the pairs and the chosen tokens of all batches of a step."""
    op, options = ACCUMULATED[name]
    x, weight, target = batch(LENGTHS, device)
    args, options = (x, weight, target), {**options, "num_items_in_batch": torch.tensor(11, device=device)}
    if op in (DPO, KTO):
        options["ref_logps"] = ref_logps(target)
    if op is KTO:
        options["label"] = torch.arange(len(target), device=device) % 3 == 0
    elif packs and op is not DPO:
        options["num_sequences"] = len(target)
    sample = Sample(args, options, why=f"items {name}")
    require(op, reordered(sample) if packs else sample)


PACKED: dict[str, tuple[Op, dict[str, Any]]] = {
    "dpo": (DPO, {}),
    "aot": (DPO, {"loss_type": "aot"}),
    "cpo": (CPO, {}),
    "simpo": (SIMPO, {}),
    "orpo": (ORPO, {}),
}


@pytest.mark.parametrize("said", [False, True], ids=["unknown", "num_sequences"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_equals_padded(device: torch.device, name: str, said: bool) -> None:
    op, options = PACKED[name]
    x, weight, target = batch(LENGTHS, device)
    ref = {}
    if op is DPO:
        ref = {
            "ref_input": torch.randn(*target.shape, 5).to(device),
            "ref_linear_weight": torch.randn(37, 5).to(device),
        }
    padded = Sample((x, weight, target), options | ref, why=name)
    sample = packed(padded, target, ("ref_input",), ORDER)
    kwargs = {"pair_order": "interleaved"} | ({"num_sequences": len(LENGTHS)} if said else {})
    sample = Sample(sample.args, sample.kwargs | kwargs, why=f"{name} {kwargs}")
    require(op, sample)
    ours, theirs = op.overload(*sample.args, **sample.kwargs), op.reference(*to64(padded).args, **to64(padded).kwargs)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


ORDERED = PACKED | {
    "sigmoid+sft": (DPO, {"loss_type": ["sigmoid", "sft"]}),
    "wpo": (DPO, {"use_weighting": True, "ld_alpha": 0.3}),
    "ld_alpha": (DPO, {"ld_alpha": 0.3}),
}


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_pairs_is_said(device: torch.device, name: str, order: str, packs: bool) -> None:
    """A batch means the same padded, and packed row by row."""
    op, options = ORDERED[name]
    x, weight, target = batch(LENGTHS, device)
    ref = {"ref_logps": ref_logps(target)} if op is DPO else {}
    sample = Sample((x, weight, target), options | ref | {"pair_order": order}, why=f"{name}, {order}")
    if packs:
        sample = packed(sample, target, ())
        sample.kwargs["num_sequences"] = len(LENGTHS)
    require(op, sample)


@pytest.mark.parametrize("name", ["dpo", "cpo", "simpo", "orpo"])
def test_a_packed_batch_says_the_order_of_its_pairs(device: torch.device, name: str) -> None:
    x, weight, target = batch(LENGTHS, device)
    ref = {"ref_logps": ref_logps(target)} if name == "dpo" else {"num_sequences": len(LENGTHS)}
    sample = packed(Sample((x, weight, target), {}, why=name), target, ())
    fn, args, kwargs = getattr(losses, name), sample.args, sample.kwargs
    with pytest.raises(
        ValueError, match=r"pair_order: expected 'halves' or 'interleaved' with sequence_ids.* got None"
    ):
        fn(*args, **kwargs, **ref)
    with pytest.raises(ValueError, match=r"pair_order: .*got 'pairs'"):
        fn(*args, **kwargs, **ref, pair_order="pairs")
    ref = {"ref_input": args[0], "ref_linear_weight": weight} if name == "dpo" else {}
    with pytest.raises(ValueError, match=r"num_sequences: expected the number of sequences with pair_order 'halves'"):
        fn(*args, **kwargs, **ref, pair_order="halves")


def to64(sample: Sample) -> Sample:
    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return Sample(tuple(map(wide, sample.args)), {k: wide(v) for k, v in sample.kwargs.items()}, why=sample.why)


CPO_OPTIONS = [
    {},
    {"loss_type": "hinge", "cpo_alpha": 0.3},
    {"loss_type": "ipo", "beta": 0.4},
    {"loss_type": "simpo", "simpo_gamma": 0.9, "label_smoothing": 0.1},
    {"loss_type": "simpo", "alpha": 0.3},
    {"label_smoothing": 0.2, "temperature": 2.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CPO_OPTIONS, ids=str)
def test_cpo(device: torch.device, options: dict[str, Any], dtype: torch.dtype) -> None:
    require(CPO, Sample(batch(LENGTHS, device, dtype), options, why="cpo"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [SIMPO, ORPO], ids=lambda op: op.name)
def test_simpo_and_orpo(device: torch.device, op: Op, dtype: torch.dtype) -> None:
    require(op, Sample(batch(LENGTHS, device, dtype), {}, why=op.name))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("kl", [None, 0.4])
def test_kto(device: torch.device, loss_type: str, kl: float | None, packs: bool) -> None:
    x, weight, target = batch(LENGTHS, device)
    label = torch.tensor([True, False, True, True, False, False, True, False], device=device)
    kwargs = {
        "ref_logps": ref_logps(target),
        "kl": None if kl is None else torch.tensor(kl, device=device),
        "desirable_weight": 1.3,
        "undesirable_weight": 0.6,
        "loss_type": loss_type,
    }
    sample = Sample((x, weight, target, label), kwargs, why="kto")
    if packs:
        args = (x, weight, target, label[ORDER])
        sample = packed(Sample(args, kwargs | {"ref_logps": kwargs["ref_logps"][ORDER]}, why="kto"), target, (), ORDER)
    require(KTO, sample)
