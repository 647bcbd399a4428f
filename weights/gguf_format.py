"""
GGUF, the format of llama.cpp, from and to Hugging Face's configuration and tensors, which formats.py reads and
writes. Of its architectures the plain LLaMA, through the package `gguf` (which no other part of this repo needs).

GGUF's rotary embedding turns the pairs (2i, 2i + 1), Hugging Face's and ours (i, i + D/2): so the rows of each
head's wq and wk stand in another order, and reading one as the other gives a model that is nearly right.
"""

import torch

from common.errors import UserError
from weights.tokenizer_formats import PATTERNS, from_lists, to_lists

KEYS = {  # theirs: Hugging Face's
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
SIZES = (
    "embedding_length",
    "block_count",
    "attention.head_count",
)  # without which nothing can be read
NAMES = {  # theirs: Hugging Face's, {} is the number of the layer
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
}


def package():
    try:
        import gguf
    except ImportError:
        raise UserError("this needs the package gguf", "GGUF", "pip install gguf") from None
    return gguf


def interleaved(t, heads):
    """Rows of each head from (2, D/2), ours, to (D/2, 2), GGUF's."""
    return t.view(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def halves(t, heads):
    """The way back."""
    return t.view(heads, -1, 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def renamed(names, n_layer):
    return {
        f"{theirs.format(i)}.weight": f"{name.format(i)}.weight"
        for theirs, name in names.items()
        for i in range(n_layer if "{}" in theirs else 1)
    }


def turned(name, config):
    """How many heads' rows of a tensor stand in the other order, 0 for none."""
    return (
        config["num_attention_heads"]
        if ".q_proj." in name
        else config["num_key_value_heads"]
        if ".k_proj." in name
        else 0
    )


def open_file(path):
    """(the package, its reader, {key: value}) of a GGUF file."""
    gguf = package()
    try:
        reader = gguf.GGUFReader(path)
        told = {key: field.contents() for key, field in reader.fields.items()}
        return (
            gguf,
            reader,
            {
                key: float(f"{value:.7g}") if type(value) is float else value
                for key, value in told.items()
            },
        )  # fp32 there
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read this GGUF file: {error}", path, "download the file again"
        ) from None


def read(path):
    """(config.json, tensors) in Hugging Face's form of a GGUF file, dequantised to fp32."""
    gguf, reader, told = open_file(path)
    if told.get("general.architecture") != "llama":
        raise UserError(
            f"cannot read a GGUF model of architecture {told.get('general.architecture')!r}",
            path,
            "only llama can be read",
        )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    missing = [
        f"llama.{key}"
        for key in SIZES
        if type(told.get(f"llama.{key}")) is not int or told[f"llama.{key}"] < 1
    ] + ["token_embd.weight"] * ("token_embd.weight" not in stored)
    if missing:
        raise UserError(
            f"this file has no {', '.join(missing)}",
            path,
            "get the model again: these sizes are in every whole one",
        )
    head_size = told["llama.embedding_length"] // told["llama.attention.head_count"]
    for key, value in {
        "rope.scaling.type": "none",
        "rope.dimension_count": head_size,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "expert_count": 0,
    }.items():
        if told.get(f"llama.{key}", value) != value:
            raise UserError(
                f"our llama model cannot express llama.{key}={told[f'llama.{key}']!r}",
                path,
                f"it needs {value!r} there",
            )
    config = {"model_type": "llama", "rope_theta": 10000.0} | {
        name: told[f"llama.{key}"] for key, name in KEYS.items() if f"llama.{key}" in told
    }
    config |= {
        "vocab_size": config.get("vocab_size") or int(stored["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in stored,
    }
    config["num_key_value_heads"] = config.get("num_key_value_heads", config["num_attention_heads"])
    names, tensors = renamed(NAMES, config["num_hidden_layers"]), {}
    for tensor in reader.tensors:
        name = names.get(tensor.name, tensor.name)  # one without a place is refused by its own name
        t = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        tensors[name] = halves(t, turned(name, config)) if turned(name, config) else t
    return config, tensors


def write(path, config, tensors, tokenizer):
    """Write a LLaMA, given as Hugging Face's configuration and tensors, with tokenizer.to_json(). Returns what was
    left out, or None."""
    gguf = package()
    for key, fitting in {"rope_scaling": None, "hidden_act": "silu"}.items():
        if config.get(key, fitting) != fitting:
            raise UserError(
                f"{key}={config[key]}: GGUF's llama is without", "export=gguf", "use --export=hf"
            )
    writer = gguf.GGUFWriter(path, "llama")
    for key, name in KEYS.items():
        (writer.add_float32 if name in ("rms_norm_eps", "rope_theta") else writer.add_uint32)(
            f"llama.{key}", config[name]
        )
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    pre = {pattern: name for name, pattern in PATTERNS.items()}.get(tokenizer.get("pat_str"))
    left_out = (
        None
        if pre
        else f"the tokenizer: GGUF has none of kind {tokenizer['kind']} with the pattern {tokenizer.get('pat_str')}"
    )
    if pre:
        tokens, merges, special = to_lists(tokenizer)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(
            [
                gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
                for token in tokens
            ]
        )
        writer.add_token_merges(merges)
        if "<|endoftext|>" in special:
            writer.add_eos_token_id(special["<|endoftext|>"])
            writer.add_bos_token_id(special["<|endoftext|>"])
    else:
        writer.add_tokenizer_model("no_vocab")
    theirs = {name: key for key, name in renamed(NAMES, config["num_hidden_layers"]).items()}
    for name, t in tensors.items():
        t = interleaved(t, turned(name, config)) if turned(name, config) else t
        writer.add_tensor(theirs[name], t.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left_out


def read_tokenizer(path):
    """to_json() of the tokenizer inside a GGUF file, as tokenizer_from_json takes it."""
    gguf, _, told = open_file(path)
    model, pre = told.get("tokenizer.ggml.model"), told.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PATTERNS:
        raise UserError(
            f"cannot read a tokenizer of model {model!r} with the pattern {pre!r}",
            path,
            "choose a file with gpt2 and " + " or ".join(PATTERNS),
        )
    tokens = told["tokenizer.ggml.tokens"]
    special = {
        i
        for i, kind in enumerate(told["tokenizer.ggml.token_type"])
        if kind != gguf.TokenType.NORMAL
    }
    return from_lists(tokens, told["tokenizer.ggml.merges"], special, PATTERNS[pre], path)
