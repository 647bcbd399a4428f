"""Text in, tokens out: sources, tokenizers, token files, batches."""
