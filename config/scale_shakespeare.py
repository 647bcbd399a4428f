# Do the parts of LLaMA help a tiny GPT-2 more, or less, as it grows? Three sizes on a CPU.
#   python prepare.py plays
#   python bench/ablate.py config/scale_shakespeare.py --workers=2
# Each size is a sweep of its own: 4 arms x 4 seeds, 8 runs of the base, and 6 of its curve of
# tokens, 30 runs. A run takes about 20, 30 and 50 s on one core: 30 * 100 s / 2 = 25 minutes on two
# cores. The sizes span a factor of 15 of training compute. A slope, in nats per factor of ten, has
# about 1.2 times the standard error of a single effect, so that only large changes are seen.
# Expect rope to help at all sizes, and "cannot tell" for most slopes.
question = "Do the parts of LLaMA help a GPT-2 more, or less, as it grows?"
out_dir = "out-scale-shakespeare"
design = "scale"
arms = {
    "rope": dict(position="rope"),
    "swiglu": dict(mlp="swiglu"),
    "rmsnorm": dict(norm="rmsnorm"),
    "llama": dict(position="rope", norm="rmsnorm", mlp="swiglu", bias="none", tie_embeddings=False),
}
# Parameters: 53 k, 0.12 M and 0.21 M. The rate goes with 1 / width, which keeps the size of an
# update of a neuron's output about the same.
sizes = {
    "small": dict(n_embd=32, learning_rate=6e-3),
    "medium": dict(n_embd=48, learning_rate=4e-3),
    "large": dict(n_embd=64, learning_rate=3e-3),
}
model = "gpt2"
dataset = "plays"
seeds = 4
curve = [0.5, 2]
lr_grid = [1]
prompt = "ROMEO:"

# The steps are those of the smallest size; the others take more, in proportion to their parameters.
# The largest is that of config/ablate_shakespeare.py.
n_layer, n_head, block_size = 4, 4, 64
batch_size, max_iters, eval_interval, log_interval = 12, 384, 20, 100
eval_tokens = 16384
min_lr, warmup_iters = 0.0, 26
beta2 = 0.99  # few tokens in a step, so average over more of them
dropout = 0.0
dtype = "float32"
