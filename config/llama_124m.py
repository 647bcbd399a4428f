# LLaMA with the parameters and tokens of config/gpt2_124m.py, so that the two can be compared. We
# have not run it yet.
#   python prepare.py openwebtext
#   torchrun --standalone --nproc_per_node=8 train.py config/llama_124m.py
model = "llama"
out_dir = "out-llama-124m"
dataset = "openwebtext"

# 480 sequences * 1024 tokens = 491,520 tokens a step, over all GPUs, in as few forward passes as
# memory allows. We assume up to 1 GB for a sequence, and have not measured it on a GPU.
# 600,000 steps = 295 B tokens, 33 times the 9 B of OpenWebText.
batch_size = 60 if device_memory > 75 else 30 if device_memory > 38 else 12
gradient_accumulation_steps = 480 // batch_size
block_size = 1024
max_iters = 600000
lr_decay_iters = 600000

# 12 * (4 * 768^2 + 3 * 768 * 2048) + 50304 * 768 = 123.6 M parameters: GPT-2's less its positions.
# The head is tied, unlike LLaMA's: an untied head would add 38.6 M parameters.
n_layer = 12
n_head = 12
n_embd = 768
vocab_size = 50304  # GPT-2's 50,257 rounded up to a multiple of 64: faster matrix products
multiple_of = 256  # 8/3 * 768 = 2048
tie_embeddings = True
dropout = 0.0

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 1e-1
eval_interval = 1000
eval_tokens = 200 * 12 * 1024  # 2.5 M of the 4.4 M validation tokens
log_interval = 10
