"""`python eval.py report FOLDER [FOLDER ...] --out report.html`: runs and evaluations as one page that stands alone.

The page (report.html, report.css and report.js beside this file) loads nothing and may load nothing: its policy names
the one script and the one style by their hashes. Data travels as JSON; whatever a model said reaches the page by
textContent alone.
"""

import base64
import datetime
import hashlib
import importlib.util
import re
import statistics
from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path

from extras.browser import STEPS, Texts, as_json, by_failures, judged, sampled, step_files
from extras.charts import DASHES, lines, smooth, spread, stack
from extras.paper import SPREAD, TABLE_2
from extras.results import Results, ResultsError, load_results
from extras.run import progress
from extras.runs import (
    KINDS, NAMES, ReportError, Run, arms_evaluated, arms_of, curves_of, domain_mean, equal_share, final, gains,
    held_out, is_number, mean_of, meanings, metric_keys, names_of, percent, plus_minus, read_runs, signed, thirds,
    trained)
from extras.show import write_whole
from faca import REACTION

PAGE = 9.9e6  # bytes of the page at most, but that charts are all drawn
BUDGET, EVALUATED = 5e6, 3e6  # of these, at most, for the rollouts of all runs, of all evaluations
WINDOW = 5  # steps of the running mean, in runs of at least LONG_RUN
LONG_RUN = 30
PHASES = {"rl": "training by RL", "held_out": "evaluation on held-out tasks", "sft": "SFT"}
OF_RUNS = {"summary": "arms compared", "curves": "learning curves", "dialogues": "dialogues"}  # by section
FEW = 30  # dialogues: a share of fewer is shown in grey (chosen)
LABELS = ("close", "confirm", "reveal_piece", "be_vague", "invalid", "ask_clarification", "challenge_solution",
          "change_mind")  # from +1 over 0 to -1, as they are stacked
TELEMETRY = {"8B FACA": ("69.95 → 82.51", "86.16 → 82.50", "39.27", "36.00"), "14B FACA": ("", "", "31.04", "33.79")}
PAPER = [[f"{name} (paper)", "3", f"{TABLE_2[f'{name.split()[0]} SFT'][-1]}", f"{mean:.2f} ± {sd:.2f}",
          *TELEMETRY.get(name, [""] * 4)] for name, (mean, sd) in SPREAD.items()]


# -------------------------------------------------------------------------------------------------------- sections


def tag(name: str, content: str, **attributes) -> str:
    """An element; its content is markup, its attributes are text."""
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{shown}>{content}</{name}>"


def table(title: str, head: list[str], rows: list[list[str]], caption: str, names: int = 1, kind: str = "",
          classes: list[str] | None = None) -> str:
    """Rows of markup under a head of text; the first `names` columns are names; scrolls on its own where it is wide.

    A row of one cell is a heading within the table. classes: of each row.
    """
    def line(row: list[str], look: str) -> str:
        if len(row) == 1:
            return tag("tr", tag("th", row[0], scope="rowgroup", colspan=len(head)))
        cells = (tag("td", cell, class_="name" if i < names else "") for i, cell in enumerate(row[1:], 1))
        return tag("tr", tag("th", row[0], scope="row") + "".join(cells), class_=look)

    top = (tag("th", escape(name), scope="col", class_="name" if i < names else "") for i, name in enumerate(head))
    looks = classes or ["paper" * ("(paper)" in row[0]) for row in rows]
    body = "".join(map(line, rows, looks))
    whole = tag("table", tag("thead", tag("tr", "".join(top))) + tag("tbody", body), aria_label=title)
    return tag("div", tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)
               + tag("p", escape(caption), class_="note"), class_=f"numbers {kind}".strip())


def swatch(style: int) -> str:
    dashes = " ".join(map(str, DASHES[style % len(DASHES)]))
    line = tag("path", "", d="M0 5h30", stroke=f"var(--arm-{style % len(DASHES)})", stroke_dasharray=dashes or "none")
    return tag("svg", line, viewBox="0 0 30 10", class_="swatch", aria_hidden="true")


def legend(runs: list[Run]) -> str:
    items = (tag("li", swatch(i) + escape(f"{arm} ({len(members)} seed{'s' * (len(members) > 1)})"))
             for i, (arm, members) in enumerate(arms_of(runs).items()))
    return tag("ul", "".join(items), class_="legend")


