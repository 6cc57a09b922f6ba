"""`python -m benchmarks.losses [LOSS ...]`: losses from hidden states beside TRL's, Liger Kernel's and PyTorch's.

The time of a forward and backward pass, and its peak memory above the inputs, gradients included: all ways to compute a
loss in one process and in turns, each back to back for a while, because under sustained matrix work a chip runs below
the rate of a burst. The value of the loss shows that they compute the same. TRL's way are the functions that its
trainers score tokens with and the loss of their log-probabilities; PyTorch's is the loss of plain logits, in the
inputs' dtype, compiled. In the workloads of "ignored tokens" some tokens do not count.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import llmk.losses
from benchmarks.peers import Installed, find_peers
from benchmarks.products import PRODUCTS
from benchmarks.report import header
from llmk.bench.timing import Timer, first_line
from llmk.registry import OPS

Loss = Callable[[], Tensor]
SHAPES = [(8, 512, 4096, 128256), (8, 4096, 2048, 151936)]
IGNORED = {
    "dpo_given": (10, 1000, 2048, 151936, 0.19),
    "grpo": (16, 900, 2560, 151936, 0.69),
    "gspo": (16, 900, 2560, 151936, 0.69),
    "sft": (1, 12000, 3072, 200064, 0.6),
}
"""The sizes of each loss, and the part of the tokens that does not count."""
SMALL, SMALL_IGNORED = [(4, 6, 16, 64)], {name: (4, 6, 16, 64, 0.4) for name in IGNORED}
ROUNDS, SECONDS = 2, 0.5
CLASSES_AT_A_TIME = 32768
"""The classes at a time that TRL's trainers choose."""
LABELS = {
    "dpo_given": "`dpo`, log-probabilities of the reference given",
    "dpo_computed": "`dpo`, hidden states of the reference",
    "grpo": "`grpo`",
    "gspo": "`grpo`, ratios of sequences",
    "kto": "`kto`, log-probabilities of the reference given",
    "kto_computed": "`kto`, hidden states of the reference",
    "orpo": "`orpo`",
    "cpo": "`cpo`",
    "simpo": "`simpo`",
    "sft": "`sft`",
    "logprobs": "`linear_logprobs` and entropies",
    "distill": "`distill`",
    "distill_two": "`distill`, two teachers",
}
"""The losses, as a table names them. A reference is given by its log-probabilities unless it has to be computed."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of a policy or a student, of pairs the chosen ones first, and what a reference or teacher gives."""

    x: Tensor  # [B, S, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [B, S], -100 where a token does not count
    other_x: Tensor  # [B, S, H]
    second_x: Tensor  # [B, S, H], of a second teacher with the same projection
    other_weight: Tensor  # [V, H]
    old: Tensor  # [B, S], log-probabilities of an old policy or a reference
    advantages: Tensor  # [B]

    @property
    def ref_logps(self) -> Tensor:
        """Log-probabilities of the sequences under a reference."""
        return torch.where(self.counts, self.old, 0.0).sum(-1)

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
    x, weight = x.requires_grad_(), weight.requires_grad_()
    return Batch(x, weight, target, other_x, other_x.roll(1, 0), other_weight, old, advantages)


def llmk_loss(name: str, b: Batch, **options: Any) -> Loss:
    args, teacher, ref_logps = (b.x, b.weight, b.target), (b.other_x, b.other_weight), b.ref_logps
    ref = {"ref_input": b.other_x, "ref_linear_weight": b.other_weight}
    teachers = [b.other_x, b.second_x], [b.other_weight] * 2
    policy = {"old_per_token_logps": b.old, **options}
    losses = llmk.losses
    calls: dict[str, Callable[[], tuple[Tensor, Any]]] = {
        "dpo_given": lambda: losses.dpo(*args, ref_logps=ref_logps, **options),
        "dpo_computed": lambda: losses.dpo(*args, **ref, **options),
        "grpo": lambda: losses.grpo(*args, b.advantages, **policy),
        "gspo": lambda: losses.grpo(*args, b.advantages, importance_sampling_level="sequence", **policy),
        "kto": lambda: losses.kto(*args, b.chosen, ref_logps=ref_logps, **options),
        "kto_computed": lambda: losses.kto(*args, b.chosen, **ref, **options),
        "orpo": lambda: losses.orpo(*args, **options),
        "cpo": lambda: losses.cpo(*args, **options),
        "simpo": lambda: losses.simpo(*args, **options),
        "sft": lambda: losses.sft(*args, **options),
        "distill": lambda: losses.distill(*args, *teacher, **options),
        "distill_two": lambda: losses.distill(*args, *teachers, **options),
    }
    if name == "logprobs":
        return lambda: likelihood_and_entropy(*llmk.functional.linear_logprobs(*args, **options))
    return lambda: calls[name]()[0]


