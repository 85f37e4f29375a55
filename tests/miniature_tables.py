"""What tests/miniature.py shows of its results: tables of text and one figure, each beside the paper's figures.

A results file holds, for each run "SETTING/ARM-SEED": `curve` {step: held-out pass@1}, means of metrics over `all`, the
`first` and the `last` third of its steps; for some, how far reactions lead to the better rollouts; for each evaluation
at the end, a word for each task, with a 1 for each dialogue that was solved.

Success is in percent. A curve's mean leaves out step 0, where all arms start, and has every tenth step up to 40 unless
another is named. A gain is matched by seed: same SFT checkpoint, same tasks and users, same first rollouts; its p is of
the paired t-test over seeds, two-sided.
"""

import hashlib
import io
import json
import math
import statistics
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval import bootstrap  # noqa: E402  after the path
from extras.paper import COLUMNS, GAINS, SPREAD, TABLE_2, TABLE_4, TELEMETRY  # noqa: E402
from extras.show import write_whole  # noqa: E402
from extras.tables import NONE, grid, spread  # noqa: E402

TABLE_4_OF = {"FACA": "8B lambda 0.5", "lambda 0.1": "8B lambda 0.1", "GRPO": "8B outcome only",
              "shifted": "8B shifted 0.5", "randomized": "8B randomized 0.5", "lambda -0.5": "8B lambda -0.5"}
STEPS = 40  # RL steps of a run; settings and arms are compared at the last of them, and over them
FIVE, THREE = range(5), range(3)  # seeds of the arms of Table 2, and of all others
NAMES = {"GRPO": "Interactive GRPO", "FACA": "FACA"}
BESIDE = [f"step {STEPS}", f"mean 10-{STEPS}", "gain", "p"]


# ------------------------------------------------------------------------------------------------------- statistics


def curve_mean(curve: dict, upto: int = STEPS) -> float:
    """Mean held-out success at the evaluations after step 0, up to a step."""
    return statistics.fmean(value for step, value in curve.items() if 0 < int(step) <= upto)


def paired_t(gains: list[float]) -> float:
    """Two-sided p of the t-test that the gains' mean is 0; NaN for fewer than two gains, or equal ones.

    The integral of Student's density from 0 to t, over the angle whose tangent is t / sqrt(degrees of freedom).
    """
    n = len(gains)
    deviation = statistics.stdev(gains) if n > 1 else 0.0
    if not deviation:
        return math.nan
    t = abs(statistics.fmean(gains)) * math.sqrt(n) / deviation
    angle = np.linspace(0, math.atan(t / math.sqrt(n - 1)), 20001)
    density = np.cos(angle) ** (n - 2) * math.gamma(n / 2) / (math.gamma((n - 1) / 2) * math.sqrt(math.pi))
    return max(1 - 2 * float(np.trapezoid(density, angle)), 0.0)


