# All position schemes with LLaMA's other parts, and how well each works beyond the training
# context.
#   python bench/ablate.py config/ablate_positions.py --workers=2
# 6 schemes and the base again: 7 arms x 3 seeds = 21 runs. On a CPU the size is that of
# config/ablate_shakespeare.py, about 17 minutes on two cores; on a GPU it is the 10 M setting.
# Expect rope, alibi and relative ahead of learned and sinusoidal, and none last. Beyond the
# training context learned has no positions, rope gets worse, and alibi and relative do not.
question = "Which position scheme helps, and which carries beyond the training context?"
out_dir = "out-ablate-positions"
axis = "position"
model = "llama"
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
multiple_of = 8
beta2 = 0.99
log_interval = 100
