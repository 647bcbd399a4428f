# Named architectures compared with GPT-2 at one size: each has its own parts, but not its
# published width or depth.
#   python bench/ablate.py config/archs.py --workers=4
#   python bench/ablate.py config/archs.py --archs="['llama','mistral','falcon']" --seeds=5
# 11 architectures, the base and the base again: 13 arms x 3 seeds = 39 runs. The MLP widths are
# chosen so that all have GPT-2's number of parameters. On a CPU 39 / 2 * 85 s = 28 minutes on two
# cores.
# Expect those with rotary positions or ALiBi close together and ahead of GPT-2, and transformer2017
# (norms after the sums) last, since it needs a lower learning rate.
question = "Which architecture's parts are best at one size?"
out_dir = "out-archs"
design = "archs"
model = "gpt2"
dataset = "shakespeare_char"
seeds = 3
prompt = "ROMEO:"

if device == "cpu":
    screening = True
    # 4 * 12 * 64^2 = 0.2 M parameters, 2500 steps * 12 * 64 = 1.9 M characters
    n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
    batch_size, max_iters, eval_interval = 12, 2500, 500
    learning_rate, min_lr, warmup_iters = 3e-3, 0.0, 100
else:
    # 6 * 12 * 384^2 = 10.6 M parameters, 5000 steps * 64 * 256 = 82 M characters
    n_layer, n_head, n_embd, block_size = 6, 6, 384, 256
    batch_size, max_iters, eval_interval = 64, 5000, 250
    learning_rate, min_lr, warmup_iters = 1e-3, 1e-4, 100
    dropout = 0.2
    lr_grid = [0.5, 1, 2]
beta2 = 0.99
log_interval = 100
