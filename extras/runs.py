"""Run folders as a report reads them: options, metrics by step, the arms they belong to, and the figures of an arm.

Runs under way, torn lines and missing values are met here, and said in a run's notes. An arm is method, lambda and
control (and model, tasks and user, where the runs given differ in them); its runs are its seeds.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from extras.charts import Curve
from extras.ranks import UsageError
from extras.results import Results
from extras.show import fits
from extras.tables import arm_of

NAMES = {"faca": "FACA", "grpo": "Interactive GRPO", "sft": "SFT alone"}
OPTIONS = {"method": str, "seed": int, "lam": float, "control": str, "env": str, "model": str, "steps": int}
KINDS = ("correct", "mixed", "wrong")  # of prompt groups
COUNTS = ("stop/", "errors/", "tried_again/")  # metrics that a row leaves out where they are 0


class ReportError(UsageError):
    """What keeps a report from being made; the message is one line."""


@dataclass
class Run:
    """A run folder: its options, its metrics by phase, and what was odd about it."""

    folder: Path
    config: dict
    rows: dict[str, list[dict]]
    notes: list[str] = field(default_factory=list)
    name: str = ""
    arm: str = ""

    @property
    def steps(self) -> int:
        """RL steps done."""
        return max((row["step"] + 1 for row in self.rows["rl"]), default=0)

    @property
    def over(self) -> bool:
        """Whether it has been evaluated after its last step; without evaluation, whether it has done that step."""
        last = "after SFT" if self.config["method"] == "sft" else "after RL"
        return any(row["at"] == last for row in self.rows["held_out"]) or (
            not self.rows["held_out"] and self.steps >= self.config["steps"])

    def values(self, phase: str, key: str | Callable) -> dict[int, float]:
        """{step: value}, without what is missing or not finite; key: of the row, or a function of it."""
        default = 0 if isinstance(key, str) and key.startswith(COUNTS) else None
        pairs = ((row["step"], key(row) if callable(key) else row.get(key, default)) for row in self.rows[phase])
        return {step: float(value) for step, value in pairs if is_number(value)}


def is_number(value) -> bool:
    """Whether it can be drawn and averaged: neither NaN nor beyond what any metric can be (1e20, chosen)."""
    return isinstance(value, int | float) and -1e20 < value < 1e20


# -------------------------------------------------------------------------------------------------------- reading


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder is none of train.py's."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if wrong := [name for name, kind in OPTIONS.items() if not fits(config[name], kind)
                     or kind is not str and not is_number(config[name])]:
            raise ValueError(f"config.json has another kind of {wrong[0]}")
        text = (folder / "metrics.jsonl").read_bytes()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{folder} is neither a run folder of train.py (config.json, metrics.jsonl) nor results of "
                          f"`eval.py run` (run.json): {type(error).__name__}: {error}") from None
    rows, damaged = {"sft": [], "rl": [], "held_out": []}, []
    every = text.splitlines()
    for number, line in enumerate(every, 1):
        try:
            row = json.loads(line)
            held_out = row["phase"] == "held_out"
            if held_out and not isinstance(row["at"], str) or row["phase"] in ("sft", "rl") and not (
                    isinstance(row["step"], int) and 0 <= row["step"] < 2**31):
                raise ValueError("no place among the steps")
            if row["phase"] in rows:
                rows[row["phase"]].append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged.append(number)
    run = Run(folder, config, rows)
    if damaged == [len(every)]:
        run.notes.append("the last line of its metrics is torn and left out (the run is under way, or was killed)")
    elif damaged:
        run.notes.append(f"{len(damaged)} damaged lines of its metrics are left out, line {damaged[0]} first")
    place_evaluations(run)
    return run


def place_evaluations(run: Run) -> None:
    """Gives each evaluation the step that it stands at, and its pass@1 as the mean over domains."""
    names = [row["at"] for row in run.rows["held_out"]]
    for row in run.rows["held_out"]:
        number = re.fullmatch(r"RL step (\d{1,9})", row["at"])
        row["step"] = int(number[1]) if number else run.steps if row["at"] == "after RL" else 0
        domains = [value for key, value in row.items() if key.startswith("pass@1/") and is_number(value)]
        row["pass@1"] = statistics.fmean(domains) if domains else None
    if "after SFT" in names:  # before it, the model was another: not a point of RL's curve
        run.rows["held_out"] = [row for row in run.rows["held_out"] if row["at"] != "before"]


def names_of(folders: list[Path]) -> dict[Path, str]:
    """As much of each folder's path as tells it from the others. Raises ReportError for one that is given twice."""
    parts = [folder.resolve().parts for folder in folders]
    if twice := [folder for i, folder in enumerate(folders) if parts[i] in parts[:i]]:
        raise ReportError(f"{twice[0]} is named twice")
    depths = [next(depth for depth in itertools.count(3 if own[-1].isdigit() else 1)  # a seed alone says nothing
                   if sum(p[-depth:] == own[-depth:] for p in parts) == 1) for own in parts]
    return {folder: "/".join(own[-depth:]) for folder, own, depth in zip(folders, parts, depths, strict=True)}


