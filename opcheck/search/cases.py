"""The search's calls: drawn from an operator's own samples, one for each seed.

A sample is a template: which arguments are floating, which are indices, what they have in common (`Domain`), which axes
are as long as which others. A case changes some of it: values by a regime, options to their ends, their defaults and
in pairs, an axis to a length at which something ends, two tensors to one, the incoming gradients.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import call, elements, incoming_gradients
from llmk.opcheck.inputs import rebound
from llmk.opcheck.search.regimes import DECIDING, REGIMES, Domain, Draw, Regime, domain_of, masked, ordinary, values_of
from llmk.registry import Op, Sample

LENGTHS = (0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 65, 128)
FLOATS = (0.0, 1.0, 0.5, 1e-6, 2.0, -1.0, 100.0)
Grads = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A call of the search's: how it came about, and whether its numbers are at what an operator decides by."""

    sample: Sample
    grads: Grads
    seed: int
    template: Sample
    decides: bool = False
    changed: tuple[str, ...] = ()


def unit_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones(o.shape, dtype=o.dtype, device=o.device) for o in outputs]


def one_gradient(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Zero but for one element of each, as where one token counts."""
    grads = [torch.zeros(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
    for grad in grads:
        grad.flatten()[:1] = 1.0
    return grads


def large_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients as a loss scale makes them."""
    return [1024 * grad for grad in incoming_gradients(outputs)]


GRADS: tuple[Grads, ...] = (incoming_gradients, incoming_gradients, unit_gradients, one_gradient, large_gradients)


class Cases:
    """All calls of an operator in a dtype, by seed: `cases[17]` is the same call whenever it is asked for."""

    def __init__(self, op: Op, device: torch.device, dtype: torch.dtype) -> None:
        self.op, self.dtype = op, dtype
        torch.manual_seed(0)
        samples = list(op.samples(device, dtype))
        if op.resized is not None:
            samples += [op.resized(rows, device, dtype) for rows in (1, 2, 5)]
        self.samples = samples
        self._domains: dict[tuple[Any, ...], Domain] = {}
        self.specials = tuple(
            value for name, values in self.options.items() for value in values if isinstance(value, float) and value
        )

    @cached_property
    def options(self) -> dict[str, list[Any]]:
        """Each option's values: those of the samples, its default, its ends, and what an error says that it may be."""
        found: dict[str, list[Any]] = {}
        for argument in self.op.schema.arguments:
            seen = [self.op.bind(sample).get(argument.name, _LEFT) for sample in self.samples]
            kinds = {type(value) for value in seen if value is not _LEFT and value is not None}
            default = argument.default_value if argument.has_default_value() else None
            kinds |= {type(default)} if default is not None else set()
            values = [_LEFT] if argument.has_default_value() else []
            values += [value for value in seen if isinstance(value, bool | int | float | str)]
            if bool in kinds:
                values += [False, True]
            elif float in kinds:
                values += FLOATS
            elif int in kinds:
                values += [0, 1, 2, -1]
            elif str in kinds:
                values += self._named_in_error(argument.name)
            elif Tensor in kinds and values:
                values.append(_GIVEN)
            unique = list({(type(v).__name__, str(v)): v for v in values}.values())
            if len(unique) > 1:
                found[argument.name] = unique
        return found

    def _named_in_error(self, option: str) -> list[str]:
        sample = self.samples[0]
        try:
            call(self.op, rebound(self.op, sample, self.op.bind(sample) | {option: "?"}, ""), ())
        except Exception as error:
            return [word for word in re.findall(r"'([^']+)'", str(error)) if word != "?"]
        return []

    @cached_property
    def pairs(self) -> list[dict[str, Any]]:
        """Every two options with every two of their values, in an order that mixes them."""
        pairs = [
            {a: x, b: y}
            for a, b in itertools.combinations(self.options, 2)
            for x in self.options[a]
            for y in self.options[b]
        ]
        Random(0).shuffle(pairs)
        return pairs or [{name: value} for name, values in self.options.items() for value in values]

    def domain(self, name: str, values: dict[str, Any]) -> Domain:
        """Return the common properties of an argument's samples with the same switches, or of all if there are none."""
        switches = self.switches(values)
        key = (name, *switches.items())
        if key not in self._domains:
            bounds = [self.op.bind(sample) for sample in self.samples]
            alike = [bound for bound in bounds if self.switches(bound) == switches]
            tensors = [bound[name] for bound in alike or bounds if isinstance(bound.get(name), Tensor)]
            self._domains[key] = domain_of(tensors or [values[name]], self.specials)
        return self._domains[key]

    def switches(self, values: dict[str, Any]) -> dict[str, bool]:
        """The options that are true or false, which may say what an argument means."""
        return {name: value for name, value in self.with_defaults(values).items() if isinstance(value, bool)}

    def with_defaults(self, values: dict[str, Any]) -> dict[str, Any]:
        return {a.name: a.default_value for a in self.op.schema.arguments if a.has_default_value()} | values

    @cached_property
    def fixed(self) -> set[str]:
        """Integer arguments that are sorted or permutations in a sample: such as offsets, which cannot be redrawn."""
        ordered: dict[str, bool] = {}
        for sample in self.samples:
            for name, value in self.op.bind(sample).items():
                if isinstance(value, Tensor) and not value.is_floating_point() and value.numel() > 2:
                    ordered[name] = ordered.get(name, True) and _is_ordered(value.flatten())
        return {name for name, always in ordered.items() if always}

    def ignored(self, values: dict[str, Any]) -> int | None:
        """The target of a row that does not count in a call: its `ignore_index`, if the operator has one."""
        return self.with_defaults(values).get("ignore_index")

    def __getitem__(self, seed: int) -> Case:
        return _Making(self, seed).case()


@dataclass(frozen=True)
class _Word:
    """Stands for the value of an option."""

    word: str

    def __repr__(self) -> str:
        return self.word


_LEFT: Any = _Word("its default")
"""The option is left out of the call."""
_GIVEN: Any = _Word("given")
"""A tensor is the sample's."""


class _Making:
    """One case on its way."""

    def __init__(self, cases: Cases, seed: int) -> None:
        self.cases, self.seed = cases, seed
        number = zlib.crc32(f"{cases.op.name} {cases.dtype} {seed}".encode())
        self.random = Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.pair = cases.pairs[seed // 2 % len(cases.pairs)] if seed % 2 and cases.pairs else {}
        bounds = [cases.op.bind(sample) for sample in cases.samples]
        given = {name: value for name, value in self.pair.items() if value is not _LEFT}
        fits = [
            cases.switches({n: v for n, v in bound.items() if n not in self.pair} | given) == cases.switches(bound)
            for bound in bounds
        ]
        weights = [fit / (30 + elements(cases.op, s)) for fit, s in zip(fits, cases.samples, strict=True)]
        if not any(fits):
            weights = [1.0] * len(fits)
        self.template = self.random.choices(cases.samples, weights)[0]
        self.values = cases.op.bind(self.template)
        self.changed: list[str] = []
        self.decides = False

    def case(self) -> Case:
        plan = self.random.random()
        self.set_options(self.pair)
        if self.pair and plan < 0.3:
            return self.done()  # on the sample's own numbers
        if plan > 0.6:
            self.resize()
        self.redraw_integers()
        self.redraw_floats()
        if self.random.random() < 0.1:
            self.nan_in_ignored_rows()
        if self.random.random() < 0.05:
            self.alias()
        return self.done()

    def done(self) -> Case:
        why = f"seed {self.seed}: {self.template.why}" + "".join(f"; {change}" for change in self.changed)
        grads = self.random.choice(GRADS)
        sample = rebound(self.cases.op, self.template, self.values, why)
        return Case(sample, grads, self.seed, self.template, self.decides, tuple(self.changed))

    def set_options(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if value is _LEFT:
                self.values.pop(name, None)
            elif value is not _GIVEN:
                self.values[name] = value
            self.changed.append(f"{name}={value!r}")

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def floating(self) -> list[str]:
        return [name for name, value in self.tensors().items() if value.is_floating_point()]

    def resize(self) -> None:
        """Make every axis of one length another: their own numbers, repeated or cut; indices stay below it."""
        lengths = sorted({size for tensor in self.tensors().values() for size in tensor.shape})
        if not lengths or self.cases.fixed & self.values.keys():
            return
        old, new = self.random.choice(lengths), self.random.choice(LENGTHS)
        for name, tensor in self.tensors().items():
            for axis in range(tensor.dim()):
                if tensor.shape[axis] == old:
                    index = torch.arange(new, dtype=torch.int64, device=tensor.device) % max(old, 1)
                    tensor = (
                        tensor.index_select(axis, index)
                        if old
                        else tensor.new_zeros((*tensor.shape[:axis], new, *tensor.shape[axis + 1 :]))
                    )
            if not tensor.is_floating_point() and tensor.dtype != torch.bool and new:
                tensor = (
                    torch.where(tensor >= new, tensor % new, tensor)
                    if old > int(tensor.max() if tensor.numel() else 0)
                    else tensor
                )
            self.values[name] = tensor
        self.changed.append(f"axes of {old} made {new}")

    def redraw_integers(self) -> None:
        ignored = self.cases.ignored(self.values)
        for name, tensor in self.tensors().items():
            if tensor.is_floating_point() or not tensor.numel() or name in self.cases.fixed:
                continue
            choice = self.random.random()
            if choice < 0.4:
                continue
            known = tensor.flatten()
            rows_differ = tensor.dim() > 1 and all(row.unique().numel() == row.numel() for row in _rows(tensor))
            if rows_differ and tensor.shape[-1] > 1:
                order = torch.randint(len(_rows(tensor)), (len(_rows(tensor)),), generator=self.generator, device="cpu")
                self.values[name] = _rows(tensor)[order.to(tensor.device)].reshape(tensor.shape)
            elif choice < 0.55 and ignored is not None and tensor.dtype == torch.int64:
                self.values[name] = torch.full_like(tensor, ignored)
            elif choice < 0.65:
                self.values[name] = torch.full_like(tensor, known[0].item())
            else:
                index = torch.randint(len(known), tuple(tensor.shape), generator=self.generator, device="cpu")
                self.values[name] = known[index.to(tensor.device)]
            self.changed.append(f"{name} redrawn")

    def redraw_floats(self) -> None:
        names = self.floating()
        most = min(len(names), self.random.choice((1, 1, 2, len(names))))
        for name in self.random.sample(names, most):
            self.redraw(name)

    def redraw(self, name: str) -> None:
        tensor = self.values[name]
        domain = self.cases.domain(name, self.values)
        draw = Draw(self.generator, self.random, tensor.dtype, domain)
        regimes = REGIMES + ((masked,) if domain.has_infinity or "mask" in name or "bias" in name else ())
        regime = self.random.choice(regimes)
        values = values_of(regime, draw, tensor)
        if tensor.dim() > 1 and self.random.random() < 0.25:  # such rows among others
            values = self.mixed(values, draw, self.random.choice((ordinary, regime, self.random.choice(regimes))))
        self.decides |= regime.__name__ in DECIDING
        self.values[name] = values
        self.changed.append(f"{name} {regime.__name__.replace('_', ' ')}")

    def mixed(self, values: Tensor, draw: Draw, other: Regime) -> Tensor:
        rows = torch.rand((*values.shape[:-1], 1), generator=self.generator, device="cpu").to(values.device) < 0.5
        return torch.where(rows, values, values_of(other, draw, values))

    def nan_in_ignored_rows(self) -> None:
        """NaN or an infinity in the rows of a tensor that an index says to ignore."""
        ignored = self.cases.ignored(self.values)
        for name, tensor in self.tensors().items():
            if tensor.dtype != torch.int64 or name in self.cases.fixed or ignored is None or not tensor.numel():
                continue
            hidden = torch.rand(tuple(tensor.shape), generator=self.generator, device="cpu").to(tensor.device) < 0.4
            self.values[name] = tensor.masked_fill(hidden, ignored)
            special = self.random.choice((float("nan"), float("inf"), -float("inf")))
            for other in self.floating():
                value = self.values[other]
                if value.shape[: tensor.dim()] == tensor.shape and self.random.random() < 0.7:
                    where = hidden.reshape(*hidden.shape, *[1] * (value.dim() - hidden.dim()))
                    self.values[other] = value.masked_fill(where, special)
                    self.changed.append(f"{special} in the rows of {other} that {name} ignores")

    def alias(self) -> None:
        """Two arguments that are one tensor: both with a gradient, or neither."""
        wanted = set(self.cases.op.differentiable)
        for a, b in itertools.combinations(self.floating(), 2):
            x, y = self.values[a], self.values[b]
            if x.shape == y.shape and x.dtype == y.dtype and (a in wanted) == (b in wanted):
                self.values[b] = x
                self.changed.append(f"{b} is {a}")
                return


def _is_ordered(flat: Tensor) -> bool:
    """Return True if numbers never fall, or are each number below their count once."""
    if flat.dtype == torch.bool:
        return False
    return bool((flat.diff() >= 0).all()) or torch.equal(
        flat.sort().values.long(), torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
