"""
Convert GGUF, the format of llama.cpp, to Hugging Face's configuration and tensors and back;
pretrained.py and export.py convert those to ours and back. GGUF's plain LLaMA is supported, the
same with experts (Mixtral), and SmolLM3. It needs the package `gguf`, which no other part of this
repo needs.

GGUF's rotary embedding rotates the features (2i, 2i + 1) of a head; Hugging Face's and ours rotates
(i, i + D/2). So the rows of each head's wq and wk have another order in GGUF. A reader that ignores
this gets a model that works, but badly.
"""

import re

import torch

from common.errors import UserError, one_line
from weights.layouts import halves, interleaved
from weights.tokenizer_formats import PATTERNS, from_escaped, from_lists, to_escaped, to_lists

ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "smollm3": "smollm3"}  # of a model_type
KEYS = {  # GGUF's key: Hugging Face's key
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
EXPERT_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
FLOATS = ("rms_norm_eps", "rope_theta")  # the others are whole numbers
OPTIONAL = ("num_key_value_heads", "rope_theta", "vocab_size")
NAMES = {  # GGUF's tensor: Hugging Face's tensor; {} is the number of the layer
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    "blk.{}.ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate",
    # Of all experts in one tensor (experts, out, in); Hugging Face has one tensor for each.
    "blk.{}.ffn_gate_exps": "model.layers.{}.block_sparse_moe.experts.*.w1",
    "blk.{}.ffn_up_exps": "model.layers.{}.block_sparse_moe.experts.*.w3",
    "blk.{}.ffn_down_exps": "model.layers.{}.block_sparse_moe.experts.*.w2",
}
# Written for a vocabulary of bytes alone, since llama.cpp refuses a file without merges. It has no
# effect: no pattern leaves a letter and a mark after it in one piece.
NO_MERGES = ["a !"]
DAMAGED = "download the file again"


def package():
    try:
        import gguf
    except ImportError:
        raise UserError("the package gguf is not installed", "GGUF", "pip install gguf") from None
    return gguf


def turned_heads(name, config):
    """The number of heads of a tensor whose rows must be reordered, 0 for other tensors."""
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def hf_name(name):
    """Hugging Face's name of a GGUF tensor. A tensor that our model does not have keeps its name,
    and pretrained.py then refuses it by that name."""
    layer = re.match(r"blk\.([0-9]+)\.", name)
    number = layer[1] if layer else ""
    stem, _, suffix = re.sub(r"^blk\.[0-9]+\.", "blk.{}.", name).rpartition(".")
    return f"{NAMES[stem].format(number)}.{suffix}" if stem in NAMES else name


def gguf_name(name):
    """GGUF's name of a tensor of Hugging Face's."""
    layer = re.match(r"model\.layers\.([0-9]+)\.", name)
    stem, _, suffix = re.sub(r"^model\.layers\.[0-9]+\.", "model.layers.{}.", name).rpartition(".")
    theirs = {hf: gguf for gguf, hf in NAMES.items()}
    return f"{theirs[stem].format(layer[1] if layer else '')}.{suffix}"


# ---------------------------------------------------------------- reading


def open_file(path):
    """Open a GGUF file. Returns (the package gguf, its reader, {key: value})."""
    gguf = package()

    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            """As in the package, but raise an error beyond the end of the file. The package returns
            an empty array there, so that an array that claims 2^60 entries is read forever."""
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError("it ends early, or claims more than it holds")
            return values

    try:
        reader = Reader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # a damaged file makes the package fail in many ways
        raise UserError(f"cannot read this GGUF file: {one_line(error)}", path, DAMAGED) from None
    for key, value in fields.items():
        if type(value) is float:  # stored as fp32: read 0.000009999999747 as 0.00001
            fields[key] = float(f"{value:.7g}")
    return gguf, reader, fields


def read(path):
    """(config.json, tensors) of a GGUF file in Hugging Face's form, dequantised to fp32."""
    gguf, reader, fields = open_file(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = read_config(fields, stored, path)
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            t = torch.from_numpy(values.copy())
            heads = turned_heads(name, config)
            if "*" in name:
                each = t.unbind() if t.dim() == 3 else []
                tensors |= {name.replace("*", str(i)): matrix for i, matrix in enumerate(each)}
            else:
                tensors[name] = halves(t, heads) if heads else t
        except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            what = f"cannot read the tensor {tensor.name}: {one_line(error)}"
            raise UserError(what, path, DAMAGED) from None
    return config, tensors


def read_config(fields, stored, path):
    """Hugging Face's config.json from the {key: value} of a GGUF file and its {name: tensor}."""
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES.values():
        what = f"cannot read a GGUF model of architecture {architecture!r}"
        raise UserError(what, path, "choose a file of architecture llama or smollm3")
    kind, keys = architecture, KEYS
    if architecture == "llama" and fields.get("llama.expert_count", 0) != 0:
        kind, keys = "mixtral", KEYS | EXPERT_KEYS
    needed = [f"{architecture}.{key}" for key, name in keys.items() if name not in OPTIONAL]
    missing = [key for key in needed if key not in fields]
    if "token_embd.weight" not in stored:
        missing.append("token_embd.weight")
    if missing:
        fix = "download the model again: every complete file has these"
        raise UserError(f"this file has no {', '.join(missing)}", path, fix)

    config = {"model_type": kind, "rope_theta": 10000.0}
    for key, name in keys.items():
        value = fields.get(f"{architecture}.{key}", 1)
        number, text = (float, "a number") if name in FLOATS else (int, "a whole number")
        if type(value) not in (number, int) or not 0 < value < 1e38:
            what = f"{architecture}.{key} is {str(value)[:60]}"
            raise UserError(what, path, f"it must be {text} above 0; {DAMAGED}")
        if f"{architecture}.{key}" in fields:
            config[name] = value
    config.setdefault("vocab_size", int(stored["token_embd.weight"].shape[-1]))
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["tie_word_embeddings"] = "output.weight" not in stored

    head_size = config["hidden_size"] // config["num_attention_heads"]
    for key, value in {
        "rope.scaling.type": "none",
        "rope.dimension_count": head_size,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.sliding_window": 0,
        "expert_count": config.get("num_local_experts", 0),
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
    }.items():
        key = f"{architecture}.{key}"
        if fields.get(key, value) != value:
            what = f"our {kind} model cannot express {key}={fields[key]!r}"
            raise UserError(what, path, f"it must be {value!r}")
    return config


def read_tokenizer(path):
    """The tokenizer inside a GGUF file, in the form of to_json(), for tokenizer_from_json."""
    gguf, _, fields = open_file(path)
    model, pre = (fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    lists = [fields.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type", "merges")]
    tokens, kinds, merges = lists
    if model not in ("rwkv", "gpt2") or model == "gpt2" and pre not in PATTERNS:
        what = f"cannot read a tokenizer of model {model!r} with the pattern {pre!r}"
        patterns = " or ".join(PATTERNS)
        raise UserError(what, path, f"choose a file with rwkv, or with gpt2 and {patterns}")
    whole = all(isinstance(entries, list) for entries in lists) and len(tokens) == len(kinds)
    if not whole or not tokens or len(set(tokens)) < len(tokens):
        what = "the tokenizer's tokens have gaps or duplicates"
        raise UserError(what, f"{path}, tokenizer.ggml.tokens", DAMAGED)

    while kinds and kinds[-1] == gguf.TokenType.UNUSED:  # rows of the embedding without a token
        tokens, kinds = tokens[:-1], kinds[:-1]
    special = {i for i, kind in enumerate(kinds) if kind != gguf.TokenType.NORMAL}
    try:
        if model == "rwkv":
            return from_escaped(tokens, path)
        merges = [] if merges == NO_MERGES else merges
        return from_lists(tokens, merges, special, PATTERNS[pre], path)
    except (KeyError, TypeError, AttributeError) as error:  # entries of another type or letter
        what = f"cannot read the tokenizer: {type(error).__name__} {one_line(error)}"
        raise UserError(what, path, DAMAGED) from None


# ---------------------------------------------------------------- writing


def named(tokenizer):
    """Whether GGUF has a name for a tokenizer. Takes its to_json()."""
    return tokenizer["kind"] != "bpe" or tokenizer["pat_str"] in PATTERNS.values()


def unknown(chars):
    """The character to read in place of unknown ones: llama.cpp aborts without such a character."""
    return next((char for char in "?_ \n" if char in chars), chars[0])


def caveat(tokenizer):
    """A note for the user on what llama.cpp does differently with a tokenizer, or None. Takes its
    to_json()."""
    if not named(tokenizer):
        pattern = tokenizer["pat_str"]
        return f"llama.cpp cannot read or write text with this file: GGUF does not know {pattern}"
    if tokenizer["kind"] == "char":
        substitute = unknown(tokenizer["chars"])
        return f"llama.cpp reads {substitute!r} for characters that the model does not know"
    return None


def write(path, config, tensors, tokenizer, kind="F32"):
    """Write a model to a GGUF file. Takes its configuration and tensors in Hugging Face's form, and
    its tokenizer's to_json(). kind: F32, F16 or Q8_0, the format of the matrices whose rows it can
    divide into blocks. Raises UserError for a part that GGUF's architecture does not have."""
    gguf = package()
    types = gguf.GGMLQuantizationType
    architecture = ARCHITECTURES[config["model_type"]]
    needed = {"rope_scaling": None, "hidden_act": "silu", "sliding_window": None}
    if architecture == "smollm3":
        needed["no_rope_layer_interval"] = 4  # llama.cpp knows no other
    for key, fitting in needed.items():
        if config.get(key, fitting) != fitting:
            what = f"{key}={config[key]}: GGUF's {architecture} does not have this"
            raise UserError(what, "export=gguf", "use --export=hf")
    writer = gguf.GGUFWriter(path, architecture)
    experts = EXPERT_KEYS if config["model_type"] == "mixtral" else {}
    for key, name in (KEYS | experts).items():
        add = writer.add_float32 if name in FLOATS else writer.add_uint32
        add(f"{architecture}.{key}", config[name])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    write_tokenizer(gguf, writer, tokenizer, config["vocab_size"])
    for name, t in together(tensors).items():
        heads = turned_heads(name, config)
        t = interleaved(t, heads) if heads else t
        fits = t.dim() >= 2 and t.size(-1) % gguf.GGML_QUANT_SIZES[types[kind]][0] == 0
        stored = types[kind] if fits else types.F32
        values = gguf.quants.quantize(t.float().contiguous().numpy(), stored)
        writer.add_tensor(gguf_name(name), values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def together(tensors):
    """The tensors, with those of the experts of a layer in one."""
    found, experts = {}, {}
    for name, t in tensors.items():
        of_all = re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", name)
        if of_all == name:
            found[name] = t
        else:
            experts.setdefault(of_all, []).append(t)
    return found | {name: torch.stack(matrices) for name, matrices in experts.items()}


def write_tokenizer(gguf, writer, tokenizer, vocab_size):
    """Write byte-pair encoding as GGUF's "gpt2", and characters and bytes as its "rwkv". "rwkv"
    takes the longest token that matches the text, so it reads each character as its one token."""
    if not named(tokenizer):
        writer.add_tokenizer_model("no_vocab")
        return
    special = {}
    if tokenizer["kind"] == "bpe":
        tokens, merges, special = to_lists(tokenizer)
        writer.add_tokenizer_model("gpt2")
        pre = {pattern: name for name, pattern in PATTERNS.items()}
        writer.add_tokenizer_pre(pre[tokenizer["pat_str"]])
        writer.add_token_merges(merges or NO_MERGES)
    else:
        tokens = to_escaped(tokenizer)
        writer.add_tokenizer_model("rwkv")
        if tokenizer["kind"] == "char":
            chars = tokenizer["chars"]
            writer.add_unk_token_id(chars.index(unknown(chars)))
    kind = gguf.TokenType
    kinds = [kind.CONTROL if token in special else kind.NORMAL for token in tokens]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]  # llama.cpp wants all rows named
    writer.add_token_list(tokens + unused)
    writer.add_token_types(kinds + [kind.UNUSED] * len(unused))
    writer.add_add_bos_token(False)
    if "<|endoftext|>" in special:
        writer.add_eos_token_id(special["<|endoftext|>"])
        writer.add_bos_token_id(special["<|endoftext|>"])
