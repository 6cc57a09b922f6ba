"""On-policy distillation: a small model learns from two larger ones on what it writes itself.

    python examples/distill_on_policy.py            # about a minute on a CPU; uses a GPU if there is one
    python examples/distill_on_policy.py --steps 200 --output my_folder

It trains two teachers of bytes for a moment, one on the text and one on the text in lower case, and a student of a
quarter of their width on the text. Then the student goes on after prompts from the standard library, and the loss is
the divergence of its distributions from those of both teachers there, each with its weight: the student's logits are
made once. The output folder then holds distill_on_policy.png, with the memory of the loss beside that of plain PyTorch.

Source: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from llama import LlamaConfig
from small_model import hidden_states, new_model, pretrain, report, sample, standard_library, windows
from torch import Tensor

import llmk

PROMPT, COMPLETION, BATCH = 16, 32, 32
CONFIGS = LlamaConfig(256, 128, 384, 2, 4, 2), LlamaConfig(256, 96, 288, 2, 4, 2)
STUDENT = LlamaConfig(256, 32, 96, 1, 2, 1)
WEIGHTS = 0.7, 0.3
"""The weights of the two teachers."""


def lower_case(data: Tensor) -> Tensor:
    """The text without its capital letters."""
    return torch.where((data >= ord("A")) & (data <= ord("Z")), data + 32, data)


def teachers(input: Tensor, linear_weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and projections like those of the student, but others."""
    x, weight = input.detach(), linear_weight.detach()
    return [x.flip(0), x.flip(1)], [weight.flip(0), weight.flip(1)]


def ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    weight = torch.tensor(WEIGHTS, device=input.device, dtype=torch.float32)
    others = teachers(input, linear_weight)
    return llmk.losses.distill(input, linear_weight, target, *others, teacher_weight=weight, beta=1.0)[0]


def plain(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    student = F.linear(input, linear_weight).float().log_softmax(-1).flatten(0, 1)
    others = (F.linear(x, w).float().log_softmax(-1) for x, w in zip(*teachers(input, linear_weight), strict=True))
    return torch.stack(
        [
            weight * F.kl_div(teacher.flatten(0, 1), student, reduction="batchmean", log_target=True)
            for weight, teacher in zip(WEIGHTS, others, strict=True)
        ]
    ).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="On-policy distillation from two teachers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pretraining", type=int, default=60, help="steps on the text itself, before")
    parser.add_argument("--output", type=Path, default=Path("runs/distill_on_policy"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, data, length = torch.Generator().manual_seed(0), standard_library(), PROMPT + COMPLETION

    models = [new_model(length, device, config) for config in CONFIGS]
    for model, text in zip(models, (data, lower_case(data)), strict=True):
        print(f"trained a teacher: loss {pretrain(model, text, args.pretraining, length, generator):.3f}")
        model.requires_grad_(False)
    student = new_model(length, device, STUDENT)
    print(f"trained the student on the text: loss {pretrain(student, data, args.pretraining, length, generator):.3f}")
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    weight = torch.tensor(WEIGHTS, device=device, dtype=torch.float32)
    divergences = []
    for step in range(1, args.steps + 1):
        tokens = sample(student, windows(data, BATCH, PROMPT, generator).to(device), COMPLETION)
        input, target = tokens[:, :-1], tokens[:, 1:].clone()
        target[:, : PROMPT - 1] = -100  # the prompt does not count
        loss, metrics = llmk.losses.distill(
            hidden_states(student, input),
            student.head.weight,
            target,
            [hidden_states(model, input) for model in models],
            [model.head.weight for model in models],
            teacher_weight=weight,
            beta=1.0,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(metrics["divergence"])
        if step % 10 == 0:
            shown = " ".join(f"{name} {value.item():.3f}" for name, value in metrics.items())
            print(f"step {step}: {shown}")
    title, values = "On-policy distillation from two teachers", torch.stack(divergences).tolist()
    report(args.output / "distill_on_policy.png", title, "weighted KL(student, teachers)", values, ours, plain)


if __name__ == "__main__":
    main()
