"""Integer arithmetic for launch configurations: fast in plain Python, and for symbolic sizes too."""

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 to 2**32."""
    n -= 1
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return n + 1


def int_min(a: int, b: int) -> int:
    """The smaller one, without a guard on which it is where one is symbolic."""
    if type(a) is int and type(b) is int:
        return min(a, b)
    return torch.sym_min(a, b)  # type: ignore[return-value]
