"""The paper's argument at toy scale, rerun by one command: tables and a figure beside the paper's, seeds and spread.

    python tests/miniature.py --out DIR    all of it, meant for two hours on two cores; goes on where it was stopped
    python tests/miniature.py --quick      one seed of both arms, minutes: what holds by a wide margin, or exit code 1
    python tests/miniature.py --show PATH  tables and figure of a results file, or of DIR as far as it is; of several,
                                           their gains side by side

DIR gets every run and evaluation as train.py and eval.py leave them (2 GB), and of them results.json and results.png.
The tables that the README shows are those of the committed tests/miniature.json.

Settings are train.py's own, equal for all arms: 8 prompts x 4 rollouts, learning rate 3e-4 after 10 steps of warm-up.
The learning rate was chosen for Interactive GRPO, by training reward, on seed 100 (SFT and RL), with no held-out task
played: mean over 40 steps and both domains at 1.5e-4, 3e-4, 6e-4: 0.415, 0.451, 0.441 (FACA: 0.419, 0.456, 0.482).
The tables are of seeds 0-4 on held-out tasks. Seeds are of the RL run: the SFT checkpoint of a setting is one, for all.
SFT has train.py's 200 steps, and on retail 400: after 200 of seed 0 it still fails to copy the order's number.

The settings: telecom and retail are mini:telecom and mini:retail; vague is mini:telecom with a customer who answers
every step vaguely; extremes is mini:telecom from an expert who is nearly always right in some things, and nearly never
in others (tests/variations.py has what no option of train.py has).
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"  # two runs side by side, and each is fastest on one thread
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  after the thread count
from fake_user import FakeUser, by_rule  # noqa: E402
from miniature_jobs import SIGNALS, Job, work  # noqa: E402
from miniature_tables import STEPS, curve_mean, figure, side_by_side, tables  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import faca  # noqa: E402
import train  # noqa: E402
from extras import arms  # noqa: E402
from extras.audit import EVERY, lead, read  # noqa: E402
from extras.playing import made  # noqa: E402
from extras.ranks import Lasting, RunStopped, UsageError, start_processes  # noqa: E402
from extras.results import ResultsError, complete  # noqa: E402
from extras.run import lock  # noqa: E402
from extras.show import load_rollouts, write_whole  # noqa: E402
from extras.tables import read_curve  # noqa: E402
from rollout import credit_tensors  # noqa: E402

OURS = {"about.json.part", "lock", "logs", "results", "runs"}
LONG = 60                   # RL steps of the runs of Table 2 on telecom
QUICK = 28                  # of --quick, at twice the learning rate
SHARE = (0.1, 0.5)          # what --quick holds the process share to: the paper's are 0.36 and 0.34
TRIALS = 4                  # dialogues a held-out task, of the models at the end of Table 2
FACA, GRPO = ["--method", "faca"], ["--method", "grpo"]
# Table 4's other rows, and the noise in the labels: arm -> (variation, options)
CONTROLS = {"lambda 0.1": ("plain", [*FACA, "--lam", "0.1"]), "lambda -0.5": ("plain", [*FACA, "--lam", "-0.5"]),
            "shifted": ("plain", [*FACA, "--control", "shifted"]),
            "randomized": ("plain", [*FACA, "--control", "randomized"])}
NOISE = {f"noise {share}": (f"noise-{share}", FACA) for share in (10, 30, 50)}


# -------------------------------------------------------------------------------------------------------- the jobs


def sft(setting: str, variation: str = "plain", env: str = "mini:telecom", steps: int = 200) -> Job:
    """A line of metrics for each step, and one for the evaluation after the last."""
    return Job(f"runs/{setting}/sft", ("tests/variations.py", variation, "--method", "sft", "--env", env, "--out",
                                       f"DIR/runs/{setting}/sft", "--sft-steps", str(steps)), steps / 5, steps + 1)


def rl(setting: str, arm: str, variation: str, options: list[str], seed: int, env: str = "mini:telecom",
       steps: int = STEPS, every: int = 10) -> Job:
    """A line of metrics for each step, and one for each evaluation: after every so many steps."""
    folder = f"runs/{setting}/{arm.replace(' ', '_')}-{seed}"
    return Job(folder, ("tests/variations.py", variation, *options, "--env", env, "--model",
                        f"DIR/runs/{setting}/sft/model", "--seed", str(seed), "--steps", str(steps), "--eval-every",
                        str(every), "--out", f"DIR/{folder}"), steps * 1.2, steps + steps // every,
               f"runs/{setting}/sft")


def played(job: Job, env: str = "mini:telecom") -> Job:
    """The evaluation of a run's last model."""
    folder = job.folder.replace("runs/", "results/", 1)
    tasks = {"mini:telecom": 100, "mini:retail": 96}[env]
    return Job(folder, ("eval.py", "run", "--model", f"DIR/{job.folder}/model", "--env", env, "--trials", str(TRIALS),
                        "--out", f"DIR/{folder}"), 5, tasks * TRIALS, job.folder)


