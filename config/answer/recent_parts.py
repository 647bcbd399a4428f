# 22 minutes on two cores: 8 arms x 6 seeds, 17 runs of the base, 4 of tokens, 38 s each.
#   python bench/ablate.py config/answer/recent_parts.py --workers=2
# Parts for which the public logs claim small gains or none, each in a tiny LLaMA, with enough seeds
# to decide; config/screen_parts.py only ranks them. Expect the convolution ahead, and the others
# within the noise.
question = "Which of the recent parts of attention, block and head helps?"
out_dir = "out-answer/recent_parts"
arms = {
    "value embeddings": dict(value_embed=True),
    "hyper-connections": dict(residual="hyper"),
    "convolution": dict(conv=4),
    "sink": dict(attn_sink=True),
    "no positions in every fourth layer": dict(nope_every=4),
    "softcap": dict(logit_softcap=15.0),
    "norms before and after": dict(block="sandwich"),
    "parallel": dict(block="parallel"),
}
model = "llama"
dataset = "plays"
seeds = 6
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
multiple_of = 8
