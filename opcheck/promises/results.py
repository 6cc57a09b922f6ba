"""The promises about results.

A promise is one function: it returns when the operator keeps it and raises `BrokenPromise` when not. What it returns is
a note, if it is a text: something to know that is no fault. The numbers are those of the contract in
docs/promises.md.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import Change, copy_with_layout
from llmk.opcheck.calls import (
    call,
    call_unless_strides_refused,
    device_of,
    every_kind,
    few_kinds,
    first_line,
    float_dtype,
    incoming_gradients,
    representatives,
    require_accurate,
    resized,
    traced_kinds,
)
from llmk.opcheck.foreign.adapters import Adapted, declared_aliases, registered, returns_alias
from llmk.opcheck.inputs import (
    MEMORY,
    BrokenPromise,
    NothingToCheck,
    Outcome,
    as_list,
    differentiable_inputs,
    prepare,
    same_bits,
    same_results,
    spread,
    transposed,
)
from llmk.opcheck.promises.nan_fill import nan_filled, require_all_written, zero_filled
from llmk.registry import Op, Sample, set_short_path_enabled


def torch_opcheck(op: Op, samples: Sequence[Sample]) -> None:
    """torch.library.opcheck with all of its test utilities; samples of each choice will do after float32.

    One of these is traced, the one with the most choices, and none with fixed sizes: `compiled_samples` traces all of
    them so.
    """
    operator = registered(op)
    if operator is None:
        raise NothingToCheck
    utilities = (
        "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
        "test_aot_dispatch_static",
    )  # fmt: skip
    if returns_alias(op):
        utilities = utilities[:3]  # AOTAutograd takes no alias that is not of PyTorch's own operators
    in_float32 = float_dtype(op, samples[0]) == torch.float32
    for place, sample in enumerate(samples if in_float32 else traced_kinds(op, samples)):
        if any(result is not None and bool(result.isnan().any()) for result in call(op, sample).results()):
            continue  # torch.library.opcheck holds NaN unequal to itself; the accuracy rule does look at it
        args, kwargs = _own_arguments(op, sample, differentiable_inputs(op, sample))
        chosen = utilities if in_float32 else utilities[: 3 if place else 4]
        _require_success(str(sample), operator, args, kwargs, chosen)
    _require_fakes_of_strides(op, operator, few_kinds(op, samples))


def _require_fakes_of_strides(op: Op, operator: Any, samples: Sequence[Sample]) -> None:
    """Hold fake results against real ones where inputs are strided."""
    for sample in samples:
        for change in (spread, transposed):
            if call_unless_strides_refused(op, sample, wanted=(), change=change) is None:
                continue
            args, kwargs = _own_arguments(op, sample, (), change)
            _require_success(f"{sample}: strided", operator, args, kwargs, ("test_faketensor",))


def _own_arguments(op: Op, sample: Sample, wanted: Sequence[str], change: Change = copy_with_layout) -> Any:
    """The arguments of the operator itself, where the record calls it in the one form."""
    args, kwargs, _ = prepare(op, sample, wanted, change)
    return op.overload.own_arguments(args, kwargs) if isinstance(op.overload, Adapted) else (args, kwargs)


def _require_success(
    where: str, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], utilities: Sequence[str]
) -> None:
    results = torch.library.opcheck(operator, tuple(args), kwargs, test_utils=utilities, raise_exception=False)
    for utility, result in results.items():
        if result != "SUCCESS":
            raise BrokenPromise(f"{where}: {utility}: {first_line(result)}")


def values_and_gradients(op: Op, samples: Sequence[Sample]) -> None:
    """Outputs and gradients within the accuracy rule."""
    has_results = False
    for sample in samples:
        outcome = call(op, sample)
        for name, result in zip(outcome.names(), outcome.results(), strict=True):
            if type(result) not in (Tensor, torch.nn.Parameter, type(None)):
                raise BrokenPromise(f"{sample}: {name} is a {type(result).__name__}, no torch.Tensor", name)
        require_accurate(op, sample, outcome)
        has_results |= bool(outcome.outputs)
    if not has_results:
        raise BrokenPromise("it returns nothing, and its schema says of nothing that it is mutated")


def no_mutation(op: Op, samples: Sequence[Sample]) -> None:
    """1: inputs, incoming gradients and saved tensors keep their bits and versions."""
    for sample in samples:
        watched: dict[str, tuple[Tensor, Tensor, int]] = {}

        def watch(name: str, tensor: Tensor, watched: dict[str, tuple[Tensor, Tensor, int]] = watched) -> Tensor:
            watched[name] = (tensor, tensor.detach().clone(), tensor._version)
            return tensor

        args, kwargs, tensors = prepare(op, sample, differentiable_inputs(op, sample))
        for name, tensor in tensors.items():
            watch(f"input {name}", tensor)

        def save(tensor: Tensor, watch: Callable[[str, Tensor], Tensor] = watch) -> Tensor:
            return watch(f"saved tensor {tuple(tensor.shape)}", tensor)

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            outputs = [output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad]
        if outputs:
            grads = incoming_gradients(outputs)
            for i, grad in enumerate(grads):
                watch(f"incoming gradient {i}", grad)
            torch.autograd.backward(outputs, grads)
        for name, (tensor, before, version) in watched.items():
            if not same_bits(tensor, before) or tensor._version != version:
                raise BrokenPromise(f"{sample}: {name} was mutated", MEMORY)


def no_alias(op: Op, samples: Sequence[Sample]) -> None:
    """1: outputs and gradients share no memory with inputs, incoming gradients, each other or those of another call;
    what the schema declares as an alias may.
    """
    twice = representatives(op, samples)
    for sample in samples:
        given: list[Tensor] = []

        def kept(outputs: Sequence[Tensor], given: list[Tensor] = given) -> list[Tensor]:
            given.extend(incoming_gradients(outputs))
            return given

        outcome = call(op, sample, grads=kept)
        named = [(f"input {name}", tensor) for name, tensor in outcome.inputs.items()]
        named += [(f"incoming gradient {i}", tensor) for i, tensor in enumerate(given)]
        named += [(f"output {i}", tensor) for i, tensor in enumerate(outcome.outputs)]
        named += [(f"gradient of {name}", grad) for name, grad in outcome.gradients.items() if grad is not None]
        owners: dict[int, str] = {}
        aliases = declared_aliases(op, len(outcome.outputs))
        for name, tensor in named:
            if tensor.numel() == 0:
                continue
            address = tensor.untyped_storage().data_ptr()
            if address in owners and not aliases.get(name, frozenset()) & aliases.get(owners[address], frozenset()):
                raise BrokenPromise(f"{sample}: {name} shares memory with {owners[address]}", MEMORY)
            owners[address] = name
        if any(sample is other for other in twice):
            again = call(op, sample)  # while all of the first call's tensors are there
            for result, tensor in zip(again.names(), again.results(), strict=True):
                if tensor is not None and tensor.numel() and tensor.untyped_storage().data_ptr() in owners:
                    before = owners[tensor.untyped_storage().data_ptr()]
                    raise BrokenPromise(f"{sample}: {result} shares memory with {before} of the call before", MEMORY)


def strided_inputs(op: Op, samples: Sequence[Sample]) -> None:
    """2: inputs of any strides, by a sample of each kind, layout and width; another's operator than llmk's may refuse
    those that are not contiguous in words.

    PyTorch's composition of the same strides counts too: its products of matrices that lie otherwise add up in another
    order.
    """
    for sample in every_kind(op, samples):
        for change in (spread, transposed):

            def composition(sample: Sample = sample, change: Change = change) -> list[Outcome]:
                return [call(op, sample, fn=op.reference, change=change)]

            outcome = call_unless_strides_refused(op, sample, change=change)
            if outcome is not None:
                require_accurate(op, sample, outcome, compositions=composition)


def edge_rows(op: Op, samples: Sequence[Sample]) -> None:
    """2: no row, one row, and row counts around powers of two."""
    for sample in resized(op, samples, (0, 1, 2, 31, 33)):
        require_accurate(op, sample, call(op, sample))


def deterministic(op: Op, samples: Sequence[Sample]) -> str:
    """Same inputs, same bits; on a GPU other operators than llmk's may differ by the order of a sum, which is noted."""
    note = ""
    for sample in samples:
        first, second = call(op, sample), call(op, sample)
        if not same_results(first, second):
            words = f"{sample}: two runs give different bits"
            if op.is_own or device_of(op, sample).type != "cuda":
                raise BrokenPromise(words)
            for outcome in (first, second):
                require_accurate(op, sample, outcome)
            note = f"{words}, all of them right, as sums by atomics do"
    return note


def same_on_short_path(op: Op, samples: Sequence[Sample]) -> None:
    """The fast path of plain eager mode and the dispatcher's give the same bits."""
    for sample in samples:
        with set_short_path_enabled(False):
            registered = call(op, sample)
        for _ in range(3):  # on a GPU the third repeats the launches of the second
            short = call(op, sample)
            if not same_results(short, registered):
                raise BrokenPromise(f"{sample}: the fast path and the registered one give different bits")


def every_element_written(op: Op, samples: Sequence[Sample]) -> None:
    """Memory that holds NaN until it is written gives the same results: every element is written, none read before."""
    for sample in samples:
        with nan_filled():
            outcome = call(op, sample)

        def again(sample: Sample = sample) -> Outcome:
            with zero_filled():
                return call(op, sample)

        require_all_written(op, sample, outcome, again)
