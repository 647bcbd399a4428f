"""
Weights from and to other formats: one readable table per family, used in both directions.

    word, values, tensors = load_pretrained("gpt2-medium")  # or a folder, owner/name on the hub, or FILE.gguf
    config_class, model_class, values = choose({"model": word} | values)
    model = model_class(build(config_class, values))
    load_weights(model, tensors)

    python -m weights.export --export=hf --out_dir=out-llama-shakespeare --dest=llama-hf
    python -m weights.export --export=gguf --out_dir=out-llama-shakespeare --dest=llama.gguf

What our model, or theirs, cannot express is refused: never weights that almost fit. Only safetensors and
GGUF are read and written: a .bin or .pt file would have to be unpickled, which can run any code.
"""

import functools
import json
import re
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.configurator import build
from common.errors import UserError
from parts.architectures import ARCH, CORNERS, choose, idle
from parts.variant import VariantConfig
from tokens.tokenizer import tokenizer_from_json
from weights import gguf_format
from weights.families import FAMILIES, NEOX, READS, ROPE_NUMBERS
from weights.tokenizer_formats import from_tokenizer_json

HUB = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
TOKENIZER = ["tokenizer.json"]
FETCHED = ["config.json", "model*.safetensors*", *TOKENIZER]
BUFFERS = re.compile(
    r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$"
)  # tables in older files, no weights
NULL = (
    "sliding_window",
    "num_key_value_heads",
)  # keys whose null says something else than their absence
USUAL = {field.name: field.default for field in fields(VariantConfig)}
BIASES = ("none", "norm", "all")  # each with those before


def rows(family, values):
    """(theirs, [ours], layout) of every tensor, layers and suffixes filled in."""
    for theirs, ours, layout in family.names:
        norm = "norm" in ours[0]
        biased = (
            norm
            and values["norm"] == "layernorm"
            or not norm
            and values["bias"] == "all"
            and ours[0].startswith("blocks.")
        )
        for i in range(values["n_layer"] if "{}" in theirs else 1):
            for suffix in ("weight", "bias") if biased else ("weight",):
                yield (
                    f"{theirs.format(i)}.{suffix}",
                    [f"{name.format(i)}.{suffix}" for name in ours],
                    layout,
                )


def some(names):
    """The first three of many names, for a message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---------------------------------------------------------------- theirs to ours


def understand(config, where):
    """(family, values of VariantConfig) of their config.json."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"cannot read a model of model_type {kind!r}",
            where,
            "choose from " + ", ".join(FAMILIES),
        )
    family = FAMILIES[kind]
    rope = config.get("rope_parameters") or config.get(
        "rope_scaling"
    )  # the newer and the older place
    if rope:
        config = config | (rope if isinstance(rope, dict) else {"type": rope})
        config = {"rope_type": config.get("type")} | config
    config = {
        family.older.get(key, key): value
        for key, value in config.items()
        if value is not None or key in NULL
    }
    numbers = {
        ROPE_NUMBERS[ours]: float if ours == "rope_factor" else int
        for ours in READS.get(str(config.get("rope_type")), [])
    }
    for key, default in (
        dict.fromkeys(family.keys.values(), int) | family.defaults | numbers
    ).items():
        value, kind = (
            config.setdefault(key, default),
            default if isinstance(default, type) else int if default is None else type(default),
        )
        fits = type(value) is kind or kind is float and type(value) is int
        if value is not None and (not fits or kind in (int, float) and value <= 0):
            raise UserError(
                f"{key} is {'missing' if value is default else repr(value)}",
                where,
                "is this the config.json of a Hugging Face model?",
            )
    allowed = {
        theirs: [word for group in words.values() for word in group]
        for theirs, words in family.words.values()
    }
    for key, fitting in (allowed | family.must(config) | {"quantization_config": (None,)}).items():
        if config.get(key, fitting[0]) not in fitting:
            raise UserError(
                f"our model cannot express {key}={config[key]!r}",
                where,
                f"it needs {' or '.join(map(repr, fitting))} there",
            )
    values = family.slots | {ours: config[theirs] for ours, theirs in family.keys.items()}
    for ours, (theirs, words) in family.words.items():
        values[ours] = next(word for word, group in words.items() if config[theirs] in group)
    return family, values | family.ours(config)


