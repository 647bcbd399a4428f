"""
The report of a sweep, or of several, from their rows alone:

    python bench/report.py OUT [OUT2 ...]

Writes report.md, its plots (PNG) and report.html, one file that opens from disk, into the first folder. Folders of the same code, base and
data are one sweep, on several machines perhaps, and their rows are put together; others get a section each. What is said is stats.py's.
"""

import html
import math
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.ablation import plots, stats
from bench.ablation.sweeps import gather
from common.errors import UserError, run
from common.files import write as write_file


@dataclass
class Cell:
    """Text, the number that sorts its column (nan: last), a class for its colour, and what hovering tells."""

    text: str
    key: float = math.nan
    kind: str = ""
    tip: str = ""


# --- words


def signed(value, digits=4):
    return f"{value:+.{digits}f}".replace("-", "\u2212") if math.isfinite(value) else "\u2013"


def short(value):
    """Three digits and a unit, of ten."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def name(verdict):
    return f"{verdict.arm}: beyond {verdict.against}" if verdict.interaction else verdict.arm


def effect(verdict):
    return f"{name(verdict)} ({signed(verdict.mean, 3)}, {signed(verdict.low, 3)} to {signed(verdict.high, 3)})"


def headline(section):
    """The first line."""
    return ("Screening: " if section.sweep["screening"] else "") + section.sweep["question"]


def screening(section):
    if not section.sweep["screening"]:
        return ""
    n = section.sweep["seeds"]
    visible = f" (here about {section.main.visible:.3f} nats)" if section.main.visible else ""
    return f"A screening on a small setting with {n} seed{'s' * (n > 1)} per arm: it can only see large effects{visible}, and what it sees need not hold at another size."


def answer(section):
    """The answer in two sentences: what is decided, and what is not."""
    groups = {
        word: sorted(
            (v for v in section.main.verdicts if v.word == word and not v.interaction),
            key=lambda v: -abs(v.mean),
        )
        for word in ("better", "worse", "tie", "undecided", "failed", "not run")
    }
    rungs = any(
        v.against != section.sweep["base"] and not v.interaction for v in section.main.verdicts
    )
    other = (
        "what each is compared with"
        if rungs
        else f"the base ({section.sweep['base_values'].get('model', section.sweep['base'])})"
    )
    clear = [
        f"{stats.listed(map(effect, v), 4)} {'does' if len(v) == 1 else 'do'} {word}"
        for word, v in groups.items()
        if word in ("better", "worse") and v
    ]
    if clear:
        first = (
            f"By {stats.MEASURES[section.main.measure]} (difference in nats per token, 95 % interval), against {other}: "
            + ", while ".join(clear)
            + "."
        )
    else:
        first = (
            f"By {stats.MEASURES[section.main.measure]}, no arm is shown to differ from {other}."
        )
    rest = [
        f"{stats.listed(map(name, v))} {text if len(v) > 1 else single}"
        for v, text, single in (
            (
                groups["tie"],
                f"tie (differ by less than {section.main.margin:.3f})",
                f"ties (differs by less than {section.main.margin:.3f})",
            ),
            (groups["undecided"], "are undecided", "is undecided"),
            (
                [
                    v
                    for v in section.main.verdicts
                    if v.interaction and v.word in ("better", "worse")
                ],
                "do not add up",
                "does not add up",
            ),
            (groups["failed"], "failed", "failed"),
            (groups["not run"], "have not run", "has not run"),
        )
        if v
    ]
    second = "; ".join(rest) or "Every arm is decided"
    return f"{first} {second[0].upper() + second[1:] if not rest else second}."


def floor_words(section):
    analysis, floor = section.main, section.main.floor
    n = len(section.runs.done[section.sweep["base"]])
    if not n:
        return "The base has no run that is done."
    text = (
        f"Over {n} seed{'s' * (n != 1)} the base ends at {analysis.base_mean:.4f}"
        + (f", sd {analysis.base_sd:.4f}" if n > 1 else "")
        + "."
    )
    if floor and len(floor.seeds) > 1:
        text += (
            f" The base once more, from other initialisations on the same data in the same order, differs by {signed(floor.mean)} ({signed(floor.low)} to {signed(floor.high)}); "
            f"the differences have sd {floor.sd:.4f}"
            + (
                f", the pairs a correlation of {signed(floor.correlation, 2)}."
                if len(floor.seeds) > 2
                else "."
            )
        )
    if analysis.visible:
        text += f" An effect of {analysis.visible:.3f} or more would be found 80 times in 100 (sd of the median arm's differences, Holm's first step)."
    return text


def method(section):
    sweep, judged = section.sweep, [v for v in section.main.verdicts if v.word != "noise"]
    looks = (
        "one look, planned"
        if len(sweep["looks"]) == 1
        else f"{len(sweep['looks'])} planned looks at {stats.listed(map(str, sorted(sweep['looks'])))} seeds, each p times {len(sweep['looks'])} (Bonferroni over the looks: valid however the arms that go on are chosen)"
    )
    margin = (
        f"{section.main.margin:.4f} nats"
        + (" (one sd of the base's runs)" if sweep["margin"] is None else " (given)")
        if section.main.margin > 0
        else "not known yet"
    )
    return (
        f"Verdicts are by {stats.MEASURES[section.main.measure]}. Each is a paired t test over the seeds that an arm and the arm it is compared with share (same batches, same order; initialisations apart); {looks}; "
        f"p corrected by Holm over {len(judged)} comparisons, at {stats.ALPHA}. A tie is two one-sided t tests within a margin of {margin}, at {stats.ALPHA} per comparison. Intervals are 95 % t intervals, "
        f"each by itself: one may leave out zero and its arm still be undecided. Matching: {sweep['match']}. \u201cAbout k more seeds\u201d is 80 % power at the effect as observed: a hint. "
        f"At equal time, two arms are read where the first of them ends: the slower one before its learning rate has decayed, which counts against it."
    )


# --- tables: (title, note, headings, rows of Cells)


def verdict_cell(verdict, brief=False):
    return Cell(
        "noise floor" if verdict.word == "noise" else verdict.word if brief else str(verdict),
        ["better", "tie", "undecided", "worse", "failed", "not run", "noise"].index(verdict.word),
        verdict.word,
        verdict.why,
    )


def number(value, form, key=None, tip=""):
    fine = value is not None and (isinstance(value, str) or math.isfinite(value))
    return (
        Cell(
            form(value) if callable(form) else format(value, form),
            value if key is None else key,
            tip=tip,
        )
        if fine
        else Cell("\u2013")
    )


def change(facts):
    return ", ".join(f"{key}={value}" for key, value in facts["changes"].items())


def effects_table(section):
    sweep, analysis = section.sweep, section.main
    factor = sweep["data"].get("bits_per_byte") or math.nan
    losses = lambda mean, sd: [
        Cell(f"{mean:.4f}" + (f" ({sd:.4f})" if math.isfinite(sd) else ""), mean)
        if math.isfinite(mean)
        else Cell("\u2013"),
        number(mean * factor, ".4f"),
    ]  # noqa: E731
    rows = [
        [
            Cell(sweep["base"], kind="arm"),
            Cell("\u2013"),
            Cell("\u2013"),
            Cell("\u2013"),
            *losses(analysis.base_mean, analysis.base_sd),
            number(len(section.runs.done[sweep["base"]]), "d"),
            Cell("the base"),
        ]
    ]
    for v in analysis.verdicts:
        against = f"against {v.against}; " if v.against != sweep["base"] else ""
        rows.append(
            [
                Cell(name(v), kind="arm"),
                verdict_cell(v),
                Cell(
                    f"{signed(v.mean)} [{signed(v.low)}, {signed(v.high)}]"
                    if len(v.seeds) > 1
                    else signed(v.mean),
                    v.mean,
                ),
                number(v.p_holm, ".3g", tip=f"alone: {v.p:.2g}") if v.seeds else Cell("\u2013"),
                *losses(v.loss, v.loss_sd),
                number(len(v.seeds), "d", tip=v.why),
                Cell(
                    against
                    + (
                        "other initialisations"
                        if v.word == "noise"
                        else change(sweep["arms"][v.arm])
                    )
                ),
            ]
        )
    return (
        "Verdicts",
        f"Differences in nats per token, negative is better. Loss: {stats.MEASURES[analysis.measure]}, mean (sd over seeds).",
        [
            "arm",
            "verdict",
            "difference [95 %]",
            "p (Holm)",
            "loss (sd)",
            "bits/byte",
            "seeds",
            "what changes",
        ],
        rows,
    )


def costs_table(section):
    rows = []
    for arm in section.sweep["arms"]:
        cost, done = section.costs.get(arm), list(section.runs.done[arm].values())
        get = lambda *keys: (
            next(iter([cost[keys[0]] if len(keys) == 1 else cost[keys[0]][keys[1]]]), None)
            if cost and cost.get(keys[0]) is not None
            else None
        )  # noqa: E731
        spread = lambda key, form: (
            f"quartiles {cost[key]['q25']:{form}} to {cost[key]['q75']:{form}}"
            if cost and cost.get(key)
            else ""
        )  # noqa: E731
        verdict = section.verdicts.get(arm)
        far = [
            [
                row["extrapolation"][times]
                for row in done
                if (row.get("extrapolation") or {}).get(times) is not None
            ]
            for times in ("1", "2", "4", "8")
        ]
        rows.append(
            [
                Cell(arm, kind="arm"),
                verdict_cell(verdict, brief=True) if verdict else Cell("\u2013"),
                number(get("parameters"), short, tip=f"{get('parameters')}"),
                number(get("flops_per_token"), short),
                number(
                    get("tokens_per_second"),
                    ",.0f",
                    tip=spread("milliseconds_per_step", ".1f") + " ms per step" if cost else "",
                ),
                number(
                    get("peak_memory_bytes"), short, tip=cost.get("peak_memory", "") if cost else ""
                ),
                number(get("kv_bytes_per_token"), ",.0f"),
                number(
                    get("decode_ms_per_token", "median"),
                    ".2f",
                    tip=spread("decode_ms_per_token", ".2f"),
                ),
                *(number(float(np.mean(losses)) if losses else None, ".3f") for losses in far),
            ]
        )
    return (
        "Costs",
        "FLOPs of a forward pass. Training tokens/s and decoding are medians, measured by themselves, the arms in turn. Losses at 1 to 8 times the training context, "
        "on the same target tokens; a dash where the positions cannot go.",
        [
            "arm",
            "verdict",
            "parameters",
            "FLOPs/token",
            "tokens/s",
            "peak bytes",
            "KV bytes/token",
            "decode ms/token",
            "1\u00d7",
            "2\u00d7",
            "4\u00d7",
            "8\u00d7",
        ],
        rows,
    )


def measures_table(section):
    """The verdict again by each measure, and the tests that decide nothing."""
    found = {
        measure: {name(v): v for v in analysis.verdicts}
        for measure, analysis in section.analyses.items()
    }
    heads = [
        head
        for measure in found
        for head in (
            stats.MEASURES[measure].replace("validation loss", "").strip() + " loss"
            if measure != "equal_time"
            else "at equal time",
            "verdict",
        )
    ]
    rows = []
    for v in section.main.verdicts:
        row = [Cell(name(v), kind="arm")]
        for other in (found[measure][name(v)] for measure in found):
            row += [
                Cell(
                    f"{signed(other.mean)} [{signed(other.low)}, {signed(other.high)}]"
                    if len(other.seeds) > 1
                    else signed(other.mean),
                    other.mean,
                ),
                verdict_cell(other, brief=True) if other.seeds else Cell("\u2013"),
            ]
        few = f"floor {2 / 2 ** len(v.seeds):.2g}" if v.seeds else ""
        boot = v.bootstrap and Cell(
            f"[{signed(v.bootstrap[0])}, {signed(v.bootstrap[1])}]", v.bootstrap[0]
        )
        rows.append(
            row
            + [
                Cell(f"{v.p_flip:.2g} ({few})", v.p_flip)
                if math.isfinite(v.p_flip)
                else Cell("\u2013"),
                boot or Cell("\u2013"),
                number(v.p_tie, ".2g"),
                number(v.correlation, "+.2f"),
            ]
        )
    return (
        "By other measures",
        f"Each measure is a family of its own; {stats.MEASURES[section.main.measure]} decides. Sign flips and the BCa bootstrap (from {stats.BOOTSTRAP_FROM} seeds on) stand beside the t test and decide nothing.",
        ["arm", *heads, "sign-flip p", "bootstrap 95 %", "p (tie)", "correlation of pairs"],
        rows,
    )


def plain(made):
    """The table as text for a terminal."""
    _, _, heads, rows = made
    texts = [heads, *([cell.text for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in texts
    )


def markdown(made):
    title, note, heads, rows = made
    lines = [
        f"## {title}",
        "",
        note,
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    return (
        "\n".join(
            lines
            + [
                "| " + " | ".join(cell.text.replace("|", "\\|") for cell in row) + " |"
                for row in rows
            ]
        )
        + "\n"
    )


def hypertext(made):
    title, note, heads, rows = made

    def cell(item, tag):
        tip = f' title="{html.escape(item.tip)}"' if item.tip else ""
        key = (
            f' data-key="{item.key:.10g}"'
            if isinstance(item.key, (int, float)) and math.isfinite(item.key)
            else ""
        )
        return f'<{tag}{key}{tip} class="{item.kind.replace(" ", "-")}"{" scope=row" * (tag == "th")}>{html.escape(item.text)}</{tag}>'

    body = "\n".join(
        "<tr>"
        + "".join(cell(item, "th" if i == 0 else "td") for i, item in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f"<h3>{html.escape(title)}</h3><p class=note>{html.escape(note)}</p><div class=scroll tabindex=0><table><thead><tr>"
        + "".join(f"<th scope=col><button>{html.escape(head)}</button></th>" for head in heads)
        + f"</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def table(folder):
    """The sweep in `folder` as plain text for a terminal: the answer, the verdicts, the costs."""
    (section,) = gather([folder])
    return "\n\n".join(
        filter(
            None,
            [
                screening(section),
                answer(section),
                plain(effects_table(section)),
                plain(costs_table(section)),
            ],
        )
    )


# --- the files


def facts_of(section):
    """[(label, text), ...]: what is needed to do it again."""
    sweep, data, rows = (
        section.sweep,
        section.sweep["data"],
        [row for done in section.runs.done.values() for row in done.values()],
    )
    several = lambda values: ", ".join(sorted({str(value) for value in values if value}))  # noqa: E731
    cost = next(iter(section.costs.values()), {})
    return [
        ("command", sweep["command"]),
        (
            "design",
            f"{sweep['design']}, matched in {sweep['match']}; {sweep['seeds']} seeds, learning rates {' '.join(f'{lr:g}' for lr in sweep['lr_grid'])} times the base's",
        ),
        ("commit", several([sweep["git_commit"], *(row["git_commit"] for row in rows)])),
        ("code", str(sweep["code_hash"])),
        ("hardware", several([sweep["hardware"], *(row["hardware"] for row in rows)])),
        (
            "versions",
            ", ".join(
                f"{key} {value}"
                for key, value in sweep["versions"].items()
                if key not in ("git_commit", "hardware")
            ),
        ),
        (
            "data",
            f"{data['dataset']}, fingerprint {data['fingerprint']}, {data['train_tokens']:,} tokens to train on and {data['val_tokens']:,} to validate",
        ),
        (
            "costs",
            ", ".join(
                f"{key} {cost[key]}"
                for key in ("device", "dtype", "threads", "compile", "hardware")
                if key in cost
            )
            or "not measured",
        ),
        ("base", ", ".join(f"{key}={value}" for key, value in sweep["base_values"].items())),
        ("started", sweep["started"]),
        ("rows from", ", ".join(folder.name for folder in section.folders)),
    ]


def samples_of(section):
    """{arm: text} of each arm's first seed that has one."""
    found = {
        arm: next((row["sample"] for _, row in sorted(done.items()) if row.get("sample")), None)
        for arm, done in section.runs.done.items()
    }
    return {arm: text for arm, text in found.items() if text}


