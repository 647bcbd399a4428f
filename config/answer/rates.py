# 60 minutes on two cores: 6 arms x 6 rates x 4 seeds to choose, 58 runs to report, 4 of tokens.
#   python bench/ablate.py config/answer/rates.py --workers=2
# Does each part want its own learning rate, and is its effect an artefact of the base's? Rates from
# a quarter to four times the base's; each arm is then reported at its own best one. A tuned arm is
# compared with a tuned base. Four seeds choose, since SwiGLU's loss differs much between seeds at
# the higher rates.
question = "What are the parts worth when each has its own learning rate?"
out_dir = "out-answer/rates"
arms = {
    "rope": dict(position="rope"),
    "swiglu": dict(mlp="swiglu"),
    "rmsnorm": dict(norm="rmsnorm"),
    "llama": dict(arch="llama"),
    "muon": dict(optimizer="muon"),
}
model = "gpt2"
dataset = "plays"
seeds = 8
lr_grid, tune_seeds = [0.25, 0.5, 1, 2, 4], 4
curve, curve_seeds = [0.5, 2], 2
time_forms = False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
