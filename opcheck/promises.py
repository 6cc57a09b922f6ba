"""The promises, one function each: it returns when the operator keeps it and raises `BrokenPromise` when not.

Those under torch.compile and on a GPU are in compile_promises.py. The numbers are those of the contract in
docs/how-it-works.md.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from llmk.opcheck.calls import (
    BrokenPromise,
    Outcome,
    as_list,
    call,
    copy_with_layout,
    differentiable_inputs,
    first_line,
    float_dtype,
    incoming_gradients,
    prepare,
    require_accurate,
    resized,
)
from llmk.opcheck.compile_promises import (
    clean_graph,
    compiled,
    compiled_samples,
    cuda_graphs,
    no_host_sync,
    no_recompile,
    other_stream,
)
from llmk.registry import Op, Sample, set_short_path_enabled

Promise = Callable[[Op, Sequence[Sample]], None]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def torch_opcheck(op: Op, samples: Sequence[Sample]) -> None:
    """torch.library.opcheck with all of its test utilities; the first samples will do after float32."""
    for sample in samples if float_dtype(op, samples[0]) == torch.float32 else samples[:3]:
        if any(result is not None and bool(result.isnan().any()) for result in _results(call(op, sample))):
            continue  # torch.library.opcheck holds NaN unequal to itself; the accuracy rule does look at it
        args, kwargs, _ = prepare(op, sample, differentiable_inputs(op, sample))
        results = torch.library.opcheck(
            cast(Any, op.overload),
            tuple(args),
            kwargs,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor",
                        "test_aot_dispatch_static", "test_aot_dispatch_dynamic"),
            raise_exception=False,
        )  # fmt: skip
        for utility, result in results.items():
            if result != "SUCCESS":
                raise BrokenPromise(f"{sample}: {utility}: {first_line(result)}")


def values_and_gradients(op: Op, samples: Sequence[Sample]) -> None:
    """Outputs and gradients within the accuracy rule."""
    for sample in samples:
        require_accurate(op, sample, call(op, sample))


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
            if not _same_bits(tensor, before) or tensor._version != version:
                raise BrokenPromise(f"{sample}: {name} was mutated")


def no_alias(op: Op, samples: Sequence[Sample]) -> None:
    """1: outputs and gradients share no memory with inputs, with incoming gradients or with each other."""
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
        for name, tensor in named:
            if tensor.numel() == 0:
                continue
            address = tensor.untyped_storage().data_ptr()
            if address in owners:
                raise BrokenPromise(f"{sample}: {name} shares memory with {owners[address]}")
            owners[address] = name


def second_backward(op: Op, samples: Sequence[Sample]) -> None:
    """1: with retain_graph the second backward gives the first one's bits."""
    for sample in samples:
        wanted = differentiable_inputs(op, sample)
        if not wanted:
            continue
        args, kwargs, tensors = prepare(op, sample, wanted)
        outputs = [output for output in as_list(op.overload(*args, **kwargs)) if output.requires_grad]
        inputs = [tensors[name] for name in wanted]
        grads = incoming_gradients(outputs)
        first, second = (torch.autograd.grad(outputs, inputs, grads, retain_graph=True) for _ in range(2))
        for name, a, b in zip(wanted, first, second, strict=True):
            if not _same_bits(a, b):
                raise BrokenPromise(f"{sample}: the second backward gives another gradient of {name}")


def scaled_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient scaled by 2."""
    _with_gradients(op, samples, lambda outputs: [2 * grad for grad in incoming_gradients(outputs)])


def expanded_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient of stride 0, as `sum().backward()` makes it."""
    _with_gradients(
        op,
        samples,
        lambda outputs: [torch.full((), 0.7, dtype=o.dtype, device=o.device).expand(o.shape) for o in outputs],
    )


def strided_gradient(op: Op, samples: Sequence[Sample]) -> None:
    """1: an incoming gradient whose elements are not neighbours in memory."""
    _with_gradients(op, samples, lambda outputs: [_spread(grad) for grad in incoming_gradients(outputs)])


def _with_gradients(op: Op, samples: Sequence[Sample], grads: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    for sample in samples:
        if differentiable_inputs(op, sample):
            require_accurate(op, sample, call(op, sample, grads=grads), grads)


def _spread(tensor: Tensor) -> Tensor:
    """The same values, two elements apart in memory, at an offset."""
    if tensor.dim() == 0:
        return tensor.detach().clone()
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1::2]
    view.copy_(tensor.detach())
    return view


def _transposed(tensor: Tensor) -> Tensor:
    """The same values with the last two axes swapped in memory."""
    if tensor.dim() < 2:
        return tensor.detach().clone()
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)


