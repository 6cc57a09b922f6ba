"""Integer arithmetic for launch configurations: fast in plain Python, and for symbolic sizes too."""

import torch


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 to 2**32; a symbolic n becomes a fixed number."""
    n = int(n) - 1
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return n + 1


def grid_cap(work: int, most: int) -> int:
    """The number of programs for `work` pieces: one for each up to `most`, and `most` if the number is symbolic.

    So a graph for any amount of work has one grid, and buffers of one size. Programs without work must do no harm.
    """
    return min(work, most) if isinstance(work, int) else most


def size_hint(n: int) -> int:
    """Return n, or the number that a symbolic n was traced with, without a guard: for choices that are never wrong.

    A symbolic number without such a hint counts as large.
    """
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        return 2**31 if hint is None else int(hint)
    return n
