"""
Convert GGUF, the format of llama.cpp, to Hugging Face's configuration and tensors and back;
pretrained.py and export.py convert those to ours and back. families.py and gguf_tables.py hold a
table for each architecture. It needs the package `gguf`, which no other part of this repo needs.
"""

import re

import torch

from common.errors import UserError, one_line
from weights.families import FAMILIES
from weights.gguf_tables import ABSENT, TABLES
from weights.layouts import plain
from weights.tokenizer_formats import PATTERNS, from_escaped, from_lists, to_escaped, to_lists

FLOATS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")  # the others are whole numbers
OPTIONAL = ("num_key_value_heads", "rope_theta", "vocab_size")
EXPERT = re.compile(r"\.experts\.([0-9]+)\.")  # the number of an expert in their tensor's name
# Written for a vocabulary of bytes alone, since llama.cpp refuses a file without merges. It has no
# effect: no pattern leaves a letter and a mark after it in one piece.
NO_MERGES = ["a !"]
DAMAGED = "download the file again"


def import_gguf():
    try:
        import gguf
    except ImportError:
        raise UserError("the package gguf is not installed", "GGUF", "pip install gguf") from None
    return gguf


def tensor_rows(gguf, kind):
    """[([GGUF's names], their name, layout)] of the tensors that a model of Hugging Face's kind may
    have. {} is the layer, * each expert. The names are those of the package gguf, unless the table
    has others."""
    table, family = TABLES[kind], FAMILIES[kind]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[table.architecture], 1)
    named = [(theirs, end) for theirs, *_ in family.names for end in (".weight", ".bias")]

    rows = []
    for theirs, end in named + [(theirs, "") for theirs, *_ in family.tensors]:
        part = theirs.rpartition(".{}.")[2]
        if part in table.names:
            names = [f"blk.{{}}.{name}" for name in table.names[part].split()]
        else:
            whole = theirs.replace("{}", "0").replace(".*", "")
            names = [known.get_name(whole, (".weight", ".bias")).replace("blk.0.", "blk.{}.")]
        rows.append(([name + end for name in names], theirs + end, table.layouts.get(part, plain)))
    return rows


# ---------------------------------------------------------------- reading


def open_file(path):
    """Open a GGUF file. Returns (the package gguf, its reader, {key: value})."""
    gguf = import_gguf()

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
    config = read_config(fields, {tensor.name: tensor for tensor in reader.tensors}, path)
    kind = config["model_type"]
    tensors = {}
    for tensor in reader.tensors:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError, TypeError) as error:
            raise UserError(unreadable(tensor.name, error), path, DAMAGED) from None
        tensors[tensor.name] = torch.from_numpy(values.copy())

    # A tensor without a place keeps GGUF's name, and pretrained.py refuses it by that name.
    layers = dict.fromkeys(re.findall(r"^blk\.([0-9]+)\.", "\n".join(tensors), re.MULTILINE))
    for names, theirs, layout in tensor_rows(gguf, kind):
        for layer in layers if "{}" in theirs else [""]:
            stored = [name.replace("{}", layer) for name in names]
            if not tensors.keys() >= set(stored):
                continue
            try:
                whole = layout.join([tensors.pop(name) for name in stored], config)
                each = whole.unbind() if "*" in theirs else [whole]
            except (RuntimeError, ValueError, IndexError) as error:
                raise UserError(unreadable(stored[0], error), path, DAMAGED) from None
            for expert, tensor in enumerate(each):
                tensors[theirs.replace("{}", layer).replace("*", str(expert))] = tensor

    head, embedding = (tensors.get(name) for name in ("lm_head.weight", embedding_of(kind)))
    found = head is not None and embedding is not None
    twice = TABLES[kind].own_head and found and torch.equal(head, embedding)
    config["tie_word_embeddings"] = head is None or twice
    return config, tensors


def embedding_of(kind):
    return next(f"{theirs}.weight" for theirs, ours, _ in FAMILIES[kind].names if ours == ["wte"])


def unreadable(name, error):
    return f"cannot read the tensor {name}: {one_line(error)}"


def read_config(fields, stored, path):
    """Hugging Face's config.json from the {key: value} of a GGUF file and its {name: tensor}."""
    architecture = fields.get("general.architecture")
    kinds = {table.architecture: kind for kind, table in reversed(TABLES.items())}
    if not isinstance(architecture, str) or architecture not in kinds:
        what = f"cannot read a GGUF model of architecture {str(architecture)[:60]!r}"
        raise UserError(what, path, f"choose a file of architecture {', '.join(kinds)}")
    kind = kinds[architecture]
    if architecture == "llama" and fields.get("llama.expert_count", 0) != 0:
        kind = "mixtral"
    table = TABLES[kind]

    given = {
        key: fields[f"{architecture}.{key}"]
        for key in [*table.keys, *table.sizes]
        if f"{architecture}.{key}" in fields
    }
    needed = [key for key, name in table.keys.items() if name not in OPTIONAL]
    missing = [f"{architecture}.{key}" for key in [*needed, *table.sizes] if key not in given]
    if "token_embd.weight" not in stored:
        missing.append("token_embd.weight")
    if missing:
        fix = "download the model again: every complete file has these"
        raise UserError(f"this file has no {', '.join(missing)}", path, fix)

    for key, value in given.items():
        number = float if table.keys.get(key) in FLOATS else int
        if type(value) not in (number, int) or not 0 < value < 1e38:
            what = f"{architecture}.{key} is {str(value)[:60]}"
            text = "a number" if number is float else "a whole number"
            raise UserError(what, path, f"it must be {text} above 0; {DAMAGED}")

    own = f"{architecture}."
    config = {"model_type": kind, "rope_theta": 10000.0}
    config |= {table.keys[key]: value for key, value in given.items() if key in table.keys}
    config |= table.config({k[len(own) :]: v for k, v in fields.items() if k.startswith(own)})
    config.setdefault("vocab_size", int(stored["token_embd.weight"].shape[-1]))
    if "attention.head_count_kv" in table.keys:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    for key, value in table.further(config).items():
        if fields.get(own + key, ABSENT.get(key, value)) != value:
            found = fields.get(own + key, "nothing")
            what = f"our {kind} model cannot express {own}{key}={found!r}"
            raise UserError(what, path, f"it must be {'absent' if value is None else repr(value)}")
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


