"""Evaluation: what a policy does on tasks, verified by the domain and counted strictly; and the folder of a run.

    python eval.py run --model RUN/model --env mini:telecom,mini:retail   held-out tasks, a line for each domain
    python eval.py curves RUN [RUN ...]                                   held-out pass@1 along training, arms compared

pass@1 is the share of dialogues with reward exactly 1 among all that were begun: every ending but the user's own is a
failure, and one that is void (its user or world failed, after retries) is counted as not passed and named as missing.
Beside it stands the do-nothing rate, the pass@1 of an agent that never acts. A checkpoint of ours carries the ids of
the tasks that it was trained on; tasks that it has not seen are also counted apart.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from env import EnvError, Task, load_tasks, make_env
from faca import REACTION
from rollout import Caps, Chat, Rollout, play_groups, save_rollouts, summary
from sampler import PolicyError, Sampler, load_policy, note_of

LABELS = (*REACTION, "invalid")
STREAM = (0, -2)  # (seed, step) of evaluation: every model meets the same users, and no training step has this key


def figures(records: list[Rollout]) -> dict[str, float]:
    """rollout.summary of the records, pass@1 of each domain, and the share of each strategy among the user turns."""
    labels = Counter(z for r in records if not r.void for z in r.strategies if z is not None)
    return (summary(records) | {f"pass@1/{domain}": pass_at_1(rows) for domain, rows in by_domain(records).items()}
            | {f"share/{label}": labels[label] / max(labels.total(), 1) for label in LABELS})


def pass_at_1(records: list[Rollout]) -> float:
    """Share with reward exactly 1 among all, the void ones in the denominator; NaN for none."""
    return sum(r.reward == 1.0 and not r.void for r in records) / len(records) if records else float("nan")


def by_domain(records: list[Rollout]) -> dict[str, list[Rollout]]:
    return {domain: [r for r in records if r.domain == domain] for domain in sorted({r.domain for r in records})}


def do_nothing_rate(tasks: list[Task]) -> float:
    """pass@1 of an agent that says and does nothing, were the user to end the dialogue: the reward's floor."""
    return sum(make_env(task).reward([]) for task in tasks) / len(tasks)


def table(columns: dict[str, dict[str, float]]) -> str:
    """Figures side by side: pass@1 by domain, strategies as shares of user turns, stops as shares of dialogues."""
    keys = sorted({key for figure in columns.values() for key in figure})
    rows = [(key, "{:.3f}", [f.get(key, 0.0) for f in columns.values()]) for key in keys if key.startswith("pass@1/")]
    rows += [(label, "{:.1%}", [f[f"share/{label}"] for f in columns.values()]) for label in LABELS]
    rows += [(key, "{:.1%}", [f.get(key, 0) / f["rollouts"] for f in columns.values()])
             for key in keys if key.startswith("stop/")]
    lines = [f"{'held-out':26}" + "".join(f"{name:>14}" for name in columns)]
    lines += [f"{title:26}" + "".join(f"{form.format(v):>14}" for v in values) for title, form, values in rows]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- a run: its ranks, its folder


class UsageError(ValueError):
    """The user's mistake, in one line that says what to do. Exit code 2."""


class RunStopped(RuntimeError):
    """The run can't go on, and says why in one line. Raised on all ranks alike."""


def start_processes() -> None:
    """torchrun's processes, or this one alone. One thread each on CPU: two in one process spin against each other."""
    on_gpu = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **alone)


