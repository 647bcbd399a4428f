# 14 minutes on two cores: 6 schemes x 4 seeds, 10 runs of the base, 4 of tokens, 38 s each.
#   python bench/ablate.py config/answer/positions.py --workers=2
# Which position scheme helps a tiny LLaMA, and which still works at 8 times the training context?
# Every run is also evaluated at 1, 2, 4 and 8 times its context of 64 characters. Expect alibi to
# hold and rope to get worse; learned has no positions there.
question = "Which position scheme helps, and which carries to 8 times the context?"
out_dir = "out-answer/positions"
arms = {
    "none": dict(position="none"),
    "learned": dict(position="learned"),
    "sinusoidal": dict(position="sinusoidal"),
    "alibi": dict(position="alibi"),
    "relative": dict(position="relative"),
    "t5": dict(position="t5"),
}
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
