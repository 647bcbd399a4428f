"""The tasks: what their samples ask, what is learned of them, and how often a model is right."""

import re

import numpy as np
import pytest
import torch

import train
from extras import tasks
from extras.tasks import CHARS, KEYS, PAIRS, TASKS, VALUES, make_task
from helpers.runs import arguments, made
from helpers.texts import message
from tokens.pairs import Pairs
from tokens.token_files import load_mask, load_meta, load_split, load_tokenizer


@pytest.fixture(scope="module")
def tasks_dir(tmp_path_factory):
    """All tasks, with few samples."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "SAMPLES", {"train": 60, "val": 30, "test": 8})
        for name in TASKS:
            make_task(name, data_dir=str(folder))
    return folder


def samples_of(folder, split):
    """[(text, mask)] of a split's samples, which are lines."""
    coder = load_tokenizer(folder, load_meta(folder))
    text = coder.decode(load_split(folder, split, 0))
    mask, at, samples = load_mask(folder, split), 0, []
    for line in text.splitlines(keepends=True):
        samples.append((line, mask[at : at + len(line)].tolist()))
        at += len(line)
    return samples


def solved(name, line):
    """The mask and the answers of a sample, from its text alone, by the definition of the task."""
    if name == "copy":
        word, copied = line[:-1].split("|")
        assert word == copied and 16 <= len(word) <= 48 and word.isalpha()
        return [0] * (len(word) + 1) + [1] * (len(word) + 1)
    if name == "recall":
        n = (len(line) - 1) // 6
        known, places = dict(re.findall("(.)(.)", line[: 2 * n])), re.findall("..", line[2 * n :])
        assert PAIRS[0] <= n <= PAIRS[1] and len(line) == 6 * n + 1
        assert len(known) == n == len(set(known.values()))
        assert known.keys() <= {*KEYS} and {*known.values()} <= {*VALUES}
        queries = [place for place in places if place != ".."]
        assert len(queries) == n and all(known[key] == value for key, value in queries)
        first = line.index(queries[0], 2 * n)
        return [
            0 if at <= first else 1 if at % 2 and c.islower() else 2 for at, c in enumerate(line)
        ]
    if name == "induction":
        assert line.count("*") == 2 and line[-3] == "*"
        assert line[line.index("*") + 1] == line[-2]
        return [0] * (len(line) - 2) + [1, 2]
    (first, second) = re.findall(r"#(\d{5})", line)
    assert first == second and line.endswith(f"#{second}\n") and len(line) == 160 + 2 * 6 + 1
    return [0] * (len(line) - 6) + [1] * 5 + [2]


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_asks_what_the_task_says(tasks_dir, name):
    folder = tasks_dir / f"task:{name}"
    for split, count in {"train": 60, "val": 30, "test": 8}.items():
        samples = samples_of(folder, split)
        assert len(samples) == count == load_meta(folder)["splits"][split]["pairs"]
        for line, mask in samples:
            assert mask == solved(name, line), line


def test_the_places_of_questions_follow_the_power_law(monkeypatch):
    """Each of 2n places is drawn without replacement in proportion to i^-0.99, here n = 2."""
    monkeypatch.setattr(tasks, "PAIRS", (2, 2))
    random = np.random.default_rng(0)
    lines = ["".join(text for text, _ in tasks.recall(random)) for _ in range(4000)]
    found = np.mean([[line[4 + 2 * i] != "." for i in range(4)] for line in lines], axis=0)
    p = np.arange(1, 5) ** -0.99
    p /= p.sum()
    taken = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    assert found == pytest.approx(taken, abs=0.02)


def test_the_same_seed_is_the_same_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "SAMPLES", {"train": 5, "val": 2, "test": 2})

    def sha256(*args):
        return make_task(*args, data_dir=str(tmp_path))["source_sha256"]

    assert sha256("copy") == sha256("copy", 0) != sha256("copy", 1)
    assert sha256("needle") != sha256("copy")


def test_what_is_given_between_answers_is_no_target_and_begins_no_row():
    tokens = np.arange(12)
    mask = np.array([0, 0, 1, 2, 1, 2, 0, 1, 1, 0, 0, 1], np.uint8)
    pairs = Pairs(tokens, mask, 5)
    assert pairs.starts.tolist() == [0, 6, 9] and pairs.ends.tolist() == [6, 9, 12]
    x, y = pairs.rows(np.arange(3))
    assert x[0].tolist() == [0, 1, 2, 3, 4] and y[0].tolist() == [-1, 2, -1, 4, -1]
    assert y[1].tolist() == [7, 8, -1, -1, -1]
    targets, ids = pairs.scored()  # the last token of a row is its end
    assert targets == 5 and ids.tolist() == [2, 4, 7]


RUN = ["--dataset=task:recall", "--block_size=72", "--max_iters=6", "--eval_interval=3"]


def test_the_measures_are_those_of_greedy_answers(tasks_dir, tmp_path, capsys):
    """Each answer token beside the most probable one after the true text before it, row by row."""
    argv = arguments(tasks_dir, tmp_path, *RUN, "--dataset=task:needle", "--block_size=172")
    run = made(argv)
    model, coder = run.model, run.data.tokenizer
    rows, right, solved_rows, tokens = samples_of(tasks_dir / "task:needle", "val"), 0, 0, 0
    with torch.no_grad():
        # After any digit the most probable token is 0: some answers have right tokens.
        model.lm_head.weight.zero_()
        model.wte.weight[coder.encode("0123456789")] = torch.linspace(-5, 5, model.config.n_embd)
        model.lm_head.weight[coder.encode("0")] = 2 * model.wte.weight[coder.encode("0")]
        for line, mask in rows:
            ids = torch.tensor(coder.encode(line))[None]
            best = model.eval()(ids[:, :-1])[0].argmax(-1)[0]
            hits = [best[i - 1] == ids[0, i] for i in range(len(mask)) if mask[i] == 1]
            right, tokens = right + sum(hits), tokens + len(hits)
            solved_rows += all(hits)
        row = train.score(run)
    assert tokens == 150 and 0 < right < tokens
    assert row["val_accuracy"] == pytest.approx(right.item() / tokens)
    assert row["val_exact"] == solved_rows / len(rows)
    assert {"report_accuracy", "report_exact"} <= row.keys()


def test_the_vocabulary_is_common(tasks_dir):
    """So that tasks can be mixed."""
    folders = [tasks_dir / f"task:{name}" for name in TASKS]
    coders = [load_tokenizer(folder, load_meta(folder)) for folder in folders]
    assert {coder.chars for coder in coders} == {CHARS} and len({*CHARS}) == len(CHARS) == 67


def test_the_command_and_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "SAMPLES", {"train": 5, "val": 2, "test": 2})
    tasks.main(["copy", "--seed=2", f"--data_dir={tmp_path}"])
    assert load_meta(tmp_path / "task:copy")["source"] == "task:copy, seed 2"
    out = " ".join(capsys.readouterr().out.split())
    assert "config/task_recall.py" in out and "--dataset=task:copy" in out
    for words in ([], ["other"], ["copy", "recall"]):
        assert "copy, recall, induction, needle" in message(tasks.main, words)
