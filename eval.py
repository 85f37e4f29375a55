"""Evaluation: what a policy does on tasks, verified by the domain and counted strictly.

    python eval.py run --model RUN/model --env mini:telecom,mini:retail --trials 4 --out DIR
    python eval.py show DIR                    what `run` prints at its end, once more
    python eval.py rescore DIR                 scores the saved dialogues again, by replay
    python eval.py compare A B                 two results, task by task
    python eval.py table 'faca/*' 'grpo/*'     arms and their seeds, beside the paper's tables
    python eval.py report RUN [RUN ...]        a page to look at: curves, dialogues, results
    python eval.py audit RUN                   whether the user's private labels can be trusted
    python eval.py curves RUN [RUN ...]        held-out pass@1 along training, arms compared

A dialogue is solved if its reward is exactly 1: any ending but one by user or agent is a failure, and one that is void
(its user or world failed, after retries) is not solved and named as missing. Of n trials of a task c are solved:

    pass@1 = c / n      pass^k = C(c, k) / C(n, k), all of k      pass@k = 1 - C(n-c, k) / C(n, k), any of k

each a mean over tasks; `average` weighs domains equally. The interval is Wilson's, at 95 %, over dialogues: what it
bounds is the figure of this model on these very tasks. Beside it stands the do-nothing rate, the pass@1 of an agent
that never acts. A checkpoint of ours carries the ids of the tasks that it was trained on; the others are also counted
apart, as unseen. On a benchmark its own limits hold.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from math import comb
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from env import EnvError, Task, make_env
from extras.checkpoint import PolicyError
from extras.endpoint import EndpointError, extra_for
from extras.paper import CELLS
from extras.ranks import Lasting, UsageError
from extras.results import Results, ResultsError, complete, load_results, must_match
from extras.run import Config, add_flag, list_worlds
from extras.tables import FORMATS, curves, grid, seed_table
from faca import REACTION
from rollout import Chat, Rollout, Stop

LABELS = (*REACTION, "invalid")
STREAM = (0, -2)  # (seed, step) of evaluation: every model meets the same users, and no training step has this key


# ---------------------------------------------------------------------------------------------- figures of rollouts


def figures(records: list[Rollout], tries: list[Rollout] = ()) -> dict[str, float]:
    """summary() of the records, pass@1 of each domain, and the share of each strategy among the user turns."""
    labels = Counter(z for r in records if not r.void for z in r.strategies if z is not None)
    return (summary(records, tries)
            | {f"pass@1/{domain}": pass_at_1([r for r in records if r.domain == domain])
               for domain in sorted({r.domain for r in records})}
            | {f"share/{label}": labels[label] / max(labels.total(), 1) for label in LABELS})


def summary(records: list[Rollout], tries: list[Rollout] = ()) -> dict[str, float]:
    """Success (mean reward) of the rollouts that are not void, and counts by stop and by kind of error.

    tries: void ones that were made again; counted, for they are not random: a long dialogue meets more faults.
    """
    valid, void = [r for r in records if not r.void], [*tries, *(r for r in records if r.void)]
    errors = sum((Counter(r.errors) for r in valid), Counter())
    return {"rollouts": len(records), "void": len(records) - len(valid), "void_retried": len(tries),
            "success": sum(r.reward for r in valid) / max(len(valid), 1),
            "ended_on_confirm": sum(r.strategies[-1:] == ["confirm"] and Stop(r.stop).verified for r in valid),
            **{f"stop/{stop}": n for stop, n in sorted(Counter(str(r.stop) for r in records).items())},
            **{f"tried_again/{stop}": n for stop, n in sorted(Counter(str(r.stop) for r in tries).items())},
            "void_segments": sum(len(r.strategies) for r in void) / max(len(void), 1),
            **{f"errors/{kind}": n for kind, n in sorted(errors.items())}}


def pass_at_1(records: list[Rollout]) -> float:
    """Share of the solved among all, the void ones in the denominator; NaN for none."""
    return sum(r.solved for r in records) / len(records) if records else math.nan


def longest_prompt(tasks: list[Task], chat: Chat) -> int:
    """Tokens of the longest system prompt with its tools, the least that a dialogue takes."""
    prompts = {(env.policy, json.dumps(env.tools)) for env in map(make_env, tasks)}
    return max((len(chat.open([{"role": "system", "content": policy}, {"role": "user", "content": ""}],
                              json.loads(tools))) for policy, tools in prompts), default=0)


def table(columns: dict[str, dict[str, float]], headings: tuple[str, str, str] = ("held-out", "", "")) -> str:
    """Figures side by side: pass@1 by domain, strategies as shares of user turns, stops as shares of dialogues.

    headings: of the three parts; the first is left out without one, the others are not parted.
    """
    keys = sorted({key for figure in columns.values() for key in figure})
    sections = [[(key, "{:.3f}", [f.get(key, 0.0) for f in columns.values()]) for key in keys if "pass@1/" in key],
                [(label, "{:.1%}", [f[f"share/{label}"] for f in columns.values()]) for label in LABELS],
                [(key, "{:.1%}", [f.get(key, 0) / f["rollouts"] for f in columns.values()])
                 for key in keys if key.startswith("stop/")]]
    lines = []
    for heading, rows in zip(headings, sections, strict=True):
        if heading:
            lines += [""] * bool(lines) + [f"{heading:26}" + "".join(f"{name:>14}" for name in columns)]
        lines += [f"{title:26}" + "".join(f"{form.format(v):>14}" for v in values) for title, form, values in rows
                  if heading or lines]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- figures of results


def wilson(count: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share, at 95 %."""
    if not of:
        return math.nan, math.nan
    centre, spread = count / of + z * z / (2 * of), z * math.sqrt(count * (of - count) / of**3 + z * z / (4 * of * of))
    return max(0.0, (centre - spread) / (1 + z * z / of)), min(1.0, (centre + spread) / (1 + z * z / of))


