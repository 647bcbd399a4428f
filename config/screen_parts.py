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
    f"{key}={value}": {key: value}
    for key, value in [
        *[("attn_extra", word) for word in ("gate_head", "gate_element", "sink", "xsa")],
        *[("attn_extra", "value_residual"), ("attn_extra", "value_embed")],
        *[("nope_every", 4), ("conv", 4)],
        *[("residual", "scaled"), ("residual", "hyper"), ("mlp", "moe")],
        *[("mixer", "mla"), ("mixer", "differential"), ("position", "t5"), ("position", "none")],
    ]
}
arms |= {word: dict(mixer=word, position="none") for word in ("gated_delta", "mamba2")}
arms["hybrid"] = dict(mixer="gated_delta,gated_delta,gated_delta,attention", position="none")

# 4 * 12 * 64^2 + 2 * 65 * 64 = 0.2 M parameters; 500 steps * 12 * 64 tokens = 0.4 M characters, a
# tenth of an epoch.
n_layer, n_head, n_embd, block_size = 4, 4, 64, 64
batch_size, max_iters, eval_interval, eval_tokens = 12, 500, 25, 9216
learning_rate, min_lr, warmup_iters = 3e-3, 0.0, 50
beta2 = 0.99  # few tokens in a step, so average over more of them
multiple_of = 8
dropout = 0.0
log_interval = 100
