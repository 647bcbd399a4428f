"""A pretrained model's tokenizer: its tokenizer.json, read by Hugging Face's `tokenizers`."""

import json
import re
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream

from common.errors import UserError, one_line
from tokens.tokenizer import Tokenizer

WINDOW = 64  # characters on each side of a cut that are encoded to confirm it
TRIED = 20  # places for a cut
CHAT = ("template", "bos_token", "eos_token")

# Texts that a tokenizer may not give back, by what is then changed.
PROBES = {
    "capital letters": "The King",
    "accents": "Zoë",
    "blanks at the beginning": " a",
    "runs of blanks": "a   b",
    "line ends": "a\n\nb",
    "ligatures": "\ufb01n",
    "letters of other scripts": "你好",
}


class ModelTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json: its ids and texts are those of the library.

    content: the tokenizer.json, as a dictionary; the truncation and padding in it are switched off.
    bos, stops: see Tokenizer. chat: None, or the model's chat `template` with its `bos_token` and
    `eos_token`, all texts."""

    def __init__(self, content, bos=None, stops=(), chat=None):
        self.content = content | {"truncation": None, "padding": None}
        self.library = Library.from_str(json.dumps(self.content))
        self.library.encode_special_tokens = True  # a special token in a text is ordinary text
        self.vocab_size = max(self.library.get_vocab().values()) + 1
        added = self.library.get_added_tokens_decoder().items()
        self.special = {i: token.content for i, token in added if token.special}
        self.chat = chat and {key: str(chat[key]) for key in CHAT}
        self.mark(bos, stops)

    @cached_property
    def prompt_library(self):
        """The library's tokenizer as it reads prompts, where special tokens count."""
        return Library.from_str(json.dumps(self.content))

    def ids_of(self, library, text):
        """(T,) ids by the library. Half a character, \\ud800 to \\udfff, is read as U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            (found,) = library.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # an unknown character, where no token stands for one
            what = f"the model's tokenizer cannot encode this: {one_line(error)}"
            raise UserError(what, "prompt or text", "leave such characters out") from None
        return np.array(found.ids, dtype=np.int64)

    def encode_prompt(self, text):
        return self.ids_of(self.prompt_library, text)

    def encode(self, text):
        """(T,) ids of a text, among which are no marks."""
        ids = self.ids_of(self.library, text)
        is_mark = np.isin(ids, self.marks)
        if not is_mark.any():
            return ids
        # Models such as Unigram find a special token's name in a text. So each such name is cut
        # after its first character, and the parts are encoded by themselves.
        names = [self.library.id_to_token(i) for i in self.marks]
        cuts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names]
        first_part, *other_parts = re.split("|".join(cuts), text)
        if not other_parts:  # no name stands in the text as it is
            return ids[~is_mark]
        return np.concatenate([self.encode(first_part), *map(self.encode_rest, other_parts)])

    def encode_rest(self, text):
        """encode, without the blank that many tokenizers put before a text."""
        prefixes = ["\n", "a"] if text[:1].isspace() else ["\n"]  # two line ends may be one token
        for prefix in prefixes:
            prefix_ids = self.encode(prefix)
            ids = self.encode(prefix + text)
            if len(prefix_ids) and np.array_equal(ids[: len(prefix_ids)], prefix_ids):
                return ids[len(prefix_ids) :]
        return self.encode(text)

    def cut(self, text):
        """The last white space before which the library confirms that a cut changes no id."""
        places = [match.start() for match in re.finditer(r"(?<=\S)\s", text[:-WINDOW])]
        for at in reversed(places[-TRIED:]):
            left = text[max(0, at - WINDOW) : at]
            right = text[at : at + WINDOW]
            parts = np.concatenate([self.encode(left), self.encode_rest(right)])
            if np.array_equal(parts, self.encode(left + right)):
                return at
        return 0

    def decode(self, ids):
        return self.library.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def decode_bytes(self, ids):
        """The bytes that the ids add to a text, also the blank that begins it."""
        before = self.encode("\n").tolist()
        whole = self.decode([*before, *np.asarray(ids).tolist()])
        return whole.removeprefix(self.decode(before)).encode()

    def stream(self, before=()):
        return ModelStream(self, before)

    def changes(self):
        blank = self.decode(self.encode("a")).removesuffix("a")
        found = ["the beginning, by a blank"] if blank else []
        for name, text in PROBES.items():
            if self.decode(self.encode(text)).removeprefix(blank) != text:
                found.append(name)
        return found

    def to_json(self):
        marks = {"bos": self.bos, "stops": [*self.stops], "chat": self.chat}
        return {"kind": "model", "tokenizer": self.content} | marks


class ModelStream:
    """The text of a ModelTokenizer's tokens, one after another, by the library's DecodeStream."""

    def __init__(self, tokenizer, before):
        self.tokenizer = tokenizer
        self.start(before)

    def start(self, before):
        self.stream = DecodeStream(skip_special_tokens=False)
        self.pending = []  # the last tokens, whose text is not complete
        for token in before:
            self.step(token)

    def step(self, token):
        """The text that is complete with a token."""
        self.pending.append(token)
        try:
            text = self.stream.step(self.tokenizer.library, token)
        except Exception:  # the library fails if a token changes the text before it
            text = self.end()
            self.start([token])
        if text:
            self.pending = []
        return text or ""

    def end(self):
        """The text of the tokens that are left."""
        return self.tokenizer.decode(self.pending)
