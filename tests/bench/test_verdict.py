"""bench/verdict.py: what it reads, what it says, and what it refuses to say."""

import json
import math
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from bench import verdict
from common.errors import UserError
from common.files import ROOT

PAGE = ROOT / "docs/is_my_change_real.md"
BASE = [2.031, 2.035, 2.030, 2.036, 2.033]
LOWER = [1.990, 1.981, 1.985]


def csv_of(path, arms, heading="arm,seed,loss"):
    """Write {arm: losses} as rows."""
    lines = [heading]
    for arm, losses in arms.items():
        lines += [f"{arm},{seed},{loss}" for seed, loss in enumerate(losses)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def said(tmp_path, capsys):
    """said(arms, *options): the line of each arm, {its name: cells}, and all that was printed."""

    def call(arms, *options):
        verdict.main([csv_of(tmp_path / "runs.csv", arms), *options])
        printed = capsys.readouterr().out
        lines = [re.split(r"\s{2,}", line) for line in printed.splitlines()]
        return {cells[0]: cells[1:] for cells in lines}, printed

    return call


def test_the_numbers_are_scipys():
    losses = {"baseline": BASE, "lower": LOWER, "noise": [2.02, 2.03, 2.041, 2.05]}
    lower, noise = verdict.judge(losses, margin=None)
    welch = stats.ttest_ind(LOWER, BASE, equal_var=False)
    student = stats.ttest_ind(LOWER, BASE)
    interval = welch.confidence_interval()
    assert [lower["low"], lower["high"]] == pytest.approx([interval.low, interval.high])
    assert lower["p"] == pytest.approx(2 * max(welch.pvalue, student.pvalue))  # Holm: of two arms
    assert (lower["verdict"], noise["verdict"]) == ("better", "undecided")
    assert lower["difference"] == pytest.approx(np.mean(LOWER) - np.mean(BASE))


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        (LOWER, "better"),
        ([2.13, 2.14, 2.12, 2.13], "worse"),
        ([2.0331, 2.0325, 2.0334, 2.0328], "tie"),
        ([1.9], "none: one run cannot show chance"),
        ([1.9, 1.91], "none: fewer than 3 runs"),
        ([1.9, 1.9, 1.9], "none: all runs are equal, so the seed changes nothing"),
        (["nan", "nan", "inf", "nan", 2.0], "diverges"),
        ([1.7, 1.7001, 1.6999, "nan"], "undecided"),  # an arm that diverged is never better
    ],
)
def test_the_words(said, losses, word):
    lines, _ = said({"baseline": BASE, "mine": losses}, "--margin=0.02")
    assert word in lines["mine"]


def test_what_is_missing_or_equal_is_counted(said):
    arms = {"baseline": BASE, "mine": [1.98, "", 1.99, 1.98, "nan"]}
    lines, printed = said(arms)
    assert lines["mine"][0] == "4"
    assert "without a loss or an arm: 1." in printed
    assert "mine: its 3 runs have 2 different losses." in printed
    assert "mine: 1 of 4 runs diverged." in printed


def test_the_seeds_that_would_decide():
    """With them, 80 of 100 experiments find the difference; a larger one needs fewer."""
    noise = np.array([-1.0, 0, 1, -0.5, 0.5])
    small, large = verdict.judge(
        {"baseline": noise, "small": noise - 0.5, "large": noise - 1.2}, margin=None
    )
    assert int(large["more"]) < int(small["more"]) < verdict.MOST_SEEDS
    n = 5 + int(small["more"])
    random = np.random.default_rng(0)
    sd = noise.std(ddof=1)
    arm = sd * random.standard_normal((4000, n)) - 0.5
    base = sd * random.standard_normal((4000, n))
    found = stats.ttest_ind(arm, base, axis=1).pvalue <= 0.05 / 2
    assert found.mean() == pytest.approx(0.8, abs=0.04)


def test_of_several_rows_of_a_run_the_last_counts(tmp_path, capsys):
    rows = [{"arm": "baseline", "seed": 1, "loss": 3.0}]
    for arm, losses in {"baseline": BASE, "mine": LOWER}.items():
        rows += [{"arm": arm, "seed": seed, "loss": loss} for seed, loss in enumerate(losses)]
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    verdict.main([str(file)])
    printed = capsys.readouterr().out
    assert "replaces: 1." in printed and f"{np.mean(BASE):.4f}" in printed and "better" in printed


