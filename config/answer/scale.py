# 40 minutes on two cores: 28 runs each of 25, 35 and 55 s.
#   python bench/ablate.py config/answer/scale.py --workers=2
# Do the parts of LLaMA help more, or less, as GPT-2 grows from 53 k to 0.2 M parameters? Each size
# has its own base, curve of tokens and margin; tokens grow with parameters, so compute by 13.
# With w96=dict(n_embd=96, learning_rate=2e-3), too: 0.5 M, compute by 70, 40 more minutes.
question = "Do the parts of LLaMA help more, or less, as the model grows?"
out_dir = "out-answer/scale"
design = "scale"
arms = {
    "rope": dict(position="rope"),
    "swiglu": dict(mlp="swiglu"),
    "rmsnorm": dict(norm="rmsnorm"),
    "llama": dict(arch="llama"),
}
sizes = {  # the rate goes with 1 / width
    "w32": dict(n_embd=32, learning_rate=6e-3),
    "w48": dict(n_embd=48, learning_rate=4e-3),
    "w64": dict(n_embd=64, learning_rate=3e-3),
}
model = "gpt2"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False
n_layer, n_head, block_size = 4, 4, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 150, 10, 9216
min_lr, warmup_iters, beta2, dtype, log_interval = 0.0, 15, 0.99, "float32", 100