def mcnemar(a_only: int, b_only: int) -> float:
    """Exact two-sided p: were A and B alike, each of the discordant pairs would be either's with probability 1/2."""
    n = a_only + b_only
    return min(1.0, 2 * sum(comb(n, i) for i in range(min(a_only, b_only) + 1)) / 2**n)


def score(results: Results) -> dict[str, float]:
    """The figures of all tasks of complete results; what they mean stands at the top of this file."""
    tasks, trials = results.run["tasks"], results.run["trials"]
    count = Counter(r.task for r in results.records if r.solved)
    total, n = count.total(), len(tasks) * trials
    low, high = wilson(total, n)
    return {"tasks": len(tasks), "dialogues": n, "solved": total, "pass@1": total / n if n else math.nan,
            "low": low, "high": high, "missing": n - sum(not r.void for r in results.records),
            "do-nothing": sum(t["nothing"] for t in tasks.values()) / max(len(tasks), 1),
            **{f"pass^{k}": sum(comb(count[i], k) for i in tasks) / comb(trials, k) / max(len(tasks), 1)
               for k in range(2, trials + 1)},
            **{f"pass@{k}": 1 - sum(comb(trials - count[i], k) for i in tasks) / comb(trials, k) / max(len(tasks), 1)
               for k in range(2, trials + 1)}}


def parts(results: Results) -> dict[tuple[str, str], Results]:
    """By domain, and within it by what its tasks are sorted by, where that parts them: (domain, stratum or "")."""
    found = {}
    for domain in dict.fromkeys(t["domain"] for t in results.run["tasks"].values()):
        found[domain, ""] = mine = results.among(domain=domain)
        within = {s: mine.among(stratum=s) for t in mine.run["tasks"].values() for s in t["strata"]}
        for stratum in sorted(within, key=lambda s: (s[0].isdigit(), len(s), s)):  # families, then 2 issues, 10 issues
            if len(within[stratum].run["tasks"]) < len(mine.run["tasks"]):
                found[domain, stratum] = within[stratum]
    return found


# ------------------------------------------------------------------------------------------------------------ tables


