# Multi-query associative recall: 16 keys with a value each, then each key again (tokens/tasks.py).
#   python train.py config/task_recall.py                      # attention
#   python train.py config/task_recall.py --window=16 --out_dir=out-recall-window
# Two layers of attention learn to look a key up. Expect nothing for some hundred steps, then a
# quick rise of the share of right answers: the loss of a value that is not looked up is ln 16 = 2.8
# or more. A window of 16 tokens cannot see most keys.
model = "llama"
arch = "llama"  # as a variant, so that every slot can be changed
out_dir = "out-recall"
dataset = "task:recall"  # 18,000 samples of 97 characters; written first if missing

# 2 * 12 * 64^2 = 0.1 M parameters; 1000 steps * 32 samples = 1.8 epochs, 3.1 M tokens:
# 6 * 0.1 M * 3.1 M = 1.9 TFLOP, about two minutes on two cores with operations this small.
n_layer, n_head, n_embd, block_size = 2, 2, 64, 72
multiple_of = 8
batch_size, max_iters, eval_interval = 32, 1000, 250
eval_tokens = 48500  # 500 samples
optimizer, learning_rate, min_lr, warmup_iters = "muon", 1e-2, 0.0, 50
beta2 = 0.99
dropout = 0.0
log_interval = 50
