"""Small tokenizers of the kinds that pretrained models have, and folders of Hugging Face with
them."""

import json
import random

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tokens.tokenizer import END, GPT4

TEXT = "the king of Rome shall speak no more,\nand Zoë says 你好  in 1999, don't  <s> no </s>!\n"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["king", " Rome", " ", "  ", "\n", "\n\n"]
PIECES += ["é", "e\u0301", "ﬁ", "你", "好。", "🙂", "👩‍👧", "İ"]
PIECES += [*"aB7½'!.,_\t\r\x00\u2003\u2581", "'s", "<0x41>", "123", "\u00a0", "A\u030a", "<think>"]


def random_texts(count=300):
    """Texts of any characters and of those at which tokenizers cut."""
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        parts = rng.choices(PIECES, k=rng.randrange(12))
        parts += [chr(rng.choice([*range(0xD800), *range(0xE000, 0x30000)])) for _ in range(5)]
        rng.shuffle(parts)
        texts.append("".join(parts))
    return texts


def byte_level(split=None, special=(), last=(), normalizer=None, add_prefix_space=False):
    """A byte-level BPE: special tokens `special` first and `last` last. split: the pre-tokenizers
    before the bytes; None: GPT-2's pattern."""
    library = Tokenizer(models.BPE())
    if normalizer:
        library.normalizer = normalizer
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=split is None)
    library.pre_tokenizer = bytes_of
    if split:
        library.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_of])
    library.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": ALPHABET, "special_tokens": [*special], "show_progress": False}
    library.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=300, **options))
    library.add_special_tokens([*last])
    return library


def characters(metaspace=None):
    """A BPE of characters as SentencePiece makes it: blanks as \u2581, bytes for what is unknown.
    metaspace: the pre-tokenizer of newer files, in place of a normalizer."""
    blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    seen = Tokenizer(models.BPE())
    seen.normalizer = normalizers.Sequence(blanks)
    seen.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(vocab_size=80, show_progress=False)
    seen.train_from_iterator([TEXT.replace("\n", " ")] * 9, trainer)
    trained = json.loads(seen.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", "[INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate([*names, *trained["vocab"]])}
    merges = [tuple(pair) for pair in trained["merges"]]
    library = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        library.pre_tokenizer = metaspace
    else:
        library.normalizer = seen.normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(names[:4])
    return library


def unigram():
    """As T5's and XGLM's relatives have it."""
    library = Tokenizer(models.Unigram())
    collapse = normalizers.Replace(Regex(" {2,}"), " ")
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), collapse])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    special = {"special_tokens": ["<s>", "<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(vocab_size=80, show_progress=False, **special)
    library.train_from_iterator([TEXT] * 9, trainer)
    return library


def wordpiece():
    """As BERT has it."""
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    library.train_from_iterator([TEXT] * 9, trainer)
    return library


def with_bos(library, bos):
    """The library's tokenizer with `bos` before each text."""
    ids = [(bos, library.token_to_id(bos))]
    library.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=ids)
    return library


def gpt4_split():
    return [pre_tokenizers.Split(Regex(GPT4), "isolated")]


def llama3():
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    return with_bos(byte_level(gpt4_split(), last=names), names[0])


def qwen():
    last = [END, "<|im_start|>", "<|im_end|>"]
    library = byte_level(gpt4_split(), last=last, normalizer=normalizers.NFC())
    library.add_tokens(["<think>", "</think>"])  # special: false
    return library


def pythia():
    library = byte_level(special=[END, "<|padding|>"], normalizer=normalizers.NFC())
    library.add_tokens(["   ", "  "])  # runs of blanks
    return library


def falcon():
    split = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits()]
    split.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
    return byte_level(split, special=[">>TITLE<<", END])


def bloom():
    split = [pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated")]
    return byte_level(split, special=["<unk>", "<s>", "</s>", "<pad>"])


MISTRAL = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
MAKERS = {
    "llama2": lambda: with_bos(characters(), "<s>"),
    "llama3": llama3,
    "mistral": lambda: with_bos(characters(MISTRAL), "<s>"),
    "gpt2": lambda: byte_level(last=[END]),
    "roberta": lambda: byte_level(last=[END], add_prefix_space=True),
    "qwen": qwen,
    "pythia": pythia,
    "falcon": falcon,
    "bloom": bloom,
    "codeparrot": lambda: byte_level(special=[END]),
    "unigram": unigram,
    "wordpiece": wordpiece,
}
ABOUT = {  # {kind: tokenizer_config.json}
    "llama2": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    "qwen": {"bos_token": END, "eos_token": "<|im_end|>"},  # its bos only for templates
    "bloom": {"eos_token": "</s>", "bos_token": "<s>"},
    "unigram": {"eos_token": "</s>"},
    "wordpiece": {"eos_token": "[SEP]"},
}


def write_model(folder, kind, **stored):
    """A folder with the tokenizer of a kind. stored: fields of tokenizer.json to overwrite."""
    folder.mkdir(parents=True, exist_ok=True)
    library = MAKERS[kind]()
    ends = [library.token_to_id(name) for name in ("<|end_of_text|>", "<|eot_id|>")]
    contents = {
        "tokenizer": json.loads(library.to_str()) | stored,
        "tokenizer_config": ABOUT.get(kind, {}),
        "generation_config": {"eos_token_id": ends},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
