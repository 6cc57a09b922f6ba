"""transformers' own entries, with the model patched."""

import inspect
from typing import Any

import transformers
from torch import nn

from llmk.registry import is_sharded
from llmk.transformers.patch import patch
from llmk.transformers.report import Report


class AutoModelForCausalLM:
    """`transformers.AutoModelForCausalLM`, whose models come patched."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and patch it."""
        return _patched(transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs))

    @staticmethod
    def from_config(*args: Any, **kwargs: Any) -> Any:
        """Make a model as transformers does, and patch it."""
        return _patched(transformers.AutoModelForCausalLM.from_config(*args, **kwargs))


def _patched(loaded: Any) -> Any:
    patch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with what else from_pretrained was asked for
    return loaded


class PatchCallback(transformers.TrainerCallback):
    """Patches the model of a `Trainer`, or of one built on it such as TRL's `SFTTrainer`, when it is constructed.

    With `Trainer(model_init=...)`, whose models are made when training begins, each is patched then. So is the
    reference model of a trainer that has one, such as TRL's `DPOTrainer`, unless FSDP or ZeRO-3 has split it by then:
    policy and reference round alike, and a first step's log-ratios are those of equal models, 0.

    Attributes:
        report: What was replaced, from then on.
        reference_report: The same for the reference model.
    """

    def __init__(self, **which: bool) -> None:
        self.which = which
        self.report: Report | None = None
        self.reference_report: Report | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report = patch(kwargs["model"], **self.which)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_init_end(args, state, control, **kwargs)
        reference = getattr(_trainer_of(args), "ref_model", None)
        if isinstance(reference, nn.Module) and not _is_split(reference):
            self.reference_report = patch(reference, **self.which)


def _trainer_of(args: Any) -> Any:
    """The trainer that calls a callback: it hands over its model and not itself, and made its reference later."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, transformers.Trainer) and found.args is args:
            return found
        frame = frame.f_back
    return None


def _is_split(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    return is_sharded(*parameters) or any(hasattr(p, "ds_id") for p in parameters)
