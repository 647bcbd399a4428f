"""Weights on disk: our checkpoints, and other people's formats."""