def show(results: Results) -> str:
    """Everything that is said of one evaluation: its figures, why dialogues failed, labels and endings.

    Of a benchmark that is driven by its own code, its own figures.
    """
    family = next(iter(results.run["limits"])).partition(":")[0]
    if family == "pare":
        from extras.pare import summary
        return summary(results)
    if family == "cogym":
        from extras.cogym import report
        return report(results)
    run, unseen = results.run, results.among(unseen=True)
    tasks, new = len(run["tasks"]), len(unseen.run["tasks"])
    users = ", ".join(sorted({r.user for r in results.records} - {""}))
    heat = "sampled as its endpoint does" if math.isnan(run["temperature"]) else f"temperature {run['temperature']:g}"
    lines = [f"{run['model']} with {users or 'nobody'} as user, {heat}" + ", thinking" * run["thinking"]
             + f", {run['agent_extra']}" * bool(run["agent_extra"]) + f"; {results.folder}"]
    lines += [f"the model is of {results.unfinished} of its run"] * bool(results.unfinished)
    scopes = {"": results} | ({" unseen": unseen} if run["seen_known"] and 0 < new < tasks else {})
    for title, some in scopes.items():
        lines += ["", score_table(some, f"all {tasks} tasks" if not title else f"the {new} unseen tasks")]
    if len(scopes) == 1:
        lines.append("it is not known which tasks this model was trained on" if not run["seen_known"] else
                     "no task was trained on" if new == tasks else "every task was trained on")
    lines.append("missing: void after all retries, and counted as not solved; 95 %: Wilson's interval of pass@1; "
                 "do-nothing: pass@1\nof an agent that never acts" + "; pass^k: all of k trials; pass@k: any of k"
                 * (run["trials"] > 1))
    failed = {title: [r for r in some.records if not r.solved] for title, some in scopes.items()}
    names = [name for name, _ in Counter(r.reason for r in failed[""]).most_common()]
    if names:
        reached = sum("authority" in r.errors for r in failed[""])
        lines += ["", grid([["why not solved", *(f"dialogues{title}" for title in scopes), "share of failures"],
                            *([name, *(str(sum(r.reason == name for r in rows)) for rows in failed.values()),
                               f"{sum(r.reason == name for r in failed['']) / len(failed['']):.1%}"]
                              for name in names)]),
                  f"in {reached} of these the agent called a tool that is the user's (authority errors)"]
    lines += ["", table({title.strip() or "all": figures(some.records, some.tries) for title, some in scopes.items()},
                        ("", "user turns, by label", "dialogues, by ending"))]
    if results.tries:
        lines += ["", f"{len(results.tries)} void dialogues were played again: " + ", ".join(
            f"{stop} {n}" for stop, n in Counter(r.stop for r in results.tries).items())]
    return "\n".join(lines)


def score_table(results: Results, heading: str) -> str:
    """A line for each of parts(), and the mean over domains; with several trials all of pass^k and pass@k."""
    scores = {of: score(part) for of, part in parts(results).items()}
    ks = range(2, results.run["trials"] + 1)
    columns = {"pass@1": "{:.3f}", "do-nothing": "{:.3f}"} | {f"pass{sign}{k}": "{:.3f}" for sign in "^@" for k in ks}
    counts = ("tasks", "dialogues", "missing")
    head = [heading, *counts, "pass@1", "95 %", *list(columns)[1:]]
    rows = [[f"  {stratum}" if stratum else domain, *(str(s[name]) for name in counts), f"{s['pass@1']:.3f}",
             f"{s['low']:.3f}-{s['high']:.3f}", *(columns[name].format(s[name]) for name in list(columns)[1:])]
            for (domain, stratum), s in scores.items()]
    domains = [s for (_, stratum), s in scores.items() if not stratum]
    if len(domains) > 1:
        mean = {name: sum(s[name] for s in domains) / len(domains) for name in columns}
        rows.append(["average", *(str(sum(s[name] for s in domains)) for name in counts),
                     f"{mean['pass@1']:.3f}", "", *(columns[name].format(mean[name]) for name in list(columns)[1:])])
    return grid([head, *rows])


# ----------------------------------------------------------------------------------------------------------- compare


