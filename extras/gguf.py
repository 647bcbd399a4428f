"""python -m extras.gguf RUN --dest=FILE

Export the GPT-2 or LLaMA of a run folder as GGUF, the format of llama.cpp. Needs the package gguf.
"""

import re
import shlex
from dataclasses import dataclass

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.gguf")

from common.configurator import PathName, build, load
from common.errors import UserError, run
from sampling.prompts import note
from tokens.tokenizer import GPT2, GPT4
from weights import families
from weights.export import export_run
from weights.tokenizers import to_lists

FAMILIES = ("llama", "gpt2")
KEYS = {  # {our key: GGUF's}, without the architecture before it
    "block_size": "context_length",
    "vocab_size": "vocab_size",
    "n_layer": "block_count",
    "n_embd": "embedding_length",
    "mlp_width": "feed_forward_length",
    "n_head": "attention.head_count",
    "n_kv_head": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
PATTERNS = {GPT2: "gpt-2", GPT4: "dbrx"}  # {pattern of a BPE: GGUF's name}
ONLY = {"rope_scaling": None, "hidden_act": "silu", "activation_function": "gelu_new"}
# Written for a vocabulary of bytes alone, since llama.cpp refuses a file without merges. It has no
# effect: no pattern leaves a letter and a mark after it in one piece.
NO_MERGES = ["a !"]
OTHERS = "python -m weights.export writes a folder, which llama.cpp converts"


def interleaved(t, heads):
    """Reorder the rows of each head from our order (2, D/2) to (D/2, 2), where the features that
    rope turns together are neighbours."""
    return t.view(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def export(path, config, tensors, tokenizer, card):
    """Write a model with the title and table of its card, whose code is not for llama.cpp. A note
    says which prompts llama.cpp would not finish reading."""
    table = card.split("---\n\n", 1)[1].split("```python")[0].strip()
    write(path, config, tensors, tokenizer, about=table)
    chars = tokenizer.to_json().get("chars", "")
    if not chars.isascii() or 0 < len(chars) < config["vocab_size"]:
        what = "llama.cpp may never finish reading a prompt with a character that the model lacks"
        note(f"{what}: keep to its own {len(chars)}")


def write(path, config, tensors, tokenizer, kind="F32", about=""):
    """Write a model to a GGUF file. Takes its configuration and tensors in Hugging Face's form, our
    tokenizer, the format of the matrices, F32, F16 or Q8_0, and a text about it. Raises
    UserError for a part that llama.cpp's model does not have."""
    import gguf

    name = config["model_type"]
    for key in ONLY.keys() & config.keys():
        if config[key] != ONLY[key]:
            raise UserError(f"GGUF's {name} does not have {key}={config[key]}", "export", OTHERS)

    writer = gguf.GGUFWriter(path, name)
    write_sizes(writer, config)
    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_description(about)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    write_tokenizer(gguf, writer, tokenizer, config["vocab_size"])
    write_weights(gguf, writer, config, tensors, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer, config):
    """Write the sizes of the model, and its numbers for norms and rope."""
    name = config["model_type"]
    keys = families.FAMILIES[name].keys
    values = {KEYS[ours]: config[key.name] for ours, key in keys.items() if ours in KEYS}
    if name == "gpt2":
        values["attention.layer_norm_epsilon"] = 1e-5
    else:
        values["rope.dimension_count"] = config["head_dim"]
        values["attention.key_length"] = config["head_dim"]
        values["attention.value_length"] = config["head_dim"]
    for key, value in values.items():
        if key.endswith(("epsilon", "freq_base")):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)


def write_weights(gguf, writer, config, tensors, kind):
    """Write the tensors under GGUF's names, the matrices in the number format `kind`."""
    name = config["model_type"]
    n_layer = config[families.FAMILIES[name].keys["n_layer"].name]
    arch = next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, n_layer)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for theirs, tensor in tensors.items():
        if re.search(r"c_(attn|proj|fc)\.weight$", theirs):  # (in, out)
            tensor = tensor.t()
        # Rope turns the features (i, i + D/2) of a head in Hugging Face's form, (2i, 2i + 1) here.
        # A file that ignores this makes a model that works, but badly.
        if theirs.endswith("q_proj.weight"):
            tensor = interleaved(tensor, config["num_attention_heads"])
        elif theirs.endswith("k_proj.weight"):
            tensor = interleaved(tensor, config["num_key_value_heads"])
        own_name = names.get_name(theirs, (".weight", ".bias"))
        stored = gguf.GGMLQuantizationType.F32
        is_matrix = tensor.dim() == 2 and own_name != "position_embd.weight"
        if is_matrix and tensor.size(-1) % block == 0:  # its rows divide into blocks of `kind`
            stored = kind
        numbers = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(own_name, numbers, raw_dtype=stored)