class Runs:
    """The runs of a results file, asked by setting and arm; percentages of success. What was not run is empty."""

    def __init__(self, results: dict):
        self.results = results
        self.by_arm: dict[tuple[str, str], dict[int, dict]] = {}
        for name, run in results["runs"].items():
            setting, _, rest = name.partition("/")
            arm, _, seed = rest.rpartition("-")
            self.by_arm.setdefault((setting, arm.replace("_", " ")), {})[int(seed)] = run

    def of(self, setting: str, arm: str, seeds: Iterable[int] = FIVE) -> dict[int, dict]:
        runs = self.by_arm.get((setting, arm), {})
        return {seed: runs[seed] for seed in sorted(runs) if seed in seeds}

    def means(self, setting: str, arm: str, seeds: Iterable[int] = FIVE, upto: int = STEPS) -> list[float]:
        return [100 * curve_mean(run["curve"], upto) for run in self.of(setting, arm, seeds).values()]

    def at(self, setting: str, arm: str, seeds: Iterable[int] = FIVE, step: int = STEPS) -> list[float]:
        return [100 * run["curve"][str(step)] for run in self.of(setting, arm, seeds).values()]

    def gains(self, setting: str, arm: str, seeds: Iterable[int] = FIVE, upto: int = STEPS,
              over: str = "GRPO") -> list[float]:
        """Of the curve's mean over Interactive GRPO's, or another arm's, for the seeds that both have."""
        both = self.of(setting, arm, seeds).keys() & self.of(setting, over, seeds).keys()
        ours, theirs = (self.means(setting, name, both, upto) for name in (arm, over))
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    def gaps(self, setting: str, seeds: Iterable[int] = FIVE, step: int = STEPS) -> list[float]:
        """FACA less Interactive GRPO at one step, for the seeds that both have."""
        ours, theirs = (self.of(setting, arm, seeds) for arm in ("FACA", "GRPO"))
        return [100 * (ours[s]["curve"][str(step)] - theirs[s]["curve"][str(step)]) for s in ours if s in theirs]

    def lead(self, setting: str, arm: str, seeds: Iterable[int] = FIVE) -> list[str]:
        """Two cells, means over seeds: of all turns, and without the last of each dialogue."""
        names = [f"{setting}/{arm.replace(' ', '_')}-{seed}" for seed in seeds]
        found = [self.results["leads"][name] for name in names if name in self.results["leads"]]
        return [mean([each[part] for each in found], "+.2f") for part in ("all turns", "all but the last")]

    def metric(self, setting: str, arm: str, name: str, seeds: Iterable[int] = FIVE, part: str = "upto") -> list[float]:
        """Of the steps up to STEPS, or of another part; "constant" is of groups whose rewards are all equal."""
        names = ("all_correct", "all_wrong") if name == "constant" else (name,)
        return [sum(run[part][n] for n in names) for run in self.of(setting, arm, seeds).values()]

    def last_step(self, setting: str) -> int:
        return max([int(step) for run in self.of(setting, "FACA").values() for step in run["curve"]], default=STEPS)

    def ends(self, setting: str, arm: str) -> dict[int, float]:
        """Seed -> percentage of dialogues solved by the models at the end; of SFT as seed 0."""
        names = {0: f"{setting}/sft"} if arm == "SFT" else {seed: f"{setting}/{arm}-{seed}" for seed in FIVE}
        flags = {seed: self.results["results"][name] for seed, name in names.items() if name in self.results["results"]}
        return {seed: 100 * text.count("1") / len(text.replace(" ", "")) for seed, text in flags.items()}

    def end_gains(self, setting: str) -> list[float]:
        """FACA less Interactive GRPO at the end, for the seeds that both have."""
        ours, theirs = (self.ends(setting, arm) for arm in ("FACA", "GRPO"))
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    def interval(self, setting: str) -> str:
        """95 % interval of FACA - Interactive GRPO at the end over tasks, the dialogues of all seeds pooled."""
        found, pairs = self.results["results"], {}
        for seed in self.ends(setting, "FACA").keys() & self.ends(setting, "GRPO").keys():
            ours, theirs = (found[f"{setting}/{arm}-{seed}"].split() for arm in ("FACA", "GRPO"))
            pairs |= {(task, (seed, k)): (a == "1", b == "1")
                      for task, words in enumerate(zip(ours, theirs, strict=True))
                      for k, (a, b) in enumerate(zip(*words, strict=True))}
        return "{:+.1f} to {:+.1f}".format(*(100 * end for end in bootstrap(pairs, 0))) if pairs else NONE


def mean(values: list[float], form: str = ".1f") -> str:
    return f"{statistics.fmean(values):{form}}" if values else NONE


def p_of(gains: list[float]) -> str:
    p = paired_t(gains)
    return "" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


# ----------------------------------------------------------------------------------------------------------- tables


def tables(results: dict) -> dict[str, str]:
    """Name -> table, in the order of the paper's argument."""
    runs, head = Runs(results), about(results)
    if len(results["runs"]) < results["about"]["runs"]:
        head += "\nNot all runs are in: a cell may be of fewer seeds than its table says, and without ± it is of one"
    return {"about": head, "outcome": outcome(runs), "controls": controls(runs), "observability": observability(runs),
            "telemetry": telemetry(runs), "homogeneous": homogeneous(runs), "noise": noise(runs), "cost": cost(runs),
            "endpoint": endpoint(results["endpoint"])}


