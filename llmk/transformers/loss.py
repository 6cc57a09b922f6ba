"""The output projection and its loss, computed together while training.

A causal language model's own `forward` is kept, with three expressions changed: in training with labels its projection
gives logits of no width, on which scaling and capping cost nothing; its `loss_function` calls the projection with the
hidden states and the labels; and the output shows no logits. The loss is computed inside the projection's own call, so
that whatever gathers sharded parameters for a module's forward (FSDP, ZeRO-3) does so here.

How the model scales and caps its logits is measured, not read from a configuration: its `forward` is run with known
logits in place of the projection's, and nothing in place of its layers.
"""

import ast
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry.private import parameters_of
from llmk.transformers.classes import CHANGES, Change, changes_of
from llmk.transformers.probe import Differs, agree, apart, first_line, randoms
from llmk.transformers.residuals import is_hooked
from llmk.transformers.rewrite import Edit, Source, argument_names, load, method_called


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


@dataclass(frozen=True)
class FusedLoss(Edit):
    """The projection `head`, `self.loss_function` and what becomes of the logits, in a causal model's forward."""

    head: str
    capping: Capping
    kind = "loss"

    @property
    def what(self) -> str:
        return f"fused_linear_ce{self.capping}"

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        _LossCalls(self.head).visit(definition)
        return {"llmk_project": project, "llmk_loss": loss_of(self.head, self.capping), "llmk_shown": shown}


class _LossCalls(ast.NodeTransformer):
    def __init__(self, head: str) -> None:
        self.head = head

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = method_called(node)
        if called == self.head:
            hidden = ast.NamedExpr(ast.Name("llmk_hidden", ast.Store()), node.args[0])
            return ast.Call(load("llmk_project"), [load("self"), node.func, hidden, load("labels")], [])
        if called == "loss_function":
            return ast.Call(load("llmk_loss"), [load("self"), load("llmk_hidden"), *node.args], node.keywords)
        for keyword in node.keywords:
            if keyword.arg == "logits":
                keyword.value = ast.Call(load("llmk_shown"), [keyword.value], [])
        return node


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def project(self: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Tensor:
    """The logits, or in training with labels a tensor of no width in their place."""
    fuses = self.training and labels is not None and "_loss_function" not in self.__dict__
    if not fuses or hidden.dtype not in DTYPES:
        return head(hidden)
    if not fuses_loss(head):
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"the loss comes from logits, as before patch(): the projection is {_words(head)}", stacklevel=2
            )
        return head(hidden)
    return hidden.new_empty((*hidden.shape[:-1], 0))


def _words(head: nn.Module) -> str:
    hooked = isinstance(head, nn.Linear) and is_hooked(head)
    return "looked at by a hook" if hooked else f"now of {type(head).__module__}.{type(head).__name__}"


def shown(logits: Tensor | None) -> Tensor | None:
    return None if logits is None or logits.shape[-1] == 0 else logits


def fuses_loss(head: Any) -> bool:
    """Whether the loss can be had from this projection: not where an adapter adds to logits, or a hook looks at them.

    Hooks that bring the weights (FSDP, tensor parallelism, ZeRO-3) are for the loss as well.
    """
    if any(isinstance(change, Head) for change in changes_of(head)):
        split = (
            CHANGES not in vars(type(head)) or type(head.weight) is not nn.Parameter or hasattr(head.weight, "ds_id")
        )
        return split or not is_hooked(head)
    return type(head) is nn.Linear and head.weight.dtype in DTYPES and not is_hooked(head)


