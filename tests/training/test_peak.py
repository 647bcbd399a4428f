"""The peak of a device, which the MFU is a share of: by a GPU's name, or unknown."""

from types import SimpleNamespace

import pytest

from training import report


@pytest.mark.parametrize(
    "name, tflops",
    {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
        "NVIDIA L4": 121,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA L40": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    }.items(),
)
def test_a_known_gpu_has_its_makers_peak(monkeypatch, name, tflops):
    monkeypatch.setattr(report.torch.cuda, "get_device_name", lambda device: name)
    peak = report.peak_flops(SimpleNamespace(device="cuda:0", dtype="bfloat16"))
    assert peak == (tflops and tflops * 1e12)


@pytest.mark.parametrize("device, dtype", [("cpu", "bfloat16"), ("cuda", "float32")])
def test_no_peak_is_measured(device, dtype):
    assert report.peak_flops(SimpleNamespace(device=device, dtype=dtype)) is None
