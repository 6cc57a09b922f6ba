"""Targets of llmk's operators on an NVIDIA H200, and whether a row of results reaches them.

A target is the time of forward and backward as a multiple of one of three units:

- `floor`: the larger of (bytes that must move / measured copy bandwidth) and (operations / measured GEMM rate). The
  time is that of the CUDA graph's replay, as called where there is none.
- `products`: the operator's own matrix products alone, done by cuBLAS in the same chunks. Both are timed back to back
  for a second: under sustained matrix work the chip is limited by its power, and no one reaches the floor.
- `ms`: milliseconds of an eager call, the host's time included.

No target is met while another library or plain PyTorch is faster in the same run. What others reached when the targets
were set (bfloat16, torch 2.11, triton 3.6, liger-kernel 0.8.5, quack-kernels 0.6.5) stands beside each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

PRODUCTS = "products alone"  # the way whose sustained time is the unit `products`


@dataclass(frozen=True)
class Target:
    """The limit for one workload of an operator.

    Attributes:
        limit: What forward and backward together may take, in `unit`.
        peer: The fastest other way when the target was set.
        peer_at: What that took: milliseconds where the unit is `ms`, else a multiple of the floor.
        unit: See the module.
        mib: What a call may have allocated at its peak above its inputs.
        forward: What forward alone may take, as a multiple of its floor; `peer_at` is then of forward as well.
    """

    limit: float
    peer: str
    peer_at: float
    unit: Literal["floor", "products", "ms"] = "floor"
    mib: float | None = None
    forward: float | None = None

    def __str__(self) -> str:
        text = {"floor": "{:.2f} x floor", "products": "{:.2f} x products", "ms": "{:.2f} ms"}[self.unit]
        parts = [text.format(self.limit)]
        if self.forward is not None:
            parts.append(f"forward {self.forward:.2f} x floor")
        if self.mib is not None:
            parts.append(f"{self.mib:,.0f} MiB")
        return ", ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """A row beside its target: `reached` and `limit` in the target's unit, and every way in which it misses."""

    reached: float
    limit: float
    misses: tuple[str, ...]

    @property
    def met(self) -> bool:
        return not self.misses

    @property
    def over(self) -> float:
        """Return by how much the time exceeds the limit, as a fraction of it; negative below."""
        return self.reached / self.limit - 1


LIGER, CUTE, QUACK, COMPILE = "liger-kernel", "liger-kernel cute", "quack-kernels", "torch compiled"

TARGETS: dict[tuple[str, str], Target] = {
    ("rms_norm", "32768x4096"): Target(1.10, QUACK, 1.15),
    ("rms_norm", "8192x4096"): Target(1.45, CUTE, 1.62),
    ("rms_norm", "8192x8192"): Target(1.20, CUTE, 1.30),
    ("rms_norm", "4096x16384"): Target(1.25, CUTE, 1.45),
    ("rms_norm", "65536x1024"): Target(1.10, QUACK, 1.16),
    ("rms_norm", "262144x128"): Target(1.40, CUTE, 1.69),
    ("add_rms_norm", "32768x4096"): Target(1.06, QUACK, 1.08),
    ("add_rms_norm", "8192x4096"): Target(1.35, QUACK, 1.44),
    ("add_rms_norm", "65536x1024"): Target(1.12, QUACK, 1.16),
    ("add_rms_norm", "4096x16384"): Target(1.18, QUACK, 1.26),
    ("layer_norm", "32768x4096"): Target(1.15, COMPILE, 1.58),
    ("layer_norm", "8192x4096"): Target(1.50, "torch eager", 2.32),
    ("layer_norm", "65536x1024"): Target(1.20, COMPILE, 1.89),
    ("layer_norm", "4096x16384"): Target(1.30, COMPILE, 1.85),
    ("softmax", "8192x4096"): Target(1.12, QUACK, 1.14),
    ("softmax", "16384x32768"): Target(1.05, QUACK, 1.06),
    ("softmax", "4096x131072"): Target(1.08, QUACK, 1.15),
    ("cross_entropy", "8192x32000"): Target(1.08, QUACK, 1.15),
    ("cross_entropy", "8192x128256"): Target(1.08, QUACK, 1.14),
    ("cross_entropy", "4096x256000"): Target(1.08, QUACK, 1.20),
    ("fused_linear_ce", "8192x4096x128256"): Target(1.04, QUACK, 1.17, "products", mib=2.1 * 1024),
    ("fused_linear_ce", "8192x2304x256000"): Target(1.05, QUACK, 1.26, "products", mib=3.2 * 1024),
    ("fused_linear_ce", "8192x2048x151936"): Target(1.05, QUACK, 1.25, "products", mib=1.8 * 1024),
    ("fused_linear_ce", "32768x4096x128256"): Target(1.04, QUACK, 1.21, "products", mib=3.4 * 1024),
    ("fused_linear_ce", "4096x4096x32000"): Target(1.05, QUACK, 1.20, "products", mib=0.5 * 1024),
    ("fused_linear_ce", "1024x4096x128256"): Target(5.15, COMPILE, 5.03, "ms", mib=1.3 * 1024),
    ("fused_linear_ce", "16384x1152x262144"): Target(50.5, COMPILE, 54.2, "ms"),
    ("linear_logprobs", "8192x2048x151936"): Target(30.8, "trl", 34.5, "ms", mib=1.45 * 1024),
    ("linear_logprobs", "8192x4096x128256"): Target(52.8, "trl", 56.6, "ms", mib=1.75 * 1024),
    ("fused_linear_jsd", "4096x2048x128256, teacher 4096, 0.0"): Target(16.5, COMPILE, 20.3, "ms", mib=1.9 * 1024),
    ("fused_linear_jsd", "4096x2048x128256, teacher 4096, 0.5"): Target(17.5, COMPILE, 20.3, "ms", mib=1.9 * 1024),
    ("jsd", "4096x32000"): Target(1.35, COMPILE, 2.40),
    ("jsd", "4096x128256"): Target(1.15, COMPILE, 1.81),
    ("rope", "B4 S4096 32/8 heads D128"): Target(1.08, QUACK, 1.16),
    # No more memory than the output and the two gradients, which the caller holds.
    ("swiglu", "8192x14336"): Target(1.02, COMPILE, 1.00, mib=3 * 224),
    ("swiglu", "32768x14336"): Target(1.02, COMPILE, 1.00, mib=3 * 896),
    ("geglu", "8192x14336"): Target(1.02, COMPILE, 1.00, mib=3 * 224),
    ("geglu", "32768x14336"): Target(1.02, COMPILE, 1.00, mib=3 * 896),
    ("kl_div", "4096x32000"): Target(1.25, COMPILE, 1.76),
    ("kl_div", "4096x128256"): Target(1.12, COMPILE, 1.30),
    ("linear_act", "8192x4096x14336 relu"): Target(1.17, QUACK, 1.06, forward=1.10),
    ("linear_act", "8192x8192x8192 relu"): Target(1.17, QUACK, 1.15, forward=1.10),
    ("giou_loss", "32x256 boxes"): Target(0.08, COMPILE, 0.154, "ms"),
    ("giou_loss", "64x8192 boxes"): Target(0.09, COMPILE, 0.190, "ms"),
}


