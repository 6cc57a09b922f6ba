"""What the examples of losses share: bytes of Python's standard library, a small model of them, and a plot."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from llama import BLOCKS, Llama, LlamaConfig
from text import read_text
from torch import Tensor

import llmk

matplotlib.use("Agg")  # draws into files, needs no screen
import matplotlib.pyplot as plt

CONFIG = LlamaConfig(256, 64, 192, 2, 4, 2)  # vocabulary, hidden, intermediate, layers, heads, key-value heads


def standard_library() -> Tensor:
    """A few million bytes, int64."""
    text = "".join(read_text(None)).encode()[:4_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`[count, length]`, drawn from the data."""
    starts = torch.randint(len(data) - length, (count, 1), generator=generator)
    return data[starts + torch.arange(length)]


def new_model(length: int, device: torch.device) -> Llama:
    model = Llama(CONFIG, BLOCKS["llmk"], length, device=device, dtype=torch.float32)
    model.initialize(seed=0)
    return model


def hidden_states(model: Llama, tokens: Tensor) -> Tensor:
    """`[B, S, H]` of tokens `[B, S]`."""
    x = model.embedding(tokens)
    for layer in model.layers:
        x = layer(x, model.rotary)
    return model.norm(x)


def pretrain(model: Llama, data: Tensor, steps: int, length: int, generator: torch.Generator) -> float:
    """On the text itself; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = windows(data, 16, length + 1, generator).to(model.head.weight.device)
        loss = llmk.functional.fused_linear_ce(hidden_states(model, batch[:, :-1]), model.head.weight, batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def plot(file: Path, title: str, ylabel: str, values: Sequence[float]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(values) + 1), values, color="#1a4e8a", lw=1.5)
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
