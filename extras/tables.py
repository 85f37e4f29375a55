"""Tables over runs: arms and their seeds beside the paper's (`eval.py table`), learning curves (`eval.py curves`)."""

import csv
import glob
import io
import json
import statistics
from pathlib import Path

from extras.paper import COLUMNS, GAINS, SPREAD, TABLE_2, TABLE_4
from extras.results import Results, ResultsError, complete, must_match

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


def spread(values: list[float], places: int = 1, sign: str = "") -> str:
    """Mean and sample standard deviation of percentages."""
    sd = f" ±{statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{places}f}{sd}"


def seed_table(patterns: list[str], form: str = "text", paper: int = 2, unseen: bool = False,
               anyway: bool = False) -> str:
    """Each pattern's folders are the seeds of an arm: pass@1 by domain, averages, and gains by seed over one arm.

    The paper's rows stand below; what either side has no figure for is "not run". Raises ResultsError for patterns that
    match no results, results that are not complete, or such as can't be compared (unless anyway).
    """
    arms = {pattern: arm(pattern) for pattern in dict.fromkeys(patterns)}
    every = [results for seeds in arms.values() for results in seeds]
    for results in every[1:]:
        must_match(every[0], results, anyway)
    shares = {pattern: [domain_shares(results, unseen) for results in seeds] for pattern, seeds in arms.items()}
    more = sorted({domain for rows in shares.values() for row in rows for domain in row} - set(COLUMNS))
    domains = [*more, *COLUMNS]
    common = [d for d in domains if all(d in row for rows in shares.values() for row in rows)]
    if not common:
        raise ResultsError("these results have no domain in common" + " with unseen tasks" * unseen)
    whole = set(COLUMNS) <= set(common)
    head = ["pass@1, %" + ", unseen tasks" * unseen, "seeds", *(COLUMNS.get(d, d) for d in domains),
            "Avg" if whole and not more else f"Avg of {len(common)}", *(["Avg of the paper's"] if more else [])]
    rows = [head]
    for pattern, seeds in shares.items():
        cells = [spread([row[d] for row in seeds]) if all(d in row for row in seeds) else NONE for d in domains]
        average = spread([statistics.fmean(row[d] for d in common) for row in seeds], 2)
        papers = spread([statistics.fmean(row[d] for d in COLUMNS) for row in seeds], 2) if whole else NONE
        rows.append([pattern, str(len(seeds)), *cells, average, *([papers] if more else [])])
    rows += paper_rows(paper, domains, bool(more))
    out = [grid(rows, form)]
    if form != "csv":
        out += gains(arms, shares, common)
    return "\n".join(out)


def paper_rows(number: int, domains: list[str], more: bool) -> list[list[str]]:
    rows = []
    for name, figures in (TABLE_2 if number == 2 else TABLE_4).items():
        known = dict(zip(COLUMNS, figures)) if number == 2 else {"tau2:telecom": figures[1]}
        average = f"{figures[-1]:.1f}" if number == 2 else f"{figures[0]:.2f}"
        if name in SPREAD and number == 2:
            average = "{:.2f} ±{:.2f}".format(*SPREAD[name])
        cells = [f"{known[d]:.1f}" if d in known else NONE for d in domains]
        seeds = "3" if name in SPREAD and number == 2 else "1"
        rows.append([f"paper, {name}", seeds, *cells, *([NONE, average] if more else [average])])
    return rows


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


def gains(arms: dict[str, list[Results]], shares: dict[str, list[dict]], common: list[str]) -> list[str]:
    """Of each arm over Interactive GRPO's (else the last), by seed: the training seed, or else the folder's name."""
    named = [r.run["training"].get("seed") for seeds in arms.values() for r in seeds]
    by_seed = None not in named
    keys = {pattern: [r.run["training"]["seed"] if by_seed else r.folder.name for r in seeds]
            for pattern, seeds in arms.items()}
    means = {pattern: dict(zip(keys[pattern], [statistics.fmean(row[d] for d in common) for row in rows]))
             for pattern, rows in shares.items()}
    outcome = [p for p, seeds in arms.items() if {r.run["training"].get("method") for r in seeds} == {"grpo"}]
    base, lines = [*means, *outcome][-1], [""]
    for pattern in [pattern for pattern in means if pattern != base]:
        both = [key for key in means[pattern] if key in means[base]]
        each = [means[pattern][key] - means[base][key] for key in both]
        if not both or len(means[pattern]) < len(keys[pattern]) or len(means[base]) < len(keys[base]):
            lines.append(f"{pattern} - {base}: no gains by seed, the seeds are not matched")
            continue
        lines.append(f"{pattern} - {base}, by {'seed' if by_seed else 'folder'}: {spread(each, 2, '+')}  ("
                     + ", ".join(f"{key}: {gain:+.2f}" for key, gain in zip(both, each)) + ")")
    lines += [f"paper, {size} FACA - Interactive GRPO: {spread(list(each), 2, '+')}  ("
              + ", ".join(f"s{i}: {gain:+.2f}" for i, gain in enumerate(each, 1)) + ")" for size, each in GAINS.items()]
    return lines


# ----------------------------------------------------------------------------------------------------------- curves


def curves(runs: list[str]) -> str:
    """A line for each run, its pass@1 (mean over domains) at each evaluation and over the curve; then gains by seed."""
    found = {folder: read_curve(Path(folder)) for folder in runs}
    names = list(dict.fromkeys(name for _, curve in found.values() for name in curve))
    lines = [f"{'run':24}" + "".join(f"{name.removeprefix('RL '):>10}" for name in names) + f"{'mean':>8}"]
    arms: dict[str, dict[int, tuple[float, float]]] = {}
    for folder, (config, curve) in found.items():
        values = [curve.get(name, float("nan")) for name in names]
        mean = statistics.fmean(list(curve.values())[1:] or curve.values())  # the first is where all runs start
        if set(curve) == set(names):  # a run that is not finished is shown, and compared with none
            arms.setdefault(arm_of(config), {})[config["seed"]] = values[-1], mean
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
    return "\n".join(lines)


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