def known_to_gguf(tokenizer):
    """Whether GGUF has a name for a tokenizer. Takes its to_json()."""
    return tokenizer["kind"] != "bpe" or tokenizer["pat_str"] in PATTERNS.values()


def substitute_for_unknown(chars):
    """The character to read in place of unknown ones: llama.cpp aborts without such a character."""
    return next((char for char in "?_ \n" if char in chars), chars[0])


def caveat(tokenizer):
    """A note for the user on what llama.cpp does differently with a tokenizer, or None. Takes its
    to_json()."""
    if not known_to_gguf(tokenizer):
        pattern = tokenizer["pat_str"]
        return f"llama.cpp cannot read or write text with this file: GGUF does not know {pattern}"
    if tokenizer["kind"] == "char":
        substitute = substitute_for_unknown(tokenizer["chars"])
        return f"llama.cpp reads {substitute!r} for characters that the model does not know"
    return None


def write(path, config, tensors, tokenizer, kind="F32"):
    """Write a model to a GGUF file. Takes its configuration and tensors in Hugging Face's form, and
    its tokenizer's to_json(). kind: F32, F16 or Q8_0, the format of the matrices whose rows it can
    divide into blocks. Raises UserError for a part that GGUF's architecture does not have."""
    gguf = import_gguf()
    types = gguf.GGMLQuantizationType
    table = TABLES[config["model_type"]]
    for key, fitting in table.allowed(config).items():
        if config.get(key, fitting) != fitting:
            what = f"{key}={config[key]}: GGUF's {table.architecture} does not have this"
            raise UserError(what, "export=gguf", "use --export=hf")

    writer = gguf.GGUFWriter(path, table.architecture)
    for key, name in table.keys.items():
        number = float if name in FLOATS else int
        add_value(writer, f"{table.architecture}.{key}", number(config[name]))
    for key, value in table.further(config).items():
        if value != ABSENT.get(key):
            add_value(writer, f"{table.architecture}.{key}", value)
    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    write_tokenizer(gguf, writer, tokenizer, config["vocab_size"])

    if table.own_head:
        tensors = {"lm_head.weight": tensors[embedding_of(config["model_type"])]} | tensors
    for name, t in to_gguf(gguf, tensors, config):
        matrix = t.dim() >= 2 and name.endswith(".weight") and "conv1d" not in name
        fits = matrix and t.size(-1) % gguf.GGML_QUANT_SIZES[types[kind]][0] == 0
        stored = types[kind] if fits else types.F32
        values = gguf.quants.quantize(t.float().contiguous().numpy(), stored)
        writer.add_tensor(name, values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer, key, value):
    """Add a key with GGUF's type for a Python value."""
    adding = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adding.get(type(value), writer.add_string)(key, value)


def to_gguf(gguf, tensors, config):
    """(name, tensor) for each of GGUF, from Hugging Face's."""
    rows = tensor_rows(gguf, config["model_type"])
    places = {theirs: (names, layout) for names, theirs, layout in rows}
    experts = {}
    for name, t in tensors.items():
        experts.setdefault(EXPERT.sub(".experts.*.", name), []).append(t)
    for name, each in experts.items():
        layer = re.search(r"\.layers\.([0-9]+)\.", name)
        number = layer[1] if layer else ""
        names, layout = places[re.sub(r"\.layers\.[0-9]+\.", ".layers.{}.", name)]
        whole = torch.stack(each) if "*" in name else each[0]
        parts = layout.split(whole, len(names), config)
        for own, part in zip(names, parts, strict=True):
            yield own.replace("{}", number), part


def write_tokenizer(gguf, writer, tokenizer, vocab_size):
    """Write byte-pair encoding as GGUF's "gpt2", and characters and bytes as its "rwkv". "rwkv"
    takes the longest token that matches the text, so it reads each character as its one token."""
    if not known_to_gguf(tokenizer):
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
            writer.add_unk_token_id(chars.index(substitute_for_unknown(chars)))
    kind = gguf.TokenType
    kinds = [kind.CONTROL if token in special else kind.NORMAL for token in tokens]
    unused = [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]  # llama.cpp needs all names
    writer.add_token_list(tokens + unused)
    writer.add_token_types(kinds + [kind.UNUSED] * len(unused))
    writer.add_add_bos_token(False)
    if "<|endoftext|>" in special:
        writer.add_eos_token_id(special["<|endoftext|>"])
        writer.add_bos_token_id(special["<|endoftext|>"])
