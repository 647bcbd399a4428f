"""
Export a trained model as a folder for Hugging Face transformers:

    python -m weights.export --out_dir=out-llama-shakespeare --dest=llama-hf

If no model class there has one of the model's parts, the export stops and names the part.
"""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("weights.export")

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.commands import command
from common.configurator import PathName, build, load
from common.errors import Failure, UserError, one_line, printable, run
from common.files import leftovers, partial, remedy, remove, share, sync
from parts.architectures import ARCH, UNSEEN, without_effect
from weights.card import model_card
from weights.checkpoint import open_run
from weights.families import FAMILIES, ROPE_NUMBERS, ROPE_READS, usual_sizes
from weights.hf import DEFAULTS, expert_names, tensor_rows, understand
from weights.tokenizers import to_tokenizer_json

# ---------------------------------------------------------------- ours to theirs


def complete(word, values, tensors):
    """(values, effective) for a model of ours: the values of VariantConfig that describe it
    completely, and the keys that have an effect on it."""
    v = DEFAULTS | ARCH[word] | values
    if "blocks.0.mlp.up.weight" in tensors:  # (width, C)
        v["mlp_width"] = tensors["blocks.0.mlp.up.weight"].shape[0]
    elif "blocks.0.mlp.up" in tensors:  # (experts, width, C)
        v["mlp_width"] = tensors["blocks.0.mlp.up"].shape[1]
    if "blocks.0.attn.conv.weight" in tensors:  # (channels, tokens)
        v["conv"] = tensors["blocks.0.attn.conv.weight"].shape[1]
    if v["mixer"] == "mamba2":
        v["state_size"] = v["state_size"] or max(1, v["n_embd"] // 2)
    fill_in(v)
    if v["bias"] is True:
        v["bias"] = "all"
    elif v["bias"] is False or (v["bias"] == "norm" and v["norm"] == "rmsnorm"):
        v["bias"] = "none"

    ignored = {
        *UNSEEN,  # mlp_width has the width
        *without_effect(v),
        *(ROPE_NUMBERS.keys() - ROPE_READS.get(v["rope_scaling"], set())),
    }
    return v, v.keys() - ignored


def fill_in(values):
    """Put the usual size in place of each missing one."""
    for key, size in usual_sizes(values).items():
        values[key] = values[key] or size


def their_config(kind, v):
    """A family's config.json for our values v, as far as the family can express them."""
    family = FAMILIES[kind]
    config = {"model_type": kind, "architectures": [family.architecture]}
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    for ours, key in family.keys.items():
        value = v[ours]
        if ours == "rope_scaling":
            if value in key.words and value != "none":
                config["rope_scaling"] = describe_scaling(v)
        elif ours in ROPE_NUMBERS:
            continue  # rope_scaling holds them
        elif key.words:
            if value in key.words:
                config[key.name] = key.words[value][0]
        elif value or type(value) is bool:
            config[key.name] = value
        else:
            config[key.name] = None  # no window, no cap, where ours is 0
    for key in family.absent:
        fixed = family.fixed[key]
        config[key] = fixed(config) if callable(fixed) else fixed
    return config


def describe_scaling(v):
    """Their rope_scaling for our values v. Newer versions of transformers accept this form, too."""
    scaling = {"rope_type": v["rope_scaling"]}
    for number in sorted(ROPE_READS[v["rope_scaling"]]):
        scaling[ROPE_NUMBERS[number]] = v[number]
    if v["rope_scaling"] == "llama3":
        scaling["low_freq_factor"] = 1.0
        scaling["high_freq_factor"] = 4.0
    return scaling


def lost_values(config, v, effective):
    """{key: value} of ours that a family's configuration, read back, does not reproduce."""
    try:
        _, understood = understand(config, "export")
    except UserError:
        return dict.fromkeys(effective)  # it reproduces none
    back = DEFAULTS | understood
    fill_in(back)
    if v["bias"] == "none" or back["bias"] == "all":  # biases that ours lacks are zeros
        back["bias"] = v["bias"]
    return {key: v[key] for key in sorted(effective) if back[key] != v[key]}


def to_hf(word, values, tensors, kinds=tuple(FAMILIES)):
    """(their config.json, their tensors) for a model of ours, given its word, configuration and
    tensors, as one of the families `kinds`. A family can express the model if the family's
    configuration, read back, gives ours. Raises UserError that names the parts no family has."""
    v, effective = complete(word, values, tensors)
    configs = {kind: their_config(kind, v) for kind in kinds}
    lost = {kind: lost_values(config, v, effective) for kind, config in configs.items()}
    # LlamaConfig refuses heads that do not divide n_embd; MistralConfig, else the same, does not.
    uneven = v["n_embd"] % v["n_head"] > 0
    kind = min(kinds, key=lambda kind: (len(lost[kind]), uneven and kind == "llama"))
    if lost[kind]:
        parts = ", ".join(f"{key}={value}" for key, value in lost[kind].items())
        what = f"no family of models has {parts} (the closest is {kind})"
        raise UserError(what, "export", "keep it in our own format")
    config = configs[kind]
    _, understood = understand(config, "export")
    return config, their_tensors(kind, v, v | understood, tensors)


def their_tensors(kind, v, expected, tensors):
    """{their name: tensor} for our tensors. v: our values. expected: our values of a model with all
    tensors that the family's configuration implies."""
    theirs = {}
    for name, ours, layout in tensor_rows(FAMILIES[kind], expected):
        if ours == ["lm_head.weight"] and v["tie_embeddings"]:
            continue
        parts = []
        for part in ours:
            if part.endswith(".bias") and part not in tensors:  # a bias that ours lacks is zero
                weight = tensors[part.replace(".bias", ".weight")]
                parts.append(weight.new_zeros(len(weight)))
            else:
                parts.append(tensors[part])
        joined = layout.join(parts, v)
        if "*" not in name:
            theirs[name] = joined.contiguous()
            continue
        for expert_name, expert in zip(expert_names(name, v), joined, strict=True):
            theirs[expert_name] = expert.contiguous()
    return theirs


# ---------------------------------------------------------------- the command


@dataclass
class ExportConfig:
    out_dir: PathName = "out"  # the run folder
    dest: PathName = ""  # the folder to write; it must not exist yet
    checkpoint: str = "latest"  # latest, best, or a step


def write_folder(folder, config, tensors, tokenizer, card=""):
    """Write a folder that AutoModelForCausalLM and AutoTokenizer open. card: its README.md."""
    block_size = FAMILIES[config["model_type"]].keys["block_size"].name
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config[block_size],
        "clean_up_tokenization_spaces": False,
    }
    stops = list(tokenizer.stops)
    if stops or tokenizer.bos is not None:
        config["bos_token_id"] = tokenizer.start
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
        about["bos_token"] = tokenizer.decode([tokenizer.start])
    if stops:
        about["eos_token"] = tokenizer.decode([tokenizer.end])
    data = tokenizer.to_json()
    if data.get("chat"):  # its template may ask whether there is a bos_token
        about["chat_template"] = data["chat"]["template"]
        about |= {key: data["chat"][key] or None for key in ("bos_token", "eos_token")}
    contents = {
        "config": config,
        "tokenizer_config": about,
        "tokenizer": to_tokenizer_json(data),
    }
    folder.mkdir()
    for name, content in contents.items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text, "utf-8")
    (folder / "README.md").write_text(card, "utf-8")
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


