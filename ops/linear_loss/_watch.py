"""What a cross entropy sees of its logits besides the loss: entropies, and whether the target was the largest."""

import torch
from torch import Tensor

from llmk.ops.linear_loss._logprob_rows import LogprobRows
from llmk.ops.linear_loss._logprob_rows_cpu import STATISTICS, Scores
from llmk.ops.linear_loss._ranks import gather, group_size


class Watch:
    """Looks at each chunk's logits before their gradient takes their place: one more pass over them."""

    def __init__(self, rows: LogprobRows, scores: Scores, group_name: str) -> None:
        self.rows, self.scores, self.group_name = rows, scores, group_name
        self.entropies: list[Tensor] = []
        self.hits: list[Tensor] = []

    def look(self, logits: Tensor, target: Tensor) -> None:
        candidates = target.unsqueeze(-1)
        parts = gather(self.rows.statistics(logits, candidates, self.scores), self.group_name)
        _, entropy, _ = self.rows.combine(parts, candidates, self.scores)
        of_ranks = parts.view(group_size(self.group_name), STATISTICS + 1, target.shape[0])
        largest, of_target = of_ranks[:, 0].amax(0), of_ranks[:, STATISTICS].amax(0)
        self.entropies.append(entropy)
        self.hits.append((target.long() != self.scores.ignore_index) & (of_target == largest))

    def each(self) -> tuple[Tensor, Tensor]:
        """Of every token `[N]`, float32; 0 of those that do not count."""
        return torch.cat(self.entropies), torch.cat(self.hits).float()

    def means(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Over the tokens that count; over none NaN."""
        count = (target.long() != self.scores.ignore_index).sum()
        entropy, hit = (each.sum() / count for each in self.each())
        return entropy, hit
