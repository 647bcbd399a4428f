# 16 minutes on two cores: 2 arms x 8 seeds, 12 runs of the base, 4 of tokens, 38 to 70 s each.
#   python bench/ablate.py config/answer/value_moe.py --workers=2
# Value residual (20 % fewer tokens in its paper) and 8 experts of which a token uses 2, at the same
# FLOPs. nanochat: experts are better per step and worse per second. The report has both: worth in
# tokens, and worth in time.
question = "What are value residual and experts worth, per step and per second?"
out_dir = "out-answer/value_moe"
arms = {"value residual": dict(value_residual=True), "moe": dict(mlp="moe")}
match = "flops"
model = "llama"
dataset = "plays"
seeds = 8
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
multiple_of = 8
