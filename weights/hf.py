"""
Read models in Hugging Face's format into ours:

    python sample.py --init_from=gpt2-medium --start="To be"
    python train.py config/finetune_shakespeare.py --init_from=FOLDER     # or owner/name

families.py holds a table of theirs and ours for each family. A model that our code would compute
differently is refused. Only safetensors are read: unpickling a .bin or .pt file can run any code.
"""

import functools
import os
import re
from dataclasses import fields
from pathlib import Path

import torch

from common.configurator import PositiveFloat, PositiveInt, check
from common.errors import UserError, is_out_of_memory, one_line
from common.files import read_json
from parts.architectures import ARCH, CORNERS, configure, make, without_effect
from parts.costs import NoInitialValues
from parts.variant import VariantConfig
from tokens.data import decode_alike
from tokens.tokenizer import refuse_old_form, tokenizer_from_json
from weights import checkpoint, checks
from weights.checks import check_fit, check_vocabulary, first_three, misfits, read_tensors
from weights.families import FAMILIES, NEOX, ROPE_NUMBERS, ROPE_READS
from weights.tokenizers import read_marks

HUB = {f"gpt2{size}": f"openai-community/gpt2{size}" for size in ("", "-medium", "-large", "-xl")}
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
TOKENIZER += ["chat_template.jinja"]
INDEX = "model.safetensors.index.json"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors")
FETCHED = ["model*.safetensors", INDEX, ADAPTERS[0], *TOKENIZER]

# What torch.compile, DDP, FSDP and activation checkpointing put into a name.
WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Buffers that older files store among the weights.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
IN_ROPE = ("rope_type", "factor")  # they count only inside the rope's keys
NULLABLE = ("sliding_window", "num_key_value_heads", "final_logit_softcapping")  # null is a value
DEFAULTS = {field.name: field.default for field in fields(VariantConfig)}
DAMAGED = "download the file again"
NO_CONFIG = "is this the config.json of a Hugging Face model?"
UNFIT = "these are not the weights of this config.json"


# ---------------------------------------------------------------- their configuration to ours


def understand(config, where):
    """(family, values of VariantConfig) of their config.json. Raises UserError that names the key
    if a value has the wrong type or range, or if our model cannot express it."""
    kind = config.get("model_type")
    if kind not in [*FAMILIES]:
        what = f"cannot read a model of model_type {one_line(kind)}"
        raise UserError(what, where, "choose from " + ", ".join(FAMILIES))
    family = FAMILIES[kind]
    given = flat(family, config, where)
    c = family.absent | given
    values = dict(family.slots)
    rope_key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = f"{rope_key} of {where}"
    for ours, key in family.keys.items():
        place = rope if key.name in IN_ROPE else where
        value = typed(c, key, place)
        c[key.name] = value  # with the defaults, which the functions in `fixed` below read
        if key.words:
            our_words = {}  # {their word: ours}
            for our_word, their_words in key.words.items():
                our_words |= dict.fromkeys(their_words, our_word)
            check_expressible(c, key.name, tuple(our_words), place)
            value = our_words[value]
        values[ours] = DEFAULTS[ours] if value is None else value
    for key, fitting in (family.fixed | {"quantization_config": None}).items():
        if callable(fitting):
            fitting = fitting(c)
        check_expressible(c, key, fitting, where)

    values["mlp_width"] = values.get("mlp_width") or 4 * values["n_embd"]
    if values.get("head_dim") and values["head_dim"] * values["n_head"] == values["n_embd"]:
        values["head_dim"] = None  # the usual width
    if "rope_scaling" in values:
        if values["rope_scaling"] != "none" and "factor" not in given:
            raise UserError("factor is missing", rope, NO_CONFIG)
        # As in transformers: the original context defaults to the model's context.
        values["rope_original"] = c[ROPE_NUMBERS["rope_original"]] or values["block_size"]
        for number in ROPE_NUMBERS.keys() - ROPE_READS.get(values["rope_scaling"], set()):
            del values[number]
    return family, values


def typed(c, key, where):
    """The value of a Key, or its default. Raises UserError if it has the wrong type or range."""
    required = isinstance(key.default, type)
    value = c.get(key.name, None if required else key.default)
    if value is None:
        if required:
            raise UserError(f"{key.name} is missing", where, NO_CONFIG)
        return None
    kind = PositiveInt
    if isinstance(key.default, float):
        kind = PositiveFloat
    elif isinstance(key.default, bool | str):
        kind = type(key.default)
    try:
        return check(key.name, value, kind, where)
    except UserError as error:
        raise UserError(one_line(error.parts[0]), where, NO_CONFIG) from None


