"""Calls of every function of `llmk.losses` beside its reference: padded and packed, on ranks, with classes spread.

A case says of a loss which tensors it is given by name and with which options; `make_sample` makes the call, padded or
packed, in a dtype, over so many classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_tests.helpers.loss_references import (
    batch,
    cpo_reference,
    dpo_reference,
    kto_reference,
    loss_op,
    orpo_reference,
    packed,
    simpo_reference,
)
from compile_tests.helpers.policy_references import grpo_reference, ppo_reference, reinforce_reference, rloo_reference
from compile_tests.helpers.supervised_references import (
    dft_reference,
    distill_reference,
    distill_topk_reference,
    multi_token_reference,
    sft_reference,
    two_heads,
)
from llmk import losses
from llmk.losses._pairs import TYPES as DPO_TYPES
from llmk.losses._policy import AGGREGATIONS
from llmk.losses._policy import TYPES as POLICY_TYPES
from llmk.ops.linear_loss.objectives.policy import ESTIMATORS
from llmk.ops.linear_loss.objectives.preference import F_DIVERGENCES
from llmk.registry import Op, Sample

PAIRS = [5, 1, 7, 3, 4, 6, 2, 7]  # chosen completions, then rejected ones
LENGTHS = [5, 1, 7, 0, 4, 6]
BY_TURNS = [0, 4, 1, 5, 2, 6, 3, 7]
ORDER = [3, 1, 0, 5, 2, 4]
DATA, CONTEXT = "data", "context"
BY_TOKEN = "advantages of tokens"


class Loss(NamedTuple):
    """A function of `llmk.losses`, itself and as a record."""

    fn: Callable[..., Any]
    op: Op
    positional: tuple[str, ...] = ()
    """What it takes by position after the targets."""
    in_pairs: bool = False
    has_sequences: bool = True
    """It has sequences and not tokens alone, which ranks share by `group` alone."""


def loss_of(fn: Callable[..., Any], reference: Callable[..., Tensor], *positional: str, **kinds: bool) -> Loss:
    op = loss_op(fn, reference, ("values",) if fn is losses.ppo else ())
    return Loss(fn, op, positional, **kinds)


DPO, CPO = (loss_of(fn, of, in_pairs=True) for fn, of in ((losses.dpo, dpo_reference), (losses.cpo, cpo_reference)))
SIMPO = loss_of(losses.simpo, simpo_reference, in_pairs=True)
ORPO = loss_of(losses.orpo, orpo_reference, in_pairs=True)
KTO = loss_of(losses.kto, kto_reference, "label")
GRPO = loss_of(losses.grpo, grpo_reference, "advantages")
REINFORCE = loss_of(losses.reinforce, reinforce_reference, "advantages")
RLOO = loss_of(losses.rloo, rloo_reference, "advantages")
PPO = loss_of(losses.ppo, ppo_reference, BY_TOKEN)
SFT = loss_of(losses.sft, sft_reference, has_sequences=False)
DFT = loss_of(losses.dft, dft_reference, has_sequences=False)
DISTILL = loss_of(losses.distill, distill_reference, "teacher_input", "teacher_linear_weight", has_sequences=False)
TOPK = loss_of(losses.distill_topk, distill_topk_reference, "ids", "logprobs", has_sequences=False)
HEADS = loss_of(two_heads, multi_token_reference, has_sequences=False)
HEADS = HEADS._replace(op=dataclasses.replace(HEADS.op, differentiable=("x", "y", "linear_weight")))


class Case(NamedTuple):
    """A loss, the tensors that it is given by name, options, and whether ranks share sequences or tokens alone."""

    loss: Loss
    tensors: tuple[str, ...]
    options: dict[str, Any]
    only: str = ""


def of(loss: Loss, *tensors: str, only: str = "", **options: Any) -> Case:
    return Case(loss, tensors, options, only)


def make_sample(
    case: Case, device: torch.device, dtype: torch.dtype = torch.float32, *, packs: bool = False, V: int = 37
) -> Sample:
    """Make the call; packed, sequences come in another order, and pairs by turns."""
    of_pairs = case.loss.in_pairs or case.loss.positional == ("label",)
    x, weight, target = batch(PAIRS if of_pairs else LENGTHS, device, dtype, V=V)
    known = _tensors(x, weight, target)
    kwargs = {name: known[name] for name in case.tensors if name in known and name != BY_TOKEN}
    kwargs |= {name: _moved(value, device) for name, value in case.options.items()}
    positional = [BY_TOKEN] if BY_TOKEN in case.tensors else case.loss.positional
    args = (x, weight, target, *(known[name] for name in positional))
    if case.loss.fn is two_heads:
        args = (x, torch.randn(x.shape).to(x), weight, target)
    if not packs:
        return Sample(args, kwargs, why=f"{case.tensors} {case.options}")
    order = BY_TURNS if of_pairs else ORDER
    if case.loss.in_pairs:
        kwargs["pair_order"] = "interleaved"
    if "num_sequences" in case.tensors:
        kwargs["num_sequences"] = len(target)
    if case.loss.fn is losses.grpo:  # a packed batch has no length of its own
        kwargs.setdefault("max_completion_length", 11)

    def ordered(value: Any) -> Any:
        return value[order] if isinstance(value, Tensor) and value.shape == target.shape[:1] else value

    rows = Sample(tuple(map(ordered, args)), {name: ordered(value) for name, value in kwargs.items()}, why=str(case))
    of_tokens = [n for n, v in kwargs.items() if isinstance(v, Tensor) and v.shape[:2] == target.shape]
    return packed(rows, target, tuple(of_tokens), order)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.to(device) if isinstance(value, Tensor) else value


def _tensors(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Whatever a loss may be given: log-probabilities of models that are near, so that some ratios are clipped."""
    device, (B, S), V = x.device, target.shape, len(weight)
    scores = torch.nn.functional.linear(x.float(), weight.float()).log_softmax(-1)
    own = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    sums = torch.where(target == -100, 0.0, own).sum(-1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape).to(device)

    support = torch.cat([target.unsqueeze(-1), torch.randint(0, V, (B, S, 9)).to(device)], -1)
    top = randn(B, S, V).log_softmax(-1).topk(4)
    found = {
        "advantages": randn(B),
        BY_TOKEN: randn(B, S),
        "old_per_token_logps": own + 0.3 * randn(B, S),
        "ref_per_token_logps": own + 0.3 * randn(B, S),
        "sampling_per_token_logps": own + 0.3 * randn(B, S),
        "importance_sampling_ratio": torch.rand(B, S).to(device) + 0.5,
        "support": support.roll(1, 0),
        "old_logps": sums + 0.3 * randn(B),
        "values": randn(B, S),
        "old_values": randn(B, S),
        "returns": randn(B, S),
        "ref_logps": -3.0 * (target != -100).sum(-1) + randn(B),
        "label": torch.arange(B, device=device) % 3 == 0,
        "ref_input": randn(B, S, 5).to(x.dtype),
        "ref_linear_weight": randn(V, 5).to(x.dtype),
        "linear_bias": randn(V).to(x.dtype),
        "token_weights": torch.rand(B, S).to(device),
        "teacher_input": randn(B, S, 7).to(x.dtype),
        "teacher_linear_weight": randn(V, 7).to(x.dtype),
        "ids": top.indices,
        "logprobs": top.values,
    }
    found["ids"][0, :, 2:], found["logprobs"][2, :, 3] = -100, float("-inf")
    return found


