"""Memory and time of a training step, estimated for plain PyTorch and for llmk.

The measured times and the bytes counted are in `figures.json`, beside this
file, which `python -m benchmarks.estimate_figures` makes from the results. The
form in the documentation computes the same in JavaScript.

The model is a decoder that trains in bfloat16 with AdamW, whose moments are
bfloat16 too. The letters are:

    T, S      tokens of a step, tokens of a sequence
    L, n      layers, norms of a layer
    H, I      hidden size, intermediate size of the gated unit
    Q, K, D   features of all query heads, of all key heads, of one head
    V         classes of the vocabulary
    E, F, k   experts, their intermediate size, experts of a token
    bytes     bytes saved for an element, counted for each way
    ns        nanoseconds for an element, measured for each way: linear in the
              logarithm of the size between the sizes measured, constant outside
    products, attention, copy   speeds measured on that GPU

Each part has its memory in bytes and its time:

    logits       PyTorch: bytes T V
                 llmk: b V H for the weight's gradient + 2 T H + 2 C V for a
                 chunk of C tokens; b is 2 up to `rounded_chunks` chunks of
                 `figures.json`, else 4
                 time: 6 T H V / products + ns T V
    norms        T (L n + 1) H bytes + 2 T L H that linear layers read
                 + T L (Q + K) of norms of q and k
                 time: L T H (2 ns of a norm with its residual
                       + (n - 2) ns of one alone)
    rotation     2 T L (Q + K)
                 time: T L (Q + K) ns
    gated units  T L I bytes
                 time: T L I ns
    experts      T L k (H bytes + F bytes)
                 time: T L k H F ns, products included
    the rest     6 bytes a parameter + 2 T L (Q + K) of attention
                 time: 6 T L (2 H (Q + K) + 3 H I) / products
                       + 7 T S Q L / attention + 14 bytes a parameter / copy

Without activation checkpointing the layers' memory is that of all L, until the
backward pass. With it, of each layer,

    checkpoints  2 T L H bytes: the inputs of layers
                 time: a third of the layers' other times, as their forward
                 pass is computed again

are kept, and the memory of norms, rotation, gated units, experts and attention
is that of one layer, with L = 1 above.

The peak is the largest of three sums: at the loss, what is kept and the logits;
in the backward pass of the last layer, what is kept, 2 V H of the projection's
gradient and what was computed again; in that of the first, 8 bytes a parameter
and what was computed again.
"""

import itertools
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FIGURES: dict[str, Any] = json.loads((Path(__file__).parent / "figures.json").read_text())
WAYS: list[str] = FIGURES["ways"]
PARTS = ("logits", "norms", "rotation", "gated units", "experts", "checkpoints")