def strided_inputs(op: Op, samples: Sequence[Sample]) -> None:
    """2: inputs of any strides."""
    for sample in samples:
        for change in (_spread, _transposed):
            require_accurate(op, sample, call(op, sample, change=change))


def input_subsets(op: Op, samples: Sequence[Sample]) -> None:
    """1: any subset of the inputs wants gradients, none of them too."""
    for sample in samples:
        names = differentiable_inputs(op, sample)
        for size in range(len(names)):
            for wanted in itertools.combinations(names, size):
                require_accurate(op, sample, call(op, sample, wanted))


def edge_rows(op: Op, samples: Sequence[Sample]) -> None:
    """2: no row, one row, and row counts around powers of two."""
    for sample in resized(op, samples, (0, 1, 2, 31, 33)):
        require_accurate(op, sample, call(op, sample))


def deterministic(op: Op, samples: Sequence[Sample]) -> None:
    """Same inputs, same bits."""
    for sample in samples:
        first, second = call(op, sample), call(op, sample)
        pairs = zip(_results(first), _results(second), strict=True)
        if not all(_same_bits(a, b) for a, b in pairs):
            raise BrokenPromise(f"{sample}: two runs give different bits")


def same_on_short_path(op: Op, samples: Sequence[Sample]) -> None:
    """The short path of plain eager mode and the dispatcher's give the same bits."""
    for sample in samples:
        with set_short_path_enabled(False):
            registered = call(op, sample)
        for _ in range(3):  # on a GPU the third repeats the launches of the second
            short = call(op, sample)
            if not all(_same_bits(a, b) for a, b in zip(_results(short), _results(registered), strict=True)):
                raise BrokenPromise(f"{sample}: the short path and the registered one give different bits")


def _results(outcome: Outcome) -> list[Tensor | None]:
    return [*outcome.outputs, *outcome.gradients.values()]


def refuses_transforms(op: Op, samples: Sequence[Sample]) -> None:
    """6: forward-mode AD, double backward and torch.func give the right answer or an exception, never zeros."""
    sample = next((s for s in samples if differentiable_inputs(op, s)), None)
    if sample is None:
        return
    wanted = differentiable_inputs(op, sample)
    for name, attempt in (
        ("double backward", _double_backward),
        ("forward-mode AD", _forward_mode),
        ("torch.func.grad", _func_grad),
    ):
        try:
            actual = attempt(op.overload, op, sample, wanted)
        except Exception:  # refusing is keeping the promise, however it is worded
            continue
        expected = attempt(op.reference, op, sample, wanted)
        close = actual is not None and expected is not None and torch.allclose(actual, expected, rtol=0.1, atol=0.1)
        if not close:
            raise BrokenPromise(f"{sample}: {name} neither raises nor gives the right answer")


def _scalar(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return torch.stack([output.float().square().sum() for output in as_list(fn(*args, **kwargs))]).sum()


def _double_backward(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor | None:
    args, kwargs, tensors = prepare(op, sample, wanted)
    inputs = [tensors[name] for name in wanted]
    first = torch.autograd.grad(_scalar(fn, args, kwargs), inputs, create_graph=True)
    return torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), inputs)[0]


def _forward_mode(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor | None:
    with forward_ad.dual_level():

        def dual(tensor: Tensor) -> Tensor:
            copy = copy_with_layout(tensor)
            return forward_ad.make_dual(copy, torch.ones_like(copy)) if copy.is_floating_point() else copy

        args = [
            dual(arg) if name in wanted else arg for name, arg in zip(op.argument_names(), sample.args, strict=False)
        ]
        return forward_ad.unpack_dual(_scalar(fn, args, sample.kwargs)).tangent


def _func_grad(fn: Callable[..., Any], op: Op, sample: Sample, wanted: Sequence[str]) -> Tensor:
    position = op.argument_names().index(wanted[0])
    args, kwargs, _ = prepare(op, sample, ())

    def loss(x: Tensor) -> Tensor:
        return _scalar(fn, [*args[:position], x, *args[position + 1 :]], kwargs)

    return torch.func.grad(loss)(args[position])


PROMISES: tuple[Promise, ...] = (
    torch_opcheck,
    values_and_gradients,
    no_mutation,
    no_alias,
    second_backward,
    scaled_gradient,
    expanded_gradient,
    strided_gradient,
    strided_inputs,
    input_subsets,
    edge_rows,
    deterministic,
    same_on_short_path,
    compiled,
    compiled_samples,
    no_recompile,
    clean_graph,
    refuses_transforms,
)
GPU_PROMISES: tuple[Promise, ...] = (cuda_graphs, no_host_sync, other_stream)