def compare(a: Results, b: Results, seed: int = 0, anyway: bool = False) -> str:
    """Pairs dialogues by task and trial: cells, McNemar's exact p, A - B with its interval, and why B lost A's wins.

    Trials of one task are not independent, so p is exact for one trial and too small for more; the interval holds for
    any number: it is from 10,000 bootstrap samples of whole tasks (percentiles 2.5 and 97.5).
    """
    unlike = must_match(a, b, anyway)
    won = [{(r.task, r.k): r for r in results.records} for results in (a, b)]
    pairs = {place: (won[0][place].solved, won[1][place].solved) for place in won[0] if place in won[1]}
    if not pairs:
        raise ResultsError(f"{a.folder} and {b.folder} have no task in common")
    rows = [["", "tasks", "pairs", "both", "A only", "B only", "neither", "A", "B", "A - B", "95 %", "McNemar p"]]
    groups = parts(a) | ({("all", ""): a} if len(a.run["limits"]) > 1 else {})
    for (domain, stratum), part in groups.items():
        some = {place: pair for place, pair in pairs.items() if place[0] in part.run["tasks"]}
        if some:
            cell = Counter(some.values())
            both, a_only, b_only = cell[True, True], cell[True, False], cell[False, True]
            low, high = bootstrap(some, seed)
            n = len(some)
            counts = (len({task for task, _ in some}), n, both, a_only, b_only, cell[False, False])
            rows.append([f"  {stratum}" if stratum else domain, *map(str, counts),
                         f"{(both + a_only) / n:.3f}", f"{(both + b_only) / n:.3f}", f"{(a_only - b_only) / n:+.3f}",
                         f"{low:+.3f} to {high:+.3f}", f"{mcnemar(a_only, b_only):.2g}"])
    lines = [f"A: {a.folder} ({a.run['model']})", f"B: {b.folder} ({b.run['model']})",
             *(f"differs: {line}" for line in unlike), "", grid(rows)]
    for x, y, mine, other in (("A", "B", 0, 1), ("B", "A", 1, 0)):
        lost = Counter(won[other][place].reason for place, pair in pairs.items() if pair[mine] and not pair[other])
        lines += ["", f"why {y} failed where {x} alone won ({lost.total()}): "
                  + (", ".join(f"{reason} {n}" for reason, n in lost.most_common()) or "nowhere")]
    trials = max(a.run["trials"], b.run["trials"])
    lines += ["", "95 %: of A - B for this pair of models, from 10,000 samples of whole tasks; McNemar p: exact over "
              "pairs" + f", too small where tasks have {trials} trials, which are not independent" * (trials > 1)]
    if "(loopback)" in a.run["simulator"]:
        lines.append("the user was on this machine: a trial of the plumbing, and no score")
    missing = [sum(r.void for r in results.records) for results in (a, b)]
    lines += [f"missing: A {missing[0]}, B {missing[1]}; they count as not solved"] * any(missing)
    for domain in sorted(set(CELLS) & set(a.run["limits"])):
        (both, faca, grpo, neither), budget = CELLS[domain]
        lines.append(f"paper, {domain}, 14B s1, FACA against outcome only: both {both}, FACA only {faca}, other only "
                     f"{grpo}, neither {neither}; of the {faca}, {budget} by error budget, the rest without closure")
    return "\n".join(lines)


def bootstrap(pairs: dict[tuple[str, int], tuple[bool, bool]], seed: int, samples: int = 10000) -> tuple[float, float]:
    """95 % interval of the mean of A - B over dialogues, from samples of tasks with replacement."""
    of_task: dict[str, list[int]] = {}
    for (task, _), (one, other) in pairs.items():
        of_task.setdefault(task, []).append(one - other)
    sums = np.array([sum(each) for each in of_task.values()])
    counts = np.array([len(each) for each in of_task.values()])
    drawn = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), samples)
    low, high = np.percentile(drawn @ sums / (drawn @ counts), (2.5, 97.5))
    return float(low), float(high)


# ------------------------------------------------------------------------------------------------------ command line


def run_command(options: argparse.Namespace) -> int:
    from extras.playing import run
    return run(options)


