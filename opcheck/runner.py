"""Running the promises over operators, dtypes and paths."""

import contextlib
import dataclasses
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmk.opcheck.availability import BFLOAT16, own_functions_on_a_cpu, what_else_runs_it, without_kernels
from llmk.opcheck.calls import float_dtype
from llmk.opcheck.foreign.adapters import adapted, registered, returns_alias
from llmk.opcheck.foreign.comparison import Comparison, costs_beside, resolved
from llmk.opcheck.foreign.hub import Layer
from llmk.opcheck.foreign.samples import GivenSamples, samples_from
from llmk.opcheck.foreign.signatures import Unrecorded, completed, record_of
from llmk.opcheck.inputs import BrokenPromise, NothingToCheck, watched_by
from llmk.opcheck.promises.kernels import launches
from llmk.opcheck.promises.settings import remember_state, restore_state
from llmk.opcheck.promises.table import (
    COMPILED,
    GPU_PROMISES,
    HABITS,
    IN_ONE_DTYPE,
    INTERPRETER_PROMISES,
    OF_KERNELS,
    OF_LAYERS,
    ON_REQUEST,
    PROMISES,
    Promise,
)
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET
from llmk.registry.private.compilers import triton_ops_as_nodes

Check = tuple[str, str, str]
"""Operator, dtype and promise."""


@dataclass(frozen=True)
class Result:
    """The result of one operator, promise, dtype and path; with no calls there was nothing to check.

    The message says what is broken, or is a note. `wrong` is the output or gradient that is wrong, `memory` or `time`,
    where a broken promise is about one of these; `accepted` is the reason that a baseline gives for it; `no_kernel` is
    why the interpreter had none.
    """

    op: str
    device: str
    dtype: str
    path: str
    promise: str
    passed: bool
    message: str
    seconds: float
    calls: int
    wrong: str = ""
    accepted: str = ""
    no_kernel: str = ""

    @property
    def check(self) -> Check:
        return self.op, self.dtype, self.promise

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "accepted" if self.accepted else "broken"
        return "kept" if self.calls else "empty"


@dataclass(frozen=True)
class RunningCheck:
    """A check that has begun, and the sample that it has come to."""

    op: str
    dtype: str
    promise: str
    sample: str = ""

    @property
    def check(self) -> Check:
        return self.op, self.dtype, self.promise

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.promise}"


def path_taken(device: torch.device) -> str:
    """Return what this process runs on a device: the PyTorch reference, Triton's interpreter or GPU kernels."""
    if INTERPRET:
        return "interpreter"
    return "reference" if device.type == "cpu" else "GPU kernel"


def check(
    op: Op | Callable[..., Any],
    samples: GivenSamples | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    progress: Callable[[str], None] = lambda message: None,
) -> list[Result]:
    """Check every promise of an operator; `assert_passes` is the same for a test.

    Args:
        op: Its record, a `llmk.registry.Op`; or an operator or a function without one, whose gradients are found by
            calls, and whose samples are made from its signature where none are given.
        samples: The calls to make instead of the record's: a function of device and dtype as the record has it, or a
            list, of which each is a `llmk.registry.Sample` or a tuple of arguments, what `record()` gives, or a
            Hypothesis strategy of such. The tensors of calls are moved to the device, and those that are floating to
            each dtype.
        reference: An operator or a function that says what is right, in the place of the record's reference.
        device: Where.
        dtypes: In which dtypes; all of the record's by default.
        only: Which promises, by name; all by default, but those that are only asked by name.
        skip: Which promises to leave out, by name.
        progress: Called with a line before each check.

    Returns:
        A result for each dtype and promise, broken ones with a message. Those named `samples` and `costs`, with
        nothing to check, say what was made from a signature and what the operator and the reference cost.

    Raises:
        ValueError: There is no promise of such a name, or no recorded call of the operator.
        TypeError: `op` or `reference` is neither a record nor to be called.
    """
    record = record_of(op)
    if samples is not None:
        record = dataclasses.replace(record, samples=samples_from(samples, record))
    if reference is not None:
        record = dataclasses.replace(record, reference=Comparison(reference))

    def on_begin(now: RunningCheck) -> None:
        if not now.sample:
            progress(str(now))

    return list(checks(record, torch.device(device), dtypes, only, on_begin, skip=skip))


def promise_named(name: str) -> Promise:
    known = {promise.__name__: promise for promise in PROMISES + ON_REQUEST + INTERPRETER_PROMISES + GPU_PROMISES}
    if name not in known:
        raise ValueError(f"no promise {name!r}; there are {', '.join(known)}")
    return known[name]


def require_known(names: Iterable[str]) -> None:
    """Raise a ValueError if there is no promise of such a name."""
    for name in names:
        promise_named(name)


