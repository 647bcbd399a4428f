# 14 minutes on two cores: 6 rungs, the base and its copy x 5 seeds = 40 runs of 38 s, 4 of tokens.
#   python bench/ablate.py config/answer/ladder_shakespeare.py --workers=2
# From GPT-2 to LLaMA one part at a time, on the familiar text. Each rung is compared with the one
# below it. 600 steps see 0.46 M characters, less than half of tiny-shakespeare's 1.0 M; the last
# rung is two query heads for each head of keys and values. The rate is twice that of base.py, and
# closer to the best one of both GPT-2 and LLaMA (rates.py).
question = "What does each step from GPT-2 to LLaMA add on tiny-shakespeare?"
out_dir = "out-answer/ladder_shakespeare"
design = "ladder"
order = ["norm", "position", "mlp", "bias", "tie_embeddings", "gqa"]
arms = {"gqa": dict(n_kv_head=2)}
model = "gpt2"
dataset = "shakespeare_char"
seeds = 5
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 6e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