def simplest(values):
    """(word, values) for variants.choose: a readable model's where all its parts are the same."""
    word = "gpt2" if values["norm"] == "layernorm" else "llama"
    own = {field.name for field in fields(CORNERS[word][0])}
    usual = (
        USUAL
        | ARCH[word]
        | {"mlp_width": 4 * values["n_embd"] if word == "gpt2" else values["mlp_width"]}
    )
    if any(usual[key] != value for key, value in values.items() if key not in own):
        return word, {key: value for key, value in values.items() if key not in idle(values)}
    further = (
        {"bias": values["bias"] == "all"}
        if word == "gpt2"
        else llama_width(values["mlp_width"], values["n_embd"])
    )
    return word, {key: value for key, value in values.items() if key in own} | further


def llama_width(width, n_embd):
    """Their width is any number, ours int(multiplier * int(8C/3)): the 0.5 keeps rounding from missing it by one."""
    return {"multiple_of": 1, "ffn_dim_multiplier": (width + 0.5) / int(8 * n_embd / 3)}


def to_ours(config, tensors, where="config.json"):
    """(word of our model, values of its configuration, its tensors) from their config.json and tensors."""
    family, values = understand(config, where)
    word, told = simplest(values)
    names = {
        name: name.replace("lm_head.", "embed_out.") if family is NEOX else name for name in tensors
    }  # NeoX's has had both
    left = {
        name
        if name.startswith((family.prefix, "lm_head.", "embed_out."))
        else family.prefix + name: tensors[old]
        for old, name in names.items()
    }
    found, missing, fix = {}, [], "these are not the weights of this config.json"
    for theirs, ours, layout in rows(family, values):
        if theirs in left:
            try:
                found |= zip(ours, layout.split(left.pop(theirs), len(ours), values), strict=True)
            except (RuntimeError, ValueError):
                raise UserError(f"{theirs} has a shape that does not fit", where, fix) from None
        elif not (ours == ["lm_head.weight"] and values["tie_embeddings"]):
            missing.append(theirs)
    left = [name for name in left if not BUFFERS.search(name)]
    if missing or left:
        what = (
            f"there is no tensor {some(missing)}"
            if missing
            else f"our {word} model has no place for {some(left)}"
        )
        raise UserError(what, where, fix)
    return word, told, found


@functools.cache
def fetch(name, key="init_from"):
    """The folder of a model of the hub, downloaded at first use: all that is needed, or its tokenizer alone."""
    wanted = FETCHED if key == "init_from" else TOKENIZER
    try:
        from huggingface_hub import HfApi, snapshot_download

        try:
            commit = (
                HfApi().model_info(name, timeout=5).sha
            )  # without the timeout a silent network is waited for forever
            return Path(snapshot_download(name, revision=commit, allow_patterns=wanted))
        except Exception:
            return Path(
                snapshot_download(name, allow_patterns=wanted, local_files_only=True)
            )  # from an earlier download
    except (
        Exception
    ) as error:  # the network, the hub and its client fail in many ways, all mean the same here
        why = (str(error.__context__ or error).strip() or type(error).__name__).splitlines()[0]
        fix = f"download {' and '.join(wanted)} of huggingface.co/{name} elsewhere and give that folder"
        raise UserError(
            f"no such folder, and the hub does not answer: {why}", f"{key}={name}", fix
        ) from None


