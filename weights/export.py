"""
Export a trained model to the formats of other libraries:

    python -m weights.export --export=hf --out_dir=out-llama-shakespeare --dest=llama-hf
    python -m weights.export --export=gguf --out_dir=out-llama-shakespeare --dest=llama.gguf

The first writes a folder for Hugging Face transformers, the second a file for llama.cpp. If no
model class there has one of the model's parts, the export stops and names the part.
"""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.configurator import build, load
from common.errors import Failure, UserError, one_line, run
from common.files import leftovers, partial, remedy, remove, share, sync
from parts.architectures import ARCH, without_effect
from weights import gguf
from weights.checkpoint import open_run
from weights.families import FAMILIES, ROPE_NUMBERS, ROPE_READS
from weights.hf import DEFAULTS, expert_names, rows, understand
from weights.tokenizers import to_tokenizer_json

SIZES = (  # (tensor, the key that its size gives, in which dimension)
    ("mlp.up.weight", "mlp_width", 0),
    ("mlp.up", "mlp_width", 1),
    ("attn.conv.weight", "conv", 1),
)

# ---------------------------------------------------------------- ours to theirs


def complete(word, values, tensors):
    """(values, effective) for a model of ours: the values of VariantConfig that describe it
    completely, and the keys of those that have an effect on it."""
    v = DEFAULTS | ARCH[word] | values
    first = {name.removeprefix("blocks.0."): tensor.shape for name, tensor in tensors.items()}
    v |= {key: first[name][dim] for name, key, dim in SIZES if name in first}
    if v["mixer"] == "mamba2":
        v["state_size"] = first["attn.wq.weight"][0]
    v["n_kv_head"] = v["n_kv_head"] or v["n_head"]
    v["head_dim"] = v["head_dim"] or v["n_embd"] // v["n_head"]
    v["mlp_width"] = v["mlp_width"] or 4 * v["n_embd"]
    v["bias"] = {True: "all", False: "none"}.get(v["bias"], v["bias"])
    if (v["bias"], v["norm"]) == ("norm", "rmsnorm"):
        v["bias"] = "none"
    unread = ROPE_NUMBERS.keys() - ROPE_READS.get(v["rope_scaling"], set())
    sizes = {"multiple_of", "ffn_dim_multiplier"}  # mlp_width says it
    return v, v.keys() - {"dropout", "attn_dropout", *sizes, *without_effect(v), *unread}


def describe(kind, v):
    """A family's config.json for our values v, as far as the family can express them."""
    family = FAMILIES[kind]
    config = {"model_type": kind, "architectures": [family.architecture]}
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    for ours, key in family.keys.items():
        if ours == "rope_scaling":
            scaling = v[ours]
            if scaling in key.words and scaling != "none":  # newer readers accept it, too
                numbers = {ROPE_NUMBERS[number]: v[number] for number in ROPE_READS[scaling]}
                if scaling == "llama3":
                    numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
                config["rope_scaling"] = {"rope_type": scaling} | numbers
        elif ours in ROPE_NUMBERS:
            continue
        elif not key.words:  # None: no window, no cap, where ours is 0
            config[key.name] = v[ours] if v[ours] or type(v[ours]) is bool else None
        elif v[ours] in key.words:
            config[key.name] = key.words[v[ours]][0]
    for key in family.absent:
        fixed = family.fixed[key]
        config[key] = fixed(config) if callable(fixed) else fixed
    return config


def blocking(config, v, effective):
    """{key: value} of ours that a family's configuration, read back, does not reproduce."""
    try:
        _, back = understand(config, "export")
    except UserError:
        return dict.fromkeys(effective)  # it reproduces none
    back = DEFAULTS | back
    back["n_kv_head"] = back["n_kv_head"] or back["n_head"]
    back["head_dim"] = back["head_dim"] or back["n_embd"] // back["n_head"]
    if v["bias"] == "none" or back["bias"] == "all":  # biases that ours lacks are zeros
        back["bias"] = v["bias"]
    return {key: v[key] for key in sorted(effective) if back[key] != v[key]}