def export_run(out_dir, checkpoint, dest, write=write_folder, kinds=tuple(FAMILIES)):
    """Export the model of a run, as one of the families `kinds`, with a function
    write(path, their config.json, their tensors, our tokenizer, a model card)."""
    dest = Path(os.path.expanduser(dest))
    if os.path.lexists(dest):
        raise UserError("it exists already", f"dest={dest}", "choose another --dest")
    if not dest.absolute().parent.is_dir():
        raise UserError("its parent folder does not exist", f"dest={dest}", "choose another --dest")

    model, tokenizer, trained, state = open_run(out_dir, checkpoint)
    theirs, tensors = to_hf(trained["model"], vars(model.config), model.state_dict(), kinds)
    name = theirs["architectures"][0]
    count = sum(tensor.numel() for tensor in tensors.values())
    card = model_card(dest.name, name, count, tokenizer.vocab_size, trained, state)
    write_atomically(dest, write, theirs, tensors, tokenizer, card)
    about = f"the model after {state['step']} steps, as {name}, {count:,} parameters"
    print(printable(f"{dest}: {about}"))


def main(argv):
    given = load(argv, [ExportConfig], __doc__)
    words = given.words
    config = build(ExportConfig, given.values)
    if words or not config.dest:
        what = f"cannot read {words[0]}" if words else "dest is missing"
        raise UserError(what, "command line", "write --out_dir=RUN --dest=FOLDER")
    export_run(config.out_dir, config.checkpoint, config.dest)
    print(f"write with it:\n{command('sample.py', f'--init_from={config.dest}')}")
    print(f"in transformers: AutoModelForCausalLM.from_pretrained({config.dest!r})")


if __name__ == "__main__":
    run(main)
