"""Finding by trials what a model does to its logits before the loss, and whether its labels are shifted.

It is measured, not read from a configuration: the model's `forward` is run with known logits in place of the
projection's, and nothing in place of its layers.
"""

import copy
import functools
import inspect
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry.private.modules import buffers_of, parameters_of
from llmk.transformers.probe import Differs, agree, apart, randoms


class Capping(NamedTuple):
    """`cap * tanh(scale * x / cap)`, or `scale * x` where `cap` is 0."""

    scale: float
    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.cap * torch.tanh(x / self.cap) if self.cap else x

    def __str__(self) -> str:
        scale = f", scale {self.scale:g}" if self.scale != 1 else ""
        return scale + (f", softcap {self.cap:g}" if self.cap else "")


class Trial:
    """A model's `forward` with nothing in place of its layers.

    Args:
        model: The model.
        head: The name of the child whose output are the logits.
        criterion: The name of the child that computes the loss, if any.
        added: The name of the parameter or buffer that is added to the logits, if any.
        V: The number of classes.
        kept: The flags of its configuration that its logits are made by.
    """

    def __init__(
        self, model: nn.Module, head: str, criterion: str | None, added: str | None, V: int, kept: Collection[str] = ()
    ) -> None:
        self.model, self.head, self.criterion, self.added, self.V = model, head, criterion, added, V
        forward = inspect.unwrap(type(model).forward)
        self.arguments = inspect.signature(forward).parameters
        self.flags = {*forward.__code__.co_names, RETURN_DICT} - set(kept)

    def found(self) -> tuple[Capping, bool]:
        """Return the transform of the logits, and whether token i's logits are held against label i + 1.

        Raises:
            Differs: Something else is done, or the loss is another one.
        """
        in_training, in_evaluation = (self._found(training) for training in (True, False))
        if in_training != in_evaluation:
            raise Differs("does something else to its logits in training")
        return in_training

    def _found(self, training: bool) -> tuple[Capping, bool]:
        V = self.V
        logits, bias = 20 * randoms()(1, 5, V), randoms(3)(1, V)
        labels = torch.arange(5).remainder(V).unsqueeze(0)
        of = functools.partial(self._output, training)
        try:
            tiny, huge = (of(torch.full((1, 5, V), v, dtype=torch.float64)).logits.mean() for v in (1e-9, 1e12))
            capping = Capping(float(f"{float(tiny / 1e-9):.7g}"), float(huge) if huge < 1e6 else 0.0)
            output = of(logits, bias, labels)
            got_logits, got_loss = output.logits, output.loss
        except Exception as error:
            raise Differs(NOT_TRIED) from error
        want = capping(logits + bias if self.added else logits)
        if not isinstance(got_loss, Tensor) or not agree(want, got_logits):
            raise Differs("does more to its logits than to scale and cap them")
        shifted = functional.cross_entropy(want[:, :-1], labels[:, 1:])
        aligned = functional.cross_entropy(want, labels)
        for shifts, loss in ((True, shifted), (False, aligned)):
            if agree(loss, got_loss):
                return capping, shifts
        raise Differs("its loss is not the mean cross entropy of its logits alone")

    def _config(self) -> Any:
        """The configuration without its flags, which ask for outputs that layers alone can give."""
        config = getattr(self.model, "config", None)
        flags = {name: value for name, value in vars(config).items() if isinstance(value, bool)} if config else {}
        twin = copy.copy(config)
        for name in flags.keys() & self.flags:
            vars(twin)[name] = name == RETURN_DICT
        return twin

    def _output(self, training: bool, logits: Tensor, bias: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """The model's output where its projection gives `logits`, and where nothing or `bias` is added to them."""
        model = self.model
        layers = _Nothing(last_hidden_state=logits[..., :1])
        twin = apart(model, parameters_of(model), training)
        if self.added is not None:
            own = vars(twin)["_buffers" if self.added in buffers_of(model) else "_parameters"]
            own[self.added] = torch.zeros(1, self.V) if bias is None else bias
        if "config" in vars(twin):
            vars(twin)["config"] = self._config()
        children = {n: _StandIn(child, logits if n == self.head else layers) for n, child in model.named_children()}
        if self.criterion in children:
            children[self.criterion] = getattr(model, self.criterion)
        vars(twin)["_modules"] = children
        ids = torch.zeros(logits.shape[:-1], dtype=torch.long)
        inputs = {name: ids for name in GIVEN if name in self.arguments}
        with torch.no_grad():
            return type(twin).forward(twin, **inputs, labels=labels)


GIVEN = ("input_ids", "decoder_input_ids")
"""The arguments that a trial gives, beside the labels."""
RETURN_DICT = "return_dict"
"""The flag without which an output is a tuple, whose members have no names."""
NOT_TRIED = (
    "its forward cannot be tried apart from its layers; fused_linear_ce of the hidden states, outside the model, "
    "computes the same loss"
)


class _Nothing(SimpleNamespace):
    """The output of a model's layers: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


class _StandIn(nn.Module):
    """Gives `output` in place of a module and its parts."""

    def __init__(self, module: nn.Module, output: Any) -> None:
        super().__init__()
        vars(self).update(stands_for=module, output=output)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.stands_for, name)
        return _StandIn(found, self.output) if isinstance(found, nn.Module) else found
