"""Distillation of a model of Python's source into a smaller one, from the hidden states of both.

    python examples/distill.py            # under a minute on a CPU; uses a GPU if there is one
    python examples/distill.py --steps 200 --output my_folder

It trains a teacher of bytes for a moment, and then a student of a quarter of its width on the teacher's next-token
distributions. The output folder then holds distill.png, with the memory of the loss beside that of plain PyTorch.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from llama import LlamaConfig
from small_model import hidden_states, new_model, pretrain, report, standard_library, windows
from torch import Tensor

import llmk

LENGTH, BATCH = 64, 16
TEACHER, STUDENT = LlamaConfig(256, 128, 384, 2, 4, 2), LlamaConfig(256, 32, 96, 1, 2, 1)


def teachers(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and a projection like those of the student, but others."""
    return input.detach().flip(0), linear_weight.detach().flip(0)


def ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return llmk.losses.distill(input, linear_weight, target, *teachers(input, linear_weight), beta=0.0)[0]


def plain(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    student, teacher = (
        F.linear(x, weight).float().log_softmax(-1).flatten(0, 1)
        for x, weight in ((input, linear_weight), teachers(input, linear_weight))
    )
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation of a small model")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pretraining", type=int, default=80, help="steps on the text itself, before")
    parser.add_argument("--output", type=Path, default=Path("runs/distill"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, data = torch.Generator().manual_seed(0), standard_library()

    teacher = new_model(LENGTH, device, TEACHER)
    print(f"trained the teacher on the text: loss {pretrain(teacher, data, args.pretraining, LENGTH, generator):.3f}")
    teacher.requires_grad_(False)
    student = new_model(LENGTH, device, STUDENT)
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3)
    divergences = []
    for step in range(1, args.steps + 1):
        tokens = windows(data, BATCH, LENGTH + 1, generator).to(device)
        loss, metrics = llmk.losses.distill(
            hidden_states(student, tokens[:, :-1]),
            student.head.weight,
            tokens[:, 1:],
            hidden_states(teacher, tokens[:, :-1]),
            teacher.head.weight,
            beta=0.0,
            ce_weight=0.1,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(metrics["divergence"])
        if step % 20 == 0:
            shown = f"divergence {metrics['divergence'].item():.3f} cross entropy {metrics['nll_loss'].item():.3f}"
            print(f"step {step}: {shown}")
    title, values = "Distillation of a model of Python source", torch.stack(divergences).tolist()
    report(args.output / "distill.png", title, "KL(teacher, student)", values, ours, plain)


if __name__ == "__main__":
    main()
