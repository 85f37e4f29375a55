"""Evaluation: what a policy does on tasks, verified by the domain and counted strictly.

    python eval.py run --model RUN/model --env mini:telecom,mini:retail   held-out tasks, a line for each domain
    python eval.py curves RUN [RUN ...]                                   held-out pass@1 along training, arms compared

pass@1 is the share of dialogues with reward exactly 1 among all that were begun: an ending by a limit is a failure, and
one that is void (its user or world failed, after retries) is counted as not passed and named as missing. Beside it
stands the do-nothing rate, the pass@1 of an agent that never acts. A checkpoint of ours carries the ids of the tasks
that it was trained on; tasks that it has not seen are also counted apart. On a benchmark its own limits hold.
"""

import argparse
import json
import signal
import statistics
import sys
from collections import Counter
from pathlib import Path

import torch

from env import EnvError, Task, load_tasks, make_env
from extras.checkpoint import PolicyError, load_policy, note_of
from extras.run import Config, add_flag, list_worlds, progress
from extras.show import save_rollouts
from faca import REACTION
from rollout import Caps, Chat, Rollout, Stop, play_groups
from sampler import Sampler
from simulator import EndpointError, SimulatorError, endpoint_of, extra_for

LABELS = (*REACTION, "invalid")
STREAM = (0, -2)  # (seed, step) of evaluation: every model meets the same users, and no training step has this key


