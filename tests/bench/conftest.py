"""What the tests of sweeps share: a stand-in for train.py, a driver that uses it."""

from helpers.ablation import drive, out, planned, quick, same_code, stub  # noqa: F401
