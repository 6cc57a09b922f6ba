"""`python -m benchmarks.losses [LOSS ...]`: losses from hidden states beside TRL's, Liger Kernel's and PyTorch's.

The time of a forward and backward pass, and its peak memory above the inputs: all ways to compute a loss in one process
and in turns, each back to back for a while, because under sustained matrix work a chip runs below the rate of a burst.
The value of the loss shows that they compute the same. TRL's way are the functions that its trainers score tokens with
and the loss of their log-probabilities; PyTorch's is the loss of plain logits, in the inputs' dtype, compiled. In the
workloads of "ignored tokens" some tokens do not count.
"""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import llmk.losses
from benchmarks.peers import find_peers
from benchmarks.products import PRODUCTS
from benchmarks.report import header
from llmk.bench.timing import Timer, first_line
from llmk.registry import OPS

Loss = Callable[[], Tensor]
SHAPES = [(8, 512, 4096, 128256), (8, 4096, 2048, 151936)]
IGNORED = {"dpo_given": (12, 700, 3072, 128256, 0.18), "grpo": (16, 900, 2560, 151936, 0.41)}
"""With the part of the tokens that does not count."""
SMALL, SMALL_IGNORED = [(4, 6, 16, 64)], {"dpo_given": (4, 6, 16, 64, 0.3), "grpo": (4, 6, 16, 64, 0.4)}
ROUNDS, SECONDS = 2, 0.5
CLASSES_AT_A_TIME = 32768
"""As TRL's trainers choose them."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a policy or a student, of pairs the chosen ones first, and what a reference or teacher gives."""

    x: Tensor  # [B, S, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [B, S], -100 where a token does not count
    other_x: Tensor  # [B, S, H]
    other_weight: Tensor  # [V, H]
    old: Tensor  # [B, S], log-probabilities
    advantages: Tensor  # [B]

    @property
    def counts(self) -> Tensor:
        return self.target != -100

    @property
    def chosen(self) -> Tensor:
        return torch.arange(len(self.x), device=self.x.device, dtype=torch.int64) < len(self.x) // 2


def make_batch(shape: Sequence[int], ignored: float, device: torch.device, dtype: torch.dtype) -> Batch:
    B, S, H, V = shape

    def randn(*sizes: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(sizes, device=device, dtype=torch.float32)).to(dtype)

    target = torch.randint(0, V, (B, S), device=device, dtype=torch.int64)
    target.masked_fill_(torch.rand((B, S), device=device, dtype=torch.float32) < ignored, -100)
    x, weight = randn(B, S, H), randn(V, H, scale=H**-0.5)
    other_x, other_weight = randn(B, S, H), randn(V, H, scale=H**-0.5)
    with torch.no_grad():  # near the policy's, as an old policy's are
        old, _ = OPS["linear_logprobs"].overload(x, weight, target)
        old += 0.1 * torch.randn((B, S), device=device, dtype=torch.float32)
    advantages = torch.randn(B, device=device, dtype=torch.float32)
    return Batch(x.requires_grad_(), weight.requires_grad_(), target, other_x, other_weight, old, advantages)


def llmk_loss(name: str, b: Batch, **options: Any) -> Loss:
    args = b.x, b.weight, b.target
    ref_logps = torch.where(b.counts, b.old, 0.0).sum(-1)
    ref = {"ref_input": b.other_x, "ref_linear_weight": b.other_weight}
    calls: dict[str, Callable[[], tuple[Tensor, Any]]] = {
        "dpo_given": lambda: llmk.losses.dpo(*args, ref_logps=ref_logps, **options),
        "dpo_computed": lambda: llmk.losses.dpo(*args, **ref, **options),
        "kto": lambda: llmk.losses.kto(*args, b.chosen, ref_logps=ref_logps, **options),
        "orpo": lambda: llmk.losses.orpo(*args, **options),
        "cpo": lambda: llmk.losses.cpo(*args, **options),
        "simpo": lambda: llmk.losses.simpo(*args, **options),
        "grpo": lambda: llmk.losses.grpo(*args, b.advantages, old_per_token_logps=b.old, **options),
        "gspo": lambda: llmk.losses.grpo(
            *args, b.advantages, old_per_token_logps=b.old, importance_sampling_level="sequence", **options
        ),
        "sft": lambda: llmk.losses.sft(*args, **options),
        "distill": lambda: llmk.losses.distill(*args, b.other_x, b.other_weight, **options),
    }
    return lambda: calls[name]()[0]


NAMES = ("dpo_given", "dpo_computed", "kto", "orpo", "cpo", "simpo", "grpo", "gspo", "sft", "distill")


