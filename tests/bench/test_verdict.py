"""bench/verdict.py: what it reads, what it says, and what it refuses to say."""

import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from bench import verdict, verdict_rows
from bench.ablation import contrasts, effects, power
from common.commands import ROOT
from common.errors import UserError

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
    _, lower, noise = verdict.judge([losses], margin=None)
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
        ([1.9, 1.9, 1.9], "none: its 3 runs are equal"),
        (["nan", "nan", "inf", "nan", 2.0], "diverges"),
        ([2.13, 2.14, 2.12, 2.13, "nan"], "worse"),  # one that diverged does not help an arm
        ([1.7, 1.7001, 1.6999, "nan"], "undecided"),  # an arm that diverged is never better
        ([2.0331, 2.0325, 2.0334, 2.0328, "nan"], "undecided"),  # nor a tie
        ([2.13, 2.14, "nan"], "worse"),  # two others are enough to be worse
    ],
)
def test_the_words(said, losses, word):
    lines, _ = said({"baseline": BASE, "mine": losses}, "--margin=0.02")
    assert word in lines["mine"]


def test_what_is_missing_or_diverged_is_counted(said):
    arms = {"baseline": BASE, "mine": [1.98, "", 1.99, 1.98, "nan", "N/A", "NA"], "lost": [""]}
    lines, printed = said(arms)
    assert lines["mine"][0] == "4"
    assert "without a loss or an arm: 4." in printed and "without any loss: lost." in printed
    words = "mine: 1 of 4 runs diverged (nan or inf). Mean and interval are of the other 3."
    assert words in printed


@pytest.mark.parametrize(
    ("constant", "runs"), [("baseline", "the 5 runs of baseline"), ("mine", "its 5 runs")]
)
def test_equal_runs_are_those_of_the_arm_that_is_named(said, constant, runs):
    lines, printed = said({"baseline": BASE, "mine": LOWER} | {constant: [1.9] * 5})
    assert f"none: {runs} are equal" in lines["mine"]
    assert re.findall("(.*): all 5 runs have the same loss", printed) == [constant]


def test_an_arm_that_cannot_be_tested_does_not_count(said):
    """Five candidates with one run each leave the p of another arm as it is alone."""
    alone, _ = said({"baseline": BASE, "mine": LOWER})
    single = {f"candidate {number}": [2.0] for number in range(5)}
    lines, printed = said({"baseline": BASE, "mine": LOWER} | single)
    assert lines["mine"] == alone["mine"] and "Holm" not in printed
    _, printed = said({"baseline": BASE, "mine": LOWER, "other": LOWER[::-1]} | single)
    assert "the 2 arms that are tested" in printed


@pytest.mark.parametrize(
    "arms",
    [
        {f"arm {number}": [2.0285, 2.029, 2.03, 2.0295] for number in range(8)},
        {"arm 0": [1.7, 1.71, 1.72, "nan"]},
    ],
)
def test_an_interval_without_0_that_decides_nothing_is_explained(said, arms):
    lines, printed = said({"baseline": BASE} | arms)
    assert "undecided" in lines["arm 0"]
    assert "can be undecided though its interval excludes 0" in printed
    _, printed = said({"baseline": BASE, "mine": [2.02, 2.03, 2.041, 2.05]})
    assert "excludes 0" not in printed


def test_the_seeds_that_would_decide():
    """With them, 80 of 100 experiments find the difference; a larger one needs fewer."""

    noise = np.array([-1.0, 0, 1, -0.5, 0.5])
    losses = {"baseline": noise, "small": noise - 0.5, "large": noise - 1.2}
    _, small, large = verdict.judge([losses], margin=None)
    n = int(small["seeds"])
    assert int(large["seeds"]) < n < power.MOST_SEEDS
    random = np.random.default_rng(0)
    sd = noise.std(ddof=1)
    arm = sd * random.standard_normal((4000, n)) - 0.5
    base = sd * random.standard_normal((4000, n))
    found = stats.ttest_ind(arm, base, axis=1).pvalue <= 0.05 / 2
    assert found.mean() == pytest.approx(0.8, abs=0.04)
    _, alike = verdict.judge([{"baseline": noise, "alike": noise + 0.01}], margin=0.7)
    assert int(alike["seeds"]) < 30  # to tie


