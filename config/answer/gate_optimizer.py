# 16 minutes on two cores: 4 cells x 12 seeds = 48 runs of 38 s, and 4 for the base's tokens.
#   python bench/ablate.py config/answer/gate_optimizer.py --workers=2
# Does a gate on the heads help with AdamW and hurt with Muon? Marin #5585 found +0.0315 nats with
# Muon and -0.0116 with another optimizer, AdamH. A full factorial of the two, so that its
# interaction is the answer.
question = "Does the effect of an attention gate depend on the optimizer?"
out_dir = "out-answer/gate_optimizer"
design = "factorial"
factors = [
    {"gate": [dict(attn_gate="none"), dict(attn_gate="head")]},
    {"muon": [dict(optimizer="adamw"), dict(optimizer="muon")]},
]
resolution = "full"
model = "llama"
dataset = "plays"
seeds = 12
curve, curve_seeds = [0.5, 2], 2
lr_grid = [1]

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
multiple_of = 8
