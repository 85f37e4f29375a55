"""Tables over runs: arms and their seeds beside the paper's (`eval.py table`), learning curves (`eval.py curves`)."""

import csv
import glob
import io
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from extras.paper import COLUMNS, GAINS, SPREAD, TABLE_2, TABLE_4
from extras.results import Results, ResultsError, complete, must_match
from extras.run import FREE

FORMATS = ("text", "markdown", "csv")
NONE = "not run"


def grid(rows: list[list[str]], form: str = "text") -> str:
    """Cells as a table, the first row its heading; text and Markdown have the first column on the left."""
    if form == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[cell.strip() for cell in row] for row in rows])
        return text.getvalue().rstrip("\n")
    if form == "markdown":
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[row[0].ljust(wide[0]), *(cell.rjust(n) for cell, n in zip(row[1:], wide[1:], strict=True))]
             for row in rows]
    if form == "markdown":
        lines.insert(1, ["-" * wide[0], *("-" * (n - 1) + ":" for n in wide[1:])])
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


# ------------------------------------------------------------------------------------------------------------ table


def seed_table(patterns: list[str], form: str = "text", paper: int = 2, unseen: bool = False, anyway: bool = False,
               brief: bool = False) -> str:
    """Each pattern's folders are the seeds of an arm: pass@1 by domain, averages, and gains by seed over one arm.

    The paper's rows stand below, of all tasks; what either side has no figure for is "not run" (brief: a domain that
    none of ours has is left out). As CSV: a line for each figure. Raises ResultsError for patterns that match no
    results, results that are not complete, or such as can't be compared (unless anyway).
    """
    arms = {pattern: arm(pattern) for pattern in dict.fromkeys(patterns)}
    every = [results for seeds in arms.values() for results in seeds]
    unlike = [f"{every[0].folder} and {results.folder} differ: {line}" for results in every[1:]
              for line in must_match(every[0], results, anyway)]
    if unseen and (unknown := [str(results.folder) for results in every if not results.run["seen_known"]]):
        raise ResultsError(f"--unseen: it is not known which tasks the model of {unknown[0]} was trained on")
    shares = {pattern: [domain_shares(results, unseen) for results in seeds] for pattern, seeds in arms.items()}
    ran = {domain for rows in shares.values() for row in rows for domain in row}
    more = sorted(ran - set(COLUMNS))
    domains = [*more, *(domain for domain in COLUMNS if domain in ran or not brief)]
    common = [d for d in domains if all(d in row for rows in shares.values() for row in rows)]
    if not common:
        raise ResultsError("these results have no domain in common" + " with unseen tasks" * unseen)
    lines = [Line(pattern, len(rows), {d: [row[d] for row in rows] for d in domains if all(d in row for row in rows)},
                  [statistics.fmean(row[d] for d in common) for row in rows],
                  [statistics.fmean(row[d] for d in COLUMNS) for row in rows] if set(COLUMNS) <= set(common) else [])
             for pattern, rows in shares.items()]
    lines += paper_lines(paper, unseen)
    gained = gains(arms, {line.name: line.average for line in lines}) + paper_gains() * (paper == 2)
    counted = [results.among(unseen=unseen) for results in every]
    missing = [(r.folder, n, r.expected) for r in counted if (n := sum(record.void for record in r.records))]
    if form == "csv":
        return grid([["row", "seeds", "figure", "mean", "sd"], *(row for line in lines for row in line.tidy(common)),
                     *([str(folder), "1", "missing", str(n), ""] for folder, n, _ in missing),
                     *([name, str(len(each)), "gain", *figures(list(each.values()))] for name, each in gained)], form)
    head = ["pass@1, %" + ", unseen tasks" * unseen, "seeds", *(COLUMNS.get(d, d) for d in domains),
            f"mean of {len(common)}", "Avg of the paper's 9"]
    rows = [[line.name, str(line.seeds), *(spread(line.shares.get(d, [])) for d in domains),
             spread(line.average, 2), spread(line.papers, 2)] for line in lines]
    notes = [f"±: sample standard deviation over seeds; mean of {len(common)}: over what all arms here have, "
             + ", ".join(common), *(f"missing: {folder} {n} of {expected}; they count as not solved"
                                    for folder, n, expected in missing),
             *(f"unfinished: the model of {r.folder} is of {r.unfinished}" for r in every if r.unfinished)]
    return "\n".join([*unlike, *[""] * bool(unlike), grid([head, *rows], form), "", *notes, *(
        f"{name}: {spread(list(each.values()), 2, '+')}"
        + "  (" + ", ".join(f"{key}: {gain:+.2f}" for key, gain in each.items()) + ")" if each else
        f"{name}: no gains by seed, for their seeds are not matched" for name, each in gained)])


