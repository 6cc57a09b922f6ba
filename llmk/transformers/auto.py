"""transformers' own entries, with the model patched."""

from typing import Any

import transformers

from llmk.transformers.patch import patch
from llmk.transformers.report import Report


class AutoModelForCausalLM:
    """`transformers.AutoModelForCausalLM`, whose models come patched."""

    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        return _patched(transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs))

    @staticmethod
    def from_config(*args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        return _patched(transformers.AutoModelForCausalLM.from_config(*args, **kwargs))


def _patched(loaded: Any) -> Any:
    patch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with what else from_pretrained was asked for
    return loaded


class PatchCallback(transformers.TrainerCallback):
    """Patches the model of a `Trainer`, or of one built on it such as TRL's `SFTTrainer`, when it is constructed.

    With `Trainer(model_init=...)`, whose models are made when training begins, each is patched then.

    Attributes:
        report: What was replaced, from then on.
    """

    def __init__(self, **which: bool) -> None:
        self.which = which
        self.report: Report | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report = patch(kwargs["model"], **self.which)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_init_end(args, state, control, **kwargs)
