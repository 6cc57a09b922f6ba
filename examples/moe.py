"""Train a small mixture of experts on Python's source, and plot how its tokens are spread over the experts.

    python examples/moe.py                # about a minute on a CPU; uses a GPU if there is one
    python examples/moe.py --steps 300 --balance 0 --output my_folder

The model is that of examples/train.py with a mixture in place of each feed-forward layer: a router, and experts of
which each token gets two. --balance is the weight of the loss that spreads the tokens. The output folder then holds
moe.png: the loss, and each expert's share of the tokens in the last layer.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from llama import BLOCKS, Llama
from small_model import CONFIG, standard_library, windows
from torch import Tensor, nn

import llmk

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

EXPERTS, TOP_K, EXPERT_SIZE = 8, 2, 64
LENGTH, BATCH = 64, 16


class Mixture(nn.Module):
    """A mixture of experts of EXPERT_SIZE, in place of a feed-forward layer of `intermediate_size`."""

    def __init__(self, size: int, intermediate_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.router = nn.Linear(size, EXPERTS, bias=False, **factory)
        self.gate_up = nn.Parameter(0.02 * torch.randn(EXPERTS, 2 * EXPERT_SIZE, size, **factory))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, size, EXPERT_SIZE, **factory))
        self.logits = self.indices = torch.empty(0)  # of the last call

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        self.logits = self.router(tokens)
        weights, self.indices = llmk.functional.router_topk(self.logits, TOP_K)
        return llmk.functional.moe_experts(tokens, self.gate_up, self.down, self.indices, weights).view_as(x)

    def balance_loss(self) -> Tensor:
        return llmk.nn.load_balance_loss(self.logits, self.indices)

    def shares(self) -> Tensor:
        """Each expert's share of the last call's tokens."""
        experts = torch.arange(EXPERTS, device=self.indices.device)
        return (self.indices.flatten()[:, None] == experts).float().mean(0)


def train(model: Llama, data: Tensor, steps: int, balance: float) -> tuple[list[float], Tensor]:
    """The losses without the balance's, and the last layer's shares `[steps, EXPERTS]`."""
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator, losses, shares = torch.Generator().manual_seed(0), [], []
    for step in range(1, steps + 1):
        batch = windows(data, BATCH, LENGTH + 1, generator).to(model.head.weight.device)
        loss = model(batch[:, :-1], batch[:, 1:])
        (loss + balance * sum(mixture.balance_loss() for mixture in mixtures)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        shares.append(mixtures[-1].shares())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1].item():.3f}, largest share {shares[-1].max().item():.2f}")
    return torch.stack(losses).tolist(), torch.stack(shares).cpu()


def plot(file: Path, losses: list[float], shares: Tensor) -> None:
    figure, (above, below) = plt.subplots(2, figsize=(8, 7), layout="constrained", sharex=True)
    steps = range(1, len(losses) + 1)
    above.plot(steps, losses, color="#1a4e8a", lw=1.5)
    above.set_title(f"A mixture of {EXPERTS} experts on Python source", loc="left")
    above.set_ylabel("loss")
    colors = plt.get_cmap("tab20")(range(EXPERTS))
    below.stackplot(steps, shares.T, colors=colors)
    below.set_ylabel("experts' shares of the tokens")
    below.set_xlabel("step")
    below.set_ylim(0, 1)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small mixture of experts")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--output", type=Path, default=Path("runs/moe"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)  # of the experts
    model = Llama(CONFIG, replace(BLOCKS["llmk"], mlp=Mixture), LENGTH, device=device, dtype=torch.float32)
    model.initialize(seed=0)
    losses, shares = train(model, standard_library(), args.steps, args.balance)
    plot(args.output / "moe.png", losses, shares)
    print(f"see {args.output / 'moe.png'}")


if __name__ == "__main__":
    main()
