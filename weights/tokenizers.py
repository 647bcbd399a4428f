"""
Convert our tokenizers to Hugging Face's tokenizer.json and back, and to GGUF's lists. There,
byte-pair encoding is a vocabulary and an ordered list of merges. Here it is tiktoken's ranks: a
token's id is also the rank of its merge. Both are the same if ids follow the merges.
"""

import base64
import json
from itertools import pairwise

from common.errors import UserError, one_line
from common.files import read_json
from tokens.tokenizer import BYTES, END, GPT4, LETTERS

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Each digit is a piece of its own; the rest is GPT-2's pattern, with a run of spaces before a digit
# cut as before a word.
SMOLLM = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"
PATTERNS = {"gpt-2": GPT2, "smollm": SMOLLM, "dbrx": GPT4}  # {GGUF's name: pattern}


def spelled(token):
    """The bytes of a token in GPT-2's letters."""
    return "".join(LETTERS[byte] for byte in token)


def merges(ranks):
    """[(left, right)] in order of rank, given {token: rank}: for each token of several bytes, the
    merge that makes it."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            i = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            if pair_ranks[i] >= rank:
                break  # a special token among the ranks: no merge makes it
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            pairs.append(tuple(parts))
    return pairs


def to_lists(data):
    """(tokens in order of their ids, ["left right"] merges, {special token: id}) from a tokenizer's
    to_json()."""
    if data["kind"] == "byte":
        return [LETTERS[byte] for byte in range(256)], [], {}
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(data["ranks"])}
    special = data["special_tokens"]
    tokens = [spelled(token) for token in ranks] + sorted(special, key=special.get)
    marks = {data.get("bos"), *data.get("stops", [])} & {*range(len(ranks))}
    special = {tokens[i]: i for i in sorted(marks)} | special
    return tokens, [f"{spelled(left)} {spelled(right)}" for left, right in merges(ranks)], special


def to_escaped(data):
    """The tokens of characters or bytes as GGUF's "rwkv" tokenizer lists them: printable ASCII
    unchanged, every other byte escaped as in Python."""
    tokens = [bytes([byte]) for byte in range(256)]
    if data["kind"] == "char":
        tokens = [char.encode() for char in data["chars"]]
    return [token.decode("latin-1").encode("unicode_escape").decode() for token in tokens]


# ---------------------------------------------------------------- tokenizer.json


def to_tokenizer_json(data):
    """Hugging Face's tokenizer.json of a tokenizer's to_json()."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    if data["kind"] == "sentencepiece":
        return data["tokenizer"]
    if data["kind"] == "char":  # each character is a word
        vocab = {char: i for i, char in enumerate(data["chars"])}
        library = Tokenizer(models.BPE(vocab, []))  # drops a character that is not there
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
        return json.loads(library.to_str())

    tokens, joined, special = to_lists(data)
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in joined]))
    library.add_special_tokens([*special])
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if data.get("pat_str"):
        steps.insert(0, pre_tokenizers.Split(Regex(data["pat_str"]), "isolated"))
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    bos = data.get("bos")
    if bos is not None:
        name = tokens[bos]
        before = processors.TemplateProcessing([name, "$A"], None, [(name, bos)])
        library.post_processor = before
    return json.loads(library.to_str())


def split_pattern(step):
    """The pattern of a Split step, for tiktoken, which drops text that the pattern does not match.
    Where Hugging Face keeps it, the returned pattern matches it too."""
    pattern, behavior = step["pattern"]["Regex"], step["behavior"]
    if behavior != "Isolated" and (behavior, step.get("invert")) != ("Removed", True):
        raise ValueError(f"a Split whose pieces are {behavior}")
    complete = pattern in PATTERNS.values() or pattern.endswith(r")[\s\S])+")
    return pattern if complete or behavior == "Removed" else rf"{pattern}|(?:(?!{pattern})[\s\S])+"


def text_pattern(content):
    """The pattern by which a tokenizer.json of byte-level BPE cuts a text. Raises KeyError or
    ValueError if it holds another kind of tokenizer."""
    model, before = content["model"], content["pre_tokenizer"]
    listed = before.get("pretokenizers", [before])
    steps = {step["type"]: step for step in listed}
    if len(steps) < len(listed):
        raise ValueError("it has several pre-tokenizers of one type")
    patterns = {("ByteLevel",): GPT2, ("Digits", "ByteLevel"): SMOLLM}
    if "Split" in steps:
        patterns["Split", "ByteLevel"] = split_pattern(steps["Split"])
    own_pattern = steps["ByteLevel"].get("use_regex", True)  # GPT-2's
    cut_twice_or_never = own_pattern == ("Split" in steps) and model["merges"]
    prefix = steps["ByteLevel"]["add_prefix_space"]
    if model["type"] != "BPE" or content.get("normalizer") or prefix or cut_twice_or_never:
        raise ValueError(f"{model['type']} with {' and '.join(steps)}")
    return patterns[tuple(steps)]