def likelihood_and_entropy(logps: Tensor, entropy: Tensor) -> Tensor:
    """A loss through which both have gradients, of tokens that all count."""
    return -(logps + 0.01 * entropy).mean()


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
    if name in ("kto", "kto_computed"):
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


def torch_loss(name: str, b: Batch) -> Loss:
    """The plain composition, with logits of the inputs' dtype."""
    options = {"logits_dtype": b.x.dtype}

    def logps(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.log_softmax(-1).gather(-1, b.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)

    def divergence(teacher_x: Tensor) -> Tensor:
        return OPS["fused_linear_jsd"].reference(b.x, b.weight, teacher_x, b.other_weight, beta=0.5, **options)

    def logps_and_entropy() -> tuple[Tensor, Tensor]:
        return OPS["linear_logprobs"].reference(b.x, b.weight, b.target, **options)

    return lambda: _of_parts(name, b, logps, logps_and_entropy, divergence)


def trl_loss(name: str, b: Batch) -> Loss:
    """Two teachers take two calls: it has no divergence from several."""
    logprob, divergence = (importlib.import_module(f"trl.kernels.chunked_{part}") for part in ("logprob", "divergence"))

    def scores(x: Tensor, weight: Tensor, *outputs: str) -> tuple[Tensor, ...]:
        target = b.target.clamp(min=0).flatten()
        score = logprob.ChunkedLogProbFunction.apply
        return score(x.flatten(0, 1), weight, None, target, 1.0, CLASSES_AT_A_TIME, None, 1.0, outputs)

    def mean_divergence(teacher_x: Tensor) -> Tensor:
        apply = divergence.ChunkedDivergenceFunction.apply
        return apply(
            b.x.flatten(0, 1), b.weight, None, teacher_x.flatten(0, 1), b.other_weight, None, 0.5
        )[0].mean()  # fmt: skip

    def logps(x: Tensor, weight: Tensor) -> Tensor:
        return scores(x, weight)[0].view(b.old.shape)

    def logps_and_entropy() -> tuple[Tensor, ...]:
        return scores(b.x, b.weight, "entropy")[:2]

    return lambda: _of_parts(name, b, logps, logps_and_entropy, mean_divergence)


def _of_parts(
    name: str,
    b: Batch,
    logps: Callable[[Tensor, Tensor], Tensor],
    logps_and_entropy: Callable[[], tuple[Tensor, ...]],
    divergence: Callable[[Tensor], Tensor],
) -> Tensor:
    """The loss by functions that score tokens, and a reference's if it is computed, or compare with a teacher."""
    if name == "distill":
        return divergence(b.other_x)
    if name == "distill_two":
        return divergence(b.other_x) + divergence(b.second_x)
    if name == "logprobs":
        return likelihood_and_entropy(*logps_and_entropy())
    ref_logps = b.ref_logps
    if name.endswith("_computed"):
        with torch.no_grad():
            ref_logps = torch.where(b.counts, logps(b.other_x, b.other_weight), 0.0).sum(-1)
    return loss_of_logps(name, b, logps(b.x, b.weight), ref_logps)


def sft_loss(b: Batch, peer: Installed) -> Loss:
    """A fused linear layer and cross entropy."""
    flat = b.x.flatten(0, 1), b.weight, b.target.flatten()
    function = peer.function("fused_linear_ce", flat, {})
    assert function is not None
    return lambda: function(*flat)


def liger_loss(name: str, b: Batch, liger: Installed) -> Loss | None:
    """None where it has no such loss: a reference is always given by its hidden states, for one."""
    chunked = importlib.import_module("liger_kernel.chunked_loss")
    b = dataclasses.replace(b, target=b.target.clone())  # it marks a size as dynamic, which others specialize
    args = b.weight, b.x, b.target
    ref = {"ref_input": b.other_x, "ref_weight": b.other_weight}

    def policy(level: str) -> Tensor:
        loss = chunked.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, importance_sampling_level=level)
        target, mask = b.target.clamp(min=0), b.counts.int()
        return loss(b.x, b.weight, target, mask, b.advantages, old_per_token_logps=b.old)[0]

    def kto() -> Tensor:
        loss, kl = chunked.LigerFusedLinearKTOLoss(use_ref_model=True), torch.zeros_like(b.advantages[:1])
        return loss(b.x, b.weight, b.target, preference_labels=b.chosen, kl=kl, **ref)[0]

    def divergence(teacher_x: Tensor) -> Tensor:
        loss = chunked.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
        return loss(b.x.flatten(0, 1), b.weight, teacher_x.flatten(0, 1), b.other_weight, b.target.flatten())

    calls: dict[str, Loss] = {
        "dpo_computed": lambda: chunked.LigerFusedLinearDPOLoss()(*args, **ref)[0],
        "grpo": lambda: policy("token"),
        "gspo": lambda: policy("sequence"),
        "kto_computed": kto,
        "orpo": lambda: chunked.LigerFusedLinearORPOLoss()(*args)[0],
        "cpo": lambda: chunked.LigerFusedLinearCPOLoss()(*args)[0],
        "simpo": lambda: chunked.LigerFusedLinearSimPOLoss(beta=2.0, compute_nll_loss=False)(*args)[0],
        "sft": lambda: sft_loss(b, liger)(),
        "distill": lambda: divergence(b.other_x),
        "distill_two": lambda: divergence(b.other_x) + divergence(b.second_x),
    }
    return calls.get(name)