@dataclass
class Line:
    """A row of the table: percentages of each seed, or of the paper's mean alone, with its deviation."""

    name: str
    seeds: int
    shares: dict[str, list[float]]  # by domain
    average: list[float]            # over what all arms have in common; [] where that is not the paper's
    papers: list[float]             # over the paper's nine; [mean, deviation] in a line of the paper's, see Stated

    def tidy(self, common: list[str]) -> list[list[str]]:
        cells = self.shares | {f"mean of {', '.join(common)}": self.average, "Avg of the paper's 9": self.papers}
        return [[self.name, str(self.seeds), name, *figures(values)] for name, values in cells.items() if values]


class Stated(list):
    """A mean and a deviation that the paper states, where its seeds are not known."""


def spread(values: list[float], places: int = 1, sign: str = "") -> str:
    """Mean and sample standard deviation."""
    mean, sd = figures(values, f"{sign}.{places}f")
    return f"{mean} ±{sd}" if sd else mean or NONE


def figures(values: list[float], form: str = ".2f") -> tuple[str, str]:
    """Mean and sample standard deviation, "" where there is none."""
    if isinstance(values, Stated):
        return f"{values[0]:{form}}", f"{values[1]:{form}}"
    return (f"{statistics.fmean(values):{form}}" if values else "",
            f"{statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "")


def paper_lines(number: int, unseen: bool) -> list[Line]:
    mark, lines = ", all tasks" * unseen, []
    for name, row in (TABLE_2 if number == 2 else TABLE_4).items():
        known = dict(zip(COLUMNS, row, strict=False)) if number == 2 else {"tau2:telecom": row[1]}
        average = [row[-1]] if number == 2 else [row[0]]
        runs = number == 2 and name in SPREAD
        lines.append(Line(f"paper, {name}{mark}", 3 if runs else 1, {d: [x] for d, x in known.items()}, [],
                          Stated(SPREAD[name]) if runs else average))
    return lines


def paper_gains() -> list[tuple[str, dict[str, float]]]:
    return [(f"paper, {size} FACA - Interactive GRPO", {f"s{i}": gain for i, gain in enumerate(each, 1)})
            for size, each in GAINS.items()]


def arm(pattern: str) -> list[Results]:
    folders = sorted(path for path in map(Path, glob.glob(pattern)) if path.is_dir())
    if not folders:
        raise ResultsError(f"no folder matches '{pattern}'")
    return [complete(folder) for folder in folders]


def domain_shares(results: Results, unseen: bool) -> dict[str, float]:
    """Domain -> percentage of pass@1."""
    out = {}
    for domain in dict.fromkeys(t["domain"] for t in results.run["tasks"].values()):
        mine = results.among(domain=domain, unseen=unseen)
        if mine.expected:
            out[domain] = 100 * sum(r.solved for r in mine.records) / mine.expected
    return out


def gains(arms: dict[str, list[Results]], averages: dict[str, list[float]]) -> list[tuple[str, dict]]:
    """Of each arm over Interactive GRPO's (else the last): (name, seed -> gain, {} where seeds are not matched).

    A seed is the training run's, or the folder's name where that is not known.
    """
    by_seed = all("seed" in r.run["training"] for seeds in arms.values() for r in seeds)
    keys = {name: [r.run["training"]["seed"] if by_seed else r.folder.name for r in seeds]
            for name, seeds in arms.items()}
    outcome = [name for name, seeds in arms.items() if {r.run["training"].get("method") for r in seeds} == {"grpo"}]
    base, out = [*arms, *outcome][-1], []
    for name in [name for name in arms if name != base]:
        mine, other = (dict(zip(keys[arm], averages[arm], strict=True)) for arm in (name, base))
        matched = len(mine) == len(keys[name]) and len(other) == len(keys[base])
        out.append((f"{name} - {base}, by {'seed' if by_seed else 'folder'}",
                    {key: mine[key] - other[key] for key in mine if key in other} if matched else {}))
    return out


# ----------------------------------------------------------------------------------------------------------- curves


def curves(runs: list[str], anyway: bool = False) -> str:
    """A line for each run, its pass@1 (mean over domains) at each evaluation and over the curve; then gains by seed.

    Raises ResultsError where runs differ in more than arm and seed, unless anyway.
    """
    found = {folder: read_curve(Path(folder)) for folder in runs}
    differing = unlike({folder: config for folder, (config, _) in found.items()})
    if differing and not anyway:
        raise ResultsError(f"{differing[0]} (--anyway compares them, and says all that differs)")
    names = list(dict.fromkeys(name for _, curve in found.values() for name in curve))
    lines = [f"{'run':24}" + "".join(f"{name.removeprefix('RL '):>10}" for name in names) + f"{'mean':>8}"]
    arms: dict[str, dict[int, tuple[float, float]]] = {}
    for folder, (config, curve) in found.items():
        values = [curve.get(name, float("nan")) for name in names]
        mean = statistics.fmean(list(curve.values())[1:] or curve.values())  # the first is where all runs start
        if set(curve) == set(names):  # a run that is not finished is shown, and compared with none
            mine = arms.setdefault(arm_of(config), {})
            if config["seed"] in mine:
                raise ResultsError(f"{folder} is a second run of {arm_of(config)} with seed {config['seed']}: runs are "
                                   "compared by arm and seed, so name one of them")
            mine[config["seed"]] = values[-1], mean
        lines.append(f"{folder[-24:]:24}" + "".join(f"{value:10.3f}" for value in values) + f"{mean:8.3f}")
    base, *others = sorted(arms, key=lambda arm: arm != "grpo") or [""]
    for one in others:
        seeds = sorted(set(arms[one]) & set(arms[base]))
        for i, what in enumerate(("at the end", "mean over the curve")):
            each = [arms[one][seed][i] - arms[base][seed][i] for seed in seeds]
            if len(each) > 1:
                told = ", ".join(f"{seed}: {gain:+.3f}" for seed, gain in zip(seeds, each, strict=True))
                lines.append(f"{one} - {base}, {what}: {statistics.fmean(each):+.3f}, "
                             f"sample std {statistics.stdev(each):.3f}  (seed {told})")
    return "\n".join([*differing, *lines])


# What may differ between runs that are compared: arm and seed, and what changes no weight (the number of steps does).
OF_AN_ARM = {"method", "lam", "control", "seed", "out", *FREE} - {"steps"}


def unlike(configs: dict[str, dict]) -> list[str]:
    """What differs between runs but arm and seed, a line each; each seed may have begun from a model of its own."""
    first, lines = next(iter(configs)), []
    for folder, config in configs.items():
        of_seed = next(name for name in configs if configs[name]["seed"] == config["seed"])
        for name in sorted((config.keys() | configs[first].keys()) - OF_AN_ARM):
            other = of_seed if name == "model" else first
            if (one := configs[other].get(name)) != (two := config.get(name)):
                lines.append(f"{other} and {folder} differ in more than arm and seed: {name} {one} | {two}")
    return lines


def read_curve(folder: Path) -> tuple[dict, dict[str, float]]:
    """A run's options, and its mean pass@1 over domains at each evaluation. Raises ResultsError where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = {row["at"]: statistics.fmean(value for key, value in row.items() if key.startswith("pass@1/"))
                 for row in rows if row["phase"] == "held_out"}
        arm_of(config), config["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{folder} is no run folder of train.py ({type(error).__name__}: {error})") from None
    if not curve:
        raise ResultsError(f"{folder} has no evaluation in its metrics.jsonl")
    return config, curve


def arm_of(config: dict) -> str:
    """What tells one arm from another: method, lambda where it is not the default, control."""
    lam = "" if config["lam"] == (0.0 if config["method"] == "grpo" else 0.5) else f" lam {config['lam']}"
    return config["method"] + lam + ("" if config["control"] == "none" else f" {config['control']}")
