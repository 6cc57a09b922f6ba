"""Triton's interpreter, watched: each address that a kernel touches, the order of its programs, and its atomics.

Every tensor argument of a launch gets an address of its own, far from all others, so that an address says which
argument it came from, however far it went astray. What lies outside the argument's elements is refused before memory
is touched; what lies inside is translated to where the tensor is.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from llmk.opcheck.inputs import MEMORY, BrokenPromise
from llmk.opcheck.interpreted.loops import MOST_TURNS, counting_turns, turns
from llmk.opcheck.interpreted.offsets import NUMBER, PRODUCT, PROGRAM, origins_of, traced, typed_range
from llmk.registry.private.kernels import copied_to_host, copy_back
from llmk.registry.private.kernels import interpreter as find_interpreter
from llmk.registry.private.tensors import has_numbers

interpreter = find_interpreter()
_APART = 48
"""Arguments are 2**48 bytes apart: no machine address is as large, and no offset in use goes as far."""
_WRAPPED = -(2**29)
"""An offset below it can hardly be meant."""


class OutOfBounds(BrokenPromise):
    """A program touched what is no element of its arguments."""

    def __init__(self, message: str) -> None:
        super().__init__(message, MEMORY)


@dataclass(eq=False)
class Watch:
    """The accesses to watch for besides addresses, and those that were seen; each is itself alone, as watches nest."""

    reorder: bool = False
    launches: int = 0
    kernels: dict[Any, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    swallowed: list[str] = field(default_factory=list)
    endless: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    reordered_sums: list[str] = field(default_factory=list)
    float_atomics: list[str] = field(default_factory=list)
    short_offsets: list[str] = field(default_factory=list)


class _Argument:
    """A tensor argument, and where the kernel is told that it is."""

    def __init__(self, name: str, tensor: Tensor, place: int) -> None:
        self.name, self.tensor = name, tensor
        self.address = (place << _APART) + (1 << (_APART - 1)) + (tensor.data_ptr() & 0xFFFF)  # aligned as it is
        self.moved = self.address - tensor.data_ptr()
        self.size = tensor.element_size()
        axes = [(stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and stride]
        self.axes = sorted(axes, reverse=True)
        self.span = 0 if tensor.numel() == 0 else 1 + sum(stride * (n - 1) for stride, n in self.axes)
        self.has_gaps = self.span > 0 and self.span != int(np.prod([n for _, n in self.axes], initial=1))

    def holds(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return where the bytes from `first` to `last`, counted from the tensor's first, belong to its elements."""
        inside = (first >= 0) & (last < self.span * self.size)
        if not self.has_gaps or not inside.any():
            return inside
        return inside & self._is_element(first // self.size) & self._is_element(last // self.size)

    def _is_element(self, index: np.ndarray) -> np.ndarray:
        reach = np.cumsum([0] + [stride * (n - 1) for stride, n in reversed(self.axes)])[:-1][::-1]
        if any(stride <= below for (stride, _), below in zip(self.axes, reach, strict=True)):  # elements overlap
            offsets = np.zeros(1, dtype=np.int64)
            for stride, n in self.axes:
                offsets = (offsets[:, None] + stride * np.arange(n)).ravel()
            return np.isin(index, offsets)
        found = np.ones(index.shape, dtype=bool)
        for stride, n in self.axes:
            found &= index // stride < n
            index = index % stride
        return found & (index == 0)


@dataclass(frozen=True)
class _Access:
    """The machine addresses of elements that a program touched at once, and the bytes of each element."""

    program: int
    addresses: np.ndarray
    size: int

    def parts(self, size: int) -> np.ndarray:
        """The addresses of the parts of such a size that the elements have."""
        return np.add.outer(self.addresses, np.arange(0, self.size, size, dtype=np.uint64)).ravel()


@dataclass
class _Launch:
    kernel: str
    named: dict[str, Tensor]
    order: Callable[[int, int], int]
    tracks: bool
    """True where accesses are noted, to tell which launches depend on the order of their programs."""
    arguments: list[_Argument] = field(default_factory=list)
    program: int = 0
    read: list[_Access] = field(default_factory=list)
    stored: list[_Access] = field(default_factory=list)
    summed: list[_Access] = field(default_factory=list)
    """What the programs added to by atomics on floats."""

    def may_depend_on_order(self) -> bool:
        """Return False where no program touches what another one writes."""
        written = self.stored + self.summed
        size = min((access.size for access in self.read + written), default=1)
        parts = [access.parts(size) for access in written]
        addresses = np.concatenate([np.empty(0, np.uint64), *parts])
        order = np.argsort(addresses)
        addresses = addresses[order]
        writers = np.repeat([access.program for access in written], [len(each) for each in parts])[order]
        if np.any((addresses[1:] == addresses[:-1]) & (writers[1:] != writers[:-1])):
            return True
        return any(_reads_of_others(access.program, access.parts(size), addresses, writers) for access in self.read)

    def sums_alone(self, addresses: np.ndarray) -> np.ndarray:
        """Return which addresses are of sums by atomics, and of nothing else that was written."""
        stored, summed = (
            np.concatenate([np.empty(0, np.uint64), *(access.addresses for access in found)])
            for found in (self.stored, self.summed)
        )
        return np.isin(addresses, summed) & ~np.isin(addresses, stored)

    def move(self, tensor: Tensor) -> np.ndarray:
        """The address that the kernel is given for a tensor."""
        names = [name for name, known in self.named.items() if _same_view(known, tensor)]
        argument = _Argument(" or ".join(names) or "a tensor", tensor, len(self.arguments) + 1)
        self.arguments.append(argument)
        return np.array([argument.address], dtype=np.uint64)

    def find(self, pointers: Any, mask: Any, verb: str) -> Any:
        """The pointers, translated to where the tensors are; refused where an active one leaves its tensor."""
        addresses = pointers.data
        active = np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)
        places = addresses >> np.uint64(_APART)
        size = _size_of(pointers)
        moved = addresses
        for place in _different(places):
            if not 0 < place <= len(self.arguments):
                continue  # made of a number, not of an argument
            argument, here = self.arguments[int(place) - 1], places == place
            first = (addresses - np.uint64(argument.address)).astype(np.int64)
            wrong = here & active & ~argument.holds(first, first + size - 1)
            if wrong.any():
                raise OutOfBounds(self._astray(argument, int(first[wrong].ravel()[0]), verb))
            moved = np.where(here, addresses - np.uint64(argument.moved), moved)
        return interpreter.TensorHandle(moved, pointers.dtype)

    def short_offset(self, pointer: Any) -> str:
        place = int(pointer.data.flat[0]) >> _APART
        name = self.arguments[place - 1].name if 0 < place <= len(self.arguments) else "a pointer"
        return f"{self.kernel}: an offset of {name} is a program's number times an argument, in 32 bits"

    def _astray(self, argument: _Argument, offset: int, verb: str) -> str:
        index, shape, strides = offset // argument.size, tuple(argument.tensor.shape), argument.tensor.stride()
        layout = f"{shape} of strides {strides}" if argument.has_gaps else f"{shape}"
        wraps = ": an offset of 32 bits wraps" if index < _WRAPPED else ""
        program = tuple(int(i) for i in interpreter.interpreter_builder.grid_idx)
        return f"{self.kernel} {verb} offset {index} of {argument.name}, which is {layout}{wraps} (program {program})"


