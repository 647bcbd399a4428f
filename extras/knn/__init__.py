"""A text as a memory beside the weights: kNN-LM."""