@functools.cache
def loss_of(head_name: str, capping: Capping) -> Callable[..., Tensor]:
    """transformers' `ForCausalLMLoss`, of the hidden states if there are no logits."""

    def loss(
        self: Any,
        hidden: Tensor,
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if logits.shape[-1]:
            kwargs |= {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            return self.loss_function(logits, labels, *args, ignore_index=ignore_index, **kwargs)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        head = getattr(self, head_name)
        arguments = (hidden, target, ignore_index, reduction, capping)
        total = head(*arguments) if changes_of(head) else loss_of_linear(head, *arguments)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch

    return loss


def loss_of_linear(
    head: Any, input: Tensor, target: Tensor, ignore_index: int, reduction: str, capping: Capping
) -> Tensor:
    bias = head.bias
    if capping.scale != 1:
        input = input * capping.scale
        bias = None if bias is None else bias * capping.scale
    return functional.fused_linear_ce(
        input, head.weight, target, linear_bias=bias, ignore_index=ignore_index, reduction=reduction,
        softcap=capping.cap,
    )  # fmt: skip


@dataclass(frozen=True)
class Head(Change):
    """The output projection, whose forward gives logits, or with a target their loss."""

    def methods(self, base: type) -> dict[str, Any]:
        def forward(self: nn.Module, input: Tensor, target: Tensor | None = None, *loss: Any) -> Tensor:
            return base.forward(self, input) if target is None else loss_of_linear(self, input, target, *loss)

        return {"forward": forward}


# ---- what a model does to its logits


def find_loss(model: nn.Module, source: Source) -> FusedLoss | None:
    """None for what has no output projection.

    Raises:
        Differs: Why its loss cannot be fused.
    """
    get = getattr(model, "get_output_embeddings", None)
    if get is None:
        return None
    try:
        head = get()
    except Exception as error:
        raise Differs(f"its output projection is not to be had: {first_line(error)}") from error
    name = next((name for name, child in model.named_children() if child is head), None)
    if head is None or name is None:
        raise Differs("has no output projection of its own")
    if "_loss_function" in vars(model):
        raise Differs("its loss_function was replaced")
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise Differs(f"its output projection {type(head).__name__} is not a plain linear layer")
    if "labels" not in argument_names(source.definition) or not _computes_once(source.definition, name):
        raise Differs(f"its forward does not compute self.{name} and self.loss_function of labels once")
    return FusedLoss(name, _capping(model, name, len(head.weight)))


def _computes_once(definition: ast.FunctionDef, head: str) -> bool:
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    heads = [call for call in calls if method_called(call) == head]
    losses = [call for call in calls if method_called(call) == "loss_function"]
    return len(heads) == 1 and len(heads[0].args) == 1 and not heads[0].keywords and bool(losses)


def _capping(model: nn.Module, head: str, V: int) -> Capping:
    """How the model scales and caps its V logits."""
    logits = 20 * randoms()(1, 5, V)
    labels = torch.arange(5).remainder(V).unsqueeze(0)
    found = []
    for training in (True, False):
        try:
            of_logits = functools.partial(_output, model, head, training)
            tiny, huge = (of_logits(torch.full((1, 5, V), v, dtype=torch.float64)).logits.mean() for v in (1e-9, 1e12))
            capping = Capping(_rounded(float(tiny / 1e-9)), float(huge) if huge < 1e6 else 0.0)
            output = of_logits(logits, labels)
            want = functional.cross_entropy(capping(logits[:, :-1]), labels[:, 1:])
            same = agree(capping(logits), output.logits) and agree(want, output.loss)
        except Exception as error:
            raise Differs(f"could not be run without its layers: {first_line(error)}") from error
        if not same:
            raise Differs("does more to its logits than scale and cap them, or has another loss")
        found.append(capping)
    if found[0] != found[1]:
        raise Differs("does something else to its logits in training")
    return found[0]


def _rounded(x: float) -> float:
    return float(f"{x:.7g}")


def _output(model: nn.Module, head: str, training: bool, logits: Tensor, labels: Tensor | None = None) -> Any:
    """The model's output where its projection gives `logits`."""
    layers = _Nothing(last_hidden_state=logits[..., :1])
    twin = apart(model, parameters_of(model), training)
    children = {name: _StandIn(child, logits if name == head else layers) for name, child in model.named_children()}
    vars(twin)["_modules"] = children
    with torch.no_grad():
        return type(twin).forward(twin, input_ids=labels, labels=labels)


class _Nothing(SimpleNamespace):
    """What the layers of a model give: hidden states, and None for all else."""

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