def check_expressible(c, key, fitting, where):
    """Raise UserError if our model cannot express their value of a key. fitting: the value that it
    can, or a tuple of several; the first is also what absence means."""
    if not isinstance(fitting, tuple):
        fitting = (fitting,)
    if c.get(key, fitting[0]) not in fitting:
        what = f"our model cannot express {key}={one_line(repr(c[key]), 80)}"
        raise UserError(what, where, f"it must be {' or '.join(map(repr, fitting))}")


def flat(family, config, where):
    """Their config.json with the keys of rope_scaling (or the newer rope_parameters) moved to the
    top level, and all keys renamed as in the family's table."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        rope = {"type": rope}
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        what = f"our model cannot express a separate rope for {first_three(nested)}"
        raise UserError(what, where, "it needs the same rope in all layers")
    if rope:
        rope = {"rope_type": rope.get("type")} | rope
    rope = {family.in_rope.get(key, key): value for key, value in rope.items()}

    top = {family.older.get(key, key): config[key] for key in config if key not in IN_ROPE}
    merged = top | rope
    original = ROPE_NUMBERS["rope_original"]  # the top level has priority
    merged[original] = top.get(original) or merged.get(original)
    return {key: value for key, value in merged.items() if value is not None or key in NULLABLE}


def simplest(values):
    """(word, values) for configure: the values of a readable model if it has all the parts."""
    word = "gpt2" if values["norm"] == "layernorm" else "llama"
    config_class, _ = CORNERS[word]
    readable_keys = {field.name for field in fields(config_class)}
    built_in = DEFAULTS | ARCH[word]  # what the readable model has for the other keys
    built_in["mlp_width"] = 4 * values["n_embd"]
    if word == "llama":
        built_in["mlp_width"] = values["mlp_width"]  # its multiplier gives it any width
    others = [key for key in values if key not in readable_keys]
    if any(values[key] != built_in[key] for key in others):
        unread = without_effect(values)
        return word, {key: value for key, value in values.items() if key not in unread}

    kept = {key: value for key, value in values.items() if key in readable_keys}
    if word == "gpt2":
        return word, kept | {"bias": values["bias"] == "all"}
    return word, kept | llama_width(values["mlp_width"], values["n_embd"])


def llama_width(width, n_embd):
    """The keys that give a LLaMA's MLP exactly `width` features. Our model computes
    int(multiplier * int(8C/3)); the 0.5 protects the result from a rounding error of one."""
    return {"multiple_of": 1, "ffn_dim_multiplier": (width + 0.5) / int(8 * n_embd / 3)}


# ---------------------------------------------------------------- their tensors to ours


def to_ours(config, tensors, where="config.json"):
    """(word of our model, values of its configuration, its tensors) from their config.json and
    tensors. Raises UserError if the two do not fit, before anything of these sizes is made."""
    family, values = understand(config, where)
    for key in values.keys() & {"n_layer", "n_experts"}:
        if values[key] > len(tensors):
            what = f"{family.keys[key].name} is {values[key]}, but there are {len(tensors)} tensors"
            raise UserError(what, where, UNFIT)
    weights = split(family, values, tensors, where)
    head = weights.get("lm_head.weight")
    if values["tie_embeddings"] and head is not None:  # transformers ties equal weights only
        values["tie_embeddings"] = torch.equal(head, weights["wte.weight"].to(head.dtype))

    word, keys = simplest(values)
    check_fit({"model": word} | keys, weights, where, UNFIT)
    return word, keys, weights


def split(family, values, stored, where):
    """{our name: tensor} from their tensors. Raises UserError if one is missing or does not fit."""
    left = with_prefix(family, stored)
    theirs_of = {ours[0]: theirs for theirs, ours, _ in family.names}
    wte = f"{theirs_of['wte']}.weight"
    head = f"{theirs_of['lm_head']}.weight"
    if values["tie_embeddings"] and wte not in left and head in left:
        left[wte] = left.pop(head)  # a tied matrix may be stored under either name
    weights = {}
    missing = []
    for theirs, ours, layout in tensor_rows(family, values):
        names = expert_names(theirs, values)
        if left.keys() >= set(names):
            tensors = [left.pop(name) for name in names]
            try:
                joined = torch.stack(tensors) if "*" in theirs else tensors[0]
                weights |= zip(ours, layout.split(joined, len(ours), values), strict=True)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                if is_out_of_memory(error):
                    raise
                what = f"{theirs} has a shape that does not fit, {tuple(tensors[0].shape)}"
                raise UserError(what, where, UNFIT) from None
        elif ours != ["lm_head.weight"] or not values["tie_embeddings"]:
            missing += [name for name in names if name not in left]
    if missing:
        raise UserError(f"there is no tensor {first_three(missing)}", where, UNFIT)
    if left:
        raise UserError(f"our model has no place for {first_three(left)}", where, UNFIT)
    return weights


def with_prefix(family, stored):
    """{complete name: tensor} of a file, which may omit the family's prefix."""
    tensors = {}
    for name, tensor in stored.items():
        if family is NEOX:  # files have either name for its head
            name = name.replace("lm_head.", "embed_out.")
        if not name.startswith((family.prefix, "lm_head.", "embed_out.")):
            name = family.prefix + name
        tensors[name] = tensor
    return tensors


