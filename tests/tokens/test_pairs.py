"""Prompt/answer pairs: files and masks, rows that see one pair, a loss of the answers alone."""

import json
import math
import random
import re

import numpy as np
import pytest
import torch

import train
from common.commands import ROOT
from helpers import runs
from helpers.models import random_weights
from helpers.runs import arguments, losses, two_ranks
from helpers.texts import message, tiny_bpe
from prepare import prepare
from sample import generate
from tokens import data, token_files
from tokens.answers import SPEAKERS, chat_pairs, preference
from tokens.documents import open_input
from tokens.pairs import Pairs
from tokens.token_files import load_mask, load_meta, load_split
from training import terminal
from training.evaluation import mean_loss
from weights.checkpoint import open_run

PAIRS = [("the king of", " rome"), ("shall", " speak no more"), ("", "é"), ("no\nmore", "x")]
PAIRS = [*PAIRS, ("rome<|endoftext|>", "is the king of no more<|endoftext|>")] * 4


def prepared(folder, pairs, kind="byte", name="pairs"):
    rows = [{"prompt": prompt, "answer": answer, "note": 1} for prompt, answer in pairs]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare(name, input=str(path), tokenizer=kind, data_dir=str(folder))
    return folder / name


def split_of(folder, split, block_size):
    return Pairs(load_split(folder, split, 0), load_mask(folder, split), block_size)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2"])
def test_tokens_and_mask(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tokens.downloads.gpt2_tokenizer", tiny_bpe)
    folder = prepared(tmp_path, PAIRS, kind)
    meta = load_meta(folder)
    coder = token_files.load_tokenizer(folder, meta)
    assert coder.start == (260 if kind == "gpt2" else coder.encode("\n")[0])
    for split, pairs in ("train", PAIRS[:17]), ("val", PAIRS[17:19]), ("test", PAIRS[19:]):
        tokens, mask = [], []
        for prompt, answer in pairs:
            prompt_ids = coder.prompt(prompt)
            answer_ids = [*coder.encode(answer), coder.start]
            tokens += prompt_ids + answer_ids
            mask += [0] * len(prompt_ids) + [1] * len(answer_ids)
        assert load_split(folder, split, 0).tolist() == tokens
        assert load_mask(folder, split).tolist() == mask
        entry, texts = meta["splits"][split], [prompt + answer for prompt, answer in pairs]
        assert entry["pairs"] == len(pairs)
        assert entry["bytes"] == sum(len(text.encode()) for text in texts)
        longest = max(len(coder.encode(text)) for text in texts[:5]) + 1
        assert entry["longest"] == longest or kind == "gpt2"


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "Expecting .*:2\\)"),
        ('{"answer": "x"}', "prompt is missing"),
        ('{"prompt": "x", "answer": ""}', "an answer is empty .*:2\\)"),
        ('{"prompt": "x", "answer": "\\ud800"}', "half a character"),
        ('{"prompt": "x", "answer": "a\\nb"}', "several lines.*:2\\).*gpt2"),
        ("\udcff", "'utf-8' codec"),
        ('{"prompt": "a", "chosen": "b", "rejected": " "}', "an answer is empty .*:2\\)"),
        ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "both answers are the same .*:2\\)"),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', "rejected is missing or not a text"),
    ],
)
def test_a_line_that_holds_no_pair_or_preference_is_named(tmp_path, line, words):
    whole = {"prompt": "p", "chosen": "a", "rejected": "b"}
    good = json.dumps(whole if "chosen" in line else {"prompt": "p", "answer": "a"})
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{good}\n{line}\n\n{good}\n", encoding="utf-8", errors="surrogateescape")
    text = message(prepare, "bad", str(path), "byte", str(tmp_path / "data"))
    assert re.search(words, text) and not (tmp_path / "data" / "bad").exists()


@pytest.mark.parametrize(
    "messages, words",
    [
        ("hello", "the messages are missing or not a list"),
        ([3], "a message is not an object"),
        ([{"content": "x"}], "role is missing or not a text"),
        ([{"role": "user", "content": [{"image_url": "x"}]}], "text is missing or not a text"),
    ],
)
def test_a_malformed_conversation_is_named(messages, words):
    assert words in message(chat_pairs, messages, "chat.jsonl:2")


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who rules?"},
    {"role": "assistant", "content": "The king."},
    {"role": "tool", "content": None},
    {"role": "user", "content": "Of what?"},
    {"role": "assistant", "content": "Rome."},
    {"role": "user", "content": "Thanks."},
]


