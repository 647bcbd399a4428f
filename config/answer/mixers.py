# 17 minutes on two cores: 5 arms x 4 seeds, 9 runs of the base, 4 of tokens, 38 to 90 s each.
#   python bench/ablate.py config/answer/mixers.py --workers=2
# What carries information from token to token, beside plain attention: differential and latent
# attention, two mixers with a state, and a hybrid, whose last layer is attention. A state has an
# order of its own and needs no positions. Expect the states ahead at 64 characters.
question = "Do differential attention, latent attention or states beat attention?"
out_dir = "out-answer/mixers"
arms = {
    "differential": dict(mixer="differential"),
    "mla": dict(mixer="mla"),
    "mamba2": dict(mixer="mamba2", position="none"),
    "gated_delta": dict(mixer="gated_delta", position="none"),
    "hybrid": dict(mixer="gated_delta,gated_delta,gated_delta,attention", position="none"),
}
model = "llama"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
multiple_of = 8