def about(results: dict) -> str:
    """Who made them: date, code, machine, and how much."""
    by = results["about"]
    machine = "; ".join(by.get("processors", ["CPU not noted"]))
    return (f"{by['date']}, commit {', '.join(by['commits'])}, torch {by['torch']}, {by['cores']} cores ({machine}): "
            f"{len(results['runs'])} of {by['runs']} runs of RL, {by['minutes']:.0f} minutes")


def every_gain(runs: Runs) -> dict[str, list[float]]:
    """All comparisons of the tables by their names, a gain for each seed."""
    found = {}
    for setting in filter(lambda setting: runs.of(setting, "FACA"), ("telecom", "retail")):
        last = runs.last_step(setting)
        found |= {f"{setting}: FACA, mean 10-{last}": runs.gains(setting, "FACA", upto=last),
                  f"{setting}: FACA, at the end": runs.end_gains(setting)}
    arms = {"telecom": ["FACA", "lambda 0.1", "shifted", "randomized", "lambda -0.5", "noise 10", "noise 30",
                        "noise 50"], "vague": ["FACA"], "extremes": ["FACA", "scaled", "dropped"]}
    found |= {f"{setting}: {arm}": runs.gains(setting, arm) for setting, names in arms.items() for arm in names}
    return found | {f"telecom: FACA less {arm}": runs.gains("telecom", "FACA", over=arm)
                    for arm in ("shifted", "randomized")}


def begin_alike(a: dict, b: dict) -> bool:
    """Whether most runs of two results files have the same first two evaluations: the same seeds, rounded alike."""
    both = a["runs"].keys() & b["runs"].keys()
    return 2 * sum(all(a["runs"][name]["curve"][step] == b["runs"][name]["curve"][step] for step in ("0", "10"))
                   for name in both) > len(both)


def side_by_side(many: list[dict]) -> str:
    """The gains of several results files, those of another machine, say; and of all of their seeds together, unless
    files hold the same runs: a seed that is played again with the same rounding is no further one."""
    numbers, found = range(1, len(many) + 1), [every_gain(Runs(results)) for results in many]
    same = [f"({m}) and ({n}) are the same runs, rounded alike: their seeds are not put together."
            for m, n in combinations(numbers, 2) if begin_alike(many[m - 1], many[n - 1])]
    heads = [*map("({})".format, numbers), *["all"] * (not same)]
    rows = [["", *(cell for head in heads for cell in (f"{head} n", "gain", "p"))]]
    for name in dict.fromkeys(name for gains in found for name in gains):
        columns = [gains.get(name, []) for gains in found]
        columns.append(sum(columns, []))
        rows.append([name, *(cell for gains in columns[:len(heads)]
                             for cell in (str(len(gains)), spread(gains, 1, "+"), p_of(gains)))])
    return "\n".join([
        *(f"({n}) {about(results)}" for n, results in zip(numbers, many, strict=True)), "",
        f"Gains over Interactive GRPO, or the arm named, of n seeds; means over steps 10-{STEPS} unless it is told.",
        "All: the seeds of all files, as if they were independent; those of one file share an SFT checkpoint, and all",
        "share tasks and users", *same, "", grid(rows)])


