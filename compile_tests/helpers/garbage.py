"""Python's collector of garbage, which walks all that torch, sympy and transformers have imported."""

import gc


def collect_seldom() -> None:
    """Leave what is imported by now alone, and come seldom: it took up to a fifth of the time of tests that compile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