def read_folder(folder):
    """config.json and the tensors, whole or in shards, of a folder."""
    tensors, path = {}, folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        files = (
            [path]
            if (path := folder / "model.safetensors").exists()
            else sorted(folder.glob("*.safetensors"))
        )
        if (path := folder / "model.safetensors.index.json").exists():
            files = sorted(
                {
                    folder / name
                    for name in json.loads(path.read_text("utf-8"))["weight_map"].values()
                }
            )
        for path in files:
            tensors |= load_file(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(
            f"cannot read this part of the model: {why}", path, "download the file again"
        ) from None
    if not tensors:
        pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
        what = (
            f"{some(pickles)} would need unpickling, which can run any code"
            if pickles
            else "there is no *.safetensors here"
        )
        raise UserError(what, folder, "get the model as safetensors")
    return config, tensors


def find(name, key="init_from"):
    """The folder, or the GGUF file, that a name stands for; a message calls it what `key` says."""
    path = Path(name).expanduser()
    if name in HUB or not name or not path.exists():
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", HUB.get(name, name)) or name.endswith(".gguf"):
            words = ", ".join(
                ["scratch", "resume", *HUB]
                if key == "init_from"
                else ["auto", "char", "byte", *HUB]
            )
            raise UserError(
                "no such folder or file",
                f"{key}={name}",
                f"give {words}, a folder, a .gguf file, or owner/name of the hub",
            )
        path = fetch(HUB.get(name, name), key)
    if not path.is_dir() and path.suffix != ".gguf":
        raise UserError(
            "this is not a folder",
            f"{key}={name}",
            "give the folder of a model, with its config.json, *.safetensors and tokenizer.json, or a .gguf file",
        )
    return path


def load_pretrained(name):
    """(word of our model, values of its configuration, its tensors) of a folder with config.json and
    *.safetensors, of a GGUF file, of gpt2[-medium|-large|-xl], or of owner/name on the Hugging Face hub."""
    path = find(name)
    if path.suffix == ".gguf":
        return to_ours(*gguf_format.read(path), path)
    return to_ours(*read_folder(path), path / "config.json")


def load_tokenizer(name, key="init_from"):
    """The tokenizer that belongs to the weights of load_pretrained(name)."""
    path = find(name, key)
    if path.suffix == ".gguf":
        return tokenizer_from_json(gguf_format.read_tokenizer(path))
    path = path / "tokenizer.json"
    try:
        whole = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the tokenizer: {error}", path, "prepare the text with a tokenizer of ours"
        ) from None
    return tokenizer_from_json(from_tokenizer_json(whole, path))


def same_tokens(name, tokenizer):
    """Whether a tokenizer gives the ids that the weights of load_pretrained(name) know; None where theirs cannot be read."""
    try:
        theirs = load_tokenizer(name)
    except UserError:
        return None
    size = range(min(tokenizer.vocab_size, theirs.vocab_size))
    return all(tokenizer.decode_bytes([i]) == theirs.decode_bytes([i]) for i in size)


@torch.no_grad()
def load_weights(model, tensors):
    """Copy tensors into a model of ours: every one of them, and into every parameter. A head that the
    weights lack is their token embedding; a smaller block_size takes the first of the learned positions."""
    own, fix = dict(model.named_parameters()), "leave out the keys that change the architecture"
    tensors = {"lm_head.weight": tensors.get("wte.weight")} | tensors
    if "lm_head.weight" not in own:  # tied: it is wte.weight
        head = tensors.pop("lm_head.weight")
        if head is not tensors.get("wte.weight") and not torch.equal(head, tensors["wte.weight"]):
            raise UserError(
                "these weights have a head apart from the embedding",
                "tie_embeddings=True",
                "use --tie_embeddings=False",
            )
    if own.keys() != tensors.keys():
        missing, left = own.keys() - tensors.keys(), tensors.keys() - own.keys()
        what = (
            f"there are no weights for {some(missing)}"
            if missing
            else f"the model has no place for {some(left)}"
        )
        raise UserError(what, "init_from", fix)
    if "wpe.weight" in own:
        tensors["wpe.weight"] = tensors["wpe.weight"][: len(own["wpe.weight"])]
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(p.shape)}"
        for name, p in own.items()
        if tensors[name].shape != p.shape
    ]
    if wrong:
        raise UserError(some(wrong), "init_from", fix)
    for name, p in own.items():
        p.copy_(tensors[name])


def open_pretrained(name):
    """(model in evaluation mode, its own tokenizer) of what load_pretrained takes: all that sampling needs."""
    word, values, tensors = load_pretrained(name)
    config_class, model_class, values = choose({"model": word} | values)
    model = model_class(build(config_class, values))
    load_weights(model, tensors)
    return model.eval(), load_tokenizer(name)
