"""What tests/miniature.py shows of its results: tables of text and one figure, each beside the paper's figures.

A results file holds, for each run "SETTING/ARM-SEED": `curve` {step: held-out pass@1}, means of metrics over `all`, the
`first` and the `last` third of its steps; for some, how far reactions lead to the better rollouts; for each evaluation
at the end, a word for each task, with a 1 for each dialogue that was solved.

Success is in percent. A curve's mean leaves out step 0, where all arms start, and has every tenth step up to 40 unless
another is named. A gain is matched by seed: same SFT checkpoint, same tasks and users, same first rollouts; its p is of
the paired t-test over seeds, two-sided.
"""

import hashlib
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval import bootstrap  # noqa: E402  after the path
from extras.paper import GAINS, SPREAD, TABLE_2, TABLE_4, TELEMETRY  # noqa: E402
from extras.tables import grid, spread  # noqa: E402

TABLE_4_OF = {"FACA": "8B lambda 0.5", "lambda 0.1": "8B lambda 0.1", "GRPO": "8B outcome only",
              "shifted": "8B shifted 0.5", "randomized": "8B randomized 0.5", "lambda -0.5": "8B lambda -0.5"}
UPTO = 40  # the step that settings and arms are compared at, unless another is named
THREE = range(3)  # seeds of all arms but those of Table 2
BESIDE = [f"step {UPTO}", "curve's mean", "its gain", "p"]


# ------------------------------------------------------------------------------------------------------- statistics


def curve_mean(curve: dict, upto: int = UPTO) -> float:
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
    return 1 - 2 * float(np.trapezoid(density, angle))


class Runs:
    """The runs of a results file, asked by setting and arm; percentages."""

    def __init__(self, results: dict):
        self.results = results
        self.by_arm: dict[tuple[str, str], dict[int, dict]] = {}
        for name, run in results["runs"].items():
            setting, _, rest = name.partition("/")
            arm, _, seed = rest.rpartition("-")
            self.by_arm.setdefault((setting, arm.replace("_", " ")), {})[int(seed)] = run

    def of(self, setting: str, arm: str, seeds=None) -> dict[int, dict]:
        runs = self.by_arm[setting, arm]
        return {seed: runs[seed] for seed in sorted(runs) if seeds is None or seed in seeds}

    def means(self, setting: str, arm: str, upto: int = UPTO, seeds=None) -> list[float]:
        return [100 * curve_mean(run["curve"], upto) for run in self.of(setting, arm, seeds).values()]

    def at(self, setting: str, arm: str, step: int = UPTO, seeds=None) -> list[float]:
        return [100 * run["curve"][str(step)] for run in self.of(setting, arm, seeds).values()]

    def gains(self, setting: str, arm: str, measure: str = "means", step: int = UPTO) -> list[float]:
        """Of an arm over Interactive GRPO, for the seeds that both have."""
        seeds = self.of(setting, arm).keys() & self.of(setting, "GRPO").keys()
        ours, theirs = (getattr(self, measure)(setting, name, step, seeds) for name in (arm, "GRPO"))
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    def lead(self, setting: str, arm: str) -> list[str]:
        """Two cells, means over seeds: of all turns, and without the last of each dialogue."""
        found = [each for name, each in self.results["leads"].items()
                 if name.startswith(f"{setting}/{arm.replace(' ', '_')}-")]
        return [f"{statistics.fmean(each[name] for each in found):+.2f}" for name in ("all turns", "all but the last")]

    def mean(self, setting: str, arm: str, name: str, part: str = "all", seeds=None) -> list[float]:
        """Of a metric, by seed; "constant" is of groups whose rewards are all equal."""
        names = ("all_correct", "all_wrong") if name == "constant" else (name,)
        return [sum(run[part][n] for n in names) for run in self.of(setting, arm, seeds).values()]


def gained(gains: list[float]) -> str:
    """Mean, deviation and p."""
    p = paired_t(gains)
    return spread(gains, 1, "+") + ("" if math.isnan(p) else f"  p {p:.3f}")


# ----------------------------------------------------------------------------------------------------------- tables


