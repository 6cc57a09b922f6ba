"""The losses of TRL's trainers as functions of a batch: their own methods, on a trainer that is nothing else.

A trainer's `_compute_loss` asks a model for the log-probabilities of tokens and the rest for its metrics. Here plain
PyTorch answers from hidden states and a projection, so that a call gives the loss, which can be differentiated, and the
trainer's metrics. Batches are aligned as those of `llmk.losses`: of S targets TRL has S + 1 tokens.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.sdft import loss_utils as sdft_losses
from trl.experimental.tpo import TPOTrainer

from compile_tests.helpers.loss_references import token_scores

CPU = torch.device("cpu")
Result = tuple[Tensor, dict[str, float]]


class _Alone:
    """Accelerate's interface where there is one process."""

    device, num_processes, sync_gradients, parallelism_config = CPU, 1, True, None

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x


class _Model:
    """Answers as a model with TRL's fused head does, from hidden states `[B, S, H]`."""

    training = True

    def __init__(self, input: Tensor, linear_weight: Tensor) -> None:
        self.input, self.linear_weight = input, linear_weight

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = F.linear(self.input, self.linear_weight)
        if labels is None:  # whole logits, of one token more
            return SimpleNamespace(logits=F.pad(logits, (0, 0, 0, 1)))
        target = labels[:, 1:]
        counts, scores = target != -100, token_scores(self.input, self.linear_weight)
        return SimpleNamespace(
            log_probs=torch.where(counts, scores.gather(-1, target.clamp(min=0)[..., None])[..., 0], 0.0),
            entropy=torch.where(counts, -(scores.exp() * scores).sum(-1), 0.0),
            log_sum_sq_probs=torch.where(counts, (2 * scores).logsumexp(-1), 0.0),
            mean_logits=logits.mean(-1),
            is_top1=counts & (logits.argmax(-1) == target),
            label_mask=counts,
        )


def _trainer(kind: type, model: _Model, **options: Any) -> Any:
    trainer = object.__new__(kind)
    trainer.__dict__.update(
        accelerator=_Alone(),
        model=model,
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        is_encoder_decoder=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        current_gradient_accumulation_steps=1,
        padding_value=0,
        **options,
    )
    return trainer


def _tokens(target: Tensor) -> dict[str, Tensor]:
    """Tokens and masks `[B, S + 1]` of targets `[B, S]`."""
    counts = F.pad(target != -100, (1, 0))
    return {
        "input_ids": F.pad(target.clamp(min=0), (1, 0)),
        "attention_mask": torch.ones_like(counts, dtype=torch.int64),
        "completion_mask": counts.long(),
    }


def _metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def dpo(x: Tensor, weight: Tensor, target: Tensor, *, ref_logps: Tensor, **options: Any) -> Result:
    model, count = _Model(x, weight), len(target) // 2
    names = options.pop("loss_type")
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "loss_weights": [1.0] * len(names),
    }
    trainer = _trainer(
        DPOTrainer,
        model,
        loss_types=names,
        precompute_ref_logps=True,
        args=SimpleNamespace(discopop_tau=0.05),
        **defaults | options,
    )
    ref = {"ref_chosen_logps": ref_logps[:count], "ref_rejected_logps": ref_logps[count:]}
    return trainer._compute_loss(model, {**_tokens(target), **ref}, False), _metrics(trainer)


def kto(
    x: Tensor, weight: Tensor, target: Tensor, label: Tensor, *, ref_logps: Tensor, kl: Tensor | None, **options: Any
) -> Result:
    """TRL's own estimate of KL is the mean of these log-probabilities less those of the reference, 0 here."""
    model = _Model(x, weight)
    defaults = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "loss_type": "kto"}
    trainer = _trainer(
        KTOTrainer,
        model,
        precompute_ref_logps=True,
        calculate_KL=kl is not None,
        _compute_kl_logps=lambda *args: None if kl is None else kl.expand(3),
        **defaults | options,
    )
    batch = {**_tokens(target), "label": label, "ref_logps": ref_logps, "ref_KL_logps": torch.zeros(3)}
    return trainer._compute_loss(model, batch, False), _metrics(trainer)


def _pairs(target: Tensor) -> dict[str, Tensor]:
    batch, labels = {}, F.pad(target, (1, 0), value=-100)
    for name, of in zip(("chosen", "rejected"), labels.chunk(2), strict=True):
        tokens = {"labels": of, "input_ids": of.clamp(min=0), "attention_mask": (of != -100).long()}
        batch |= {f"{name}_{key}": value for key, value in tokens.items()}
    return batch


def orpo(x: Tensor, weight: Tensor, target: Tensor, *, beta: float = 0.1) -> Result:
    """Every token that its attention mask has is in TRL's likelihood: here those that count."""
    model = _Model(x, weight)
    return _trainer(ORPOTrainer, model, beta=beta).get_batch_loss_metrics(model, _pairs(target))


