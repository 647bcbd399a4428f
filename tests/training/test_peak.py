"""The peak of a device: by a GPU's name, or by a matrix product whose seconds are known."""

import itertools
from types import SimpleNamespace

import pytest

from training import peak


@pytest.mark.parametrize(
    "name, tflops",
    {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
        "NVIDIA L4": 121,
        "NVIDIA GeForce RTX 4090": 165,
    }.items(),
)
def test_a_known_gpu_has_its_makers_peak(monkeypatch, name, tflops):
    monkeypatch.setattr(peak.torch.cuda, "get_device_name", lambda device: name)
    found, source = peak.peak_flops(SimpleNamespace(device="cuda:0", dtype="bfloat16"))
    assert found == tflops * 1e12 and "data sheet" in source


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
)
def test_an_unknown_gpu_is_measured(monkeypatch, name):
    """Also in a test without a GPU: the request for a product on one fails."""
    monkeypatch.setattr(peak.torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(peak.torch, "randn", lambda *args, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        peak.peak_flops(SimpleNamespace(device="cuda", dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_is_measured(monkeypatch, dtype):
    """With a clock of our own: the fastest product takes a quarter of a second."""
    monkeypatch.setitem(peak.SIZE, "cpu", 64)
    readings = itertools.accumulate(itertools.cycle([1, 0.5, 1, 0.25]))
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(readings))
    found, source = peak.peak_flops(SimpleNamespace(device="cpu", dtype=dtype))
    assert found == 2 * 64**3 / 0.25 and dtype in source and "64" in source
