"""
Our tokenizers as other formats write them, and back: Hugging Face's tokenizer.json, and the lists of tokens
and merges that it shares with GGUF. Byte-pair encoding there is a vocabulary and an ordered list of merges;
here it is the ranks that tiktoken reads, where a token's id is its turn: the same wherever ids follow the merges.
"""

import base64

from common.errors import UserError

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Every digit alone, then GPT-2's: so a run of spaces before a digit is not followed by a word.
SMOLLM = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"
PATTERNS = {"gpt-2": GPT2, "smollm": SMOLLM}  # by GGUF's names

# GPT-2's letters for the 256 bytes: themselves where they print, else the next code points from 256 on.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in PRINTED} | {
    byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in PRINTED)
}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def spelled(token):
    return "".join(LETTERS[byte] for byte in token)


def merges(ranks):
    """[(left, right)] in order: the last merge that makes each token of several bytes, given {token: rank}."""
    found = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            turn = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = min(range(len(turn)), key=turn.__getitem__)
            if turn[i] >= rank:
                break  # a special token among the ranks: nothing makes it
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            found.append(tuple(parts))
    return found


def to_lists(data):
    """(tokens in order of their ids, [left right] merges, {special token: id}) from a tokenizer's to_json()."""
    if data["kind"] == "byte":
        return [LETTERS[byte] for byte in range(256)], [], {}
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(data["ranks"])}
    joined = [f"{spelled(left)} {spelled(right)}" for left, right in merges(ranks)]
    return (
        [spelled(token) for token in ranks]
        + sorted(data["special_tokens"], key=data["special_tokens"].get),
        joined,
        data["special_tokens"],
    )


def from_lists(tokens, joined, special, pattern, where):
    """What to_json() of the BPETokenizer would be; special: ids that no text is read as. Those at the end are
    its special tokens, others stand among the ranks, where the pattern keeps texts from them."""
    end = len(tokens)
    while end - 1 in special:
        end -= 1
    ids = {token: i for i, token in enumerate(tokens)}
    order = [ids.get(pair.replace(" ", "", 1), -1) for pair in joined]
    if order != sorted(order) or -1 in order:
        raise UserError(
            "the tokenizer's merges are not in the order of its ids",
            where,
            "prepare the text with another tokenizer",
        )
    raw = [
        token.encode() if i in special else bytes(BYTES[letter] for letter in token)
        for i, token in enumerate(tokens[:end])
    ]
    return {
        "kind": "bpe",
        "name": "imported",
        "pat_str": pattern,
        "special_tokens": {tokens[i]: i for i in range(end, len(tokens))},
        "ranks": [base64.b64encode(token).decode() for token in raw],
    }


def to_tokenizer_json(data):
    """Hugging Face's tokenizer.json of a tokenizer's to_json()."""
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "post_processor": None,
    }
    if data["kind"] == "char":  # a word is a character
        split = {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        }
        vocab = {char: i for i, char in enumerate(data["chars"])}
        return whole | {
            "pre_tokenizer": split,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        }
    tokens, joined, special = to_lists(data)
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    pattern = data.get("pat_str", "")
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    added = [
        dict(
            id=i,
            content=token,
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=True,
        )
        for token, i in special.items()
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": joined,
    }
    before = {"type": "Sequence", "pretokenizers": [split, bytes_]} if pattern else bytes_
    return whole | {
        "added_tokens": added,
        "pre_tokenizer": before,
        "decoder": bytes_,
        "model": model,
    }


def split_pattern(step):
    """The pattern of a Split for tiktoken, which drops what no piece matches: where that is kept, it becomes a piece, too."""
    if step is None:
        return None
    pattern, behavior = step["pattern"]["Regex"], step["behavior"]
    if behavior != "Isolated" and (behavior, step.get("invert")) != ("Removed", True):
        raise ValueError(f"a Split whose pieces are {behavior}")
    whole = behavior == "Removed" or pattern in PATTERNS.values() or pattern.endswith(r")[\s\S])+")
    return pattern if whole else rf"{pattern}|(?:(?!{pattern})[\s\S])+"


def from_tokenizer_json(whole, where):
    """What to_json() of ours would be, from a tokenizer.json of byte-level BPE; UserError where it is something else."""
    try:
        model, before = whole["model"], whole["pre_tokenizer"]
        listed = before.get("pretokenizers", [before])
        steps = {step["type"]: step for step in listed}
        own = steps["ByteLevel"].get("use_regex", True)  # GPT-2's pattern
        patterns = {
            ("ByteLevel",): GPT2,
            ("Digits", "ByteLevel"): SMOLLM,
            ("Split", "ByteLevel"): split_pattern(steps.get("Split")),
        }
        if len(steps) < len(listed):
            raise ValueError("several steps of a kind before it")
        if (
            model["type"] != "BPE"
            or whole.get("normalizer")
            or steps["ByteLevel"]["add_prefix_space"]
            or own != ("Split" not in steps)
            and model["merges"]
        ):
            raise ValueError(f"{model['type']} with {' and '.join(steps)}")
        pattern = patterns[tuple(steps)]
        ids = model["vocab"] | {token["content"]: token["id"] for token in whole["added_tokens"]}
        tokens = sorted(ids, key=ids.get)
        if [ids[token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("ids with gaps")
        joined = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return from_lists(
            tokens, joined, {token["id"] for token in whole["added_tokens"]}, pattern, where
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"this is no byte-level BPE that we can read: {error}",
            where,
            "prepare the text with a tokenizer of ours",
        ) from None
