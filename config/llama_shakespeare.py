# LLaMA on the characters of Shakespeare: 1,003,854 to train on, 111,540 to validate.
# On a CPU with two cores it takes 75 to 125 s. On a GPU it is nanoGPT's character setting: on
# an H200 the validation loss is lowest within 90 s, at 1.459 (step 1,250; it overfits after that,
# and `best` names the lowest). config/gpt2_shakespeare.py has the same sizes, budget and schedule
# with the other model.
model = "llama"
out_dir = "out-llama-shakespeare"
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
multiple_of = 8  # 8/3 * 128 = 341.3 -> 344 and 8/3 * 384 = 1024: GPT-2's parameters, within 1 %
