# 15 minutes on two cores: 8 cells x 4 seeds = 32 runs of 36 or 80 s, and 4 for the base's tokens.
#   python bench/ablate.py config/answer/depth_norm.py --workers=2
# Does a deep narrow GPT-2 need the norm before the sublayer, and warm-up? Depth 4 or 12 with nearly
# as many parameters, norms before or after, warm-up of 60 steps or none: all 8 cells, so that the
# interactions are the answer. Xiong et al. 2020: norms after need warm-up, norms before do not.
# The rate is that of base.py: at twice this rate a model with norms after learns nothing at all.
question = "Do norms after the sublayer need warm-up, and more so in a deep model?"
out_dir = "out-answer/depth_norm"
design = "factorial"
factors = {
    "deep": [dict(n_layer=4, n_embd=64), dict(n_layer=12, n_embd=36)],
    "post": [dict(block="pre"), dict(block="post")],
    "no warm-up": [dict(warmup_iters=60), dict(warmup_iters=0)],
}
resolution, match = "full", "none"
model = "gpt2"
dataset = "plays"
seeds = 4
curve, curve_seeds = [0.5, 2], 2
lr_grid, time_forms = [1], False

# 0.2 M parameters, 600 steps * 12 * 64 = 0.46 M characters of 4.3 M.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 600, 30, 9216
learning_rate, min_lr, warmup_iters, beta2 = 3e-3, 0.0, 60, 0.99
dtype, log_interval = "float32", 100