def read_runs(folders: list[Path], names: dict[Path, str]) -> list[Run]:
    """The runs, with their names, and arms that tell them apart. Raises ReportError for a folder that is none."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        run.name = names[run.folder]
    apart = [key for key in ("env", "model", "simulator")
             if len({str(run.config.get(key)) for run in trained(runs)}) > 1]
    for run in runs:
        run.arm = arm_name(run.config)
        if run.config["method"] != "sft":
            run.arm = " ".join([run.arm, *(str(run.config.get(k)) for k in apart)])
    for arm in dict.fromkeys(run.arm for run in runs):
        note_differences([run for run in runs if run.arm == arm])
    return runs


def arm_name(config: dict) -> str:
    method, _, rest = arm_of(config).partition(" ")
    return NAMES["sft"] if method == "sft" else f"{NAMES.get(method, method)} {rest.replace('lam ', 'λ ')}".strip()


def trained(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.config["method"] != "sft"]


def note_differences(runs: list[Run]) -> None:
    """Runs of one arm are averaged, so what they do not share but the seed is said."""
    free = {"seed", "out", "resume", "tensorboard", "wandb", "keep", "save_every", "eval_every", "kv_gib"}
    differing = [key for key in runs[0].config if key not in free
                 and len({json.dumps(run.config.get(key)) for run in runs}) > 1]
    if differing:
        runs[-1].notes.append(f"the runs of its arm, {runs[-1].arm}, are averaged though they differ in "
                              + ", ".join(differing))
    if len({run.config["seed"] for run in runs}) < len(runs):
        runs[-1].notes.append(f"another run of its arm, {runs[-1].arm}, has the same seed")


# --------------------------------------------------------------------------------------------------------- numbers


def arms_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by arm, Interactive GRPO first."""
    arms = sorted(dict.fromkeys(run.arm for run in runs), key=lambda arm: (not arm.startswith(NAMES["grpo"]), arm))
    return {arm: [run for run in runs if run.arm == arm] for arm in arms}


def arms_evaluated(found: list[Results], names: dict[Path, str]) -> dict[str, list[Results]]:
    """Evaluations by the arm that made the model, SFT and Interactive GRPO first, seeds in sequence.

    One whose training is not known is an arm of its own, by its folder's name. Where what was evaluated or trained
    differs otherwise, it is said in the arm's name, so that only seeds are averaged.
    """
    def differing(results: Results) -> dict[str, str]:
        run, training = results.run, results.run["training"]
        own = {key: str(training.get(key)) for key in ("env", "model", "simulator") if training["method"] != "sft"}
        return own | {"weights": Path(run["model"]).name, "on": f"on {run['env']}", "user": f"with {run['simulator']}"
                      } | {key: f"{key} {run[key]}" for key in ("temperature", "thinking", "trials")}

    known = [results for results in found if {"method", "lam", "control"} <= results.run["training"].keys()
             and is_number(results.run["training"].get("seed"))]
    every = [differing(results) for results in known]
    apart = [key for key in dict.fromkeys(key for each in every for key in each)
             if len({each[key] for each in every if key in each}) > 1]
    arms: dict[str, list[Results]] = {}
    for results, each in zip(known, every, strict=True):
        name = " ".join([arm_name(results.run["training"]), *(each[key] for key in apart if key in each)])
        arms.setdefault(name, []).append(results)
    order = sorted(arms, key=lambda arm: (not arm.startswith(NAMES["sft"]), not arm.startswith(NAMES["grpo"]), arm))
    return ({arm: sorted(arms[arm], key=lambda results: results.run["training"]["seed"]) for arm in order}
            | {names[results.folder]: [results] for results in found if not any(results is each for each in known)})