def _different(places: np.ndarray) -> np.ndarray:
    """The different numbers, which need no sorting where there is one, as in nearly every access."""
    first = places.ravel()[:1]
    return first if (places == first).all() else np.unique(places)


def _reads_of_others(program: int, read: np.ndarray, written: np.ndarray, writers: np.ndarray) -> bool:
    """Return True if a program reads what another one writes, of addresses in ascending order."""
    first, last = np.searchsorted(written, (read.min(), read.max() + 1))
    if first == last:
        return False
    place = first + np.searchsorted(written[first:last], read).clip(max=last - first - 1)
    return bool(np.any((written[place] == read) & (writers[place] != program)))


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


_launch: _Launch | None = None
_watches: list[Watch] = []
_loops = contextlib.ExitStack()
"""Gives modules of kernels Python's own `range` back."""


def _in_order(program: int, programs: int) -> int:
    return program


def _reversed(program: int, programs: int) -> int:
    return programs - 1 - program


def _shuffled(program: int, programs: int) -> int:
    order = torch.randperm(programs, generator=torch.Generator().manual_seed(programs), device="cpu")
    return int(order[program])


@contextlib.contextmanager
def watched(reorder: bool = False) -> Iterator[Watch]:
    """Check the addresses of every kernel that is interpreted inside, and note its races and atomics.

    Args:
        reorder: Run each launch again with its programs in reversed and in shuffled order, and compare.
    """
    watch = Watch(reorder)
    _watches.append(watch)
    try:
        with contextlib.ExitStack() as patches:
            if len(_watches) == 1 and interpreter is not None:
                patches.callback(_loops.close)
                for owner, name, replacement in _replacements():
                    patches.enter_context(mock.patch.object(owner, name, replacement(getattr(owner, name))))
            yield watch
    finally:
        _watches.remove(watch)