def test_each_answer_of_a_conversation_is_a_pair():
    """Whatever the form of its messages."""
    first = "System: Be short.\nUser: Who rules?\nAssistant:"
    assert chat_pairs(CHAT, "here") == [
        (first, " The king."),
        (f"{first} The king.\nUser: Of what?\nAssistant:", " Rome."),
    ]
    assert chat_pairs(CHAT[:2], "here") == chat_pairs([], "here") == []
    shared = [{"from": "human", "value": "Who rules?"}, {"from": "gpt", "value": "The king."}]
    halves = [{"type": "text", "text": "The "}, {"type": "text", "text": "king."}]
    in_parts = [CHAT[1], {"role": "assistant", "content": halves}]
    for messages in (CHAT[1:3], shared, in_parts):
        assert chat_pairs(messages, "here") == [("User: Who rules?\nAssistant:", " The king.")]


def test_an_assistant_by_another_name_answers():
    for role in ("gpt", "chatgpt", "model", "ai", "Assistant", "bot"):
        messages = [CHAT[1], {"from": role, "value": "The king."}]
        assert chat_pairs(messages, "here") == [("User: Who rules?\nAssistant:", " The king.")]
    assert "'narrator'" in message(chat_pairs, [{"role": "narrator", "content": "x"}], "here")
    page = (ROOT / "docs/finetuning.md").read_text(encoding="utf-8")
    assert not [known for known in SPEAKERS if f"`{known}`" not in page]


ASKED = [{"role": "user", "content": "Who?"}]
YES = {"role": "assistant", "content": "I do."}
NO = {"role": "assistant", "content": "I don't."}
BOTH = [("User: Who?\nAssistant:", " I do."), ("User: Who?\nAssistant:", " I don't.")]


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, [("p", "a"), ("p", "b")]),
        ({"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, BOTH),
        ({"prompt": "Who?", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, BOTH),
        ({"prompt": "Who?", "chosen": [YES], "rejected": [NO]}, BOTH),
        ({"prompt": ASKED, "chosen": [YES], "rejected": [NO]}, BOTH),
        (  # as in Anthropic's HH-RLHF
            {"chosen": "Human: Who?\n\nAI: Me now", "rejected": "Human: Who?\n\nAI: My dog"},
            [("Human: Who?\n\nAI:", " Me now"), ("Human: Who?\n\nAI:", " My dog")],
        ),
        ({"chosen": "Yes.", "rejected": "Yes. No."}, [("", "Yes."), ("", "Yes. No.")]),
    ],
)
def test_preferences_in_every_form_also_beside_messages(tmp_path, row, expected):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row | {"messages": [*ASKED, YES], "score_chosen": 5.0}) + "\n")
    rows = open_input(str(path))
    assert rows.preferences and [pairs for _, pairs in rows.rows()] == [expected]


def test_preferences_without_one_prompt_are_refused():
    for rejected in ([{"role": "user", "content": "What?"}, NO], [*ASKED, NO, *ASKED]):
        row = {"chosen": [*ASKED, YES], "rejected": rejected}
        assert "(here:3)" in message(preference, row, "here:3")


