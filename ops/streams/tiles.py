"""What one program holds of a token's streams, and how they are laid out."""

from torch import Tensor

from llmk.registry import check_dtype, check_parameter, next_power_of_2

MAX_STREAMS = 16
"""The most streams that a program holds a block of columns of."""
MAX_OUTPUTS = 64
"""The most outputs of `rms_linear`, which a program holds of its rows."""
MAX_SIZE = 64
"""The largest matrix that a program of `sinkhorn` holds."""


def check_streams(streams: Tensor) -> None:
    check_dtype("streams", streams)
    N, H = streams.shape[-2:] if streams.dim() >= 2 else (0, 0)
    if not 1 <= N <= MAX_STREAMS or H == 0:
        shape = f"[..., N, H] with N from 1 to {MAX_STREAMS} and H at least 1"
        raise ValueError(f"streams: expected shape {shape}, got {tuple(streams.shape)}")


def check_weights(name: str, weights: Tensor, streams: Tensor, *more: int) -> None:
    """The weights of each stream of each token, or a row of as many `more`."""
    meaning = "a number for each stream" if not more else "a row for each stream"
    check_parameter(name, weights, (*streams.shape[:-1], *more), meaning, "streams", streams)


def tile_of(N: int, H: int) -> dict[str, int]:
    """All streams in a block of columns, 32 elements a thread of four warps: a thread has the same columns of each."""
    block_s = next_power_of_2(N)
    return {"N": N, "BLOCK_S": block_s, "BLOCK_H": min(next_power_of_2(H), max(256, 4096 // block_s)), "num_warps": 4}