def write_tokenizer(gguf, writer, tokenizer, vocab_size):
    """Write byte-pair encoding as GGUF's "gpt2", and characters and bytes as its "rwkv". "rwkv"
    takes the longest token that matches the text, so it reads each character as its one token, and
    each byte of an unknown one as ? if there is one. It never ends where an unknown one begins with
    the first byte of a longer token. Raises UserError for a pattern that GGUF has no name for:
    llama.cpp could not read a text with it."""
    data = tokenizer.to_json()
    special = {}
    if data["kind"] in ("char", "byte"):
        tokens = to_escaped(data)
        writer.add_tokenizer_model("rwkv")
        if data["kind"] == "char":  # llama.cpp aborts without one for unknown characters
            writer.add_unk_token_id(max(0, data["chars"].find("?")))
    else:
        pattern = data.get("pat_str")
        if pattern not in PATTERNS:
            what = "a pretrained model's tokenizer is not written as GGUF here"
            if pattern:
                what = f"llama.cpp does not know how this tokenizer cuts a text: {pattern}"
            raise UserError(what, "export", OTHERS)
        tokens, merges, special = to_lists(data)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(PATTERNS[pattern])
        writer.add_token_merges(merges or NO_MERGES)
    kind = gguf.TokenType
    kinds = [kind.CONTROL if token in special else kind.NORMAL for token in tokens]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]  # llama.cpp needs all names
    writer.add_token_list(tokens + unused)
    writer.add_token_types(kinds + [kind.UNUSED] * len(unused))
    writer.add_add_bos_token(tokenizer.bos is not None)
    if tokenizer.stops:
        writer.add_eos_token_id(tokenizer.end)
        writer.add_bos_token_id(tokenizer.start)


def to_escaped(data):
    """The tokens of characters or bytes as GGUF's "rwkv" tokenizer lists them: printable ASCII
    unchanged, every other byte escaped as in Python."""
    tokens = [bytes([byte]) for byte in range(256)]
    if data["kind"] == "char":
        tokens = [char.encode() for char in data["chars"]]
    return [token.decode("latin-1").encode("unicode_escape").decode() for token in tokens]


# ---------------------------------------------------------------- the command


@dataclass
class GgufConfig:
    dest: PathName = ""  # the file to write; it must not exist yet
    checkpoint: str = "latest"  # latest, best, or a step


def read(argv):
    """(GgufConfig, the run folder) of a command line."""
    given = load(argv, [GgufConfig], __doc__)
    runs = given.words
    config = build(GgufConfig, given.values)
    if len(runs) != 1 or not config.dest:
        fix = "type python -m extras.gguf RUN --dest=FILE"
        raise UserError("give one run folder and one dest", "command line", fix)
    return config, runs[0]


def main(argv):
    config, out_dir = read(argv)
    export_run(out_dir, config.checkpoint, config.dest, export, FAMILIES)
    print(f"write with it, in llama.cpp:\nllama-cli -m {shlex.quote(config.dest)}")


if __name__ == "__main__":
    run(main)
