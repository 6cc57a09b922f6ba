"""Group relative policy optimization of a small model of Python's source, for a toy reward.

    python examples/grpo.py               # one to two minutes on a CPU; uses a GPU if there is one
    python examples/grpo.py --steps 200 --output my_folder
    python examples/grpo.py --replay      # under top-k and top-p, and trained on what these kept

It trains a model of bytes for a moment, then lets it go on after prompts from the standard library, eight times each.
The reward is the share of lower-case letters in a completion; the advantage, by how many standard deviations of its
group it is above the mean. The output folder then holds grpo.png, with the memory of the loss beside that of plain
PyTorch.

With `--replay` a byte is drawn from the most probable ones alone. What it is drawn from, its support, is recorded, and
the loss has its log-probability over the same bytes: the ratio to the sampler's is 1 until the weights change, where
over all bytes it would be that of two different distributions. "outside" is the share of bytes not in their support.
"""

import argparse
from pathlib import Path

import torch
from llama import Llama
from small_model import hidden_states, new_model, pretrain, report, sample, standard_library, token_logprobs, windows
from torch import Tensor

import llmk

PROMPT, COMPLETION, PROMPTS, GROUP = 16, 24, 4, 8
TOP_K, TOP_P = 32, 0.9


def nucleus(logits: Tensor) -> Tensor:
    """The most probable classes, up to TOP_K and to a sum of TOP_P: `[B, TOP_K]`, padded with -1."""
    probabilities, ids = logits.softmax(-1).topk(TOP_K)
    before = probabilities.cumsum(-1) - probabilities
    return ids.masked_fill(before >= TOP_P, -1)


@torch.no_grad()
def sample_cut(model: Llama, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same from nuclei: the tokens, and of each but the first its support and its log-probability there.

    A prompt's tokens have a support without ids.
    """
    tokens, shape = prompts, (len(prompts), PROMPT - 1)
    supports = [torch.full((*shape, TOP_K), -1, dtype=torch.int64, device=prompts.device)]
    logps = [torch.zeros(shape, dtype=torch.float32, device=prompts.device)]
    for _ in range(COMPLETION):
        logits = hidden_states(model, tokens)[:, -1] @ model.head.weight.t()
        support = nucleus(logits)
        scores = logits.gather(-1, support.clamp(min=0)).masked_fill(support < 0, float("-inf")).log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1)
        tokens = torch.cat([tokens, support.gather(-1, drawn)], 1)
        supports.append(support.unsqueeze(1))
        logps.append(scores.gather(-1, drawn))
    return tokens, torch.cat(supports, 1), torch.cat(logps, 1)


def rewards(completions: Tensor) -> Tensor:
    """The share of lower-case letters, `[B]`."""
    return ((completions >= ord("a")) & (completions <= ord("z"))).float().mean(-1)


def ours(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    return llmk.losses.grpo(input, linear_weight, target, input.new_ones(len(target)))[0]


def plain(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    logprobs = token_logprobs(input, linear_weight, target)
    ratio = (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Group relative policy optimization of a small model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pretraining", type=int, default=60, help="steps on the text itself, before")
    parser.add_argument("--replay", action="store_true", help="sample under top-k and top-p, and replay the cut")
    parser.add_argument("--output", type=Path, default=Path("runs/grpo"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, data = torch.Generator().manual_seed(0), standard_library()

    model = new_model(PROMPT + COMPLETION, device)
    print(f"trained on the text: loss {pretrain(model, data, args.pretraining, PROMPT + COMPLETION, generator):.3f}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reached = []
    for step in range(1, args.steps + 1):
        prompts = windows(data, PROMPTS, PROMPT, generator).repeat_interleave(GROUP, 0).to(device)
        tokens, support, logps = (
            sample_cut(model, prompts) if args.replay else (sample(model, prompts, COMPLETION), None, None)
        )
        reward = rewards(tokens[:, PROMPT:])
        groups = reward.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        target = tokens[:, 1:].clone()
        target[:, : PROMPT - 1] = -100  # the prompt does not count
        loss, metrics = llmk.losses.grpo(
            hidden_states(model, tokens[:, :-1]),
            model.head.weight,
            target,
            advantages.flatten(),
            old_per_token_logps=logps,
            support=support,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reached.append(reward.mean())
        if step % 10 == 0:
            shown = {"reward": reached[-1], "entropy": metrics["entropy"]}
            if args.replay:
                shown |= {"outside": metrics["outside_support"], "clipped": metrics["clip_ratio/region_mean"]}
            print(f"step {step}: " + " ".join(f"{name} {value.item():.3f}" for name, value in shown.items()))
    title, values = "GRPO for lower-case letters in Python source", torch.stack(reached).tolist()
    report(args.output / "grpo.png", title, "mean reward", values, ours, plain)


if __name__ == "__main__":
    main()
