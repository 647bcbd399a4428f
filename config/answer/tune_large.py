# Which rate suits Muon at four times the size, tokens and batch of the shelf? Give this file after
# the file of the shelf, on a machine with a GPU:
#   python bench/ablate.py config/answer/llama.py config/answer/tune_large.py --workers=12
question = "Does the learning rate of plays suit a larger LLaMA on Python files?"
out_dir = "bench/results/answer/tune-large-llama"
design = "arms"
screening = True
seeds = 2
controls, also, curve = None, None, []  # the shelf's are not for the search
dataset, prompt, dtype = "python_source", "def ", "float32"  # as in the column large
n_embd, n_head, batch_size, device, compile = 256, 8, 48, "cuda", False

arms = {
    "rate x0.5": dict(learning_rate=4e-3),
    "rate x2": dict(learning_rate=16e-3),
    "rate x4": dict(learning_rate=32e-3),
}
