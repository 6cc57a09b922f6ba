"""Direct preference optimization of a small model of Python's source: the right continuation over another one.

    python examples/dpo.py                # under a minute on a CPU; uses a GPU if there is one
    python examples/dpo.py --steps 200 --output my_folder

It trains a model of bytes for a moment, keeps a copy as the reference, and then prefers, after 32 bytes of the standard
library, the 32 that follow to 32 from elsewhere. The output folder then holds dpo.png, with the memory of the loss
beside that of plain PyTorch.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from small_model import hidden_states, new_model, pretrain, report, standard_library, token_logprobs, windows
from torch import Tensor

import llmk

PROMPT, COMPLETION, PAIRS = 32, 32, 8


def pairs(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and their successors, `[2 * PAIRS, length - 1]`: chosen completions, then rejected ones."""
    chosen = windows(data, PAIRS, PROMPT + COMPLETION, generator)
    rejected = torch.cat([chosen[:, :PROMPT], windows(data, PAIRS, COMPLETION, generator)], 1)
    tokens = torch.cat([chosen, rejected])
    target = tokens[:, 1:].clone()
    target[:, : PROMPT - 1] = -100  # the prompt does not count
    return tokens[:, :-1], target


def ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return llmk.losses.dpo(input, linear_weight, target, ref_logps=input.new_zeros(len(target)))[0]


def plain(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    chosen, rejected = token_logprobs(input, linear_weight, target).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Direct preference optimization of a small model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pretraining", type=int, default=60, help="steps on the text itself, before")
    parser.add_argument("--output", type=Path, default=Path("runs/dpo"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, data = torch.Generator().manual_seed(0), standard_library()

    model = new_model(PROMPT + COMPLETION, device)
    print(f"trained on the text: loss {pretrain(model, data, args.pretraining, PROMPT + COMPLETION, generator):.3f}")
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(1, args.steps + 1):
        tokens, target = (x.to(device) for x in pairs(data, generator))
        loss, metrics = llmk.losses.dpo(
            hidden_states(model, tokens),
            model.head.weight,
            target,
            ref_input=hidden_states(reference, tokens),
            ref_linear_weight=reference.head.weight,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 10 == 0:
            shown = " ".join(f"{name} {metrics[name].item():.3f}" for name in ("rewards/accuracies", "rewards/margins"))
            print(f"step {step}: loss {losses[-1].item():.4f} {shown}")
    title, values = "DPO on continuations of Python source", torch.stack(losses).tolist()
    report(args.output / "dpo.png", title, "loss", values, ours, plain)


if __name__ == "__main__":
    main()
