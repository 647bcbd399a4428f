"""extras/gguf.py: files that llama.cpp's own package reads, computed by llama.cpp's definitions."""

import pytest
import torch
from torch.nn import functional as F

from common.errors import UserError
from common.files import UMASK
from extras import gguf
from helpers.bpe import bpe
from helpers.checkpoints import copy_run
from helpers.formats import small_model
from helpers.models import tokens
from tokens.tokenizer import GPT4, ByteTokenizer, CharTokenizer
from weights import tokenizers
from weights.export import to_hf

package = pytest.importorskip("gguf")

TOKENIZERS = {
    "byte": ByteTokenizer(),
    "ascii": CharTokenizer("\n ab"),
    "char": CharTokenizer("\0\n !?\\abö\x7f"),
    "bpe": bpe(),
    "no merges": bpe(GPT4, merges=0),
}
OTHER = r" ?[^(\s|[.,!?…])]+"  # a pattern that GGUF has no name for


def write(path, made, tokenizer, how=gguf.write, **keys):
    word = "gpt2" if type(made).__name__ == "GPT" else "llama"
    config, tensors = to_hf(word, vars(made.config), made.state_dict(), gguf.FAMILIES)
    how(path, config, tensors, tokenizer, **keys)


def read(path):
    """({key: value}, {name: tensor}) of a file, by llama.cpp's own package."""
    reader = package.GGUFReader(path)
    tensors = {
        t.name: torch.tensor(package.quants.dequantize(t.data, t.tensor_type))
        for t in reader.tensors
    }
    return {key: field.contents() for key, field in reader.fields.items()}, tensors


def test_the_command_writes_a_file_for_llama_cpp(tmp_path, capsys):
    """Colleagues may read it. test_export.py tests that it appears whole or not at all."""
    dest = tmp_path / "x.gguf"
    gguf.main([str(copy_run(tmp_path / "run")), f"--dest={dest}"])
    said = capsys.readouterr().out
    assert "after 20 steps" in said and f"llama-cli -m {dest}" in said
    assert dest.stat().st_mode & 0o777 == 0o666 & ~UMASK
    about = read(dest)[0]["general.description"]
    assert about.startswith("# x.gguf") and "| loss |" in about and "python" not in about


@pytest.mark.parametrize("argv", [[], ["run"], ["run", "other", "--dest=x"]])
def test_a_wrong_command_line(argv):
    with pytest.raises(UserError, match="type python -m extras.gguf RUN --dest=FILE"):
        gguf.main(argv)


