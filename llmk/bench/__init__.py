"""Timing an operator beside plain PyTorch, on the machine at hand: `python -m llmk.bench OP`."""