def to_hf(word, values, tensors, kinds=tuple(FAMILIES)):
    """(their config.json, their tensors) for a model of ours, given its word, configuration and
    tensors, as one of the families `kinds`. A family can express the model if the family's
    configuration, read back, gives ours. Raises UserError that names the parts no family has."""
    v, effective = complete(word, values, tensors)
    candidates = {}
    for kind in kinds:
        config = describe(kind, v)
        candidates[kind] = config, blocking(config, v, effective)
    kind = min(candidates, key=lambda kind: len(candidates[kind][1]))
    config, blocks = candidates[kind]
    if blocks:
        what = ", ".join(f"{key}={value}" for key, value in blocks.items())
        program, fix = "Hugging Face", "keep it in our own format"
        if kinds == gguf.FAMILIES:
            program, fix = "GGUF", "--export=hf allows more parts"
        models = f"no {program} model has this together with the other parts"
        raise UserError(f"{what}: {models} (the closest is {kind})", "export", fix)

    expected, theirs = v | understand(config, "export")[1], {}
    for name, ours, layout in rows(FAMILIES[kind], expected):
        if ours == ["lm_head.weight"] and v["tie_embeddings"]:
            continue
        for part in ours:  # a bias that their model has and ours does not is zero
            if part.endswith(".bias") and part not in tensors:
                weight = tensors[part.replace(".bias", ".weight")]
                tensors = tensors | {part: weight.new_zeros(len(weight))}
        joined = layout.join([tensors[part] for part in ours], v)
        experts = joined if "*" in name else [joined]
        theirs |= zip(expert_names(name, v), (t.contiguous() for t in experts), strict=True)
    return config, theirs


# ---------------------------------------------------------------- the command


@dataclass
class ExportConfig:
    export: Literal["hf", "gguf"] = "hf"  # a folder for transformers, or a file for llama.cpp
    out_dir: str = "out"  # the run folder
    dest: str = ""  # the folder or file to write; it must not exist yet
    checkpoint: str = "latest"  # latest, best, or a step


def write_folder(folder, config, tensors, tokenizer, context):
    """Write a folder that AutoModelForCausalLM and AutoTokenizer open."""
    stops, about = [*tokenizer.stops], {}
    if stops or tokenizer.bos is not None:
        config["bos_token_id"] = tokenizer.start
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
        marks = {"bos_token": tokenizer.start} | ({"eos_token": tokenizer.end} if stops else {})
        about = {key: tokenizer.decode([i]) for key, i in marks.items()}
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    about["clean_up_tokenization_spaces"] = False
    contents = {"config": config, "tokenizer_config": about}
    contents["tokenizer"] = to_tokenizer_json(tokenizer.to_json())
    folder.mkdir()
    for name, content in contents.items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text, "utf-8")
    tensors = {name: t.float() if t.dtype == torch.float64 else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_atomically(dest, write, *content):
    """Call write(temporary path, *content), then rename the result to dest, which so appears
    complete or not at all. Raises Failure if the write fails."""
    temporary = partial(dest)
    try:
        for unfinished in leftovers(dest):
            remove(unfinished)
        write(temporary, *content)
        for path in [*temporary.glob("*"), temporary]:
            if path.is_file():
                share(path)
            sync(path)
        if os.path.lexists(dest):  # since the check before the write
            raise FileExistsError(errno.EEXIST, "it exists already")
        temporary.rename(dest)
        sync(dest.absolute().parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise Failure(f"cannot write: {why}", f"dest={dest}", remedy(error)) from error
    finally:
        remove(temporary)


def main(argv):
    given = load(argv, [ExportConfig], __doc__)
    words = given.words
    config = build(ExportConfig, given.values)
    if words or not config.dest:
        what = f"cannot read {words[0]}" if words else "dest is missing"
        fix = f"write --export={config.export} --out_dir=RUN --dest=NAME"
        raise UserError(what, "command line", fix)
    dest = Path(os.path.expanduser(config.dest))
    if os.path.lexists(dest):
        raise UserError("it exists already", f"dest={dest}", "choose another --dest")
    if not dest.absolute().parent.is_dir():
        raise UserError("its parent folder does not exist", f"dest={dest}", "choose another --dest")

    model, tokenizer, trained, state = open_run(config.out_dir, config.checkpoint)
    kinds = gguf.FAMILIES if config.export == "gguf" else tuple(FAMILIES)
    theirs, tensors = to_hf(trained["model"], vars(model.config), model.state_dict(), kinds)
    if config.export == "hf":
        write_atomically(dest, write_folder, theirs, tensors, tokenizer, model.config.block_size)
    else:
        write_atomically(dest, gguf.write, theirs, tensors, tokenizer.to_json())
    name, count = theirs["architectures"][0], sum(tensor.numel() for tensor in tensors.values())
    print(f"{dest}: the model after {state['step']} steps, as {name}, {count:,} parameters")


if __name__ == "__main__":
    run(main)