def promises_for(
    device: torch.device, names: Sequence[str] | None = None, skip: Sequence[str] = (), path: str = ""
) -> list[Promise]:
    """Return the promises to check, in opcheck's order: all by default but for those that are only asked by name.

    `path` is the one that this process takes, if no other is given. A GPU's kernels are interpreted for what is asked
    of their own code; all else is asked of them on the GPU.
    """
    left_out = [promise_named(name) for name in skip]
    interprets = (path or path_taken(device)) == "interpreter"
    if device.type == "cpu":
        known = (INTERPRETER_PROMISES if interprets else ()) + PROMISES + ON_REQUEST
    elif interprets:
        known = OF_KERNELS
    else:
        known = PROMISES + GPU_PROMISES + ON_REQUEST
    if names is None:
        left_out += ON_REQUEST
    else:
        wanted = [promise_named(name) for name in names]
        known = tuple(promise for promise in known if promise in wanted)
    return [promise for promise in known if promise not in left_out]


def promises_asked(op: Op, device: torch.device, *, first_dtype: bool) -> list[str]:
    """Return the names of the promises that `check` asks of an operator in one dtype, of the record's first or not."""
    chosen = [promise for promise in promises_for(device) if applies(promise, op)]
    names = [promise.__name__ for promise in chosen if first_dtype or promise not in IN_ONE_DTYPE]
    return [name for name in names if name not in op.unchecked]


def applies(promise: Promise, op: Op) -> bool:
    """Return False for what only llmk's own promise, and where Dynamo cannot trace an operator.

    It would have to trace interpreted kernels in a function, and it takes no declared alias; some do not claim that.
    """
    if promise in OF_LAYERS and not isinstance(op, Layer):
        return False
    if op.is_own:
        return True
    traceable = not returns_alias(op) and (not INTERPRET or registered(op) is not None)
    traceable = traceable and not (isinstance(op, Unrecorded) and not op.traced)
    return promise not in HABITS and (traceable or promise not in COMPILED)


MOST_BROKEN = 4
"""Samples that break a promise, after which it goes on to no other."""
WORST = "; the worst of "
RUNS = "runs"
"""The name of the check before all promises: the operator has code for this path."""
SAMPLES, COSTS = "samples", "costs"
"""Results that say what was made for an operator without a record, and what it and another cost; nothing to check."""
NO_PROMISES = (RUNS, SAMPLES, COSTS)


def checks(
    op: Op,
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None,
    names: Sequence[str] | None,
    on_begin: Callable[[RunningCheck], None],
    done: Collection[Check] = (),
    *,
    skip: Sequence[str] = (),
) -> Iterator[Result]:
    """The results one by one, but for checks that are done; `on_begin` gets each check and sample as it begins.

    An operator that has no code for the path gets one result, with nothing checked, that says what has. So does one in
    bfloat16 that Triton's interpreter cannot compute in, unless the dtype is asked for. One whose kernels no call
    launches in the interpreter gets a broken one: what came out says nothing of them.
    """
    require_known(op.unchecked)
    remember_state()
    other = op.reference if isinstance(op.reference, Comparison) else None
    if isinstance(op, Unrecorded) or other:
        now = RunningCheck(op.name, _name_of((dtypes or op.dtypes)[0]), SAMPLES)
        on_begin(now)
        whole, words = _completed(op, device, dtypes)
        if words and now.check not in done:
            yield _result_of(now, device, words)
        if whole is None:
            return
        op = whole
    op = adapted(op, device, dtypes or op.dtypes)
    chosen = [promise for promise in promises_for(device, names, skip) if names or applies(promise, op)]
    now = RunningCheck(op.name, _name_of((dtypes or op.dtypes)[0]), RUNS)
    launched, no_kernel = dict[torch.dtype, bool | None](), ""
    if INTERPRET and not op.is_own and now.check not in done:
        on_begin(now)
        with around(op, device):
            launched = {dtype: launches(op, _samples(op, device, dtype)) for dtype in dtypes or op.dtypes}
        try:
            no_kernel = "no kernel ran in this dtype" if {*launched.values()} != {False} else without_kernels(op)
        except BrokenPromise as error:
            yield dataclasses.replace(_result_of(now, device, str(error)), passed=False)
            return
    for place, dtype in enumerate(dtypes or op.dtypes):
        dtype_name = _name_of(dtype)
        samples = _samples(op, device, dtype)
        if samples and not op.is_own and (op.name, dtype_name, RUNS) not in done:
            now = RunningCheck(op.name, dtype_name, RUNS)
            on_begin(now)
            with around(op, device):
                bits = dtypes is None and launched.get(dtype) and float_dtype(op, samples[0]) == torch.bfloat16
                elsewhere = BFLOAT16 if bits else what_else_runs_it(op, samples[0])
            if elsewhere is not None:
                yield _result_of(now, device, elsewhere)
                if bits:
                    continue
                return
        for promise in chosen:
            name = promise.__name__
            if (op.name, dtype_name, name) in done or (place and promise in IN_ONE_DTYPE):
                continue
            if names is None and name in op.unchecked:
                now = RunningCheck(op.name, dtype_name, name)
                yield _result_of(now, device, f"{name} is left out: {op.unchecked[name]}")
                continue
            result = _check_one(op, device, dtype_name, promise, samples, on_begin)
            yield dataclasses.replace(result, no_kernel=no_kernel if launched.get(dtype) is False else "")
        now = RunningCheck(op.name, dtype_name, COSTS)
        if other and names is None and not place and path_taken(device) != "interpreter" and now.check not in done:
            on_begin(now)
            yield _result_of(now, device, costs_beside(op, other, dtype, device))


