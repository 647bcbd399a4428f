"""
Training one model in several processes of torchrun: how the ranks exchange gradients, state and
errors. common/runtime.py starts them and agrees on a stop.

    ddp    every rank holds the model; gradients are averaged (Li et al. 2020, arXiv:2006.15704)
    fsdp   every rank holds a part of each weight, its gradient and its moments; a block is
           gathered when it is needed (Zhao et al. 2023, arXiv:2304.11277; torch's fully_shard)

A checkpoint always holds whole tensors, so that a run can move between one process, ddp and fsdp.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from training.optim import OPTIMIZER

# torch.distributed.checkpoint and .fsdp take a second to import. The functions that need them
# import them, so that --help and a mistyped key need not wait.


def check_layout(config, runtime):
    """Raise UserError if a TrainConfig cannot run on this number of ranks."""
    ranks = runtime.world_size
    if config.gradient_accumulation_steps % ranks and not config.eval_only:
        steps = config.gradient_accumulation_steps
        what = f"gradient_accumulation_steps={steps} is not divisible by {ranks} ranks"
        raise UserError(what, "torchrun", "make it a multiple of the number of processes")
    if config.parallel == "ddp" or ranks == 1:
        return
    fix = "choose --parallel=ddp, or --optimizer=adamw --dtype=bfloat16"
    if OPTIMIZER[config.optimizer].takes_matrices_only:
        what = f"{config.optimizer} needs whole matrices, and fsdp shards them"
        raise UserError(what, "parallel=fsdp", fix)
    if config.dtype == "float16":
        what = "each rank would scale a float16 loss its own way, and fsdp shards the weights"
        raise UserError(what, "parallel=fsdp", fix)


def place(model, how, runtime):
    """Move `model` to the rank's device; with fsdp only the rank's part of each weight, block by
    block. Call it before making the optimizers."""
    if runtime.world_size == 1 or how == "ddp":
        model.to(runtime.device)
        return
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(runtime.device_kind, (runtime.world_size,))
    # Weights stay in float32, as in ddp. The last block stays gathered: the head may read it.
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=block is not model.blocks[-1])
    fully_shard(model, mesh=mesh)


def is_sharded(model):
    """Whether fsdp has sharded a model: fully_shard adds this method to it."""
    return hasattr(model, "set_requires_gradient_sync")


def with_ddp(net, model, runtime, accumulates):
    """`net` in DDP, whose backward pass averages the gradients over the ranks; `net` itself for one
    process, and for fsdp, which averages them too. `accumulates`: a rank has several micro-batches
    per step."""
    if runtime.world_size == 1 or is_sharded(model):
        return net
    # torch's static_graph fails where the first backward pass is within no_sync(). Buffers are not
    # copied from rank 0: experts count in them the tokens of their own rank.
    options = dict(gradient_as_bucket_view=True, broadcast_buffers=False)
    return DistributedDataParallel(net, static_graph=not accumulates, **options)


def accumulating(net, model, last):
    """The context for the forward pass of one micro-batch. The ranks exchange gradients after its
    backward pass only if it is the last one."""
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
    if isinstance(net, DistributedDataParallel) and not last:
        return net.no_sync()
    return nullcontext()


def all_reduce_sum(value, runtime):
    """The sum over the ranks of a tensor or a number; a tensor, if there are several ranks. Then it
    may replace the values of the given tensor."""
    if runtime.world_size > 1:
        if not torch.is_tensor(value):
            value = torch.full((), value, device=runtime.device)
        value = value.to(runtime.device)
        dist.all_reduce(value)
    return value


def main_first(work, runtime):
    """Call work() on rank 0 while the others wait. Returns its result on rank 0, None elsewhere. If
    it raises UserError, every rank raises one."""
    result = None
    error = None
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
        mistake = UserError("rank 0 cannot continue", "torchrun", "see its error")
        mistake.status = status.item()
        raise mistake
    return result


# ---------------------------------------------------------------- state in whole tensors


def gather(model, optimizers, runtime):
    """({name: weight or buffer}, {"parameter name/state name": tensor}) in whole tensors. With
    several ranks they are on the CPU of rank 0. Every rank must call this. A tied weight appears
    once."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=runtime.world_size > 1)
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    weights = state_dict.get_model_state_dict(model, options=options)
    weights = {name: tensor for name, tensor in weights.items() if name in names}

    moments = {}
    # Before the first step there is no state, and torch would take a step to create one.
    if any(optimizer.state for optimizer in optimizers):
        state = state_dict.get_optimizer_state_dict(model, optimizers, options=options)
        for name, values in state.get("state", {}).items():  # empty on other ranks
            for key, value in values.items():
                moments[f"{name}/{key}"] = value
    return weights, moments


def scatter(model, optimizers, moments):
    """Load optimizer state, in whole tensors as gather returns it, into the optimizers of `model`,
    sharded or not."""
    if not moments:  # saved before the first step
        return
    from torch.distributed.checkpoint import state_dict

    state = {}
    for name, value in moments.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = value
    groups = state_dict.get_optimizer_state_dict(model, optimizers)["param_groups"]
    full_state = {"state": state, "param_groups": groups}
    options = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_optimizer_state_dict(model, optimizers, full_state, options=options)
