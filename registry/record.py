"""The record of an operator: everything that opcheck, the tests, the benchmarks and the docs know about it."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from llmk.registry.private.operators import schema_of

if TYPE_CHECKING:
    from llmk.compiler.patterns import RewritePattern

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sample:
    """One call of an operator: its arguments, and why this call is worth making."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        listed = [value if isinstance(value, list) else [value] for value in self.args]
        shapes = [tuple(value.shape) for values in listed for value in values if isinstance(value, torch.Tensor)]
        return f"{self.why} {shapes}"


@dataclass(frozen=True)
class Cost:
    """The least that a call must do: bytes through device memory and floating-point operations.

    `full` is forward and backward together, with the gradients that are wanted in training (`Op.trained`).
    """

    bytes_forward: int = 0
    bytes_full: int = 0
    flops_forward: int = 0
    flops_full: int = 0

    @classmethod
    def passes(cls, forward: int, full: int) -> Callable[..., "Cost"]:
        """`Op.cost` of an operator that reads or writes tensors as large as its first argument so many times."""

        def cost(first: torch.Tensor, *args: object, **kwargs: object) -> Cost:
            size = first.numel() * first.element_size()
            return cls(bytes_forward=forward * size, bytes_full=full * size)

        return cost


@dataclass(frozen=True)
class Tolerance:
    """The factor by which an operator's error may exceed PyTorch's own, and why it is not the rule's 1.5."""

    factor: float
    reason: str


@dataclass(frozen=True)
class BatchDependent:
    """Why a result's rows have other bits beside other rows on a GPU, and for inputs of which dtypes."""

    reason: str
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES

    @classmethod
    def float32_products(cls, *results: str) -> dict[str, "str | BatchDependent"]:
        """`Op.batch_dependent` of results of products that are a library's for float32 alone."""
        why = cls("products in float32 are cuBLAS's, which chooses by the number of tokens", (torch.float32,))
        return dict.fromkeys(results, why)


RULE = Tolerance(1.5, "the rule for every operator")


@dataclass(frozen=True, kw_only=True)
class Op:
    """A public operator.

    Build one for an operator of your own to run `llmk.opcheck` on it; llmk's own come from `public_op`.

    Attributes:
        name: The name in its namespace, such as `rms_norm`.
        overload: The callable, such as `torch.ops.llmk.rms_norm.default`.
        reference: Plain PyTorch with the operator's exact signature. It runs in float64, where it is what is right, and
            in the sample's dtype, where its error is the baseline.
        samples: `samples(device, dtype)` yields the calls that every check makes. Each has at most a few thousand
            elements, so that Triton's interpreter gets through them. Every option and layout that changes what is
            launched needs one: the tests make it again at other sizes to find all launch configurations.
        resized: `resized(rows, device, dtype)` is one sample with that many rows; None where nothing is dynamic.
        workloads: `workloads(device, dtype)` yields the sizes that users run. Benchmarks time them, and every kernel
            is compiled ahead in the configurations that they and the samples choose.
        sized: `sized(sizes, device, dtype)` is one workload of other sizes, for `python -m llmk.bench --shape`: as many
            numbers as its workloads have.
        cost: `cost(*args, **kwargs)`: the least that the call must move and do.
        plan: `plan(*args, **kwargs)` says in a line how the call is computed where sizes decide it, such as its chunks.
        differentiable: The names of the arguments that get gradients.
        trained: Those of them that want one in training, whose cost is counted and timed; None for all.
        kernel_ops: The private operators it calls.
        dtypes: The dtypes of its samples.
        tolerances: Where the factor of the accuracy rule is not 1.5: by dtype, with the reason.
        error_bound: `error_bound(*args, **kwargs)` is a bound, in float64, of the error that the formula for these
            arguments adds to each element of the first output, beyond what their own rounding does; None for none.
            The derivation is beside it.
        exact: True if every result has to have the reference's bits, at ties and halves too, where roundings would
            excuse another choice.
        batch_dependent: Results whose rows have other bits beside other rows on a GPU, though the rows are independent,
            as opcheck names them (`output 0`, `gradient of input`), with the reason: a library's product, most often.
            A `BatchDependent` gives the dtypes of the inputs too, where it is not all of them.
        unchecked: Promises that opcheck leaves out unless they are named, with the reason: one takes too long, say.
            What may be broken is better accepted in a baseline, where it is known whether it still is.
        patterns: Computations in plain PyTorch that it replaces where `torch.compile(backend="llmk")` finds them.
        choices: Measured decisions, such as whether Inductor sees the kernel or plain aten: what and by which figure.
    """

    name: str
    overload: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    differentiable: tuple[str, ...]
    trained: tuple[str, ...] | None = None
    resized: Callable[[int, torch.device, torch.dtype], Sample] | None = None
    workloads: Callable[[torch.device, torch.dtype], Iterable[Sample]] | None = None
    sized: Callable[[Sequence[int], torch.device, torch.dtype], Sample] | None = None
    cost: Callable[..., Cost] | None = None
    plan: Callable[..., str] | None = None
    kernel_ops: tuple[Any, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    tolerances: dict[torch.dtype, Tolerance] = field(default_factory=dict)
    error_bound: Callable[..., torch.Tensor | None] | None = None
    exact: bool = False
    batch_dependent: dict[str, str | BatchDependent] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    patterns: tuple["RewritePattern", ...] = ()
    choices: tuple[str, ...] = ()
    doc: str = ""
    module: str = ""

    @property
    def schema(self) -> torch.FunctionSchema:
        return schema_of(self.overload)

    @property
    def qualified_name(self) -> str:
        return self.schema.name

    @property
    def function(self) -> Callable[..., Any]:
        """The Python function of one of llmk's own, which `llmk.functional` may offer."""
        return getattr(sys.modules[self.module], self.name)

    @property
    def is_own(self) -> bool:
        """True for an operator of llmk's, which promises more than PyTorch asks of everybody's."""
        return bool(self.module)

    def batch_dependent_in(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the results whose rows' bits depend on the batch for inputs of a dtype, with the reasons."""
        known = {
            name: BatchDependent(why) if isinstance(why, str) else why for name, why in self.batch_dependent.items()
        }
        return {name: why.reason for name, why in known.items() if dtype in why.dtypes}

    def argument_names(self) -> list[str]:
        return [argument.name for argument in self.schema.arguments]

    def bind(self, sample: Sample) -> dict[str, Any]:
        """The sample's arguments by name, without the ones left at their defaults."""
        return dict(zip(self.argument_names(), sample.args, strict=False)) | sample.kwargs


OPS: dict[str, Op] = {}
"""Every registered operator by name, in alphabetical order of its file."""
