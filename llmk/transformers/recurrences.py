"""Linear recurrences over chunks of tokens: functions that compute `gated_delta_rule` or `gated_linear_attention`.

A function is tried with heads of all scales, with and without each of its options. What it gives, outputs, states and
gradients, must be what the operator's reference gives in float64. A function that goes token by token has no chunks and
is none of these: models call it to generate, one token at a time.
"""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.recurrence._call import LARGEST_HEAD
from llmk.ops.recurrence.gated_delta_rule import gated_delta_rule_reference
from llmk.ops.recurrence.gated_linear_attention import gated_linear_attention_reference
from llmk.transformers.calls import Calls, Form, its_own
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_THE_WAY = frozenset({
    "bitwise_not", "bmm", "constant_pad_nd", "copy", "cumsum", "eye", "linalg_solve_triangular", "masked_fill", "new_zeros", "ones",
    "sum", "tril", "triu", "zeros", "zeros_like", "softplus", "clamp",
})  # fmt: skip
"""What is no arithmetic in other trials: products, masks that shapes alone decide, and the limits of a time step."""
OTHER_DTYPES = "gives other dtypes than the operator"


class Recurrence(Calls):
    kind = "recurrence"


# ---- the gated delta rule

DELTA_RULE_OPTIONS = ["chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"]


def _takes_delta_rule(names: list[str]) -> bool:
    return names[3:5] == ["g", "beta"] and set(DELTA_RULE_OPTIONS) <= set(names)


