# LLaMA's shelf: what is each of its pieces worth, and which modern part helps it further?
#   python bench/ablate.py config/answer/llama.py --workers=2 --out_dir=out-llama
# The first five arms take a piece of LLaMA away; the others put a part in. A run takes about two
# minutes on one thread of a CPU that multiplies bfloat16: 29 arms x 12 seeds, 40 controls, 9 runs
# for the curve and 270 to choose rates, two at a time, are eleven hours.
# The rows hold 12 more seeds of some arms, from an earlier plan, which no verdict uses.
question = "Which parts help LLaMA?"
out_dir = "bench/results/answer/llama"
design = "arms"
arms = {
    "learned positions": dict(position="learned"),
    "layernorm": dict(norm="layernorm"),
    "gelu": dict(mlp="gelu"),
    "biases": dict(bias="all"),
    "tied head": dict(tie_embeddings=True),
    "qk norm": dict(qk_norm="head"),
    "attention gate": dict(attn_extra="gate_head"),
    "sink": dict(attn_extra="sink"),
    "value residual": dict(attn_extra="value_residual"),
    "value embeddings": dict(attn_extra="value_embed"),
    "x0 skip": dict(residual="scaled"),
    "hyper-connections": dict(residual="hyper"),
    "exclusive self-attention": dict(attn_extra="xsa"),
    "convolution": dict(conv=4),
    "no positions in every fourth layer": dict(nope_every=4),
    "alibi": dict(position="alibi"),
    "window of 32": dict(window=32),
    "rank 32": dict(low_rank=32),
    "2 key heads": dict(n_kv_head=2),
    "1 key head": dict(n_kv_head=1),
    "latent attention": dict(mixer="mla"),
    "differential attention": dict(mixer="differential"),
    "gated deltanet": dict(mixer="gated_delta", position="none"),
    "mamba-2": dict(mixer="mamba2", position="none"),
    "hybrid": dict(mixer="gated_delta,gated_delta,gated_delta,attention", position="none"),
    "experts": dict(mlp="moe"),
    "parallel block": dict(block="parallel"),
    "norms after the sublayer": dict(block="post"),
    # Of config/answer/tune_adamw.py: half the rate is 0.02 worse, twice 0.04.
    "adamw": dict(optimizer="adamw", learning_rate=4e-3, min_lr=4e-4, warmup_iters=200),
}
model = "llama"
dataset = "plays"
seeds = 12
controls = 40
match = "none"  # parameters are not matched; a gated MLP is two thirds as wide

# 4 * 12 * 128^2 = 0.8 M parameters; 1,080 steps * 12 * 128 tokens = 1.66 M characters of 4.3 M.
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
multiple_of = 8
batch_size = 12
max_iters = 1080
log_interval = 90
eval_interval = 270
eval_tokens = 8192  # the last evaluation scores the whole split
compile = True  # 0.8 of the time of a step; the runs of one arm share what is compiled
# The search of config/answer/tune.py found nothing better than its start: on the half of the text
# that chooses, a decay to a tenth is as good (1.519 both), half and twice the rate are 0.02 worse.
optimizer = "muon"
learning_rate = 8e-3
min_lr = 0.0
warmup_iters = 100

# Further columns, by --also=small and so on, once the rates are chosen: all parts at 0.2 M
# parameters (4 * 12 * 64^2), few runs and no search, as one would try them first; some with AdamW,
# at rates of their own; some on Python files in tokens of a vocabulary of 2,048. These multiply in
# float32: few CPUs have bfloat16, and so runs of any machine join. "large" is four times as much of
# everything, on a GPU: 4.2 M parameters (4 * 12 * 256^2 + 2 * 2,048 * 256) and 6.6 M tokens, in as
# many steps of four times the batch; config/answer/tune_large.py found the same rate for it.
# On a CPU, an evaluation of the Python files may hold 15 GB under glibc (docs/troubleshooting.md).
_removed = ["learned positions", "layernorm", "gelu", "biases", "tied head"]
_added = ["qk norm", "attention gate", "value residual", "x0 skip", "convolution"]
_fewer = dict(arms=_removed + _added, dtype="float32", seeds=8, controls=24)
_python = dict(dataset="python_source", prompt="def ", lr_grid=[1])
also = {
    "small": dict(
        n_embd=64,
        dtype="float32",
        seeds=4,
        controls=None,  # as many as runs of an arm, since it is a screening
        lr_grid=[1],
        screening=True,
        curve=[0.25, 0.5, 2],
    ),
    "adamw": _fewer | arms["adamw"],
    "python": _fewer | _python,
    "large": _fewer
    | _python
    | dict(
        n_embd=256,
        n_head=8,
        batch_size=48,
        seeds=4,
        controls=None,
        screening=True,
        curve=[0.25, 0.5, 2],
        device="cuda",
        compile=False,  # a step of this size costs a GPU less time than compiling
    ),
}