def plan() -> list[Job]:
    """All there is to do, the most telling first."""
    jobs = [sft("telecom"), sft("retail", env="mini:retail", steps=400), sft("vague", "vague"),
            sft("extremes", "extremes")]
    table_2 = [played(jobs[0]), played(jobs[1], "mini:retail")]
    for seed in range(5):
        for setting, env, steps in (("telecom", "mini:telecom", LONG), ("retail", "mini:retail", STEPS)):
            for arm, options in (("FACA", FACA), ("GRPO", GRPO)):
                table_2 += [run := rl(setting, arm, "plain", options, seed, env, steps), played(run, env)]
    jobs += table_2
    for seed in range(3):
        jobs += [rl("telecom", arm, *what, seed) for arm, what in CONTROLS.items()]
        jobs += [rl("vague", arm, "vague", options, seed) for arm, options in (("FACA", FACA), ("GRPO", GRPO))]
        jobs += [rl("telecom", arm, *what, seed) for arm, what in NOISE.items()]
        jobs += [rl("extremes", arm, *what, seed) for arm, what in {
            "FACA": ("plain", FACA), "GRPO": ("plain", GRPO), "dropped": ("dropped", GRPO),
            "scaled": ("scaled", GRPO)}.items()]
    return jobs


def quick_plan() -> list[Job]:
    return [sft("telecom"),
            *(rl("telecom", arm, "plain", [*options, "--lr", "6e-4"], 0, steps=QUICK, every=QUICK // 2)
              for arm, options in (("FACA", FACA), ("GRPO", GRPO)))]


# ----------------------------------------------------------------------------------------------------- the results


def rows_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ResultsError(f"{path} is damaged: {error}") from None


def of_run(folder: Path) -> dict:
    """What is kept of a run: its curve, and its metrics over steps: all, up to STEPS, the first and the last third."""
    rows, (config, curve), (_, start) = rows_of(folder), read_curve(folder), read_curve(folder.parent / "sft")
    steps = {"after SFT": "0", "after RL": str(config["steps"])}
    rl = [row for row in rows if row["phase"] == "rl"]
    third = len(rl) // 3
    return {"curve": {steps.get(at, at.removeprefix("RL step ")): round(value, 5)
                      for at, value in (start | curve).items()},
            "all": figures(rl), "upto": figures(rl[:STEPS]), "first": figures(rl[:third]), "last": figures(rl[-third:]),
            "process_exceeds": sum(row["process_share"] > 0.5 for row in rl),
            "step_seconds": round(statistics.median(seconds(row) for row in rl), 4)}


def seconds(row: dict) -> float:
    return sum(row[f"seconds_{part}"] for part in ("rollout", "credit", "update", "refresh"))


def figures(rows: list[dict]) -> dict[str, float]:
    """Of some RL steps: shares of reactions and of segments as in the paper, over all of them; else means over steps.

    A batch without any signal makes no update: it moves the weights by 0.
    """
    def mean(name: str, weight: str = "") -> float:
        weights = [row[weight] if weight else 1 for row in rows]
        return sum(w * row.get(name, 0.0) for w, row in zip(weights, rows, strict=True)) / sum(weights)
    groups = sum(row[f"groups_{kind}"] for row in rows for kind in ("correct", "wrong", "mixed"))
    found = {name: mean(name) for name in ("success", "process_share", "update_norm", "advantage_l1", "grad_norm")}
    found |= {"positive_share": mean("positive_share", "observed"), "coverage": mean("coverage", "segments")}
    found |= {f"all_{kind}": sum(row[f"groups_{kind}"] for row in rows) / groups for kind in ("correct", "wrong")}
    return {name: round(value, 5) for name, value in found.items()}


def leads(folder: Path) -> dict[str, float]:
    """How far the reactions of a run's rollouts point to a prompt's better ones (eval.py audit has the definition)."""
    facts = read(folder, 0, 0).valid
    return {name: round(lead(facts, EVERY[name])[1], 5) for name in ("all turns", "all but the last")}


def of_evaluation(folder: Path) -> str:
    """A word for each task, in their order: a 1 for each dialogue that was solved, else a 0."""
    found: dict[str, str] = {}
    for record in sorted(complete(folder).records, key=lambda r: (r.task, r.k)):
        found[record.task] = found.get(record.task, "") + "01"[record.solved]
    return " ".join(found.values())


def credit_seconds(folder: Path, repeats: int = 50) -> dict[str, float]:
    """What the advantages of one step's rollouts take, outcome alone and FACA's; medians."""
    x = credit_tensors(load_rollouts(folder / f"rollouts/step-{STEPS - 1:05}.jsonl"))
    observed_NQ, spent = x["observed_NQ"] & x["valid_N"][:, None], {"outcome": [], "faca": []}
    for _ in range(repeats):
        for name, act in (("outcome", lambda: faca.outcome_advantage(x["reward_N"], x["group_N"], x["valid_N"])),
                          ("faca", lambda: faca.faca_advantage(x["reward_N"], x["reaction_NQ"], observed_NQ,
                                                               x["group_N"], 0.5, x["valid_N"]))):
            began = time.perf_counter()
            act()
            spent[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(each), 6) for name, each in spent.items()}


