# GPT-2's shelf: which part of a modern Transformer helps a GPT-2 that has learned?
#   python bench/ablate.py config/answer/gpt2.py --workers=2 --out_dir=out-gpt2
# One base, one shared control group, an arm for each part. A run takes about two minutes on one
# thread of a CPU that multiplies bfloat16: 12 arms x 12 seeds, 40 controls, 9 runs for the curve
# and 117 to choose rates, two at a time, are five hours.
# The rows hold 12 more seeds of one arm, from an earlier plan, which no verdict uses.
question = "Which parts help GPT-2?"
out_dir = "bench/results/answer/gpt2"
design = "arms"
arms = {
    "rope": dict(position="rope"),
    "swiglu": dict(mlp="swiglu", multiple_of=8),
    "rmsnorm": dict(norm="rmsnorm"),
    "no biases": dict(bias="none"),
    "untied head": dict(tie_embeddings=False),
    "all of llama": dict(arch="llama", multiple_of=8),
    "qk norm": dict(qk_norm="head"),
    "relu squared": dict(mlp="relu2"),
    "geglu": dict(mlp="geglu", multiple_of=8),
    "alibi": dict(position="alibi"),
    "no positions": dict(position="none"),
    # Of config/answer/tune_adamw.py: twice the rate is as good (1.779 both), half is 0.12 worse.
    "adamw": dict(optimizer="adamw", learning_rate=4e-3, min_lr=4e-4, beta2=0.99),
}
model = "gpt2"
dataset = "plays"
seeds = 12
controls = 40
match = "none"  # parameters are not matched; a gated MLP is two thirds as wide

# 4 * 12 * 128^2 = 0.8 M parameters; 1,080 steps * 12 * 128 tokens = 1.66 M characters of 4.3 M.
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
batch_size = 12
max_iters = 1080
log_interval = 90
eval_interval = 270
eval_tokens = 8192  # the last evaluation scores the whole split
compile = True  # 0.8 of the time of a step; the runs of one arm share what is compiled
# The best of the search of config/answer/tune.py, by the half of the text that chooses: its rates
# and warm-up, and a decay to a tenth (0.009 nats better than to zero, standard error 0.005).
optimizer = "muon"
learning_rate = 8e-3
min_lr = 8e-4
warmup_iters = 100

# Further columns, by --also=small and so on, once the rates are chosen: 0.2 M and 2.7 M parameters
# (4 * 12 * 64^2 and 6 * 12 * 192^2), and Python files in tokens of a vocabulary of 2,048.
_arms = ["rope", "swiglu", "rmsnorm", "no biases", "untied head", "all of llama"]
_fewer = dict(arms=_arms, seeds=8, controls=24, lr_grid=[1])
also = {
    "small": dict(n_embd=64, **_fewer),
    "large": dict(n_layer=6, n_head=6, n_embd=192, curve=[0.5, 2], **_fewer),
    "python": dict(dataset="python_source", prompt="def ", **_fewer),
}
