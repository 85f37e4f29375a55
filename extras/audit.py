"""Can the simulator's private labels be trusted in this run? One page of text, and the alarm that training rings.

The reaction f to a segment (Table 1) is a proxy: it is cheap and comes at once, and nothing verifies it. What can be
known of it afterwards is here: whether it goes with the verified reward, at which turn, and whether within a prompt it
points to the rollouts that won, which is all that the process advantage (Eq. 5) asks of it; how often it was +1 before
a failure; and whether a second model, reading the same words, gives the same labels (Cohen 1960: kappa). Everything
is computed from a run's rollouts/ and metrics.jsonl, or from the results.jsonl of an evaluation; of what was said
nothing is printed. Chosen here: every figure but those of section 4, the groups of turns, and thirds of the steps.
"""

import asyncio
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from statistics import correlation, fmean, stdev

from tqdm import tqdm

from extras.alarm import STANDARD_ERRORS, WINDOW, proxy_alarm
from extras.endpoint import Endpoint
from extras.labeller import ask, kappa, visible
from extras.ranks import UsageError
from extras.runs import is_number
from extras.show import RolloutFileError, read_rollouts
from faca import REACTION, reaction_of
from rollout import Rollout
from simulator import SimulatorError


class AuditError(UsageError):
    """What cannot be audited; the message is one line that says why."""


# ------------------------------------------------------------------------------------------------------ statistics


def pearson(x: list[float], y: list[float]) -> float | None:
    """Pearson's correlation, which is phi where both have two values; None where one is constant."""
    return correlation(x, y) if min(len(set(x)), len(set(y))) > 1 else None


def interval(r: float, n: int) -> tuple[float, float] | None:
    """95 % interval of a correlation of n independent pairs (Fisher's z); None for n < 4, or where r is 1 or -1."""
    if n < 4 or abs(r) >= 1:
        return None
    z, error = math.atanh(r), 1 / math.sqrt(n - 3)
    return math.tanh(z - 1.96 * error), math.tanh(z + 1.96 * error)


# --------------------------------------------------------------------------------------------------------- reading


@dataclass(slots=True)
class Facts:
    """What is kept of a rollout."""

    step: int
    group: int
    reward: float
    labels: tuple[str | None, ...]     # (Q,) of the user turn after each segment, None where none followed
    reactions: tuple[int | None, ...]  # (Q,) Table 1

    @property
    def failed(self) -> bool:
        return self.reward == 0

    @property
    def answered(self) -> list[int]:
        """The segments that a user turn followed."""
        return [q for q, f in enumerate(self.reactions) if f is not None]


@dataclass
class Reading:
    """Everything the page is made of."""

    folder: Path
    options: dict       # config.json of a run, run.json of results
    rows: list[dict]    # of metrics.jsonl in the RL phase; none for results
    valid: list[Facts]
    void: Counter       # rollouts without a result, by how they broke off
    torn: int           # last lines that were being written
    sample: list[tuple[str, str]]  # (label, the visible dialogue up to that turn)
    spans: dict[str, range]        # thirds of the steps, none for results

    def parts(self) -> dict[str, list[Facts]]:
        """The valid rollouts, all and by thirds of the run's steps."""
        return {"all": self.valid} | {name: [f for f in self.valid if f.step in span]
                                      for name, span in self.spans.items()}


def read(folder: Path, sample: int, seed: int) -> Reading:
    """A run folder or a results folder, one rollout at a time. Raises AuditError for anything else."""
    steps = {int(found[1]): path for path in sorted(folder.glob("rollouts/step-*.jsonl"))
             if (found := re.fullmatch(r"step-(\d+)\.jsonl", path.name))}
    results = folder / "results.jsonl"
    files = steps or ({0: results} if results.is_file() else {})
    if not files:
        raise AuditError(f"{folder} has nothing to audit: neither rollouts/step-*.jsonl, as a run of train.py with "
                         "--method faca or grpo has, nor the results.jsonl of an evaluation")
    rows, torn = read_metrics(folder / "metrics.jsonl") if steps else ([], 0)
    options = read_options(folder / ("config.json" if steps else "run.json"))
    out = Reading(folder, options, rows, [], Counter(), torn, [], thirds(steps))
    rng, turns, ends = random.Random(seed), 0, []
    with tqdm(desc="reading", unit=" rollouts", dynamic_ncols=True, mininterval=1, delay=2) as bar:
        for number, (step, path) in enumerate(sorted(files.items()), 1):
            bar.set_postfix_str(f"file {number} of {len(files)}", refresh=False)
            for record in rollouts_of(path, ends):
                bar.update()
                if record.void:
                    out.void[record.stop] += 1
                    continue
                out.valid.append(facts := facts_of(record, step, path))
                for q in [q for q in facts.answered if facts.labels[q] != "invalid"] if sample else ():
                    turns += 1  # a reservoir: each turn is as likely to end up in it
                    place = len(out.sample) if len(out.sample) < sample else rng.randrange(turns)
                    if place < sample:
                        out.sample[place:place + 1] = [(facts.labels[q], dialogue_of(record, q, path))]
    out.torn += len(ends)
    if not any(facts.answered for facts in out.valid):
        raise AuditError(f"{folder} has nothing to audit: {len(out.valid)} rollouts have a result, {out.void.total()} "
                         "are void, and no segment is followed by a user turn with a label")
    return out


