"""Losses for training after pretraining, from hidden states and an output projection, without the full logits.

Each takes `(input [B, S, H], linear_weight [V, H], target [B, S], ...)`, already shifted, and returns the loss and a
dict of detached metrics. They call `fused_linear_preference`, `fused_linear_policy`, `fused_linear_jsd`,
`fused_linear_ce` and, if gradients can only be computed in the backward pass, `linear_logprobs` of `llmk.functional`.
`info_nce` takes two sets of embeddings instead, and calls the operator of its name; `late_interaction` takes those of
tokens, and calls `maxsim`. `router_balance` and `router_z` take the sums of `router_topk_sums`.
"""

from llmk.losses.contrastive import info_nce, late_interaction
from llmk.losses.cpo import cpo, orpo, simpo
from llmk.losses.distillation import distill, distill_topk
from llmk.losses.dpo import dpo
from llmk.losses.draft import draft
from llmk.losses.grpo import grpo
from llmk.losses.kto import kto
from llmk.losses.ppo import ppo, reinforce, rloo
from llmk.losses.router import router_balance, router_z
from llmk.losses.sampling_ratio import sampling_ratio
from llmk.losses.supervised import dft, multi_token, sft

__all__ = [
    "cpo",
    "dft",
    "distill",
    "distill_topk",
    "dpo",
    "draft",
    "grpo",
    "info_nce",
    "kto",
    "late_interaction",
    "multi_token",
    "orpo",
    "ppo",
    "reinforce",
    "rloo",
    "router_balance",
    "router_z",
    "sampling_ratio",
    "sft",
    "simpo",
]
