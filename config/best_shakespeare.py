# nanoGPT's GPU result on a laptop: 0.7 M parameters on two CPU cores end at a validation loss of
# 1.463 to 1.476 (three seeds, mean 1.468), where nanoGPT publishes 1.4697 for 10 M after three
# minutes on an A100. It takes two to two and a half minutes on a Xeon with bfloat16 instructions
# (AMX). bench/results/cpu_race_search.md lists what was tried, and longer runs.
model = "llama"
out_dir = "out-best-shakespeare"
dataset = "shakespeare_char"
log_interval = 100

# 1750 steps * 6 * 256 tokens = 2.7 M characters, 2.7 epochs. So few need no
# dropout: with 0.05 one run was 0.028 nats worse (bench/results/cpu_race_search.md).
batch_size = 6
max_iters = 1750
eval_interval = 875
eval_tokens = 16384  # the last evaluation scores the whole split
dropout = 0.0

n_layer = 4
n_head = 2
n_kv_head = 1
n_embd = 128
block_size = 256
multiple_of = 8
qk_norm = "head"  # helps LLaMA, and pays in time (bench/results/answer)
attn_extra = "xsa,gate_head"  # these and the input skip: bench/results/cpu_race_search.md
residual = "scaled"  # the input skip

optimizer = "muon"
learning_rate = 8e-3
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
compile = True  # it takes half a minute; then a step takes two thirds of the time
