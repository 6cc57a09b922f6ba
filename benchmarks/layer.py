"""`python -m benchmarks.layer [OP ...]`: which form of an operator is fastest inside a compiled layer.

One Llama decoder layer, the final norm, and the output projection with its loss, 4 sequences of 2048 tokens; forward
and backward are compiled as one graph each. In it an operator takes one of three forms:

- kernel: its Triton kernels, which Inductor launches as they are;
- aten: the same formulas, forward and backward, in plain PyTorch, which Inductor fuses with what is around them;
- plain: the reference of its record in the model's code, which PyTorch differentiates.

For each operator in turn only its form changes, the others are kernels. An operator that such a layer does not have
takes the place of one that it could replace; those, and single operators as plain, at the last hidden size only.

All variants are compiled first and then take turns, round after round. Matrix products take most of a step, and vary by
more than what is compared here. So the profiler adds up the kernels of products (gemm), of attention and all others
(rest): compare the last. On a CPU a tiny layer runs, to keep the code tested.
"""

import argparse
import collections
import datetime
import itertools
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import llmk
from llmk.registry import OPS
from llmk.registry.graphs import ops_in_graph_as

DTYPE = torch.bfloat16
ROUNDS, STEPS = 4, 4  # of each variant: steps timed, and as many profiled, in each round; one more round warms up

PARTS = {"add_norm": "add_rms_norm", "turn": "rope", "mlp": "swiglu", "loss": "fused_linear_ce"}
"""The operators of the layer, by what they do there; its first norm is always rms_norm."""

ALTERNATIVES = [
    ("add_norm", "rms_norm"),  # after an addition in plain PyTorch
    ("turn", "qk_norm_rope"),
    ("mlp", "geglu"),
    ("mlp", "relu_squared"),
    ("mlp", "linear_act"),
    ("loss", "cross_entropy"),
]

NEVER_ATEN = {"fused_linear_ce", "linear_act"}
"""The first is one node in every graph; the second's plain PyTorch multiplies in float32, which is for CPUs."""

