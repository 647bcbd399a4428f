"""
Several processes of torchrun that train one model: gradients, state and mistakes cross the ranks here and only here.

    ddp    every rank holds the model; gradients are averaged (Li et al. 2020, arXiv:2006.15704)
    fsdp   every rank holds a part of each weight, its gradient and its moments; a block is put together when it is
           needed (Zhao et al. 2023, arXiv:2304.11277; torch's fully_shard)

Either way a checkpoint holds whole tensors, so that a run moves between one process, ddp and fsdp.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError


def spread(model, how, runtime):
    """Share `model` out among the ranks, in place, before its optimizers are made: fsdp only."""
    if runtime.world_size == 1 or how == "ddp":
        return
    mesh = dist.init_device_mesh(runtime.device.split(":")[0], (runtime.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trained(model, compile, runtime):
    """The module whose forward and backward train `model`: compiled if asked, gradients averaged over the ranks."""
    net = torch.compile(model, dynamic=False) if compile else model
    if runtime.world_size > 1 and not isinstance(model, FSDPModule):
        net = DistributedDataParallel(net)
    return net


def accumulating(net, model, last):
    """The context of one micro-batch, forward and backward: gradients cross the ranks after the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return net.no_sync() if isinstance(net, DistributedDataParallel) and not last else nullcontext()


def total(value, runtime):
    """The sum of a tensor over the ranks, whole on each."""
    if runtime.world_size > 1:
        value = value.to(runtime.device)
        dist.all_reduce(value)
    return value


def whole(tensor):
    """A tensor that may be shared out among the ranks, in one piece."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main_first(work, runtime):
    """What work() returns on rank 0, None elsewhere; if it is a UserError there, every rank ends with it, and none
    is left waiting for the others."""
    result = error = None
    if runtime.main:
        try:
            result = work()
        except UserError as mistake:
            error = mistake
    status = torch.tensor(0 if error is None else error.status, device=runtime.device)
    if runtime.world_size > 1:
        dist.broadcast(status, 0)
    if error is not None:
        raise error
    if status.item():
        mistake = UserError("rank 0 cannot go on", "torchrun", "see its error")
        mistake.status = status.item()
        raise mistake
    return result


# ---------------------------------------------------------------- state, whole


def gather(model, optimizers, runtime):
    """({name: weight or buffer}, {"parameter name/state name": tensor}), whole: on the CPU of rank 0 where ranks
    share them, else as they are. Every rank must call it; a tied weight comes once."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    options = StateDictOptions(full_state_dict=True, cpu_offload=runtime.world_size > 1)
    weights = {
        name: tensor
        for name, tensor in get_model_state_dict(model, options=options).items()
        if name in once
    }
    # torch makes up the state of an optimizer that has taken no step by taking one, which then counts
    begun = any(optimizer.state for optimizer in optimizers)
    state = (
        get_optimizer_state_dict(model, optimizers, options=options).get("state", {})
        if begun
        else {}
    )  # nothing on other ranks
    return weights, {
        f"{name}/{key}": value for name, values in state.items() for key, value in values.items()
    }


def scatter(model, optimizers, tensors):
    """Put optimizer state, whole as gather returns it, into the optimizers of `model`, whatever its layout."""
    if not tensors:  # saved before the first step
        return
    state = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = value
    groups = get_optimizer_state_dict(model, optimizers)["param_groups"]
    set_optimizer_state_dict(
        model,
        optimizers,
        {"state": state, "param_groups": groups},
        options=StateDictOptions(full_state_dict=True),
    )
