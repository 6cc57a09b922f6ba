"""Modules that do more than a replacement sees: in-place changes, registering classes, exact types."""

import abc
import copy
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from compile_tests.helpers.gated_units import Unit  # noqa: E402
from llmk.transformers import patch  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_device")


# ---- what stands between an activation and its product


class InPlace(Unit):
    """A unit whose activation is of a tensor that is changed before the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gate(x)
        g = self.act(h)
        h += 1
        return self.down(g * h)


class ByACall(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, u = self.gate(x), self.up(x)
        g = self.act(h)
        u.add_(h)
        h.mul_(2)
        y = g * u
        return self.down(y)


class ByAnAlias(Unit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gate(x)
        k = h.view(-1, 8)
        g = self.act(h)
        u = torch.nn.functional.relu(k, inplace=True)
        return self.down(g * u.view_as(g))


class ByAModule(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gate(x)
        g = self.act(h)
        u = self.relu(h)
        return self.down(g * u)


@pytest.mark.parametrize("unit", [InPlace, ByACall, ByAnAlias, ByAModule])
def test_an_activation_of_what_is_changed_before_the_product_is_not_moved(unit: type[Unit]):
    model, x = unit(), torch.randn(3, 8)
    original = copy.deepcopy(model)
    patch(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-6)


# ---- residual sums of other things, and classes


class Plus(nn.Module):
    def __init__(self, plus: Any) -> None:
        super().__init__()
        self.norm, self.plus = nn.RMSNorm(8, eps=1e-6), plus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.plus
        y = self.norm(h)
        return y + h


@pytest.mark.parametrize("plus", [2.0, True, torch.tensor(2.0)], ids=str)
def test_a_number_and_a_tensor_before_a_norm(plus: Any):
    model, x = Plus(plus), torch.randn(3, 8)
    want = model(x)
    assert patch(model).replaced == {"norm": 1, "residual": 1}
    torch.testing.assert_close(model(x), want)


NAMES: dict[str, type] = {}


class Meta(abc.ABCMeta):
    """A metaclass that wants each name once."""

    def __init__(cls, name: str, bases: Any, names: Any, **more: Any) -> None:
        super().__init__(name, bases, names)
        if name in NAMES:
            raise TypeError(f"{name} is there")
        NAMES[name] = cls


class OfMeta(Unit, metaclass=Meta):
    pass


class Registers(Unit):
    def __init_subclass__(cls, *, key: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        NAMES[key] = cls


class Registered(Registers, key="registered"):
    pass


@pytest.mark.parametrize("unit", [OfMeta, Registered])
def test_classes_that_register_their_subclasses(unit: type[Unit]):
    model, before = unit(), dict(NAMES)
    assert patch(model).replaced == {"mlp": 1}
    assert before == NAMES
    assert isinstance(model, unit)
    assert isinstance(unit(), unit)  # which a metaclass of abstract classes remembers
    twin = copy.deepcopy(model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(twin(x), model(x))
    assert before == NAMES


class Dispatches(nn.Module):
    """A module that goes by the exact types of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.RMSNorm(8, eps=1e-6), {nn.RMSNorm: 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if type(self.norm) is nn.RMSNorm else 2 * self.norm(x)


class ByClass(Dispatches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.norm.__class__ in (nn.LayerNorm, nn.RMSNorm) else 2 * self.norm(x)


class ByTable(Dispatches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table.get(type(self.norm), 1.0) * self.norm(x)


class ByName(Dispatches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if type(self.norm).__name__ == "RMSNorm" else x


@pytest.mark.parametrize("cls", [Dispatches, ByClass, ByTable, ByName])
def test_modules_whose_exact_type_is_asked_for_are_left(cls: type[Dispatches]):
    model, x = cls(), torch.randn(3, 8)
    want = model(x)
    report = patch(model)
    torch.testing.assert_close(model(x), want)
    if cls is ByName:
        assert report.replaced == {"norm": 1}
    else:
        assert report.left["norm"] == f"the forward of {cls.__name__} asks for its exact type"