def outcome(runs: Runs) -> str:
    """Table 2: SFT, Interactive GRPO and FACA in both domains."""
    lines = ["Table 2. Held-out pass@1, %; end: of the last model, 4 dialogues a task, two of them the curve's own"]
    for setting, domain in (("telecom", "tau2:telecom"), ("retail", "tau2:retail")):
        last, column = runs.last_step(setting), list(COLUMNS).index(domain)
        steps = range(10, last + 1, 10)
        rows = [[f"mini:{setting}", "seeds", "step 10", *map(str, steps[1:]), f"mean 10-{last}", "end",
                 f"paper, 8B {COLUMNS[domain]}"],
                ["SFT", "1", *[""] * (len(steps) + 1), spread(list(runs.ends(setting, "SFT").values())),
                 str(TABLE_2["8B SFT"][column])]]
        for arm, name in NAMES.items():
            rows.append([name, str(len(runs.of(setting, arm))), *(mean(runs.at(setting, arm, step=n)) for n in steps),
                         spread(runs.means(setting, arm, upto=last)), spread(list(runs.ends(setting, arm).values())),
                         str(TABLE_2[f"8B {name}"][column])])
        gains = {f"mean 10-{last}": runs.gains(setting, "FACA", upto=last),
                 f"at step {last}": runs.gaps(setting, step=last),
                 "at the end": runs.end_gains(setting)}
        lines += ["", grid(rows), "", *(
            f"FACA - Interactive GRPO, {what}: {spread(each, 1, '+')}, p {p_of(each) or NONE}  "
            f"(seeds: {', '.join(f'{gain:+.1f}' for gain in each)})" for what, each in gains.items()),
            f"the same at the end, 95 % over tasks, seeds pooled: {runs.interval(setting)}"]
    papers = [f"paper, {size}, average of nine domains: "
              + " -> ".join(f"{SPREAD[f'{size} {name}'][0]} ±{SPREAD[f'{size} {name}'][1]}" for name in NAMES.values())
              + f"; by seed {', '.join(f'{gain:+.2f}' for gain in each)}" for size, each in GAINS.items()]
    return "\n".join([*lines, "", *papers])


def beside(runs: Runs, setting: str, arm: str) -> list[str]:
    """Cells under BESIDE of an arm, seeds 0-2; its gain is over Interactive GRPO."""
    gains = runs.gains(setting, arm, THREE)
    return [spread(runs.at(setting, arm, THREE)), spread(runs.means(setting, arm, THREE)),
            *(["", ""] if arm == "GRPO" else [spread(gains, 1, "+"), p_of(gains)])]


def controls(runs: Runs) -> str:
    """Table 4, gains over outcome only, matched by seed."""
    rows = [["mini:telecom", *BESIDE, "update", "paper, 8B Avg", "gain", "tau2 Tel", "gain"]]
    for arm, name in TABLE_4_OF.items():
        papers = [(f"{mine:.2f}", f"{mine - base:+.2f}" if arm != "GRPO" else "")
                  for mine, base in zip(TABLE_4[name], TABLE_4["8B outcome only"], strict=True)]
        rows.append([{"FACA": "lambda 0.5, aligned", "GRPO": "outcome only"}.get(arm, arm),
                     *beside(runs, "telecom", arm), mean(runs.metric("telecom", arm, "update_norm", THREE), ".3f"),
                     *papers[0], *papers[1]])
    return "\n".join([
        "Table 4. Held-out pass@1, %, with credit put out of place, lost, and reversed; seeds 0-2; gains are over",
        f"outcome only. Update: L2 norm of what a step changed in the weights, mean over {STEPS} steps", "",
        grid(rows), "",
        *(f"FACA less {arm}: {spread(less, 1, '+')}, p {p_of(less) or NONE}  "
          f"(seeds: {', '.join(f'{gain:+.1f}' for gain in less)})"
          for arm in ("shifted", "randomized") for less in [runs.gains("telecom", "FACA", THREE, over=arm)])])


