"""
Write our tokenizers as Hugging Face's tokenizer.json, and as lists for GGUF; read what the files of
a model tell about its special tokens and its chats.

There, byte-pair encoding is a vocabulary and an ordered list of merges. Here it is tiktoken's
ranks: a token's id is also the rank of its merge.
"""

import base64
import json
from itertools import pairwise

from common.errors import UserError, one_line
from common.files import read_json
from tokens.tokenizer import END, LETTERS


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
            lowest = min(pair_ranks)
            if lowest >= rank:
                break  # a special token among the ranks: no merge makes it
            i = pair_ranks.index(lowest)  # the first of them
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
    return tokens, [f"{spelled(left)} {spelled(right)}" for left, right in merges(ranks)], special


# ---------------------------------------------------------------- tokenizer.json


def to_tokenizer_json(data):
    """Hugging Face's tokenizer.json of a tokenizer's to_json()."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if data["kind"] == "model":
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
    return json.loads(library.to_str())


# ---------------------------------------------------------------- what special tokens mean

CHAT_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>")  # where no file names one


def read_marks(folder, library):
    """What the files beside a tokenizer.json tell about its library's tokenizer: {"bos": the id
    before each text or None, "stops": [ids that end a text, first that of a document], "chat": see
    ModelTokenizer}. Only ids of the eos_token and of added tokens count, since a
    config.json may be of another vocabulary."""
    about = read_if_there(folder / "tokenizer_config.json")
    configs = [
        read_if_there(folder / "generation_config.json"),
        read_if_there(folder / "config.json"),
    ]
    try:
        first = content_of(about.get("bos_token"))
        last = content_of(about.get("eos_token"))
        ids = {token.content: i for i, token in library.get_added_tokens_decoder().items()}
        if last and library.token_to_id(last) is not None:
            ids[last] = library.token_to_id(last)
        stops = stops_of(ids, last, configs)

        before = library.encode("a")  # with the tokens that the library puts around each text
        bos = before.ids[0] if before.special_tokens_mask[:1] == [1] else None
        template = read_template(folder, about)
        tokens = {"bos_token": first or "", "eos_token": last or ""}
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        what = f"cannot read its special tokens: {type(error).__name__} {one_line(error)}"
        raise UserError(what, folder, "download the file again") from None
    chat = {"template": template} | tokens if template else None
    return {"bos": bos, "stops": stops, "chat": chat}


def read_if_there(path):
    """The content of a JSON file of Hugging Face, {} if there is none."""
    if not path.is_file():
        return {}
    return read_json(path, "download the file again", infinity=True)


def content_of(mark):
    """The text of a special token, which tokenizer_config.json gives as a text or an object."""
    return mark["content"] if isinstance(mark, dict) else mark


def stops_of(ids, last, configs):
    """The ids that end a text, first the one that ends a document. ids: {special token: its id};
    last: the eos_token, or None; configs: the files that may name ids of their own."""
    known = set(ids.values())
    stops = [ids.get(last)]
    for config in configs:
        named = config.get("eos_token_id")
        if isinstance(named, list):
            stops += named
        else:
            stops.append(named)
    stops = [i for i in stops if type(i) is int and i in known]
    if not stops:
        stops = [ids[name] for name in ENDS if name in ids]
    stops += [ids[name] for name in CHAT_STOPS if name in ids]
    return list(dict.fromkeys(stops))  # each once


def read_template(folder, about):
    """The chat template in a model's files, None if there is none. about: tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = about.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