@pytest.mark.parametrize(
    ("arms", "base_runs", "sd", "most"),
    [(1, 3, 1, 0.05), (6, 10, 1, 0.05), (6, 10, 2, 0.08), (20, 16, 2, 0.12)],
)
def test_useless_changes_are_called_as_rarely_as_the_page_says(arms, base_runs, sd, most):
    """Three runs of an arm, whose standard deviation is sd times the base's."""
    random = np.random.default_rng(0)
    base = random.standard_normal((base_runs, 2000, 1))
    losses = sd * random.standard_normal((verdict.LEAST_RUNS, 2000, arms))
    p, _, _ = contrasts.compare([losses, base], 0)
    error = (contrasts.holm(p) <= contrasts.ALPHA).any(-1).mean()
    assert error <= most + 2 * np.sqrt(most / 2000)


@pytest.fixture
def printed(tmp_path, capsys):
    """printed(text, *options): what is printed on a .csv or, if text is a list, a .jsonl file."""

    def call(text, *options, name="runs.csv"):
        file = tmp_path / name
        if isinstance(text, list):
            file = tmp_path / "runs.jsonl"
            text = "\n".join(json.dumps(row, ensure_ascii=False) for row in text)
        file.write_text(text)
        verdict.main([str(file), *options])
        return capsys.readouterr().out

    return call


def test_of_several_rows_of_a_run_the_last_with_a_loss_counts(printed):
    """A log has rows of training too, and the last row of a run may be empty."""
    rows = [{"arm": "baseline", "seed": 1.0, "loss": 3.0, "step": 5}]
    for arm, losses in {"baseline": BASE, "mi\u2028ne": LOWER}.items():
        for seed, loss in enumerate(losses):
            rows.append({"arm": arm, "seed": seed, "loss": loss, "step": 10})
            rows.append({"arm": arm, "seed": seed, "train_loss": 1.5, "step": 20})
    out = printed(rows)
    assert "1 of 9 rows were replaced" in out and "without a loss or an arm: 8." in out
    assert f"{np.mean(BASE):.4f}" in out and "better" in out and "cut short" not in out
    rows[-2] = {"arm": "mi\u2028ne", "seed": 2, "loss": 2.5, "step": 5}
    assert "Some runs may be cut short: their last rows differ in step." in printed(rows)
    assert "0.00003100" in printed([{"arm": arm, "loss": 3.1e-5} for arm in ("baseline", "mine")])


TWO_DATASETS = ["run,dataset,size,arm,seed,loss"]
for number, cells in enumerate(itertools.product("ab", [1, 2], ["baseline", "mine"], range(3))):
    TWO_DATASETS.append(f"r{number},{','.join(map(str, cells))},{2 + number % 5 / 100}")


def test_rows_of_several_settings_never_replace_each_other(printed):
    """A column of names that several arms share tells them apart."""
    text = "\n".join(TWO_DATASETS)
    with pytest.raises(UserError, match=r"differ in dataset \(.*\): add --setting_column=dataset;"):
        printed(text)
    text = re.sub(r",([ab]),", r",\1,size ", text)
    with pytest.raises(UserError, match="differ in size .*: join it with dataset in one column"):
        printed(text, "--setting_column=dataset")


def test_a_log_of_numbers_and_times_is_read_with_a_warning(printed):
    """No column is advised whose values are of one row or of one arm."""
    text = "\n".join(TWO_DATASETS).replace(",a,", ",2026-11-28 09:19,").replace(",b,", ",True,")
    out = printed(text.replace("dataset", "time"))
    assert out.startswith(
        "warning: 18 of 24 rows were replaced by a later row of the same arm and seed, and"
        " they differ in: run, time, size. That is right for a log of evaluations. If each"
    )
    assert "if time is a setting, add --setting_column=time." in out and "=run" not in out
    named = "\n".join(row.split(",", 1)[0] + "," + row.split(",", 3)[3] for row in TWO_DATASETS)
    assert "differ in: run. " in printed(named) and "--setting_column" not in printed(named)


def test_files_with_the_same_arms_and_seeds_replace_each_other_aloud(tmp_path, capsys):
    arms = {"baseline": BASE, "mine": LOWER}
    paths = [csv_of(tmp_path / name, arms) for name in ("a.csv", "b.csv")]
    verdict.main(paths)
    out = capsys.readouterr().out
    assert out.startswith("warning: 8 of 16 rows were replaced") and "differ in: file." in out


