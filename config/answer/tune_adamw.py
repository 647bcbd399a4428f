# Tunes AdamW, an arm of both shelves: its rate, its warm-up and beta2. Give this file after the
# file of the shelf:
#   python bench/ablate.py config/answer/gpt2.py config/answer/tune_adamw.py --workers=2
#   python bench/ablate.py config/answer/llama.py config/answer/tune_adamw.py --workers=2
# 11 x 2 runs of about two minutes. Read val_loss_tune as config/answer/tune.py says.
question = "At which rate, warm-up and beta2 does AdamW learn best?"
out_dir = f"bench/results/answer/tune-adamw-{model}"
design = "arms"
screening = True
seeds = 2
# What the shelf has and a search of rates does not need.
controls = None
also = None
# As in the shelves' arm with AdamW.
optimizer = "adamw"
learning_rate = 4e-3
min_lr = 4e-4

arms = {f"rate x{rate:g}": dict(learning_rate=rate * learning_rate) for rate in (0.5, 2)}
arms |= {f"warm-up {steps}": dict(warmup_iters=steps) for steps in (50, 200)}
arms |= {f"beta2 {beta2:g}": dict(beta2=beta2) for beta2 in (0.9, 0.99, 0.999)}
arms |= {  # what helped alone, together
    "beta2 0.99, rate x2": dict(beta2=0.99, learning_rate=2 * learning_rate),
    "beta2 0.99, warm-up 200": dict(beta2=0.99, warmup_iters=200),
}