def observability(runs: Runs) -> str:
    """The gain beside what a user's reactions can tell."""
    rows = [[f"mean 10-{STEPS}", "seeds", "SFT", "Interactive GRPO", "FACA", "gain", "p", f"gap at {STEPS}", "positive",
             "coverage", "process", "lead", "w/o last"]]
    for setting in ("telecom", "retail", "vague"):
        gains = runs.gains(setting, "FACA")
        rows.append([setting, str(len(gains)), mean(runs.at(setting, "FACA", step=0)),
                     spread(runs.means(setting, "GRPO")), spread(runs.means(setting, "FACA")), spread(gains, 1, "+"),
                     p_of(gains), spread(runs.gaps(setting), 1, "+"), *(
                         mean(runs.metric(setting, "FACA", name), ".3f")
                         for name in ("positive_share", "coverage", "process_share")),
                     *runs.lead(setting, "FACA")])
    told = ", ".join(f"{name} {TABLE_2['8B FACA'][i] - TABLE_2['8B Interactive GRPO'][i]:+.1f}"
                     for i, name in enumerate(COLUMNS.values()) if name.endswith(("Ret", "Tel")))
    return "\n".join([
        "Observability: the gain where the user sees what the agent causes (telecom), where progress hides in tools",
        "(retail), and where a user of the telecom tasks answers every step vaguely. Gap: FACA less Interactive GRPO",
        f"at step {STEPS}; positive: share of reactions; coverage: segments with process advantage; process: its share",
        "of all |A|; lead: how far reactions at one turn point to a prompt's better rollouts, from -1 to +1,",
        "where ties count as 0; w/o last: without the last turn of each dialogue", "",
        grid(rows), "", f"paper, gains of 8B: {told}"])


def telemetry(runs: Runs) -> str:
    """FACA's batches, first against last third of the steps."""
    settings = ("telecom", "retail")
    names = {"success": "training success", "positive_share": "positive reactions / reactions",
             "coverage": "segments with process advantage", "all_correct": "groups all correct",
             "all_wrong": "groups all wrong", "process_share": "process share of L1"}
    rows = [["FACA, % of", "telecom, first", "last", "retail, first", "last", "paper 8B, first", "last"]]
    for name, words in names.items():
        cells = [mean([100 * x for x in runs.metric(setting, "FACA", name, part=part)])
                 for setting in settings for part in ("first", "last")]
        stated = TELEMETRY[name] if name in ("positive_share", "coverage") else ()  # by thirds; the others as a whole
        rows.append([words, *cells, *([f"{x:.2f}" for x in stated] or ["", ""])])

    def overall(name: str) -> str:
        return ", ".join(f"{setting} {mean([100 * x for x in runs.metric(setting, 'FACA', name, part='all')])} %"
                         for setting in settings)
    exceeds = "; ".join(f"{setting} {', '.join(str(run['process_exceeds']) for run in found.values())} of "
                        f"{runs.last_step(setting)}" for setting in settings for found in [runs.of(setting, "FACA")])
    return "\n".join([
        "Telemetry: first against last third of the steps (telecom 60, retail 40), means over seeds", "", grid(rows),
        "",
        "groups all correct or all wrong, all steps: " + overall("constant")
        + "; paper {} % (8B), {} % (14B)".format(*TELEMETRY["homogeneous"]),
        "process share of L1, all steps: " + overall("process_share")
        + "; paper {} %, {} %".format(*TELEMETRY["process_share"]),
        f"steps in which process exceeds outcome: {exceeds}; paper {{}}, {{}} of 120".format(
            *TELEMETRY["process_exceeds"])])


def homogeneous(runs: Runs) -> str:
    """Credit where many outcome groups are constant; and the size of the update."""
    rows = [["", *BESIDE, "constant", "mean |A|", "gradient", "update"]]
    names = {"GRPO": "Interactive GRPO", "dropped": "GRPO, constant dropped", "scaled": "GRPO, scaled to FACA",
             "FACA": "FACA"}
    for setting in ("extremes", "telecom"):
        for arm, words in names.items():
            if setting == "extremes" or arm in NAMES:
                rows.append([f"{setting}: {words}", *beside(runs, setting, arm),
                             mean([100 * x for x in runs.metric(setting, arm, "constant", THREE)], ".0f") + " %",
                             *(mean(runs.metric(setting, arm, name, THREE), ".3f")
                               for name in ("advantage_l1", "grad_norm", "update_norm"))])
    return "\n".join([
        "Homogeneous groups, and the size of the update: share of groups with constant rewards, mean |A| over the",
        "tokens trained on, L2 norms of gradient and of the weights' change, means over 40 steps; seeds 0-2. Dropped",
        "and scaled multiply a step's gradient by a number, which AdamW hardly feels: see the last column", "",
        grid(rows)])


