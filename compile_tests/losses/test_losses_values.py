"""`llmk.losses` against compositions in float64 written from the papers: values and gradients of every kind of call."""

from typing import Any

import pytest
import torch

from compile_tests.helpers.loss_references import packed
from compile_tests.helpers.loss_samples import CASES, DPO, IN_SLICES, MODEL, ON_RANKS, PAIRS, make_sample, of
from compile_tests.helpers.right_calls import require_call
from llmk import losses

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
WAYS = [(name, FLOAT32, False) for name in CASES]
OF_TYPES = {name for name in CASES if name.endswith((" token", " sequence", " first step"))}
WAYS += [(name, FLOAT32, True) for name in (ON_RANKS | IN_SLICES) if CASES[name].loss.has_sequences]
WAYS += [(name, BFLOAT16, False) for name in CASES if name in ON_RANKS or name in OF_TYPES]


@pytest.mark.parametrize(("name", "dtype", "packs"), WAYS, ids=lambda each: str(each).removeprefix("torch."))
def test_values_and_gradients(name: str, dtype: torch.dtype, packs: bool, device: torch.device) -> None:
    given = make_sample(CASES[name], device, dtype, packs=packs)
    op = CASES[name].loss.op
    require_call(op, given)


ORDERED = ("dpo", "aot", "cpo", "simpo", "orpo", "dpo sft", "weights of all classes", "pairs in the forward pass")


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_pairs_is_said(name: str, order: str, packs: bool, device: torch.device) -> None:
    """A batch means the same padded, and packed row by row."""
    case = CASES[name]
    given = make_sample(case._replace(options=case.options | {"pair_order": order}), device)
    if packs:
        given = packed(given, given.args[2], ("ref_input",))
        given.kwargs["num_sequences"] = len(PAIRS)
    require_call(case.loss.op, given)


@pytest.mark.parametrize("name", ["dpo", "cpo", "simpo", "orpo"])
def test_a_packed_batch_says_the_order_of_its_pairs(name: str, device: torch.device) -> None:
    padded = make_sample(CASES[name], device)
    rows, fn = packed(padded, padded.args[2], ()), CASES[name].loss.fn
    count: dict[str, Any] = {} if name == "dpo" else {"num_sequences": len(PAIRS)}
    with pytest.raises(
        ValueError, match=r"pair_order: expected 'halves' or 'interleaved' with sequence_ids.* got None"
    ):
        fn(*rows.args, **rows.kwargs, **count)
    with pytest.raises(ValueError, match=r"pair_order: .*got 'pairs'"):
        fn(*rows.args, **rows.kwargs, **count, pair_order="pairs")
    rows = packed(make_sample(of(DPO, *MODEL), device), padded.args[2], ("ref_input",)) if name == "dpo" else rows
    with pytest.raises(ValueError, match=r"num_sequences: expected the number of sequences with pair_order 'halves'"):
        fn(*rows.args, **rows.kwargs, pair_order="halves")


def test_no_token_gives_zero(device: torch.device) -> None:
    for name in ("sft", "dft", "distill", "topk", "heads"):
        given = make_sample(CASES[name], device)
        names = CASES[name].loss.op.argument_names()
        args = dict(zip(names, given.args, strict=False))
        args["target"] = torch.full_like(args["target"], -100)
        wanted = [args[each].requires_grad_() for each in ("linear_weight", "x" if name == "heads" else "input")]
        loss, _ = CASES[name].loss.fn(**args, **given.kwargs)
        assert loss == 0
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, wanted))


def test_a_loss_of_the_reference_model_takes_its_arguments_apart(device: torch.device) -> None:
    """The reference's log-probabilities, given or made of its hidden states, are the same loss."""
    given = make_sample(of(DPO, *MODEL), device)
    x, weight, target = given.args
    scores = torch.nn.functional.linear(given.kwargs["ref_input"], given.kwargs["ref_linear_weight"]).log_softmax(-1)
    chosen = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    made = losses.dpo(x, weight, target, ref_logps=torch.where(target == -100, 0.0, chosen).sum(-1))[0]
    torch.testing.assert_close(losses.dpo(*given.args, **given.kwargs)[0], made)
