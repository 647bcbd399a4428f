# 21 minutes on two cores: 16 cells x 4 seeds = 64 runs of 36 s, and 4 for the base's tokens.
#   python bench/ablate.py config/answer/factorial_plays.py --workers=2
# Do the parts of LLaMA help a tiny GPT-2 each on its own, or only together? Every run serves every
# effect: each is a difference between the means of 32 runs and 32 runs.
question = "Which parts of LLaMA help on the characters of plays, and do they add up?"
out_dir = "out-answer/factorial_plays"
design = "factorial"
factors = [
    *("position", "norm", "mlp", "bias"),
    {"untied": [dict(tie_embeddings=True), dict(tie_embeddings=False)]},
]
model = "gpt2"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid = [1]

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