def _samples(op: Op, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    torch.manual_seed(0)
    return list(op.samples(device, dtype))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _result_of(now: RunningCheck, device: torch.device, words: str) -> Result:
    """A result that only says something."""
    return Result(now.op, str(device), now.dtype, path_taken(device), now.promise, True, words, 0.0, calls=0)


def _completed(
    op: Op, device: torch.device, dtypes: Sequence[torch.dtype] | None
) -> tuple[Op | None, str]:  # fmt: skip
    """Return the record with all that it lacks, and what was made; none where that cannot be."""
    torch.manual_seed(0)
    try:
        with around(op, device):
            op, said = completed(op, device, dtypes)
            op, more = resolved(op, device, dtypes)
    except NothingToCheck as error:
        return None, str(error)
    return op, "\n".join(said + more)


def _check_one(
    op: Op,
    device: torch.device,
    dtype: str,
    promise: Promise,
    samples: Sequence[Sample],
    on_begin: Callable[[RunningCheck], None],
) -> Result:
    name, calls = promise.__name__, 0
    at: Sample | None = None

    def watch(sample: Sample) -> None:
        nonlocal calls, at
        calls, at = calls + 1, sample
        on_begin(RunningCheck(op.name, dtype, name, str(sample)))

    on_begin(RunningCheck(op.name, dtype, name))
    start = time.perf_counter()
    note, broken, left = "", [], list(samples)
    while len(broken) < MOST_BROKEN:
        try:
            with watched_by(watch):
                note = _run(promise, op, left, device)
            break
        except NothingToCheck as error:
            calls, note = (calls if broken else 0), str(error)
            break
        except BrokenPromise as error:
            broken.append(error)
        except Exception as error:  # an operator that raises where it should not is broken as well
            broken.append(_raised(error, at))
        _require_usable(device, f"{op.name} {dtype} {name}: {broken[-1]}")
        others = [sample for sample in left if sample is not at]
        if len(others) in (0, len(left)) or not str(broken[-1]).startswith(str(at)):
            break
        left = others
    restore_state()
    seconds = time.perf_counter() - start
    worst = max(broken, key=lambda error: error.size, default=None)
    message = note if worst is None else str(worst)
    if len(broken) > 1:
        message += f"{WORST}{len(broken)} samples" + (" or more" if len(broken) == MOST_BROKEN else "")
    wrong = "" if worst is None else worst.wrong
    return Result(op.name, str(device), dtype, path_taken(device), name, worst is None, message, seconds, calls, wrong)


class DeviceLost(Exception):
    """A kernel ended the process's context on a GPU, as an access to memory that is not there does: no call works."""


def _require_usable(device: torch.device, words: str) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(words.partition("\n")[0]) from error


def _raised(error: Exception, at: Sample | None) -> BrokenPromise:
    """Return the broken promise of an operator that raises an error at a sample."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    words = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return BrokenPromise(words if at is None else f"{at}: {words}")


def _run(promise: Promise, op: Op, samples: Sequence[Sample], device: torch.device) -> str:
    if not samples:
        raise BrokenPromise("the record yields no samples")
    with around(op, device):
        note = promise(op, samples) or ""
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error of a kernel that still runs is this promise's
        return note


@contextlib.contextmanager
def around(op: Op, device: torch.device) -> Iterator[None]:
    """Silence torch's own warnings: a wrong result is what counts here.

    In Triton's interpreter a wild store is told instead of ending the process, and kernels run on a CPU, whatever is
    registered for it. And on a CPU no compiled graph can hold a launch, so another's triton_op, whose body is launches,
    is a node of it; llmk's have a body for a CPU.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if INTERPRET:
            from llmk.opcheck.interpreted.interpreter import watched  # it needs numpy

            stack.enter_context(watched())
            stack.enter_context(own_functions_on_a_cpu())
        if device.type == "cpu" and not op.is_own:
            stack.enter_context(triton_ops_as_nodes())
        if device.type == "cuda":
            stack.enter_context(_without_tf32())
        yield


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Have cuDNN's convolutions round to float32, as products of matrices do, inside: some of its algorithms do not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