def all_gather(value) -> list:
    """The value of every rank, in the order of ranks."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def all_reduce(value: float, how: Callable = sum) -> float:
    """One number over all ranks: their sum, max or min."""
    return how(all_gather(value))


class Run:
    """The folder that training writes and evaluation reads (config.json, metrics.jsonl, rollouts/), and how it ends.

    SIGINT and SIGTERM ask the run to stop: dialogues under way are given up, and what is done is saved. A further one
    after two seconds quits at once (within them, for torchrun hands on what a terminal has sent already).
    """

    def __init__(self, config):
        self.rank, self.path = dist.get_rank(), Path(config.out)
        self.rows: list[dict] = []
        self.evaluated: dict[str, dict] = {}
        self.signalled, self.exit_code, self.told_at = False, 0, 0.0
        if self.rank == 0:
            self.claim(config)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def claim(self, config) -> None:
        """Makes the folder this run's own; of two that start at once, one."""
        options = json.dumps(asdict(config), indent=1) + "\n"
        try:
            (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
            with (self.path / "config.json").open("x") as file:
                file.write(options)
        except OSError as error:
            raise UsageError(f"--out {self.path} can't be made this run's folder: {error.strerror or error}") from None
        print(" ".join(f"{name}={value}" for name, value in asdict(config).items()), file=sys.stderr)

    def on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.told_at and now - self.told_at > 2:
            os._exit(128 + number)
        if not self.signalled and self.rank == 0:
            tqdm.write("stopping: what is done is saved (once more to quit without)", file=sys.stderr)
        self.told_at = self.told_at or now
        self.signalled, self.exit_code = True, 128 + number

    def stopped(self) -> bool:
        """Whether any rank was told to stop; collective, and the same answer on all."""
        agreed = int(all_reduce(self.exit_code, max))
        if agreed:  # else what is set stays: a signal may have come in the meantime
            self.signalled, self.exit_code = True, agreed
        return agreed > 0

    def stop_line(self) -> str:
        return f"stopped early, after {len(self.rows)} rows of metrics" if self.signalled else ""

    def bar(self, steps, name: str) -> tqdm:
        pause = 0.1 if sys.stderr.isatty() else 10  # seconds between two redraws; a log file wants few
        return tqdm(steps, name, disable=self.rank != 0, dynamic_ncols=True, mininterval=pause)

    def log(self, row: dict) -> None:
        self.rows.append(row)
        if self.rank == 0:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def keep(self, step: int, records: list[Rollout]) -> None:
        """The step's rollouts of all ranks, one file."""
        shares = all_gather(records)
        if self.rank == 0:
            every = sorted((r for share in shares for r in share), key=lambda r: (r.group, r.k))
            save_rollouts(self.path / "rollouts" / f"step-{step:05}.jsonl", every)


# -------------------------------------------------------------------------------------------------------------- run


def run(options: argparse.Namespace) -> None:
    tasks = load_tasks(options.env, "test")
    tokenizer, _, model = load_policy(options.model, 0, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    note, chat = note_of(options.model), Chat(tokenizer)
    caps = Caps(**note["caps"]) if note else Caps()
    temperature = 0.0 if options.greedy else note.get("temperature", 1.0)
    sampler = Sampler(model, chat.end_ids, chat.banned_ids(model.config.vocab_size), temperature,
                      kv_tokens=max(2**16, 2 * caps.context))
    print(f"model={options.model} temperature={temperature} {caps}" + ("" if note else " (the paper's: no faca.json)"))
    with tqdm(total=len(tasks) * options.trials, desc="dialogues") as bar:
        records, _ = play_groups(list(enumerate(tasks)), options.trials, (options.seed, STREAM[1]), sampler, chat, caps,
                                 done=lambda record: bar.update())
    seen = set(note.get("trained_on", ()))
    print(f"{'':24}{'tasks':>7}{'trials':>7}{'pass@1':>8}{'unseen':>8}{'do-nothing':>12}{'missing':>9}")
    for domain, rows in by_domain(records).items():
        mine = [task for task in tasks if task.domain == domain]
        unseen = pass_at_1([r for r in rows if r.task not in seen])
        print(f"{domain:24}{len(mine):7}{options.trials:7}{pass_at_1(rows):8.3f}{unseen:8.3f}"
              f"{do_nothing_rate(mine):12.3f}{sum(r.void for r in rows):9}")
    print("\n" + table({"all": figures(records)}))
    if options.out:
        save_rollouts(Path(options.out), records)


# ----------------------------------------------------------------------------------------------------------- curves


def curves(options: argparse.Namespace) -> None:
    """A line for each run, its pass@1 (mean over domains) at each evaluation and over the curve; then gains by seed."""
    found = {folder: read_curve(Path(folder)) for folder in options.runs}
    names = list(dict.fromkeys(name for _, curve in found.values() for name in curve))
    print(f"{'run':24}" + "".join(f"{name.removeprefix('RL '):>10}" for name in names) + f"{'mean':>8}")
    arms: dict[str, dict[int, tuple[float, float]]] = {}
    for folder, (config, curve) in found.items():
        values = [curve.get(name, float("nan")) for name in names]
        mean = statistics.fmean(list(curve.values())[1:] or curve.values())  # the first is where all runs start
        if set(curve) == set(names):  # a run that is not finished is shown, and compared with none
            arms.setdefault(arm_of(config), {})[config["seed"]] = values[-1], mean
        print(f"{folder[-24:]:24}" + "".join(f"{value:10.3f}" for value in values) + f"{mean:8.3f}")
    base, *others = sorted(arms, key=lambda arm: arm != "grpo") or [""]
    for arm in others:
        seeds = sorted(set(arms[arm]) & set(arms[base]))
        for i, what in enumerate(("at the end", "mean over the curve")):
            gains = [arms[arm][seed][i] - arms[base][seed][i] for seed in seeds]
            if len(gains) > 1:
                each = ", ".join(f"{seed}: {gain:+.3f}" for seed, gain in zip(seeds, gains, strict=True))
                print(f"{arm} - {base}, {what}: {statistics.fmean(gains):+.3f}, "
                      f"sample std {statistics.stdev(gains):.3f}  (seed {each})")


def read_curve(folder: Path) -> tuple[dict, dict[str, float]]:
    """A run's options, and its mean pass@1 over domains at each evaluation."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = {row["at"]: statistics.fmean(value for key, value in row.items() if key.startswith("pass@1/"))
                 for row in rows if row["phase"] == "held_out"}
        arm_of(config), config["seed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{folder} is no run folder of train.py ({type(error).__name__}: {error})")
    return config, curve or fail(f"{folder} has no evaluation in its metrics.jsonl")


def arm_of(config: dict) -> str:
    """What tells one arm from another: method, lambda where it is not the default, control."""
    lam = "" if config["lam"] == (0.0 if config["method"] == "grpo" else 0.5) else f" lam {config['lam']}"
    return config["method"] + lam + ("" if config["control"] == "none" else f" {config['control']}")


# ------------------------------------------------------------------------------------------------------------- main


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(message)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,curves}")
    command = commands.add_parser("curves", help="held-out pass@1 along training, arms compared by seed")
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    command.set_defaults(function=curves)
    command.error = parser.error
    command = commands.add_parser("run", help="dialogues of a model on tasks, and its pass@1")
    command.set_defaults(function=run)
    command.error = parser.error
    command.add_argument("--model", required=True, help="a run's model/ (or sft/), or a Hugging Face folder or id")
    command.add_argument("--env", default="mini:telecom",
                         help="DOMAIN[/SPLIT], several with commas; the test split if none is named [%(default)s]")
    command.add_argument("--trials", type=int, default=1, help="dialogues a task [%(default)s]")
    command.add_argument("--seed", type=int, default=STREAM[0], help="of users and sampling [%(default)s]")
    command.add_argument("--greedy", action="store_true", help="the likeliest token, not a sampled one")
    command.add_argument("--out", help="a new file for the dialogues (JSONL; python rollout.py shows it)")
    options = parser.parse_args(argv)
    if options.command != "run":
        return options
    if options.trials < 1:
        fail(f"--trials must be at least 1, is {options.trials}")
    if options.out and (Path(options.out).exists() or not Path(options.out).parent.is_dir()):
        fail(f"--out {options.out} exists already, or its folder does not; name a new file")
    return options


def fail(message: str) -> None:
    print(f"eval.py: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    torch.set_num_threads(1)
    try:
        options = parse(sys.argv[1:])
        options.function(options)
    except (EnvError, PolicyError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
