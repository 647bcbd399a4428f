# The answer in many settings: what is each part worth in a setting that is not ours?
#   python bench/ablate.py config/answer/settings.py --settings=4   # the first four
#   python bench/ablate.py config/answer/settings.py --dry_run
# A setting is a text, its tokens, an optimizer, a base, a size, a length of training and a context.
# The population is what a laptop can train: the two levels of each of eight factors.
#
#   A text       plays | Python files            E width    64 | 128
#   B tokens     bytes | BPE of 1,024            F layers   3 | 5
#   C optimizer  Muon | AdamW                    G length   short | long
#   D base       LLaMA | GPT-2                   H context  64 | 256
#
# The plan is 16 of the 256 settings, a fraction 2^(8-4) of resolution IV: E = BCD, F = ACD,
# G = ABC, H = ABD (Box, Hunter and Hunter 2005, chapter 6). Each level occurs in eight settings,
# and with each level of another factor in four.
#
# A length is in millions of tokens. AdamW gets twice the tokens of Muon, which brings it to about
# the same stage: so the factor C is the optimizer at equal stage. A base that does not end below
# the trigrams of its tokens, or whose loss still falls faster and faster, trains twice as long.
out_dir = "bench/results/answer/settings"

# The guess of the best learning rate at width 128. A setting tries a half to twice the guess.
_rates = {"muon": 8e-3, "adamw": 4e-3}


def _setting(text, tokens, optimizer, base, width, layers, million_tokens, context):
    """The keys of train.py that make a setting. A batch has 1,536 tokens, a head 32 channels."""
    steps = round(million_tokens * 1e6 / 1536)
    values = dict(
        dataset=f"{text}_{tokens}",
        optimizer=optimizer,
        model=base,
        n_embd=width,
        n_head=width // 32,
        n_layer=layers,
        block_size=context,
        batch_size=1536 // context,
        max_iters=steps,
        warmup_iters=steps // 10,
        learning_rate=_rates[optimizer] * (128 / width) ** 0.5,
        min_lr=0.0,
        eval_tokens=131072,
        device="cpu",
        dtype="float32",
        compile=False,  # so that any CPU goes on with the runs of another
    )
    if base == "llama":
        values["multiple_of"] = 8  # of the MLP's width: a gated MLP is two thirds as wide
    return values


# In the order in which they run: in the first four every factor is balanced.
settings = {
    "c04": _setting("plays", "byte", "adamw", "gpt2", 64, 3, 4.8, 256),
    "c06": _setting("plays", "bpe1024", "muon", "gpt2", 64, 5, 2.4, 64),
    "c11": _setting("python", "byte", "adamw", "llama", 128, 3, 1.6, 256),
    "c13": _setting("python", "bpe1024", "muon", "llama", 128, 5, 0.8, 64),
    "c01": _setting("plays", "byte", "muon", "llama", 64, 3, 0.8, 64),
    "c16": _setting("python", "bpe1024", "adamw", "gpt2", 128, 5, 4.8, 256),
    "c10": _setting("python", "byte", "muon", "gpt2", 128, 3, 2.4, 64),
    "c07": _setting("plays", "bpe1024", "adamw", "llama", 64, 5, 1.6, 256),
    "c14": _setting("python", "bpe1024", "muon", "gpt2", 64, 3, 0.8, 256),
    "c03": _setting("plays", "byte", "adamw", "llama", 128, 5, 4.8, 64),
    "c08": _setting("plays", "bpe1024", "adamw", "gpt2", 128, 3, 1.6, 64),
    "c09": _setting("python", "byte", "muon", "llama", 64, 5, 2.4, 256),
    "c12": _setting("python", "byte", "adamw", "gpt2", 64, 5, 1.6, 64),
    "c05": _setting("plays", "bpe1024", "muon", "llama", 128, 3, 2.4, 256),
    "c15": _setting("python", "bpe1024", "adamw", "llama", 64, 3, 4.8, 64),
    "c02": _setting("plays", "byte", "muon", "gpt2", 128, 5, 0.8, 256),
}

# The settings of the test. Their predictions are written before they run, and nothing is chosen
# on them: two of another fraction (E = -BCD), and two of a third text, between the levels.
held_out = {
    "h1": _setting("plays", "bpe1024", "muon", "llama", 64, 3, 2.4, 256),
    "h2": _setting("python", "byte", "adamw", "gpt2", 128, 5, 1.6, 64),
    "h3": _setting("summaries", "bpe1024", "muon", "llama", 96, 4, 1.4, 128),
    "h4": _setting("summaries", "byte", "adamw", "gpt2", 96, 4, 2.8, 128),
}

# A part is put into a base that lacks it, and taken out of a base that has it. Its worth is the
# same question in both: how many times the tokens does a model without it need?
arms = {
    "RoPE": dict(put_in=dict(position="rope"), take_out=dict(position="learned")),
    "SwiGLU": dict(put_in=dict(mlp="swiglu", multiple_of=8), take_out=dict(mlp="gelu")),
    "RMSNorm": dict(put_in=dict(norm="rmsnorm"), take_out=dict(norm="layernorm")),
    "No biases": dict(put_in=dict(bias="none"), take_out=dict(bias="all")),
    "Untied head": dict(
        put_in=dict(tie_embeddings=False),
        take_out=dict(tie_embeddings=True),
    ),
    "QK norm": dict(put_in=dict(qk_norm="head")),
    "Value residual": dict(put_in=dict(attn_extra="value_residual")),
    "Convolution": dict(put_in=dict(conv=4)),
}


# Further parts, which run only when they are named:
#   python bench/ablate.py config/answer/settings.py --arms="Window,Wide heads"
def _quarter_of_the_context(values):
    return values["block_size"] // 4


def _half_the_heads(values):
    return values["n_head"] // 2  # of three heads, one is left


_five = [arms[name] for name in ("RoPE", "SwiGLU", "RMSNorm", "No biases", "Untied head")]
_to_llama = {key: value for part in _five for key, value in part["put_in"].items()}
_to_gpt2 = {key: value for part in _five for key, value in part["take_out"].items()}
_convolutions = dict(conv_sites="keys,values,output,mlp_output")

more_arms = {
    "All five together": dict(put_in=_to_llama, take_out=_to_gpt2),
    "Attention gate": dict(attn_extra="gate_head"),
    "Input skip": dict(residual="scaled"),
    "Window": dict(window=_quarter_of_the_context),
    "Experts": dict(mlp="moe", multiple_of=8),
    "Wide heads": dict(n_head=_half_the_heads),  # of as many channels together
    "Half RoPE": dict(put_in=dict(rope_fraction=0.5), only=dict(model="llama")),
    "DyT": dict(norm="dyt"),
    "N-gram embeddings": dict(embed="ngram"),
    "Attention residuals": dict(residual="attn_res"),
    "mHC": dict(residual="mhc"),
    "Convolutions at four sites": _convolutions,
    "Shared keys and values": dict(kv_shared_by=2),
    # Do the gains of the five and of the convolutions add up? The other three models of the four
    # are the base, all five together, and convolutions at four sites.
    "LLaMA with convolutions": dict(put_in=_to_llama | _convolutions, only=dict(model="gpt2")),
    "GPT-2 with convolutions": dict(put_in=_to_gpt2 | _convolutions, only=dict(model="llama")),
}
