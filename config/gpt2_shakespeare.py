# GPT-2 on the characters of Shakespeare: 1,003,854 to train on, 111,540 to validate. On a CPU with
# two cores it takes 60 to 110 s and reaches a validation loss of 1.61. On a GPU it is nanoGPT's
# character setting, for which nanoGPT reports 1.47: it is lowest within 90 s on an H200, at 1.446.
# config/llama_shakespeare.py has the same sizes, budget and schedule with the other model.
model = "gpt2"
out_dir = "out-gpt2-shakespeare"
dataset = "shakespeare_char"
log_interval = 50

if device == "cpu":
    # 4 * 12 * 128^2 = 0.8 M parameters; 1080 steps * 12 * 128 tokens = 1.7 M characters,
    # 1.7 epochs: 6 * 0.8 M * 1.7 M = 8 TFLOP, 90 s at the 90 GFLOP/s that two cores reach in
    # float32 with operations this small. Muon's update is 2.6 GFLOP, a fifth of a step. It pays,
    # since AdamW needs more than twice the steps of Muon.
    n_layer = 4
    n_head = 4
    n_embd = 128
    block_size = 128
    batch_size = 12
    max_iters = 1080
    eval_interval = 540
    optimizer = "muon"
    learning_rate = 8e-3
    min_lr = 0.0
    warmup_iters = 100
    dropout = 0.0
else:
    # 6 * 12 * 384^2 = 10.6 M parameters; 5000 steps * 64 * 256 tokens = 82 M characters, 82 epochs.
    n_layer = 6
    n_head = 6
    n_embd = 384
    block_size = 256
    batch_size = 64
    max_iters = 5000
    eval_interval = 250
    learning_rate = 1e-3
    min_lr = 1e-4
    warmup_iters = 100
    dropout = 0.2

beta2 = 0.99  # few tokens in a step, so average over more of them
bias = False  # as in nanoGPT
