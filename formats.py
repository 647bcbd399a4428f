"""
Weights from and to other formats: one readable table per family, used in both directions.

    word, values, tensors = load_pretrained("gpt2-medium")  # or a folder, or owner/name on the hub
    model = Model(build(Config, values))
    load_weights(model, tensors)

What our model cannot express is refused: never weights that almost fit. Only safetensors are read
and written: a .bin or .pt file would have to be unpickled, which can run any code.
"""
import json
import re
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configurator import UserError

HUB = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
FETCHED = ["config.json", "model*.safetensors*", "tokenizer*", "vocab.json", "merges.txt"]
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # tables in older files, no weights


class Layout(NamedTuple):
    """How one tensor of theirs holds n of ours; c is their configuration."""

    split: Callable  # (theirs, n, c) -> n of ours
    join: Callable  # (n of ours, c) -> theirs


plain = Layout(lambda t, n, c: t.chunk(n), lambda parts, c: torch.cat(parts))  # one after the other
transposed = Layout(lambda t, n, c: t.t().chunk(n), lambda parts, c: torch.cat(parts).t())  # (in, out); a bias is as it is


class Family(NamedTuple):
    word: str  # of our model
    architecture: str  # their class
    prefix: str  # of their names, absent in files without the head
    suffixes: tuple  # what a row of `names` stands for
    keys: dict  # ours: theirs, of the configuration
    defaults: dict  # of their keys; int, as for those in `keys` alone: a size that must be given
    must: Callable  # c -> {key: values under which our model is the same function, first that of an absent key}
    ours: Callable  # c -> further values of our configuration
    theirs: Callable  # our tensors -> further keys of their configuration
    names: list  # (theirs, [ours], layout), {} is the number of the layer


GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", "transformer.", ("weight", "bias"),
    dict(block_size="n_positions", vocab_size="vocab_size", n_layer="n_layer", n_head="n_head", n_embd="n_embd", tie_embeddings="tie_word_embeddings"),
    {"tie_word_embeddings": True},
    must=lambda c: {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "n_inner": (4 * c["n_embd"],), "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    ours=lambda c: {"bias": True},
    theirs=lambda tensors: {},
    names=[
        ("transformer.wte", ["wte"], plain),
        ("transformer.wpe", ["wpe"], plain),
        ("transformer.h.{}.ln_1", ["blocks.{}.norm1"], plain),
        ("transformer.h.{}.attn.c_attn", ["blocks.{}.attn.wq", "blocks.{}.attn.wk", "blocks.{}.attn.wv"], transposed),
        ("transformer.h.{}.attn.c_proj", ["blocks.{}.attn.wo"], transposed),
        ("transformer.h.{}.ln_2", ["blocks.{}.norm2"], plain),
        ("transformer.h.{}.mlp.c_fc", ["blocks.{}.mlp.up"], transposed),
        ("transformer.h.{}.mlp.c_proj", ["blocks.{}.mlp.down"], transposed),
        ("transformer.ln_f", ["norm_f"], plain),
        ("lm_head", ["lm_head"], plain),
    ],
)