def products(name: str, b: Batch, *, of_all: bool) -> Callable[[], None]:
    """The matrix products alone: three, and one for the logits of a reference or of each teacher."""
    rows = torch.ones_like(b.counts) if of_all else b.counts
    x, other_x, target = b.x[rows], b.other_x[rows], b.target[rows]
    if name.startswith("distill"):
        _, full = PRODUCTS["fused_linear_jsd"](x, b.weight, other_x, b.other_weight)
    else:
        _, full = PRODUCTS["fused_linear_ce"](x, b.weight, target)
    if name != "distill_two" and not name.endswith("_computed"):
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


def ways(
    name: str, b: Batch, peers: dict[str, Installed], compiled: bool
) -> Iterator[tuple[str, Callable[[], Tensor | None]]]:
    all_count = bool(b.counts.all())
    if all_count:
        yield "products alone", products(name, b, of_all=True)
        yield "llmk", training(b, llmk_loss(name, b))
        yield f"llmk, {str(b.x.dtype)[6:]} logits", training(b, llmk_loss(name, b, logits_dtype=b.x.dtype))
    else:
        yield "products of tokens that count", products(name, b, of_all=False)
        yield "products of all", products(name, b, of_all=True)
        yield "llmk", training(b, llmk_loss(name, b))
        yield "llmk, skip_ignored=False", training(b, llmk_loss(name, b, skip_ignored=False))
    if "trl" in peers:
        yield "trl", training(b, trl_loss(name, b))
    if compiled:
        yield "torch compiled", training(b, torch.compile(torch_loss(name, b), dynamic=False))
    liger = liger_loss(name, b, peers["liger-kernel"]) if "liger-kernel" in peers else None
    if liger is not None:
        yield "liger-kernel", training(b, liger)
    for peer in peers if name == "sft" else ():
        if peer not in ("trl", "liger-kernel"):
            yield peer, training(b, sft_loss(b, peers[peer]))


