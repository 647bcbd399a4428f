"""Small variants with every arm of the gates."""

import pytest
import torch

from parts.architectures import CORNERS, configure, make, needed
from parts.catalogue import choices
from parts.slots import MIXER

SIZES = dict(block_size=24, vocab_size=29, n_layer=2, n_head=4, n_embd=16, multiple_of=8)
SLOTS = choices()  # {key: its words} of every key whose value is a word
# Numbers, switches, and values under which the words that need one show.
NUMBERS = [
    dict(n_kv_head=1),
    dict(window=5, full_every=2),
    dict(block_local=6),
    dict(attn_softcap=1.5),
    dict(logit_softcap=1.5),
    dict(low_rank=3),
    dict(embed_norm=True),
    dict(tie_embeddings=True),
    dict(tie_embeddings=False),
    dict(mlp_width=40),
    dict(norm_eps=0.5, norm="rmsnorm"),
    dict(bias="norm", norm="layernorm"),
    dict(rope_theta=50.0, position="rope"),
    dict(rope_fraction=0.5, position="rope"),
    dict(relative_clip=3, position="relative"),
    dict(ffn_dim_multiplier=1.3, mlp="swiglu"),
    dict(attn_extra="sink", position="alibi", attn_softcap=1.5),
    dict(nope_every=2, position="rope"),
    dict(attn_extra="value_embed,xsa", n_kv_head=2),
    dict(head_dim=6),
    dict(head_dim=6, n_kv_head=2, attn_extra="gate_element", position="relative"),
    dict(head_dim=6, mixer="mla"),
    dict(head_dim=2, mixer="differential", position="relative"),
    dict(conv=4),
    dict(conv=3, window=5),
    dict(conv=3, conv_sites="queries,keys,values,output", n_kv_head=2, qk_norm="head"),
    dict(conv_sites="input,mlp_input,mlp_inner,mlp_output", mixer="mamba2,attention"),
    dict(kv_shared_by=2, position="rope", qk_norm="head"),
    dict(kv_shared_by=2, window=5, attn_extra="xsa,sink", conv_sites="keys,output"),
    dict(streams=2, residual="hyper", block="post"),
    dict(residual="hyper", block="parallel"),
    dict(streams=1, residual="mhc", block="post"),
    dict(residual="attn_res", block="parallel", mlp="none"),
    dict(n_experts=1, top_k=1, mlp="moe", mlp_width=24),
    dict(top_k=3, mlp="moe"),
    dict(shared_experts=1, mlp="moe"),
    dict(shared_experts=2, shared_gate=True, mlp="moe", moe_balance="bias"),
    dict(mlp="moe_clamped", bias="all"),
    dict(bias="qkv", norm="rmsnorm"),
    dict(norm="rmsnorm_bare", qk_norm="head"),
    dict(latent_rank=6, mixer="mla"),
    dict(rope_head_dim=4, mixer="mla"),
    dict(mixer="gated_delta,attention"),
    dict(conv=2, mixer="mamba2", position="none"),
    dict(state_size=3, expand=2, mixer="mamba2", position="none"),
    dict(embed="ngram", ngram_max=3, ngram_rows=17, ngram_width=5, ngram_dropout=0.1),
]
SCALED = dict(position="rope", rope_factor=4.0, rope_original=16)


def arm_of(slot, word):
    """The change to a corner that swaps one slot, with what the word needs beside it."""
    if slot == "rope_scaling" and word != "none":
        return {slot: word} | SCALED
    return {slot: word} | needed(slot, word, configure({"model": "llama", "arch": "llama"}))


def with_keys(word):
    """A mixer with fewer heads of keys than of queries, and a window, where it reads these keys."""
    keys = dict(n_kv_head=2, window=5)
    return arm_of("mixer", word) | {key: keys[key] for key in keys if key in MIXER[word].reads}


ARMS = [
    arm_of(slot, word)
    for slot, words in SLOTS.items()
    for word in words
    if (slot, word) != ("bias", "norm") and slot != "conv_sites"  # NUMBERS has several at once
]
ARMS += [with_keys(word) for word in MIXER if with_keys(word) not in ARMS] + NUMBERS


def name(arm):
    """The id of a test of this arm."""
    return ",".join(f"{key}={value}" for key, value in arm.items())


CORNER = dict(arch=None)  # the readable model itself
# Of the gates, LLaMA's arms are enough for each run; GPT-2's come with -m "slow or not slow".
# test_models.py runs them on the readable models.
gate = pytest.mark.parametrize(
    ("base", "arm"),
    [
        pytest.param(base, arm, id=f"{name(arm)}-{base}", marks=marks)
        for arm in ARMS
        for base, marks in (("llama", []), ("gpt2", [pytest.mark.slow]))
    ],
)
bases = pytest.mark.parametrize("base", CORNERS)


def close(a, b, tolerance=1e-5):
    """Equal but for rounding, on the scale of the values."""
    return (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def config(base, arm=None, **more):
    """The configuration of a Variant: a corner with some of its parts swapped. arch=None: the
    configuration of the readable model itself."""
    return configure(SIZES | {"model": base, "arch": base} | more | (arm or {}))


def randomise(model, seed=0, std=0.4):
    """The model with nothing left at zero or one, so that every part shows; in evaluation, in
    float64."""
    torch.manual_seed(seed)
    model.zero_grad()
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "slopes" not in tensor_name and tensor.is_floating_point():
            torch.nn.init.normal_(tensor, 0.0, std)
            if "running_var" in tensor_name:
                tensor.abs_().add_(0.5)
    return model.eval().double()


def randomised(c, std=0.4):
    """A model of a configuration with random weights."""
    return randomise(make(c), std=std)


def tokens(c, B=2, T=None, seed=1):
    return torch.randint(
        c.vocab_size, (B, T or c.block_size), generator=torch.Generator().manual_seed(seed)
    )


def saved_bytes(model, B, T):
    """What autograd keeps, each storage once, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor  # held, so that no address is used twice
        return tensor

    x = torch.zeros(B, T, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, x)[1]  # noqa: F841, the graph lives as long as it does
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
