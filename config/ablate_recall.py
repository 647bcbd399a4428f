# Which mixers can look up what they have read? A screening for a CPU: 7 minutes on two cores.
#   python -m extras.tasks recall
#   python bench/ablate.py config/ablate_recall.py --workers=2
# The arms carry information from token to token by a window or by a state of a fixed size instead
# of full attention. 4 arms and the base again x 3 seeds = 15 runs of config/task_recall.py.
# Expect full attention to answer all, a window only what it sees, and the states something between.
# Read the columns `wrong answers` and `wrong tokens`; a loss mixes forgetting with uncertainty.
question = "Which mixers recall up to 12 keys with their values?"
out_dir = "out-ablate-recall"
design = "arms"
arms = {
    "window": dict(window=16),
    "gated_delta": dict(mixer="gated_delta", position="none"),  # a state has an order already
    "mamba2": dict(mixer="mamba2", position="none"),
}
model = "llama"
dataset = "task:recall"
match = "params"
screening = True
seeds = 3
dtype = "float32"  # so that rows of several machines can be joined

# As config/task_recall.py.
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
log_interval = 100
