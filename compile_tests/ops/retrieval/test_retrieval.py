"""Late interaction and the sparse head beside definitions of one query, one document and one class at a time."""

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_same
from compile_tests.helpers.observers import LargestTensor
from llmk import losses
from llmk.functional import maxsim, splade_head
from llmk.ops.retrieval import _maxima

RANDOM = torch.Generator().manual_seed(0)
Q_LENGTHS, D_LENGTHS = (5, 0, 3), (4, 70, 1, 0, 9, 2)

each_run = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])

pytestmark = pytest.mark.usefixtures("no_cpp")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def run(fn: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True) if compiled else fn


def first(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device).unsqueeze(1)


def ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(lengths, device=device).cumsum(0).to(torch.int32)


def score(query: Tensor, document: Tensor) -> Tensor:
    """The sum over tokens `[Lq, D]` of the first of the largest products with tokens `[Ld, D]`."""
    total = query.new_zeros((), dtype=torch.promote_types(query.dtype, torch.float32))
    for q in query:
        products = document @ q
        total = total + (products[products.argmax()] if len(products) else -inf)
    return total


def parts(tokens: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def in_batch(query: Tensor, document: Tensor) -> Tensor:
    documents = parts(document, D_LENGTHS)
    return torch.stack([torch.stack([score(q, d) for d in documents]) for q in parts(query, Q_LENGTHS)])


def embeddings(dtype: torch.dtype, device: torch.device, features: int = 12) -> list[Tensor]:
    shapes = (len(Q_LENGTHS), max(Q_LENGTHS)), (len(D_LENGTHS), max(D_LENGTHS))
    return [normal(*shape, features).to(device, dtype).requires_grad_() for shape in shapes]


@each_run
@pytest.mark.parametrize("pairwise", [False, True], ids=["batch", "pairs"])
@pytest.mark.kernels
def test_packed(pairwise: bool, compiled: bool, device: torch.device) -> None:
    """The bits of the padded batch, scores and gradients."""
    query, document = embeddings(torch.bfloat16, device)
    if device.type == "cpu":  # products that need no rounding: numpy's BLAS sums rows of a block in more than one order
        query, document = (x.detach().round().requires_grad_() for x in (query, document))
    masks = first(Q_LENGTHS, device), first(D_LENGTHS, device)
    offsets = {"query_offsets": ends(Q_LENGTHS, device), "document_offsets": ends(D_LENGTHS, device)}

    padded = maxsim(query, document, query_mask=masks[0], document_mask=masks[1], pairwise=pairwise)
    packed = [x.detach()[mask].requires_grad_() for x, mask in zip((query, document), masks, strict=True)]
    found = run(lambda *x: maxsim(*x, pairwise=pairwise, **offsets), compiled)(*packed)
    weights = normal(*padded.shape).to(device)
    of_padded = torch.autograd.grad(padded, (query, document), weights)
    of_packed = torch.autograd.grad(found, packed, weights)
    assert torch.equal(found, padded)
    for ours_, theirs, mask in zip(of_packed, of_padded, masks, strict=True):
        assert torch.equal(ours_, theirs[mask])
        assert not theirs[~mask].any()


@pytest.mark.kernels
def test_ties_go_to_the_first_token(device: torch.device) -> None:
    """Integers, whose products are exact: many are equal, in one tile and in several."""
    query = torch.randint(-1, 2, (2, 5, 6), generator=RANDOM).float().to(device).requires_grad_()
    document = torch.randint(-1, 2, (3, 150, 6), generator=RANDOM).float().to(device).requires_grad_()
    winners = (query.unsqueeze(1) @ document.mT).argmax(-1)  # [Q, N, Lq]
    right = torch.stack([torch.stack([document[n, winners[i, n]].sum(0) for n in range(3)]) for i in range(2)])
    (dq,) = torch.autograd.grad(maxsim(query, document).sum(), query, retain_graph=True)
    assert torch.equal(dq.sum(1), right.sum(1))
    (dd,) = torch.autograd.grad(maxsim(query, document).sum(), document)
    of_winners = torch.zeros_like(document)
    for i in range(2):
        for n in range(3):
            of_winners[n].index_add_(0, winners[i, n], query[i].detach())
    assert torch.equal(dd, of_winners)


@pytest.mark.kernels
def test_what_does_not_count_may_be_anything(device: torch.device) -> None:
    query, document = (x.detach() for x in embeddings(torch.float32, device))
    masks: dict[str, Any] = {"query_mask": first(Q_LENGTHS, device), "document_mask": first(D_LENGTHS, device)}
    right = maxsim(query, document, **masks)
    for value in (inf, nan):
        filled = [x.masked_fill(~mask.unsqueeze(-1), value).requires_grad_()
                  for x, mask in zip((query, document), masks.values(), strict=True)]  # fmt: skip
        found = maxsim(*filled, **masks)
        assert torch.equal(found, right)
        weights = torch.ones_like(right).masked_fill(right.isinf(), 0)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(found, filled, weights))


