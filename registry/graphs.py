"""The form that a kernel op has in a compiled graph, and what the graph keeps for the backward pass."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.compiler.config
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from llmk.registry.devices import kernels_on_cpu
from llmk.registry.private.modes import traced_by_compiler
from llmk.registry.settings import changed


@contextlib.contextmanager
def ops_in_graph_as(forms: Mapping[str, str]) -> Iterator[None]:
    """Trace kernel ops, such as `_rms_norm_fwd`, as "kernel" or "aten" whatever they were registered as: to measure."""
    for name, form in forms.items():
        if not (name.startswith("_") and hasattr(torch.ops.llmk, name)):
            raise ValueError(f"forms: expected names of kernel ops, got {name!r}")
        if form not in ("kernel", "aten"):
            raise ValueError(f"forms[{name!r}]: expected 'kernel' or 'aten', got {form!r}")
    # AOTAutograd's cache sees the public op only, which is the same in both forms.
    tag = torch.compiler.config.cache_key_tag + "".join(f"|{name}={forms[name]}" for name in sorted(forms))
    with changed(forms=forms), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def recomputed_in_backward(input: Tensor) -> Iterator[None]:
    """Have a graph compute what it computes of `input` in here again in the backward pass, instead of keeping it.

    For elementwise results that cost less to compute again, next to what the backward pass reads anyway, than to keep
    in a GPU's memory; on a CPU they are kept. It is the mark that selective activation checkpointing puts on nodes;
    where a user's own policy put one, that stays.
    """
    meta = fx_traceback.current_meta
    on_gpu = input.is_cuda or kernels_on_cpu()
    if not on_gpu or not traced_by_compiler() or "recompute" in meta:
        yield
        return
    meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
    try:
        yield
    finally:
        for key in ("recompute", "ac_graph_id"):
            meta.pop(key, None)