def cpo(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Result:
    model = _Model(x, weight)
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "loss_type": "sigmoid",
        "simpo_gamma": 0.5,
        "alpha": 0.0,
        "cpo_alpha": 1.0,
    }
    trainer = _trainer(CPOTrainer, model, pad_token_id=0, **defaults | options)
    return trainer.get_batch_loss_metrics(model, _pairs(target))


def simpo(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Result:
    return cpo(x, weight, target, **{"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, **options})


def _policy_batch(target: Tensor, **given: Any) -> dict[str, Any]:
    tokens, nothing = _tokens(target), torch.zeros(len(target), 0, dtype=torch.int64)
    of = {"completion_ids": tokens["input_ids"][:, 1:], "completion_mask": tokens["completion_mask"][:, 1:]}
    return {"prompt_ids": nothing, "prompt_mask": nothing, **of, **given}


def _answering(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Any]:
    """The method with which a trainer asks for what it needs of tokens."""
    of = _Model(x, weight)(labels=F.pad(target, (1, 0), value=-100))
    return {"_get_per_token_logps_and_entropies": lambda *args, **kwargs: (of.log_probs, of.entropy.detach(), None)}


def rloo(x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, *, old_logps: Tensor, **options: Any) -> Result:
    model, low = _Model(x, weight), options.get("epsilon", 0.2)
    bounds = {"epsilon_low": low, "epsilon_high": options.get("epsilon_high", low)}
    trainer = _trainer(RLOOTrainer, model, **bounds, **_answering(x, weight, target))
    batch = _policy_batch(target, advantages=advantages, old_logps=old_logps)
    return trainer._compute_loss(model, batch), _metrics(trainer)


VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
OF_ARGUMENTS = {
    "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "use_bias_correction_kl": True,
    "steps_per_generation": 1, **VESPO,
}  # fmt: skip
"""What a GRPOTrainer reads from its arguments; the rest are attributes of its own."""
OF_GRPO = {
    "loss_type": "dapo", "beta": 0.0, "importance_sampling_level": "token", "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0, "_entropy_bonus_enabled": False, "vllm_importance_sampling_correction": True,
}  # fmt: skip
TENSORS = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")


def grpo(
    x: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, *, num_items_in_batch: float, **options: Any
) -> Result:
    model, low = _Model(x, weight), options.pop("epsilon", 0.2)
    given = {name: options.pop(name) for name in TENSORS if name in options}
    args = SimpleNamespace(**OF_ARGUMENTS | {name: options.pop(name) for name in OF_ARGUMENTS if name in options})
    bounds = {"epsilon_low": low, "epsilon_high": options.pop("epsilon_high", low)}
    options = OF_GRPO | {"max_completion_length": target.shape[1], **options, **bounds}
    kind = GMPOTrainer if options["loss_type"] == "gmpo" else GRPOTrainer
    of_sampler = {"use_vllm": "importance_sampling_ratio" in given}
    trainer = _trainer(kind, model, args=args, **options, **of_sampler, **_answering(x, weight, target))
    items = torch.tensor(num_items_in_batch)
    batch = _policy_batch(target, advantages=advantages, num_items_in_batch=items, **given)
    return trainer._compute_loss(model, batch), _metrics(trainer)


def dft(x: Tensor, weight: Tensor, target: Tensor, *, num_items_in_batch: Tensor | None = None) -> Result:
    model = _Model(x, weight)
    args = SimpleNamespace(loss_type="dft", average_tokens_across_devices=False)
    trainer = _trainer(SFTTrainer, model, args=args)
    tokens = _tokens(target)
    batch = {
        "input_ids": tokens["input_ids"],
        "attention_mask": tokens["attention_mask"],
        "labels": F.pad(target, (1, 0), value=-100),
    }
    return trainer.compute_loss(model, batch, num_items_in_batch=num_items_in_batch), _metrics(trainer)


def tpo(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Result:
    """Three parts of a batch: chosen, rejected and reference completions."""
    model = _Model(x, weight)
    trainer = _trainer(TPOTrainer, model, **{"label_smoothing": 0.0, "tpo_l_gamma": 0.5, **options})
    return trainer._compute_loss(model, _tokens(target), False), {}


def sdft(x: Tensor, weight: Tensor, target: Tensor, teacher: Tensor, head: Tensor, **options: Any) -> Result:
    """The mean over sequences of means over tokens, as `SDFTTrainer` has it; over all classes, or over the largest."""
    logits, teacher_logits, mask = F.linear(x, weight), F.linear(teacher, head), target != -100
    over = "full_logit" if "distillation_topk" not in options else "topk"
    per_token = getattr(sdft_losses, f"compute_{over}_self_distillation_loss")(logits, teacher_logits, **options)
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean(), {}


def iw_opd(x: Tensor, weight: Tensor, target: Tensor, teacher_logps: Tensor, rollout_logps: Tensor) -> Result:
    trainer = _trainer(IWOPDTrainer, _Model(x, weight), temperature=1.0, iw_opd_gamma=0.5, iw_opd_epsilon=1e-8)
    loss = trainer._compute_iw_opd_loss(F.linear(x, weight), target.clamp(min=0), target, teacher_logps, rollout_logps)
    return loss, {}