KINDS: dict[str, Any] = FIGURES["model_types"]
"""The kinds of models that are not as Llama, by `model_type`: the norms of a layer, norms of queries and keys, norms
that multiply by 1 + weight in float32; and keys of a configuration whose layers are not in the formula."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, as in its `config.json`.

    Attributes:
        norms: RMSNorms of a layer over the hidden size.
        qk_norm: Whether queries and keys are normalized, too.
        offset_norms: Whether a norm multiplies by 1 + weight, in float32, as Gemma's.
        softcap: Whether the logits have a softcap.
        gelu: Whether the gated unit has a GELU in place of SiLU.
        tied: Whether embedding and projection share a weight.
        expert_intermediate: The width of one expert, 0 without experts.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int = 0
    norms: int = 2
    qk_norm: bool = False
    offset_norms: bool = False
    softcap: bool = False
    gelu: bool = False
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "norms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.intermediate and not self.experts:
            raise ValueError("intermediate: expected at least 1 in a model without experts, got 0")
        if self.experts and not (self.experts_per_token and self.expert_intermediate):
            raise ValueError("experts: expected experts_per_token and expert_intermediate beside it")


def sizes_of(config: Any) -> Sizes:
    """Return the sizes in a `config.json` of transformers.

    Raises:
        ValueError: It is no object, a key is missing or no number, or the formula does not know the model's layers.
    """
    if not isinstance(config, dict):
        raise ValueError(f"expected a configuration, a JSON object, got a {type(config).__name__}")
    tied = config.get("tie_word_embeddings")  # of a nested one the outer, which holds the projection
    config = {**config, **(config.get("text_config") or {})}
    kind = config.get("model_type", "")
    for name in KINDS["unknown_keys"]:
        if config.get(name):
            raise ValueError(f"{name}: the estimate does not know the layers of such a model, {kind or 'of no type'}")
    if any("attention" not in str(layer) or "linear" in str(layer) for layer in config.get("layer_types") or ()):
        raise ValueError(f"layer_types: expected attention alone, got {sorted(set(config['layer_types']))}")
    experts = _count(config, "num_experts", "num_local_experts", default=0)
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    width = _count(config, "moe_intermediate_size", "intermediate_size") if experts else 0
    return Sizes(
        hidden=hidden,
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", default=heads),
        head_dim=_count(config, "head_dim", default=hidden // max(1, heads)),
        vocabulary=_count(config, "vocab_size"),
        intermediate=0 if experts else _count(config, "intermediate_size"),
        norms=KINDS["norms"].get(kind, 2),
        qk_norm=kind in KINDS["qk_norm"],
        offset_norms=kind in KINDS["offset_norms"],
        softcap=bool(config.get("final_logit_softcapping")),
        gelu="gelu" in _first(config, "hidden_activation", "hidden_act", default="silu"),
        tied=bool(config.get("tie_word_embeddings", True) if tied is None else tied),
        experts=experts,
        experts_per_token=_count(config, "num_experts_per_tok") if experts else 0,
        expert_intermediate=width,
    )


def _count(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    found = _first(config, *names, default=default)
    if type(found) is not int:
        raise ValueError(f"{' or '.join(names)}: expected a whole number, got {found!r}")
    return found


def _first(config: dict[str, Any], *names: str, default: Any = None) -> Any:
    found = next((config[name] for name in names if config.get(name) is not None), default)
    if found is None:
        raise ValueError(f"{' or '.join(names)}: the configuration has none")
    return found


def sizes_from(text: str) -> Sizes:
    """Return the sizes in `hidden=2048,layers=16,...`, by the names of `Sizes`; switches are 0 or 1.

    Raises:
        ValueError: A name is unknown or missing, or a value is no whole number.
    """
    known = {field.name: field.type for field in fields(Sizes)}
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}")
        if not value.isdecimal():
            raise ValueError(f"{name}: expected a whole number, got {value!r}")
        given[name] = bool(int(value)) if known[name] is bool else int(value)
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
        given.setdefault("head_dim", given.get("hidden", 0) // max(1, given["heads"]))
    missing = [name for name in ("hidden", "layers", "heads", "vocabulary") if name not in given]
    if missing:
        raise ValueError(f"{missing[0]}: expected a size, got none")
    return Sizes(**given)


def parameters(sizes: Sizes) -> int:
    """Return how many numbers the weights of a model have, all but the norms' counted."""
    s, heads = sizes, 2 * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    layer = s.hidden * (heads + 3 * s.intermediate + 3 * s.experts * s.expert_intermediate)
    return (1 if s.tied else 2) * s.vocabulary * s.hidden + s.layers * layer


def at(points: list[list[float]] | None, size: float) -> float | None:
    """Return the value at a size of measured points in ascending order; None where nothing was measured."""
    if not points:
        return None
    for (low, before), (high, after) in itertools.pairwise(points):
        if low <= size <= high:
            return before + (after - before) * math.log(size / low) / math.log(high / low)
    return points[0][1] if size < points[0][0] else points[-1][1]


def _ms(count: float, ns: float | None) -> float | None:
    return None if ns is None else count * ns * 1e-6


def _rate_ms(count: float, per_second: float | None) -> float | None:
    return None if per_second is None else 1e3 * count / per_second


def _sum(terms: list[float | None]) -> float | None:
    """Return the sum; None where a term is not known."""
    known = [term for term in terms if term is not None]
    return sum(known) if len(known) == len(terms) else None


def estimate(
    sizes: Sizes, tokens: int, sequence: int, gpu: str = "h200", checkpointing: bool = False
) -> dict[str, dict[str, Any]]:
    """Return GiB and milliseconds of each part of a training step, for each of `WAYS`.

    Args:
        sizes: Those of the model.
        tokens: T, of a step.
        sequence: S, the tokens that attend to one another.
        gpu: One of `figures.json`.
        checkpointing: Whether each layer is computed again in the backward pass.

    Returns:
        By way, by part, `{"gib": ..., "ms": ...}`: the six parts, "rest" and "step", which is the peak and the sum.
        Milliseconds are None where that GPU's results have none.
    """
    return {way: _way(sizes, tokens, sequence, way, FIGURES["gpus"][gpu], checkpointing) for way in WAYS}


