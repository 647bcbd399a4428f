# 11 minutes on two cores: 2 arms x 8 seeds, 12 runs of the base, 4 of tokens, 38 s each.
#   python bench/ablate.py config/answer/key_heads.py --workers=2
# What does it cost to share the heads of keys and values? Four query heads with four, two or one of
# them; the parameters that this saves go to the MLP. The cache shrinks by 2 and by 4.
question = "What does sharing the heads of keys and values cost, and what does it save?"
out_dir = "out-answer/key_heads"
arms = {"2 key heads": dict(n_kv_head=2), "1 key head": dict(n_kv_head=1)}
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