def _replacements() -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
    builder = type(interpreter.interpreter_builder)
    return (
        (interpreter.GridExecutor, "__call__", _watching_launch),
        (interpreter, "_implicit_cvt", _moving_tensors),
        (interpreter, "_patch_lang", patching_once),
        (interpreter, "_get_np_dtype", _knowing_dtypes),
        (interpreter, "_patch_lang_core", _typing_loops),
        (interpreter.InterpretedFunction, "rewrite", _rewriting),
        (interpreter.FunctionRewriter, "ast_transformer", _counting_turns),
        (builder, "set_grid_idx", _reordering),
        (builder, "create_masked_load", _checking_load),
        (builder, "create_masked_store", _checking_store),
        (builder, "create_atomic_rmw", _checking_atomic),
        (builder, "create_atomic_cas", _checking_exchange),
        (builder, "create_get_program_id", _tracing_program),
        (builder, "create_splat", _keeping_trace),
        (builder, "create_broadcast", _keeping_trace),
        (builder, "create_addptr", _checking_offset),
        (builder, "create_maxnumf", _dropping_nan(np.fmax)),
        (builder, "create_minnumf", _dropping_nan(np.fmin)),
    )


def _tell(what: str, words: str) -> None:
    for watch in _watches:
        getattr(watch, what).append(words)


def _watching_launch(original: Any) -> Any:
    def launch(executor: Any, *given: Any, **named_given: Any) -> None:
        signature = inspect.signature(executor.fn)
        named_given = {name: value for name, value in named_given.items() if name in signature.parameters}
        tensors = [value for value in (*given, *named_given.values()) if isinstance(value, Tensor)]
        if not all(map(has_numbers, tensors)):
            return  # as a launch on a GPU does nothing while a fake tensor stands for its result
        args, kwargs = copied_to_host(executor, given, named_given)  # of a CPU's tensors the memory is the same
        bound = signature.bind_partial(*args, **kwargs)
        named = {name: value for name, value in bound.arguments.items() if isinstance(value, Tensor)}

        def run(order: Callable[[int, int], int] = _in_order) -> _Launch:
            global _launch
            tracks = order is _in_order and any(watch.reorder for watch in _watches)
            launch = _launch = _Launch(executor.fn.__name__, named, order, tracks)
            try:
                original(executor, *args, **kwargs)
                return launch
            except interpreter.InterpreterError as error:
                _tell("failed", f"{executor.fn.__name__} fails: {str(error).partition(chr(10))[0]}")
                broken = _broken_promise(error)
                if broken is None:
                    raise
                raise broken from error
            finally:
                _launch = None

        for watch in _watches:
            watch.launches += 1
        if any(watch.reorder for watch in _watches):
            for words, is_race in _order_dependent(run, named):
                _tell("races" if is_race else "reordered_sums", f"{executor.fn.__name__}: {words}")
        else:
            run()
        copy_back(executor, given, args, named_given, kwargs)

    return launch


