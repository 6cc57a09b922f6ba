"""Linear recurrences over chunks of tokens: functions that compute `gated_delta_rule` or `gated_linear_attention`.

A function is tried with heads of all scales, with and without each of its options. What it gives, outputs, states and
gradients, must be what the operator's reference gives in float64.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.recurrence import LARGEST_KEY, LARGEST_VALUE
from llmk.ops.recurrence.gated_delta_rule import recurrence_reference
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import Function, FunctionForm, parameters
from llmk.transformers.packing import packing_of, sequence_ids
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, run

ON_THE_WAY = frozenset({
    "bitwise_not", "bmm", "constant_pad_nd", "copy", "cumsum", "eye", "linalg_solve_triangular", "masked_fill",
    "new_zeros", "ones", "tril", "triu", "zeros", "zeros_like",
})  # fmt: skip
"""Operations that these trials pass over and others do not: products, and masks that shapes alone decide."""
LIMITS = frozenset({"clamp", "softplus"})
"""The limits of Mamba-2's time steps: the trial has values on both sides."""


# ---- the gated delta rule


@dataclass(frozen=True)
class DeltaRule(FunctionForm):
    """Functions of queries and keys `[B, T, HK, K]`, values `[B, T, H, V]`, log decays and beta `[B, T, H]`.

    Attributes:
        grouped: They take fewer heads of queries and keys than of values.
        channels: They have a decay for each channel of a head, `[B, T, H, K]`, as Kimi Linear's, and not one for the
            head.
    """

    grouped: bool = True
    channels: bool = False

    operator = "gated_delta_rule"
    positional = range(3, 6)

    def takes(self, names: list[str]) -> bool:
        return names[3:5] == ["g", "beta"] and set(parameters(self.call)[5:]) <= set(names)

    @property
    def cases(self) -> list[tuple[int, bool, dict[str, Any]]]:
        """The tokens, whether there is an initial state, and the options of each trial."""
        return [
            (70, False, {}),
            (37, True, {"chunk_size": 16, "output_final_state": True}),
            (37, True, {"chunk_size": 16, "output_final_state": True, "use_qk_l2norm_in_kernel": True}),
            (5, False, {"output_final_state": True, "use_qk_l2norm_in_kernel": True}),
        ]

    def attempt(self, function: Function) -> FunctionForm:
        for seed, (tokens, with_state, options) in enumerate(self.cases):
            normalized = options.get("use_qk_l2norm_in_kernel", False)

            def own(q, k, v, g, beta, options=options, **state):
                q, k, v, g, beta = map(_transposed, (q, k, v, g, beta))
                out, state = function(q, k, v, g=g, beta=beta, **state, **options)
                return out, state

            def reference(q, k, v, g, beta, normalized=normalized, **state):
                by_token = map(_transposed, (q, k, v, g, beta))
                return recurrence_reference(*by_token, l2_norm_qk=normalized, **state)

            inputs = self._inputs(tokens, normalized, with_state, randoms(seed))
            _compare(own, reference, inputs, "output_final_state" in options, torch.bfloat16)
        return self

    def _inputs(
        self, tokens: int, normalized: bool, with_state: bool, randn: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Keys that are not normalized are short, so that states do not grow."""
        heads = 2 * len(SCALES)
        groups = len(SCALES) if self.grouped else heads
        inputs = {
            "q": _heads(groups, tokens, 6, randn),
            "k": _heads(groups, tokens, 6, randn) if normalized else 0.3 * randn(2, groups, tokens, 6),
            "v": _heads(heads, tokens, 5, randn),
            "g": -torch.nn.functional.softplus(2 * randn(2, heads, tokens, *[6] * self.channels) - 2),
            "beta": randn(2, heads, tokens).sigmoid(),
        }
        return inputs | ({"initial_state": _heads(heads, 6, 5, randn)} if with_state else {})

    def call(
        self,
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        chunk_size: int = 64,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not self.fits(query, key, value, g, beta, initial_state):
            return NotImplemented
        state = None if initial_state is None else initial_state.float()
        ids = _ids_from(kwargs, state, query)
        out, final = functional.gated_delta_rule(
            query, key, value, g, beta, initial_state=state, l2_norm_qk=use_qk_l2norm_in_kernel, sequence_ids=ids
        )
        return out, final if output_final_state else None

    def fits(self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> bool:
        """Return True if the operators take the arguments, with as many heads as the function takes."""
        if not _fits(q, k, v, (beta,) if self.channels else (g, beta), state):
            return False
        if not self.grouped and q.shape[2] != v.shape[2]:
            return False
        of_channels = (*v.shape[:3], q.shape[3])
        return not self.channels or (isinstance(g, Tensor) and g.dtype in FLOAT_DTYPES and g.shape == of_channels)


@dataclass(frozen=True)
class DeltaRuleStep(DeltaRule):
    """Functions of queries, keys, values, log decays and beta that go token by token: no size of chunks.

    A model generates by them. They are replaced where they are called with one token after a state.
    """

    operator = "gated_delta_rule_step"

    def takes(self, names: list[str]) -> bool:
        return super().takes(names) and "chunk_size" not in names

    @property
    def cases(self) -> list[tuple[int, bool, dict[str, Any]]]:
        """Compare several tokens: what one alone gives is a row of one number, which may cancel."""
        final = {"output_final_state": True}
        return [(9, True, final), (9, True, final | {"use_qk_l2norm_in_kernel": True})]

    def call(  # type: ignore[override]
        self,
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if initial_state is None or not self.fits(query, key, value, g, beta, initial_state) or query.shape[1] != 1:
            return NotImplemented
        q, k, v, g, beta = (x.squeeze(1) for x in (query, key, value, g, beta))
        out, final = functional.gated_delta_rule_step(
            q, k, v, g, beta, initial_state.float(), l2_norm_qk=use_qk_l2norm_in_kernel
        )
        return out.unsqueeze(1), final if output_final_state else None


# ---- the scan of Mamba-2

NO_LIMIT = (0.0, float("inf"))
GATE = "z"
"""The argument that mamba_ssm's function multiplies by, and the models do not."""


@dataclass(frozen=True)
class Scan(FunctionForm):
    """Functions of an input `[B, T, H, P]`, time steps `[B, T, H]`, A `[H]`, B, C `[B, T, G, N]` and a chunk size."""

    operator = "gated_linear_attention"
    positional = range(5, 7)

    def takes(self, names: list[str]) -> bool:
        return names[1:6] == ["dt", "A", "B", "C", "chunk_size"] and set(parameters(self.call)[6:]) <= set(names)

    def attempt(self, function: Function) -> FunctionForm:
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
                out, state = found if "return_final_states" in options else (found, None)
                return out, state

            def reference(x, dt, A, B, C, given=given, **more):
                x, dt, B, C = map(_transposed, (x, dt, B, C))
                return _by_attention(recurrence_reference, x, dt, A, B, C, **more, **given)

            inputs = _scan_inputs(tokens, "dt_softplus" in options, with_parameters, with_state, randoms(seed))
            _compare(own, reference, inputs, "return_final_states" in options, torch.float32, ON_THE_WAY | LIMITS)
        return self

    def call(
        self,
        hidden_states: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        chunk_size: int,
        D: Any = None,
        dt_bias: Any = None,
        initial_states: Any = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = NO_LIMIT,
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        for_heads = (p for p in (A, D, dt_bias) if p is not None)
        fits = kwargs.get(GATE) is None and _fits(C, B, hidden_states, (dt,), initial_states) and dt_limit[0] >= 0
        if not fits or any(p.shape != hidden_states.shape[2:3] for p in for_heads):
            return NotImplemented
        ids = _ids_from(kwargs, initial_states, hidden_states)
        attention = functools.partial(functional.gated_linear_attention, sequence_ids=ids)
        given = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states}
        out, final = _by_attention(
            attention, hidden_states, dt, A, B, C, **given, dt_softplus=dt_softplus, dt_limit=dt_limit
        )
        return (out, final.contiguous()) if return_final_states else out


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


def _by_attention(
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
    # A copy: the operator keeps it for the backward pass, and a cache is overwritten by the state that comes out.
    state = None if initial_states is None else initial_states.to(wide, copy=True).transpose(2, 3)
    out, final = attention(C, B, values, dt * A, scale=1.0, initial_state=state)
    out = out.to(wide)
    return out if D is None else out + D.unsqueeze(-1) * x.to(wide), final.transpose(2, 3)


# ---- Mamba-2's layer in training


@dataclass(frozen=True)
class WholeLayer(FunctionForm):
    """Functions of convolution, scan, gated norm and output projection that compute nothing: they return None.

    transformers has one for mamba_ssm to take the place of, and goes on to the functions above where it returns None.
    It refuses packed rows, which these functions can take.
    """

    operator = "gated_linear_attention"
    positional = range(5, 8)

    def takes(self, names: list[str]) -> bool:
        return names[:5] == ["zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A"] and "outproj_weight" in names

    def attempt(self, function: Function) -> FunctionForm:
        randn = randoms()
        x, weight, bias, per_head = randn(2, 5, 30), randn(20, 4), randn(20), randn(2)
        options = {"D": per_head, "chunk_size": 8, "headdim": 4, "ngroups": 1}
        if run(functools.partial(function, **options), x, weight, bias, per_head, -per_head.exp()) is not None:
            raise Differs("computes a whole layer")
        return self

    def call(
        self,
        zxbcdt: Any,
        conv1d_weight: Any,
        conv1d_bias: Any,
        dt_bias: Any,
        A: Any,
        D: Any,
        chunk_size: int,
        initial_states: Any = None,
        dt_limit: tuple[float, float] = NO_LIMIT,
        return_final_states: bool = False,
        activation: str = "silu",
        rmsnorm_weight: Any = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Any = None,
        outproj_bias: Any = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
        **kwargs: Any,
    ) -> None:
        return None


# ---- both


def _fits(q: Any, k: Any, v: Any, for_heads: Sequence[Any], state: Any) -> bool:
    """Return True if these are queries, keys, values, `[B, T, H]` and a state that the operators take."""
    if not all(isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES for t in (q, k, v, *for_heads)):
        return False
    if not (q.dtype == k.dtype == v.dtype and q.dim() == v.dim() == 4 and q.shape == k.shape):
        return False
    if q.shape[:2] != v.shape[:2] or 0 in q.shape[2:] or 0 in v.shape[2:] or v.shape[2] % q.shape[2]:
        return False
    if any(t.shape != v.shape[:3] for t in for_heads) or q.shape[3] > LARGEST_KEY or v.shape[3] > LARGEST_VALUE:
        return False
    return state is None or (isinstance(state, Tensor) and state.dtype in FLOAT_DTYPES and state.dim() == 4)


def _ids_from(options: Mapping[str, Any], state: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The sequence of each token `[B, T, ...]`.

    Raises:
        ValueError: Boundaries count from the first token of a packed row, and there is a state of tokens before it.
    """
    packing = packing_of(options)
    if state is not None and packing and "seq_idx" not in packing:
        names = " and ".join(sorted(packing))
        raise ValueError(f"{names}: expected no cache of tokens before the packed row; give seq_idx to go on from one")
    return sequence_ids(packing, *tokens.shape[:2])


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
    dtype: torch.dtype,
    also: frozenset[str] = ON_THE_WAY,
) -> None:
    """Compare output, state and gradients, head by head.

    Raises:
        Differs: They are others, or for inputs in bfloat16 the output has not this dtype, or the state not float32.
    """
    given = {name: x.requires_grad_() for name, x in inputs.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    got = run(lambda: _rows(*own(**given)), also=also)
    want = _rows(*reference(**exact))[: 1 + with_state]
    if len(got) != len(want) or not all(x.requires_grad and agree(x, y) for x, y in zip(got, want, strict=True)):
        raise Differs("computes something else")
    slopes = (gradients(torch.cat(rows, -1), [*leaves.values()]) for rows, leaves in ((got, given), (want, exact)))
    for a, b in zip(*slopes, strict=True):
        if a is None or b is None or not agree(_by_head(a), _by_head(b)):
            raise Differs("has other gradients")
    out, state = run(lambda: own(**{name: x.detach().bfloat16() for name, x in inputs.items()}), also=also)
    if out.dtype != dtype or (state is not None and state.dtype != torch.float32):
        raise Differs("gives other dtypes")


def _by_head(x: Tensor) -> Tensor:
    """A row for each head of `[B, H, ...]`; one row of `[H]`, the sums over all tokens, which may cancel."""
    return x.flatten(2) if x.dim() > 2 else x


def _rows(out: Tensor, state: Tensor | None) -> list[Tensor]:
    rows = [_by_head(_transposed(out))]
    return rows if state is None else [*rows, _by_head(state)]