def tile(title: str, value: str, note: str, style: int | None = None) -> str:
    """A number to be read first."""
    return tag("div", tag("dt", (swatch(style) if style is not None else "") + escape(title)) +
               tag("dd", escape(value)) + tag("dd", escape(note), class_="hint"))


def headline(every: list[Run], evaluated: dict[str, list[Results]]) -> str:
    """pass@1 on held-out tasks: before RL, of each arm after it, its gains over Interactive GRPO; or results alone."""
    arms, tiles, begun = arms_of(trained(every) or every), [], []
    for i, (arm, members) in enumerate(arms.items()):
        seen = [values for run in members if (values := run.values("held_out", "pass@1"))]
        done = [value for run in members if (value := final(run)) is not None]
        begun += [values[min(values)] for values in seen if trained(members)]
        values = done or [values[max(values)] for values in seen]
        if values:
            count = f"{len(values)} seed{'s' * (len(values) > 1)}"
            sd = f", ± {percent(statistics.stdev(values))} (sample sd)" if len(values) > 1 else ""
            tiles.append(tile(arm, f"{percent(statistics.fmean(values))} %", count + sd + ", so far" * (not done), i))
    base, *others = arms or [""]
    for arm in others if base.startswith(NAMES["grpo"]) else []:
        if values := gains(arms[arm], arms[base]):
            tiles.append(tile(f"{arm} − {base}", f"{signed(statistics.fmean(values))} points",
                              f"at matched seeds: {', '.join(map(signed, values))}"))
    if begun:
        note = "where all arms start" if len(set(begun)) == 1 else "mean over runs"
        tiles.insert(0, tile("before RL", f"{percent(statistics.fmean(begun))} %", note))
    for arm, members in evaluated.items() if not every else ():
        values = [domain_mean(results) for results in members]
        sd = f"{len(values)} seeds, ± {percent(statistics.stdev(values))} (sample sd), " if len(values) > 1 else ""
        tiles.append(tile(arm, f"{percent(statistics.fmean(values))} %",
                          f"{sd}{sum(results.expected for results in members)} dialogues"))
    return "".join(tiles) or tile("held-out tasks", "–", "no evaluation yet")


def measured(every: list[Run]) -> str:
    """What the numbers at the top are."""
    if not every:
        return "Tasks solved (pass@1) in evaluations:"
    return f"Held-out tasks solved (pass@1) before RL and at the end of training, by {held_out(every)}:"


def arms_table(runs: list[Run]) -> str:
    """What the paper says of its runs, of each arm here; all in percent."""
    rows = []
    for i, (arm, members) in enumerate(arms_of(trained(runs)).items()):
        first = [values[min(values)] for run in members if (values := run.values("held_out", "pass@1"))]
        last = [value for run in members if (value := final(run)) is not None]
        so_far = [values[max(values)] for run in members if (values := run.values("held_out", "pass@1"))]
        count = str(len(members)) + f" ({len(last)} finished)" * (0 < len(last) < len(members))
        rows.append([swatch(i) + escape(arm), count, percent(statistics.fmean(first)) if first else "–",
                     plus_minus(last) if last else f"{plus_minus(so_far)} so far" if so_far else "–",
                     *(percent(*(thirds(members, key, weight) or ())) or "–" for key, weight in
                       (("positive_share", "observed"), ("coverage", "segments"))),
                     *(percent(mean_of(members, key)) or "–" for key in
                       (equal_share, lambda row: row.get("process_share")))])
    rows += [list(map(escape, row)) for row in PAPER]
    return table("Arms", ["arm", "seeds", "pass@1 before RL", "pass@1 after RL", "reactions +1", "process coverage",
                  "groups of equal reward", "process share of L1"], rows,
                 f"In percent. pass@1: held-out tasks solved, by {held_out(trained(runs))}; mean ± sample standard "
                 "deviation over seeds that are finished (the paper's: average of nine domains, other tasks than "
                 "here). Arrows: first third of the steps → last third. Process coverage: segments with a process part "
                 "that is not 0.")