def tensor_rows(family, values):
    """(theirs, [ours], layout) of every tensor, with layer numbers and suffixes filled in. A * in
    theirs stands for the number of each expert."""
    complete = []
    for theirs, ours, layout in family.names:
        for suffix in suffixes(ours[0], values):
            complete.append((theirs + suffix, [name + suffix for name in ours], layout))
    for theirs, ours, layout in complete + family.tensors:
        for layer in range(values["n_layer"] if "{}" in theirs else 1):
            yield theirs.format(layer), [name.format(layer) for name in ours], layout


def suffixes(ours, values):
    """The tensors of a linear map or norm of ours."""
    if "norm" in ours:
        biased = values["norm"] == "layernorm"
    elif values["bias"] == "qkv":
        biased = ours.endswith(("attn.wq", "attn.wk", "attn.wv"))
    else:
        biased = values["bias"] == "all" and ours.startswith("blocks.")
    return [".weight", ".bias"] if biased else [".weight"]


def expert_names(name, values):
    """The tensor's name, or the names of the tensors of all experts if it has a *."""
    if "*" not in name:
        return [name]
    return [name.replace("*", str(number)) for number in range(values["n_experts"])]


# ---------------------------------------------------------------- files and folders


@functools.cache
def fetch(name, key="init_from"):
    """The folder of a model of the hub, downloaded at first use. Unless `key` is init_from, only
    its tokenizer is downloaded. If the hub does not answer, an earlier download is used."""
    from huggingface_hub import HfApi, snapshot_download  # here, since it is rarely needed

    wanted = FETCHED if key == "init_from" else TOKENIZER
    try:
        try:  # without a timeout, an unresponsive network blocks forever
            HfApi().model_info(name, timeout=5)
            return Path(snapshot_download(name, allow_patterns=wanted))
        except Exception:
            return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except Exception as error:  # the network, the hub and its client fail in many ways
        cause = str(error.__context__ or error).strip() or type(error).__name__
        what = f"no such folder, and the hub does not give it: {cause.splitlines()[0]}"
        needed = "tokenizer.json"
        if key == "init_from":
            needed = "config.json, tokenizer.json and the weights"
        fix = f"check the name, or download {needed} of huggingface.co/{name} and give its folder"
        raise UserError(what, f"{key}={name}", fix) from None


