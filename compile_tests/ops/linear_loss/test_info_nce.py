"""The contrastive loss: what the samples of `info_nce` do not reach, and two ranks beside one process that has all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_same
from compile_tests.helpers.observers import LargestTensor
from compile_tests.helpers.rank_processes import errors_of_ranks
from compile_tests.helpers.rank_slices import OwnRows, require_same_on_ranks
from compile_tests.helpers.right_calls import require_call
from llmk import losses
from llmk.functional import info_nce
from llmk.nn import InfoNCELoss
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.drivers import contrastive
from llmk.ops.linear_loss.kernels import KERNELS, PYTORCH
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

OP = OPS["info_nce"]
RANDOM = torch.Generator().manual_seed(0)
Q, K, EXTRA = (torch.randn(n, 8, generator=RANDOM) for n in (6, 6, 4))
IDS, EXTRA_IDS = torch.tensor([3, 1, 3, 2, 1, 5]), torch.tensor([7, 2, 8, 1])
MASKED: dict[str, Any] = {"query_ids": IDS, "key_ids": IDS, "negative_ids": EXTRA_IDS}


def of_pairs(query: Tensor, key: Tensor, kept: Tensor) -> Tensor:
    """The loss of each query over a list of the keys that are kept for it, its own first, one after the other."""
    found = []
    for i, q in enumerate(query):
        others = kept[i] & (torch.arange(len(key), device=key.device) != i)
        keys = torch.cat((key[i : i + 1], key[others]))
        found.append((keys @ q).logsumexp(0) - keys[0] @ q)
    return torch.stack(found)


def test_clip_is_two_cross_entropies(device: torch.device) -> None:
    """The formula that users have, as the record's reference might share a fault with the operator."""

    def clip(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
        logits, own = scale * query @ key.t(), torch.arange(6, device=device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2

    def ours(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
        return info_nce(query, key, scale=scale, symmetric=True, chunk_size=4)

    require_same(ours, clip, [x.to(device).requires_grad_() for x in (Q.clone(), K.clone(), torch.tensor(3.0))])


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [0.0, 2.0**-90, 2.0**-40])
def test_a_small_scale_has_a_finite_gradient(scale: float, device: torch.device) -> None:
    """Float16's gradients of products are scaled as the factor leaves room for; the scale's own gradient is large."""

    def large(outputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full_like(output, 1e6) for output in outputs]

    embeddings = [(3000 * x).to(device, torch.float16) for x in (Q, K)]
    options = {"scale": torch.tensor(scale, device=device), "reduction": "sum", "symmetric": True}
    sample = Sample(tuple(embeddings), options, why="a small scale")
    outcome = call(OP, sample, grads=large)
    assert torch.as_tensor(outcome.gradients["scale"]).isfinite()
    require_accurate(OP, sample, outcome, grads=large)


@pytest.mark.parametrize("symmetric", [False, True])
def test_equal_ids_are_no_negatives(symmetric: bool, device: torch.device) -> None:
    ids, extra_ids = IDS.to(device), EXTRA_IDS.to(device)
    masked = {name: value.to(device) for name, value in MASKED.items()}

    def pairs(query: Tensor, key: Tensor, extra: Tensor) -> Tensor:
        loss = of_pairs(query, torch.cat((key, extra)), ids.unsqueeze(1) != torch.cat((ids, extra_ids)))
        return (loss + of_pairs(key, query, ids.unsqueeze(1) != ids)) / 2 if symmetric else loss

    def ours(query: Tensor, key: Tensor, extra: Tensor) -> Tensor:
        return info_nce(query, key, extra, symmetric=symmetric, reduction="none", chunk_size=4, **masked)

    require_same(ours, pairs, [x.to(device).requires_grad_() for x in (Q.clone(), K.clone(), EXTRA.clone())])


def test_without_negatives(device: torch.device) -> None:
    """The loss and its gradients are exactly 0: of one query, and where all other keys are masked."""
    ids = torch.zeros(6, dtype=torch.int64, device=device)
    for N in (1, 6):
        query, key = (x[:N].to(device).clone().requires_grad_() for x in (Q, K))
        loss = info_nce(query, key, query_ids=ids[:N], key_ids=ids[:N], symmetric=True)
        gradients = torch.autograd.grad(loss, (query, key))
        assert loss == 0
        assert all(not gradient.any() for gradient in gradients)


def test_far_logits(device: torch.device) -> None:
    """Rows and columns whose largest logits lie thousands apart, where a maximum of a whole tile would lose rows."""
    query = Q.to(device) * torch.tensor([1e-3, 1.0, 1e3, 1e-3, 1.0, 1e3], device=device).unsqueeze(1)
    sample = Sample((query, K.to(device)), {"symmetric": True, "reduction": "none"}, "far")
    require_call(OP, sample)


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [20.0, 400.0, -400.0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_tiles_without_pairs(scale: float, symmetric: bool, device: torch.device) -> None:
    """Whole tiles that hold negatives alone; at the larger scales softmaxes lie too far apart for one exponential."""
    sides = torch.randn(3, 290, 16, generator=RANDOM)
    sides = F.normalize(sides, dim=-1).to(device, torch.bfloat16)
    factor = torch.tensor(scale, device=device)
    options = {"negatives": sides[2, :100], "scale": factor, "symmetric": symmetric, "reduction": "none"}
    sample = Sample((sides[0], sides[1]), options, why="several tiles")
    require_call(OP, sample)


@pytest.mark.kernels
def test_merging(device: torch.device) -> None:
    """More parts than a block of them, some of them empty, after others."""
    impl = (KERNELS if device.type == "cuda" or INTERPRET else PYTORCH).contrastive
    logits = (20 * torch.randn(41, 3, 37, generator=RANDOM)).to(device)
    logits[5:9] = float("-inf")
    logits[:, :, 4] = float("-inf")
    m = logits.amax(1)
    parts = torch.stack((m, (logits - m.nan_to_num(neginf=0.0).unsqueeze(1)).exp().sum(1)), 1)
    whole = impl.merge(parts[1:], impl.merge(parts[:1]))
    right = logits.double().flatten(0, 1)
    assert torch.equal(whole[0], right.amax(0).float())
    torch.testing.assert_close(whole[0].double() + whole[1].double().log(), right.logsumexp(0))


def test_the_matrix_never_exists_whole() -> None:
    """No tensor of forward and backward pass is larger than a chunk of four rows of 64 x 80."""
    query, key, extra = (torch.randn(n, 4) for n in (64, 64, 16))
    one = contrastive.ContrastiveCall(query, key, extra, torch.tensor(2.0), None, None, None, 1.0, True, "mean", 4, "")
    with LargestTensor() as seen:
        loss, rows, columns = contrastive._forward(PYTORCH, one)
        contrastive._backward(PYTORCH, torch.ones_like(loss), rows, columns, one, True, True, True, True)
    assert seen.most == 4 * 80


def test_loss_with_a_learned_temperature() -> None:
    logit_scale = torch.tensor(1.5, requires_grad=True)
    loss, metrics = losses.info_nce(Q, K, negatives=EXTRA, temperature=(-logit_scale).exp(), symmetric=True, **MASKED)
    same = info_nce(Q, K, EXTRA, scale=logit_scale.exp(), symmetric=True, **MASKED)
    torch.testing.assert_close(loss, same)
    torch.testing.assert_close(*(torch.autograd.grad(each, logit_scale) for each in (loss, same)))
    torch.testing.assert_close(metrics["temperature"], (-logit_scale).exp().detach())
    given, metrics = losses.info_nce(Q, K, temperature=0.5)
    torch.testing.assert_close(given, OP.reference(Q, K, temperature=0.5))
    assert metrics["temperature"] == 0.5


def test_module() -> None:
    module = InfoNCELoss(0.5, symmetric=True)
    right = OP.reference(Q, K, EXTRA, temperature=0.5, symmetric=True, **MASKED)
    torch.testing.assert_close(module(Q, K, EXTRA, **MASKED), right)
    assert "symmetric=True" in repr(module)


IDS_ALONE: dict[str, Any] = {"query_ids": IDS, "key_ids": IDS}
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: info_nce(Q, K, query_ids=IDS), "key_ids: expected ids, as query_ids is given, got None"),
    (lambda: info_nce(Q, K, EXTRA, **IDS_ALONE), "negative_ids: expected ids, as query_ids is given, got None"),
    (lambda: info_nce(Q, K, **MASKED), "negative_ids: expected None without negatives"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_calls(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        wrong()


class Shared(torch.autograd.Function):
    """A tensor that every rank has; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        total = grad_outputs[0].clone()
        dist.all_reduce(total)
        return total


class AllLosses(torch.autograd.Function):
    """The losses of all ranks' queries, on each; the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        (own,) = args
        ctx.own = slice(dist.get_rank() * own.shape[0], (dist.get_rank() + 1) * own.shape[0])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0][ctx.own]


def together(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`info_nce` of all rows by the ranks together."""
    rank, world, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]

    def own(whole: Tensor) -> Tensor:
        share = whole.shape[0] // world
        rows: Any = OwnRows.apply(whole, rank * share, (rank + 1) * share)
        return rows

    def loss(query: Tensor, key: Tensor, negatives: Tensor | None = None, **options: Any) -> Tensor:
        rows = {n: own(v) if n.endswith("_ids") and v is not None else v for n, v in options.items()}
        if rows.get("scale") is not None:
            rows["scale"] = Shared.apply(rows["scale"])
        result = fn(own(query), own(key), None if negatives is None else own(negatives), **rows, group_name=name)
        if result.dim():
            return AllLosses.apply(result)  # type: ignore[return-value]
        require_same_on_ranks(result)
        return result

    return loss


def rank_samples(dtype: torch.dtype) -> list[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    ids = {name: torch.randint(0, 4, (n,)) for name, n in (("query_ids", 6), ("key_ids", 6), ("negative_ids", 4))}
    everything = {"scale": torch.tensor(0.7), "temperature": 0.5, "symmetric": True, "chunk_size": 2, **ids}
    return [
        Sample((randn(6, 8), randn(6, 8)), why="one direction"),
        Sample((randn(6, 8), randn(6, 8)), {"symmetric": True, "reduction": "sum"}, why="both directions"),
        Sample((randn(6, 8), randn(6, 8), randn(4, 8)), everything, why="every option"),
        Sample((randn(6, 8), randn(6, 8), randn(4, 8)), {**everything, "reduction": "none"}, why="a loss each"),
    ]


def check_ranks() -> None:
    chosen = rank_samples(torch.float32) + [rank_samples(dtype)[2] for dtype in (torch.bfloat16, torch.float16)]
    for sample in chosen:
        require_accurate(OP, sample, call(OP, sample, fn=together(info_nce)))
    compiled = torch.compile(info_nce, fullgraph=True, dynamic=True, backend="aot_eager")
    sample = chosen[2]
    require_accurate(OP, sample, call(OP, sample, fn=together(compiled)))

    def with_group(query: Tensor, key: Tensor, negatives: Tensor, *, group_name: str, **options: Any) -> Tensor:
        scale, temperature = options.pop("scale"), options.pop("temperature")
        loss, _ = losses.info_nce(
            query, key, negatives=negatives, temperature=temperature / scale, group=dist.group.WORLD, **options
        )
        return loss

    require_accurate(OP, sample, call(OP, sample, fn=together(with_group)))


def checks(rank: int, world: int) -> dict[str, Callable[[], None]]:
    return {"info_nce": check_ranks}


@pytest.mark.skipif(INTERPRET, reason="does not run kernels")
def test_two_ranks_are_one(tmp_path: Path, device: torch.device) -> None:
    errors = errors_of_ranks(checks, 2, tmp_path, device.type)
    assert not errors, "\n".join(errors)
