"""Effects of a graph: the memory that is written, by operators that do not declare it too, and random numbers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import rewriting
from compile_tests.helpers.backend_compare import AOT, outcome, require_unchanged, through
from compile_tests.helpers.fault_programs import WeightedBeforeACheckpoint, randn
from compile_tests.helpers.planted_rules import planted, reasons
from llmk.compiler import Report
from llmk.compiler.effects import UNDECLARED
from llmk.compiler.patterns import Arg, Call, GraphBuilder, KeywordArg

aten = torch.ops.aten
READS_ALONE = {"_batch_norm_no_update", "_native_batch_norm_legit_no_training"}
"""Norms that take running statistics and leave them as they are."""


def norms_with_statistics() -> set[str]:
    """The operators of ATen that take running statistics and do not declare that they write them."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        hidden = [
            x for x in schema.arguments if x.name == "running_mean" and not (x.alias_info and x.alias_info.is_write)
        ]
        if "::" not in name and hidden and not name.endswith(("_backward", "_functional")):
            found.add(name)
    return found - READS_ALONE


def test_all_norms_that_write_undeclared_are_listed() -> None:
    assert norms_with_statistics() == {name for name, written in UNDECLARED.items() if "running_mean" in written}


@pytest.mark.parametrize("name", ["batch_norm", "native_batch_norm", "instance_norm", "batch_norm_update_stats"])
def test_they_do_write(name: str) -> None:
    mean, variance = torch.zeros(4), torch.ones(4)
    given = {
        "input": randn(3, 4, 5).detach(),
        "running_mean": mean,
        "running_var": variance,
        "momentum": 0.1,
        "eps": 1e-5,
        "training": True,
        "use_input_stats": True,
        "cudnn_enabled": False,
        "weight": None,
        "bias": None,
    }
    operator = getattr(aten, name).default
    operator(**{x.name: given[x.name] for x in operator._schema.arguments})
    assert mean.any()
    assert not variance.eq(1).any()


def test_writes_inside_a_checkpointed_region_are_seen_outside() -> None:
    report = require_unchanged(WeightedBeforeACheckpoint(), [randn(2, 4)])
    assert report.replaced == {}
    assert "something that it reads is written in place later" in reasons(report)


def dropped_and_added(x: Tensor, y: Tensor) -> Tensor:
    kept = F.dropout(x)
    return kept + F.dropout(y)


def test_random_operators_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are run without the trial, which would see other numbers too."""

    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        kept = builder(aten.dropout.default, values["x"], values["p"], True)
        return builder(aten.add.Tensor, kept, values["y"])

    dropped = Call("dropout", KeywordArg("x"), Arg("p"), Arg("train"))
    planted(monkeypatch, build, Call("add", dropped, KeywordArg("y")))
    args, report = [randn(3, 4), randn(3, 4, plus=9.0)], Report()
    got = outcome(through(rewriting(report, verify=False)), dropped_and_added, args)
    assert torch.equal(got.values["output 0"], outcome(AOT, dropped_and_added, args).values["output 0"])
    assert "something else draws random numbers in its midst" in reasons(report)