def runs_table(runs: list[Run]) -> str:
    rows = []
    for run in (run for members in arms_of(runs).values() for run in sorted(members, key=lambda r: r.config["seed"])):
        config, found = run.config, run.values("held_out", "pass@1")
        sft = config["method"] == "sft"
        steps = f"{len(run.rows['sft'])} SFT" if sft else f"{run.steps} of {config['steps']}"
        rows.append([escape(run.name), escape(run.arm), str(config["seed"]), "–" if sft else f"{config['lam']:g}",
                     "–" if sft else escape(config["control"]), steps, escape(str(config["model"])),
                     escape(config["env"]), escape(str(config.get("simulator", ""))),
                     percent(found[max(found)]) if found else "–"])
    return table("Runs", ["run", "arm", "seed", "λ", "control", "steps", "model", "tasks", "user", "last pass@1"], rows,
                 f"pass@1 in percent, by {held_out(runs)}. Interactive GRPO is FACA without the process part (λ = 0).",
                 names=2)


def figure(title: str, charts: str, caption: str, paper: str = "", wide: bool = False) -> str:
    paper = paper.replace(" %", "\u00a0%")
    text = escape(caption) + (" " + tag("span", f"Paper: {escape(paper)}.", class_="paper") if paper else "")
    return tag("figure", tag("h3", escape(title)) + charts + tag("figcaption", text), class_="wide" if wide else "")


def key_of(names: dict[str, str]) -> str:
    """A legend of areas."""
    squares = (tag("li", tag("svg", tag("rect", "", width=12, height=12, fill=f"var(--{name})"), viewBox="0 0 12 12",
                             class_="square", aria_hidden="true") + escape(title)) for name, title in names.items())
    return tag("ul", "".join(squares), class_="legend")


def share_of(prefix: str, name: str, names: dict[str, str]) -> Callable:
    """Of a metrics row: the count called prefix + name among those of all names; None where one is missing."""
    def share(row: dict) -> float | None:
        counts = [row.get(f"{prefix}{each}") for each in names]
        total = sum(counts) if all(map(is_number, counts)) else 0
        return row[f"{prefix}{name}"] / total if total else None

    return share


def stacks(runs: list[Run], prefix: str, names: dict[str, str], window: int, title: str) -> str:
    """Shares of each arm, mean over its seeds, side by side."""
    panels = []
    for arm, members in arms_of(runs).items():
        layers = {}
        for name in names:
            seeds = [run.values("rl", share_of(prefix, name, names)) for run in members]
            rows = spread([smooth(seed, window) for seed in seeds], every=False)
            layers[name] = {step: mean for step, mean, *_ in rows}
        if any(layers.values()):
            panels.append(tag("div", tag("h4", escape(arm)) + stack(f"{title}, {arm}", layers)))
    return tag("div", "".join(panels), class_="panels") + key_of(names)


def figures(runs: list[Run], bar: Callable) -> str:
    """The paper's figures 4 to 6 after the learning curves."""
    window = WINDOW if max(run.steps for run in runs) >= LONG_RUN else 1
    mean = f"Running mean over {window} steps. " if window > 1 else ""

    def line(title: str, key: str, caption: str, paper: str = "", phase: str = "rl", **more) -> str:
        bar()
        curves = curves_of(runs, phase, key)
        if not curves:
            return figure(title, tag("p", "no values yet", class_="muted"), caption, paper)
        return figure(title, lines(title, curves, percent=True, **more), caption, paper)

    signs = {label: f"{label} {REACTION.get(label, 0):+d}".replace("+0", "0").replace("-", "−") for label in LABELS}
    groups = dict(zip(KINDS, ("all correct", "mixed", "all wrong"), strict=True))
    return "".join((
        line("Success on held-out tasks", "pass@1", "pass@1 against RL steps done: tasks that no run trains on, reward "
             "exactly 1, mean over domains.", phase="held_out", marks=True),
        line("Success in training", "success", f"{mean}Mean reward of each step's own rollouts.", window=window),
        line("Figure 4: favourable reactions", "positive_share", f"{mean}User turns labelled close, confirm or "
             "reveal_piece (+1) / all that followed a segment.", "69.95 → 82.51 % (8B, first → last 40 steps)",
             window=window),
        line("Figure 4: process coverage", "coverage", f"{mean}Segments whose process part is not 0: somebody at the "
             "same turn of the same task met another reaction.", "86.16 → 82.50 %", window=window),
        figure("Figure 4: strategies of the users", stacks(runs, "strategy/", signs, window, "strategies"),
               f"{mean}Private labels of user turns, and the reaction each counts as: blue +1, grey 0, orange −1.",
               wide=True),
        figure("Figure 5: groups by outcome", stacks(runs, "groups_", groups, window, "groups"),
               f"{mean}Where all rollouts of a task end alike, outcome credit is 0, and only the users' reactions can "
               "tell one segment from another.", "39.27 % (8B) and 31.04 % (14B) all correct or all wrong", wide=True),
        line("Figure 6: process share of L1 magnitude", "process_share", f"{mean}Sum |λ × process| / sum (|outcome| + "
             "|λ × process|) over segments. Above the dotted line the process part exceeds the outcome part.",
             "36.00 % (8B), 33.79 % (14B); above the line in 6 and 1 of 120 steps", window=window, line_at=0.5)))


