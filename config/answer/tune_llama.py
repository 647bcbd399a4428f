# The stored search that tunes the base of config/answer/llama.py: twelve arms around it.
#   python bench/ablate.py config/answer/tune_llama.py --workers=2
# Half, once and twice Muon's rate, each with a third, once and three times that rate in the groups
# that AdamW updates beside Muon (embeddings, head, norms, biases); the warm-up, the end of the
# decay, and the momentum. 14 x 2 runs of about two minutes, two at a time: half an hour. Read the
# column loss_tune: the half of the validation text that chooses.
question = "At which rates does a LLaMA of 0.8 M parameters learn best in 1,080 steps?"
out_dir = "bench/results/answer/tune-llama"
design = "arms"
screening = True
seeds = 2
model = "llama"
dataset = "plays"

# 4 * 12 * 128^2 = 0.8 M parameters; 1,080 steps * 12 * 128 tokens = 1.66 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size, multiple_of = 4, 4, 128, 128, 8
batch_size, max_iters, log_interval = 12, 1080, 90
eval_interval, eval_tokens = 360, 8192  # the last evaluation scores the whole split
compile = True  # 0.8 of the time of a step; the runs of one model share what is compiled
optimizer, learning_rate, min_lr, warmup_iters = "muon", 8e-3, 0.0, 100

arms = {
    f"rate x{rate:g}, adam x{adam:.2g}": dict(learning_rate=rate * 8e-3, adam_rate=adam)
    for rate in (0.5, 1, 2)
    for adam in (1 / 3, 1, 3)
    if (rate, adam) != (1, 1)  # the base
}
arms |= {
    "warm-up 50": dict(warmup_iters=50),
    "warm-up 200": dict(warmup_iters=200),
    "decay to a tenth": dict(min_lr=8e-4),
    "beta1 0.95": dict(beta1=0.95),  # of Muon's momentum and of AdamW
}
