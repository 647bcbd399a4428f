"""
Tasks that tell mixers apart: a loss on text hides what a mixer forgets, a wrong answer shows it.
`python prepare.py task:recall` writes samples with a mask, as those of pairs.py, which train.py
trains and scores as they are. A sample is a line of random characters; what is learned is in []:

    copy        kTbQz|[kTbQz]         16 to 48 letters, once more (Jelassi et al. 2024,
                                      arXiv:2402.01032)
    recall      KdQaZmQ[a]..K[d]      2 to 12 keys with a value each, then as many questions (MQAR,
                                      Arora et al. 2023, arXiv:2312.04927)
    induction   kTb*QzkR*[Q]          which letter followed the star? (Fu et al. 2022,
                                      arXiv:2212.14052)
    needle      kT#40713vR#[40713]    which five digits stood among the letters? (Mohtashami & Jaggi
                                      2023, arXiv:2305.16300)

A dataset is a pure function of the task and the seed. All tasks have one vocabulary, so that they
can be mixed.
"""

import hashlib
import string

import numpy as np
from tqdm import tqdm

from tokens.token_files import TokenFile
from tokens.tokenizer import CharTokenizer
from tokens.writing import BAR

KEYS, VALUES = string.ascii_uppercase, string.ascii_lowercase
LETTERS = KEYS + VALUES
CHARS = "\n#*.|" + string.digits + LETTERS  # a newline ends a sample
SAMPLES = {"train": 18_000, "val": 1_000, "test": 1_000}
PAIRS = (2, 12)  # of recall: the fewest and the most keys
POWER = 0.01  # of recall: the place i, from 1, is drawn with a probability in proportion to i^-0.99
NOISE = {"induction": 96, "needle": 160}  # letters
DIGITS = 5  # of a needle


# ---------------------------------------------------------------- samples
# Each takes a numpy Generator and returns the pieces of a sample, [(text, whether it is learned)].


def some(random, characters, count):
    """`count` of some characters, drawn independently."""
    return "".join(characters[i] for i in random.integers(len(characters), size=count))


def copy(random):
    word = some(random, LETTERS, random.integers(16, 49))
    return [(f"{word}|", False), (f"{word}\n", True)]


def recall(random):
    """After n keys with their values there are 2n places for a question, of which n are taken, by
    the paper's power law: most are early. Each asks for one of the keys, drawn independently, so
    that earlier answers do not tell later ones. The other places hold dots."""
    n = random.integers(PAIRS[0], PAIRS[1] + 1)
    keys, values = (random.permutation([*letters])[:n] for letters in (KEYS, VALUES))
    shares = np.arange(1, 2 * n + 1) ** (POWER - 1)
    taken = random.choice(2 * n, n, replace=False, p=shares / shares.sum())

    pieces = [("".join(k + v for k, v in zip(keys, values, strict=True)), False)]
    for place in range(2 * n):
        i = random.integers(n)
        asked = [(keys[i], False), (values[i], True)]
        pieces += asked if place in taken else [("..", False)]
    return [*pieces, ("\n", False)]


def induction(random):
    noise, at = some(random, LETTERS, NOISE["induction"]), random.integers(NOISE["induction"])
    return [(f"{noise[:at]}*{noise[at:]}*", False), (noise[at], True), ("\n", False)]


def needle(random):
    noise, at = some(random, LETTERS, NOISE["needle"]), random.integers(NOISE["needle"] + 1)
    digits = some(random, string.digits, DIGITS)
    return [(f"{noise[:at]}#{digits}{noise[at:]}#", False), (digits, True), ("\n", False)]


TASKS = {  # name: (what it asks, function); the seed of a dataset depends on the order
    "task:copy": ("say it again", copy),
    "task:recall": ("values of many keys", recall),
    "task:induction": ("what followed?", induction),
    "task:needle": ("digits in a haystack", needle),
}


# ---------------------------------------------------------------- writing


def write_task(name, seed, folder):
    """Write the token files and masks of a task; the tokens are characters. Returns the same as
    writing.write_corpus."""
    tokenizer, sha256, entries = CharTokenizer(CHARS), hashlib.sha256(), {}
    random = np.random.default_rng([seed, [*TASKS].index(name)])
    for split, count in SAMPLES.items():
        file = TokenFile(folder / f"{split}.bin", tokenizer.vocab_size, masked=True)
        for _ in tqdm(range(count), f"writing {split}", unit=" samples", **BAR):
            pieces = TASKS[name][1](random)
            text = "".join(text for text, _ in pieces)
            file.add(tokenizer.encode(text), len(text), mask_of(pieces))
            sha256.update(text.encode())
        entries[split] = file.close()
    return tokenizer, entries, sha256.hexdigest()


def mask_of(pieces):
    """The mask of a sample, as bytes: 1 for what is learned, 0 for what stands before it, 2 for
    what is given later (pairs.py)."""
    mask, given = b"", 0
    for text, learned in pieces:
        given = 2 if learned else given
        mask += bytes([1 if learned else given]) * len(text)
    return mask
