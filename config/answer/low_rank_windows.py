# 13 minutes on two cores: 5 arms x 4 seeds, 9 runs of the base, 4 of tokens, 38 s each.
#   python bench/ablate.py config/answer/low_rank_windows.py --workers=2
# How much of a matrix, and of the context, does a tiny LLaMA use? Matrices of rank 32 and 16 (of
# 64), windows of 32, 16 and 8 characters (of 64). Nothing makes up for what is taken away, since
# the question is how much it is missed.
question = "How much of its matrices and of its context does the model use?"
out_dir = "out-answer/low_rank_windows"
arms = {
    "rank 32": dict(low_rank=32),
    "rank 16": dict(low_rank=16),
    "window 32": dict(window=32),
    "window 16": dict(window=16),
    "window 8": dict(window=8),
}
match = "none"
model = "llama"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
multiple_of = 8
