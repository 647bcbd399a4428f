# Which part of LLaMA helps GPT-2 at nanoGPT's small size, 10 M parameters? For one GPU or several
# (we have not run it yet).
#   python prepare.py python_source
#   python bench/ablate.py config/ablate_shakespeare_gpu.py --workers=4
#   python bench/ablate.py config/ablate_shakespeare_gpu.py --design=leave_one_out --model=llama \
#       --out_dir=out-ablate-gpu-out
# The text is Python source, because a model of this size overfits Shakespeare's before it has
# learned: no run passes its text more than once, except those at twice the tokens. 5 parts x 8
# seeds = 40 runs to report, 18 of the base, 9 for its curve of tokens, and 54 to choose learning
# rates: 121 runs. The sweep may be stopped and resumed at any time. Expect differences of 0.01
# nats and standard deviations of 0.004 to 0.010.
question = "Which part of LLaMA helps a GPT-2 of 11 M parameters on Python source?"
out_dir = "out-ablate-gpu"
design = "leave_one_in"
dataset = "python_source"
dtype = "float32"  # so that rows of several GPUs of one kind can be joined
prompt = "def "

# 6 * 12 * 384^2 + 2048 * 384 = 11.4 M parameters; 1000 steps * 64 * 256 tokens = 16 M tokens of the
# 17.6 M in the text: 6 * 11.4 M * 16 M = 1.1 PFLOP a run. 21 evaluations of 16 + 2 batches.
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
batch_size = 64
max_iters = 1000
eval_interval = 50
eval_tokens = 262144
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
beta2 = 0.99
dropout = 0.0
log_interval = 100