def measured_ms(row: dict[str, Any]) -> float:
    """The time of forward and backward to show: sustained where matrix products rule, else replayed, else as called.

    Ways many times slower than others are not sustained.
    """
    if row["bound"] == "matrix" and row.get("full_sustained_ms"):
        return row["full_sustained_ms"]
    return row.get("replayed_ms") or row["full_ms"]


def peers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of other ways than llmk's that computed the workload."""
    return [row for row in rows if not row["way"].startswith("llmk") and row["way"] != PRODUCTS and "error" not in row]


def judge(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Verdict | None:
    """The verdict on a row of llmk; None where there is no target.

    Args:
        row: One of llmk's, as `benchmarks.run` writes it.
        rows: Every row of the same run.

    Raises:
        ValueError: The target is a multiple of the products' time and the run did not time them.
    """
    target = TARGETS.get((row["op"], row["workload"]))
    if target is None:
        return None
    if "error" in row:
        return Verdict(float("inf"), target.limit, (row["error"],))
    same = [other for other in rows if (other["op"], other["workload"]) == (row["op"], row["workload"])]
    unit = _unit_ms(target, row, same)
    reached = _judged_ms(row, target) / unit
    misses = [f"{reached / target.limit - 1:.1%} over"] if reached > target.limit else []
    if target.forward is not None:
        misses += _forward_misses(target.forward, row, same)
    fastest = min(peers(same), key=lambda peer: _judged_ms(peer, target), default=None)
    if fastest is not None and _judged_ms(fastest, target) < _judged_ms(row, target):
        misses.append(f"{fastest['way']} {_judged_ms(fastest, target) / unit:.2f}")
    if target.mib is not None and row["peak_mib"] is not None and row["peak_mib"] > target.mib:
        misses.append(f"{row['peak_mib']:,.0f} MiB")
    return Verdict(reached, target.limit, tuple(misses))


def _forward_misses(limit: float, row: dict[str, Any], same: list[dict[str, Any]]) -> Iterator[str]:
    """Misses of the forward pass alone, which some libraries offer without a backward pass."""
    forward = _forward_ms(row) / row["floor_forward_ms"]
    if forward > limit:
        yield f"forward {forward:.2f}"
    others = [*peers(same), *(other for other in same if other.get("error") == "forward only")]
    fastest = min(others, key=_forward_ms, default=None)
    if fastest is not None and _forward_ms(fastest) < _forward_ms(row):
        yield f"forward of {fastest['way']} {_forward_ms(fastest) / row['floor_forward_ms']:.2f}"


def _forward_ms(row: dict[str, Any]) -> float:
    return row.get("forward_replayed_ms") or row["forward_ms"]


def _judged_ms(row: dict[str, Any], target: Target) -> float:
    if target.unit == "products":
        return measured_ms(row)
    return row["full_ms"] if target.unit == "ms" else row.get("replayed_ms") or row["full_ms"]


def _unit_ms(target: Target, row: dict[str, Any], same: list[dict[str, Any]]) -> float:
    if target.unit == "ms":
        return 1.0
    if target.unit == "floor":
        return row["floor_full_ms"]
    for other in same:
        if other["way"] == PRODUCTS:
            return other["full_sustained_ms"]
    raise ValueError(f"rows: expected one of {PRODUCTS!r} for {row['op']} {row['workload']}, found none")
