"""python -m extras.tasks NAME [--seed=0] [--data_dir=data]

Tasks that tell mixers apart: a loss on text hides what a mixer forgets, a wrong answer shows it.
Writes the dataset task:NAME: samples with a mask, as prompts and answers have, which train.py
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
from dataclasses import dataclass

from common import early

if __name__ == "__main__":
    early.end_at_once()
    early.need("numpy", "tqdm")

import numpy as np
from tqdm import tqdm

import prepare
from common.configurator import NonNegativeInt, PathName, build, load
from common.errors import UserError, run
from tokens import token_files
from tokens.tokenizer import CharTokenizer
from tokens.writing import BAR

KEYS = string.ascii_uppercase
VALUES = string.ascii_lowercase
LETTERS = KEYS + VALUES
CHARS = "\n#*.|" + string.digits + LETTERS  # a newline ends a sample
SAMPLES = {"train": 18_000, "val": 1_000, "test": 1_000}
PAIRS = (2, 12)  # of recall: the fewest and the most keys
POWER = 0.01  # of recall: the place i, from 1, is drawn with a probability in proportion to i^-0.99
NOISE = {"induction": 96, "needle": 160}  # letters
DIGITS = 5  # of a needle


@dataclass
class TaskConfig:
    seed: NonNegativeInt = 0  # of the samples
    data_dir: PathName = "data"  # the folder of the datasets


# ---------------------------------------------------------------- samples
# Each takes a numpy Generator and returns the pieces of a sample, [(text, whether it is learned)].


def some(random, characters, count):
    """`count` of some characters, drawn independently."""
    return "".join(characters[i] for i in random.integers(len(characters), size=count))


def copy(random):
    word = some(random, LETTERS, random.integers(16, 49))
    return [(f"{word}|", False), (f"{word}\n", True)]


def recall(random):
    """After n keys with their values there are 2n places for a question. n of them are drawn by the
    paper's power law: most are early. Each asks for one of the keys, drawn independently, so that
    earlier answers do not tell later ones. The other places hold dots."""
    n = random.integers(PAIRS[0], PAIRS[1] + 1)
    keys = random.permutation([*KEYS])[:n]
    values = random.permutation([*VALUES])[:n]
    shares = np.arange(1, 2 * n + 1) ** (POWER - 1)
    taken = random.choice(2 * n, n, replace=False, p=shares / shares.sum())

    pieces = [("".join(k + v for k, v in zip(keys, values, strict=True)), False)]
    for place in range(2 * n):
        i = random.integers(n)
        if place in taken:
            pieces += [(keys[i], False), (values[i], True)]
        else:
            pieces.append(("..", False))
    return [*pieces, ("\n", False)]


def induction(random):
    noise = some(random, LETTERS, NOISE["induction"])
    at = random.integers(NOISE["induction"])
    return [(f"{noise[:at]}*{noise[at:]}*", False), (noise[at], True), ("\n", False)]


def needle(random):
    noise = some(random, LETTERS, NOISE["needle"])
    at = random.integers(NOISE["needle"] + 1)
    digits = some(random, string.digits, DIGITS)
    return [(f"{noise[:at]}#{digits}{noise[at:]}#", False), (digits, True), ("\n", False)]


# The seed of a dataset depends on the order.
TASKS = {"copy": copy, "recall": recall, "induction": induction, "needle": needle}


# ---------------------------------------------------------------- writing


def mask_of(pieces):
    """The mask of a sample, as bytes: 1 for what is learned, 0 for what stands before it, 2 for
    what is given later (tokens/pairs.py)."""
    mask = b""
    given = b"\0"
    for text, learned in pieces:
        if learned:
            given = b"\2"
        mask += (b"\1" if learned else given) * len(text)
    return mask


def write_samples(task, seed, tokenizer, folder):
    """Write the token files and masks of a task; the tokens are characters. Returns ({split: entry
    in meta.json}, sha256 of all samples)."""
    random = np.random.default_rng([seed, [*TASKS].index(task)])
    sha256 = hashlib.sha256()
    entries = {}
    for split, count in SAMPLES.items():
        file = token_files.TokenFile(folder / f"{split}.bin", tokenizer.vocab_size, masked=True)
        for _ in tqdm(range(count), f"writing {split}", unit=" samples", **BAR):
            pieces = TASKS[task](random)
            text = "".join(text for text, _ in pieces)
            file.add(tokenizer.encode(text), len(text), mask_of(pieces))
            sha256.update(text.encode())
        entries[split] = file.close()
    return entries, sha256.hexdigest()


def make_task(task, seed=0, data_dir="data"):
    """Make the dataset data_dir/task:TASK and return its meta.json."""
    if task not in TASKS:
        raise UserError(f"{task} is not a task", "name", f"choose from {', '.join(TASKS)}")
    name = f"{token_files.TASK}{task}"
    folder = token_files.folder_of(data_dir, name)
    with token_files.replaced(folder) as new:
        print(f"preparing {folder.absolute()}", flush=True)
        tokenizer = CharTokenizer(CHARS)
        splits, sha256 = write_samples(task, seed, tokenizer, new)
        source = f"{name}, seed {seed}"
        meta = token_files.make_meta(name, "char", tokenizer, splits, source, sha256)
        token_files.write_meta(new, meta, tokenizer)
        prepare.describe(meta, skipped={})
    return meta


def read(argv):
    """(TaskConfig, the name of a task) of a command line."""
    given = load(argv, [TaskConfig], __doc__)
    if len(given.words) != 1 or given.words[0] not in TASKS:
        raise UserError("name one task", "command line", f"choose from {', '.join(TASKS)}")
    return build(TaskConfig, given.values), given.words[0]


def main(argv):
    config, name = read(argv)
    meta = make_task(name, config.seed, config.data_dir)
    prepare.print_training(meta, config.data_dir)


if __name__ == "__main__":
    run(main)