def _broken_promise(error: BaseException | None) -> BrokenPromise | None:
    while error is not None and not isinstance(error, BrokenPromise):
        error = error.__cause__
    return error


def _order_dependent(run: Callable[..., _Launch], named: dict[str, Tensor]) -> list[tuple[str, bool]]:
    """Run a launch in order, and again in other orders: which elements came out otherwise, and whether it is a race.

    Programs that touch nothing that another one writes need not run again. It is no race where nothing but atomics on
    floats wrote the element: its sum is rounded in the order of the programs.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in named.values()}
    before = {address: storage.clone() for address, storage in storages.items()}
    in_order = run()
    if not in_order.may_depend_on_order():
        return []
    after = {address: storage.clone() for address, storage in storages.items()}
    found: dict[bool, str] = {}
    for order, orders in ((_reversed, "reversed"), (_shuffled, "shuffled")):
        for address, storage in storages.items():
            storage.copy_(before[address])
        run(order)
        for name, tensor in named.items():
            expected = tensor.new_empty(0).set_(
                after[tensor.untyped_storage().data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            differ = _bits(tensor) != _bits(expected)
            if not bool(differ.any()):
                continue
            is_sum = in_order.sums_alone(_addresses(tensor)[differ.numpy()])
            for index, sums in zip(differ.flatten().nonzero().flatten().tolist(), is_sum.tolist(), strict=True):
                words = "it is a sum by atomics" if sums else "they race"
                found.setdefault(
                    not sums, f"element {index} of {name} depends on the order of the programs ({orders}): {words}"
                )
    for address, storage in storages.items():
        storage.copy_(after[address])
    return [(words, is_race) for is_race, words in found.items()]


def _addresses(tensor: Tensor) -> np.ndarray:
    """The machine address of each element."""
    offsets = np.zeros(tuple(tensor.shape), dtype=np.int64)
    for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        offsets += stride * np.arange(size).reshape([-1 if i == axis else 1 for i in range(tensor.dim())])
    return (tensor.data_ptr() + offsets * tensor.element_size()).astype(np.uint64)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()])


def _moving_tensors(original: Any) -> Any:
    def convert(arg: Any) -> Any:
        result = original(arg)
        if _launch is not None and hasattr(arg, "data_ptr"):
            result.handle.data = _launch.move(arg if isinstance(arg, Tensor) else arg.base)  # of another dtype
        elif _launch is not None and type(arg) is int and arg != 1:
            result.handle.data = traced(result.handle.data, frozenset({NUMBER}))
        return result

    return convert


def _reordering(original: Any) -> Any:
    def set_grid_idx(builder: Any, x: int, y: int, z: int) -> None:
        if _launch is not None:
            grid = builder.grid_dim
            _launch.program = _launch.order(int(np.ravel_multi_index((x, y, z), grid)), int(np.prod(grid)))
            x, y, z = (int(i) for i in np.unravel_index(_launch.program, grid))
        original(builder, x, y, z)

    return set_grid_idx


def _checking_load(original: Any) -> Any:
    def load(builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found = _found(pointers, mask, "loads")
        _note("read", found, mask)
        return original(builder, found, mask, *rest, **options)

    return load


def _checking_store(original: Any) -> Any:
    def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found = _found(pointers, mask, "stores to")
        _note("stored", found, mask)
        return original(builder, found, value, mask, *rest, **options)

    return store


def _checking_atomic(original: Any) -> Any:
    def atomic(builder: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found = _found(pointers, mask, "changes")
        if _launch is not None and pointers.get_element_ty().is_floating():
            _tell("float_atomics", f"{_launch.kernel}: tl.atomic_{kind.name.lower()} on floats")
        _note("summed" if kind.name == "FADD" else "stored", found, mask)
        return original(builder, kind, found, value, mask, *rest)

    return atomic


def _checking_exchange(original: Any) -> Any:
    def exchange(builder: Any, pointers: Any, *rest: Any) -> Any:
        everywhere = _Mask(np.ones(pointers.data.shape, dtype=bool))
        found = _found(pointers, everywhere, "changes")
        _note("stored", found, everywhere)
        return original(builder, found, *rest)

    return exchange


def patching_once(original: Any) -> Any:
    """Each function that a kernel calls has Triton look all of its language over for what is not yet interpreted."""
    language = interpreter.tl

    def patch_lang(function: Any) -> Any:
        used = [module for module in (language, language.core) if module in function.__globals__.values()]
        if any(language.core.is_builtin(module.load) for module in used):
            return original(function)
        return _NOTHING_PATCHED

    return patch_lang


_NOTHING_PATCHED = SimpleNamespace(restore=lambda: None)


def _knowing_dtypes(original: Any) -> Any:
    """Triton makes a table of all dtypes whenever it looks one up."""
    known: dict[str, np.dtype] = {}

    def numpy_dtype(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return numpy_dtype


def _typing_loops(original: Any) -> Any:
    def patch_lang_core(lang: Any, *rest: Any) -> None:
        original(lang, *rest)
        lang.range = typed_range

    return patch_lang_core


_rewritten: set[Any] = set()
"""Functions of kernels whose `while` loops count their turns."""


def _rewriting(original: Any) -> Any:
    def rewrite(function: Any) -> Any:
        if function.fn not in _rewritten:
            function.rewritten_fn.pop(function.fn, None)  # as it was before anybody watched
            _rewritten.add(function.fn)
        for watch in _watches:
            watch.kernels.setdefault(function.fn, function)
        rewritten = original(function)
        names = rewritten.__globals__
        if names.get("range") is not typed_range:
            names["range"] = typed_range
            _loops.callback(names.pop, "range")
        return rewritten

    return rewrite


def _counting_turns(original: Any) -> Any:
    return counting_turns(type(original), f"__import__({__name__!r}, fromlist=['_']).counted_turns")()


def counted_turns(test: Callable[[], Any]) -> Iterator[None]:
    """The turns of a kernel's loop, as long as a watch is on no more than its sizes give it."""
    if _launch is None:
        return turns(test, "a kernel", MOST_TURNS)
    sizes = (tensor.numel() for tensor in _launch.named.values())
    return turns(test, _launch.kernel, MOST_TURNS + max(sizes, default=0))