def noise(runs: Runs) -> str:
    """How wrong the labels may be."""
    rows = [["labels turned", *BESIDE, "by seed", "update", "lead", "w/o last"]]
    for share in (0, 10, 30, 50):
        arm = f"noise {share}" if share else "FACA"
        rows.append([f"{share} %", *beside(runs, "telecom", arm),
                     ", ".join(f"{gain:+.1f}" for gain in runs.gains("telecom", arm, THREE)),
                     mean(runs.metric("telecom", arm, "update_norm", THREE), ".3f"),
                     *runs.lead("telecom", arm, THREE)])
    return "\n".join([
        "Noise in the user's labels (not in the paper): FACA on telecom, seeds 0-2. The scripted user knows whether a",
        "step worked, so that with 0 % its labels flatter the method; at 50 % they say nothing", "", grid(rows)])


def cost(runs: Runs) -> str:
    """FACA's step beside Interactive GRPO's."""
    lines = ["Cost of a step: both arms run the same code, on dialogues that differ; FACA's own is the last line", ""]
    for setting in ("telecom", "retail"):
        ours, theirs = (runs.of(setting, arm) for arm in ("FACA", "GRPO"))
        ratios = [ours[s]["step_seconds"] / theirs[s]["step_seconds"] for s in ours if s in theirs]
        lines.append(f"{setting}: FACA's step / Interactive GRPO's, medians, by seed: "
                     f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}; mean {mean(ratios, '.3f')}")
    if credit := runs.results["credit"]:
        step = statistics.fmean(run["step_seconds"] for run in runs.of("telecom", "FACA").values())
        lines.append(f"the advantages of a step's 32 rollouts: outcome alone {1000 * credit['outcome']:.2f} ms, FACA "
                     f"{1000 * credit['faca']:.2f} ms, of a step of {1000 * step:.0f} ms: "
                     f"{100 * (credit['faca'] - credit['outcome']) / step:.2f} % more")
    return "\n".join(lines)


def endpoint(found: dict) -> str:
    """The same run with a user behind an endpoint."""
    rows = [["user on loopback", "rollouts", "void", "segments", "reactions", "invalid", "requests", "faults"]]
    rows += [[arm, *map(str, counts.values())] for arm, counts in found.items()]
    return "\n".join([
        "The JSON protocol over a real endpoint, two steps of each arm. Its user goes by rule and names labels at",
        "random: this shows that requests (of which a user's tool calls take some), labels and counts come through,",
        "and no result", "", grid(rows)])


# ----------------------------------------------------------------------------------------------------------- figure

INK, COLOURS = "#333333", {"FACA": "#c2410c", "GRPO": "#1d4ed8", "paper": "#8a8a8a"}


def digest(results: dict) -> str:
    """Of all figures in it: the picture carries that of the results which it was drawn from."""
    return hashlib.blake2b(json.dumps(results, sort_keys=True).encode(), digest_size=8).hexdigest()


CAPTION = ("Above: mean over seeds, in a band from the lowest seed to the highest. Below: an arm's gain over "
           f"Interactive GRPO in the mean over steps 10-{STEPS},\nmatched by seed: a dot for each (their number in "
           "brackets), a bar for their mean; crosses are gains of the paper's last checkpoints.\nEach panel above has "
           "a scale of its own; below, the last three share one.")