def find(name, key="init_from"):
    """The folder that a name stands for. `key` is the key that messages name."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no home folder
    if not name or not os.path.exists(path):  # False for a name that is too long
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", HUB.get(name, name)):
            own = "char, byte, bpe, " if key.endswith("tokenizer") else ""
            fix = f"give {own}{', '.join(HUB)}, a folder, or owner/name of the hub"
            if runs := checkpoint.runs_beside(name):
                fix = f"{fix}; runs: {runs}"
            raise UserError("no such folder", f"{key}={name}", fix)
        return fetch(HUB.get(name, name), key)
    checks.check_folder(path, f"{key}={name}")
    return path


def read_folder(folder):
    """(config.json, {name: tensor}) of a folder, with the tensors in one file or in shards."""
    checks.check_is_model(folder)
    # transformers 4 writes Mamba-2's limits with Infinity, which JSON does not have.
    config = read_json(folder / "config.json", DAMAGED, infinity=True)
    tensors = {}
    places = {}
    for path in weight_files(folder):
        for name, tensor in read_tensors(path, DAMAGED, unread=BUFFERS).items():
            name = WRAPPERS.sub("", name)
            if name in tensors:
                what = f"{name} is in {places[name]} and in {path.name}"
                raise UserError(what, folder, "move the files of another model away")
            tensors[name] = tensor
            places[name] = path.name
    if not tensors:
        checks.refuse_without_tensors(folder, config)
    return config, tensors


def weight_files(folder):
    """The safetensors files of a model: model.safetensors, else the shards that the index names,
    else all there are. Raises UserError if an adapter changes the model."""
    for name in ADAPTERS:
        if (folder / name).exists():
            fix = "merge it into the weights (peft: merge_and_unload), or move it away"
            raise UserError(f"{name} is of an adapter, which changes the model", folder, fix)

    index = folder / INDEX
    if index.is_file() and not (folder / "model.safetensors").is_file():
        shards = read_json(index, DAMAGED).get("weight_map")
        named = [*shards.values()] if isinstance(shards, dict) else [None]
        if not all(type(name) is str and Path(name).name == name for name in named):
            raise UserError("its weight_map does not name files of this folder", index, DAMAGED)
        return [folder / name for name in sorted({*named})]
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "*.safetensors"):
        paths = sorted(folder.glob(pattern))
        if paths:
            return paths
    return []


def load_pretrained(name):
    """(word of our model, values of its configuration, its tensors) of a folder with config.json
    and *.safetensors, of gpt2[-medium|-large|-xl], or of owner/name on the hub. Raises UserError if
    it is missing or damaged, or if our model cannot express it."""
    path = find(name)
    return to_ours(*read_folder(path), path / "config.json")


def load_tokenizer(name, key="init_from"):
    """The tokenizer that belongs to the weights of load_pretrained(name), or of a run folder."""
    path = find(name, key)
    if checkpoint.steps(path):
        stored = checkpoint.read(checkpoint.find(path))[2]
        refuse_old_form(stored, f"{key}={name}", "give the model's own folder or name")
        return tokenizer_from_json(stored, path)
    fix = "write it with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
    bare = {"kind": "model", "tokenizer": read_json(path / "tokenizer.json", fix)}
    fix = "download the file again, or prepare the text with a tokenizer of ours"
    tokenizer = tokenizer_from_json(bare, path / "tokenizer.json", fix)
    marks = read_marks(path, tokenizer.library)
    tokenizer.chat = marks["chat"]
    tokenizer.mark(marks["bos"], marks["stops"])
    return tokenizer


def agrees_with(name, tokenizer):
    """Whether the ids that a tokenizer and the one of load_pretrained(name) both have mean the
    same; None if that one cannot be read."""
    try:
        theirs = load_tokenizer(name)
    except UserError:
        return None
    return decode_alike(tokenizer, theirs, min(tokenizer.vocab_size, theirs.vocab_size))


# ---------------------------------------------------------------- into our model


def load_weights(model, tensors):
    """Copy tensors into a model of ours. Weights without a head use their token embedding as the
    head. A model with a smaller block_size takes the first learned positions. Raises UserError,
    before anything is copied, if names or shapes differ."""
    own = model.state_dict()
    tensors = dict(tensors)
    if "wte.weight" in tensors:
        embedding = tensors["wte.weight"]
        head = tensors.setdefault("lm_head.weight", embedding)
        if model.config.tie_embeddings and not torch.equal(head, embedding):
            what = "these weights have a head that differs from the embedding"
            raise UserError(what, "tie_embeddings=True", "use --tie_embeddings=False")
    if "wpe.weight" in own and "wpe.weight" in tensors:
        tensors["wpe.weight"] = tensors["wpe.weight"][: len(own["wpe.weight"])]
    wrong = misfits(model, tensors)
    if wrong:
        what = f"the weights do not fit the model: {wrong}"
        raise UserError(what, "init_from", "leave out the keys that change the architecture")
    model.load_state_dict(tensors, strict=False)  # a tied weight may have one name of its two


def open_pretrained(name):
    """(model in evaluation mode, its tokenizer) for sampling. `name` as in load_pretrained."""
    word, values, tensors = load_pretrained(name)
    tokenizer = load_tokenizer(name)
    fix = "get the tokenizer that belongs to these weights"
    check_vocabulary(tokenizer, values["vocab_size"], f"init_from={name}", fix)
    with NoInitialValues():  # the file has them all
        model = make(configure({"model": word} | values))
    load_weights(model, tensors)
    return model.eval(), tokenizer
