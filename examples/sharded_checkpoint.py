"""Checkpoints that every process writes its part of, and any number of processes can continue.

A checkpoint is a folder `step-N`. It is written under another name and renamed when it is whole.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_state

RECORD = "run.json"
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter, however they are grouped


class CheckpointError(Exception):
    """There is no checkpoint that can be read; the message says why."""


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Called in every process. Older checkpoints are removed when the new one is there."""
    unfinished, finished = folder / f"step-{step}.unfinished", folder / f"step-{step}"
    if is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
    _without_warning(save_state, _state(model, optimizer), checkpoint_id=unfinished)
    if is_first():
        (unfinished / RECORD).write_text(json.dumps(record))
        unfinished.rename(finished)
        for other in folder.glob("step-*"):
            if other != finished:
                shutil.rmtree(other)


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Called in every process; returns the record."""
    state = _state(model, optimizer)
    _without_warning(load, state, checkpoint_id=checkpoint)
    of_model, of_optimizer = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=OPTIONS)
    return read_record(checkpoint)


def newest(folder: Path) -> Path:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.suffix == ""]
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    return folder / f"step-{max(steps)}"


def read_record(checkpoint: Path) -> dict[str, Any]:
    try:
        FileSystemReader(checkpoint).read_metadata()
        return json.loads((checkpoint / RECORD).read_text())
    except Exception as error:
        raise CheckpointError(f"cannot read the checkpoint {checkpoint}") from error


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer}


def _without_warning(act: Any, *args: Any, **kwargs: Any) -> None:
    with warnings.catch_warnings():  # that one process without a group is on its own
        warnings.filterwarnings("ignore", category=UserWarning)
        act(*args, **kwargs)