LLAMA = Family(
    "llama", "LlamaForCausalLM", "model.", ("weight",),
    dict(block_size="max_position_embeddings", vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
         n_kv_head="num_key_value_heads", n_embd="hidden_size", rope_theta="rope_theta", norm_eps="rms_norm_eps", tie_embeddings="tie_word_embeddings"),
    {"intermediate_size": int, "num_key_value_heads": None, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    must=lambda c: {
        "hidden_act": ("silu", "swish"), "head_dim": (c["hidden_size"] // c["num_attention_heads"],), "attention_bias": (False,),
        "mlp_bias": (False,), "rope_type": ("default",), "partial_rotary_factor": (1,), "sliding_window": (None,),
    },
    # Their width is any number, ours int(multiplier * int(8C/3)): the 0.5 keeps rounding from missing it by one.
    ours=lambda c: {"multiple_of": 1, "ffn_dim_multiplier": (c["intermediate_size"] + 0.5) / int(8 * c["hidden_size"] / 3)},
    theirs=lambda tensors: {"intermediate_size": len(tensors["blocks.0.mlp.gate.weight"])},
    names=[
        ("model.embed_tokens", ["wte"], plain),
        ("model.layers.{}.input_layernorm", ["blocks.{}.norm1"], plain),
        ("model.layers.{}.self_attn.q_proj", ["blocks.{}.attn.wq"], plain),
        ("model.layers.{}.self_attn.k_proj", ["blocks.{}.attn.wk"], plain),
        ("model.layers.{}.self_attn.v_proj", ["blocks.{}.attn.wv"], plain),
        ("model.layers.{}.self_attn.o_proj", ["blocks.{}.attn.wo"], plain),
        ("model.layers.{}.post_attention_layernorm", ["blocks.{}.norm2"], plain),
        ("model.layers.{}.mlp.gate_proj", ["blocks.{}.mlp.gate"], plain),
        ("model.layers.{}.mlp.up_proj", ["blocks.{}.mlp.up"], plain),
        ("model.layers.{}.mlp.down_proj", ["blocks.{}.mlp.down"], plain),
        ("model.norm", ["norm_f"], plain),
        ("lm_head", ["lm_head"], plain),
    ],
)

FAMILIES = {"gpt2": GPT2, "llama": LLAMA}  # by their model_type


def rows(family, n_layer):
    """(theirs, [ours], layout) of every tensor, layers and suffixes filled in."""
    for theirs, ours, layout in family.names:
        for i in range(n_layer if "{}" in theirs else 1):
            for suffix in family.suffixes:
                yield f"{theirs.format(i)}.{suffix}", [f"{name.format(i)}.{suffix}" for name in ours], layout


def some(names):
    """The first three of many names, for a message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def to_ours(config, tensors, where="config.json"):
    """(word of our model, values of its configuration, its tensors) from their config.json and tensors."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"cannot read a model of model_type {kind!r}", where, "choose from " + ", ".join(FAMILIES))
    family = FAMILIES[kind]
    rope = config.get("rope_parameters") or config.get("rope_scaling")  # the newer and the older place
    if rope:
        config = config | (rope if isinstance(rope, dict) else {"type": rope})
        config = {"rope_type": config.get("type")} | config
    config = {key: value for key, value in config.items() if value is not None}
    for key, default in (dict.fromkeys(family.keys.values(), int) | family.defaults).items():
        value, kinds = config.setdefault(key, default), {bool: (bool,), float: (int, float)}.get(type(default), (int,))
        if value is not None and (type(value) not in kinds or kinds != (bool,) and not value > 0):
            raise UserError(f"{key} is {'missing' if value is int else repr(value)}", where, "is this the config.json of a Hugging Face model?")
    for key, fitting in (family.must(config) | {"quantization_config": (None,)}).items():
        if config.get(key, fitting[0]) not in fitting:
            raise UserError(f"our {family.word} model cannot express {key}={config[key]!r}", where, f"it needs {fitting[0]!r} there")
    values = {ours: config[theirs] for ours, theirs in family.keys.items()} | family.ours(config)

    left = {name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name: t for name, t in tensors.items()}
    found, missing, fix = {}, [], "these are not the weights of this config.json"
    for theirs, ours, layout in rows(family, values["n_layer"]):
        if theirs in left:
            try:
                found |= zip(ours, layout.split(left.pop(theirs), len(ours), config), strict=True)
            except (RuntimeError, ValueError):
                raise UserError(f"{theirs} has a shape that does not fit", where, fix) from None
        elif theirs.endswith(".weight") and not (theirs == "lm_head.weight" and values["tie_embeddings"]):
            missing.append(theirs)
    left = [name for name in left if not BUFFERS.search(name)]
    if missing or left:
        what = f"there is no tensor {some(missing)}" if missing else f"our {family.word} model has no place for {some(left)}"
        raise UserError(what, where, fix)
    return family.word, values, found


def to_hf(word, values, tensors):
    """(their config.json, their tensors) from the word, the configuration and the tensors of a model of ours.
    What a family's `must` asks is what they take an absent key for, so that it need not be written."""
    kind, family = next((kind, family) for kind, family in FAMILIES.items() if family.word == word)
    config = {"model_type": kind, "architectures": [family.architecture]} | family.theirs(tensors)
    config |= {theirs: values[ours] for ours, theirs in family.keys.items()}
    if "bias" in family.suffixes:  # they always have biases: where ours has none, zeros
        with_bias = [name for name in tensors if name.startswith(("blocks.", "norm_f.")) and name.endswith(".weight")]
        tensors = {name.replace(".weight", ".bias"): tensors[name].new_zeros(len(tensors[name])) for name in with_bias} | tensors
    out = {}
    for theirs, ours, layout in rows(family, values["n_layer"]):
        tied = theirs == "lm_head.weight" and values["tie_embeddings"]
        if not tied and (theirs.endswith(".weight") or ours[0] in tensors):
            out[theirs] = layout.join([tensors[name] for name in ours], config).contiguous()
    return config, out


def fetch(name):
    """The folder of a model of the hub, downloaded at first use."""
    try:
        from huggingface_hub import HfApi, snapshot_download

        try:
            commit = HfApi().model_info(name, timeout=5).sha  # without the timeout a silent network is waited for forever
            return Path(snapshot_download(name, revision=commit, allow_patterns=FETCHED))
        except Exception:
            return Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=True))  # from an earlier download
    except Exception as error:  # the network, the hub and its client fail in many ways, all mean the same here
        why = (str((error.__context__ or error)).strip() or type(error).__name__).splitlines()[0]
        fix = f"download config.json and *.safetensors of huggingface.co/{name} elsewhere and give that folder"
        raise UserError(f"no such folder, and the hub does not answer: {why}", f"init_from={name}", fix) from None