OLD, REF = "old_per_token_logps", "ref_per_token_logps"
EVERYTHING = (OLD, REF, "sampling_per_token_logps", "importance_sampling_ratio")
VALUES = ("values", "old_values", "returns")
MODEL = ("ref_input", "ref_linear_weight")
MIXTURE = {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [0.8, 0.2, 1.5]}
HEAD = {"temperature": 0.7, "softcap": 4.0, "skip_ignored": True, "chunk_size": 7}
ITEMS = {"num_items_in_batch": torch.tensor(11), "num_chosen_tokens_in_batch": 70.0}
MANY: dict[str, Any] = {
    "beta": 0.2,
    "epsilon": 0.1,
    "epsilon_high": 0.28,
    "delta": 1.5,
    "entropy_coef": 0.3,
    "num_items_in_batch": 17.0,
    "max_completion_length": 11,
    "off_policy_mask_threshold": 0.05,
    "temperature": 0.8,
}
BOUND: dict[str, Any] = {"max_log_ratio": 0.1, "epsilon": 0.9, "epsilon_high": 9.0, "beta": 0.7}
"""Only the bound acts, with a wide clip: of the ratio, and of the divergence times it."""
SEQUENCE = {"importance_sampling_level": "sequence"}

ON_RANKS: dict[str, Case] = {
    "dpo": of(DPO, "ref_logps"),
    "dpo mixture": of(DPO, *MODEL, **MIXTURE),
    "dpo sft": of(DPO, "ref_logps", loss_type="sft"),
    "wpo": of(DPO, "ref_logps", use_weighting=True, loss_type=["ipo", "sft"]),
    "dpo items": of(DPO, "ref_logps", **MIXTURE, **ITEMS),
    "aot": of(DPO, "ref_logps", loss_type="aot", only=CONTEXT),
    "ld_alpha": of(DPO, "ref_logps", ld_alpha=0.3, only=DATA),
    "cpo": of(CPO, "num_sequences"),
    "cpo alpha": of(CPO, alpha=0.3),
    "cpo, number unknown": of(CPO, only=DATA),
    "simpo": of(SIMPO),
    "orpo": of(ORPO),
    "kto": of(KTO, "ref_logps", kl=torch.tensor(0.4)),
    "kto items": of(KTO, "ref_logps", num_items_in_batch=11),
    "bnpo": of(GRPO, loss_type="bnpo", entropy_coef=0.1),
    "dapo": of(GRPO, *EVERYTHING, beta=0.2, entropy_coef=0.1),
    "grpo": of(GRPO, OLD, loss_type="grpo", clip_ratio_c=1.3),
    "grpo nonempty": of(GRPO, OLD, loss_type="grpo", count_empty_sequences=False),
    "luspo items": of(GRPO, OLD, loss_type="luspo", num_sequences_in_batch=9),
    "dr_grpo": of(GRPO, OLD, loss_type="dr_grpo", max_completion_length=12),
    "gspo": of(GRPO, *EVERYTHING, beta=0.2, **SEQUENCE),
    "gmpo": of(GRPO, OLD, loss_type="gmpo", epsilon=0.4),
    "cispo": of(GRPO, OLD, loss_type="cispo"),
    "vespo": of(GRPO, OLD, loss_type="vespo"),
    "off policy": of(GRPO, OLD, off_policy_mask_threshold=0.02),
    "dppo": of(GRPO, OLD, loss_type="dppo_tv"),
    "support": of(GRPO, OLD, "support"),
    "rloo": of(RLOO, "old_logps", num_items_in_batch=9),
    "reinforce": of(REINFORCE, loss_agg="sequence_sum"),
    "ppo": of(PPO, OLD, *VALUES, loss_agg="sequence_mean"),
    "sft": of(SFT, "token_weights", entropy_coef=0.2),
    "sft items": of(SFT, num_items_in_batch=31),
    "dft": of(DFT),
    "distill": of(DISTILL, ce_weight=0.4),
    "distill weights": of(DISTILL, "token_weights", ce_weight=0.4),
    "distill alone": of(DISTILL),
    "topk": of(TOPK, "token_weights", ce_weight=0.4),
    "heads": of(HEADS, head_weights=[1.0, 0.3], z_loss=1e-2, only=DATA),
}
PACKED_ON_RANKS = ("dpo items", "cpo", "cpo, number unknown", "kto", "gspo", "rloo")

