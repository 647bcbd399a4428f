# Multi-query associative recall: 2 to 12 keys with a value each, then as many questions for a value
# (extras/tasks.py).
#   python -m extras.tasks recall                              # the samples
#   python train.py config/task_recall.py                      # attention
#   python train.py config/task_recall.py --window=16 --out_dir=out-recall-window
# Two layers of attention learn to look a key up. Expect a plateau near a loss of 2.7, where it
# guesses among values (2 % of the answers right at step 150), and then a jump (99 % at step 300,
# 100 % at step 450). A window of 16 tokens does not see most keys.
model = "llama"
out_dir = "out-recall"
dataset = "task:recall"  # 18,000 samples of up to 73 characters

# 2 * 12 * 64^2 = 0.1 M parameters; 600 steps * 32 samples = 1.1 epochs, 1.4 M tokens:
# 6 * 0.1 M * 1.4 M = 0.8 TFLOP, one to two minutes on two cores with operations this small.
n_layer = 2
n_head = 2
n_embd = 64
block_size = 72
multiple_of = 8
batch_size = 32
max_iters = 600
eval_interval = 150
eval_tokens = 20000  # about 460 samples
optimizer = "muon"
learning_rate = 1e-2
min_lr = 0.0
warmup_iters = 50
beta2 = 0.99
dropout = 0.0
log_interval = 50
