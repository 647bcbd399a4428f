# 10 minutes on two cores: 26 runs of 36 s, and 9 for the base's curve of tokens.
#   python bench/ablate.py config/answer/base.py --workers=2
# How much does one seed differ from the next, what are more tokens worth to a tiny GPT-2, and is
# LLaMA worth more? 14 runs of the base under two names, which must not differ, and 12 of LLaMA.
# The noise is that of a run on another seed, which is both another start and another order of data.
question = "How large is the noise, and what are tokens worth?"
out_dir = "out-answer/base"
arms = {"llama": dict(arch="llama")}
model = "gpt2"
dataset = "plays"
seeds = 12
curve, curve_seeds = [0.25, 0.5, 2], 3
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