def endpoint_smoke(out: Path, held) -> dict[str, dict]:
    """Two steps of both arms with a user behind an endpoint on loopback: did every part of the protocol hold?"""
    found, os.environ["NO_PROXY"] = {}, "127.0.0.1"  # a proxy does not find it
    with FakeUser(by_rule) as server:
        for arm, options in (("FACA", FACA), ("GRPO", GRPO)):
            user = ["--simulator", "loopback-user", "--simulator-url", server.url, "--eval-trials", "0"]
            job = replace(rl("telecom", f"endpoint {arm}", "plain", [*options, *user], 0, steps=2), lines=2, needs="")
            if not job.through(out):  # the port is another one now
                shutil.rmtree(out / job.folder, ignore_errors=True)
                work([job], out, held)
            rows = rows_of(out / job.folder)
            found[arm] = {name: sum(row.get(name, 0) for row in rows) for name in (
                "rollouts", "void", "segments", "observed", "strategy/invalid", "simulator/requests",
                "simulator/faults")}
    return found


def collect(jobs: list[Job], out: Path) -> dict:
    """Everything that the tables are made of, as far as it is there."""
    jobs = [job for job in jobs if job.through(out)]
    runs = [job.folder for job in jobs if job.folder.startswith("runs/") and job.needs]
    labelled = [name for name in runs if re.search(r"/(?:FACA|noise_\d+)-", name)]
    about = json.loads((out / "about.json").read_text())
    return {"about": {name: value for name, value in about.items() if name != "jobs"}, "endpoint": {}, "credit": {},
            "runs": {name.removeprefix("runs/"): of_run(out / name) for name in runs},
            "leads": {name.removeprefix("runs/"): leads(out / name) for name in labelled},
            "results": {job.folder.removeprefix("results/"): of_evaluation(out / job.folder)
                        for job in jobs if job.folder.startswith("results/")}}


# ------------------------------------------------------------------------------------------------------- --quick