def test_settings_are_predicted_from_four_on(tmp_path, capsys):
    gains = [0.10, 0.09, 0.12, 0.11]
    rows = ["text,method,loss"]
    for number, gain in enumerate(gains):
        rows += [f"t{number},base,{2 + number}", f"t{number},mine,{2 + number - gain}"]
    file = tmp_path / "runs.csv"
    options = ["--base=base", "--arm_column=method", "--setting_column=text"]
    file.write_text("\n".join(rows))
    verdict.main([str(file), *options])
    assert re.search(r"mine +4 of 4 .* helps\n", capsys.readouterr().out)

    file.write_text("\n".join([*rows, "t4,mine,2.0"]))  # a setting without the base
    verdict.main([str(file), *options])
    assert "base: t4." in capsys.readouterr().out

    file.write_text("\n".join([*rows, "t4,base,6", "t4,mine,nan"]))
    verdict.main([str(file), *options])
    assert re.search(r"mine +4 of 5 .* not known\n", capsys.readouterr().out)

    file.write_text("\n".join(rows[:7]))
    verdict.main([str(file), *options])
    assert re.search(r"mine +3 of 3 +not known\n", capsys.readouterr().out)


def test_run_folders(tmp_path):
    def folder(name, config, rows):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        lines = [json.dumps({"step": step, "val_loss": loss}) for step, loss in rows]
        (tmp_path / name / "log.jsonl").write_text("\n".join([*lines, '{"st']))
        return tmp_path / name

    config = {"seed": 7, "max_iters": 20}
    whole = folder("out-rope-7", config, [(10, 2.5), (20, 2.25)])
    assert verdict.run_of_folder(whole) == ("out-rope", "", "7", 2.25)
    assert verdict.run_of_folder(folder("out-8", config, [(20, 2.0)])).arm == "out-8"
    assert verdict.run_of_folder(folder("out-seed7", config, [(10, 2.5)])).loss is None
    (whole / "diverged.json").write_text("{}")
    assert verdict.run_of_folder(whole).loss == math.inf


@pytest.mark.parametrize(
    ("text", "options", "where"),
    [
        ("arm,loss\nbaseline,1\nmine,low", [], "runs.csv:3"),
        ("arm,loss\nbaseline,1\nmine,2", ["--base=other"], "base"),
        ("arm,loss\nbaseline,1\nmine,2", ["--seed_column=run"], "--seed_column="),
        ("name,loss\nbaseline,1", [], "--arm_column="),
        ("", [], "no column arm"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, text, options, where):
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(where)):
        verdict.main([str(file), *options])


def test_other_files_are_refused(tmp_path):
    for name in ("runs.pkl", "missing.csv"):
        with pytest.raises(UserError, match=name):
            verdict.main([str(tmp_path / name)])


def test_neither_torch_nor_pandas_is_imported(tmp_path):
    """And --help does not wait for numpy."""
    file = csv_of(tmp_path / "runs.csv", {"baseline": BASE, "mine": LOWER})
    code = f"""
import sys
from bench import verdict
try:
    verdict.main(["--help"])
except SystemExit:
    assert "numpy" not in sys.modules
verdict.main([{file!r}])
assert "scipy" in sys.modules and not {{"torch", "pandas"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EXAMPLES = re.findall(
    r"```sh\npython bench/verdict\.py ([^\n]*)\n```\n```text\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize(("command", "answer"), EXAMPLES)
def test_the_page_prints_what_the_command_prints(command, answer, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    verdict.main(shlex.split(command))
    assert capsys.readouterr().out == answer


def test_the_page_turns_the_stored_logs_into_the_stored_tables(tmp_path):
    """Its shell lines make nanogpt.csv; loop.tsv holds its baselines, from seed 5 to seed 1."""
    assert len(EXAMPLES) == 4
    lines = re.findall(r"^(?:echo arm|grep -H).*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    examples = ROOT / "docs/examples/verdict"
    for log in (examples / "nanogpt").glob("*.log"):
        (tmp_path / log.name).write_bytes(log.read_bytes())
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, check=True)
    stored = (examples / "nanogpt.csv").read_text()
    assert (tmp_path / "nanogpt.csv").read_text() == stored

    last = dict(re.findall(r"^baseline,(\d),(.*)$", stored, re.MULTILINE))  # of each seed
    loop = re.findall(r"^a(\d)\t([\d.]+)", (examples / "loop.tsv").read_text(), re.MULTILINE)
    assert loop == sorted(last.items(), reverse=True)