def metrics(runs: list[Run], keys: list[tuple[str, str]], bar: Callable) -> tuple[str, str]:
    """A select of all metrics, and a template with each one's chart, arms and meaning: inert until it is chosen."""
    options, templates, told = {}, [], meanings()
    for phase, key in keys:
        bar()
        if curves := curves_of(runs, phase, key):
            options.setdefault(phase, []).append(tag("option", escape(key), value=f"{phase}/{key}"))
            arms = (tag("li", swatch(curve.style) + escape(curve.name)) for curve in curves)
            meaning = next((text for names, text in told if names.fullmatch(key)), "")
            parts = (tag("h3", escape(f"{key} ({PHASES[phase]})")), tag("ul", "".join(arms), class_="legend"),
                     lines(key, curves, marks=phase == "held_out"), tag("figcaption", escape(meaning)))
            templates.append(tag("template", "".join(parts), data_metric=f"{phase}/{key}"))
    groups = (tag("optgroup", "".join(found), label=PHASES[phase]) for phase, found in options.items())
    return "".join(groups), "".join(templates)


def evaluations(arms: dict[str, list[Results]], names: dict[Path, str], runs: list[Run]) -> str:
    """pass@1 of each evaluation by domain (and family of tasks), and why the rest of the dialogues failed."""
    every = [results for members in arms.values() for results in members]
    known = all(results.run["seen_known"] for results in every)
    seen = not known or any(task["seen"] for results in every for task in results.run["tasks"].values())
    head = ["results", "arm", "pass@1 [95 %]", *["pass@1, unseen tasks"] * seen, "pass^k", "tasks × trials",
            "an agent that does nothing", "missing"]
    trials = " or ".join(map(str, sorted({results.run["trials"] for results in every})))
    intro = (f"By eval.py run, {trials} dialogue{'s' * (trials != '1')} a task"
             + f"; the figures at the top are of {held_out(trained(runs) or runs)}" * bool(runs) + "."
             + " No task here was trained on." * (not seen))
    caption = ("In percent. pass@1: dialogues with reward exactly 1 / all that were to be held, missing ones included; "
               "Wilson intervals. pass^k: tasks solved in all k trials. Means: ± sample standard deviation over seeds. "
               + "Unseen: tasks that the model was not trained on, where that is known. " * seen
               + f"Grey: fewer than {FEW} dialogues.")
    whole, families = (table(title, head, rows, caption, names=2, classes=classes) if rows else ""
                       for title, (rows, classes) in (("Evaluations", evaluation_rows(arms, names, seen, False)),
                                                      ("By family of tasks", evaluation_rows(arms, names, seen, True))))
    reasons = {arm: sum((Counter(record.reason or "missing" for record in results.records if not record.solved)
                         for results in members), Counter()) for arm, members in arms.items()}
    order = [reason for reason, _ in sum(reasons.values(), Counter()).most_common()]
    failed = [[escape(reason), *(f"{count[reason]} ({count[reason] / max(count.total(), 1):.0%})"
                                 for count in reasons.values())] for reason in order]
    why = table("Why dialogues failed", ["reason", *reasons], failed,
                "Dialogues of all seeds, and their share of the failures.", kind="narrow")
    more = tag("details", tag("summary", "By family of tasks") + families, class_="runs") if families else ""
    return tag("p", escape(intro), class_="muted") + whole + more + tag("h3", "Why dialogues failed") + why


