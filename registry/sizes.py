"""Integer arithmetic for launch configurations: fast in plain Python, and for symbolic sizes too."""

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 to 2**32; a symbolic n becomes a fixed number."""
    n = int(n) - 1
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return n + 1


def at_most(work: int, most: int) -> int:
    """How many programs share so much work: one for each piece, at most so many, and where it is symbolic all of them.

    So a graph for any amount of work has one grid, and buffers of one size. Programs without work must do no harm.
    """
    return min(work, most) if isinstance(work, int) else most


def example_of(n: int) -> int:
    """n, or where it is symbolic the number that it was traced with, without a guard: for choices that are never wrong.

    A symbolic number that nothing is known of counts as large.
    """
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        return 2**31 if hint is None else int(hint)
    return n
