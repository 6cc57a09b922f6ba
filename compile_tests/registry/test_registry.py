"""Refusals of the registry, and errors of wrong calls."""

import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llmk
from llmk.registry import OPS, KernelOp, public_op, replicate_only, set_short_path_enabled

ROOT = Path(__file__).parents[2]


def kernel_op(name: str, *, backward: bool = False) -> KernelOp:
    """A complete kernel op that doubles its input."""

    def fn(input: Tensor) -> Tensor:
        return input * 2

    fn.__name__, fn.__module__ = name, "llmk.ops.test"
    op = KernelOp(fn)
    op.register_kernel("cpu")(lambda input: input * 2)
    op.register_fake(lambda input: torch.empty_like(input))
    op.register_sharding(replicate_only)
    if backward:
        op.register_autograd(lambda ctx, grad: op(grad), setup_context=lambda ctx, inputs, output: None)
    return op


def register(name: str, kernel: KernelOp, *, module: str = "llmk.ops.test", differentiable: tuple[str, ...] = ()):
    def fn(input: Tensor) -> Tensor:
        return kernel(input)

    fn.__name__, fn.__module__ = name, module
    options = {"reference": lambda input: input * 2, "samples": lambda device, dtype: iter(())}
    return public_op(differentiable=differentiable, kernel_ops=(kernel,), **options)(fn)


def test_refuses_a_second_registration() -> None:
    with pytest.raises(RuntimeError, match=re.escape("llmk::rms_norm is already registered by llmk.ops.norm.rms_norm")):
        register("rms_norm", kernel_op("_test_second"))


def test_refuses_an_op_from_outside() -> None:
    with pytest.raises(RuntimeError, match=r"test_outside comes from module 'ops.test'"):
        register("test_outside", kernel_op("_test_outside"), module="ops.test")
    assert "test_outside" not in OPS


def test_refuses_differentiable_inputs_without_a_gradient() -> None:
    with pytest.raises(RuntimeError, match=r"takes differentiable inputs \(input\) but none of its kernel ops"):
        register("test_no_gradient", kernel_op("_test_no_gradient"), differentiable=("input",))


def test_refuses_the_kernel_op_of_another() -> None:
    """The kernel op's name tells a checkpointing policy which public op is called."""
    with pytest.raises(RuntimeError, match="llmk::_rms_norm_fwd is a kernel op of rms_norm: llmk::test_shared needs"):
        register("test_shared", OPS["rms_norm"].kernel_ops[0])


def test_refuses_an_incomplete_kernel_op() -> None:
    def _test_incomplete(input: Tensor) -> Tensor:
        return input * 2

    _test_incomplete.__module__ = "llmk.ops.test"
    with pytest.raises(
        RuntimeError, match=r"llmk::_test_incomplete has no fake and no CPU kernel and no sharding strategy"
    ):
        register("test_incomplete", KernelOp(_test_incomplete))


def test_refuses_a_function_of_arguments_that_the_op_has_not() -> None:
    op = kernel_op("_test_arguments")
    for register_one in (op.register_fake, op.register_sharding):
        with pytest.raises(ValueError, match=r"llmk::_test_arguments has no argument inptu, but input"):
            register_one(lambda inptu: [])


def test_refuses_a_function_without_annotations() -> None:
    kernel = kernel_op("_test_schema")

    def fn(input, eps: float = 1e-5) -> Tensor:
        return kernel(input)

    fn.__module__ = "llmk.ops.test"
    with pytest.raises(ValueError, match="Parameter input must have a type annotation"):
        public_op(differentiable=(), kernel_ops=(kernel,), reference=fn, samples=lambda device, dtype: iter(()))(fn)
    assert "fn" not in OPS


def test_schemas_are_a_contract() -> None:
    """Models that were exported and saved name those of a release; a new operator's line is added with the next."""
    released = Path(__file__).with_name("schemas.txt").read_text().splitlines()
    assert released == sorted(released)
    changed = set(released) - {str(op.schema) for op in OPS.values()}
    assert not changed, "no operator has this schema of compile_tests/registry/schemas.txt any more"