def rescore_command(options: argparse.Namespace) -> int:
    from extras.replay import rescored
    worst = 0
    for folder in options.results:
        counts, lines = rescored(load_results(folder))
        print("\n".join([*lines, f"{folder}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())]))
        worst |= counts["differing"] > 0
    return int(worst)


def report_command(options: argparse.Namespace) -> None:
    from extras.report import report
    print(report([Path(folder) for folder in options.folders], Path(options.out)))


def audit_command(options: argparse.Namespace) -> None:
    from extras.audit import audit
    from extras.labeller import Labeller
    name, labeller = options.second_labeller, None
    if name:
        labeller = Labeller(name, options.simulator_url, options.simulator_extra or extra_for(name),
                            options.concurrency, options.simulator_timeout)
    elif options.simulator_url or options.simulator_extra:
        fail("--simulator-url and --simulator-extra are of --second-labeller MODEL, which is missing")
    print(audit(Path(options.run), labeller, options.sample, options.seed))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eval.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(message)
    commands = parser.add_subparsers(dest="command", required=True,
                                     metavar="{run,show,rescore,compare,table,report,audit,curves}")

    def command(name: str, function, help: str):
        found = commands.add_parser(name, help=help, description=help)
        found.set_defaults(function=function)
        found.error = parser.error
        return found

    one = command("run", run_command, "dialogues of a model on tasks, and its figures; goes on in --out where it was")
    one.add_argument("--model", help="a run's model/ (or sft/), or a Hugging Face folder or id")
    one.add_argument("--agent-url", default="", help="an OpenAI-compatible endpoint that serves a model of the name "
                     "--model; its key is in AGENT_API_KEY")
    one.add_argument("--agent-extra", default="", help="JSON object for the body of each of its requests")
    one.add_argument("--env", default="mini:telecom",
                     help="DOMAIN[/SPLIT], several with commas [%(default)s]; where no split is named, the official "
                          "base set, else test; mini:, tau:, tau2: or tau3: alone lists them")
    for name in ("simulator", "simulator_url", "simulator_extra", "simulator_timeout", "concurrency", "judge",
                 "void_retries"):  # as in training
        default = Config.__dataclass_fields__[name].metadata["tiny"]
        add_flag(one, name, default, default)
    add_flag(one, "kv_gib", None, "as trained, else 16")
    one.add_argument("--max-context", type=int, help="tokens a dialogue [as trained, else 32768]")
    one.add_argument("--max-message-tokens", type=int, help="tokens an agent message [as trained, else 1024]")
    one.add_argument("--max-messages", type=int, help="agent messages a dialogue, where no benchmark's limits hold [as "
                     "trained, else 30]")
    one.add_argument("--max-errors", type=int, help="tool errors a dialogue, likewise [as trained, else 10]")
    one.add_argument("--trials", type=int, default=1,
                     help="dialogues a task; a folder can be given more [%(default)s]")
    one.add_argument("--seed", type=int, default=STREAM[0], help="of users and sampling [%(default)s]")
    one.add_argument("--greedy", action="store_true", help="the likeliest token, not a sampled one")
    one.add_argument("--temperature", type=float, help="of sampling [as trained, else 1]")
    one.add_argument("--thinking", action="store_true", help="let the model think before it speaks")
    one.add_argument("--out", default=f"runs/{time.strftime('%Y%m%d-%H%M%S')}-eval",
                     help="folder of results, a new one, or one to go on in [runs/DATE-eval]")
    one = command("show", lambda o: print(show(complete(o.results))), "what `run` prints of its results, once more")
    one.add_argument("results", metavar="DIR", help="a folder of `eval.py run --out`")
    one = command("rescore", rescore_command, "scores saved dialogues again, by replay; exit code 1 if one differs")
    one.add_argument("results", nargs="+", metavar="DIR", help="folders of `eval.py run --out`")
    one = command("compare", lambda o: print(compare(complete(o.a), complete(o.b), o.seed, o.anyway)),
                  "two results, task by task")
    one.add_argument("a", metavar="A", help="a folder of `eval.py run --out`")
    one.add_argument("b", metavar="B", help="another")
    one.add_argument("--seed", type=int, default=0, help="of the bootstrap [%(default)s]")
    one.add_argument("--anyway", action="store_true", help="pair what is in both, though tasks, users or caps differ")
    one = command("table", lambda o: print(seed_table(o.arms, o.format, o.paper, o.unseen, o.anyway, o.brief)),
                  "arms and their seeds, domains in columns, beside the paper's tables")
    one.add_argument("arms", nargs="+", metavar="'ARM/*'", help="a pattern, in quotes: its folders are an arm's seeds")
    one.add_argument("--format", choices=FORMATS, default="text", help="[%(default)s]")
    one.add_argument("--paper", type=int, choices=(2, 4), default=2, help="which of the paper's tables [%(default)s]")
    one.add_argument("--unseen", action="store_true", help="tasks alone that no model was trained on")
    one.add_argument("--anyway", action="store_true", help="though tasks, users or sampling differ; says which do")
    one.add_argument("--brief", action="store_true", help="leave out the domains that were not run")
    one = command("report", report_command, "runs and results as one page that stands alone, to look at")
    one.add_argument("folders", nargs="+", metavar="RUN", help="run folders of train.py, and folders of `eval.py run`")
    one.add_argument("--out", default="report.html", help="[%(default)s]")
    one = command("audit", audit_command, "whether the user's private labels can be trusted; one page of text")
    one.add_argument("run", metavar="RUN", help="a run folder of train.py, or a folder of `eval.py run`")
    one.add_argument("--second-labeller", default="", metavar="MODEL",
                     help="a model at --simulator-url that labels a sample of the user's turns once more")
    one.add_argument("--sample", type=int, default=200, help="turns that it labels [%(default)s]")
    one.add_argument("--seed", type=int, default=0, help="of the sample [%(default)s]")
    for name in ("simulator_url", "simulator_extra", "simulator_timeout", "concurrency"):
        default = Config.__dataclass_fields__[name].metadata["tiny"]
        add_flag(one, name, default, default)
    one = command("curves", lambda o: print(curves(o.runs, o.anyway)),
                  "held-out pass@1 along training, arms compared by seed")
    one.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    one.add_argument("--anyway", action="store_true", help="though other options differ, too; says which do")
    options = parser.parse_args(argv)
    if getattr(options, "seed", 0) < 0:
        fail(f"--seed must be at least 0, is {options.seed}")
    if options.command == "run":
        check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Ends the program, with one line, for values that can be known to be wrong."""
    list_worlds(options.env)
    if not options.model:
        fail("--model is missing: a run's model/ (or sft/), a Hugging Face folder or id, or a name at --agent-url")
    least = {"trials": 1, "concurrency": 1, "simulator_timeout": 1, "void_retries": 0, "max_context": 1,
             "max_message_tokens": 1, "max_messages": 1, "max_errors": 1, "temperature": 1e-3, "kv_gib": 1e-3,
             "seed": 0}
    for name, low in least.items():
        if (value := getattr(options, name)) is not None and not low <= value < 2**31:
            fail(f"--{name.replace('_', '-')} must be at least {low:g} and below 2^31, is {value}")
    if options.greedy and options.temperature:
        fail("--greedy is temperature 0: give one of the two")
    if options.agent_url and (options.thinking or options.kv_gib):
        fail("--thinking and --kv-gib are of a model that is loaded here; a served one is told by --agent-extra, as "
             """'{"chat_template_kwargs": {"enable_thinking": true}}'""")
    if options.agent_extra and not options.agent_url:
        fail("--agent-extra needs --agent-url")
    options.simulator_extra = options.simulator_extra or extra_for(options.simulator)


def fail(message: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"eval.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    torch.set_num_threads(1)
    code = None
    try:
        options = parse(sys.argv[1:])
        code = options.function(options)
    except (UsageError, EnvError, PolicyError, EndpointError, NotImplementedError) as error:
        fail(str(error))
    except KeyboardInterrupt:  # where there is nothing to be kept yet
        print("eval.py: stopped", file=sys.stderr)
        code = 130
    except OSError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # the other ranks may be waiting for this one
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
