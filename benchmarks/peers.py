"""The libraries that llmk's operators are timed beside, where they are installed.

For each library and operator an adapter takes a call's arguments and returns a function of the same arguments that
computes the same with the library's public functions, or None where the library has none for such a call. The library's
own defaults hold, with three exceptions: Cut Cross-Entropy computes exact gradients (it leaves out small ones by
default), a Liger implementation that would quietly hand a call on to another one refuses it, and QuACK's matrix
products are tuned only on request, because that compiles dozens of kernels for each shape.
"""

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Adapter = Callable[..., Callable[..., Any] | None]


@dataclass(frozen=True)
class Peer:
    """A library. `adapters(tune)` imports it and gives an adapter by operator."""

    name: str
    distributions: tuple[str, ...]  # the library, and what else it needs
    adapters: Callable[[bool], dict[str, Adapter]]

    def version(self) -> str | None:
        """The library's version; None where it, or something that it needs, is missing."""
        try:
            version, *_ = [importlib.metadata.version(distribution) for distribution in self.distributions]
        except importlib.metadata.PackageNotFoundError:
            return None
        return version


@dataclass(frozen=True)
class Installed:
    """A library that was found."""

    name: str
    version: str
    adapters: dict[str, Adapter]

    def function(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """The library's way to compute the operator for these arguments, if it has one."""
        adapter = self.adapters.get(op)
        return adapter(*args, **kwargs) if adapter else None


def find_peers(names: Sequence[str] | None = None, tune: bool = False) -> list[Installed]:
    """The peers that are installed, of those named or of all; says a word of each that is not."""
    found = []
    for name, peer in PEERS.items():
        if names is not None and name not in names:
            continue
        version = peer.version()
        if version is None:
            print(f"{name}: missing")
            continue
        try:
            found.append(Installed(name, version, peer.adapters(tune)))
        except Exception as error:  # a broken library must not stop the others' benchmark
            print(f"{name}: unusable, {type(error).__name__}: {error}")
    return found


def _liger(impl: str) -> dict[str, Adapter]:
    os.environ.setdefault("LIGER_KERNEL_STRICT", "1")  # refuse instead of falling back to another implementation
    liger = importlib.import_module("liger_kernel.functional")

    def softmax(x: Tensor, dim: int = -1):
        last = dim in (-1, x.dim() - 1)
        return (lambda x, dim=-1: liger.softmax(x, impl=impl)) if last else None

    def rope(q: Tensor, *args: Any, interleaved: bool = False):
        return None if interleaved else lambda q, k, cos, sin: liger.rope(q, k, cos, sin, impl=impl)

    def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh"):
        return (lambda *gates: liger.geglu(*_halves(*gates), impl=impl)) if approximate == "tanh" else None

    return {
        "rms_norm": lambda *args, **options: (
            lambda x, weight, eps=1e-6, *, offset=0.0: liger.rms_norm(x, weight, eps, offset=offset, impl=impl)
        ),
        "add_rms_norm": lambda *args, **options: (
            lambda x, residual, weight, eps=1e-6, *, offset=0.0: liger.fused_add_rms_norm(
                x, residual, weight, eps, offset, impl=impl
            )
        ),
        "layer_norm": lambda *args: lambda x, weight, bias, eps=1e-5: liger.layer_norm(x, weight, bias, eps, impl=impl),
        "softmax": softmax,
        "cross_entropy": _plain_loss(lambda logits, target: liger.cross_entropy(logits, target, impl=impl)[0]),
        "fused_linear_ce": _plain_loss(
            lambda x, weight, target: liger.fused_linear_cross_entropy(x, weight, target, impl=impl)[0]
        ),
        "rope": rope,
        "swiglu": lambda *args: lambda *gates: liger.swiglu(*_halves(*gates), impl=impl),
        "geglu": geglu,
        "kl_div": lambda *args, **options: (
            lambda x, target, reduction="mean", log_target=False: liger.kl_div(
                x, target, reduction, log_target, impl=impl
            )
        ),
    }


def _liger_triton(tune: bool) -> dict[str, Adapter]:
    adapters = _liger("nvidia-triton")
    ops = importlib.import_module("liger_kernel.ops")
    functional = importlib.import_module("liger_kernel.transformers.functional")
    separate = adapters["swiglu"]

    def swiglu(gate: Tensor, up: Tensor | None = None):
        return ops.LigerFusedGateUpSiLUMulFunction.apply if up is None else separate(gate, up)

    return adapters | {
        "swiglu": swiglu,
        "group_norm": lambda *args: (
            lambda x, groups, weight, bias, eps=1e-5: ops.LigerGroupNormFunction.apply(
                x, weight, bias, x.shape[1], groups, eps
            )
        ),
        "relu_squared": lambda x: ops.LigerReLUSquaredFunction.apply,
        "sparsemax": lambda x, dim=-1: lambda x, dim=-1: ops.LigerSparsemaxFunction.apply(x, dim),
        "embedding": lambda *args: lambda input, weight: ops.LigerEmbeddingFunction.apply(weight, input),
        "poly_norm": lambda *args: lambda x, w, b, eps=1e-6: ops.LigerPolyNormFunction.apply(x, w, b, eps, False),
        "dyt": lambda *args: ops.LigerDyTFunction.apply,
        "modulated_rms_norm": lambda *args: (
            lambda x, scale, shift, weight: ops.LigerModulatedRMSNormFunction.apply(
                x, weight, scale, shift, 1e-6, 0.0, "llama", False
            )
        ),
        "attention_residual": lambda *args: functional.liger_attn_res,
        "hyper_connection": lambda *args: functools.partial(_liger_hyper_connection, functional),
        "multi_token_attention": lambda scores, weight, bias: functools.partial(
            functional.liger_multi_token_attention,
            padding=(weight.shape[2] // 2, weight.shape[3] // 2),
            groups=scores.shape[1],
        ),
        "jsd": lambda *args, **options: functional.liger_jsd,
        "tvd": _plain_loss(functional.liger_tvd),
        "ce_tvd": _plain_loss(lambda *args: ops.LigerFusedCETVDFunction.apply(*args, -100)),
        "fused_linear_jsd": lambda *args, **options: (
            lambda *args, beta=0.5: functional.liger_fused_linear_jsd(*args, jsd_beta=beta)
        ),
    }


def _liger_hyper_connection(functional: Any, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """Around SiLU; its matrices are the transposed ones."""
    N = x.shape[-2]

    def turned(rows: Tensor) -> Tensor:
        return torch.cat((rows[: 2 * N], rows[2 * N :].unflatten(0, (N, N)).transpose(0, 1).flatten(0, 1)))

    coefficients = functional.liger_mhc_coeffs(
        x, turned(fn).t().contiguous(), turned(base).float(), *scale.float().unbind(), pre_eps=1e-6
    )
    output = torch.nn.functional.silu(functional.liger_mhc_pre(x, coefficients[0]).to(x.dtype))
    return functional.liger_mhc_post_res(x, output, *coefficients[1:])


def _trl(tune: bool) -> dict[str, Adapter]:
    """The function that its trainers score tokens with, in tiles as they choose them; every token counts."""
    logprob, divergence = (importlib.import_module(f"trl.kernels.chunked_{name}") for name in ("logprob", "divergence"))
    classes_at_a_time = 32768

    def linear_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        score = logprob.ChunkedLogProbFunction.apply
        return score(x, weight, None, target, 1.0, classes_at_a_time, None, 1.0, ("entropy",))[:2]

    def fused_linear_jsd(*args: Tensor, beta: float = 0.5) -> Tensor:
        x, weight, teacher_x, teacher_weight = args
        each, _ = divergence.ChunkedDivergenceFunction.apply(x, weight, None, teacher_x, teacher_weight, None, beta)
        return each.mean()

    return {
        "linear_logprobs": _plain_loss(linear_logprobs),
        "fused_linear_jsd": lambda *args, **options: fused_linear_jsd,
    }


def _cut_cross_entropy(tune: bool) -> dict[str, Adapter]:
    cce = importlib.import_module("cut_cross_entropy")
    # The default filter leaves out gradients where all probabilities of a tile are small.
    return {
        "fused_linear_ce": _plain_loss(
            lambda x, weight, target: cce.linear_cross_entropy(x, weight, target, filter_eps=None)
        )
    }


def _quack(tune: bool) -> dict[str, Adapter]:
    quack, rotary = (importlib.import_module(name) for name in ("quack", "quack.rotary"))

    def softmax(x: Tensor, dim: int = -1):
        return (lambda x: quack.softmax(x)) if x.dim() == 2 and dim in (-1, 1) else None

    return {
        "rms_norm": lambda *args, **options: (
            lambda x, weight, eps=1e-6, *, offset=0.0: quack.rmsnorm(x, weight, eps=eps, weight_offset=offset)
        ),
        "add_rms_norm": lambda *args, **options: (
            lambda x, residual, weight, eps=1e-6, *, offset=0.0: quack.rmsnorm(
                x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset
            )
        ),
        "softmax": softmax,
        "cross_entropy": _plain_loss(lambda logits, target: quack.cross_entropy(logits, target)),
        "rope": _rope_of_one(rotary.apply_rotary_emb),
    }


def _quack_linear(tune: bool) -> dict[str, Adapter]:
    """Apart from the others: these modules do not import with every version of the CuTe DSL."""
    linear, linear_ce = (importlib.import_module(f"quack.{name}") for name in ("linear", "linear_cross_entropy"))
    activations = {
        "none": None,
        "relu": "relu",
        "relu_squared": "relu_sq",
        "gelu_tanh": "gelu_tanh_approx",
        "silu": "silu",
    }

    def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu"):
        if activation not in activations:
            return None

        # Of its two results only the one before the activation has a gradient: the next layer's product makes it.
        def function(x, weight, bias=None, *, activation="relu"):
            keep = torch.is_grad_enabled()
            return linear.linear_act_func(x, weight, activations[activation], bias, store_preact=keep, tuned=tune)[1]

        return function

    return {
        "fused_linear_ce": _plain_loss(
            lambda x, weight, target: linear_ce.chunked_linear_cross_entropy(x, weight, target, tuned=tune)
        ),
        "linear_act": linear_act,
    }


def _fla(tune: bool) -> dict[str, Adapter]:
    norm, activations, ce, linear_ce, rotary = (
        importlib.import_module(f"fla.modules.{name}")
        for name in (
            "norm.layernorm",
            "activations",
            "fused_cross_entropy",
            "fused_linear_cross_entropy",
            "rotary.ops",
        )
    )
    no_offset = lambda function: lambda *args, offset=0.0: function if offset == 0 else None  # noqa: E731

    def group_norm(x: Tensor, *args: Any):
        if x.dim() != 2:  # its channels are the last axis
            return None
        return lambda x, groups, weight, bias, eps=1e-5: norm.group_norm(x, weight, bias, eps=eps, num_groups=groups)

    return _fla_hybrids() | {
        "rms_norm": no_offset(lambda x, weight, eps=1e-6: norm.rms_norm(x, weight, None, eps=eps)),
        "add_rms_norm": no_offset(
            lambda x, residual, weight, eps=1e-6: norm.rms_norm(x, weight, None, residual, eps, prenorm=True)
        ),
        "layer_norm": lambda *args: lambda x, weight, bias, eps=1e-5: norm.layer_norm(x, weight, bias, eps=eps),
        "group_norm": group_norm,
        "swiglu": lambda *args: lambda *gates: activations.swiglu(*_halves(*gates)),
        "relu_squared": lambda x: activations.sqrelu,
        "cross_entropy": _plain_loss(ce.FusedCrossEntropyLoss()),
        "fused_linear_ce": _plain_loss(
            lambda x, weight, target: linear_ce.fused_linear_cross_entropy_loss(x, target, weight)
        ),
        "rope": _rope_of_one(rotary.rotary_embedding),
    }


def _fla_hybrids() -> dict[str, Adapter]:
    """The layers of hybrid models, with the states that they end with."""
    gated_norm, convolution, delta_rule, kda, linear_attention, gla = (
        importlib.import_module(f"fla.{name}")
        for name in (
            "modules.norm.fused_norm_gate",
            "modules.causal_conv1d",
            "ops.gated_delta_rule",
            "ops.kda",
            "ops.simple_gla",
            "ops.gla",
        )
    )

    def rms_norm_gated(input: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **options: Any):
        return None if options else lambda *args: gated_norm.rms_norm_gated(*args[:3], None, eps=eps)

    def causal_conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None):
        def function(input: Tensor, *layer: Tensor, activation: str | None = None) -> tuple[Tensor, Tensor]:
            out, state = convolution.causal_conv1d(
                input.transpose(1, 2), *layer, activation=activation, output_final_state=True
            )
            return out.transpose(1, 2), state[..., 1:]  # without the column that the next token drops

        return function

    def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, l2_norm_qk: bool = False):
        function = delta_rule.chunk_gated_delta_rule if g.dim() == 3 else kda.chunk_kda
        return lambda *args, l2_norm_qk=False: function(
            *args, output_final_state=True, use_qk_l2norm_in_kernel=l2_norm_qk
        )

    def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor):
        function = linear_attention.chunk_simple_gla if g.dim() == 3 else gla.chunk_gla

        def of_all_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            times = v.shape[2] // q.shape[2]  # it has as many heads of keys as of values
            q, k = (each if times == 1 else each.repeat_interleave(times, 2) for each in (q, k))
            return function(q, k, v, g, output_final_state=True)

        return of_all_heads

    return {
        "rms_norm_gated": rms_norm_gated,
        "causal_conv1d": causal_conv1d,
        "gated_delta_rule": gated_delta_rule,
        "gated_linear_attention": gated_linear_attention,
    }