IN_SLICES: dict[str, Case] = {
    "pairs in the forward pass": of(DPO, *MODEL, "linear_bias", ld_alpha=0.5),
    "pairs in the backward pass": of(DPO, *MODEL, loss_type="aot"),
    "weights of all classes": of(DPO, "ref_logps", use_weighting=True),
    **{f"{loss.op.name} alone": of(loss) for loss in (CPO, SIMPO, ORPO, REINFORCE, DFT)},
    "kto of 0": of(KTO, "ref_logps"),
    "tokens": of(GRPO, OLD, entropy_coef=0.1, epsilon_high=30.0),
    "supports across ranks": of(GRPO, OLD, "support"),
    "logits made twice": of(GRPO, OLD, **SEQUENCE, loss_type="grpo", epsilon_high=30.0, chunk_size=4),
    "rloo without clips": of(RLOO, "old_logps", epsilon_high=1e9),
    "ppo without clips": of(PPO, OLD, *VALUES, cliprange=30.0),
    "sft with an entropy": of(SFT, entropy_coef=0.1),
    "distill with a cross entropy": of(DISTILL, ce_weight=0.3),
    "topk with a cross entropy": of(TOPK, ce_weight=0.3),
    "two heads": of(HEADS, head_weights=[1.0, 0.3], z_loss=1e-2),
}
"""A call of each loss, and one where its gradients are made in another way."""