def evaluation_rows(arms: dict[str, list[Results]], names: dict[Path, str], seen: bool,
                    families: bool) -> tuple[list[list[str]], list[str]]:
    """Under each domain, or else family of tasks, its evaluations by arm, those of several seeds with their mean.

    Also the class of each row. seen: with a column of the unseen tasks.
    """
    from eval import parts, score

    def told(one: dict) -> str:
        return f"{percent(one['pass@1'])} [{percent(one['low'])}, {percent(one['high'])}]" if one["dialogues"] else "–"

    def mean(scores: list[dict], key: str) -> str:
        return plus_minus([one[key] for one in scores]) if all(one["dialogues"] for one in scores) else "–"

    split = {results.folder: parts(results) for members in arms.values() for results in members}
    domains = list(dict.fromkeys(domain for each in split.values() for domain, _ in each))
    places = dict.fromkeys(place for each in split.values() for place in each if bool(place[1]) == families)
    rows, classes = [], []
    for place in sorted(places, key=lambda place: domains.index(place[0])):
        rows.append([escape(", ".join(filter(None, place)))])
        classes.append("")
        for arm, members in arms.items():
            some = [(names[results.folder], split[results.folder][place]) for results in members
                    if place in split[results.folder]]
            every = [score(part) for _, part in some]
            new = [score(part.among(unseen=True)) if part.run["seen_known"] else {} for _, part in some]
            shown = escape(arm if arm not in names.values() else "–")
            for (name, part), one, unseen in zip(some, every, new, strict=True):
                n = part.run["trials"]
                rows.append([escape(name), shown, told(one), *[told(unseen) if unseen else "unknown"] * seen,
                             f"{percent(one[f'pass^{n}'])} (k = {n})" if n > 1 else "–", f"{one['tasks']} × {n}",
                             percent(one["do-nothing"]), str(one["missing"])])
                classes.append("few" * (one["dialogues"] < FEW))
            if len(some) > 1:
                rows.append([f"mean of {len(some)}", shown, mean(every, "pass@1"),
                             *[mean(new, "pass@1") if all(new) else "unknown"] * seen,
                             f"{mean(every, f'pass^{n}')} (k = {n})" if n > 1 else "–", "", "",
                             str(sum(one["missing"] for one in every))])
                classes.append("mean" + " few" * (max(one["dialogues"] for one in every) < FEW))
    return rows, classes


# ------------------------------------------------------------------------------------------------------------ page