def figures(records: list[Rollout], tries: list[Rollout] = ()) -> dict[str, float]:
    """summary() of the records, pass@1 of each domain, and the share of each strategy among the user turns."""
    labels = Counter(z for r in records if not r.void for z in r.strategies if z is not None)
    return (summary(records, tries)
            | {f"pass@1/{domain}": pass_at_1(rows) for domain, rows in by_domain(records).items()}
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
    """Share with reward exactly 1 among all, the void ones in the denominator; NaN for none."""
    return sum(r.reward == 1.0 and not r.void for r in records) / len(records) if records else float("nan")


def by_domain(records: list[Rollout]) -> dict[str, list[Rollout]]:
    return {domain: [r for r in records if r.domain == domain] for domain in sorted({r.domain for r in records})}


def do_nothing_rate(tasks: list[Task]) -> float:
    """pass@1 of an agent that says and does nothing, were the user to end the dialogue: the reward's floor.

    What only a judge could grant is not granted.
    """
    return sum(make_env(task).reward([], held=False) for task in tasks) / len(tasks)


def longest_prompt(tasks: list[Task], chat: Chat) -> int:
    """Tokens of the longest system prompt with its tools, the least that a dialogue takes."""
    prompts = {(env.policy, json.dumps(env.tools)) for env in map(make_env, tasks)}
    return max((len(chat.open([{"role": "system", "content": policy}, {"role": "user", "content": ""}],
                              json.loads(tools))) for policy, tools in prompts), default=0)


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


# -------------------------------------------------------------------------------------------------------------- run


def run(options: argparse.Namespace) -> None:
    tasks = load_tasks(options.env, "test")
    endpoint = endpoint_of(options, {task.domain for task in tasks})
    if endpoint:
        endpoint.check()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    tokenizer, model = load_policy(options.model, 0, torch.device(device), dtype)
    note, chat = note_of(options.model), Chat(tokenizer)
    given = {"context": options.max_context, "message_tokens": options.max_message_tokens}
    caps = Caps(**note.get("caps", {}) | {name: value for name, value in given.items() if value} | {"official": True})
    longest = longest_prompt(tasks, chat)
    if caps.context < longest + caps.message_tokens:
        fail(f"--max-context {caps.context} has no room for a message of {caps.message_tokens} tokens after a prompt "
             f"of {longest}")
    temperature = 0.0 if options.greedy else note.get("temperature", 1.0)
    sampler = Sampler(model, chat.end_ids, chat.banned_ids(model.config.vocab_size), temperature,
                      kv_tokens=max(2**16, 2 * caps.context))
    print(f"model={options.model} user={options.simulator} temperature={temperature}"
          + ("" if note else " (caps are the paper's: no faca.json)"))
    for domain, task in {task.domain: task for task in tasks}.items():
        print(f"on {domain}: {caps.within(make_env(task).limits)}")
    finished: list[Rollout] = []
    tries: list[Rollout] = []
    refusal, told = "", []
    for number in (signal.SIGINT, signal.SIGTERM):  # the second time it ends at once
        signal.signal(number, lambda number, _: (told.append(number), signal.signal(number, signal.SIG_DFL)))
    with progress(range(len(tasks) * options.trials), "dialogues") as bar:
        def halt() -> bool:
            bar.set_postfix_str(endpoint.status() if endpoint else "", refresh=False)
            bar.update(0)
            return bool(told)

        try:
            _, tries = play_groups(
                list(enumerate(tasks)), options.trials, (options.seed, STREAM[1]), sampler, chat, caps,
                options.void_retries, lambda record: (finished.append(record), bar.update()), halt, endpoint)
        except SimulatorError as error:
            refusal = str(error)
    finished.sort(key=lambda record: (record.group, record.k))
    if options.out and finished:
        save_rollouts(Path(options.out), finished)
    if refusal or told:
        every = len(tasks) * options.trials
        print(f"eval.py: {refusal or 'stopped'}; {len(finished)} of {every} dialogues were complete"
              + (f" and are in {options.out}" if options.out and finished else ""), file=sys.stderr)
        sys.exit(1 if refusal else 128 + told[0])
    seen, identity = set(note.get("trained_on", ())), {task.id: task.identity for task in tasks}
    print(f"{'':24}{'tasks':>7}{'trials':>7}{'pass@1':>8}{'unseen':>8}{'do-nothing':>12}{'missing':>9}")
    unseen = [r for r in finished if identity[r.task] not in seen]
    for domain, rows in by_domain(finished).items():
        mine = [task for task in tasks if task.domain == domain]
        new = pass_at_1([r for r in unseen if r.domain == domain])
        print(f"{domain:24}{len(mine):7}{options.trials:7}{pass_at_1(rows):8.3f}{new:8.3f}"
              f"{do_nothing_rate(mine):12.3f}{sum(r.void for r in rows):9}")
    columns = {"all": finished} | ({"unseen": unseen} if 0 < len(unseen) < len(finished) else {})
    print("\n" + table({name: figures(rows) for name, rows in columns.items()}))
    if tries:
        print(f"\n{len(tries)} void dialogues were played again: "
              + ", ".join(f"{stop} {n}" for stop, n in Counter(str(r.stop) for r in tries).items()))
    if endpoint:
        print("\nuser: " + ", ".join(sorted(set(endpoint.answered.values()))) + "; "
              + ", ".join(f"{name} {value:,}" for name, value in endpoint.take().items()))


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
    command.add_argument("--model", help="a run's model/ (or sft/), or a Hugging Face folder or id")
    command.add_argument("--env", default="mini:telecom",
                         help="DOMAIN[/SPLIT], several with commas [%(default)s]; where no split is named, the "
                              "official base set, else test; mini:, tau:, tau2: or tau3: alone lists them")
    for name in ("simulator", "simulator_url", "simulator_extra", "simulator_timeout", "concurrency", "judge",
                 "void_retries"):  # as in training
        default = Config.__dataclass_fields__[name].metadata["tiny"]
        add_flag(command, name, default, default)
    command.add_argument("--max-context", type=int, help="tokens a dialogue (as trained, else 32768)")
    command.add_argument("--max-message-tokens", type=int, help="tokens an agent message (as trained, else 1024)")
    command.add_argument("--trials", type=int, default=1, help="dialogues a task [%(default)s]")
    command.add_argument("--seed", type=int, default=STREAM[0], help="of users and sampling [%(default)s]")
    command.add_argument("--greedy", action="store_true", help="the likeliest token, not a sampled one")
    command.add_argument("--out", help="a new file for the dialogues (JSONL; python rollout.py shows it)")
    options = parser.parse_args(argv)
    if options.command != "run":
        return options
    list_worlds(options.env)
    if not options.model:
        fail("--model is missing: a run's model/ (or sft/), or a Hugging Face folder or id")
    least = {"trials": 1, "concurrency": 1, "simulator_timeout": 1, "void_retries": 0, "max_context": 1,
             "max_message_tokens": 1}
    for name, low in least.items():
        if (value := getattr(options, name)) is not None and not low <= value < 2**31:
            fail(f"--{name.replace('_', '-')} must be at least {low}, is {value}")
    options.simulator_extra = options.simulator_extra or extra_for(options.simulator)
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
    except (EnvError, PolicyError, EndpointError, SimulatorError, NotImplementedError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
