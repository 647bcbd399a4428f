"""The device of a run, and its number format on a CPU."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from common.runtime import Runtime, cpu_name, set_up, versions
from helpers.variants import config, randomised, tokens
from model_llama import Llama, LlamaConfig
from training.net import Loss, recompute_blocks, recomputed


def test_compile_auto_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "true")  # a compiler
    runtime = Runtime("cpu", "float32", 0, 1)
    runtime.choose_compile("auto", math.inf)
    assert runtime.compile
    monkeypatch.setattr("shutil.which", {"clang++": "clang++"}.get)  # torch tries CXX alone
    runtime.choose_compile("auto", math.inf)
    assert not runtime.compile


@pytest.mark.parametrize(
    "capability, found, compiles",
    [((8, 0), "clang", True), ((6, 1), "gcc", False), ((8, 0), "", False)],
)
def test_compile_auto_on_a_gpu_asks_whether_triton_works(monkeypatch, capability, found, compiles):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", {found: found}.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    runtime = Runtime("cuda:0", "bfloat16", 0, 1)
    runtime.choose_compile("auto", math.inf)
    assert runtime.compile is compiles
    if not found:
        with pytest.raises(UserError, match="such as gcc.*name yours in CC, or .*compile=False"):
            runtime.choose_compile(True, math.inf)


def test_the_hardware_of_a_run_is_that_of_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    assert versions("cuda:1")["hardware"] == "the GPU cuda:1"
    assert versions("cpu")["hardware"] == cpu_name()


def test_every_rank_refuses_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(key, "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(UserError, match="4 ranks .*--nproc_per_node=1"):
            set_up("cuda")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UserError, match="LOCAL_RANK.*start with torchrun"):
        set_up("cuda")


class Kernels(TorchDispatchMode):
    """The kernels of attention that run within it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention" in func.name() or "_safe_softmax" in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def loss_and_gradients(dtype, recompute=False):
    """The loss of a small model, its gradients as one vector, and the kernels of its attention."""
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = Llama(LlamaConfig(**sizes))
    runtime = Runtime("cpu", dtype, 0, 1)
    for block in model.blocks if recompute else []:
        block.forward = recomputed(block.forward, runtime)
    x = torch.randint(0, 11, (4, 17))
    with Kernels() as kernels:
        with runtime.autocast():
            loss = model(x[:, :-1], x[:, 1:])[1]
        loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.item(), gradient, kernels.names


def test_in_16_bits_a_cpu_computes_attention_without_the_fused_kernel():
    exact, gradient, kernels = loss_and_gradients("float32")
    assert len(kernels) == 4 and all("flash" in name for name in kernels)  # forward and backward
    rounded, rounded_gradient, kernels = loss_and_gradients("bfloat16")
    assert kernels == ["_safe_softmax"] * 2
    assert rounded != exact and rounded == pytest.approx(exact, rel=2e-3)
    assert (rounded_gradient - gradient).norm() < 0.02 * gradient.norm()


def test_activations_are_computed_again_with_the_same_attention():
    loss, gradient, kernels = loss_and_gradients("bfloat16")
    again, its_gradient, its_kernels = loss_and_gradients("bfloat16", recompute=True)
    assert loss == again and torch.equal(gradient, its_gradient)
    assert set(its_kernels) == set(kernels) and len(its_kernels) == len(kernels) + 2


@pytest.mark.slow
def test_a_recomputed_block_that_leaves_values_for_later_ones_is_compiled(monkeypatch):
    """As for a GPU, in one graph, with the gradients of the eager model."""
    setting = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    monkeypatch.setattr(torch._dynamo.config, setting, False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = randomised(config("llama", {"attn_extra": "value_residual"}))
    x = tokens(model.config)
    Loss(model)(x, x).backward()
    eager = [p.grad for p in model.parameters()]
    model.zero_grad()
    recompute_blocks(model, Runtime("cuda:0", "float32", compile=True))
    torch.compile(Loss(model), dynamic=False, backend="aot_eager")(x, x).backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    for p, gradient in zip(model.parameters(), eager, strict=True):
        assert torch.equal(p.grad, gradient)
