"""Many ranks as one: torchrun's processes, what they tell each other, and a step's dialogues played by all of them."""

import ctypes
import dataclasses
import errno
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from env import Task, load_tasks
from extras.checkpoint import note_of
from extras.endpoint import endpoint_of
from rollout import Caps, Rollout, play_groups
from simulator import SimulatorError


class UsageError(ValueError):
    """The user's mistake, in one line that says what to do. Exit code 2."""


class RunStopped(RuntimeError):
    """The run can't go on, and says why in one line. Raised on all ranks alike."""


class Lasting:
    """A stream to talk to for days: once its reader is gone, what is said goes nowhere, and the run goes on.

    Ctrl-C in `train.py | tee log` ends tee as well, and a terminal that is closed hears nothing either: a word to them
    must not end the run before it has saved.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self.last(self.stream.write, text) or len(text)

    def flush(self) -> None:
        self.last(self.stream.flush)

    def last(self, act: Callable, *arguments):
        try:
            return act(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: a terminal that has hung up
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # what is still buffered goes there, too
            os.close(nowhere)


def start_processes() -> None:
    """torchrun's processes, or this one alone. One thread each on CPU: two in one process spin against each other.

    Ranks wait for each other's dialogues, and a user may take hours: no time limit of a collective says that a rank is
    dead. torchrun does, which ends all of them as soon as one is; and gloo, over which they wait, sees its connection
    closed.
    """
    on_gpu = torch.cuda.is_available()
    store, rank, world = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        end_with_parent()  # a torchrun that is killed would leave its ranks at work, with the GPUs
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=30)))  # to find each other, alone
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(days=7), store=store,
                            rank=rank, world_size=world)


def end_with_parent() -> None:
    """Where the system can (Linux): this process gets SIGTERM when the one that started it ends, however that was."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def all_gather(value) -> list:
    """The value of every rank, in the order of ranks."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def all_reduce(value: float, how: Callable = sum) -> float:
    """One number over all ranks: their sum, max or min."""
    return how(all_gather(value))


def peak_memory() -> float:
    """GiB at most in use since the last call: of the GPU; without one, of the process since it began."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 / (1024 if sys.platform == "darwin" else 1)
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def light(records: list[Rollout]) -> list[Rollout]:
    """The records without what is long, as the other ranks need them."""
    return [dataclasses.replace(r, tokens=[], segment=[], logprobs=[], messages=[], private=[]) for r in records]


def on_first(act: Callable):
    """What act() gives on rank 0, on all ranks; what it refuses (UsageError, SimulatorError), all refuse alike."""
    value = refusal = None
    if dist.get_rank() == 0:
        try:
            value = act()
        except (UsageError, SimulatorError) as error:
            refusal = str(error)
    value, refusal = all_gather((value, refusal))[0]
    if refusal is not None:
        raise UsageError(refusal)
    return value


def ask_first(config) -> None:
    """One small request to the user's endpoint before any model is loaded. Collective; raises UsageError."""
    if config.plays and (endpoint := endpoint_of(config, set())):
        on_first(endpoint.check)
    if dist.get_rank() == 0 and config.method != "sft" and config.model != "tiny" and not note_of(config.model):
        print(f"warning: the paper's RL starts from an SFT checkpoint; nothing says that {config.model} is one",
              file=sys.stderr)


class Actors:
    """The samplers of all ranks, as one: they play the dialogues of a step, whole groups on one rank."""

    def __init__(self, config, sampler, chat):
        self.config, self.sampler, self.chat = config, sampler, chat
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.caps = Caps(config.max_messages, config.max_message_tokens, config.max_context, config.max_errors,
                         config.max_dialogue_steps)
        domains = {task.domain for task in load_tasks(config.env, "train")} if config.plays else set()
        self.endpoint = endpoint_of(config, domains, self.world) if config.plays else None
        self.keys = {self.endpoint.judge: "simulator/judge",  # of the metrics, by the model that is asked
                     self.endpoint.model: "simulator/model"} if self.endpoint else {}

    def go_on(self, rows: list[dict]) -> None:
        """Where a run resumes, whoever had answered by its last row: another one that answers now is a change."""
        last = next((row for row in reversed(rows) if "simulator/model" in row), {})
        for model, key in self.keys.items():
            if last.get(key):
                self.endpoint.answered[model] = last[key]

    def roll_out(self, tasks: list[Task], rollouts: int, key: tuple[int, int], run, name: str, official=False):
        """This rank's share of the tasks, a group each, and the void tries made again; none after a stop. Collective.

        Where the user's endpoint refuses for good, what is complete is kept, and the run stops on all ranks.
        """
        groups = list(enumerate(tasks))[self.rank::self.world]
        complete, records, tries, refusal, flag = [], [], [], "", run.path / "refused"
        with run.bar(range(len(groups) * rollouts), name, aside=not official) as bar:
            def halt() -> bool:
                if self.endpoint:
                    bar.set_postfix_str(self.endpoint.status(), refresh=False)
                    bar.update(0)  # shows it, when it is time to
                return run.signalled or flag.exists()

            try:
                records, tries = play_groups(
                    groups, rollouts, key, self.sampler, self.chat, dataclasses.replace(self.caps, official=official),
                    self.config.void_retries, lambda record, last: last and (complete.append(record), bar.update()),
                    halt, self.endpoint)
            except SimulatorError as error:
                refusal = str(error)
                flag.touch()  # the other ranks give up too, and need not wait for users who may take long
        refusals = list(filter(None, all_gather(refusal)))
        if refusals:
            flag.unlink(missing_ok=True)
            run.keep(f"{name} unfinished", complete)
            raise RunStopped(f"{refusals[0]}; complete rollouts are kept in {run.path}/rollouts")
        return records, tries

    def spent(self) -> dict:
        """What the user's endpoint was asked since the last call, over all ranks. Collective."""
        if not self.endpoint:
            return {}
        shares = all_gather((self.endpoint.take(), self.endpoint.answered))
        found = {key: sorted({answered[model] for _, answered in shares if model in answered})
                 for model, key in self.keys.items()}
        return {f"simulator/{name}": sum(tally[name] for tally, _ in shares) for name in shares[0][0]} | {
            key: ", ".join(models) for key, models in found.items() if models}

    def stop_at_voids(self, counts: dict, records: list[Rollout], where: str) -> None:
        """Stops a run whose users or worlds fail too often to be trained or judged on. Collective."""
        most = self.config.max_void_rate
        if counts["void"] > most * counts["rollouts"]:
            faults = sum(all_gather(Counter(p["fault"] for r in records for p in r.private if "fault" in p)), Counter())
            raise RunStopped(f"{counts['void']} of {counts['rollouts']} rollouts of {where} are void, above "
                             f"--max-void-rate {most}; mostly: {faults.most_common(1)[0][0]}")