def measure(timer: Timer, calls: dict[str, Callable[[], Tensor | None]], seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds, MiB and the value of each way, or its error."""
    found: dict[str, dict[str, Any]] = {way: {} for way in calls}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for way, call in calls.items():
        with _errors_in(found[way], timer):
            value = call()
            found[way] |= {"mib": timer.peak_mib(call)} | ({} if value is None else {"value": value.item()})
    for _ in range(ROUNDS):
        for way, call in calls.items():
            if "error" not in found[way]:
                with _errors_in(found[way], timer):
                    times[way].append(timer.sustained(call, seconds / ROUNDS))
    return {way: row if "error" in row else {"ms": statistics.mean(times[way]), **row} for way, row in found.items()}


@contextlib.contextmanager
def _errors_in(row: dict[str, Any], timer: Timer) -> Iterator[None]:
    """Make an error the row, and free a way's memory for the next one."""
    try:
        yield
    except Exception as error:  # whatever a way raises belongs in its row
        row.clear()
        row["error"] = first_line(error)
    _release(timer)


def _release(timer: Timer) -> None:
    if timer.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def workloads(
    names: Sequence[str], shapes: Sequence[str] | None, small: bool
) -> Iterator[tuple[str, str, Sequence[int], float]]:
    """Yield a title, the loss, its sizes and the part of the tokens that is ignored."""
    for name, (*sizes, part) in (SMALL_IGNORED if small else IGNORED).items():
        if name in names and (shapes is None or "ignored" in shapes):
            yield f"{name} {_size(sizes)}, {part:.0%} ignored tokens", name, sizes, part
    given = [tuple(map(int, shape.split("x"))) for shape in shapes or () if shape != "ignored"]
    for sizes in given if shapes is not None else SMALL if small else SHAPES:
        for name in names:
            yield f"{name} {_size(sizes)}", name, sizes, 0.0


def _size(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def tables(content: dict[str, Any]) -> str:
    """Markdown of a file: a row for each loss, a table for each shape whose tokens all count."""
    peers = {name: version.removesuffix(".0") for name, version in content["peers"].items()}
    columns = {
        "llmk": "llmk",
        f"llmk, {content['dtype'].removeprefix('torch.')} logits": f"{content['dtype'].removeprefix('torch.')} logits",
        "trl": f"TRL {peers.get('trl', '')}".rstrip(),
        "liger-kernel": f"Liger {peers.get('liger-kernel', '')}".rstrip(),
        "torch compiled": "compiled PyTorch",
    }
    beside_liger = {row["workload"]: row["ways"] for row in content.get("rows_beside_liger", ())}
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        name, shape, *ignored = row["workload"].split(" ", 2)
        if not ignored:
            shapes.setdefault(shape, {})[name] = beside_liger.get(row["workload"], {}) | row["ways"]
    lines: list[str] = []
    for shape, found in shapes.items():
        B, S, H, V = shape.split("x")
        lines += ["", _line(f"{B} x {S} tokens, {H} x {V}", *columns.values()), "|---" * (1 + len(columns)) + "|"]
        for name in (name for name in LABELS if name in found):
            lines.append(_line(LABELS[name], *(_cell(found[name].get(way, {})) for way in columns)))
    return "\n".join(lines[1:])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return row.get("error", "-")
    ms = f"{row['ms']:.1f}" if row["ms"] < 1000 else f"{row['ms']:.0f}"
    return ms if row["mib"] is None else f"{ms} ({row['mib']:.0f})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description="Time losses from hidden states.")
    parser.add_argument("losses", nargs="*", metavar="LOSS", help=f"of {', '.join(LABELS)}; all by default")
    parser.add_argument(
        "--peers",
        metavar="NAME,NAME",
        default="trl,liger-kernel",
        help="or none (default: both); others have sft alone",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled PyTorch")
    parser.add_argument("--shapes", metavar="SHAPE,SHAPE", help="such as 8x512x4096x128256, or ignored")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, workload by workload")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="measure nothing: print the tables of such results")
    options = parser.parse_args(arguments)
    for name in options.losses:
        if name not in LABELS:
            parser.error(f"no loss {name!r}; there are {', '.join(LABELS)}")
    options.losses = options.losses or list(LABELS)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.shapes is not None:
        options.shapes = options.shapes.split(",")
        for shape in options.shapes:
            if shape != "ignored" and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", shape):
                parser.error(f"argument --shapes: expected BxSxHxV or ignored, got {shape!r}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.tables:
        print(tables(json.loads(options.tables.read_text())))
        return 0
    timer = Timer(options.device, repeats=1)
    dtype, seconds = (torch.bfloat16, SECONDS) if timer.on_gpu else (torch.float32, 0.01)
    peers = {peer.name: peer for peer in find_peers(options.peers.split(","))}
    versions = {name: peer.version for name, peer in peers.items()}
    about = header(options.device, dtype, versions, {"rounds": ROUNDS, "seconds": seconds})
    rows: list[dict[str, Any]] = []
    for title, name, sizes, part in workloads(options.losses, options.shapes, not timer.on_gpu):
        torch.manual_seed(0)
        torch.compiler.reset()
        batch = make_batch(sizes, part, options.device, dtype)
        found = measure(timer, dict(ways(name, batch, peers, options.compile)), seconds)
        rows.append({"workload": title, "ways": found})
        del batch
        _release(timer)
        print(title, *(f"  {way:32} {_text(row)}" for way, row in found.items()), sep="\n", flush=True)
        if options.json:
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
