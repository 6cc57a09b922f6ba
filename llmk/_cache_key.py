"""Compiled graphs must not outlive the code they were made from."""

import hashlib
from pathlib import Path

import torch.compiler.config

PACKAGES = ("ops", "registry")


def add_sources_to_cache_key() -> None:
    """Put a hash of llmk's sources into PyTorch's compile cache key.

    AOTAutograd's cache looks at the Dynamo graph and the forward kernels only: without this, an edited formula, CPU
    kernel or backward kernel would be served from a stale entry in the next process (pytorch/pytorch#144344).
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((Path(__file__).parent / package).glob("**/*.py")):
            digest.update(path.read_bytes())
    torch.compiler.config.cache_key_tag += f"|llmk-{digest.hexdigest()[:16]}"