def _of_pairs() -> dict[str, Case]:
    smooth = {"label_smoothing": 0.2, "beta": 0.3}
    found = {f"pairs {name}": of(DPO, "ref_logps", loss_type=name, **smooth) for name in DPO_TYPES}
    for name in F_DIVERGENCES:
        options = {"f_divergence_type": name, "f_alpha_divergence_coef": 0.7}
        found |= {f"{kind} {name}": of(DPO, "ref_logps", loss_type=kind, **options) for kind in ("sigmoid", "ipo")}
    found |= {f"ld_alpha {alpha}": of(DPO, "ref_logps", ld_alpha=alpha) for alpha in (0.0, 1.0)}
    found["dpo with a head"] = of(DPO, *MODEL, "linear_bias", **MIXTURE, **HEAD)
    found["wpo items"] = of(DPO, "ref_logps", num_items_in_batch=11, loss_type=["ipo"], use_weighting=True, softcap=5.0)
    found["bco"] = of(DPO, "ref_logps", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.5])
    of_cpo: list[dict[str, Any]] = [
        {"loss_type": "hinge", "cpo_alpha": 0.3},
        {"loss_type": "ipo", "beta": 0.4},
        {"loss_type": "simpo", "simpo_gamma": 0.9, "label_smoothing": 0.1},
        {"loss_type": "simpo", "alpha": 0.3},
        {"label_smoothing": 0.2, "temperature": 2.0},
        ITEMS | {"alpha": 0.3},
        ITEMS,
    ]
    found |= {f"cpo {i}": of(CPO, **options) for i, options in enumerate(of_cpo)}
    found |= {"simpo items": of(SIMPO, num_items_in_batch=11), "orpo items": of(ORPO, **ITEMS)}
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    for kind in ("kto", "apo_zero_unpaired"):
        found |= {
            f"{kind} {kl}": of(KTO, "ref_logps", loss_type=kind, kl=kl, **weights) for kl in (None, torch.tensor(0.4))
        }
    return found