def rollouts_of(path: Path, torn: list[Path]) -> Iterator[Rollout]:
    """The rollouts of a file. A last line without its end was being written: it is left out, and its file noted."""
    whole = 0
    try:
        for record in read_rollouts(path):
            whole += 1
            yield record
    except RolloutFileError as error:
        try:
            with path.open("rb") as file:
                lines = [line.endswith(b"\n") for line in file]
        except OSError:
            lines = []
        if lines != [True] * whole + [False]:
            raise AuditError(str(error)) from None
        torn.append(path)


def facts_of(record: Rollout, step: int, path: Path) -> Facts:
    labels = tuple(z if z is None or z in REACTION else "invalid" for z in record.strategies)
    reactions = tuple(None if z is None else reaction_of(z) for z in labels)
    if tuple(record.reactions) != reactions or not is_number(record.reward):
        raise AuditError(f"{path}: group {record.group}, rollout {record.k} has reactions that are not Table 1's of "
                         "its strategies, or a reward that is no number")
    return Facts(step, record.group, record.reward, labels, reactions)


def dialogue_of(record: Rollout, q: int, path: Path) -> str:
    try:
        return visible(record, q)
    except ValueError as error:
        raise AuditError(f"{path}: group {record.group}, rollout {record.k}: {error}") from None


def read_metrics(path: Path) -> tuple[list[dict], int]:
    """The rows of the RL phase, and 1 if the last line was still being written."""
    needed = ("step", "success", "positive_share", "coverage", "segments", "groups_correct", "groups_wrong",
              "groups_mixed", "process_share")
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not line.endswith("\n"):
                return rows, 1
            row = None
        if not isinstance(row, dict) or "phase" not in row:
            raise AuditError(f"{path}: line {number} is no row of metrics")
        if row["phase"] == "rl":
            if wrong := [name for name in needed if not is_number(row.get(name))
                         or name == "step" and not isinstance(row[name], int)]:
                raise AuditError(f"{path}: line {number} is no row of RL (no number: {', '.join(wrong)})")
            rows.append(row)
    return rows, 0


