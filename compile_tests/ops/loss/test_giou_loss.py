"""What only the GIoU loss promises: what cancels between boxes is kept, and padding reaches nothing."""

import pytest
import torch

from compile_tests.helpers.right_calls import require_call
from llmk.functional import giou_loss
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import OPS, Sample


def boxes_and_targets(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    corner = torch.rand(2, count, 2, device=device)
    boxes, targets = torch.cat([corner, corner + 0.5], dim=-1)
    return boxes, targets


@pytest.mark.kernels
def test_equal_boxes_have_no_rounding_error(device: torch.device) -> None:
    _, targets = boxes_and_targets(50, device)
    targets = 100 * targets
    sample = Sample((targets.clone(), targets), {"reduction": "none"}, why="boxes equal to their targets")
    outcome = call(OPS["giou_loss"], sample)
    require_accurate(OPS["giou_loss"], sample, outcome)
    assert outcome.outputs[0].max() < 1e-6


@pytest.mark.kernels
def test_what_cancels_between_boxes_that_share_a_corner_is_kept(device: torch.device) -> None:
    """An outer edge's gradients by the union and the enclosing box are up to hundreds of times their difference."""
    torch.manual_seed(0)
    for overlap, count in ((0.3, 100), (0.1, 400), (0.01, 400)):
        corner = 100 * torch.rand(count, 2, device=device)
        targets = torch.cat([corner, corner + 100 + torch.rand(count, 2, device=device)], dim=-1)
        boxes = targets - 100 * (1 - overlap * torch.rand(count, 2, device=device)).repeat(1, 2)
        sample = Sample((boxes, targets), {"reduction": "none"}, why="boxes that share a corner")
        require_call(OPS["giou_loss"], sample)


@pytest.mark.kernels
def test_nothing_in_padding_reaches_the_loss_or_the_gradient(device: torch.device) -> None:
    boxes, targets = boxes_and_targets(20, device)
    padding = torch.arange(20, device=device) % 3 == 0
    for reduction in ("mean", "sum", "none"):
        alone = boxes[~padding].clone().requires_grad_()
        giou_loss(alone, targets[~padding], reduction=reduction).sum().backward()
        padded = torch.where(padding[:, None], float("nan"), boxes).requires_grad_()
        filled = torch.where(padding[:, None], torch.tensor([float("inf"), 5.0, 7.0, -1.0], device=device), targets)
        giou_loss(padded, filled, reduction=reduction).sum().backward()
        assert padded.grad is not None
        assert torch.equal(padded.grad[padding], torch.zeros(7, 4, device=device))
        torch.testing.assert_close(padded.grad[~padding], alone.grad)


@pytest.mark.kernels
def test_the_mean_over_no_box_is_nan_and_its_gradient_0(device: torch.device) -> None:
    boxes, targets = boxes_and_targets(5, device)
    boxes.requires_grad_()
    loss = giou_loss(boxes, torch.zeros_like(targets))
    loss.backward()
    assert loss.isnan()
    assert boxes.grad is not None
    assert torch.equal(boxes.grad, torch.zeros_like(targets))
    assert giou_loss(boxes[:0], targets[:0]).isnan()


@pytest.mark.kernels
def test_one_program_and_many_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, targets = boxes_and_targets(3000, device)
    one = giou_loss(boxes, targets)
    monkeypatch.setattr("llmk.ops.loss.giou_loss.ONE_PROGRAM", 10)
    many = giou_loss(boxes, targets)
    torch.testing.assert_close(one, many)
    assert torch.equal(many, giou_loss(boxes, targets))


def test_an_edge_that_moves_union_and_enclosing_box_alike_has_no_gradient() -> None:
    """A box and its target side by side: 1 - GIoU is 1 wherever the outer edges are."""
    left, right, height = torch.randint(1, 100, (3, 200), generator=torch.Generator().manual_seed(0)).float()
    nothing = torch.zeros_like(left)
    boxes = torch.stack([nothing, nothing, left, height], -1).requires_grad_()
    targets = torch.stack([left, nothing, left + right, height], -1).requires_grad_()
    giou_loss(boxes, targets, reduction="sum", eps=0.0).backward()
    assert boxes.grad is not None
    assert targets.grad is not None
    assert boxes.grad[:, 0].tolist() == targets.grad[:, 2].tolist() == [0.0] * 200
