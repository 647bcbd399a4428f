"""Time training steps, optimizers, decoding and whole runs, beside other libraries."""
