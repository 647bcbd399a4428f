# 45 minutes on two cores: 64 runs of 75 s, because the head has 2,048 tokens, and 4 of tokens.
#   python prepare.py python_source
#   python bench/ablate.py config/answer/factorial_python.py --workers=2
# Does the answer of config/answer/factorial_plays.py hold on another text, in other tokens? The
# same factors, size and steps. Untying adds 0.13 M parameters here, which the MLP cannot make up,
# so the arms cost the same FLOPs, which untying does not change.
question = "Which parts of LLaMA help on Python source, and do they add up?"
out_dir = "out-answer/factorial_python"
design = "factorial"
factors = [
    *("position", "norm", "mlp", "bias"),
    {"untied": [dict(tie_embeddings=True), dict(tie_embeddings=False)]},
]
match = "flops"
model = "gpt2"
dataset = "python_source"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid = [1]

# 0.2 M parameters in the blocks, 600 steps * 12 * 64 = 0.46 M tokens of 17.6 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
