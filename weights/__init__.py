"""Weights on disk: our checkpoints, and the formats of other libraries."""
