# 25 minutes on two cores: 9 arms x 3 rates x 2 seeds to choose, 44 runs to report, 4 of tokens.
#   python bench/ablate.py config/answer/activations.py --workers=2
# Which function should an MLP use, and is it the gate or the activation that helps? Plain ones and
# gated ones beside GPT-2's GELU, all with as many parameters. Expect the gated ones ahead, and
# relu2 (nanochat: as good as SwiGLU or better) close to them. Each arm has its own rate, since
# rates.py finds that GPT-2 wants a higher one with GELU than with SwiGLU.
question = "Is it the gate or the activation that helps an MLP?"
out_dir = "out-answer/activations"
arms = {
    word: dict(mlp=word)
    for word in [*("relu", "relu2", "silu", "gelu_erf", "bilinear", "reglu", "geglu", "swiglu")]
}
model = "gpt2"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid, tune_seeds, time_forms = [0.5, 1, 2], 2, False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 6e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