def _torch_linear_ce(chunked: bool) -> dict[str, Adapter]:
    """PyTorch's own, 2.13 and later: all logits, as in "torch eager", or chunks as its options choose them."""
    loss = torch.nn.functional.linear_cross_entropy  # type: ignore[attr-defined]
    options = {"options": torch.nn.LinearCrossEntropyOptions()} if chunked else {}  # type: ignore[attr-defined]
    taken = {"linear_bias", "weight", "ignore_index", "reduction"} | (set() if chunked else {"label_smoothing"})

    def fused_linear_ce(x: Tensor, linear_weight: Tensor, target: Tensor, **given: Any):
        return functools.partial(loss, **options) if x.dim() <= 2 and given.keys() <= taken else None

    return {"fused_linear_ce": fused_linear_ce}


def _plain_loss(function: Callable[..., Any]) -> Adapter:
    """Adapt a loss that is a mean over all targets, without any option."""
    return lambda *args, **options: None if options else function


def _halves(gate: Tensor, up: Tensor | None = None) -> Sequence[Tensor]:
    return gate.chunk(2, dim=-1) if up is None else (gate, up)


def _rope_of_one(turn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Adapter:
    """q and k one after the other, by a function of x `[B, S, H, D]` and of cos and sin `[S, R / 2]`."""

    def adapter(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False):
        if interleaved or cos.shape[0] != 1:
            return None

        def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            half = cos.shape[-1] // 2
            cos, sin = cos[0, :, :half], sin[0, :, :half]
            return tuple(turn(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))

        return function

    return adapter


PEERS = {
    peer.name: peer
    for peer in (
        Peer("liger-kernel", ("liger-kernel",), _liger_triton),
        Peer("liger-kernel cute", ("liger-kernel", "nvidia-cutlass-dsl"), lambda tune: _liger("nvidia-cutedsl")),
        Peer("cut-cross-entropy", ("cut-cross-entropy",), _cut_cross_entropy),
        Peer("quack-kernels", ("quack-kernels",), _quack),
        Peer("quack-kernels linear", ("quack-kernels",), _quack_linear),
        Peer("fla-core", ("fla-core",), _fla),
        Peer("trl", ("trl",), _trl),
        Peer("torch linear_cross_entropy", ("torch",), lambda tune: _torch_linear_ce(chunked=False)),
        Peer("torch linear_cross_entropy chunked", ("torch",), lambda tune: _torch_linear_ce(chunked=True)),
    )
}
"""The peers by the name that rows carry."""