def _tracing_program(original: Any) -> Any:
    def program_id(builder: Any, axis: int) -> Any:
        handle = original(builder, axis)
        handle.data = traced(handle.data, frozenset({PROGRAM}))
        return handle

    return program_id


def _keeping_trace(original: Any) -> Any:
    """Keep the trace through the builder's methods that copy into a new shape; NumPy keeps it through all others."""

    def reshape(builder: Any, *args: Any) -> Any:
        handle = original(builder, *args)
        source = next(arg for arg in args if isinstance(arg, interpreter.TensorHandle))
        handle.data = traced(handle.data, origins_of(source.data))
        return handle

    return reshape


def _checking_offset(original: Any) -> Any:
    def add_offset(builder: Any, pointer: Any, offset: Any) -> Any:
        if _launch is not None and PRODUCT in origins_of(offset.data):
            _tell("short_offsets", _launch.short_offset(pointer))
        return original(builder, pointer, offset)

    return add_offset


def _dropping_nan(ufunc: np.ufunc) -> Callable[[Any], Any]:
    """`tl.maximum` or `tl.minimum` as a GPU has it: of NaN and a number the number, where Triton's NumPy gives NaN."""
    return lambda original: lambda builder, lhs, rhs: builder.binary_op(lhs, rhs, ufunc)


def _note(what: str, pointers: Any, mask: Any) -> None:
    """Note the access of a mask's elements where the launch tracks them."""
    if _launch is None or not _launch.tracks:
        return
    addresses = pointers.data[np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)]
    if addresses.size:
        getattr(_launch, what).append(_Access(_launch.program, addresses, _size_of(pointers)))


def _size_of(pointers: Any) -> int:
    """The bytes of an element that pointers point to."""
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


@dataclass
class _Mask:
    data: np.ndarray


def _found(pointers: Any, mask: Any, verb: str) -> Any:
    return pointers if _launch is None else _launch.find(pointers, mask, verb)