def test_rows_without_a_column_of_seeds_are_runs(printed):
    rows = [f"{arm},{loss}" for arm in ("baseline", "mi\x0cne") for loss in BASE]  # ends no line
    out = printed("\n".join([",arm,loss", *(f"{number},{row}" for number, row in enumerate(rows))]))
    assert "differ in" not in out  # an index of pandas has no name
    out = printed("\n".join(["arm,loss", *rows]))
    assert "No column seed: each of the 10 rows counts as a run" in out


@pytest.mark.parametrize("separator", [",", ", ", ";", "\t"])
@pytest.mark.parametrize("name", ["runs.csv", "runs.tsv"])
def test_tables_of_other_programs_are_read(printed, separator, name):
    rows = [["arm", "seed", '"loss"']]
    rows += [["baseline", str(seed), str(loss)] for seed, loss in enumerate(BASE)]
    rows += [["Baseline", str(seed), str(loss)] for seed, loss in enumerate(LOWER)]
    out = printed("\n".join(["", *map(separator.join, rows)]), name=name)
    assert "better" in out


def test_settings_are_predicted_from_four_on(printed):
    rows = ["text,method,loss"]
    for number, gain in enumerate([0.10, 0.09, 0.12, 0.11]):
        rows += [f"t{number},base,{2 + number}", f"t{number},mine,{2 + number - gain}"]
    options = ["--base=base", "--arm_column=method", "--setting_column=text"]
    out = printed("\n".join(rows), *options)
    assert re.search(r"mine +4 of 4 .* helps\n", out)
    assert "all arms together" not in out
    assert "no difference" in printed("\n".join(rows), *options, "--margin=0.5")
    out = printed("\n".join(rows + rows[1:]), *options)
    assert "have the same loss: 8 of 8. Did the seed reach the training?" in out

    others = [row.replace("mine", "other") for row in rows[2::2]]
    out = printed("\n".join([*rows, *others]), *options)
    assert "all arms together" in out and "nothing is corrected" in out

    out = printed("\n".join([*rows, "t4,mine,2.0"]), *options)
    assert "where the base has no run or diverged: t4." in out

    out = printed("\n".join([*rows, "t4,base,6", "t4,mine,nan"]), *options)
    assert re.search(r"mine +4 of 5 .* not known\n", out)
    assert "mine: 1 of 1 runs diverged in t4." in out and "counts as the worst of all" in out

    rows = [row for row in rows if row != rows[8]]  # one arm with a setting less
    out = printed("\n".join([*rows, *others]), *options)
    assert re.search(r"mine +3 of 3 +-0.1033 +not known\n", out)
    assert "Fewer than 4 settings" in out and "mine (3)." in out


def test_the_error_of_a_gain_is_of_the_arm_and_of_its_base(monkeypatch):
    given = {}
    monkeypatch.setattr(effects, "fit", lambda columns, within: given.update(columns) or [])
    verdict.across_settings({"a": {"baseline": BASE, "mine": LOWER}}, verdict.VerdictConfig())
    student = stats.ttest_ind(BASE, LOWER)
    assert given["se"] == pytest.approx([(np.mean(BASE) - np.mean(LOWER)) / student.statistic])


def test_two_settings_have_an_ordinary_table(printed):
    """Holm's correction is for all arms in both, and a setting that cannot be compared is named."""
    rows = ["dataset,arm,seed,loss", "c,mine,0,9"]
    for dataset, arms in {"a": (BASE, LOWER), "b": (BASE, [*LOWER, "nan"])}.items():
        for arm, losses in zip(("mine", "baseline"), reversed(arms), strict=True):
            rows += [f"{dataset},{arm},{seed},{loss}" for seed, loss in enumerate(losses)]
    out = printed("\n".join(rows), "--setting_column=dataset")
    alone = verdict.judge([{"baseline": BASE, "mine": LOWER}], margin=None)[1]["p"]
    lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    names = [f"{arm} in {dataset}" for dataset in "ab" for arm in ("baseline", "mine")]
    assert [cells[0] for cells in lines[1:5]] == names
    assert lines[2][-2:] == [f"{2 * alone:.2g}", "better"] and lines[4][4] == "0.44"
    assert "with nothing to compare: mine in c." in out
    assert "With 4 settings or more, a new one is predicted too." in out

    # Settings in which the base diverged predict nothing, and take no verdict away.
    diverged = [
        f"{dataset},{arm},0,{loss}"
        for dataset in "de"
        for arm, loss in (("mine", 2), ("baseline", "nan"))
    ]
    assert lines[2] in [
        re.split(r"\s{2,}", line)
        for line in printed("\n".join(rows + diverged), "--setting_column=dataset").splitlines()
    ]


