# Which part of LLaMA helps GPT-2 at nanoGPT's character setting, 10 M parameters? For one GPU or
# several (we have not run it yet).
#   python bench/ablate.py config/ablate_shakespeare_gpu.py --workers=4
#   python bench/ablate.py config/ablate_shakespeare_gpu.py --design=leave_one_out --model=llama \
#       --out_dir=out-ablate-gpu-out
# 7 arms x 5 seeds = 35 runs to report, and 6 arms x 3 learning rates x 2 seeds = 36 runs to tune
# the learning rates: 71 runs of 82 M characters, 6 * 10.6 M * 82 M = 5.2 PFLOP each. The sweep may
# be stopped and resumed at any time. Expect differences of 0.01 nats, with standard deviations of
# 0.004 to 0.010, and overfitting from about step 2500 on.
question = "Which part of LLaMA helps a GPT-2 of 10 M parameters on the characters of Shakespeare?"
out_dir = "out-ablate-gpu"
design = "leave_one_in"
dataset = "shakespeare_char"
seeds = 5
lr_grid = [0.5, 1, 2]
prompt = "ROMEO:"

# 6 * 12 * 384^2 = 10.6 M parameters; 5000 steps * 64 * 256 tokens = 82 M characters, 82 epochs.
n_layer, n_head, n_embd, block_size = 6, 6, 384, 256
batch_size, max_iters, eval_interval, log_interval = 64, 5000, 250, 100
learning_rate, min_lr, warmup_iters = 1e-3, 1e-4, 100
beta2 = 0.99
dropout = 0.2
