# 20 minutes on two cores: 7 arms x 6 seeds, 16 runs of the base, 4 of tokens, 38 s each.
#   python bench/ablate.py config/answer/recipes.py --workers=2
# Architectures that differ in tokenizer and text elsewhere, on equal data and parameters, and the
# recipes of a widely read guide: best quality, fastest, balanced, simplest. GQA is two query heads
# for each key head. Expect all with rotary positions or ALiBi ahead of GPT-2, those with SwiGLU
# first, and the guide's order of the rest within the noise. The rate is twice that of base.py, and
# closer to the best one of both GPT-2 and LLaMA (rates.py).
question = "Which architecture and which recipe is best on equal data and budget?"
out_dir = "out-answer/recipes"
arms = {
    "llama": dict(arch="llama"),
    "bloom": dict(arch="bloom"),
    "falcon": dict(arch="falcon"),
    "best quality": dict(arch="llama", n_kv_head=2),
    "fastest": dict(position="alibi", n_kv_head=1),
    "balanced": dict(arch="llama", n_kv_head=2, mlp="gelu"),
    "simplest": dict(position="alibi"),
}
model = "gpt2"
dataset = "plays"
seeds = 6
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 6e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