def report(folders: list[Path], out: Path) -> str:
    """Writes the page; a line that says what was written, how large it is, and what was left out.

    Raises ReportError, with one line, for a folder that is neither a run nor results, or a page that can't be written.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise ReportError("the charts of a report need matplotlib: pip install matplotlib")
    if not folders:
        raise ReportError("no folder was named")
    if out.is_dir() or not out.parent.is_dir():
        raise ReportError(f"--out {out} must be a file in a folder that exists")
    names = names_of(folders)
    found = [read_results(folder) for folder in folders if (folder / "run.json").is_file()]
    runs = read_runs([folder for folder in folders if not (folder / "run.json").is_file()], names)
    evaluated = arms_evaluated(found, names)
    arms, keys = trained(runs), metric_keys(runs)
    with progress(range(7 + len(keys)), "charts") as bar:
        drawn = figures(arms, bar.update) if any(run.steps for run in arms) else ""
        options, templates = metrics(runs, keys, bar.update)
    drawn = drawn or tag("p", "No run has done a step of RL yet.", class_="muted")
    summed, shown = summary(runs), evaluations(evaluated, names, runs) if found else ""
    room = PAGE - 2e5 - sum(len(part.encode(errors="replace")) for part in (drawn, options, templates, summed, shown))
    data, left_out = browsed(runs, evaluated, names, min(max(room, 0) / (BUDGET + EVALUATED), 1))
    notes = [(run.name, note) for run in runs for note in run.notes]
    notes += [(names[results.folder], note) for results in found for note in oddities(results)]
    page = filled({"made": datetime.date.today().isoformat(), "headline": headline(runs, evaluated),
                   "measured": escape(measured(trained(runs) or runs)), "legend": legend(arms),
                   "figures": drawn, "options": options, "templates": templates, "data": as_json(data)},
                  {"summary": summed, "curves": keys, "dialogues": data["runs"],
                   "evaluations": shown,
                   "notes": "".join(tag("li", tag("b", escape(name)) + escape(f": {note}"))
                                    for name, note in left_out + notes)})
    written = page.encode(errors="replace")
    try:
        write_whole(out, written)
    except OSError as error:
        raise ReportError(f"--out {out} can't be written ({error.strerror or error})") from None
    steps = sum(len(step_files(run.folder)) for run in runs)
    return (f"{out}: {len(runs)} runs, {len(found)} evaluations, {len(written) / 1e6:.1f} MB; rollouts of "
            f"{sum(len(run['steps']) for run in data['runs'] if 'evaluation' not in run)} of {steps} steps"
            + "".join(f"; {name}: {note}" for name, note in notes))


def browsed(runs: list[Run], arms: dict[str, list[Results]], names: dict[Path, str],
            part: float) -> tuple[dict, list[tuple[str, str]]]:
    """The rollouts that the page shows of each run and evaluation, in a part of their budgets; (name, what was left).

    What could not be read is added to the runs' notes, and to what was left out of an evaluation.
    """
    texts, left, shown, left_out = Texts(), part * BUDGET, [], []
    evaluated = [(arm, results) for arm, members in arms.items() for results in members]
    files = sum(min(len(step_files(run.folder)), STEPS) for run in runs)

    def add(steps: list[dict], before: int, **more) -> float:
        shown.extend([more | {"steps": steps}] * bool(steps))
        return left - len(as_json(steps)) - texts.size + before

    with progress(range(files), "files of rollouts") as bar:
        for i, run in enumerate(runs):
            before = texts.size
            steps, omitted, faults = sampled(run.folder, left / (len(runs) - i), texts, bar.update, left)
            left = add(steps, before, name=run.name, arm=run.arm, lam=run.config["lam"], control=run.config["control"])
            run.notes += faults
            left_out += [(run.name, omitted)] if trained([run]) else []
    left, order = part * EVALUATED, by_failures([results for _, results in evaluated])
    for i, (arm, results) in enumerate(evaluated):
        name, before = names[results.folder], texts.size
        steps, omitted, faults = judged(results, order, left / (len(evaluated) - i), texts, left)
        left = add(steps, before, name=name, arm=arm, evaluation=True)
        left_out += [(name, note) for note in [omitted, *faults] if note]
    return {"runs": shown, "texts": texts.texts}, left_out


def read_results(folder: Path) -> Results:
    try:
        return load_results(folder)
    except ResultsError as error:
        raise ReportError(str(error)) from None


def oddities(results: Results) -> list[str]:
    """What a reader of the table has to know."""
    lines = ["the last line of its results is torn and left out"] if results.torn else []
    if len(results.records) < results.expected:
        lines.append(f"it is not complete: {len(results.records)} of {results.expected} dialogues, the others count as "
                     "not solved")
    return lines


def summary(runs: list[Run]) -> str:
    if not trained(runs):
        return tag("h2", "The runs") + runs_table(runs) if runs else ""
    single = tag("details", tag("summary", "The single runs") + runs_table(runs), class_="runs")
    return tag("h2", "The arms compared") + arms_table(runs) + single


def filled(parts: dict[str, str], sections: dict) -> str:
    """The template with its parts, and a policy that lets this script and this style alone run, and loads nothing.

    sections: by id, what is in each (where that is text, it is a part too); those with nothing are cut out, and said.
    """
    here = Path(__file__).parent
    style, script = ((here / f"report.{kind}").read_text() for kind in ("css", "js"))
    policy = (f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; base-uri 'none'; "
              "form-action 'none'")
    template = (here / "report.html").read_text()
    for name in (name for name, content in sections.items() if not content):
        template = re.sub(rf' *<a href="#{name}">.*?</a>|<section id="{name}">.*?</section>\n+', "", template,
                          flags=re.DOTALL)
    absent = [titles for name, titles in OF_RUNS.items() if not sections[name]]
    absent = f"Left out, since nothing that was given has them: {', '.join(absent)}." if absent else ""
    parts = parts | {name: content for name, content in sections.items() if isinstance(content, str)} | {
        "style": style, "script": script, "policy": policy, "absent": absent and tag("p", absent, class_="muted")}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