def loss_of_logps(name: str, b: Batch, logps: Tensor, ref_logps: Tensor) -> Tensor:
    """The loss from log-probabilities of tokens and, of sequences, a reference's; the defaults of `llmk.losses`."""
    counts = b.counts
    logps = torch.where(counts, logps, 0.0)
    sums, lengths, pairs = logps.sum(-1), counts.sum(-1), len(logps) // 2
    chosen, rejected = sums[:pairs], sums[pairs:]
    likelihood = -logps[:pairs].sum() / counts[:pairs].sum()
    if name in ("dpo_given", "dpo_computed"):
        ratio = sums - ref_logps
        return -F.logsigmoid(0.1 * (ratio[:pairs] - ratio[pairs:])).mean()
    if name == "kto":
        ratio = 0.1 * (sums - ref_logps)
        return (1 - torch.sigmoid(torch.where(b.chosen, ratio, -ratio))).mean()
    if name == "cpo":
        return likelihood - F.logsigmoid(0.1 * (chosen - rejected)).mean()
    if name in ("simpo", "orpo"):
        chosen, rejected = (sums / lengths).chunk(2)
    if name == "simpo":
        return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()
    if name == "orpo":
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        return likelihood - 0.1 * F.logsigmoid(odds).mean()
    if name == "sft":
        return -logps.sum() / counts.sum()
    difference = torch.where(counts, logps - b.old, 0.0)
    if name == "gspo":
        difference = (difference.sum(-1) / lengths).unsqueeze(-1).expand(counts.shape)
    ratio, advantages = difference.exp(), b.advantages.unsqueeze(-1)
    each = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -torch.where(counts, each, 0.0).sum() / counts.sum()


def _logps(b: Batch, x: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(x, weight).float()
    return logits.log_softmax(-1).gather(-1, b.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def torch_loss(name: str, b: Batch) -> Loss:
    """The plain composition, compiled."""

    def loss() -> Tensor:
        if name == "distill":
            return OPS["fused_linear_jsd"].reference(
                b.x, b.weight, b.other_x, b.other_weight, beta=0.5, logits_dtype=b.x.dtype
            )
        ref = torch.where(b.counts, b.old, 0.0).sum(-1)
        if name == "dpo_computed":
            with torch.no_grad():
                ref = torch.where(b.counts, _logps(b, b.other_x, b.other_weight), 0.0).sum(-1)
        return loss_of_logps(name, b, _logps(b, b.x, b.weight), ref)

    return torch.compile(loss, dynamic=False)


def trl_loss(name: str, b: Batch) -> Loss:
    logprob, divergence = (importlib.import_module(f"trl.kernels.chunked_{part}") for part in ("logprob", "divergence"))

    def logps(x: Tensor, weight: Tensor) -> Tensor:
        target = b.target.clamp(min=0).flatten()
        score = logprob.ChunkedLogProbFunction.apply
        return score(x.flatten(0, 1), weight, None, target, 1.0, CLASSES_AT_A_TIME, None, 1.0, ())[0].view(b.old.shape)

    def loss() -> Tensor:
        if name == "distill":
            x, other_x = b.x.flatten(0, 1), b.other_x.flatten(0, 1)
            apply = divergence.ChunkedDivergenceFunction.apply
            return apply(x, b.weight, None, other_x, b.other_weight, None, 0.5)[0].mean()
        ref = torch.where(b.counts, b.old, 0.0).sum(-1)
        if name == "dpo_computed":
            with torch.no_grad():
                ref = torch.where(b.counts, logps(b.other_x, b.other_weight), 0.0).sum(-1)
        return loss_of_logps(name, b, logps(b.x, b.weight), ref)

    return loss


def liger_loss(name: str, b: Batch) -> Loss | None:
    """None where it has no such loss."""
    chunked = importlib.import_module("liger_kernel.chunked_loss")
    args, flat = (b.weight, b.x, b.target), tuple(each.flatten(0, 1) for each in (b.x, b.other_x))
    ref = {"ref_input": b.other_x, "ref_weight": b.other_weight}
    calls: dict[str, Callable[[], Any]] = {
        "dpo_computed": lambda: chunked.LigerFusedLinearDPOLoss()(*args, **ref)[0],
        "kto": lambda: chunked.LigerFusedLinearKTOLoss(use_ref_model=True)(
            b.x, b.weight, b.target, preference_labels=b.chosen, kl=torch.zeros_like(b.advantages[:1]), **ref
        )[0],
        "orpo": lambda: chunked.LigerFusedLinearORPOLoss()(*args)[0],
        "cpo": lambda: chunked.LigerFusedLinearCPOLoss()(*args)[0],
        "simpo": lambda: chunked.LigerFusedLinearSimPOLoss(beta=2.0, compute_nll_loss=False)(*args)[0],
        "grpo": lambda: chunked.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)(
            b.x, b.weight, b.target.clamp(min=0), b.counts.int(), b.advantages, old_per_token_logps=b.old
        )[0],
        "distill": lambda: chunked.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)(
            flat[0], b.weight, flat[1], b.other_weight, b.target.flatten()
        ),
    }
    return calls.get(name)