def test_the_folder_at_the_root_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import ops` finds the folder when Python runs at the root; its operators must not register a second time."""
    source = sys.modules["llmk.ops.pointwise.gated_units"].__file__
    assert source is not None
    module = types.ModuleType("ops.pointwise.gated_units")
    before = dict(OPS)
    with open(source) as file, pytest.raises(RuntimeError, match=r"comes from module 'ops.pointwise.gated_units'"):
        exec(compile(file.read(), source, "exec"), vars(module))
    assert before == OPS


@pytest.mark.parametrize("name", OPS)
def test_schema_is_a_contract(name: str) -> None:
    overload = getattr(torch.ops.llmk, name).default
    assert overload is OPS[name].overload
    assert torch.Tag.pt2_compliant_tag in overload.tags
    assert OPS[name].doc


x, w, t = torch.randn(4, 8), torch.randn(8), torch.tensor([0, 1, 2, 3])
q = torch.randn(1, 4, 3, 8)


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("rms_norm", (x.double(), w.double()), {}, TypeError, "input: expected .* got float64"),
    ("rms_norm", (x[:, :0],), {}, ValueError, r"input: expected shape \[\.\.\., N\]"),
    ("add_rms_norm", (x[:, :0], x[:, :0]), {}, ValueError, r"input: expected shape \[\.\.\., N\]"),
    ("layer_norm", (x[:, :0],), {}, ValueError, r"input: expected shape \[\.\.\., N\]"),
    ("group_norm", (x[:, :0], 2), {}, ValueError, r"input: expected shape \[N, C, \*\] .* got \(4, 0\)"),
    ("group_norm", (w, 2), {}, ValueError, r"input: expected shape \[N, C, \*\]"),
    ("group_norm", (x, 3), {}, ValueError, "num_groups: expected a divisor of the 8 channels of input, got 3"),
    ("group_norm", (x, 0), {}, ValueError, "num_groups: expected a divisor of the 8 channels of input, got 0"),
    ("swiglu", (x[:, :7],), {}, ValueError, "gate: expected shape .* when up is None"),
    ("geglu", (x[:, :7],), {}, ValueError, "gate: expected shape .* when up is None"),
    ("gated_linear", (x[:, :5], None, x), {}, ValueError, r"gate: expected shape \[\.\.\., 2F\]"),
    ("embedding", (t, x, 4), {}, ValueError, "padding_idx: expected a row from -4 to 3, got 4"),
    ("embedding", (t, x, -5), {}, ValueError, "padding_idx: expected a row from -4 to 3, got -5"),
    ("rms_norm_gated", (x, x), {"group_size": 3}, ValueError, "group_size: expected 0 or a divisor .* 8, got 3"),
    ("causal_conv1d", (q[0], x[:, :1]), {}, ValueError, r"weight: expected shape \[D, K\] with K from 2 to 8"),
    ("sparsemax", (x, 2), {}, IndexError, r"dim: expected an axis from -2 to 1, got 2"),
    ("softmax", (x, 2), {}, IndexError, r"dim: .*expected to be in range of \[-2, 1\], but got 2"),
    ("softmax", (x[0, 0], -2), {}, IndexError, r"dim: .*expected to be in range of \[-1, 0\], but got -2"),
    ("sinkhorn", (x[:, :4], 0), {}, ValueError, "iterations: expected at least 1, got 0"),
    ("linear_act", (x[0, 0], x), {}, ValueError, r"input: expected shape \[\.\.\., K\], got \(\)"),
    ("rms_norm", (None,), {}, TypeError, "^input: expected a tensor, got None"),
    ("linear_act", (x, None), {}, TypeError, "^weight: expected a tensor, got None"),
    ("add", (x.to_sparse(), x), {}, TypeError, "^input: .* expected a dense tensor, got layout torch.sparse_coo"),
    ("rms_norm", (x, w.to_sparse()), {}, TypeError, "^weight: .* expected a dense tensor, got layout"),
]
"""Calls that no other value of one argument makes of a right one, which test_arguments.py has."""


@pytest.mark.parametrize(("name", "args", "kwargs", "error", "message"), WRONG)
def test_a_wrong_call_says_what_is_wrong(name, args, kwargs, error, message) -> None:
    for context in (torch.no_grad, partial(set_short_path_enabled, False)):
        with context(), pytest.raises(error, match=message):
            getattr(torch.ops.llmk, name)(*args, **kwargs)


RMS_NORM = "; rms_norm takes input, weight, eps, *, offset"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: llmk.functional.rms_norm(x.numpy()), "input: expected a tensor, got numpy.ndarray" + RMS_NORM),
        (
            lambda: llmk.functional.linear_logprobs(x, x, t, w),
            "linear_logprobs: too many positional arguments; linear_logprobs takes input, linear_weight, target, *, "
            "linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size, logits_dtype, "
            "support, add_tail, entropy, vocab_start, num_classes, group_name",
        ),
        (lambda: llmk.functional.rms_norm(x, w, "1e-6"), "eps: expected a number, got str" + RMS_NORM),
        (
            lambda: llmk.functional.rms_norm(x, epsilon=1e-6),
            "rms_norm: got an unexpected keyword argument 'epsilon'" + RMS_NORM,
        ),
        (
            lambda: llmk.functional.softmax(x, dtype=torch.float32),
            "softmax: got an unexpected keyword argument 'dtype'; softmax takes input, dim",
        ),
    ],
)
def test_a_misuse_of_the_python_functions_is_one_line(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value) == message


def test_what_stands_for_a_tensor_or_a_number_is_taken() -> None:
    """A symbolic trace's placeholder, and numbers of other kinds."""
    trace = torch.fx.symbolic_trace(lambda input, weight: llmk.functional.rms_norm(input, weight))
    expected = llmk.functional.rms_norm(x, w)
    assert torch.equal(trace(x, w), expected)
    for eps in (np.float32(1e-6), torch.tensor(1e-6)):
        assert torch.equal(llmk.functional.rms_norm(x, w, eps), expected)
    assert torch.equal(llmk.functional.softmax(x, np.int64(1)), llmk.functional.softmax(x, 1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: llmk.functional.rms_norm(x, w, torch.tensor([1e-6])),
            TypeError,
            r"eps: expected a number, got a tensor \(1,\) of float32; rms_norm takes",
        ),
        (
            lambda: llmk.functional.softmax(x, torch.tensor(0.7)),
            TypeError,
            r"dim: expected an integer, got a tensor \(\) of float32; softmax takes",
        ),
        (
            lambda: llmk.functional.kl_div(x, x, reduction=torch.tensor(1)),
            TypeError,
            "reduction: expected a string, got torch.Tensor; kl_div takes",
        ),
        (
            lambda: llmk.functional.linear_logprobs(x, x, t, temperature=torch.ones((), requires_grad=True)),
            NotImplementedError,
            r"temperature: linear_logprobs takes it as a number and has no gradient for it; pass temperature\.item\(\)",
        ),
    ],
)
def test_a_tensor_is_a_number_only_where_nothing_is_lost(
    call: Callable[[], Tensor], error: type[Exception], message: str
) -> None:
    """PyTorch's own functions refuse the same; the dispatcher would round, and drop the gradient without a word."""
    with pytest.raises(error, match=message):
        call()


def test_a_compiled_call_says_what_is_wrong() -> None:
    wrong = torch.compile(lambda x: torch.ops.llmk.layer_norm(x, eps=-1.0), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"eps: expected a finite number of at least 0, got -1\.0"):
        wrong(x)


def test_a_gradient_that_does_not_exist_is_refused() -> None:
    weight = torch.rand(8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"weight: llmk::cross_entropy has no gradient for it"):
        torch.ops.llmk.cross_entropy(x, t, weight=weight)
    with torch.no_grad():
        torch.ops.llmk.cross_entropy(x, t, weight=weight)