def gguf_logits(fields, stored, idx):
    """The logits of llama.cpp's `llama` and `gpt2`, by their own names and orders, in float64."""
    kind = fields["general.architecture"]
    t = {name: tensor.double() for name, tensor in stored.items()}
    H = fields[f"{kind}.attention.head_count"]
    KV = fields.get(f"{kind}.attention.head_count_kv", H)
    eps = fields[f"{kind}.attention.layer_norm_{'rms_' if kind == 'llama' else ''}epsilon"]
    B, T = idx.shape

    def linear(x, name):
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def norm(x, name):
        if kind == "llama":
            return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * t[f"{name}.weight"]
        weight, bias = t[f"{name}.weight"], t[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rope(x):  # (B, T, H, D): pairs of neighbours
        D = fields["llama.rope.dimension_count"]
        rates = fields["llama.rope.freq_base"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angles = (torch.arange(T)[:, None] * rates)[:, None]  # (T, 1, D/2)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    x = t["token_embd.weight"][idx]
    if kind == "gpt2":
        x = x + t["position_embd.weight"][:T]
    for i in range(fields[f"{kind}.block_count"]):
        y = norm(x, f"blk.{i}.attn_norm")
        if kind == "gpt2":
            q, k, v = linear(y, f"blk.{i}.attn_qkv").chunk(3, -1)
        else:
            q, k, v = (linear(y, f"blk.{i}.attn_{part}") for part in "qkv")
        q, k, v = (part.unflatten(-1, (n, -1)) for part, n in ((q, H), (k, KV), (v, KV)))
        if kind == "llama":
            q, k = rope(q), rope(k)
        heads = [part.transpose(1, 2) for part in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"blk.{i}.attn_output")
        y = norm(x, f"blk.{i}.ffn_norm")
        up = linear(y, f"blk.{i}.ffn_up")
        if kind == "llama":
            up = F.silu(linear(y, f"blk.{i}.ffn_gate")) * up
        else:
            up = F.gelu(up, approximate="tanh")
        x = x + linear(up, f"blk.{i}.ffn_down")
    x = norm(x, "output_norm")
    return linear(x, "output" if "output.weight" in t else "token_embd")


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("word", ["llama", "gpt2"])
def test_gguf_is_the_same_model(word, tie, tmp_path):
    """Read by the package gguf and computed by llama.cpp's definitions, it gives our logits."""
    wide = dict(arch="llama", n_kv_head=2, head_dim=10) if tie and word == "llama" else {}
    made = small_model(word, tie_embeddings=tie, **wide)
    write(tmp_path / "x.gguf", made, ByteTokenizer())
    fields, tensors = read(tmp_path / "x.gguf")
    assert ("output.weight" in tensors) != tie
    idx = tokens(2, 40)
    with torch.no_grad():
        expected = made.double()(idx)[0]
    assert (gguf_logits(fields, tensors, idx) - expected).abs().max() < 1e-4
    name = "blk.0.attn_q.weight" if word == "llama" else "blk.0.attn_qkv.weight"
    wrong = tensors | {name: tensors[name].flip(0)}
    assert (gguf_logits(fields, wrong, idx) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind, least, most", [("F16", 0, 1e-3), ("Q8_0", 1e-3, 0.02)])
def test_gguf_in_other_number_formats(kind, least, most, tmp_path):
    made = small_model("llama")
    write(tmp_path / "x.gguf", made, ByteTokenizer(), kind=kind)
    stored = read(tmp_path / "x.gguf")[1]["blk.0.ffn_up.weight"]
    assert least < (stored - made.blocks[0].mlp.up.weight).abs().max() < most


@pytest.mark.parametrize(
    "word, more",
    [
        ("llama", dict(arch="llama3", n_kv_head=2)),
        ("llama", dict(mlp="geglu")),
        ("llama", dict(window=5)),
        ("gpt2", dict(mlp="relu")),
    ],
)
def test_what_gguf_does_not_have(word, more, tmp_path):
    """The message names the key, ours or theirs."""
    made = small_model(word, **more)
    with pytest.raises(UserError, match="rope_scaling|hidden_act|window|activation_function"):
        write(tmp_path / "x.gguf", made, ByteTokenizer())


@pytest.mark.parametrize("unused", [0, 5])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_same_tokens_are_listed(kind, unused, tmp_path, capsys):
    """In the order of their ids, also if the embedding has rows without a token."""
    tokenizer = TOKENIZERS[kind]
    size = tokenizer.vocab_size
    made = small_model("llama", size + unused)
    write(tmp_path / "x.gguf", made, tokenizer, gguf.export, card="---\n\n")
    may_never_end = kind == "char" or (kind == "ascii" and unused > 0)
    assert ("never finish reading a prompt" in capsys.readouterr().err) == may_never_end
    fields, _ = read(tmp_path / "x.gguf")
    listed, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len({*listed}) == len(listed) == len(kinds) == size + unused
    assert kinds[size:] == [5] * unused  # UNUSED
    if tokenizer.to_json()["kind"] == "bpe":
        assert fields["tokenizer.ggml.model"] == "gpt2"
        ranks = kinds.count(1)  # NORMAL
        expected = [tokenizers.spelled(tokenizer.decode_bytes([i])) for i in range(ranks)]
        assert listed[:ranks] == expected
        assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.start
    else:
        assert fields["tokenizer.ggml.model"] == "rwkv"
        raw = [tokenizer.decode_bytes([i]).decode("latin-1") for i in range(size)]
        assert all(raw[i] == listed[i] for i in range(size) if " " <= raw[i] < "\\")


def test_a_tokenizer_that_llama_cpp_lacks(tmp_path):
    """It could not read a text, so that the file would be of no use."""
    made = small_model("llama", bpe(OTHER).vocab_size)
    with pytest.raises(UserError, match="llama.cpp does not know how"):
        write(tmp_path / "x.gguf", made, bpe(OTHER))