def _way(
    s: Sizes, T: int, S: int, way: str, measured: dict[str, Any], checkpointing: bool
) -> dict[str, dict[str, Any]]:
    size, time = _sizes(s, T, way, checkpointing), _times(s, T, S, way, measured)
    time["checkpoints"] = _again_ms(time) if checkpointing else 0.0
    found = {part: {"gib": size[part] / 2**30, "ms": time[part]} for part in (*PARTS, "rest")}
    peak = _peak(s, size, checkpointing) / 2**30
    return found | {"step": {"gib": peak, "ms": _sum([part["ms"] for part in found.values()])}}


def _sizes(s: Sizes, T: int, way: str, checkpointing: bool) -> dict[str, float]:
    """Return the bytes of each part: of the layers that are in memory at a time."""
    count = {name: columns[WAYS.index(way)] for name, columns in FIGURES["bytes"].items()}
    layers = 1 if checkpointing else s.layers
    H, TL, qk = s.hidden, T * layers, (s.heads + s.kv_heads) * s.head_dim
    norm = count["offset norm" if s.offset_norms else "norm"]
    norms = T * (layers * s.norms + 1) * H * norm + TL * H * 2 * count["norm's output"]
    of_expert = H * count["expert's hidden"] + s.expert_intermediate * count["expert's width"]
    return {
        "logits": _logits(s, T, way, count),
        "norms": norms + (TL * qk * count["norm of q and k"] if s.qk_norm else 0),
        "rotation": 2 * TL * qk,
        "gated units": TL * s.intermediate * count["gated unit"],
        "experts": TL * s.experts_per_token * of_expert,
        "checkpoints": 2 * T * s.layers * H if checkpointing else 0,
        "rest": 6 * parameters(s) + 2 * TL * qk,
    }


def _peak(s: Sizes, size: dict[str, float], checkpointing: bool) -> float:
    weights = 6 * parameters(s)
    layers = sum(size.values()) - size["logits"] - size["checkpoints"] - weights
    kept, again = (size["checkpoints"], layers) if checkpointing else (layers, 0)
    projection = 2 * s.vocabulary * s.hidden
    return max(weights + kept + size["logits"], weights + kept + projection + again, 8 * parameters(s) + again)


def _again_ms(time: dict[str, float | None]) -> float | None:
    """Return the time of the layers' forward pass: 2 of 6 products, 2 of 7 of attention, 2 or 3 of 6 to 8 accesses."""
    layers = _sum([time[part] for part in ("norms", "rotation", "gated units", "experts", "layers' products")])
    return None if layers is None else layers / 3


def _times(s: Sizes, T: int, S: int, way: str, measured: dict[str, Any]) -> dict[str, float | None]:
    """Return the milliseconds of each part, and of what the rest has of the layers."""
    ns = {name: points[WAYS.index(way)] for name, points in measured["ns"].items()}
    products = measured["products"]
    H, V, Q = s.hidden, s.vocabulary, s.heads * s.head_dim
    TL, qk = T * s.layers, Q + s.kv_heads * s.head_dim
    rotated = "rotation with norms" if s.qk_norm else "rotation"
    gated = "geglu" if s.gelu else "swiglu"
    layers = _sum(
        [
            _rate_ms(6 * TL * (2 * H * qk + 3 * H * s.intermediate), products),
            _rate_ms(7 * TL * S * Q, at(measured["attention"], s.head_dim)),
        ]
    )
    return {
        "logits": _sum([_rate_ms(6 * T * H * V, products), _ms(T * V, at(ns["logits"], V))]),
        "norms": _sum(
            [_ms(2 * TL * H, at(ns["norm with residual"], H)), _ms((s.norms - 2) * TL * H, at(ns["norm"], H))]
        ),
        "rotation": _ms(TL * qk, at(ns[rotated], s.head_dim)),
        "gated units": _ms(TL * s.intermediate, at(ns[gated], s.intermediate)),
        "experts": _experts_ms(s, TL * s.experts_per_token, T, ns),
        "layers' products": layers,
        "rest": _sum([layers, _rate_ms(14 * parameters(s), measured["copy"])]),
    }


def _logits(s: Sizes, T: int, way: str, count: dict[str, float]) -> float:
    H, V = s.hidden, s.vocabulary
    if not way.startswith("llmk"):
        return T * V * (count["logit"] + (count["softcap"] if s.softcap else 0))
    rows = min(T, at(FIGURES["chunk_rows"], V) or T)
    sums = 4 if FIGURES["rounded_chunks"] * rows < T else 2
    return sums * V * H + 2 * T * H + 2 * rows * V


def _experts_ms(s: Sizes, picks: int, T: int, ns: dict[str, Any]) -> float | None:
    if not s.experts:
        return 0.0
    of_each = at(ns["experts"], T * s.experts_per_token / s.experts)
    return _ms(picks * s.hidden * s.expert_intermediate, of_each)
