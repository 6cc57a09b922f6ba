"""The output projection and its loss, computed together while training.

A causal language model's own `forward` is kept, with three expressions changed: in training with labels its projection
gives logits of no width, on which scaling and capping cost nothing; its `loss_function` calls the projection with the
hidden states and the labels; and the output shows no logits. The loss is computed inside the projection's own call, so
that whatever gathers sharded parameters for a module's forward (FSDP, ZeRO-3) does so here.

How the model scales and caps its logits is measured, not read from a configuration: its `forward` is run with known
logits in place of the projection's, and nothing in place of its layers.
"""

import ast
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.transformers.modules import Left
from llmk.transformers.probe import Outcome, agree
from llmk.transformers.rewrite import Edit, argument_names, load, method_called


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


class FusedLoss(Edit):
    """The projection `head`, `self.loss_function` and what becomes of the logits, in a causal model's forward."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = head
        self.heads = self.losses = 0

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        changed = copy.deepcopy(definition)
        self.visit(changed)
        if "labels" not in argument_names(definition) or self.heads != 1 or not self.losses:
            self.left.append(f"its forward does not compute self.{self.head} and self.loss_function of labels once")
            return False
        definition.body = changed.body
        self.names = {"llmk_project": project, "llmk_loss": loss_of(self.head), "llmk_shown": shown}
        return True

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = method_called(node)
        if called == self.head and len(node.args) == 1 and not node.keywords:
            self.heads += 1
            hidden = ast.NamedExpr(ast.Name("llmk_hidden", ast.Store()), node.args[0])
            return ast.Call(load("llmk_project"), [load("self"), node.func, hidden, load("labels")], [])
        if called == "loss_function":
            self.losses += 1
            return ast.Call(load("llmk_loss"), [load("self"), load("llmk_hidden"), *node.args], node.keywords)
        for keyword in node.keywords:
            if keyword.arg == "logits":
                keyword.value = ast.Call(load("llmk_shown"), [keyword.value], [])
        return node


def project(self: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Tensor:
    """The logits, or in training with labels a tensor of no width in their place."""
    if not self.training or labels is None or "_loss_function" in self.__dict__:
        return head(hidden)
    return hidden.new_empty((*hidden.shape[:-1], 0))


def shown(logits: Tensor | None) -> Tensor | None:
    return None if logits is None or logits.shape[-1] == 0 else logits


@functools.cache
def loss_of(head: str) -> Callable[..., Tensor]:
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
        total = getattr(self, head)(hidden, target, ignore_index, reduction)
        if total.dim():
            raise RuntimeError(
                f"{head}: expected its loss, got a tensor of shape {tuple(total.shape)}: an adapter that adds to its "
                "output was put around it after patch(); use patch(model, loss=False)"
            )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch

    return loss


@functools.cache
def projection_forward(capping: Capping) -> Callable[..., Tensor]:
    """`forward` of the projection: logits of `input`, or with a target their loss."""

    def forward(
        self: nn.Linear, input: Tensor, target: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        if target is None:
            return nn.functional.linear(input, self.weight, self.bias)
        bias = self.bias
        if capping.scale != 1:
            input = input * capping.scale
            bias = None if bias is None else bias * capping.scale
        return functional.fused_linear_ce(
            input, self.weight, target, linear_bias=bias, ignore_index=ignore_index, reduction=reduction,
            softcap=capping.cap,
        )  # fmt: skip

    return forward


# ---- what a model does to its logits


class Projection(NamedTuple):
    """The output projection, its name in the model, and what becomes of its logits."""

    name: str
    head: nn.Linear
    capping: Capping


def find_projection(model: nn.Module) -> Projection | Left | None:
    """The output projection of a causal language model, or why its loss cannot be fused; None for other modules."""
    get = getattr(model, "get_output_embeddings", None)
    if get is None:
        return None
    head = get()
    name = next((name for name, child in model.named_children() if child is head), None)
    if head is None or name is None:
        return Left("has no output projection of its own")
    if "_loss_function" in model.__dict__:
        return Left("its loss_function was replaced")
    if "forward" in vars(head) or not isinstance(head, nn.Linear) or not _is_linear(head):
        return Left(f"its output projection {type(head).__name__} is not a plain linear layer")
    capping = _capping(model, name, len(head.weight))
    return capping if isinstance(capping, Left) else Projection(name, head, capping)


def _is_linear(head: nn.Linear) -> bool:
    small = nn.Linear(4, 3, bias=head.bias is not None)
    small.forward = MethodType(type(head).forward, small)
    outcome = Outcome(small, torch.randn(2, 4))
    return outcome.equals(lambda x, p: nn.functional.linear(x, p["weight"], p.get("bias")))


def _capping(model: nn.Module, head: str, V: int) -> Capping | Left:
    """How the model scales and caps its V logits, or why it cannot be said."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        logits, labels = 20 * torch.randn(1, 5, V), torch.randint(V, (1, 5))
        try:
            of_logits = functools.partial(_output, model, head)
            tiny, huge = (of_logits(torch.full((1, 5, V), v, dtype=torch.float64)).logits.mean() for v in (1e-9, 1e12))
            capping = Capping(_rounded(float(tiny / 1e-9)), float(huge) if huge < 1e6 else 0.0)
            output = of_logits(logits, labels)
            want = functional.cross_entropy(capping(logits[:, :-1]), labels[:, 1:])
        except Exception as error:
            return Left(f"could not be run: {type(error).__name__}: {error}".splitlines()[0])
    if not agree(capping(logits), output.logits) or not agree(want, output.loss):
        return Left("does more to its logits than scale and cap them, or has another loss")
    return capping


def _rounded(x: float) -> float:
    return float(f"{x:.7g}")


def _output(model: nn.Module, head: str, logits: Tensor, labels: Tensor | None = None) -> Any:
    """The model's output where its projection gives `logits`."""
    hidden = logits[..., :1]
    with ExitStack() as stack:
        for name, child in model.named_children():
            stands_in = logits if name == head else _Nothing(last_hidden_state=hidden)
            stack.enter_context(_gives(child, stands_in))
        return model.forward(input_ids=labels, labels=labels)


class _Nothing(SimpleNamespace):
    """What the layers of a model give: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def _gives(module: nn.Module, output: Any) -> Iterator[None]:
    """While it holds, `forward` of the module gives `output`."""
    module.forward = lambda *args, **kwargs: output  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
