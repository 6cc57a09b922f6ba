"""A snapshot of what a change of the code's structure must leave as it is, and its comparison with an earlier one.

    python -m tools.snapshot write before.json
    python -m tools.snapshot compare before.json  # with what is now; exits with 1 if they differ

It has the signatures of what users import, the schemas of all operators, the names of opcheck's promises, and hashes of
the bits of the results of each record's samples, and of one call of each loss, on a CPU, with their gradients. Both
must be taken on the same machine with the same number of threads: PyTorch's products depend on them.
"""

import argparse
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import llmk.functional
import llmk.losses
import llmk.nn
from compile_tests.helpers.loss_calls import LOSSES, given
from llmk.opcheck.calls import call
from llmk.opcheck.promises.table import GPU_PROMISES, INTERPRETER_PROMISES, ON_REQUEST, PROMISES
from llmk.registry import OPS, Op
from llmk.registry.private.operators import schema_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def signatures() -> Iterator[tuple[str, str]]:
    for module in (llmk.functional, llmk.losses, llmk.nn):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found) or (isinstance(found, type) and issubclass(found, torch.nn.Module)):
                yield f"{module.__name__}.{name}", str(inspect.signature(found))


def schemas() -> Iterator[tuple[str, str]]:
    for op in OPS.values():
        for each in (op, *op.kernel_ops):
            schema = str(schema_of(each.overload))
            yield schema.partition("(")[0], schema


def promises() -> Iterator[tuple[str, str]]:
    for promise in (*PROMISES, *INTERPRETER_PROMISES, *ON_REQUEST, *GPU_PROMISES):
        yield promise.__name__, inspect.cleandoc(promise.__doc__ or "")


def bits(tensors: Iterable[Tensor | None]) -> str:
    """Return a hash of the tensors' bits, dtypes and shapes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{None if tensor is None else (tensor.dtype, tuple(tensor.shape))}".encode())
        if tensor is not None:
            digest.update(bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def results_of(op: Op) -> Iterator[tuple[str, str]]:
    for dtype in DTYPES:
        torch.manual_seed(0)
        for i, sample in enumerate(op.samples(CPU, dtype) if dtype in op.dtypes else ()):
            yield f"{op.name}[{str(dtype).removeprefix('torch.')}, {i}]: {sample.why}", bits(call(op, sample).results())


def results_of_loss(name: str) -> Iterator[tuple[str, str]]:
    (input, weight, target), options = given(name, [5, 3, 6, 2], CPU)
    for dtype in DTYPES:
        x, w = (tensor.detach().to(dtype).requires_grad_() for tensor in (input, weight))
        alike = {
            key: value.to(dtype) if isinstance(value, Tensor) and key.endswith(("_input", "_linear_weight")) else value
            for key, value in options.items()
        }
        lists = {
            key: [each.to(dtype) for each in value]
            for key, value in options.items()
            if isinstance(value, list) and key in ("teacher_input", "teacher_linear_weight")
        }
        loss, metrics = LOSSES[name][0](x, w, target, **alike | lists)
        loss.backward()
        hashed = bits([loss, x.grad, w.grad, *metrics.values()])
        yield f"losses.{name}[{str(dtype).removeprefix('torch.')}]", f"{hashed} {' '.join(metrics)}"


def snapshot(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the snapshot, with the results of the operators and losses of these names."""
    results = {}
    for name in names:
        results |= results_of(OPS[name]) if name in OPS else results_of_loss(name)
    parts = {"signatures": signatures, "schemas": schemas, "promises": promises}
    return {name: dict(part()) for name, part in parts.items()} | {"results": results}


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield a line for each thing that is not what it was; results that `after` did not ask for are not compared."""
    for part, now in after.items():
        then = before[part]
        for name in sorted({*now, *then} if part != "results" else now):
            if now.get(name) != then.get(name):
                yield f"{part}: {name}\n  before {then.get(name, 'not there')}\n  after  {now.get(name, 'not there')}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.snapshot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path, help="the snapshot, as JSON")
    names, words = [*OPS, *LOSSES], "operators and losses whose results it has"
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=words)
    options = parser.parse_args()
    taken = snapshot(options.only or [*OPS, *LOSSES])
    if options.action == "write":
        options.file.write_text(json.dumps(taken, indent=1) + "\n")
        return 0
    found = list(differences(json.loads(options.file.read_text()), taken))
    print(*found, f"{len(found)} differences, {len(taken['results'])} results", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