def outcome_gradient_gap(run: Path) -> float:
    """lambda 0's gradient on a run's first rollouts, against an outcome-only loss in its plainest form, written here.

    The largest difference of an entry, as a share of the largest entry. Infinite if the run gave its segments other
    advantages than these, or if all are 0, for then nothing was compared.
    """
    config = arms.recorded({"from_rollouts": str(run / "rollouts/step-00000.jsonl")})
    records = arms.read_batch(config.from_rollouts)
    start_processes()
    trainer = train.Trainer(config, sampling=False)
    ours, _ = arms.gradient(trainer, records, arms.credit(records, config.seed, 0)[0]["GRPO"])

    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    total = sum(s >= 0 for r in records for s in r.segment)
    for record in records:
        group = [r.reward for r in records if r.group == record.group]
        spread = statistics.stdev(group)
        advantage = (record.reward - statistics.fmean(group)) / (spread + 1e-6) if spread else 0.0
        if any(abs(given - advantage) > 1e-6 for given in record.advantage):
            return math.inf
        logits = model(torch.tensor([record.tokens])).logits[0]
        logits[:, trainer.banned] = -torch.inf
        logp = logits.log_softmax(-1)
        (-advantage * sum(logp[t - 1, record.tokens[t]] for t, s in enumerate(record.segment) if s >= 0)
         / total).backward()
    plain = [p.grad.flatten() for p in model.parameters()]
    largest = max(float(b.abs().max()) for b in plain)
    gap = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    return gap / largest if largest else math.inf


def quick(jobs: list[Job], out: Path, held) -> int:
    """What must hold by a wide margin, each with its figure; 1 if something does not."""
    work(jobs, out, held)
    runs = {arm: of_run(out / f"runs/telecom/{arm}-0") for arm in ("FACA", "GRPO")}
    curves = {arm: run["curve"] for arm, run in runs.items()}
    rise = curves["FACA"][str(QUICK)] - curves["FACA"]["0"]
    lead = curve_mean(curves["FACA"]) - curve_mean(curves["GRPO"])
    share, gap = runs["FACA"]["all"]["process_share"], outcome_gradient_gap(out / "runs/telecom/GRPO-0")
    checks = [(rise >= 0.2, f"held-out success rises by {rise:.3f}, at least 0.2"),
              (lead > -0.05, f"FACA's mean over the curve less Interactive GRPO's is {lead:+.3f}, above -0.05"),
              (SHARE[0] < share < SHARE[1], f"process share is {share:.3f}, between {SHARE[0]} and {SHARE[1]}"),
              (gap < 1e-4, f"lambda 0 has the gradient of an outcome-only loss, but for {gap:.1e} of it, below 1e-4")]
    for arm, curve in curves.items():
        print(f"{arm:6}" + "  ".join(f"{step}: {value:.3f}" for step, value in curve.items()))
    for held_true, words in checks:
        print(("ok    " if held_true else "FAILS ") + words)
    return int(not all(held_true for held_true, _ in checks))


# --------------------------------------------------------------------------------------------------- command line


def processor() -> str:
    """What the rounding depends on, and with it every sampled token after some steps: the CPU's name, as far as it
    tells one, and the widest instructions that PyTorch uses there."""
    found = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", found.read_text(), re.MULTILINE) if found.exists() else []
    return f"{[*names, platform.processor(), 'unknown CPU'][0]}, {torch.backends.cpu.get_cpu_capability()}"


