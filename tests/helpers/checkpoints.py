"""A checkpoint of FORMAT 1 as a run folder, and ways to craft others from it."""

import json
import shutil
from pathlib import Path

import train
from common import files
from prepare import tokenizer_maker
from tokens.token_files import make_meta, write_meta
from tokens.writing import Corpus, nanogpt_splits, write_corpus

# 20 of 40 steps by the code of FORMAT 1, and the text it trained on
FORMAT_1 = Path(__file__).resolve().parent.parent / "checkpoints" / "format1"


def copy_run(out):
    """A copy of the checkpoint of FORMAT 1 as a run folder."""
    return Path(shutil.copytree(FORMAT_1, out))


def prepare_words(folder):
    """Prepare the dataset that the checkpoint was trained on; returns the --data_dir. It has no
    test split, as all datasets of its time."""
    text = (FORMAT_1 / "text.txt").read_text(encoding="utf-8")
    splits = nanogpt_splits(Corpus("text.txt", lambda: iter([text])))
    words = folder / "words"
    words.mkdir(parents=True)
    tokenizer, entries, sha256 = write_corpus(splits, tokenizer_maker("words", "char"), words)
    meta = make_meta("words", "char", tokenizer, entries, "text.txt", sha256)
    write_meta(words, meta, tokenizer)
    return folder


def resume(out, data_dir, *more):
    """Go on with the run until step 40."""
    where = [f"--out_dir={out}", f"--data_dir={data_dir}"]
    return train.main(["--init_from=resume", *where, "--max_iters=40", *more]).status


def reseal(folder):
    """Compute the checksums anew, as somebody who crafts a checkpoint would."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "checksums.json")
    sums = {name: files.sha256_of(folder / name) for name in names}
    (folder / "checksums.json").write_text(json.dumps(sums))


def edit_json(name, change):
    """A function that changes one JSON file of a checkpoint folder."""

    def edit(folder):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


def copy_as(out, step):
    """A second, later checkpoint, copied from the one there is."""
    new = shutil.copytree(out / "ckpt" / "000020", out / "ckpt" / f"{step:06d}")
    edit_json("state", lambda state: state | {"step": step})(new)
    reseal(new)
    return new
