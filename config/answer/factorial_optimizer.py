# 22 minutes on two cores: 32 cells x 2 seeds = 64 runs of 38 s, and 4 for the base's tokens.
#   python bench/ablate.py config/answer/factorial_optimizer.py --workers=2
# Does what a part is worth depend on the optimizer? The factors of
# config/answer/factorial_plays.py, and AdamW against Muon as the sixth, in 32 of 64 cells.
# Muon's steps have the size of AdamW's, so that both use one learning rate.
question = "Does what a part of LLaMA is worth depend on the optimizer?"
out_dir = "out-answer/factorial_optimizer"
design = "factorial"
factors = [
    *("position", "norm", "mlp", "bias"),
    {"untied": [dict(tie_embeddings=True), dict(tie_embeddings=False)]},
    {"muon": [dict(optimizer="adamw"), dict(optimizer="muon")]},
]
model = "gpt2"
dataset = "plays"
seeds = 2
curve, curve_seeds = [0.5, 2], 2
lr_grid = [1]

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