def commands_of(section):
    return [
        row["command"] for done in section.runs.done.values() for _, row in sorted(done.items())
    ]


def as_markdown(section, drawn, level):
    picture = {
        title: f"![{title}]({key}.png)\n\n{caption}\n"
        for key, (title, caption, _, _) in drawn.items()
    }
    cautions = stats.caveats(section.sweep, section.runs, section.all_costs, section.main)
    fence = "\n````text\n"
    parts = [
        f"{level} {headline(section)}\n",
        screening(section) and f"**{screening(section)}**\n",
        answer(section) + "\n",
        picture.pop("Effects", ""),
        floor_words(section) + "\n",
        markdown(effects_table(section)),
        "## Caveats\n\n" + "\n".join(f"- {words}" for words in cautions) + "\n" if cautions else "",
        markdown(costs_table(section)),
        markdown(measures_table(section)),
        *picture.values(),
        "## Samples\n\n"
        + "\n".join(
            f"{arm}:\n{fence}{text.rstrip()}\n````\n" for arm, text in samples_of(section).items()
        ),
        "## Method\n\n" + method(section) + "\n",
        "## To do it again\n\n"
        + "\n".join(
            f"- {label}: `{text}`" if label == "command" else f"- {label}: {text}"
            for label, text in facts_of(section)
        )
        + "\n\n```sh\n"
        + "\n".join(commands_of(section))
        + "\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def as_html(section, drawn, level):
    said = html.escape
    title = said(headline(section)).replace(
        "GPT-2", "GPT\u20112"
    )  # a name is not broken over two lines
    figure = {
        key: f"<figure><h3>{said(heading)}</h3>{svg}<figcaption>{said(caption)}</figcaption></figure>"
        for key, (heading, caption, _, svg) in drawn.items()
    }
    first = [figure.pop(key) for key in list(figure) if key.endswith(("forest", "curves"))]
    cautions = stats.caveats(section.sweep, section.runs, section.all_costs, section.main)
    parts = [
        f"<{level}>{title}</{level}>",
        screening(section) and f"<p class=screening>{said(screening(section))}</p>",
        f"<p class=answer>{said(answer(section))}</p>",
        "<div class=plots>" + "".join(first) + "</div>",
        f"<p>{said(floor_words(section))}</p>",
        hypertext(effects_table(section)),
        "<h3>Caveats</h3><ul>" + "".join(f"<li>{said(words)}</li>" for words in cautions) + "</ul>"
        if cautions
        else "",
        hypertext(costs_table(section)),
        "<div class=plots>" + "".join(figure.values()) + "</div>",
        hypertext(measures_table(section)),
        "<h3>Samples</h3><div class=samples>"
        + "".join(
            f"<div><h4>{said(arm)}</h4><pre>{said(text.rstrip())}</pre></div>"
            for arm, text in samples_of(section).items()
        )
        + "</div>",
        f"<h3>Method</h3><p>{said(method(section))}</p>",
        "<h3>To do it again</h3><dl>"
        + "".join(
            f"<dt>{said(label)}</dt><dd>{said(text)}</dd>" for label, text in facts_of(section)
        )
        + "</dl>",
        f"<details><summary>The command of each run</summary><pre>{said(chr(10).join(commands_of(section)))}</pre></details>",
    ]
    return "\n".join(part for part in parts if part)


def write(folders):
    """Write report.md, report.html and the plots into the first of `folders`; returns the path of the page."""
    out, sections, texts, pages = Path(folders[0]), gather(folders), [], []
    for number, section in enumerate(sections, 1):
        drawn = plots.draw(section, f"{number}-" if number > 1 else "")
        for key, (_, _, png, _) in drawn.items():
            write_file(out / f"{key}.png", png)
        texts.append(as_markdown(section, drawn, "#"))
        pages.append(as_html(section, drawn, "h2" if number > 1 else "h1"))
    template = string.Template(
        (Path(__file__).parent / "report_template.html").read_text(encoding="utf-8")
    )
    write_file(out / "report.md", "\n".join(texts))
    write_file(
        out / "report.html",
        template.substitute(title=html.escape(headline(sections[0])), body="\n".join(pages)),
    )
    return out / "report.html"


def main(argv):
    if argv in (["--help"], ["-h"]):
        return print(__doc__.strip())
    if not argv or any(word.startswith("-") for word in argv):
        raise UserError(
            "the folders of sweeps are missing, or there is an option",
            " ".join(argv) or "OUT",
            "type python bench/report.py OUT [OUT2 ...]",
        )
    page = write(argv)
    print(f"{plain(effects_table(gather(argv)[0]))}\n\n{page.with_suffix('.md')}, {page}")


if __name__ == "__main__":
    run(main)
