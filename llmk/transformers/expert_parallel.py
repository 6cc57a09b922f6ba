"""Expert parallelism for the mixtures of transformers: each process has some of every layer's experts.

Source: GShard, 2020, https://arxiv.org/abs/2006.16668. What is sent, and when, is `llmk.nn.expert_parallel_moe`'s.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmk.nn.expert_parallel import EXCHANGES
from llmk.registry import check_option
from llmk.transformers.experts import EXCHANGE, NAME, gate_form, is_packed


def expert_parallel(model: Any, mesh: DeviceMesh, *, exchange: str = "all_gather") -> None:
    """Spread the experts of a model's mixtures over the processes of a mesh, in place.

    The experts become DTensors, an equal number in each process; all other parameters stay plain tensors, alike in
    every process. Each process feeds the model a batch of its own. Gradients of experts are then those of the sum of
    the processes' losses, and those of other parameters still are of its own loss: sum them over the processes. Where
    they are averaged, as `DistributedDataParallel` does, divide the experts' by the number of processes. An optimizer
    needs a group of parameters for the experts, and one for the rest.

    Args:
        model: A model of transformers with packed experts, the same in every process, before it is wrapped or has run
            compiled. Its experts are computed by `experts_implementation="llmk"` from then on.
        mesh: A mesh of one dimension.
        exchange: How tokens get to their experts, as in `llmk.nn.expert_parallel_moe`. "all_gather" needs batches of
            the same number of tokens.

    Raises:
        ValueError: The mesh has more than one dimension, or the option is none; the model has no packed experts, ones
            whose gate `moe_experts` does not know, or a number of them that cannot be shared evenly.
    """
    check_option("exchange", exchange, EXCHANGES)
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}")
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if is_packed(module)}
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no packed experts")
    for name, module in found.items():
        count = module.down_proj.shape[0]
        if gate_form(module) is None:
            raise ValueError(f"model: cannot spread {name}, whose gate is none that moe_experts knows")
        if count % mesh.size():
            raise ValueError(f"model: {mesh.size()} processes cannot share the {count} experts of {name}")
    for module in found.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        setattr(module, EXCHANGE, exchange)
    model.set_experts_implementation(NAME)
