"""Kernel ops: the private operators `llmk::_NAME` that launch kernels."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from llmk.registry.backward_op import BackwardOp
from llmk.registry.checks import check_home
from llmk.registry.derivative import Derivative, Keeps
from llmk.registry.devices import INTERPRET, kernel_context, launches_directly, runs_kernels
from llmk.registry.eager.bypass import PLAIN_TENSORS, are_plain, is_eager
from llmk.registry.eager.launch_cache import LaunchCache, captures, pending
from llmk.registry.launch import HAS_LAUNCHER, recording, wrap_triton
from llmk.registry.private.modes import traced_by_compiler
from llmk.registry.private.operators import bare_apply, define_kernel_op, schema_of
from llmk.registry.private.tensors import is_view
from llmk.registry.settings import settings
from llmk.registry.sharding import ShardingStrategy, register_strategy

__all__ = ["KernelOp", "like_first", "wrap_triton"]


class KernelOp:
    """Registers a function that launches Triton kernels as `torch.ops.llmk.NAME`, through `torch.library.triton_op`.

    What runs depends on the device of the first tensor:

    - on a GPU the function itself; under Inductor it is inlined, each launch a kernel that Inductor schedules, unless
      the op is `decomposed`: then Inductor gets the function given to `register_decomposition`, or where there is none
      the plain PyTorch of the next line;
    - on a CPU the function given to `register_kernel("cpu")`, plain PyTorch, which Inductor fuses like any other;
    - on a CPU with TRITON_INTERPRET=1 the function itself, its kernels in Triton's interpreter.

    An op that needs no kernel gives one function of plain PyTorch for all of them.

    In plain eager mode a call goes straight to an `autograd.Function` around the same body and formula: the way through
    the dispatcher would cost several times the launch. Everything that needs the dispatcher gets it.

    Outputs must be fresh, contiguous or dense buffers that alias neither the inputs nor each other. Where the function
    returns views of its buffers, a caller gets tensors that are none, which may be changed in place.

    Args:
        fn: The launching function. Its first argument is a tensor, and its annotations give the schema. It allocates
            with `torch.empty`, writes every element of what it returns and mutates nothing else.
        name: The op's name, where it is not the function's: each public op has kernel ops of its own, so that whoever
            only sees those, such as a checkpointing policy, can tell which one is called.
        decomposed: Give a compiled graph plain PyTorch instead of the launches, always or where this function of the
            arguments says so: for what Inductor fuses better with its neighbours than a kernel could, or computes again
            instead of keeping. The figure that decided it goes into the record's `choices`.
        launch_cached: Repeat the launches of calls that look like earlier ones, the public op's too; `LaunchCache` says
            what that requires of `fn` and of the public op's function.
        opaque: Keep the op as one node in a compiled graph instead of inlining its launches: for a driver whose number
            of launches depends on sizes and would need a graph for each.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        opaque: bool = False,
        decomposed: bool | Callable[..., bool] = False,
        launch_cached: bool = False,
    ) -> None:
        self.name = name or fn.__name__
        if not self.name.startswith("_"):
            raise ValueError(f"name: a kernel op's starts with an underscore, got {self.name!r}")
        check_home(fn)
        self.fn = fn
        self.owner: str | None = None  # the public op that calls it
        self.decomposed = decomposed
        self.has_backward = False
        self._cpu: Callable[..., Any] | None = None
        self._decomposition: Callable[..., Any] | None = None
        self._fake: Callable[..., Any] | None = None
        self.sharding: ShardingStrategy | None = None
        self._derived_from: tuple[KernelOp, BackwardOp] | None = None
        self.launch_cache = LaunchCache() if launch_cached and HAS_LAUNCHER else None
        self._body = self._wrap(fn)
        self._definition = define_kernel_op(f"llmk::{self.name}", self._body, opaque=opaque or INTERPRET)
        self._definition.register_fake(self._wrap_fake())
        self.overload: Any = getattr(torch.ops.llmk, self.name).default
        schema = schema_of(self.overload)
        depends_on = [self._names()] * len(schema.returns)
        self._differentiate(self._refuse_double_backward, _save_nothing, depends_on, takes_none=True)

    @property
    def is_plain(self) -> bool:
        """Return True if it is the same plain PyTorch on every device, and launches no kernel."""
        return self.fn is self._cpu

    def __call__(self, *args: Any) -> Any:
        if self.derivative.keeps is not None:
            args = (*args, *self.derivative.flags(args))
        if torch.compiler.is_dynamo_compiling() or not is_eager():  # Dynamo traces a formula where it compiles autograd
            return self.overload(*args)
        return self._bypass(*args) if self.launch_cache is None else self.launch_cache(self._bypass, args)

    def _bypass(self, *args: Any) -> Any:
        """Run a call on the fast path without a launch cache."""
        if not are_plain(args):
            return self.overload(*args)
        if torch.is_grad_enabled():
            for arg in args:
                if type(arg) in PLAIN_TENSORS and arg.requires_grad:
                    return self.apply(*args)
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        """The body where nothing traces; on a CPU or the current GPU, without autocast, that is a function itself."""
        first, run = args[0], self.fn
        assert self._cpu is not None
        if not launches_directly(first):
            if not first.is_cpu or settings.kernels_on_cpu or torch.is_autocast_enabled("cpu"):
                return self._body(*args)
            run = self._cpu
        outputs = _no_views(run(*args))
        if captures.current is not None:
            captures.current.note_call(self, args, outputs)
        return outputs

    def register_kernel(self, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register plain PyTorch for `device_type`, of which there is one: "cpu"."""
        if device_type != "cpu":
            raise ValueError(f"device_type: expected 'cpu', got {device_type!r}; GPUs run the kernels")

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            self._cpu = fn
            return fn

        return register

    def register_decomposition(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register what a compiled graph gets on a GPU where the op is `decomposed`, if not what a CPU computes."""
        self._decomposition = fn
        return fn

    def register_fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register what gives the outputs' shapes, strides and dtypes without computing them.

        It takes the op's arguments, or by their names those that it looks at.
        """
        self._fake = _by_argument_names(fn, self._names(), f"llmk::{self.name}")
        return fn

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., Any] | None = None,
        depends_on: Sequence[Sequence[str]] | None = None,
        takes_none: bool = False,
        keeps: Keeps | None = None,
    ) -> None:
        """Register the backward formula, as in `torch.library.register_autograd`.

        Args:
            backward: `backward(ctx, *grads)` gives each argument its gradient or None, and calls kernel ops only. Its
                `grads` are those of the outputs that have gradients.
            setup_context: `setup_context(ctx, inputs, output)` keeps inputs and outputs for it, by `save_for_backward`,
                and numbers as attributes of ctx; nothing else. None: nothing is kept.
            depends_on: For each output that has a gradient the arguments that it depends on. The outputs after these
                are kept for the backward pass and never handed out. None: the first output has one, by any argument.
            takes_none: `backward` takes None for an output that got no gradient where another did, instead of zeros.
            keeps: `keeps(needs_input_grad, args)` gives the op's last arguments, True for each thing that the forward
                pass must keep for the gradients that are wanted. The op is called with the arguments before them.
        """
        self.has_backward = True
        self._differentiate(backward, setup_context or _save_nothing, depends_on, takes_none, keeps)

    def register_backward(
        self,
        op: "KernelOp",
        *,
        outputs: Sequence[str] = ("output",),
        depends_on: Sequence[Sequence[str]] | None = None,
        saved_if: Mapping[str, Callable[..., bool]] | None = None,
        keeps: Keeps | None = None,
    ) -> None:
        """Register another kernel op as the backward formula: `register_autograd` is for one that is more than that.

        Args:
            op: Its arguments after the incoming gradients are named after what they are: an argument of this op, one of
                its `outputs`, or `need_NAME`, whether the argument NAME wants a gradient. It returns the gradients of
                the arguments that have one, in their order, and `no_gradient` for one that is not wanted. Where it has
                no fake yet, each gradient is like its argument, and contiguous. Where it never gets a sharding strategy
                of its own, it follows from this op's, which may look at arguments of both alone.
            outputs: Names for the outputs of this op.
            depends_on: As in `register_autograd`. None: the first output has a gradient, by every tensor.
            saved_if: By the name of a tensor that `op` does not always need, whether it does, from those of this op's
                arguments and `need_NAME` that the function is written with. Where not, it is not saved: `op` gets None.
            keeps: As in `register_autograd`.
        """
        schema = schema_of(self.overload)
        tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
        depends_on = [tensors] if depends_on is None else depends_on
        of = [name for name in tensors if any(name in names for names in depends_on)]
        derived = BackwardOp(schema, schema_of(op.overload), op, outputs, of, len(depends_on), saved_if or {})
        self.register_autograd(
            derived.backward, setup_context=derived.setup_context, depends_on=depends_on, keeps=keeps
        )
        if op._fake is None:
            op.register_fake(derived.fake)
        op._derived_from = self, derived

    def _differentiate(
        self,
        backward: Callable[..., Any],
        setup_context: Callable[..., Any],
        depends_on: Sequence[Sequence[str]] | None = None,
        takes_none: bool = False,
        keeps: Keeps | None = None,
    ) -> None:
        names = self._names()
        results = [[names.index(name) for name in of] for of in ([names] if depends_on is None else depends_on)]
        self.derivative = derivative = Derivative(
            self.name, self.overload, backward, setup_context, results, takes_none=takes_none, keeps=keeps
        )
        has_lists = any("List[Tensor]" in str(argument.type) for argument in schema_of(self.overload).arguments)
        formula = derivative.backward_with_lists if has_lists else derivative.backward
        self._definition.register_autograd(formula, setup_context=derivative.checked_setup_context)
        self.apply = _autograd_function(self.name, self._run, derivative)

    def register_flop_formula(self, fn: Callable[..., int]) -> Callable[..., int]:
        """Register what `torch.utils.flop_counter` counts for a call."""
        register_flop_formula(getattr(torch.ops.llmk, self.name), get_raw=True)(fn)
        return fn

    def register_sharding(self, strategy: ShardingStrategy) -> ShardingStrategy:
        """Register how DTensors may be split: `strategy(*args)` gives `(outputs, inputs)` for each way; see
        `sharding.py`.

        It takes the op's arguments, or by their names those that it looks at, of tensors only what DTensor knows:
        `shape` and `ndim`. `inputs` has an entry for each argument that may be a tensor, which is not looked at where
        that is None. All of them replicated is always allowed; for an op that knows no other way there is
        `replicate_only`.
        """
        self.sharding = _by_argument_names(strategy, self._names(), f"llmk::{self.name}")
        register_strategy(self.overload, self.sharding)
        return strategy

    def _names(self) -> list[str]:
        return [argument.name for argument in schema_of(self.overload).arguments]

    def complete(self) -> None:
        """Derive what follows from the forward op.

        Raises:
            RuntimeError: A part is missing.
        """
        if self.sharding is None and self._derived_from is not None:
            forward, derived = self._derived_from
            if forward.sharding is not None:
                self.register_sharding(derived.sharding_from(forward.sharding))
        parts = [("fake", self._fake), ("CPU kernel", self._cpu), ("sharding strategy", self.sharding)]
        missing = [name for name, fn in parts if fn is None]
        if missing:
            raise RuntimeError(f"llmk::{self.name} has no {' and no '.join(missing)}")

    def _wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def body(*args: Any) -> Any:
            run = self.implementation(*args)
            with kernel_context(args[0]):
                outputs = run(*args)
            return outputs if traced_by_compiler() else _no_views(outputs)

        return body

    def implementation(self, *args: Any) -> Callable[..., Any]:
        """Return what computes on the device of the first argument: the launching function, or plain PyTorch."""
        assert self._cpu is not None
        if not runs_kernels(self.name, args[0]):
            return self._cpu
        return self._decomposition or self._cpu if self._is_decomposed(args) else self.fn

    def _is_decomposed(self, args: tuple[Any, ...]) -> bool:
        """Return True if a compiler traces that is to see plain PyTorch."""
        if not traced_by_compiler():
            return False
        if self.name in settings.forms:
            return settings.forms[self.name] == "aten"
        return self.decomposed if isinstance(self.decomposed, bool) else self.decomposed(*args)

    def _wrap_fake(self) -> Callable[..., Any]:
        def fake(*args: Any) -> Any:
            assert self._fake is not None
            return self.fn(*args) if recording() else self._fake(*args)

        return fake

    def _refuse_double_backward(self, ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"llmk::{self.name}: double backward is not supported")


def _by_argument_names(fn: Callable[..., Any], names: Sequence[str], op: str) -> Callable[..., Any]:
    """Return a function that takes a value for each of `names` and passes `fn` those that it has as parameters.

    A function of `*args` gets all of them.

    Raises:
        ValueError: A parameter has none of the names; the message lists those of `op`.
    """
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return fn
    unknown = [parameter.name for parameter in parameters if parameter.name not in names]
    if unknown:
        raise ValueError(f"{op} has no argument {', '.join(unknown)}, but {', '.join(names)}")
    places = [names.index(parameter.name) for parameter in parameters]
    return lambda *args: fn(*[args[i] for i in places])


def _no_views(outputs: Any) -> Any:
    """Return the same outputs as tensors that a caller may change in place: autograd refuses a custom function's views.

    A detached tensor is no view and has the same memory.
    """
    if not isinstance(outputs, tuple):
        return outputs.detach() if is_view(outputs) else outputs
    for y in outputs:
        if is_view(y):
            return tuple([y.detach() if is_view(y) else y for y in outputs])
    return outputs


def like_first(*args: Any) -> Any:
    """The fake of an op whose output is like its first argument, and contiguous."""
    return args[0].new_empty(args[0].shape)


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _autograd_function(name: str, run: Callable[..., Any], derivative: Derivative) -> Callable[..., Any]:
    """Return the fast path: `apply` of an `autograd.Function` around the same body and formula."""

    def forward(ctx: Any, *args: Any) -> Any:
        launch, pending.launch = pending.launch, None
        output = run(*args) if launch is None else launch()
        derivative.setup_context(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:  # compiled autograd traces functions, not bound methods
        return derivative.backward(ctx, *grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(f"{name}_function", (torch.autograd.Function,), methods)
    return bare_apply(function)  # is_eager has looked for torch.func's transforms
