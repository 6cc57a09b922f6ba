"""Programs of the fuzzer that are traced from Python: experts, whose patterns hang together by more than structure, and
attention whose mask is made in other ways than its rule has."""

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  its grouped product takes every dtype
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from compile_tests.helpers.fuzz_program import Input, Line, Program, Ref

TOKENS, EXPERTS, CHOSEN, H, WIDTH, S = 5, 3, 2, 8, 8, 6


def as_program(fn: Callable[..., Tensor], inputs: list[Input]) -> Program:
    """The calls of ATen's operators that a function makes."""
    args = Program(tuple(inputs), (), ()).args()
    gm = make_fx(fn, pre_dispatch=True)(*(x.detach() for x in args))
    names = {node: x.name for node, x in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)}
    lines: list[Line] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            names[node] = f"v{len(lines)}"
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: Ref(names[n]))  # type: ignore[misc]
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "pin_memory")}
            lines.append(Line(names[node], node.target, tuple(args), kwargs))
    returned = gm.graph.output_node().args[0]
    outputs = tuple(names[x] for x in (returned if isinstance(returned, tuple | list) else [returned]))
    return Program(tuple(inputs), tuple(lines), outputs)


def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight.transpose(-2, -1), ends)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Sorted, as transformers has them."""
    ids, perm = torch.sort(chosen.reshape(-1))
    ends = torch.cumsum(torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1), 0, dtype=torch.int32)
    gate, up = product(x[perm // CHOSEN], gate_up, ends).chunk(2, dim=-1)
    rows = product(F.silu(gate) * up, down, ends) * weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return rows[inverse].view(TOKENS, CHOSEN, H).sum(dim=1)


def experts_program(random: Random) -> Program:
    dtype = random.choice((torch.float32, torch.bfloat16))
    shapes = {"x0": (TOKENS, H), "x1": (EXPERTS, 2 * WIDTH, H), "x2": (EXPERTS, H, WIDTH), "x3": (TOKENS, CHOSEN)}
    inputs = [Input(name, shape, dtype, scale=0.5, grad=random.random() < 0.8) for name, shape in shapes.items()]
    return as_program(experts, [*inputs, Input("x4", (TOKENS, CHOSEN), torch.int64, "classes", high=EXPERTS)])


def _positions() -> tuple[Tensor, Tensor]:
    places = torch.arange(S)
    return places.view(S, 1), places[None, :]


def _packed() -> Tensor:
    places = torch.arange(S).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    q, k = _positions()
    return ((sequence[:, :, None] == sequence[:, None, :]) & (k <= q)).unsqueeze(1)


MASKS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.tril(torch.ones(S, S)).bool().view(1, 1, S, S),
    lambda: _positions()[0] - _positions()[1] > -1,
    lambda: (_positions()[0] <= _positions()[1]).transpose(-1, -2),
    lambda: torch.ones(S).bool().cumsum(0)[:, None] >= torch.ones(S).bool().cumsum(0),
    lambda: ~((_positions()[1] > _positions()[0]) | (_positions()[1] >= S)),
    lambda: (_positions()[1] > _positions()[0] - 8) & (_positions()[1] <= _positions()[0]),
    lambda: torch.zeros(S, S).masked_fill(torch.ones(S, S).tril() == 0, -torch.inf),
    lambda: torch.triu(torch.full((2 * S, 2 * S), -torch.inf), 1)[:S, :S],
    lambda: torch.where(_positions()[1] <= _positions()[0], 0.0, torch.finfo(torch.float32).min),
    lambda: (1.0 - torch.ones(S, S).tril()) * torch.finfo(torch.float32).min,
    lambda: torch.arange(3, S + 3)[:, None] >= torch.arange(S + 6)[3:-3],
    lambda: torch.arange(S).flip(0)[:, None] <= torch.arange(S).flip(0)[None],
    lambda: torch.ones(S, S, dtype=torch.bool).tril()[None, None].expand(2, 1, S, S),
    _packed,
)


def attention_program(random: Random) -> Program:
    mask, dtype = random.choice(MASKS), random.choice((torch.float32, torch.float32, torch.bfloat16))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = mask()
        return F.scaled_dot_product_attention(q, k, v, seen if seen.dtype == torch.bool else seen.to(q.dtype))

    return as_program(attention, [Input(f"x{i}", (2, 2, S, 4), dtype, grad=random.random() < 0.8) for i in range(3)])


def traced_program(random: Random) -> Program:
    return random.choice((experts_program, attention_program, attention_program))(random)
