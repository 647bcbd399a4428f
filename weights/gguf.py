"""
Write a GPT-2 or LLaMA as GGUF, the format of llama.cpp: see export.py. It takes a model in Hugging
Face's form, and needs the package `gguf`.
"""

import re

from common.errors import UserError
from tokens.tokenizer import tokenizer_from_json
from weights import families
from weights.layouts import interleaved
from weights.tokenizers import PATTERNS, to_escaped, to_lists

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
ONLY = {"rope_scaling": None, "hidden_act": "silu", "activation_function": "gelu_new"}
# Written for a vocabulary of bytes alone, since llama.cpp refuses a file without merges. It has no
# effect: no pattern leaves a letter and a mark after it in one piece.
NO_MERGES = ["a !"]


def write(path, config, tensors, tokenizer, kind="F32"):
    """Write a model to a GGUF file. Takes its configuration and tensors in Hugging Face's form, and
    its tokenizer's to_json(). kind: F32, F16 or Q8_0, the format of the matrices. Raises UserError
    for a part that llama.cpp's model does not have."""
    import gguf

    name = config["model_type"]
    for key in ONLY.keys() & config.keys():
        if config[key] != ONLY[key]:
            what = f"{key}={config[key]}: GGUF's {name} does not have this"
            raise UserError(what, "export=gguf", "use --export=hf")

    writer = gguf.GGUFWriter(path, name)
    keys = families.FAMILIES[name].keys
    values = {KEYS[ours]: config[key.name] for ours, key in keys.items() if ours in KEYS}
    if name == "gpt2":
        values["attention.layer_norm_epsilon"] = 1e-5
    else:
        widths = ("rope.dimension_count", "attention.key_length", "attention.value_length")
        values |= dict.fromkeys(widths, config["head_dim"])
    for key, value in values.items():
        add = writer.add_float32 if key.endswith(("epsilon", "freq_base")) else writer.add_uint32
        add(f"{name}.{key}", value)
    types = gguf.GGMLQuantizationType
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    write_tokenizer(gguf, writer, tokenizer, config["vocab_size"])
    arch = next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, config[keys["n_layer"].name])
    for theirs, tensor in tensors.items():
        if re.search(r"c_(attn|proj|fc)\.weight$", theirs):  # (in, out)
            tensor = tensor.t()
        # Rope turns the features (i, i + D/2) of a head in Hugging Face's form, (2i, 2i + 1) here.
        # A file that ignores this makes a model that works, but badly.
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if theirs.endswith(f"{part}_proj.weight"):
                tensor = interleaved(tensor, config[heads])
        own_name = names.get_name(theirs, (".weight", ".bias"))
        # As float32, unless the rows of a matrix can be divided into the blocks of `kind`.
        matrix = tensor.dim() == 2 and own_name != "position_embd.weight"
        fits = matrix and tensor.size(-1) % gguf.GGML_QUANT_SIZES[types[kind]][0] == 0
        stored = types[kind] if fits else types.F32
        numbers = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(own_name, numbers, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(gguf, writer, tokenizer, vocab_size):
    """Write byte-pair encoding as GGUF's "gpt2", and characters and bytes as its "rwkv". "rwkv"
    takes the longest token that matches the text, so it reads each character as its one token, and
    an unknown one as ? if there is one. Raises UserError for a pattern that GGUF has no name for:
    llama.cpp could not read a text with it."""
    special = {}
    if tokenizer["kind"] not in ("char", "byte"):
        names = {pattern: name for name, pattern in PATTERNS.items()}
        pattern = tokenizer.get("pat_str", "as SentencePiece does")
        if pattern not in names:
            what = f"llama.cpp does not know how this tokenizer cuts a text: {pattern}"
            raise UserError(what, "export=gguf", "use --export=hf")
        tokens, merges, special = to_lists(tokenizer)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(names[pattern])
        writer.add_token_merges(merges or NO_MERGES)
    else:
        tokens = to_escaped(tokenizer)
        writer.add_tokenizer_model("rwkv")
        if tokenizer["kind"] == "char":  # llama.cpp aborts without one for unknown characters
            writer.add_unk_token_id(max(0, tokenizer["chars"].find("?")))
    kind = gguf.TokenType
    kinds = [kind.CONTROL if token in special else kind.NORMAL for token in tokens]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]  # llama.cpp needs all names
    writer.add_token_list(tokens + unused)
    writer.add_token_types(kinds + [kind.UNUSED] * len(unused))
    known = tokenizer_from_json(tokenizer)
    writer.add_add_bos_token(known.bos is not None)
    if known.stops:
        writer.add_eos_token_id(known.end)
        writer.add_bos_token_id(known.start)
