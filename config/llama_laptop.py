# nanoGPT's GPU result on a laptop: 0.7 M parameters on two CPU cores come within 0.005 of the
# validation loss of 1.4697 that nanoGPT publishes for 10 M after three minutes on an A100.
# Six to seven minutes with bfloat16 instructions (AMX or AVX512-BF16), one of them compiling.
model = "llama"
out_dir = "out-llama-laptop"
dataset = "shakespeare_char"
log_interval = 100

# 3000 steps * 6 * 256 tokens = 4.6 M characters, 4.6 epochs: enough to overfit without dropout.
# Torch's fast attention on a CPU has no dropout, so the attention weights have none.
n_layer, n_head, n_kv_head, n_embd, block_size = 4, 4, 1, 128, 256
batch_size, max_iters, eval_interval = 6, 3000, 1500
dropout, attn_dropout = 0.05, 0.0
attn_extra = "xsa,value_embed"  # each is worth 0.01 here (bench/results/cpu_race_search.md)
optimizer, learning_rate, min_lr, warmup_iters, beta2 = "muon", 8e-3, 0.0, 100, 0.99
multiple_of = 8
compile = True  # for a minute, and then steps take two thirds of the time