def from_tokenizer_json(content, where):
    """Our to_json() from a tokenizer.json of BPE by bytes, or by characters with bytes for those
    that are unknown, as SentencePiece makes it. Of the former, special tokens with the last ids
    become ours; others stay among the ranks, and the pattern prevents text from producing them.
    Raises UserError for another kind of tokenizer, or ids that do not follow the merges."""
    try:
        content = content | {"model": {"type": "BPE"} | content["model"]}  # GPT-2's does not say it
        if content["model"]["type"] == "BPE" and content["model"].get("byte_fallback"):
            normalizer = content.get("normalizer") or {"normalizers": []}
            names = {step["type"] for step in normalizer.get("normalizers", [normalizer])}
            if changing := names - {"Prepend", "Replace"}:  # blanks alone are replaced
                raise ValueError(f"it changes the text: {', '.join(sorted(changing))}")
            return {"kind": "sentencepiece", "tokenizer": content}
        pattern, model, added = text_pattern(content), content["model"], content["added_tokens"]
        ids = model["vocab"] | {token["content"]: token["id"] for token in added}
        tokens = sorted(ids, key=ids.get)
        if [ids[token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("its ids have gaps or duplicates")
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        order = [ids.get(left + right, -1) for left, right in pairs]
        if order != sorted(order) or -1 in order:
            raise ValueError("its merges are not in the order of its ids")

        special = {token["id"] for token in added}
        end = next((i + 1 for i in reversed(range(len(tokens))) if i not in special), 0)
        ranks = []
        for i, token in enumerate(tokens[:end]):
            raw = token.encode() if i in special else bytes(BYTES[letter] for letter in token)
            ranks.append(base64.b64encode(raw).decode())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"cannot read this as byte-level BPE: {one_line(error)}"
        raise UserError(what, where, "prepare the text with a tokenizer of ours") from None
    return {
        "kind": "bpe",
        "name": "imported",
        "pat_str": pattern,
        "special_tokens": {tokens[i]: i for i in range(end, len(tokens))},
        "ranks": ranks,
    }


# ---------------------------------------------------------------- what special tokens mean

CHAT_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>")  # where no file names one


def read_marks(folder, content):
    """{"bos": the id before each text or None, "stops": [ids that end a text, that of a document
    first]} from the files beside a tokenizer.json; {} if <|endoftext|> alone has a meaning. Only
    special tokens count, since a config.json may be of another vocabulary."""
    fix = "download the file again"
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    paths = [folder / name for name in names]
    about, *configs = (read_json(p, fix, infinity=True) if p.is_file() else {} for p in paths)
    try:
        ids = {token["content"]: token["id"] for token in content["added_tokens"]}
        named = [about.get("bos_token"), about.get("eos_token")]
        first, last = (name["content"] if isinstance(name, dict) else name for name in named)
        stops = [ids.get(last)]
        for given in (config.get("eos_token_id") for config in configs):
            stops += given if isinstance(given, list) else [given]
        stops = stops if {*stops} & {*ids.values()} else [ids.get(name) for name in ENDS]
        stops += [ids.get(name) for name in CHAT_STOPS]
        stops = [*dict.fromkeys(i for i in stops if type(i) is int and i in ids.values())]

        template = content.get("post_processor") or {}
        steps = template.get("processors", [template])
        firsts = [step["single"][0] for step in steps if step.get("type") == "TemplateProcessing"]
        bos = ids.get(firsts[0].get("SpecialToken", {}).get("id")) if firsts else None
        adds = about.get("add_bos_token", bos is not None)
        bos = (bos if bos is not None else ids.get(first)) if adds else None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        what = f"cannot read its special tokens: {type(error).__name__} {one_line(error)}"
        raise UserError(what, folder, fix) from None
    is_default = bos is None and stops == [i for name, i in ids.items() if name == END]
    return {} if is_default else {"bos": bos, "stops": stops}
