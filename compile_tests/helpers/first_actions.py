"""The first action of a fresh model: a plain step, or one of many other things that a training script may begin with.

The state that llmk makes late (what the gate of a mixture computes, a gate's function, a cached launch) must not depend
on it. So each action is run on a fresh model and on the same one without llmk, and then a plain step on both.
"""

import contextlib
import copy
import functools
import gc
import io
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD, rewriting
from compile_tests.helpers.observers import Operators
from llmk.compiler import Report
from llmk.transformers import patch

Outcome = dict[str, Tensor]
"""The loss and each gradient, or what the action returns instead."""
Run = Callable[..., Any]
Action = Callable[[Any, Run, dict[str, Tensor]], Outcome]

EXACT, ROUNDED = 1e-5, 5e-2
"""The distance from the model without llmk, relative to the largest gradient: in float32, and in bfloat16."""
SAVED = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
"""The operators whose results a selective checkpoint keeps."""


class NotRun(Exception):
    """Why the action does not run on the model without llmk."""


def step(model: nn.Module, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    model.zero_grad()
    loss = run(**inputs).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    return {"loss": loss.detach(), **{name: whole(g).detach().clone() for name, g in gradients.items()}}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def checkpointed(model: Any, run: Run, inputs: dict[str, Tensor], **options: Any) -> Outcome:
    model.gradient_checkpointing_enable(options)
    try:
        return step(model, run, inputs)
    finally:
        model.gradient_checkpointing_disable()


def compiled(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    return step(model, run if run is not model else torch.compile(model, backend="aot_eager"), inputs)


def autocast(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    with torch.autocast("cpu", torch.bfloat16):
        return step(model, run, inputs)


def without_gradients(model: Any, run: Run, inputs: dict[str, Tensor], mode: Any) -> Outcome:
    with mode():
        return {"loss": run(**inputs).loss.clone()}


def fake_tensors(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    """A forward pass that computes shapes alone."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        run(**inputs)
    return {}


def generate(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    ids = inputs["input_ids"][:, :4]
    options = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    model.eval()
    try:
        return {"ids": model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options).float()}
    finally:
        model.train()


def copied(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    twin = copy.deepcopy(model)
    return step(twin, of_wrapped(twin, model, run), inputs)


def saved(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    model.load_state_dict(twin.state_dict())
    return step(twin, of_wrapped(twin, model, run), inputs)


def second_thread(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    found: list[Outcome | BaseException] = []

    def work() -> None:
        try:
            found.append(step(model, run, inputs))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A group of one process, in which nothing that was made may outlive the block.

    DDP's reducer holds the group. If it is the last to do so, the group is destroyed with the interpreter's lock held,
    waits for gloo's threads, and those may wait for the lock.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def of_wrapped(wrapped: nn.Module, model: nn.Module, run: Run) -> Run:
    """The wrapped model, run as the model was."""
    return wrapped if run is model else by_backend(wrapped)


def ddp(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    with one_rank():
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = step(model, of_wrapped(DistributedDataParallel(model), model, run), inputs)
        model.gradient_checkpointing_disable()
        return found


def fsdp(model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    """The copy's step: what is sharded stays so."""
    twin = copy.deepcopy(model)
    with one_rank():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        twin.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers_of(twin):
            fully_shard(layer, mesh=mesh)
        fully_shard(twin, mesh=mesh)
        return step(twin, of_wrapped(twin, model, run), inputs)


def layers_of(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=[]))


ACTIONS: dict[str, Action] = {
    "plain step": step,
    "checkpointed": functools.partial(checkpointed, use_reentrant=False),
    "reentrant": functools.partial(checkpointed, use_reentrant=True),
    "selective": functools.partial(
        checkpointed,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, list(SAVED)),
    ),
    "compiled": compiled,
    "autocast": autocast,
    "no_grad": functools.partial(without_gradients, mode=torch.no_grad),
    "inference_mode": functools.partial(without_gradients, mode=torch.inference_mode),
    "fake tensors": fake_tensors,
    "generate": generate,
    "deepcopy": copied,
    "save and load": saved,
    "DDP": ddp,
    "FSDP2": fsdp,
    "second thread": second_thread,
}


def operators_of(model: nn.Module, inputs: dict[str, Tensor]) -> Counter[str]:
    with Operators() as seen:
        step(model, model, inputs)
    return seen.found


def patched(model: Any) -> Run:
    patch(model)
    return model


def with_experts(model: Any) -> Run:
    model.set_experts_implementation("llmk")
    return model


def by_backend(model: Any) -> Run:
    return torch.compile(model, backend=rewriting(Report(), then=THROUGH_AUTOGRAD))


WAYS: dict[str, Callable[[Any], Run]] = {
    "patched": patched,
    "experts_implementation": with_experts,
    "backend": by_backend,
}
"""Functions that make a model use llmk, and run it."""


def apart(got: Outcome, want: Outcome, tolerance: float) -> str:
    """Name where they differ, or nothing; a gradient's error is that of the largest one, from which it came."""
    largest = max(float(x.abs().max()) for x in want.values()) if want else 0.0
    for name in want.keys() | got.keys():
        zeros = torch.zeros(())
        a, b = got.get(name, zeros).float(), want.get(name, zeros).float()
        if not float((a - b).abs().max()) <= tolerance * max(largest, 1e-30):
            return name
    return ""


def first_action(name: str, way: str, original: Any, inputs: dict[str, Tensor]) -> str:
    """Tell where a fresh copy of `original` with llmk differs from it; nothing if all is right.

    Args:
        name: One of ACTIONS.
        way: One of WAYS.
        original: A model, in training mode.
        inputs: Of a step.

    Raises:
        NotRun: The model does not do it without llmk; the step after it is right.
    """
    action, model, fresh = ACTIONS[name], copy.deepcopy(original), copy.deepcopy(original)
    want, why = tried(action, original, original, inputs)
    want_after = seeded(step, original, original, inputs)
    try:
        run = WAYS[way](model)
        got, _ = tried(action, model, run, inputs) if want is None else (seeded(action, model, run, inputs), None)
        got_after = seeded(step, model, run, inputs)
        counts = [Counter(), Counter()]
        if run is model:  # a compiled one is not run under a mode
            counts = [operators_of(each, inputs) for each in (model, WAYS[way](fresh))]
    except Exception as error:
        return words(error)
    if want is not None and got is not None and (where := apart(got, want, ROUNDED if name == "autocast" else EXACT)):
        return f"its {where} differs"
    if where := apart(got_after, want_after, EXACT):
        return f"after it a step's {where} differs"
    if counts[0] != counts[1]:
        return f"after it a step calls {counts[0]}, else {counts[1]}"
    if why is not None:
        raise NotRun(words(why))
    return ""


def seeded(action: Action, model: Any, run: Run, inputs: dict[str, Tensor]) -> Outcome:
    """Run the action with the same random numbers each time: PhiMoE's gate draws its experts in training."""
    torch.manual_seed(0)
    return action(model, run, inputs)


def tried(action: Action, model: Any, run: Run, inputs: dict[str, Tensor]) -> tuple[Outcome | None, Exception | None]:
    try:
        return seeded(action, model, run, inputs), None
    except Exception as error:
        return None, error


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:160]