@pytest.mark.kernels
def test_a_maximum_that_is_nan_or_infinite(device: torch.device) -> None:
    document = normal(1, 70, 4).to(device)
    document[0, 66, 0] = nan
    query = torch.eye(4, device=device).unsqueeze(0)
    assert maxsim(query, document).isnan().all()
    document[0, 66] = inf
    assert maxsim(query + 1, document) == inf


@pytest.mark.kernels
def test_no_similarities_in_memory(device: torch.device) -> None:
    """A tensor has as many elements as the largest input, or a query's tokens in all documents, or in one's tokens."""
    query, document = (normal(n, L, 8).to(device).requires_grad_() for n, L in ((6, 5), (20, 40)))
    with LargestTensor() as noted:
        maxsim(query, document).sum().backward()
    assert noted.most <= document.numel()
    assert noted.most < 6 * 5 * 20 * 40 / 2


@pytest.mark.kernels
def test_float32_products_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_maxima, "AT_ONCE", 4 * len(D_LENGTHS) * max(D_LENGTHS))
    masks: dict[str, Any] = {"query_mask": first(Q_LENGTHS, device), "document_mask": first(D_LENGTHS, device)}

    def ours(query: Tensor, document: Tensor) -> Tensor:
        return maxsim(query, document, **masks)

    require_same(ours, in_batch, embeddings(torch.float32, device))


@pytest.mark.kernels
def test_splade_head_packed(device: torch.device) -> None:
    """The bits of the padded batch."""
    lengths, weight = (6, 0, 3), normal(40, 8).to(device, torch.bfloat16)
    x, mask = normal(3, 6, 8).to(device, torch.bfloat16), first(lengths, device)
    found = splade_head(x[mask], weight, offsets=ends(lengths, device))
    assert torch.equal(found, splade_head(x, weight, mask=mask))
    assert not found[1].any()


@each_run
@pytest.mark.parametrize("symmetric", [False, True])
def test_late_interaction(symmetric: bool, compiled: bool, device: torch.device) -> None:
    """The cross entropies of the scores; more documents than queries, and one of them without tokens."""
    lengths, temperature = (4, 7, 3, 0, 5), torch.tensor(0.7, device=device, requires_grad=True)
    query, document = (normal(*shape, 6).to(device).requires_grad_() for shape in ((3, 4), (5, 7)))
    mask = first(lengths, device)

    def ours(query: Tensor, document: Tensor, temperature: Tensor) -> Tensor:
        given = {"document_mask": mask, "temperature": temperature, "symmetric": symmetric}
        return losses.late_interaction(query, document, **given)[0]

    def plain(query: Tensor, document: Tensor, temperature: Tensor) -> Tensor:
        scores = torch.stack([torch.stack([score(q, d) for d in parts(document, lengths)]) for q in query])
        scores, own = scores / temperature, torch.arange(3, device=device)
        loss = F.cross_entropy(scores, own)
        return (loss + F.cross_entropy(scores[:, :3].t(), own)) / 2 if symmetric else loss

    require_same(run(ours, compiled), plain, [query, document, temperature])


def test_late_interaction_wants_a_document_of_each_query(device: torch.device) -> None:
    query, document = normal(3, 4, 6).to(device), normal(2, 4, 6).to(device)
    with pytest.raises(ValueError, match="document: expected at least 3, one for each query, got 2"):
        losses.late_interaction(query, document)