def test_run_folders(tmp_path):
    def folder(name, config, rows):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        lines = [json.dumps({"step": step, "val_loss": loss}) for step, loss in rows]
        (tmp_path / name / "log.jsonl").write_text("\n".join([*lines, '{"st']))
        return tmp_path / name

    read = verdict_rows.run_of_folder
    config = {"seed": 7, "max_iters": 20, "dataset": "plays"}
    whole = folder("out-rope-7", config, [(10, 2.5), (20, 2.25)])
    assert read(whole)[:4] == ("out-rope", "plays", "7", 2.25)
    assert read(folder("out-8", config, [(20, 2.0)])).arm == "out-8"
    assert read(folder("out-seed7", config, [(10, 2.5)])).loss is None
    assert read(folder("zero", config, [(10, 2.5), (20, 0.0)])).loss == 0
    (whole / "log.jsonl").write_text('{"step": 20, "val_loss": 2.25, "whole_val_loss": 2.5}')
    assert read(whole).loss == 2.5
    (whole / "diverged.json").write_text("{}")
    assert read(whole).loss == math.inf

    with pytest.raises(UserError, match=r"holds 4 run folders .*/\*"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "empty", folder("model", {"hidden_size": 64}, [])):
        with pytest.raises(UserError, match="not a run of train.py"):
            read(other)


@pytest.mark.parametrize(
    ("text", "options", "where"),
    [
        ("arm,loss\nbaseline,1\nmine,low", [], "runs.csv:3"),
        ("arm,loss\nbaseline,1\nmine,2", ["--base=other"], "baseline, mine"),
        ("arm,loss\nbaseline,1\nmine,2", ["--base=Baselin"], "did you mean baseline?"),
        ("arm,loss\nbaseline,1\nmine,2", ["--seed_column=run"], "--seed_column="),
        ("arm,loss\nbaseline,1\nbaseline,2", [], "--arm_column=arm right?"),
        ("arm,loss\nbaseline,1\nmine,NA", [], "let a run of mine end"),
        ("arm,loss,x\nbaseline,,1\nmine,NA,2", [], "none of the 2 rows has a loss"),
        ("arm,loss\na,b,1", [], "runs.csv:2"),
        ("arm,loss,loss\na,2,1", [], "two columns are named loss"),
        ('arm,loss\nbaseline,1\n"mine,2\nmine,3', [], "close the quotes"),
        ("arm,loss,seed\na,2,1", ["--setting_column=seed"], "the column of two things"),
        ("name,value\nbaseline,1", [], "name one with --arm_column= --loss_column="),
        ("arm,seed,loss\n", [], "no rows"),
        ("arm,loss\0", [], "UTF-8"),
        ("arm seed loss\na 1 2", [], "separate its cells by"),
    ],
)
def test_a_mistake_is_one_line(printed, text, options, where):
    with pytest.raises(UserError, match=re.escape(where)):
        printed(text, *options)


@pytest.mark.parametrize(("name", "fix"), [("a.json", ".csv"), ("missing.csv", "check the path")])
def test_other_files_are_refused(tmp_path, name, fix):
    if not name.startswith("missing"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match=f"{name}.*{fix}"):
        verdict.main([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["", "/rows.jsonl"])
def test_the_runs_of_a_sweep_have_a_report(name):
    with pytest.raises(UserError, match="run `python bench/report.py bench/results/answer/gpt2`"):
        verdict.main([f"bench/results/answer/gpt2{name}"])


def test_neither_torch_nor_pandas_is_imported(tmp_path):
    """And --help does not wait for numpy."""
    file = csv_of(tmp_path / "runs.csv", {"baseline": BASE, "mine": LOWER})
    code = f"""
import sys
from bench import verdict, verdict_rows
try:
    verdict.main(["--help"])
except SystemExit:
    assert "numpy" not in sys.modules
verdict.main([{file!r}])
assert "scipy" in sys.modules and not {{"torch", "pandas"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
