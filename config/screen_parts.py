# The parts that joined the shelf since 2024, each in a tiny LLaMA: a screening for a CPU.
#   python bench/ablate.py config/screen_parts.py --workers=2
# 18 arms, the base, and the base again, with 3 seeds: 60 runs of 500 steps, two at a time on one
# thread each: 60 / 2 * 25 to 35 s = 13 to 18 minutes. Three seeds at the base's rate show only
# large effects; the report ranks the arms and says which are larger than the noise. At a width of
# 64 and 0.4 M tokens, experts and states have little to win: expect conv ahead, and most arms
# within the noise.
question = "Which of the recent parts does a tiny LLaMA feel at all?"
out_dir = "out-screen-parts"
model = "llama"
dataset = "plays"
screening = True
seeds = 3
dtype = "float32"  # so that rows of several machines can be joined
prompt = "ROMEO:"
arms = {
    # keys of attention
    "attn_gate=head": dict(attn_gate="head"),
    "attn_gate=element": dict(attn_gate="element"),
    "attn_sink": dict(attn_sink=True),
    "nope_every=4": dict(nope_every=4),
    "value_residual": dict(value_residual=True),
    "value_embed": dict(value_embed=True),
    "xsa": dict(xsa=True),
    "conv=4": dict(conv=4),
    # the residual stream
    "scaled": dict(residual="scaled"),
    "hyper": dict(residual="hyper"),
    # experts
    "moe": dict(mlp="moe"),
    # other mixers
    "mla": dict(mixer="mla"),
    "differential": dict(mixer="differential"),
    "gated_delta": dict(mixer="gated_delta", position="none"),
    "mamba2": dict(mixer="mamba2", position="none"),
    "hybrid": dict(mixer="gated_delta,gated_delta,gated_delta,attention"),
    # positions
    "t5": dict(position="t5"),
    "none": dict(position="none"),
}

# 4 * 12 * 64^2 + 2 * 65 * 64 = 0.2 M parameters; 500 steps * 12 * 64 tokens = 0.4 M characters, a
# tenth of an epoch.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 500, 25, 9216
learning_rate, min_lr, warmup_iters = 3e-3, 0.0, 50
beta2 = 0.99  # few tokens in a step, so average over more of them
multiple_of = 8
dropout = 0.0
log_interval = 100
