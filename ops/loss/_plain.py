"""How losses of predictions are written in plain PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch

from llmk.ops.loss.plain import REDUCTIONS, capped, cross_entropy_of, loss_options
from llmk.registry.patterns import Call, Emit, Plain, Value, Var, as_dtype


def _build_cross_entropy(emit: Emit, values: Mapping[str, Any]) -> Any:
    options = loss_options(values)
    loss = emit(torch.ops.llmk.cross_entropy.default, values["input"], values["target"], **options)
    return as_dtype(emit, loss, emit.wanted.dtype)


def _build_kl_div(emit: Emit, values: Mapping[str, Any]) -> Any:
    options = {"reduction": REDUCTIONS[values["reduction"]], "log_target": values["log_target"]}
    loss = emit(torch.ops.llmk.kl_div.default, values["input"], values["target"], **options)
    return as_dtype(emit, loss, emit.wanted.dtype)


CROSS_ENTROPY = (
    Plain(
        results=(cross_entropy_of(capped(Var("input"))),),
        signs=("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        build=_build_cross_entropy,
    ),
)
KL_DIV = (
    Plain(
        results=(Call("kl_div", Var("input"), Var("target"), Value("reduction"), log_target=Value("log_target")),),
        signs=("kl_div",),
        build=_build_kl_div,
    ),
)