def tables(results: dict) -> dict[str, str]:
    """Name -> table, in the order of the paper's argument."""
    runs = Runs(results)
    about = results["about"]
    head = (f"{about['date']}, commit {', '.join(about['commits'])}, torch {about['torch']}, {about['cores']} cores: "
            f"{about['runs']} runs of RL in {about['minutes']:.0f} minutes")
    return {"about": head, "outcome": outcome(runs), "controls": controls(runs), "observability": observability(runs),
            "telemetry": telemetry(runs), "homogeneous": homogeneous(runs), "noise": noise(runs), "cost": cost(runs),
            "endpoint": endpoint(results["endpoint"])}


def outcome(runs: Runs) -> str:
    """Table 2: SFT, Interactive GRPO and FACA in both domains."""
    parts = []
    for setting, paper, last in (("telecom", 4, last_step(runs, "telecom")), ("retail", 3, last_step(runs, "retail"))):
        ends = {name: end_shares(runs.results, setting, name) for name in ("GRPO", "FACA")}
        sft = end_shares(runs.results, setting, "sft")
        rows = [[f"mini:{setting}", "seeds", "step 10", *map(str, range(20, last + 1, 10)), "curve's mean",
                 f"end, {dialogues(runs.results, setting)} dialogues", "paper, 8B"],
                ["SFT", "1", *[""] * (last // 10), "", spread(list(sft.values())), str(TABLE_2["8B SFT"][paper])]]
        for arm, name in (("GRPO", "Interactive GRPO"), ("FACA", "FACA")):
            rows.append([name, str(len(ends[arm])), *(f"{statistics.fmean(runs.at(setting, arm, step)):.1f}"
                                                      for step in range(10, last + 1, 10)),
                         spread(runs.means(setting, arm, last)), spread(list(ends[arm].values())),
                         str(TABLE_2[f"8B {name}"][paper])])
        gains = {"over the curve": runs.gains(setting, "FACA", "means", last),
                 "at the end": [ends["FACA"][s] - ends["GRPO"][s] for s in ends["FACA"]]}
        low, high = task_interval(runs.results, setting)
        parts.append("\n".join([grid(rows), "", *(
            f"FACA - Interactive GRPO {what}: {gained(each)}  (seeds: {', '.join(f'{g:+.1f}' for g in each)})"
            for what, each in gains.items()),
            f"the same at the end, 95 % over tasks, seeds pooled: {100 * low:+.1f} to {100 * high:+.1f}"]))
    papers = [f"paper, {size}, average of nine domains: "
              + " -> ".join(f"{SPREAD[f'{size} {name}'][0]} ±{SPREAD[f'{size} {name}'][1]}"
                            for name in ("Interactive GRPO", "FACA"))
              + f"; by seed {', '.join(f'{gain:+.2f}' for gain in each)}" for size, each in GAINS.items()]
    return "\n".join(["Table 2. Held-out pass@1, %. Paper, 8B: tau2 Telecom, tau2 Retail", "", "\n\n".join(parts), "",
                      *papers])


def last_step(runs: Runs, setting: str) -> int:
    return max(int(step) for step in runs.of(setting, "FACA")[0]["curve"])


def end_shares(results: dict, setting: str, arm: str) -> dict[int, float]:
    """Seed -> percentage of dialogues solved by the models at the end; of SFT as seed 0."""
    found = {}
    for name, flags in results["results"].items():
        if name == f"{setting}/{arm}" or name.startswith(f"{setting}/{arm}-"):
            solved, failed = flags.count("1"), flags.count("0")
            found[int(name.rpartition("-")[2]) if "-" in name else 0] = 100 * solved / (solved + failed)
    return dict(sorted(found.items()))


def dialogues(results: dict, setting: str) -> int:
    return len(results["results"][f"{setting}/sft"].replace(" ", ""))


def task_interval(results: dict, setting: str) -> tuple[float, float]:
    """95 % interval of FACA - Interactive GRPO over tasks, the dialogues of all seeds pooled."""
    pairs = {}
    for name, ours in results["results"].items():
        if name.startswith(f"{setting}/FACA-"):
            theirs = results["results"][name.replace("FACA", "GRPO")]
            pairs |= {(task, (name, k)): (a == "1", b == "1")
                      for task, words in enumerate(zip(ours.split(), theirs.split(), strict=True))
                      for k, (a, b) in enumerate(zip(*words, strict=True))}
    return bootstrap(pairs, 0)


def beside(runs: Runs, setting: str, arm: str) -> list[str]:
    """Cells of an arm, seeds 0-2: success at UPTO, the curve's mean, its gain over Interactive GRPO, and p."""
    cells = [spread(runs.at(setting, arm, seeds=THREE)), spread(runs.means(setting, arm, seeds=THREE))]
    gains = runs.gains(setting, arm)[:3]
    return [*cells, *(["", ""] if arm == "GRPO" else [spread(gains, 1, "+"), f"{paired_t(gains):.3f}"])]


def controls(runs: Runs) -> str:
    """Table 4, gains over outcome only, matched by seed."""
    rows = [["mini:telecom", *BESIDE, "paper, Avg", "gain", "tau2 Tel", "gain"]]
    for arm, name in TABLE_4_OF.items():
        papers = [(f"{mine:.2f}", f"{mine - base:+.2f}" if arm != "GRPO" else "")
                  for mine, base in zip(TABLE_4[name], TABLE_4["8B outcome only"], strict=True)]
        rows.append([{"FACA": "lambda 0.5, aligned", "GRPO": "outcome only"}.get(arm, arm),
                     *beside(runs, "telecom", arm), *papers[0], *papers[1]])
    return "Table 4. Credit put out of place, lost, and reversed; seeds 0-2\n\n" + grid(rows)


def observability(runs: Runs) -> str:
    """The gain beside what a user's reactions can tell."""
    rows = [["curve's mean", "seeds", "SFT", "Interactive GRPO", "FACA", "gain", "p", "positive", "coverage",
             "process", "lead", "but last"]]
    for setting in ("telecom", "retail", "vague"):
        gains = runs.gains(setting, "FACA")
        rows.append([setting, str(len(gains)), f"{statistics.fmean(runs.at(setting, 'FACA', 0)):.1f}",
                     spread(runs.means(setting, "GRPO")), spread(runs.means(setting, "FACA")), spread(gains, 1, "+"),
                     f"{paired_t(gains):.3f}", *(f"{statistics.fmean(runs.mean(setting, 'FACA', name)):.3f}"
                                                 for name in ("positive_share", "coverage", "process_share")),
                     *runs.lead(setting, "FACA")])
    return "\n".join([
        "Observability: the gain where the user sees what the agent causes (telecom), where progress hides in tools",
        "(retail), and where a user of the telecom tasks answers every step vaguely. Lead: how far reactions point to",
        "the better rollouts of a prompt, from -1 to +1; but last: without the last turn of each dialogue", "",
        grid(rows)])


def telemetry(runs: Runs) -> str:
    """FACA's batches, first against last third of the steps."""
    names = {"success": "training success", "positive_share": "positive reactions / reactions",
             "coverage": "segments with process advantage", "all_correct": "groups all correct",
             "all_wrong": "groups all wrong", "process_share": "process share of L1"}
    rows = [["FACA, % of", "telecom, first", "last", "retail, first", "last", "paper, first", "last"]]
    for name, words in names.items():
        cells = [f"{100 * statistics.fmean(runs.mean(setting, 'FACA', name, part)):.1f}"
                 for setting in ("telecom", "retail") for part in ("first", "last")]
        stated = TELEMETRY[name] if name in ("positive_share", "coverage") else ()  # by thirds; the others as a whole
        rows.append([words, *cells, *([f"{x:.2f}" for x in stated] or ["", ""])])
    def overall(name: str) -> str:
        return ", ".join(f"{setting} {100 * statistics.fmean(runs.mean(setting, 'FACA', name)):.1f} %"
                         for setting in ("telecom", "retail"))
    exceeds = "; ".join(f"{setting} {', '.join(str(run['process_exceeds']) for run in found.values())} of {last}"
                        for setting in ("telecom", "retail")
                        for found, last in [(runs.of(setting, "FACA"), last_step(runs, setting))])
    lines = ["groups all correct or all wrong, all steps: " + overall("constant")
             + "; paper {} % (8B), {} % (14B)".format(*TELEMETRY["homogeneous"]),
             "process share of L1, all steps: " + overall("process_share")
             + "; paper {} %, {} %".format(*TELEMETRY["process_share"]),
             f"steps in which process exceeds outcome: {exceeds}; paper {{}}, {{}} of 120".format(
                 *TELEMETRY["process_exceeds"])]
    return "\n".join(["Telemetry: first against last third of the steps, means over seeds", "", grid(rows), "", *lines])


def homogeneous(runs: Runs) -> str:
    """Credit where most outcome groups are constant; or is it a larger update?"""
    rows = [["", *BESIDE, "constant", "mean |A|", "gradient", "update"]]
    names = {"GRPO": "Interactive GRPO", "dropped": "GRPO, constant dropped", "scaled": "GRPO, scaled to FACA",
             "FACA": "FACA"}
    for setting in ("extremes", "telecom"):
        for arm, words in names.items():
            if (setting, arm) == ("telecom", "dropped"):
                continue
            constant, *sizes = (statistics.fmean(runs.mean(setting, arm, name, seeds=THREE)) for name in (
                "constant", "advantage_l1", "grad_norm", "update_norm"))
            rows.append([f"{setting}: {words}", *beside(runs, setting, arm), f"{100 * constant:.0f} %",
                         *(f"{size:.3f}" for size in sizes)])
    return ("Homogeneous groups, and the size of the update: share of groups with constant rewards, mean |A| over\n"
            "tokens, L2 norms of gradient and of the weights' change, means over steps; seeds 0-2\n\n" + grid(rows))


def noise(runs: Runs) -> str:
    """How wrong the labels may be."""
    rows = [["labels turned", *BESIDE, "by seed", "lead", "but last"]]
    for share in (0, 10, 30, 50):
        arm = f"noise {share}" if share else "FACA"
        rows.append([f"{share} %", *beside(runs, "telecom", arm),
                     ", ".join(f"{gain:+.1f}" for gain in runs.gains("telecom", arm)[:3]),
                     *runs.lead("telecom", arm)])
    return "Noise in the user's labels (not in the paper): FACA on telecom, seeds 0-2\n\n" + grid(rows)


def cost(runs: Runs) -> str:
    """FACA's step beside Interactive GRPO's."""
    lines = []
    for setting in ("telecom", "retail"):
        both = {arm: runs.of(setting, arm) for arm in ("FACA", "GRPO")}
        ratios = [both["FACA"][s]["step_seconds"] / both["GRPO"][s]["step_seconds"] for s in both["FACA"]]
        lines.append(f"{setting}: FACA's step / Interactive GRPO's, medians, by seed: "
                     + ", ".join(f"{ratio:.2f}" for ratio in ratios) + f"; mean {statistics.fmean(ratios):.3f}")
    credit = runs.results["credit"]["FACA"]
    step = statistics.fmean(run["step_seconds"] for run in runs.of("telecom", "FACA").values())
    return "Cost of a step\n\n" + "\n".join([*lines, (
        f"the advantages of a step's 32 rollouts: outcome alone {1000 * credit['outcome']:.2f} ms, FACA "
        f"{1000 * credit['faca']:.2f} ms, of a step of {1000 * step:.0f} ms: "
        f"{100 * (credit['faca'] - credit['outcome']) / step:.2f} % more")])


def endpoint(found: dict) -> str:
    """The same run with a user behind an endpoint."""
    rows = [["user on loopback", "rollouts", "void", "segments", "reactions", "invalid", "requests", "faults"]]
    rows += [[arm, *(str(value) for value in counts.values())] for arm, counts in found.items()]
    return ("The JSON protocol over a real endpoint, two steps of each arm; its user names labels at random: a check,\n"
            "no result\n\n" + grid(rows))


# ----------------------------------------------------------------------------------------------------------- figure

INK, COLOURS = "#333333", {"FACA": "#c2410c", "GRPO": "#1d4ed8", "paper": "#8a8a8a"}
NAMES = {"GRPO": "Interactive GRPO", "FACA": "FACA"}


def digest(results: dict) -> str:
    """Of all figures in it: the picture carries that of the results which it was drawn from."""
    return hashlib.blake2b(json.dumps(results, sort_keys=True).encode(), digest_size=8).hexdigest()


def figure(results: dict, path: Path) -> None:
    """Above, the curves of each setting, in a band from the lowest seed to the highest; below gains, a dot a seed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    runs = Runs(results)
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK,
                            "axes.labelcolor": INK, "axes.edgecolor": INK, "legend.frameon": False,
                            "axes.titlesize": 10, "axes.titlelocation": "left"}):
        drawn, axes = pyplot.subplots(2, 4, figsize=(15, 7.2), layout="constrained")
        for ax, (setting, title) in zip(axes[0], {
                "telecom": "telecom: the user sees what the agent causes", "retail": "retail: progress hides in tools",
                "vague": "vague: telecom, steps answered vaguely", "extremes": "extremes: most groups are constant",
                }.items(), strict=True):
            draw_curves(ax, runs, setting)
            ax.set_title(title)
        axes[0][0].set_ylabel("held-out pass@1, %")
        axes[0][0].legend(loc="lower right")
        draw_controls(axes[1][0], runs)
        draw_gains(axes[1][1], "gain over outcome only, by setting", [
            (setting, runs.gains(setting, "FACA")) for setting in ("telecom", "retail", "vague", "extremes")])
        draw_gains(axes[1][2], "credit, or just a larger update?", [
            ("telecom,\nFACA", runs.gains("telecom", "FACA")), ("telecom,\nscaled", runs.gains("telecom", "scaled")),
            ("extremes,\nFACA", runs.gains("extremes", "FACA")),
            ("extremes,\nscaled", runs.gains("extremes", "scaled")),
            ("extremes,\ndropped", runs.gains("extremes", "dropped"))])
        draw_gains(axes[1][3], "labels turned", [
            (f"{share} %", runs.gains("telecom", f"noise {share}" if share else "FACA")[:3])
            for share in (0, 10, 30, 50)])
        for ax in axes[1]:
            ax.axhline(0, color=INK, linewidth=0.8)
        axes[1][0].set_ylabel("points of pass@1, mean over the curve")
        drawn.savefig(path, dpi=110, metadata={"Description": f"results {digest(results)}"})
        pyplot.close(drawn)


def draw_curves(ax, runs: Runs, setting: str) -> None:
    for arm in ("GRPO", "FACA"):
        curves = [run["curve"] for run in runs.of(setting, arm).values()]
        steps = sorted(map(int, curves[0]))
        values = np.array([[100 * curve[str(step)] for step in steps] for curve in curves])
        ax.fill_between(steps, values.min(0), values.max(0), color=COLOURS[arm], alpha=0.15, linewidth=0)
        ax.plot(steps, values.mean(0), color=COLOURS[arm], marker="o" if arm == "FACA" else "s", markersize=4,
                label=f"{NAMES[arm]} ({len(curves)} seeds)")
    ax.set_xlabel("RL step")
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)


def draw_controls(ax, runs: Runs) -> None:
    """Ours as dots by seed, the paper's tau2 Telecom as crosses on an axis of its own: its gains are larger."""
    arms = [arm for arm in TABLE_4_OF if arm != "GRPO"]
    names = {"FACA": "lambda\n0.5", "lambda 0.1": "lambda\n0.1", "lambda -0.5": "lambda\n-0.5",
             "randomized": "random-\nized"}
    draw_gains(ax, "Table 4: gain over outcome only", [(names.get(arm, arm), runs.gains("telecom", arm)[:3])
                                                       for arm in arms])
    right = ax.twinx()
    base = TABLE_4["8B outcome only"][1]
    right.plot(range(len(arms)), [TABLE_4[TABLE_4_OF[arm]][1] - base for arm in arms], "x", color=COLOURS["paper"],
               markersize=8, markeredgewidth=2, label="paper, tau2 Telecom (right axis)")
    right.legend(loc="lower left")
    low, high = ax.get_ylim()
    top = max(abs(low), abs(high)) * 1.05
    ax.set_ylim(-top, top)
    right.set_ylim(-20, 20)  # 0 at the same height
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=COLOURS["paper"])


def draw_gains(ax, title: str, gains: list[tuple[str, list[float]]]) -> None:
    for place, (_, each) in enumerate(gains):
        ax.plot([place] * len(each), each, "o", color=COLOURS["FACA"], alpha=0.45, markersize=5)
        ax.plot([place - 0.22, place + 0.22], [statistics.fmean(each)] * 2, color=COLOURS["FACA"], linewidth=2.5)
    ax.set_xticks(range(len(gains)), [name for name, _ in gains], fontsize=8)
    ax.set_xlim(-0.6, len(gains) - 0.4)
    ax.set_title(title)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