def figure(results: dict, path: Path) -> None:
    """Above, the curves of each setting, in a band from the lowest seed to the highest; below gains, a dot a seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    runs = Runs(results)
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK,
                            "axes.labelcolor": INK, "axes.edgecolor": INK, "legend.frameon": False,
                            "axes.titlesize": 10, "axes.titlelocation": "left"}):
        drawn, axes = pyplot.subplots(2, 4, figsize=(15, 7.6), layout="constrained")
        constant = mean([100 * x for x in runs.metric("extremes", "GRPO", "constant")], ".0f")
        for ax, (setting, title) in zip(axes[0], {
                "telecom": "telecom: the user sees what the agent causes", "retail": "retail: progress hides in tools",
                "vague": "vague: telecom, steps answered vaguely",
                "extremes": f"extremes: {constant} % of groups constant"}.items(), strict=True):
            draw_curves(ax, runs, setting)
            ax.set_title(title)
        axes[0][0].set_ylabel("held-out pass@1, %")
        draw_gains(axes[1][0], "Table 4: credit put elsewhere (log beyond 5)", [
            (words, COLOURS["FACA"], runs.gains("telecom", arm, THREE)) for arm, words in (
                ("FACA", "lambda\n0.5"), ("lambda 0.1", "lambda\n0.1"), ("shifted", "shifted"),
                ("randomized", "random-\nized"), ("lambda -0.5", "lambda\n-0.5"))],
            [TABLE_4[name][1] - TABLE_4["8B outcome only"][1] for arm, name in TABLE_4_OF.items() if arm != "GRPO"])
        axes[1][0].set_yscale("symlog", linthresh=5, linscale=1.5)  # reversed credit would flatten the rest
        axes[1][0].set_ylim(-60, 30)
        axes[1][0].set_yticks(ticks := (-30, -10, -5, -2, 0, 2, 5, 10, 20), map(str, ticks))
        draw_gains(axes[1][1], "by setting", [
            (name, COLOURS["FACA"], runs.gains(name, "FACA")) for name in ("telecom", "retail", "vague", "extremes")])
        draw_gains(axes[1][2], "extremes: FACA, and outcome credit rescaled", [
            (words, COLOURS["FACA" if arm == "FACA" else "GRPO"], runs.gains("extremes", arm, THREE))
            for arm, words in (("FACA", "FACA"), ("scaled", "GRPO, scaled\nto FACA"),
                               ("dropped", "GRPO, constant\ndropped"))])
        draw_gains(axes[1][3], "telecom: share of labels turned", [
            (f"{share} %", COLOURS["FACA"], runs.gains("telecom", f"noise {share}" if share else "FACA", THREE))
            for share in (0, 10, 30, 50)])
        ends = [ax.get_ylim() for ax in axes[1][1:]]
        for ax in axes[1][1:]:  # one scale: the gains are to be compared
            ax.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
        axes[1][0].set_ylabel("gain, points of pass@1")
        drawn.supxlabel(CAPTION, x=0.01, ha="left", fontsize=9)
        drawn.savefig(whole := io.BytesIO(), format="png", dpi=110,
                      metadata={"Description": f"results {digest(results)}"})
        pyplot.close(drawn)
    write_whole(path, whole.getvalue())


def draw_curves(ax, runs: Runs, setting: str) -> None:
    for arm in NAMES:
        curves = [run["curve"] for run in runs.of(setting, arm).values()]
        if not curves:
            continue
        steps = sorted(map(int, curves[0]))
        values = np.array([[100 * curve[str(step)] for step in steps] for curve in curves])
        ax.fill_between(steps, values.min(0), values.max(0), color=COLOURS[arm], alpha=0.15, linewidth=0)
        ax.plot(steps, values.mean(0), color=COLOURS[arm], marker="o" if arm == "FACA" else "s", markersize=4,
                label=f"{NAMES[arm]} ({len(curves)} seed{'s' * (len(curves) > 1)})")
        ax.legend(loc="lower right")
    ax.set_xlabel("RL step")
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)


def draw_gains(ax, title: str, gains: list[tuple[str, str, list[float]]], papers: list[float] = ()) -> None:
    """A column for each (name, colour, gains by seed); the paper's as crosses."""
    for place, (_, colour, each) in enumerate(gains):
        ax.plot([place] * len(each), each, "o", color=colour, alpha=0.45, markersize=5)
        if each:
            ax.plot([place - 0.22, place + 0.22], [statistics.fmean(each)] * 2, color=colour, linewidth=2.5)
    if papers:
        ax.plot(range(len(papers)), papers, "x", color=COLOURS["paper"], markersize=8, markeredgewidth=2,
                label="paper, tau2 Telecom")
        ax.legend(loc="lower left")
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xticks(range(len(gains)), [f"{name}\n({len(each)})" for name, _, each in gains], fontsize=8)
    ax.set_xlim(-0.6, len(gains) - 0.4)
    ax.set_title(title)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
