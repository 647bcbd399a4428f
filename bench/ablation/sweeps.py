"""Reading sweeps: the rows of their folders, put together where they belong together, with what stats.py says of them."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.ablation import stats
from common.errors import UserError
from training.run_folder import read_rows


@dataclass
class Section:
    """One sweep, from one folder or several."""

    sweep: dict
    runs: stats.Runs
    costs: dict  # arm -> row of costs.jsonl, of the sweep's code
    all_costs: dict
    analyses: dict  # measure -> Analysis, the sweep's metric first
    folders: list

    @property
    def main(self):
        return self.analyses[self.sweep["metric"]]

    @property
    def verdicts(self):
        return {verdict.arm: verdict for verdict in self.main.verdicts if not verdict.interaction}


def gather(folders):
    """[Section] of the sweeps in `folders`; those of the same code, base and data together."""
    groups = []
    for folder in map(Path, folders):
        try:
            sweep = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
            sweep["arms"][sweep["base"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                "no sweep here", folder / "sweep.json", "name a folder that bench/ablate.py wrote"
            ) from error
        rows, priced = read_rows(folder / "rows.jsonl"), read_rows(folder / "costs.jsonl")
        for group in groups:
            first = group[0]
            shared = first["arms"].keys() & sweep["arms"].keys()
            if all(
                first.get(key) == sweep.get(key)
                for key in ("code_hash", "base", "base_values", "metric", "max_iters", "data")
            ) and all(
                first["arms"][arm].get(key) == sweep["arms"][arm].get(key)
                for arm in shared
                for key in ("config_hash", "against")
            ):
                first["arms"] |= sweep["arms"]
                first["chosen_lr"] = sweep["chosen_lr"] | first["chosen_lr"]
                first["looks"] = max(first["looks"], sweep["looks"], key=len)
                group[1] += rows
                group[2] += priced
                group[3].append(folder)
                break
        else:
            groups.append([sweep, rows, priced, [folder]])
    sections = []
    for sweep, rows, priced, where in groups:
        if (
            len(where) > 1
        ):  # one machine's failure does not undo another's run, and a fixed sweep decides on all the seeds there are
            rows.sort(key=lambda row: row["status"] == "done")
            if len(sweep["looks"]) == 1:
                sweep["looks"] = [
                    max(
                        sweep["looks"][0],
                        len(
                            {
                                row["seed"]
                                for row in rows
                                if row["arm"] == sweep["base"] and row["purpose"] == "report"
                            }
                        ),
                    )
                ]
        runs, everything = stats.sort_rows(sweep, rows), {row["arm"]: row for row in priced}
        costs = {
            arm: row for arm, row in everything.items() if row["code_hash"] == sweep["code_hash"]
        }
        measures = [
            sweep["metric"],
            *(measure for measure in stats.MEASURES if measure != sweep["metric"]),
        ]
        sections.append(
            Section(
                sweep,
                runs,
                costs,
                everything,
                {measure: stats.analyse(sweep, runs, costs, measure) for measure in measures},
                where,
            )
        )
    return sections