@functools.cache
def _delta_rule_replacement(tried: FunctionType) -> Callable[..., Any]:
    others = its_own(tried, ["q", "k", "v", "query", "key", "value", "g", "beta", *DELTA_RULE_OPTIONS])

    def delta_rule(
        function: Any,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        chunk_size: int | None = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        asks_for_more = any(kwargs.get(name) is not None for name in others)
        if function is not tried or asks_for_more or not _fits(q, k, v, (g, beta), initial_state):
            chunk = {} if chunk_size is None else {"chunk_size": chunk_size}
            return function(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **chunk,
                **kwargs,
            )
        state = None if initial_state is None else initial_state.float()
        out, final = functional.gated_delta_rule(
            q, k, v, g, beta, initial_state=state, l2_norm_qk=use_qk_l2norm_in_kernel
        )
        return out, final if output_final_state else None

    return delta_rule


def _attempt_delta_rule(function: FunctionType) -> None:
    """
    Raises:
        Differs: The function is not the gated delta rule with one decay for each head.
    """
    cases: list[tuple[int, bool, dict[str, Any]]] = [
        (70, False, {}),
        (37, True, {"chunk_size": 16, "output_final_state": True}),
        (37, True, {"chunk_size": 16, "output_final_state": True, "use_qk_l2norm_in_kernel": True}),
        (5, False, {"output_final_state": True, "use_qk_l2norm_in_kernel": True}),
    ]
    for seed, (tokens, with_state, options) in enumerate(cases):
        normalized = options.get("use_qk_l2norm_in_kernel", False)

        def own(q, k, v, g, beta, options=options, **state):
            q, k, v, g, beta = map(_transposed, (q, k, v, g, beta))
            return function(q, k, v, g=g, beta=beta, **state, **options)

        def reference(q, k, v, g, beta, normalized=normalized, **state):
            return gated_delta_rule_reference(*map(_transposed, (q, k, v, g, beta)), l2_norm_qk=normalized, **state)

        inputs = _delta_rule_inputs(tokens, normalized, with_state, randoms(seed))
        _compare(own, reference, inputs, "output_final_state" in options)
        if _dtypes(own, inputs) != [torch.bfloat16, torch.float32][: 1 + ("output_final_state" in options)]:
            raise Differs(OTHER_DTYPES)


def _delta_rule_inputs(
    tokens: int, normalized: bool, with_state: bool, randn: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Two value heads for each key head; keys that are not normalized are short, so that states do not grow."""
    groups = len(SCALES)
    keys = _heads(groups, tokens, 6, randn) if normalized else 0.3 * randn(2, groups, tokens, 6)
    inputs = {
        "q": _heads(groups, tokens, 6, randn),
        "k": keys,
        "v": _heads(2 * groups, tokens, 5, randn),
        "g": -torch.nn.functional.softplus(2 * randn(2, 2 * groups, tokens) - 2),
        "beta": randn(2, 2 * groups, tokens).sigmoid(),
    }
    return inputs | ({"initial_state": _heads(2 * groups, 6, 5, randn)} if with_state else {})


# ---- the scan of Mamba-2

SCAN_OPTIONS = ["chunk_size", "D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states"]
NO_LIMIT = (0.0, float("inf"))


def _takes_scan(names: list[str]) -> bool:
    return names[1:6] == ["dt", "A", "B", "C", "chunk_size"] and set(SCAN_OPTIONS) <= set(names)


def _scan(
    attention: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """The scan by `gated_linear_attention`: output `[B, T, H, P]` and state `[B, H, P, N]`, float32 or more."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    values = (x * dt.unsqueeze(-1)).to(x.dtype)
    state = None if initial_states is None else initial_states.to(wide).transpose(2, 3)
    out, final = attention(C, B, values, dt * A, scale=1.0, initial_state=state)
    out = out.to(wide)
    return out if D is None else out + D.unsqueeze(-1) * x.to(wide), final.transpose(2, 3)


@functools.cache
def _scan_replacement(tried: FunctionType) -> Callable[..., Any]:
    others = its_own(tried, ["x", "hidden_states", "dt", "A", "B", "C", *SCAN_OPTIONS]) | {"z"}

    def scan(
        function: Any,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        chunk_size: int,
        *,
        D: Any = None,
        dt_bias: Any = None,
        initial_states: Any = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = NO_LIMIT,
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        asks_for_more = any(kwargs.get(name) is not None for name in others)
        fits = _fits(C, B, x, (dt,), initial_states) and _one_for_each_head(x, A, D, dt_bias) and dt_limit[0] >= 0
        if function is not tried or asks_for_more or not fits:
            return function(
                x,
                dt,
                A,
                B,
                C,
                chunk_size,
                D=D,
                dt_bias=dt_bias,
                initial_states=initial_states,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                return_final_states=return_final_states,
                **kwargs,
            )
        out, final = _scan(
            functional.gated_linear_attention,
            x,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )
        return (out, final.contiguous()) if return_final_states else out

    return scan


def _one_for_each_head(x: Tensor, *parameters: Any) -> bool:
    return all(p is None or (isinstance(p, Tensor) and p.shape == x.shape[2:3]) for p in parameters)


def _attempt_scan(function: FunctionType) -> None:
    """
    Raises:
        Differs: The function is not the scan of Mamba-2.
    """
    cases: list[tuple[int, int, bool, bool, dict[str, Any]]] = [
        (21, 32, False, False, {}),
        (21, 8, True, True, {"dt_softplus": True, "dt_limit": (0.01, 3.0), "return_final_states": True}),
        (21, 8, True, False, {"dt_softplus": True, "return_final_states": True}),
        (5, 8, False, True, {"dt_softplus": True, "dt_limit": NO_LIMIT}),
    ]
    for seed, (tokens, chunk_size, with_parameters, with_state, options) in enumerate(cases):
        given = {name: value for name, value in options.items() if name != "return_final_states"}

        def own(x, dt, A, B, C, options=options, chunk_size=chunk_size, **more):
            x, dt, B, C = map(_transposed, (x, dt, B, C))
            found = function(x, dt, A, B, C, chunk_size=chunk_size, **more, **options)
            return found if "return_final_states" in options else (found, None)

        def reference(x, dt, A, B, C, given=given, **more):
            x, dt, B, C = map(_transposed, (x, dt, B, C))
            return _scan(gated_linear_attention_reference, x, dt, A, B, C, **more, **given)

        inputs = _scan_inputs(tokens, "dt_softplus" in options, with_parameters, with_state, randoms(seed))
        _compare(own, reference, inputs, "return_final_states" in options)
        if set(_dtypes(own, inputs)) != {torch.float32}:
            raise Differs(OTHER_DTYPES)


def _scan_inputs(
    tokens: int, softplus: bool, with_parameters: bool, with_state: bool, randn: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Two heads for each group; time steps are on both sides of softplus' threshold, and of any limit."""
    groups = len(SCALES)
    spread = 10.0 if softplus else 1.0
    inputs = {
        "x": _heads(2 * groups, tokens, 5, randn),
        "dt": spread * randn(2, 2 * groups, tokens),
        "A": -randn(2 * groups).exp() / spread,
        "B": _heads(groups, tokens, 6, randn),
        "C": _heads(groups, tokens, 6, randn),
    }
    if with_parameters:
        inputs |= {"D": randn(2 * groups), "dt_bias": randn(2 * groups)}
    return inputs | ({"initial_states": _heads(2 * groups, 5, 6, randn)} if with_state else {})


# ---- both


def _fits(q: Any, k: Any, v: Any, for_heads: Sequence[Any], state: Any) -> bool:
    """Return True if these are queries, keys, values, `[B, T, H]` and a state that the operators take."""
    if not all(isinstance(t, Tensor) and t.dtype in DTYPES for t in (q, k, v, *for_heads)):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.dim() == v.dim() == 4 and q.shape == k.shape):
        return False
    if q.shape[:2] != v.shape[:2] or 0 in q.shape[2:] or 0 in v.shape[2:] or v.shape[2] % q.shape[2]:
        return False
    if any(t.shape != v.shape[:3] for t in for_heads) or max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        return False
    return state is None or (isinstance(state, Tensor) and state.dtype in DTYPES and state.dim() == 4)


def _heads(heads: int, tokens: int, width: int, randn: Callable[..., Tensor]) -> Tensor:
    """`[2, heads, tokens, width]`, heads of all scales."""
    scales = torch.tensor(SCALES, dtype=torch.float32, device="cpu").repeat_interleave(heads // len(SCALES))
    return randn(2, heads, tokens, width) * scales[:, None, None]


def _transposed(x: Tensor) -> Tensor:
    """Tokens before heads, or heads before tokens."""
    return x.transpose(1, 2)


def _compare(
    own: Callable[..., tuple[Any, Any]],
    reference: Callable[..., tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    with_state: bool,
) -> None:
    """Compare output, state and gradients, head by head.

    Raises:
        Differs: They are others.
    """
    given = {name: x.requires_grad_() for name, x in inputs.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    out, state = run(lambda: own(**given), also=ON_THE_WAY)
    want = _rows(*reference(**exact))[: 1 + with_state]
    got = _rows(out, state)
    if len(got) != len(want) or not all(x.requires_grad and agree(x, y) for x, y in zip(got, want, strict=True)):
        raise Differs("computes something else")
    slopes = (gradients(torch.cat(rows, -1), [*leaves.values()]) for rows, leaves in ((got, given), (want, exact)))
    for a, b in zip(*slopes, strict=True):
        if a is None or b is None or not agree(_by_head(a), _by_head(b)):
            raise Differs("has other gradients")


def _by_head(x: Tensor) -> Tensor:
    """A row for each head of `[B, H, ...]`; one row of `[H]`, the sums over all tokens, which may cancel."""
    return x.flatten(2) if x.dim() > 2 else x


def _rows(out: Tensor, state: Tensor | None) -> list[Tensor]:
    rows = [_by_head(_transposed(out))]
    return rows if state is None else [*rows, _by_head(state)]


def _dtypes(own: Callable[..., tuple[Any, Any]], inputs: dict[str, Tensor]) -> list[torch.dtype]:
    """The dtypes of output and state for inputs in bfloat16."""
    out, state = run(lambda: own(**{name: x.detach().bfloat16() for name, x in inputs.items()}), also=ON_THE_WAY)
    return [x.dtype for x in (out, state) if x is not None]


DELTA_RULE = Form(
    "gated_delta_rule", range(3, 6), _takes_delta_rule, _attempt_delta_rule, _delta_rule_replacement
)
SCAN = Form("gated_linear_attention", range(5, 7), _takes_scan, _attempt_scan, _scan_replacement)