def read_options(path: Path) -> dict:
    """What was run; {} where the file is not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise AuditError(f"{path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise AuditError(f"{path} is no JSON object of options")
    return found


def thirds(steps: Iterable[int]) -> dict[str, range]:
    """Three parts of the steps, as equal as can be, by name: {"0-39": range(0, 40), ...}; none of fewer than three."""
    steps = sorted(steps)
    n = len(steps)
    cuts = [steps[n * i // 3:n * (i + 1) // 3] for i in range(3)] if n >= 3 else []
    return {f"{part[0]}-{part[-1]}": range(part[0], part[-1] + 1) for part in cuts}


# -------------------------------------------------------------------------------------------------------- the page


def audit(folder: Path, endpoint: Endpoint | None, sample: int, seed: int) -> str:
    """The page for a run folder of train.py or a results folder of eval.py, at most 100 columns wide.

    endpoint: of the second labeller, or None for none; sample: how many user turns it labels, drawn by the seed.
    Raises AuditError, one line, for a folder or a file that can't be audited, and where the endpoint refuses.
    """
    second = []
    try:
        if endpoint:
            if sample < 1:
                raise AuditError(f"a second labeller needs a sample of at least 1 user turn, not {sample}")
            endpoint.check()
        reading = read(Path(folder), sample if endpoint else 0, seed)
        if endpoint:
            second = asyncio.run(ask([dialogue for _, dialogue in reading.sample], endpoint))
    except SimulatorError as error:
        raise AuditError(str(error)) from None
    sections = [heading(reading), shares(reading), against_reward(reading), before_failure(reading), credit(reading),
                faults(reading), alarm(reading),
                agreement(reading.sample, second, endpoint, seed) if endpoint else
                ["7  A SECOND LABELLER: not asked (--second-labeller MODEL --simulator-url URL)"]]
    return "\n\n".join("\n".join(lines) for lines in sections)


def grid(columns: Iterable[str], rows: list[tuple[str, list[str]]], width: int = 9) -> list[str]:
    """Cells flush right under their columns, each row after its name."""
    left = 1 + max(len(name) for name, _ in rows)
    return [f"{name:{left}}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in [("", columns), *rows]]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def signed(x: float | None) -> str:
    return "-" if x is None else f"{x:+.2f}"


def heading(reading: Reading) -> list[str]:
    valid, void = reading.valid, reading.void.total()
    lines = [f"Audit of {reading.folder}: can the simulator's labels be trusted here?",
             f"user: {reading.options.get('simulator', 'not known')}; rollouts: {len(valid):,} "
             f"and {void:,} void ones, left out below;",
             f"segments: {sum(len(f.labels) for f in valid):,}; followed by a user turn: "
             f"{sum(len(f.answered) for f in valid):,}"]
    if reading.torn:
        lines.append(f"last lines that were being written or were cut off, left out: {reading.torn}")
    groups, mean, error = lead(valid, EVERY["all turns"])
    says = ("can't be judged: fewer than two groups have winners and losers" if groups < 2 else
            "point to the rollouts that win" if mean > 2 * error else
            "point to the rollouts that lose" if mean < -2 * error else "do not tell winners from losers")
    return [*lines, f"In short: within a prompt, reactions {says}"
            + (f" (lead {mean:+.2f} +- {error:.2f}, section 2)" if groups > 1 else "")]


TURNS = {"turn 1": range(1), "turn 2": range(1, 2), "turn 3-4": range(2, 4), "turn 5+": range(4, 10**9)}
Where = Callable[[int, int], bool]  # (segment, the last one that was answered) -> whether it belongs
EVERY: dict[str, Where] = {name: lambda q, last, turns=turns: q in turns for name, turns in TURNS.items()} | {
    "all turns": lambda q, last: True, "all but the last": lambda q, last: q < last}


def shares(reading: Reading) -> list[str]:
    parts = reading.parts()
    columns = [[(f, q) for f in reading.valid for q in f.answered if q in turns] for turns in TURNS.values()]
    columns += [[(f, q) for f in part for q in f.answered] for part in parts.values()]
    labels = [Counter(f.labels[q] for f, q in column) for column in columns]
    signs = [Counter(f.reactions[q] for f, q in column) for column in columns]
    rows = [(f"{label} ({reaction_of(label):+})".replace("+0", "0"), [share(c[label], c.total()) for c in labels])
            for label in (*REACTION, "invalid")]
    rows += [(f"all of {sign}", [share(c[int(sign)], c.total()) for c in signs]) for sign in ("+1", "-1")]
    return ["1  WHAT USERS SAY THEY DO: share of each label (its reaction) among the user turns of a column.",
            "Turn n is the answer to the agent's n-th segment (the opening is none); then all; then by steps.",
            "Paper, 8B: all of +1 is 69.95% in the first 40 of 120 steps, 82.51% in the last 40.",
            *grid([*TURNS, *parts], [*rows, ("user turns", [f"{c.total():,}" for c in labels])])]


def chosen(f: Facts, where: Where) -> dict[int, int]:
    """Segment -> reaction, of those that belong."""
    answered = f.answered
    return {q: f.reactions[q] for q in answered if where(q, answered[-1])}


def mean_reactions(facts: list[Facts], where: Where) -> tuple[list[float], list[float]]:
    """For each rollout that has such turns: the mean of their reactions; its reward."""
    pairs = [(fmean(found.values()), f.reward) for f in facts if (found := chosen(f, where))]
    return [x for x, _ in pairs], [y for _, y in pairs]


def lead(facts: list[Facts], where: Where) -> tuple[int, float, float]:
    """How far reactions point to the winners within a prompt: (groups, mean, standard error of the mean).

    Of two rollouts of a group with unlike rewards that a user answered at the same segment, the sign of (reaction of
    the better one - of the worse one); its mean over such pairs is a group's lead, from -1 to +1. NaN for no group,
    the error also for one.
    """
    groups, leads = {}, []
    for f in facts:
        groups.setdefault((f.step, f.group), []).append((f.reward, chosen(f, where)))
    for group in groups.values():
        signs = []
        for (low, worse), (high, better) in combinations(sorted(group, key=lambda pair: pair[0]), 2):
            if low < high:
                signs += [(better[q] > worse[q]) - (better[q] < worse[q]) for q in better.keys() & worse.keys()]
        leads += [fmean(signs)] if signs else []
    n = len(leads)
    return n, fmean(leads) if n else math.nan, stdev(leads) / math.sqrt(n) if n > 1 else math.nan


def against_reward(reading: Reading) -> list[str]:
    rows = []
    wanted = [(name, reading.valid, where) for name, where in EVERY.items()]
    wanted += [(f"all turns, steps {name}", reading.parts()[name], EVERY["all turns"]) for name in reading.spans]
    for name, facts, where in wanted:
        x, y = mean_reactions(facts, where)
        r = pearson(x, y)
        bounds = None if r is None else interval(r, len(x))
        groups, mean, error = lead(facts, where)
        rows.append((name, [f"{len(x):,}", signed(r), "{:+.2f} {:+.2f}".format(*bounds) if bounds else "-",
                            f"{groups:,}", signed(mean) if groups else "-", f"{error:.2f}" if groups > 1 else "-"]))
    return ["2  REACTION AGAINST FINAL REWARD (the paper gives no figure)",
            "r: correlation over rollouts of the mean reaction in those turns with the reward (Pearson; phi where",
            "both have two values; - where one is constant). 95%: its interval, as if rollouts were independent.",
            "lead: of two rollouts of one prompt with unlike rewards, both answered at the same turn, how often",
            "the better one had the better reaction, less how often the worse one had: mean over groups, and its",
            "standard error. 0: reactions don't tell who wins; +1: always right, as process advantage hopes.",
            *grid(["rollouts", "r", "95%", "groups", "lead", "+-"], rows, 12)]


def before_failure(reading: Reading) -> list[str]:
    parts = reading.parts().values()

    def of_failed(keep: Callable[[Facts, int], bool]) -> list[str]:
        turns = [[f.failed for f in part for q in f.answered if keep(f, q)] for part in parts]
        return [share(sum(column), len(column)) for column in turns]

    def last(failed: bool, keep: Callable[[Facts, int], bool]) -> list[str]:
        ends = [[keep(f, f.answered[-1]) for f in part if f.failed == failed and f.answered] for part in parts]
        return [share(sum(column), len(column)) for column in ends]

    rows = [("turns with +1: those in failed rollouts", of_failed(lambda f, q: f.reactions[q] == 1)),
            *((f"    {label}", of_failed(lambda f, q, label=label: f.labels[q] == label))
              for label in ("confirm", "close", "reveal_piece")),
            ("any turns, for comparison: those in failed rollouts", of_failed(lambda f, q: True)),
            ("failed rollouts: those whose last reaction was +1", last(True, lambda f, q: f.reactions[q] == 1)),
            *((f"    {label}", last(True, lambda f, q, label=label: f.labels[q] == label))
              for label in ("confirm", "close")),
            ("won rollouts: those whose last reaction was -1", last(False, lambda f, q: f.reactions[q] == -1)),
            ("rollouts: those that failed", [share(sum(f.failed for f in part), len(part)) for part in parts])]
    return ["3  POSITIVE REACTIONS BEFORE A FAILURE (failed: reward 0; won: above 0), all and by steps",
            *grid(reading.parts(), rows)]


def credit(reading: Reading) -> list[str]:
    title = "4  CREDIT, from metrics.jsonl"
    if not reading.rows:
        return [f"{title}: no row of RL there (an evaluation has none)"]
    spans = {"all": range(10**9)} | reading.spans
    parts = [[row for row in reading.rows if row["step"] in span] for span in spans.values()]
    kinds = [[sum(r[f"groups_{kind}"] for r in part) for kind in ("correct", "wrong", "mixed")] for part in parts]
    covered = [share(sum(r["coverage"] * r["segments"] for r in part), sum(r["segments"] for r in part))
               for part in parts]

    def mean(name: str) -> list[str]:
        return [share(sum(r[name] for r in part), len(part)) for part in parts]

    return [f"{title}, all and by steps; [the paper's figures]",
            *grid(spans, [
                ("success: mean reward, mean over steps", mean("success")),
                ("coverage: segments whose A^p is not 0 [86.16% -> 82.50%]", covered),
                ("groups with equal rewards [39.27% 8B, 31.04% 14B]", [share(c + w, c + w + m) for c, w, m in kinds]),
                ("    all correct [rises]", [share(c, c + w + m) for c, w, m in kinds]),
                ("    all wrong [falls]", [share(w, c + w + m) for c, w, m in kinds]),
                ("process share of L1, mean over steps [36.00%, 33.79%]", mean("process_share")),
                ("steps where it is above 50% [6 and 1 of 120]",
                 [f"{sum(r['process_share'] > 0.5 for r in part)}" for part in parts])])]


def faults(reading: Reading) -> list[str]:
    turns = sum(len(f.answered) for f in reading.valid)
    invalid = sum(z == "invalid" for f in reading.valid for z in f.labels)
    void = ", ".join(f"{stop} {n}" for stop, n in sorted(reading.void.items()))
    lines = ["5  WHAT WENT WRONG WITH THE USER",
             f"invalid labels (missing, unknown, malformed; reaction 0): {invalid:,}, {share(invalid, turns)} of turns",
             f"void rollouts (user or world failed, after retries): {reading.void.total():,}" + (void and f" ({void})")]
    total = Counter()
    for row in reading.rows:
        total.update({name: x for name, x in row.items() if isinstance(x, int)})
    if requests := total["simulator/requests"]:
        models = sorted({m for row in reading.rows for key in ("simulator/model", "simulator/judge")
                         for m in str(row.get(key, "")).split(", ") if m})
        lines += [f"void tries that were played again: {total['void_retried']:,}",
                  "replies asked for once more, blank or malformed (asked_again): "
                  f"{total['simulator/asked_again']:,} of {requests:,} requests",
                  "places where an utterance told its label, cut (strategy_in_text): "
                  f"{total['simulator/strategy_in_text']:,}",
                  f"models that answered: {', '.join(models)}; changes: {total['simulator/model_changes']:,}"]
    else:
        lines.append("asked_again, strategy_in_text: " + (
            "none, for no model was asked" if reading.rows else "not in the results of an evaluation"))
    return lines


def alarm(reading: Reading) -> list[str]:
    title, rows = "6  ALARM: positive reactions rise while success falls, as where the proxy is gamed", reading.rows
    if len(rows) < 2 * WINDOW:
        return [title, f"can't tell: that takes {2 * WINDOW} steps of RL, and there are {len(rows)}"]
    on = [row["step"] for n, row in enumerate(rows, 1) if proxy_alarm(rows[:n])]
    spans = [[step for _, step in run] for _, run in groupby(enumerate(on), lambda pair: pair[1] - pair[0])]
    where = ", ".join(f"{steps[0]}-{steps[-1]}" for steps in spans)
    return [title, f"The latest {WINDOW} steps against the earlier {WINDOW} with most success: success lower, share of "
            "+1 higher,", f"each by more than {STANDARD_ERRORS} standard errors of the difference (chosen).",
            f"It rings at steps {where}" if on else f"It rings at none of {len(rows)} steps"]


def agreement(sample: list[tuple[str, str]], second: list[str | None], endpoint: Endpoint, seed: int) -> list[str]:
    pairs = [(label, other) for (label, _), other in zip(sample, second, strict=True) if other]

    def row(name: str, seen: Callable[[str], object], counted: bool = False) -> tuple[str, list[str]]:
        a, b = [seen(label) for label, _ in pairs], [seen(other) for _, other in pairs]
        found = kappa(a, b)
        return name, [f"{sum(a)}" if counted else f"{len(a)}", f"{sum(b)}" if counted else f"{len(b)}",
                      share(sum(x == y for x, y in zip(a, b, strict=True)), len(a)),
                      *((f"{found[0]:+.2f}", f"{found[1]:.2f}") if found else "--")]

    unlike = [f"{a} -> {b} ({n})" for (a, b), n in Counter(p for p in pairs if p[0] != p[1]).most_common(1)]
    spent = endpoint.take()
    return [f"7  A SECOND LABELLER: {', '.join(sorted(set(endpoint.answered.values())))} (the paper has none)",
            f"asked about {len(second)} turns with a valid label, seed {seed}, from what was said until then; "
            f"labels: {len(pairs)},",
            f"unreadable: {second.count('')}, no answer: {second.count(None)}; tokens: {spent['prompt_tokens']:,} "
            f"read, {spent['completion_tokens']:,} written.",
            "first, second: turns that the simulator, that the labeller labelled so; agree: share on which both",
            "did or both did not; kappa: (agree - chance) / (1 - chance) and its standard error; - if undefined.",
            *grid(["first", "second", "agree", "kappa", "+-"], [
                row("reactions -1, 0, +1: what training sees", reaction_of), row("the seven labels", str),
                *(row(f"    {label}", label.__eq__, True) for label in REACTION)]),
            f"most frequent mismatch, first -> second: {unlike[0] if unlike else 'none'}"]