def products(name: str, b: Batch, *, of_all: bool) -> Callable[[], None]:
    """The matrix products alone: three, and one for a reference's or a teacher's logits."""
    rows = torch.ones_like(b.counts) if of_all else b.counts
    x, other_x, target = b.x[rows], b.other_x[rows], b.target[rows]
    if name == "distill":
        return PRODUCTS["fused_linear_jsd"](x, b.weight, other_x, b.other_weight)[1]
    _, full = PRODUCTS["fused_linear_ce"](x, b.weight, target)
    if name != "dpo_computed":
        return full
    forward, _ = PRODUCTS["fused_linear_ce"](other_x, b.other_weight, target)
    return lambda: (full(), forward())[0]


def training(b: Batch, loss: Loss) -> Callable[[], Tensor]:
    def call() -> Tensor:
        value = loss()
        value.backward()
        b.x.grad = b.weight.grad = None  # what is above the inputs is measured from here
        return value.detach()

    return call


def ways(name: str, b: Batch, peers: Sequence[str], compiled: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    if bool(b.counts.all()):
        yield "products alone", products(name, b, of_all=True)
        yield "llmk", training(b, llmk_loss(name, b))
        yield f"llmk, {str(b.x.dtype)[6:]} logits", training(b, llmk_loss(name, b, logits_dtype=b.x.dtype))
    else:
        yield "products of tokens that count", products(name, b, of_all=False)
        yield "products of all", products(name, b, of_all=True)
        yield "llmk", training(b, llmk_loss(name, b))
        yield "llmk, skip_ignored", training(b, llmk_loss(name, b, skip_ignored=True))
    if "trl" in peers and (name != "distill" or bool(b.counts.all())):
        yield "trl", training(b, trl_loss(name, b))
    if compiled:  # before Liger, which marks a size of the target as dynamic
        yield "torch compiled", training(b, torch_loss(name, b))
    liger = liger_loss(name, b) if "liger-kernel" in peers else None
    if liger is not None:
        yield "liger-kernel", training(b, liger)


def measure(timer: Timer, calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds, MiB and the value of each way, or its error."""
    found: dict[str, dict[str, Any]] = {}
    for way, call in calls.items():
        try:
            value = call()
            found[way] = {"ms": 0.0, "mib": timer.peak_mib(call)}
            found[way] |= {} if value is None else {"value": value.item()}
        except Exception as error:  # whatever a way raises belongs in its row
            found[way] = {"error": first_line(error)}
        _release(timer)
    working = [way for way in calls if "error" not in found[way]]
    for _ in range(ROUNDS):
        for way in working:
            found[way]["ms"] += timer.sustained(calls[way], seconds / ROUNDS) / ROUNDS
            _release(timer)
    return found


def _release(timer: Timer) -> None:
    if timer.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def workloads(names: Sequence[str], small: bool, only: str | None) -> Iterator[tuple[str, str, Sequence[int], float]]:
    """Yield a title, the loss, its sizes and the part of the tokens that is ignored."""
    shapes, ignored = (SMALL, SMALL_IGNORED) if small else (SHAPES, IGNORED)
    for name, (*sizes, part) in ignored.items():
        if name in names and only in (None, "ignored"):
            yield f"{name} {'x'.join(map(str, sizes))}, {part:.0%} ignored tokens", name, sizes, part
    for sizes in shapes:
        size = "x".join(map(str, sizes))
        for name in names:
            if only in (None, size):
                yield f"{name} {size}", name, sizes, 0.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description="Time losses from hidden states.")
    parser.add_argument("losses", nargs="*", metavar="LOSS", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--peers", metavar="NAME,NAME", default="trl,liger-kernel", help="or none (default: both)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled PyTorch")
    parser.add_argument("--only", metavar="SHAPE", help="8x512x4096x128256, 8x4096x2048x151936 or ignored")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, workload by workload")
    options = parser.parse_args(arguments)
    for name in options.losses:
        if name not in NAMES:
            parser.error(f"no loss {name!r}; there are {', '.join(NAMES)}")
    options.losses = options.losses or list(NAMES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer = Timer(device, repeats=1)
    dtype, seconds = (torch.bfloat16, SECONDS) if timer.on_gpu else (torch.float32, 0.01)
    peers = {peer.name: peer.version for peer in find_peers([n for n in options.peers.split(",") if n != "none"])}
    rows: list[dict[str, Any]] = []
    for title, name, sizes, part in workloads(options.losses, not timer.on_gpu, options.only):
        torch.manual_seed(0)
        torch.compiler.reset()
        batch = make_batch(sizes, part, device, dtype)
        found = measure(timer, dict(ways(name, batch, list(peers), options.compile)), seconds)
        rows.append({"workload": title, "ways": found})
        del batch
        _release(timer)
        print(title, *(f"  {way:32} {_text(row)}" for way, row in found.items()), sep="\n", flush=True)
        if options.json:
            about = header(device, dtype, peers, {})
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    memory = "" if row["mib"] is None else f"{row['mib']:8.0f} MiB"
    return f"{row['ms']:8.2f} ms {memory}" + (f"  loss {row['value']:.5f}" if "value" in row else "")


if __name__ == "__main__":
    sys.exit(main())
