"""Two run folders, barely trained: a LLaMA of characters, and a GPT-2 of bytes."""

import pytest

import train
from helpers.runs import arguments
from prepare import prepare

TEXT = "the king of Zoë shall speak\n" * 200


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The run folders, which no test changes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    outs = []
    for model, tokenizer in (("llama", "char"), ("gpt2", "byte")):
        data = str(folder / tokenizer)
        prepare("words", input=str(folder / "text.txt"), tokenizer=tokenizer, data_dir=data)
        outs.append(str(folder / f"out-{model}"))
        more = ["--max_iters=12", "--learning_rate=3e-3", "--eval_interval=12"]
        train.main(arguments(data, outs[-1], f"--model={model}", *more))
    return outs
