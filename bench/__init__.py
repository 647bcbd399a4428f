"""Measurements: each script here answers one question."""