def curves_of(runs: list[Run], phase: str, key: str | Callable) -> list[Curve]:
    found = [Curve(arm, i, [values for run in members if (values := run.values(phase, key))])
             for i, (arm, members) in enumerate(arms_of(runs).items())]
    return [curve for curve in found if curve.seeds]


def thirds(runs: list[Run], key: str, weight: str) -> tuple[float, float] | None:
    """Weighted mean of a share over the first and the last third of the steps; of 120, the paper's 40 and 40."""
    sums = []
    for first in (True, False):
        part = [(row[key], row[weight]) for run in runs for row in run.rows["rl"]
                if is_number(row.get(key)) and is_number(row.get(weight))
                and (row["step"] < run.steps / 3 if first else row["step"] >= run.steps * 2 / 3)]
        sums.append((sum(value * w for value, w in part), sum(w for _, w in part)))
    return None if not all(w for _, w in sums) else tuple(total / w for total, w in sums)


def mean_of(runs: list[Run], key: Callable) -> float | None:
    """Over all RL steps of all runs."""
    found = [value for run in runs for value in run.values("rl", key).values()]
    return statistics.fmean(found) if found else None


def equal_share(row: dict) -> float | None:
    counts = [row.get(f"groups_{kind}") for kind in KINDS]
    return (counts[0] + counts[2]) / sum(counts) if all(map(is_number, counts)) and sum(counts) else None


def final(run: Run) -> float | None:
    """pass@1 after the last step, of a run that is over."""
    found = run.values("held_out", "pass@1")
    return found[max(found)] if found and run.over else None


def tenths(share: float) -> Decimal:
    """In percent, with one decimal, halves away from 0: the noise of floats (3.7499999999999996) does not decide."""
    return Decimal(f"{100 * share:.9f}").quantize(Decimal("0.1"), ROUND_HALF_UP) + 0  # + 0: no -0.0


def domain_mean(results: Results) -> float:
    """pass@1, the mean over domains."""
    parts = [results.among(domain=domain) for domain in {task["domain"] for task in results.run["tasks"].values()}]
    return statistics.fmean(sum(record.solved for record in part.records) / part.expected for part in parts)


def percent(*values: float | None) -> str:
    return " → ".join(str(tenths(value)) for value in values if value is not None)


def signed(share: float) -> str:
    return f"{tenths(share):+}".replace("-", "−")


def plus_minus(values: list[float]) -> str:
    """Mean and, of several, sample standard deviation."""
    return percent(statistics.fmean(values)) + (f" ± {percent(statistics.stdev(values))}" if len(values) > 1 else "")


def held_out(runs: list[Run]) -> str:
    """Says which evaluations those in training are, to be told from `eval.py run`'s: dialogues a task, where known."""
    trials = sorted({run.config["eval_trials"] for run in runs if is_number(run.config.get("eval_trials"))})
    told = f" of {' or '.join(map(str, trials))} dialogue{'s' * (trials != [1])} a task" if trials else ""
    return f"training's own evaluation{told}"


def gains(members: list[Run], base: list[Run]) -> list[float]:
    """Differences in final pass@1 at matched seeds."""
    theirs = {run.config["seed"]: final(run) for run in base if final(run) is not None}
    return [final(run) - theirs[run.config["seed"]] for run in members
            if final(run) is not None and run.config["seed"] in theirs]


def metric_keys(runs: list[Run]) -> list[tuple[str, str]]:
    """(phase, key) of every numeric metric, in the order in which they appear."""
    return list(dict.fromkeys((phase, key) for phase in ("rl", "held_out", "sft") for run in runs
                              for row in run.rows[phase] for key, value in row.items()
                              if is_number(value) and key not in ("step", "pass@1")))


def meanings(readme: Path = Path(__file__).parent.parent / "README.md") -> list[tuple[re.Pattern, str]]:
    """(names, meaning) of each row in README's table of metrics; none where that can't be read.

    A name in capitals (`stop/REASON`) stands for any, a key that begins with / goes on the first one's (`sim/a`, `/b`).
    """
    try:
        text = readme.read_text(encoding="utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        keys = re.findall(r"`([^`]+)`", cells[1]) if len(cells) == 4 else []
        if keys:
            whole = (keys[0].partition("/")[0] + key if key.startswith("/") else key for key in keys)
            names = "|".join(re.sub("[A-Z]+", ".+", re.escape(key)) for key in whole)
            found.append((re.compile(names), cells[2].replace("\\|", "|").replace("`", "")))
    return found