def begin(out: Path, jobs: list[Job]) -> tuple:
    """DIR's lock, which its jobs hold, too, even beyond a command that is killed; and DIR/about.json: all machines and
    commits that worked on DIR, the commands of its jobs. UsageError where DIR is the place of anything else."""
    path, by = out / "about.json", {"commits": made()["commit"] or "unknown", "processors": processor()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists() and (other := {entry.name for entry in out.iterdir()} - OURS):
            raise UsageError(f"--out {out} holds something else already, {min(other)}; name a new folder")
        held = lock(out)
    except OSError as error:
        raise UsageError(f"--out {out} can't be used: {error.strerror or error}") from None
    try:
        about = {"commits": [], "processors": [], "minutes": 0.0, "jobs": {}} | (
            json.loads(path.read_text()) if path.exists() else {})
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged, and can be removed: {error}") from None
    for folder, command in {job.folder: " ".join(job.command) for job in jobs}.items():
        if about["jobs"].setdefault(folder, command) != command:
            raise UsageError(f"--out {out} was begun with another command for {folder}: name a new folder. It was "
                             f"{about['jobs'][folder]}; it is {command}")
    for name, here in by.items():
        if here not in about[name]:
            if about[name]:
                print(f"miniature.py: {out} was begun by {about[name][-1]} and goes on by {here}: the results name "
                      "both", file=sys.stderr)
            about[name].append(here)
    about |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count(),
              "runs": sum(bool(job.needs) and job.folder.startswith("runs/") for job in jobs)}
    write_whole(path, json.dumps(about).encode())
    return held, about


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs, new or to go on in")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--quick", action="store_true", help="a check in minutes (without --out, kept only if it fails)")
    one.add_argument("--show", type=Path, nargs="+", metavar="PATH", help="print the tables of a results file, or of "
                     "DIR as far as it is, and draw the figure beside it; of several, print their gains side by side")
    one.add_argument("--plan", action="store_true", help="list the runs, and exit")
    options = parser.parse_args()
    if "RANK" in os.environ:
        parser.error("it starts runs of one process each: run it by python, not torchrun")
    for path in options.show or ():
        if not (path / "about.json" if path.is_dir() else path).exists():
            parser.error(f"--show {path} is neither a results file nor a DIR")
    if not (options.out or options.quick or options.show or options.plan):
        parser.error("--out DIR is missing (two hours, or --quick: minutes); --show PATH shows what there is")
    return options


def main(options: argparse.Namespace) -> int:
    if options.plan:
        print("\n".join(" ".join(("python", *job.command)) for job in plan()))
        return 0
    if options.show:
        return show(*options.show)
    jobs, kept = quick_plan() if options.quick else plan(), bool(options.out)
    out = options.out = (options.out or Path(tempfile.mkdtemp(prefix="miniature-"))).resolve()
    held, about = begin(out, jobs)
    if options.quick:
        failed = quick(jobs, out, held)
        if not (kept or failed):
            shutil.rmtree(out)
        return failed
    start, before = time.monotonic(), about["minutes"]

    def note() -> None:
        about["minutes"] = round(before + (time.monotonic() - start) / 60, 1)
        write_whole(out / "about.json", json.dumps(about).encode())
    try:
        work(jobs, out, held, note)
    finally:
        note()
    smoke = endpoint_smoke(out, held)
    try:
        results = collect(jobs, out) | {"endpoint": smoke, "credit": credit_seconds(out / "runs/telecom/FACA-0")}
    except LookupError as error:
        raise ResultsError(f"a run of {out} has not the metrics of this version ({error})") from None
    write_whole(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    return show(out / "results.json")


def show(path: Path, *others: Path) -> int:
    """The tables of a results file, and its figure beside it; of what there is so far, where it is a DIR. With others,
    all gains side by side instead."""
    many = []
    try:
        for path in (path, *others):
            many.append(collect(plan(), path) if path.is_dir() else json.loads(path.read_text()))
            shown = tables(many[-1])
        print(side_by_side(many) if others else "\n\n".join(shown.values()), flush=True)
        if not others:
            figure(*many, path / "so-far.png" if path.is_dir() else path.with_suffix(".png"))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path} holds no results of this version ({type(error).__name__}: {error})") from None
    except ImportError as error:
        raise UsageError(f"the figure needs matplotlib: pip install matplotlib, then --show {path} ({error})") from None
    return 0


def stop(number: int, frame) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    for each in SIGNALS[1:]:
        if signal.getsignal(each) != signal.SIG_IGN:  # which nohup asks for
            signal.signal(each, stop)
    options = parse()
    try:
        sys.exit(main(options))
    except (RunStopped, OSError, ValueError) as error:  # UsageError among them
        print(f"miniature.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        print("miniature.py: stopped" + f"; --out {options.out} goes on" * bool(options.out), file=sys.stderr)
        sys.exit(130)
