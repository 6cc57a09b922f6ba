"""The functions of `llmk.losses`, each with its reference, as records that the rule of accuracy can be asked of."""

import dataclasses

from compile_tests.helpers.loss_references import (
    cpo_reference,
    dpo_reference,
    kto_reference,
    loss_op,
    orpo_reference,
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

DPO, CPO = loss_op(losses.dpo, dpo_reference), loss_op(losses.cpo, cpo_reference)
SIMPO, ORPO = loss_op(losses.simpo, simpo_reference), loss_op(losses.orpo, orpo_reference)
KTO, GRPO = loss_op(losses.kto, kto_reference), loss_op(losses.grpo, grpo_reference)
REINFORCE, RLOO = loss_op(losses.reinforce, reinforce_reference), loss_op(losses.rloo, rloo_reference)
PPO = loss_op(losses.ppo, ppo_reference, ("values",))
SFT, DFT = loss_op(losses.sft, sft_reference), loss_op(losses.dft, dft_reference)
DISTILL, TOPK = loss_op(losses.distill, distill_reference), loss_op(losses.distill_topk, distill_topk_reference)
HEADS = dataclasses.replace(loss_op(two_heads, multi_token_reference), differentiable=("x", "y", "linear_weight"))
