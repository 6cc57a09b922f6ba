"""Train a small detector with the GIoU loss in five ways and compare the time of a step.

    python examples/giou.py                             # a size for this machine
    python examples/giou.py --batch 32 --boxes 256      # where launches, not boxes, take the time

Every image has room for `--boxes` boxes, and the targets that it lacks are padding. The loss is plain PyTorch or
`llmk.functional.giou_loss`, the step around it eager or compiled; on a GPU the compiled step is replayed as CUDA graphs
(`mode="reduce-overhead"`). All ways start from the same weights, see the same batches and take their steps in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmk.functional import giou_loss
from llmk.ops.loss.giou_loss import giou_loss_reference

WARMUP_STEPS = 3  # the first compiles
HIDDEN = 64
WAYS = {
    "plain loss, eager": (giou_loss_reference, "nothing"),
    "plain loss compiled, eager step": (giou_loss_reference, "loss"),
    "llmk loss, eager": (giou_loss, "nothing"),
    "plain loss in the compiled step": (giou_loss_reference, "step"),
    "llmk loss in the compiled step": (giou_loss, "step"),
}
"""For each way the loss, and what of it is compiled."""


class Detector(nn.Module):
    """A few convolutions, a query for each box, and a head that gives its corners."""

    def __init__(self, boxes: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 32, 5, stride=4), nn.Conv2d(32, HIDDEN, 3, stride=2)
        self.backbone = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.queries = nn.Parameter(torch.randn(boxes, HIDDEN))
        self.hidden, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)
        nn.init.zeros_(self.head.weight)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([0.3, 0.3, 0.7, 0.7]))  # overlaps all targets

    def forward(self, images: Tensor) -> Tensor:
        x = self.backbone(images).unsqueeze(1) + self.queries  # [batch, boxes, HIDDEN]
        return self.head(torch.relu(self.hidden(x)))


def make_batch(batch: int, boxes: int) -> tuple[Tensor, Tensor]:
    """Noisy images that say by how much their boxes are shifted, and the boxes, a number of them for each image."""
    shift = 0.2 * torch.rand(batch, 1, 2) - 0.1
    place = 0.2 * torch.rand(boxes, 4, generator=torch.Generator().manual_seed(0)) - 0.1  # of each query's box
    targets = torch.tensor([0.3, 0.3, 0.7, 0.7]) + place + torch.cat([shift, shift], dim=-1)
    count = torch.randint(max(1, boxes // 4), boxes + 1, (batch, 1))
    targets = torch.where((torch.arange(boxes) < count).unsqueeze(-1), targets, 0.0)
    images = 0.1 * torch.randn(batch, 3, 64, 64)
    images[:, :2] += 10 * shift[:, 0, :, None, None]
    return images, targets


def training(way: str, args: argparse.Namespace) -> Callable[[], float]:
    """Return a function that takes the next step of one way to train and returns its loss."""
    torch.manual_seed(0)
    loss, compiled = WAYS[way]
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    model = Detector(args.boxes).to(device, dtype)
    batches = [tuple(x.to(device, dtype) for x in make_batch(args.batch, args.boxes)) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_of = torch.compile(loss, fullgraph=True) if compiled == "loss" else loss

    def forward(images: Tensor, targets: Tensor) -> Tensor:
        return loss_of(model(images), targets)

    if compiled == "step":
        forward = torch.compile(forward, fullgraph=True, mode="reduce-overhead" if device.type == "cuda" else None)

    def step() -> float:
        torch.compiler.cudagraph_mark_step_begin()
        result = forward(*batches[0])
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        batches.append(batches.pop(0))
        return result.detach().item()  # waits for the device

    return step


def main(argv: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: %(default)s")
    for option, default, meaning in [
        ("--steps", 100 if on_gpu else 20, "timed steps of each way"),
        ("--batch", 64 if on_gpu else 4, "images in a batch"),
        ("--boxes", 8192 if on_gpu else 64, "boxes of an image"),
    ]:
        parser.add_argument(option, type=int, default=default, help=f"{meaning}; default: %(default)s")
    args = parser.parse_args(argv)
    torch.backends.cudnn.allow_tf32 = False  # the losses of all ways are to agree
    steps = {way: training(way, args) for way in WAYS}
    losses, ms = dict.fromkeys(WAYS, 0.0), {way: [] for way in WAYS}
    for _ in range(WARMUP_STEPS + args.steps):
        for way, step in steps.items():
            started = time.perf_counter()
            losses[way] = step()
            ms[way].append(1e3 * (time.perf_counter() - started))
    print(f"{args.batch} images of up to {args.boxes} boxes, {args.dtype}, on {args.device}")
    print(f"{'':<36}{'step ms':>11}{'final loss':>14}")
    for way in WAYS:
        print(f"{way:<36}{statistics.median(ms[way][WARMUP_STEPS:]):>11.3f}{losses[way]:>14.6f}")


if __name__ == "__main__":
    main()
