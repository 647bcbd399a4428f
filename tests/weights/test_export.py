"""
Runs written for other programs: Hugging Face's folder opened by transformers, GGUF read back by the
package gguf.
"""

import random

import pytest
import torch
from torch.nn import functional as F

import train
from common.errors import Failure, UserError
from common.files import UMASK, partial
from helpers.bpe import WORDS
from helpers.families import ours
from helpers.formats import read_gguf, small_model, write_gguf
from helpers.models import tokens
from prepare import prepare
from sample import generate
from tokens.tokenizer import ByteTokenizer
from weights import export, gguf
from weights.checkpoint import open_run
from weights.export import main
from weights.hf import load_pretrained

transformers = pytest.importorskip("transformers")

RUNS = {
    "gpt2": ["--model=gpt2", "--dataset=chars"],
    "llama": ["--model=llama", "--n_kv_head=1", "--dataset=bytes"],
    "mistral": ["--arch=mistral", "--dataset=chars", "--window=5"],
}
SIZE = ["--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=64", "--batch_size=4"]
CPU = ["--device=cpu", "--compile=False", "--warmup_iters=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of two large steps, so that the greedy text is no single token."""
    root = tmp_path_factory.mktemp("runs")
    rng = random.Random(0)
    text = "".join(rng.choice(WORDS) + rng.choice("    \n") for _ in range(800))
    (root / "words.txt").write_text(text, encoding="utf-8")
    prepare("chars", input=str(root / "words.txt"), tokenizer="char", data_dir=str(root))
    prepare("bytes", input=str(root / "words.txt"), tokenizer="byte", data_dir=str(root))
    for name, more in RUNS.items():
        where = [f"--data_dir={root}", f"--out_dir={root / name}"]
        train.main([*SIZE, *CPU, *where, "--max_iters=2", "--learning_rate=0.05", *more])
    return root


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("name", RUNS)
def test_hugging_face_writes_the_same_text(runs, name, tmp_path, capsys):
    dest = tmp_path / "hf"
    assert main(["--export=hf", f"--out_dir={runs / name}", f"--dest={dest}"]) is None
    assert "after 2 steps" in capsys.readouterr().out
    model, tokenizer, _, _ = open_run(runs / name)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        dest, output_loading_info=True
    )
    assert reference.config.model_type == name and not any(info.values())
    assert reference.generation_config.eos_token_id is None, "or it would stop at a character"
    theirs = transformers.AutoTokenizer.from_pretrained(dest)
    prompt = "the king of rome "
    ids = torch.tensor(tokenizer.encode(prompt))[None]
    assert theirs(prompt)["input_ids"] == ids[0].tolist()
    text = reference.generate(ids, max_new_tokens=30, do_sample=False)[0]
    own = torch.cat([ids, *generate(model, ids, 30, temperature=0)], dim=1)[0]
    assert text.tolist() == own.tolist() and len(set(own.tolist())) > 5
    assert theirs.decode(text) == tokenizer.decode(own.numpy())
    back = ours(*load_pretrained(str(dest)), dtype=torch.float32)
    assert (back(own[None])[0] - model(own[None])[0]).abs().max() < 1e-5


def test_what_the_command_refuses(runs, tmp_path):
    (tmp_path / "there").mkdir()
    for words, argv in {
        "dest is missing": [],
        "it exists already": [f"--dest={tmp_path / 'there'}"],
        "its parent folder does not exist": [f"--dest={tmp_path}/no/hf"],
        "window=5: no GGUF model has this.*--export=hf allows more": [
            *("--export=gguf", f"--out_dir={runs / 'mistral'}", f"--dest={tmp_path / 'x.gguf'}")
        ],
    }.items():
        with pytest.raises(UserError, match=words):
            main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_unfinished_stays(runs, kind, fails, tmp_path, monkeypatch):
    """What a killed or failed export left is removed; colleagues may read what is written."""
    pytest.importorskip("gguf")
    dest = tmp_path / "model"
    (tmp_path / "model.partial").write_text("not ours")
    partial(dest).mkdir()
    argv = [f"--export={kind}", f"--out_dir={runs / 'llama'}", f"--dest={dest}"]
    if fails:

        def refuse(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(export, "save_file", refuse)
        monkeypatch.setattr(gguf, "write_tokenizer", refuse)
        with pytest.raises(Failure, match="No space left on device .*model.*free the disk"):
            main(argv)
    else:
        main(argv)
        for path in [*dest.glob("*")] or [dest]:
            assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK
    expected = ["model.partial"] if fails else ["model", "model.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_a_dest_that_appears_meanwhile_stays(tmp_path):
    def write(path):
        path.write_text("ours")
        (tmp_path / "model").write_text("not ours")

    with pytest.raises(Failure, match="it exists already"):
        export.write_atomically(tmp_path / "model", write)
    assert (tmp_path / "model").read_text() == "not ours" and len([*tmp_path.iterdir()]) == 1


# ---------------------------------------------------------------- GGUF


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
    write_gguf(tmp_path / "x.gguf", made, ByteTokenizer())
    fields, tensors = read_gguf(tmp_path / "x.gguf")
    assert ("output.weight" in tensors) != tie
    idx = tokens(2, 40)
    with torch.no_grad():
        expected = made.double()(idx)[0]
    assert (gguf_logits(fields, tensors, idx) - expected).abs().max() < 1e-4
    name = "blk.0.attn_q.weight" if word == "llama" else "blk.0.attn_qkv.weight"
    wrong = tensors | {name: tensors[name].flip(0)}
    assert (gguf_logits(fields, wrong, idx) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_gguf_in_other_number_formats(kind, tmp_path):
    made = small_model("llama")
    write_gguf(tmp_path / "x.gguf", made, ByteTokenizer(), kind)
    stored = read_gguf(tmp_path / "x.gguf")[1]["blk.0.ffn_up.weight"]
    assert 0 < (stored - made.blocks[0].mlp.up.weight).abs().max() < 0.02


@pytest.mark.parametrize(
    "word, more",
    [
        ("llama", dict(arch="llama3", n_kv_head=2)),
        ("llama", dict(mlp="geglu")),
        ("gpt2", dict(mlp="relu")),
    ],
)
def test_what_gguf_does_not_have(word, more, tmp_path):
    made = small_model(word, **more)
    with pytest.raises(UserError, match="GGUF"):
        write_gguf(tmp_path / "x.gguf", made, ByteTokenizer())