def _of_policies() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in POLICY_TYPES:
        found[f"{name} first step"] = of(GRPO, BY_TOKEN, loss_type=name)
        for level in ("token", "sequence"):
            options = {"loss_type": name, "importance_sampling_level": level}
            found[f"{name} {level}"] = of(GRPO, OLD, **options)
            found[f"{name} {level}, every option"] = of(GRPO, *EVERYTHING, **options, **MANY)
    for level in ("token", "sequence"):
        for name in ("dapo", "cispo", "sapo", "vespo"):
            found[f"bounded {name} {level}"] = of(
                GRPO, OLD, REF, loss_type=name, importance_sampling_level=level, **BOUND
            )
    ways: list[dict[str, Any]] = [{}, {"count_empty_sequences": False}, {"num_sequences_in_batch": 11}]
    for agg in AGGREGATIONS:
        for i, way in enumerate(ways):
            options = {"loss_agg": agg, "max_completion_length": 11, "num_items_in_batch": 13.0, **way}
            found[f"cispo {agg} {i}"] = of(GRPO, OLD, loss_type="cispo", **SEQUENCE, **options)
            found[f"reinforce {agg} {i}"] = of(REINFORCE, **options)
            found[f"ppo {agg} {i}"] = of(PPO, OLD, *VALUES, **options)
        found |= {f"{name} {agg}": of(GRPO, OLD, loss_type=name, loss_agg=agg) for name in ("grpo", "vespo")}
    for estimator in ESTIMATORS:
        for corrected in (False, True):
            options = {"beta": 0.7, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
            found[f"{estimator} {corrected}"] = of(GRPO, OLD, REF, **options)
    for share in (0.2, 0.5, 0.999):
        found[f"top {share}"] = of(GRPO, OLD, top_entropy_quantile=share, entropy_coef=0.3)
        found[f"luspo top {share}"] = of(GRPO, OLD, top_entropy_quantile=share, loss_type="luspo", **SEQUENCE)
    found |= {"reinforce by token": of(REINFORCE, BY_TOKEN), "reinforce items": of(REINFORCE, num_items_in_batch=9.0)}
    found["rloo bounded"] = of(RLOO, "old_logps", epsilon_high=0.28, max_log_ratio=0.2, num_items_in_batch=11)
    found["ppo bounded"] = of(PPO, OLD, *VALUES, vf_coef=0.7, max_log_ratio=0.2)
    found |= {f"{loss.op.name} support": of(loss, *given, "support") for loss, *given in (
        (REINFORCE,), (RLOO, "old_logps"), (PPO, OLD, *VALUES))}  # fmt: skip
    return found | _of_terms()


def _of_terms() -> dict[str, Case]:
    """Terms that verl has beside TRL's."""
    found: dict[str, Case] = {}
    for bound in (1.05, 1.4):
        found[f"dual clip {bound}"] = of(GRPO, OLD, clip_ratio_c=bound)
        found[f"dual clip {bound}, delta"] = of(GRPO, OLD, BY_TOKEN, clip_ratio_c=bound, delta=3.0)
        found[f"dual clip {bound}, gspo"] = of(GRPO, OLD, clip_ratio_c=bound, loss_type="grpo", **SEQUENCE)
        found[f"dual clip {bound}, ppo"] = of(PPO, OLD, *VALUES, clip_ratio_c=bound)
    gmpo: dict[str, Any] = {"loss_type": "gmpo", "epsilon": 0.3, "epsilon_high": 0.5, "beta": 0.7}
    for tokens in ((), (BY_TOKEN,)):
        found[f"gmpo {tokens}"] = of(GRPO, OLD, REF, *tokens, **gmpo)
        more = {"max_log_ratio": 0.05, "entropy_coef": 0.2, "loss_agg": "token"}
        found[f"gmpo {tokens} bounded"] = of(GRPO, OLD, REF, *tokens, **gmpo, **more)
        for kind, epsilon in (("dppo_tv", 5e-4), ("dppo_kl", 5e-5)):
            bounds = {"epsilon": epsilon, "epsilon_high": epsilon / 10, "beta": 0.7}
            for delta in (None, 1.2):
                found[f"{kind} {tokens} {delta}"] = of(GRPO, OLD, REF, *tokens, loss_type=kind, delta=delta, **bounds)
        for fraction in (0.0, 0.2, 0.5, 1.0):
            cov = {"loss_type": "kl_cov", "kl_cov_ratio": fraction, "ppo_kl_coef": 3.0}
            found[f"kl_cov {fraction} {tokens}"] = of(GRPO, OLD, *tokens, **cov)
            found[f"kl_cov {fraction} {tokens} bounded"] = of(
                GRPO, OLD, REF, *tokens, **cov, beta=0.7, max_log_ratio=0.3
            )
    return found


def _of_tokens() -> dict[str, Case]:
    found = {"sft plain": of(SFT), "dft warm": of(DFT, temperature=0.7)}
    for beta in (0.0, 0.3, 1.0):
        found[f"distill {beta}"] = of(DISTILL, beta=beta, ce_weight=0.4, temperature=1.7)
        found[f"distill {beta} weights"] = of(DISTILL, "token_weights", beta=beta)
        for tail in (False, True):
            found[f"topk {beta} {tail}"] = of(TOPK, beta=beta, add_tail=tail, ce_weight=0.4, temperature=1.7)
            found[f"topk {beta} {tail} weights"] = of(TOPK, "token_weights", beta=beta, add_tail=tail)
    heads = {"head_weights": [1.0, 0.3], "z_loss": 1e-2}
    for items in (41.0, [41.0, torch.tensor(37)]):
        found[f"heads of {items}"] = of(HEADS, **heads, num_items_in_batch=items)
    return found


CASES: dict[str, Case] = {}
for _table in (ON_RANKS, IN_SLICES, _of_pairs(), _of_policies(), _of_tokens()):
    assert not (found := CASES.keys() & _table.keys()), found
    CASES |= _table
