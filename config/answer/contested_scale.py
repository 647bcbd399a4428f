# 30 minutes on two cores: 31 runs each of 8, 25 and 75 s.
#   python bench/ablate.py config/answer/contested_scale.py --workers=2
# Three parts on which public results disagree, against the size of a LLaMA. QK norm: without it
# +0.023 at width 512, -0.011 at 768 (Marin #5230). The embedding added again in each block (x0
# skip): a gain that fades (nanochat). Tying: better (Marin #9290), worse (parameter-golf 2000).
question = "Do QK norm, the x0 skip and tying help more, or less, as the model grows?"
out_dir = "out-answer/contested_scale"
design = "scale"
arms = {
    "qk norm": dict(qk_norm="head"),
    "x0 skip": dict(residual="scaled"),
    "tied": dict(tie_embeddings=True),
}
sizes = {  # heads of 16 numbers at each width; the rate goes with 1 / width
    "w32": dict(n_embd=32, n_head=2, learning_rate=6e-3),
    "w48": dict(n_embd=48, n_head=3, learning_rate=4e-3),
    "w64": dict(n_embd=64, n_head=4, learning_rate=3e-3),
}
model = "llama"
dataset = "plays"
seeds = 6
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False
n_layer, n_head, block_size, multiple_of = 4, 4, 64, 8
batch_size, max_iters, eval_interval, eval_tokens = 12, 250, 13, 9216
min_lr, warmup_iters, beta2, dtype, log_interval = 0.0, 25, 0.99, "float32", 100