def read_folder(folder):
    """config.json and the tensors, whole or in shards, of a folder."""
    tensors, path = {}, folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        files = [path] if (path := folder / "model.safetensors").exists() else sorted(folder.glob("*.safetensors"))
        if (path := folder / "model.safetensors.index.json").exists():
            files = sorted({folder / name for name in json.loads(path.read_text("utf-8"))["weight_map"].values()})
        for path in files:
            tensors |= load_file(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"cannot read this part of the model: {why}", path, "download the file again") from None
    if not tensors:
        pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
        what = f"{some(pickles)} would need unpickling, which can run any code" if pickles else "there is no *.safetensors here"
        raise UserError(what, folder, "get the model as safetensors")
    return config, tensors


def load_pretrained(name):
    """(word of our model, values of its configuration, its tensors) of a folder with config.json and
    *.safetensors, of gpt2[-medium|-large|-xl], or of owner/name on the Hugging Face hub."""
    folder = Path(name).expanduser()
    if name in HUB or not folder.exists():
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", HUB.get(name, name)):
            raise UserError("no such folder", f"init_from={name}", f"give scratch, resume, {', '.join(HUB)}, a folder, or owner/name of the hub")
        folder = fetch(HUB.get(name, name))
    if not folder.is_dir():
        raise UserError("this is not a folder", f"init_from={name}", "give the folder that holds config.json and *.safetensors")
    return to_ours(*read_folder(folder), folder / "config.json")


@torch.no_grad()
def load_weights(model, tensors):
    """Copy tensors into a model of ours: every one of them, and into every parameter. A head that the
    weights lack is their token embedding; a smaller block_size takes the first of the learned positions."""
    own, fix = dict(model.named_parameters()), "leave out the keys that change the architecture"
    tensors = {"lm_head.weight": tensors.get("wte.weight")} | tensors
    if "lm_head.weight" not in own:  # tied: it is wte.weight
        head = tensors.pop("lm_head.weight")
        if head is not tensors.get("wte.weight") and not torch.equal(head, tensors["wte.weight"]):
            raise UserError("these weights have a head apart from the embedding", "tie_embeddings=True", "use --tie_embeddings=False")
    if own.keys() != tensors.keys():
        missing, left = own.keys() - tensors.keys(), tensors.keys() - own.keys()
        what = f"there are no weights for {some(missing)}" if missing else f"the model has no place for {some(left)}"
        raise UserError(what, "init_from", fix)
    if "wpe.weight" in own:
        tensors["wpe.weight"] = tensors["wpe.weight"][: len(own["wpe.weight"])]
    wrong = [f"{name} is {tuple(tensors[name].shape)}, not {tuple(p.shape)}" for name, p in own.items() if tensors[name].shape != p.shape]
    if wrong:
        raise UserError(some(wrong), "init_from", fix)
    for name, p in own.items():
        p.copy_(tensors[name])
