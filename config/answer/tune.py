# Tunes the base of a shelf by fourteen arms around it. Give this file after the file of the shelf:
#   python bench/ablate.py config/answer/gpt2.py config/answer/tune.py --workers=2
#   python bench/ablate.py config/answer/llama.py config/answer/tune.py --workers=2
# Half, once and twice Muon's rate, each with a third, once and three times that rate in the groups
# that AdamW updates beside Muon (embeddings, head, norms, biases); the warm-up, the end of the
# decay, and the momentum. 16 x 2 runs of about two minutes, two at a time: 35 minutes. The
# half of the validation text that chooses:
#   python -c "from bench.ablation import rows
#   print(rows.load('OUT').groupby('arm').val_loss_tune.mean().sort_values())"
question = "At which rates does the base of the shelf learn best?"
out_dir = f"bench/results/answer/tune-{model}"
design = "arms"
screening = True
seeds = 2
# What the shelf has and a search of rates does not need.
controls = None
also = None
# Where the search starts.
learning_rate = 8e-3
min_lr = 0.0
warmup_iters = 100

arms = {
    f"rate x{rate:g}, adam x{adam:.2g}": dict(learning_rate=rate * learning_rate, adam_rate=adam)
    for rate in (0.5, 1, 2)
    for adam in (1 / 3, 1, 3)
    if (rate, adam) != (1, 1)  # the base
}
arms |= {
    "warm-up 50": dict(warmup_iters=50),
    "warm-up 200": dict(warmup_iters=200),
    "decay to a tenth": dict(min_lr=learning_rate / 10),
    "beta1 0.95": dict(beta1=0.95),  # of Muon's momentum and of AdamW
    "adam x9": dict(adam_rate=9),  # beyond the edge of the grid
    "adam x3, decay to a tenth": dict(adam_rate=3, min_lr=learning_rate / 10),
}