def test_a_conversation_is_in_one_split(tmp_path, capsys):
    path = tmp_path / "chat.jsonl"
    answers = ({"role": "assistant", "content": f"Rome {i}."} for i in range(200))
    rows = [{"messages": [*CHAT[:5], answer]} for answer in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": CHAT[:2]}]))
    meta = prepare("chat", str(path), "byte", str(tmp_path))
    assert [entry["pairs"] for entry in meta["splits"].values()] == [2 * 171, 2 * 19, 2 * 10]
    for split, first, last in ("train", 0, 171), ("val", 171, 190), ("test", 190, 200):
        text = bytes(load_split(tmp_path / "chat", split, 0).tolist()).decode()
        numbers = [int(number) for number in re.findall(r"Rome (\d+)\.\n", text)]
        assert numbers == list(range(first, last))
    assert f"left out {path}: 1 of its rows, which have no answer" in capsys.readouterr().out


# ---------------------------------------------------------------- rows


def naive(pairs, block_size):
    """x and y, token by token, of each pair whose answer begins within block_size."""
    for prompt, answer in pairs:
        ids = [*prompt.encode(), *answer.encode(), 10]
        x, y = [0] * block_size, [-1] * block_size
        for i in range(min(block_size, len(ids))):
            x[i] = ids[i]
            if len(prompt.encode()) <= i + 1 < len(ids):
                y[i] = ids[i + 1]
        if len(prompt.encode()) <= block_size:
            yield x, y


def some_pairs(n, seed=0):
    rng = random.Random(seed)
    words = ["the", "king", "of", "rome", "shall", "speak", "no", "more"]
    phrase = lambda most: " ".join(rng.choices(words, k=rng.randint(1, most)))
    return [(phrase(4), " " + phrase(5)) for _ in range(n)]


@pytest.mark.parametrize("block_size", [5, 12, 17, 64])
def test_a_row_is_one_pair_and_its_targets_are_the_answer(tmp_path, block_size):
    folder = prepared(tmp_path, some_pairs(60))
    pairs = split_of(folder, "train", block_size)
    expected = list(naive(some_pairs(60)[:51], block_size))
    x, y = pairs.rows(np.arange(len(pairs.starts)))
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (len(expected), block_size)
    assert [(a.tolist(), b.tolist()) for a, b in zip(x, y, strict=True)] == expected
    assert ((y >= 0).sum(1) > 0).all()
    assert pairs.left_out == 51 - len(expected)
    lengths = [(len(prompt), len(prompt + answer)) for prompt, answer in some_pairs(60)[:51]]
    assert pairs.cut == sum(prompt <= block_size < both for prompt, both in lengths)
    if block_size == 12:
        assert pairs.left_out > 5 and pairs.cut > 5  # this is tested at all


@pytest.mark.parametrize("limit", [0, 1, 415, 10**9])  # a row begins at 415
def test_evaluation_scores_each_token_of_an_answer_once(tmp_path, limit):
    pairs = split_of(prepared(tmp_path, some_pairs(60)), "train", 12)
    batches = list(pairs.eval_batches(4, limit))
    assert all(part.shape == (4, 12) and part.dtype == np.int64 for b in batches for part in b)
    rows = [(a.tolist(), b.tolist()) for x, y in batches for a, b in zip(x, y, strict=True)]
    rows = [(x, y) for x, y in rows if max(y) >= 0]
    expected = list(naive(some_pairs(60)[:51], 12))
    chosen = [number * len(expected) // len(rows) for number in range(len(rows))]
    assert rows == [expected[number] for number in chosen] and len(batches) == -(-len(rows) // 4)
    begins, at = [], 0
    for prompt, answer in some_pairs(60)[:51]:
        begins += [at] * (len(prompt) <= 12)
        at += len(prompt) + len(answer) + 1
    assert len(rows) == max(1, sum(begin < (limit or at) for begin in begins))
    assert limit != 415 or 4 < len(rows) < 20
    targets, ids = pairs.scored(limit)
    counted = [token for _, y in rows for token in y if token >= 0]
    assert targets == len(counted)  # and the answers' bytes, without what ends them
    assert bytes(ids.tolist()) == bytes(token for token in counted if token != 10)


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def pairs_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    prepared(folder, some_pairs(60))
    (folder / "text.txt").write_text("the king of rome shall speak no more\n" * 40)
    prepare("text", input=str(folder / "text.txt"), tokenizer="byte", data_dir=str(folder))
    return folder


def ready(pairs_dir, tmp_path, *more):
    return runs.ready(pairs_dir, tmp_path, "--dataset=pairs", "--block_size=20", *more)


def naive_loss(model, pairs):
    """Mean over all tokens of the answers and their ends, each pair alone and without padding."""
    nats, count, block_size = 0.0, 0, model.config.block_size
    for prompt, answer in pairs:
        ids = torch.tensor([[*prompt.encode(), *answer.encode(), 10]])[:, : block_size + 1]
        if len(prompt) > block_size:
            continue
        scores = model(ids[:, :-1])[0].log_softmax(-1)[0]
        for i in range(len(prompt), ids.size(1)):
            nats, count = nats - scores[i - 1, ids[0, i]], count + 1
    return nats / count


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_loss_is_the_mean_over_the_answers(pairs_dir, tmp_path, model):
    """Of a step, its gradient, and an evaluation, beside a computation pair by pair."""
    keys = ("--gradient_accumulation_steps=2", "--grad_clip=0", "--weight_decay=0")
    run = ready(pairs_dir, tmp_path, f"--model={model}", "--batch_size=9", *keys)
    random_weights(run.model, 0.2)  # far from uniform, so that every detail shows
    fitting = [pair for pair in some_pairs(60)[:51] if len(pair[0]) <= 20]
    rows = naive(some_pairs(60)[:51], 20)
    text = {tuple(x): pair for pair, (x, _) in zip(fitting, rows, strict=True)}
    batch = [text[tuple(x)] for x in run.samples.get(0, 18)[0].tolist()]
    expected = naive_loss(run.model, batch)
    expected.backward()
    gradient = torch.sqrt(sum((p.grad**2).sum() for p in run.model.parameters())).item()
    run.model.zero_grad()
    with torch.no_grad():
        val_loss = naive_loss(run.model, some_pairs(60)[51:57]).item()
        assert train.score(run)["val_loss"] == pytest.approx(val_loss, abs=1e-5)
    loss, norm = (value.item() for value in train.train_step(run))
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert norm == pytest.approx(gradient, rel=1e-4)


def test_bits_per_byte_counts_the_bytes_of_the_answers(pairs_dir, tmp_path):
    assert "begin beyond block_size=1 " in message(ready, pairs_dir, tmp_path, "--block_size=1")
    run = ready(pairs_dir, tmp_path, "--block_size=100")
    row, answers = train.score(run), [answer for _, answer in some_pairs(60)[51:57]]
    nats = row["val_loss"] * sum(len(answer) + 1 for answer in answers)
    assert row["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, answers)))
    train_split, answers = run.data.splits["train"], [answer for _, answer in some_pairs(60)[:51]]
    sums = train.evaluate(run, train_split, 0)
    bits = mean_loss(sums) / math.log(2) * (1 + len(answers) / sum(map(len, answers)))
    assert f", {bits:.4f} bits per byte" in terminal.split_line(run, train_split, sums)
    part = ready(pairs_dir, tmp_path, "--block_size=100", "--eval_tokens=40").data
    factors = [data.bits_per_byte(part.splits["val"], part.tokenizer, n) for n in (40, 0)]
    assert part.bits_per_byte == factors[0] != factors[1]  # of what an evaluation scores


def test_micro_batches_of_pairs_are_one_batch(pairs_dir, tmp_path):
    runs.micro_batches_agree(lambda *keys: ready(pairs_dir, tmp_path, *keys))


@pytest.mark.slow
def test_two_ranks_are_one_process_with_pairs(pairs_dir, tmp_path):
    keys = ("--dataset=pairs", "--block_size=20", "--max_iters=4", "--eval_interval=2")
    keys += ("--gradient_accumulation_steps=4", "--batch_size=2")
    run = arguments(pairs_dir, tmp_path / "one", *keys)
    train.main(run)
    done = two_ranks(*run, f"--out_dir={tmp_path / 'two'}")
    assert done.returncode == 0, done.stderr
    runs.nearly_same_losses(tmp_path / "one", tmp_path / "two")


def test_a_tiny_run_learns_the_answers(tmp_path, whole_end, capsys):
    """End to end: JSONL, training, the sample that it prints. It answers, and ends the answer."""
    known = {"capital of France?": " Paris", "capital of Spain?": " Madrid", "2+2=": "4"}
    known |= {"two lines\nasked": " one told", "king of Rome?": " no one"}
    prepared(tmp_path, [*known.items()] * 8, "char")
    keys = ("--dataset=pairs", "--block_size=32", "--max_iters=150", "--eval_interval=75")
    keys += ("--log_interval=50", "--learning_rate=1e-2")
    train.main(arguments(tmp_path, tmp_path / "run", *keys))
    scored = dict(losses(tmp_path / "run", "val_loss"))
    assert scored[150] < 0.02 < 2 < scored[0]
    printed = capsys.readouterr().out
    assert "34 pairs to train on, 4 to validate\n" in printed
    sample = "' no one':\nking of Rome? no one\n\ncheckpoint: "
    assert f"a prompt that it has not seen, whose answer in the data is {sample}" in printed
    model, tokenizer, *_ = open_run(tmp_path / "run")
    for prompt, answer in known.items():
        idx = torch.tensor(tokenizer.encode(prompt))[None]
        ids = generate(model.eval(), idx, len(answer) + 1, temperature=0)
        assert tokenizer.decode([token.item() for token in ids]) == answer + "\n"
