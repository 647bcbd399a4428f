# Do the parts of LLaMA help a tiny GPT-2 each on its own, or only together? A fractional factorial.
#   python prepare.py plays
#   python bench/ablate.py config/factorial_shakespeare.py --workers=2
# Five factors, each at GPT-2's word and at LLaMA's, in 2^(5-1) = 16 cells of resolution V: main
# effects and interactions of two factors are free of each other. 16 cells x 4 seeds = 64 runs, and
# 6 of the base's curve of tokens, two at a time on one thread each: 70 / 2 * 100 s, about an hour
# on two cores. Every run serves every effect: each is a difference between the means of 32 runs and
# 32 runs, with a standard error of 2 / sqrt(64) = 1/4 of a run's sd. One part at a time, that takes
# 54 runs of the base and 24 of each part, 174 in all.
# Expect a clear gain from rope, small effects of the other parts, and small interactions.
question = "Which parts of LLaMA help a tiny GPT-2 on Shakespeare's plays, and do they add up?"
out_dir = "out-factorial-shakespeare"
design = "factorial"
factors = [
    *("position", "norm", "mlp", "bias"),
    {"untied": [dict(tie_embeddings=True), dict(tie_embeddings=False)]},
]
model = "gpt2"
dataset = "plays"
seeds = 4
curve = [0.5, 2]
lr_grid = [1]
prompt = "ROMEO:"

# The setting is that of config/ablate_shakespeare.py, which changes one part at a time: 0.2 M
# parameters, 1080 steps * 12 * 128 tokens = 1.7 M characters, 0.4 epochs.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 128
batch_size, max_iters, eval_interval, eval_tokens = 12, 1080, 135, 9216
optimizer, learning_rate, min_lr, warmup_iters = "muon", 8e-3, 8e-4, 100
dropout = 0.0
log_interval = 100
dtype = "float32"