GROUPS = {"attention": r"flash|fmha|sdpa", "gemm": r"gemm|nvjet|cutlass|cublas|splitK|matmul_"}
"""Names that tell libraries' kernels apart, the first that fits; all others are "rest"."""


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    batch: int
    sequence: int
    vocabulary: int

    @classmethod
    def of(cls, hidden: int, tokens: int) -> "Sizes":
        """The sizes of Llama 3 with 1 and 8 billion parameters where hidden is 2048 and 4096."""
        if hidden < 1024:
            return cls(hidden, 2 * hidden, 4, 2, 1, tokens, 128)
        return cls(hidden, 8192 if hidden <= 2048 else 7 * hidden // 2, 32, 8, tokens // 2048, 2048, 32768)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def parameters(self, device: torch.device) -> dict[str, Tensor]:
        H, N, D = self.hidden, self.intermediate, self.head_dim
        shapes = {
            "norm_1": (H,),
            "norm_2": (H,),
            "norm_3": (H,),
            "q_norm": (D,),
            "k_norm": (D,),
            "q": (self.heads * D, H),
            "k": (self.kv_heads * D, H),
            "v": (self.kv_heads * D, H),
            "o": (H, H),
            "gate": (N, H),
            "up": (N, H),
            "down": (H, N),
            "head": (self.vocabulary, H),
        }
        parameters = {
            name: torch.ones(shape, device=device, dtype=DTYPE)
            if "norm" in name
            else 0.02 * torch.randn(shape, device=device, dtype=DTYPE)
            for name, shape in shapes.items()
        }
        return {name: parameter.requires_grad_() for name, parameter in parameters.items()}

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of a layer from those before it, the targets, and the angles' cos and sin as in RotaryEmbedding."""
        tokens = (self.batch, self.sequence)
        x = torch.randn(*tokens, self.hidden, device=device, dtype=DTYPE).requires_grad_()
        rotary = llmk.nn.RotaryEmbedding(self.head_dim, self.sequence, device=device)
        target = torch.randint(0, self.vocabulary, tokens, device=device)
        return x, target, rotary.cos.unsqueeze(0), rotary.sin.unsqueeze(0)


@dataclass(frozen=True)
class Variant:
    """A layer made of certain operators, each in a certain form; "recorded" is the form that llmk chose."""

    name: str
    parts: Mapping[str, str]
    forms: Mapping[str, str]

    def kernel_forms(self) -> dict[str, str]:
        return {
            kernel_op.name: form
            for name, form in self.forms.items()
            if form in ("kernel", "aten")
            for kernel_op in OPS[name].kernel_ops
        }


def forms_of(names: Sequence[str], form: str, only: str | None = None) -> dict[str, str]:
    """Those of the operators, or only the one, in a form where they have it; kernels else."""
    has = {name for name in names if only in (None, name) and not (form == "aten" and name in NEVER_ATEN)}
    return {name: form if name in has else "kernel" for name in names}


def variants(wanted: Sequence[str], everything: bool) -> Iterator[Variant]:
    """The layer in one form, then with one operator in another; everything: also as plain, and the alternatives."""
    names = ("rms_norm", *PARTS.values())
    for form in ("kernel", "aten", "plain", "recorded"):
        yield Variant(f"all {form}", PARTS, forms_of(names, form))
    for name in names:
        for form in ("aten", "plain") if everything else ("aten",):
            if name in wanted and not (form == "aten" and name in NEVER_ATEN):
                yield Variant(f"{name} {form}", PARTS, forms_of(names, form, name))
    for part, name in ALTERNATIVES if everything else []:
        parts = PARTS | {part: name}
        for form in ("kernel", "aten", "plain"):
            if name in wanted and not (form == "aten" and name in NEVER_ATEN):
                forms = forms_of(("rms_norm", *parts.values()), form, name)
                yield Variant(f"{'add + ' if part == 'add_norm' else ''}{name} {form}", parts, forms)


def layer(
    variant: Variant, head_dim: int, w: dict[str, Tensor], x: Tensor, target: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The mean cross entropy of hidden states `[B, S, H]`, after one layer."""

    def op(name: str) -> Callable[..., Any]:
        # Reading the form makes Dynamo compile each anew: to it, kernel and aten are the same operator.
        return OPS[name].reference if variant.forms[name] == "plain" else getattr(torch.ops.llmk, name)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if variant.parts["add_norm"] == "add_rms_norm":
            return op("add_rms_norm")(x, residual, weight, 1e-5)
        h = x + residual
        return op("rms_norm")(h, weight, 1e-5), h

    def attention(x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w[n]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for n in "qkv")
        if variant.parts["turn"] == "rope":
            q, k = op("rope")(q, k, cos, sin)
        else:
            q, k = op("qk_norm_rope")(q, k, w["q_norm"], w["k_norm"], cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(2), w["o"])

    def mlp(x: Tensor) -> Tensor:
        name = variant.parts["mlp"]
        if name == "linear_act":
            return F.linear(op(name)(x, w["up"], activation="relu_squared"), w["down"])
        if name == "relu_squared":
            return F.linear(op(name)(F.linear(x, w["up"])), w["down"])
        return F.linear(op(name)(F.linear(x, w["gate"]), F.linear(x, w["up"])), w["down"])

    y, x = add_norm(attention(op("rms_norm")(x, w["norm_1"], 1e-5)), x, w["norm_2"])
    y, _ = add_norm(mlp(y), x, w["norm_3"])
    if variant.parts["loss"] == "fused_linear_ce":
        return op("fused_linear_ce")(y, w["head"], target)
    return op("cross_entropy")(F.linear(y, w["head"]), target)


class Bench:
    """One layer's parameters and inputs, and its variants, each compiled once."""

    def __init__(self, sizes: Sizes, device: torch.device, code: Path | None) -> None:
        torch.manual_seed(0)
        self.device, self.code = device, code
        self.head_dim, self.parameters, self.inputs = sizes.head_dim, sizes.parameters(device), sizes.inputs(device)
        self.compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def step(self, variant: Variant) -> None:
        loss = self.compiled(variant, self.head_dim, self.parameters, *self.inputs)
        wanted = [self.inputs[0], *self.parameters.values()]
        torch.autograd.grad(loss, wanted, allow_unused=True)  # some variants have no use for some parameters

    def compile(self, variant: Variant) -> float | None:
        """Compile, and give the peak memory of a step in MiB, without what is there before it."""
        generated: list[str] = []
        keep = mock.patch.object(GraphLowering, "save_output_code", generated.append)
        with ops_in_graph_as(variant.kernel_forms()), keep:
            self.step(variant)
        if self.code:
            self.code.mkdir(parents=True, exist_ok=True)
            for direction, text in zip(("forward", "backward"), generated, strict=True):
                (self.code / f"{re.sub(r'[ +]+', '-', variant.name)}-{direction}.py").write_text(text)
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step(variant)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def milliseconds(self, variant: Variant) -> list[float]:
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.step(variant)
            return [1e3 * (time.perf_counter() - start)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        self.step(variant)  # the host is ahead of the device from here on
        events[0].record()
        for event in events[1:]:
            self.step(variant)
            event.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]

    def kernels(self, variant: Variant) -> dict[str, float]:
        """Microseconds of a step by kernel, copies and fills among them."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                self.step(variant)
            torch.cuda.synchronize(self.device)
        spent: collections.Counter[str] = collections.Counter()
        for event in profiled.events() or []:
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                spent[event.name] += event.time_range.elapsed_us()
        return {name: us / STEPS for name, us in spent.most_common()}


def group_of(kernel: str) -> str:
    if kernel.startswith("triton_"):  # Inductor names its own after the operators around them
        return "rest"
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "rest")


def measure(bench: Bench, chosen: Sequence[Variant]) -> list[dict[str, Any]]:
    """A row for each variant, which take turns."""
    rows: list[dict[str, Any]] = []
    with torch._dynamo.config.patch(recompile_limit=len(chosen) + 1):
        for variant in tqdm(chosen, desc="compiling", disable=not sys.stderr.isatty()):
            rows.append({**asdict(variant), "peak_mib": bench.compile(variant)})
        times: dict[str, list[float]] = collections.defaultdict(list)
        profiles: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
        for turn in range(ROUNDS + 1 if bench.device.type == "cuda" else 1):
            for variant in chosen if turn % 2 else reversed(chosen):
                measured = bench.milliseconds(variant)
                profiled = bench.kernels(variant) if bench.device.type == "cuda" else {}
                if turn > 0 or bench.device.type != "cuda":
                    times[variant.name] += measured
                    profiles[variant.name].append(profiled)
    for row in rows:
        row["step_ms"] = statistics.median(times[row["name"]])
        row["kernels_us"] = median_of(profiles[row["name"]])
        for group in ("rest", *GROUPS):
            row[f"{group}_ms"] = sum(us for name, us in row["kernels_us"].items() if group_of(name) == group) / 1e3
    return rows


def median_of(profiles: Sequence[dict[str, float]]) -> dict[str, float]:
    """Kernel by kernel."""
    return {name: statistics.median(p.get(name, 0.0) for p in profiles) for name in profiles[0]}


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """All variants of a layer; the rest also beside the layer of the same operators in which all are kernels."""
    print(f"\n{title:<34}{'rest ms':>9}{'- kernel':>10}{'gemm':>8}{'attn':>8}{'step ms':>9}{'MiB':>7}")
    for row in rows:
        base = next(other for other in rows if other["parts"] == row["parts"] and is_all_kernel(other))
        times = [row["rest_ms"], row["rest_ms"] - base["rest_ms"], row["gemm_ms"], row["attention_ms"], row["step_ms"]]
        rest, change, gemm, attention, step = times
        memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        print(
            f"  {row['name']:<32}{rest:>9.3f}{change:>+10.3f}{gemm:>8.2f}{attention:>8.2f}{step:>9.2f}{memory:>7}",
            flush=True,
        )


def is_all_kernel(row: dict[str, Any]) -> bool:
    return set(row["forms"].values()) == {"kernel"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer", description="Time the forms of llmk's operators inside a compiled layer."
    )
    measured = ["rms_norm", *PARTS.values(), *dict.fromkeys(name for _, name in ALTERNATIVES)]
    measured = list(dict.fromkeys(measured))
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators whose forms to compare; all by default")
    parser.add_argument("--hidden", nargs="+", type=int, metavar="SIZE", help="hidden sizes (default 2048 4096)")
    parser.add_argument("--tokens", type=int, help="tokens in sequences of 2048 (default 8192)")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--code", type=Path, metavar="FOLDER", help="write what Inductor generates for each variant here"
    )
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = options.device.type == "cuda"
    options.hidden = options.hidden or ([2048, 4096] if on_gpu else [64])
    options.tokens = options.tokens or (8192 if on_gpu else 24)
    options.ops = options.ops or measured
    for name in options.ops:
        if name not in measured:
            parser.error(f"no operator {name!r} in the layer; there are {', '.join(measured)}")
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    device = options.device
    return {
        "llmk": llmk.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(DTYPE),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    results: list[dict[str, Any]] = []
    for hidden in options.hidden:
        torch._dynamo.reset()
        sizes = Sizes.of(hidden, options.tokens)
        code = options.code / f"hidden-{hidden}" if options.code else None
        chosen = list(variants(options.ops, everything=hidden == options.hidden[-1]))
        # Code that comes from a cache is not shown.
        with torch._inductor.config.patch(force_disable_caches=bool(code)):
            rows = measure(Bench(sizes, options.device, code), chosen)
        print_rows(f"hidden {hidden}, {sizes.batch} x {sizes.sequence} tokens", rows)
        results.append({**asdict(sizes), "rows": rows})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about(options), "layers": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
