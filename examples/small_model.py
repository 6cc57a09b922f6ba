"""Helpers of the examples of losses: bytes of Python's standard library, a small model of them, and a plot.

The plot has the training run, and the memory of the loss alone beside that of the same loss in plain PyTorch, for more
classes than bytes have.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from llama import BLOCKS, Llama, LlamaConfig
from meter import PeakMemory
from text import read_text
from torch import Tensor

import llmk

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

CONFIG = LlamaConfig(256, 64, 192, 2, 4, 2)  # vocabulary, hidden, intermediate, layers, heads, key-value heads
SEQUENCES, LENGTH, WIDTH, CLASSES = 4, 128, 64, 32_768  # of the batch whose memory is measured
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss that takes hidden states `[B, S, H]`, a projection `[V, H]` and targets `[B, S]`."""


def standard_library() -> Tensor:
    """A few million bytes, int64."""
    text = "".join(read_text(None)).encode()[:4_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`[count, length]`, drawn from the data."""
    starts = torch.randint(len(data) - length, (count, 1), generator=generator)
    return data[starts + torch.arange(length)]


def new_model(length: int, device: torch.device, config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config, BLOCKS["llmk"], length, device=device, dtype=torch.float32)
    model.initialize(seed=0)
    return model


def hidden_states(model: Llama, tokens: Tensor) -> Tensor:
    """`[B, S, H]` of tokens `[B, S]`."""
    x = model.embedding(tokens)
    for layer in model.layers:
        x = layer(x, model.rotary)
    return model.norm(x)


@torch.no_grad()
def sample(model: Llama, prompts: Tensor, count: int) -> Tensor:
    """Prompts `[B, S]` and what the model goes on with, `[B, S + count]`."""
    tokens = prompts
    for _ in range(count):
        logits = hidden_states(model, tokens)[:, -1] @ model.head.weight.t()
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens


def pretrain(model: Llama, data: Tensor, steps: int, length: int, generator: torch.Generator) -> float:
    """Train on the text itself, and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = windows(data, 16, length + 1, generator).to(model.head.weight.device)
        loss = llmk.functional.fused_linear_ce(hidden_states(model, batch[:, :-1]), model.head.weight, batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def token_logprobs(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of targets `[B, S]`, 0 where they are -100, from whole logits as in plain PyTorch."""
    scores = F.linear(input, linear_weight).float().log_softmax(-1)
    logprobs = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target == -100, 0.0, logprobs)


def peak_memory(loss: Loss, device: torch.device) -> float:
    """MiB above what there is before, of the loss and its gradients for 512 tokens and 32,768 classes."""

    def step(*shape: int) -> None:
        generator, (B, S, V) = torch.Generator().manual_seed(0), shape
        x, weight = (torch.randn(*of, WIDTH, generator=generator).to(device).requires_grad_() for of in ((B, S), (V,)))
        target = torch.randint(0, V, (B, S), generator=generator).to(device)
        meter = PeakMemory(device)
        gc.collect()
        meter.reset()
        before.append(meter.read())
        loss(x, weight, target).backward()
        peaks.append(meter.read())

    before: list[int] = []
    peaks: list[int] = []
    step(SEQUENCES, 2, 8)  # loads what a first call loads
    step(SEQUENCES, LENGTH, CLASSES)
    return (peaks[-1] - before[-1]) / 2**20


def plot(file: Path, title: str, ylabel: str, values: Sequence[float], memory: Mapping[str, float]) -> None:
    """A value a step, and MiB of each of two ways."""
    figure, (axes, bars) = plt.subplots(1, 2, figsize=(10, 4.5), width_ratios=(2, 1), layout="constrained")
    axes.plot(range(1, len(values) + 1), values, color="#1a4e8a", lw=1.5)
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(color="#dddddd", lw=0.6)
    drawn = bars.bar(list(memory), list(memory.values()), color=["#1a4e8a", "#b0b0b0"], width=0.6)
    bars.bar_label(drawn, fmt="%.0f")
    bars.set_title(f"the loss alone, {SEQUENCES * LENGTH:,} tokens, {CLASSES:,} classes", loc="left", fontsize=9)
    bars.set_ylabel("peak memory, MiB")
    for each in (axes, bars):
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def report(file: Path, title: str, ylabel: str, values: Sequence[float], ours: Loss, plain: Loss) -> None:
    """Measure both, plot, and say where."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = {"llmk": peak_memory(ours, device), "plain PyTorch": peak_memory(plain, device)}
    print("peak memory of the loss alone: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in memory.items()))
    plot(file, title, ylabel, values, memory)
    print(f"see {file}")
