# The best model that two CPU cores train in about 20 minutes, one of which compiles: 0.7 M
# parameters on 34 plays, four times the text of tiny-shakespeare. The plays leave out the
# validation split of tiny-shakespeare, so that the model can be scored on it, too:
#   python prepare.py plays
#   python train.py config/best_plays.py
#   python train.py --eval_only --init_from=out-best-plays --dataset=shakespeare_char
# The last command printed 1.2903, where nanoGPT publishes 1.4697 for 10 M parameters on an A100,
# which read tiny-shakespeare alone.
model = "llama"
out_dir = "out-best-plays"
dataset = "plays"
log_interval = 100
eval_tokens = 16384  # the last evaluation scores the whole split

# 7,000 steps * 6 * 256 tokens = 10.8 M characters, 2.5 epochs: so few need no dropout.
batch_size = 6
max_iters = 7000
eval_interval = 1750
dropout = 0.0

n_layer = 4
n_head = 4
n_kv_head = 1
n_embd = 128
block_size = 256
multiple_of = 8
qk_norm = "head"  # helps LLaMA (bench/results/answer)
attn_extra = "xsa,value_embed,gate_head"  # bench/results/cpu_race_search.md

optimizer = "muon"
learning_rate = 8e-3
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
compile = True  # it takes a minute; then a step takes two thirds of the time
