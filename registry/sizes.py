"""Integer arithmetic for launch configurations; plain Python, so that it is fast and also takes symbolic sizes."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 to 2**32."""
    n -= 1
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return n + 1
