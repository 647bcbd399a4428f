"""Our models in other people's formats."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from common.configurator import build, load
from common.errors import UserError, run
from parts.architectures import ARCH, idle
from weights import gguf_format
from weights.checkpoint import open_run
from weights.families import FAMILIES, READS, ROPE_NUMBERS
from weights.pretrained import BIASES, USUAL, rows, understand
from weights.tokenizer_formats import to_tokenizer_json

# ---------------------------------------------------------------- ours to theirs


def complete(word, values, tensors):
    """The values of VariantConfig that say all of a model of ours, (those that have an effect)."""
    v = USUAL | ARCH[word] | values
    up = tensors.get("blocks.0.mlp.up.weight", tensors.get("blocks.0.mlp.up.v.weight"))
    bias = {True: "all", False: "none"}.get(v["bias"], v["bias"])
    v |= {
        "mlp_width": v["mlp_width"] if up is None else len(up),
        "n_kv_head": v["n_kv_head"] or v["n_head"],
        "bias": "none" if (bias, v["norm"]) == ("norm", "rmsnorm") else bias,
    }
    silent = {"dropout", "multiple_of", "ffn_dim_multiplier", *idle(v)} | {*ROPE_NUMBERS} - {
        *READS.get(v["rope_scaling"], [])
    }
    return v, v.keys() - silent


def blocking(family, config, v, heard):
    """What a family's configuration, read back, does not say of our model: {key: value}."""
    try:
        _, back = understand(config, "export")
    except UserError:
        return dict.fromkeys(heard)  # nothing of it
    back = USUAL | back
    back["n_kv_head"] = back["n_kv_head"] or back["n_head"]
    if BIASES.index(v["bias"]) < BIASES.index(
        back["bias"]
    ):  # where they have biases and ours has none, zeros
        back["bias"] = v["bias"]
    return {key: v[key] for key in sorted(heard) if back[key] != v[key]}


def to_hf(word, values, tensors, kinds=tuple(FAMILIES)):
    """(their config.json, their tensors) from the word, the configuration and the tensors of a model of ours, as
    one of the `kinds`. A family can express it if the family's configuration, read back, is the model's."""
    v, heard = complete(word, values, tensors)
    found = {}
    for kind in kinds:
        family = FAMILIES[kind]
        config = {
            "model_type": kind,
            "architectures": [family.architecture],
            "bos_token_id": None,
            "eos_token_id": None,
        }
        config |= {theirs: v[ours] for ours, theirs in family.keys.items()} | family.theirs(v)
        config |= {
            theirs: words[v[ours]][0]
            for ours, (theirs, words) in family.words.items()
            if v[ours] in words and ours != "rope_scaling"
        }
        found[kind] = config, blocking(family, config, v, heard)
    kind = min(found, key=lambda kind: len(found[kind][1]))
    config, blocks = found[kind]
    if blocks:
        what = ", ".join(f"{key}={value}" for key, value in blocks.items())
        models = (
            "GGUF's llama has not"
            if kinds == ("llama",)
            else f"no Hugging Face model has, beside the other parts (the closest is {kind})"
        )
        raise UserError(f"{what}: that {models}", "export", "it stays in our own format")
    family, out = FAMILIES[kind], {}
    expected = v | understand(config, "export")[1]
    for theirs, ours, layout in rows(family, expected):
        if ours != ["lm_head.weight"] or not v["tie_embeddings"]:
            zeros = [
                torch.zeros(len(tensors[name.replace(".bias", ".weight")]))
                if name.endswith(".bias") and name not in tensors
                else None
                for name in ours
            ]
            parts = [
                tensors[name] if zero is None else zero.to(tensors["wte.weight"])
                for name, zero in zip(ours, zeros)
            ]
            out[theirs] = layout.join(parts, v).contiguous()
    return config, out


# ---------------------------------------------------------------- the command


@dataclass
class ExportConfig:
    export: Literal["hf", "gguf"] = (
        "hf"  # a folder for Hugging Face transformers, or a file for llama.cpp
    )
    out_dir: str = "out"  # the run folder
    dest: str = ""  # the folder or file to write; it must not be there yet
    checkpoint: str = "latest"  # latest, best, or a step


def write_folder(folder, config, tensors, tokenizer, context):
    """A folder that AutoModelForCausalLM and AutoTokenizer open."""
    folder.mkdir()
    config |= dict.fromkeys(
        ("bos_token_id", "eos_token_id"), tokenizer.get("special_tokens", {}).get("<|endoftext|>")
    )
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    about |= {
        key: "<|endoftext|>"
        for key in ("bos_token", "eos_token")
        if "<|endoftext|>" in tokenizer.get("special_tokens", {})
    }
    for name, content in {
        "config": config,
        "tokenizer": to_tokenizer_json(tokenizer),
        "tokenizer_config": about,
    }.items():
        (folder / f"{name}.json").write_text(
            json.dumps(content, indent=1, ensure_ascii=False), "utf-8"
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main(argv):
    values, words = load(argv, [ExportConfig], __doc__)
    config = build(ExportConfig, values)
    dest = Path(config.dest).expanduser()
    if words or not config.dest:
        raise UserError(
            f"cannot read {words[0]}" if words else "dest is missing",
            "command line",
            "write --export=hf --out_dir=RUN --dest=FOLDER",
        )
    if dest.exists() or not dest.absolute().parent.is_dir():
        raise UserError(
            "it is there already" if dest.exists() else "there is no folder to put it in",
            f"dest={dest}",
            "choose another --dest",
        )
    model, tokenizer, trained, state = open_run(config.out_dir, config.checkpoint)
    kinds = ("llama",) if config.export == "gguf" else tuple(FAMILIES)
    theirs, tensors = to_hf(trained["model"], vars(model.config), model.state_dict(), kinds)
    temporary = dest.with_name(dest.name + ".tmp")  # dest appears whole or not at all
    try:
        if config.export == "hf":
            left_out = write_folder(
                temporary, theirs, tensors, tokenizer.to_json(), model.config.block_size
            )
        else:
            left_out = gguf_format.write(temporary, theirs, tensors, tokenizer.to_json())
        temporary.rename(dest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
    print(
        f"{dest}: the model after {state['step']} steps, as {theirs['architectures'][0]}, {sum(t.numel() for t in tensors.values()):,} parameters"
    )
    if left_out:
        print(f"left out: {left_out}")


if __name__ == "__main__":
    run(main)
