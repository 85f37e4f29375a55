"""A run, from outside: its options, its processes, and the folder that training writes and evaluation reads.

Config holds every option of train.py once; flags, help and presets come from it, and it is written into the folder.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import faca
from env import WORLDS, Task, listing, load_tasks
from extras.checkpoint import find_policy, note_of
from rollout import Rollout, save_rollouts
from simulator import endpoint_of, extra_for


class UsageError(ValueError):
    """The user's mistake, in one line that says what to do. Exit code 2."""


class RunStopped(RuntimeError):
    """The run can't go on, and says why in one line. Raised on all ranks alike."""


# --------------------------------------------------------------------------------------------------------- options


def option(tiny, paper, help: str):
    """A field whose default depends on the preset."""
    return field(default=None, metadata={"tiny": tiny, "paper": paper, "help": help})


@dataclass(frozen=True)
class Config:
    """Every option of a run; each field is a flag. "paper" is for any model but the tiny one (* chosen, see README)."""

    method: str = option("faca", "faca", "sft, grpo (Interactive GRPO) or faca")
    model: str = option("tiny", "tiny", "tiny, or a Hugging Face folder or id; with tiny, RL comes after SFT")
    env: str = option("mini:telecom", "tau2:airline/train,tau2:retail/train",
                      "DOMAIN[/SPLIT], several with commas; mini:, tau:, tau2: or tau3: alone lists them")
    simulator: str = option("scripted", "deepseek-v4-flash", "the user: scripted (mini: alone), or a model's name")
    simulator_url: str = option("", "", "its OpenAI-compatible endpoint; the key is in SIMULATOR_API_KEY")
    simulator_extra: str = option("", "", "JSON object for the body of each request (thinking off, for deepseek-...)")
    simulator_timeout: float = option(120.0, 120.0, "seconds that a request may take*")
    concurrency: int = option(128, 128, "requests in flight at once, of all ranks*")
    judge: str = option("", "", "model at the same endpoint for tau3's judged tasks (the simulator's own)")
    out: str = option("", "", "run folder (runs/DATE-METHOD-SEED)")
    seed: int = option(0, 0, "of everything random")
    lam: float = option(0.5, 0.5, "lambda of Eq. 6; at most 0.5; negative is the sign-reversed control")
    control: str = option("none", "none", "shifted or randomized reactions (Table 4)")
    steps: int = option(60, 120, "RL steps (tiny's*)")
    prompts: int = option(8, 16, "prompt groups a step, G (tiny's*)")
    rollouts: int = option(4, 8, "rollouts a prompt, K*")
    lr: float = option(3e-4, 1e-6, "AdamW's learning rate in RL*")
    warmup: int = option(10, 0, "RL steps of linear warm-up*")
    weight_decay: float = option(0.0, 0.01, "AdamW's*")
    grad_clip: float = option(1.0, 1.0, "largest gradient norm*")
    clip: float = option(0.2, 0.2, "epsilon of Eq. 7, both sides*")
    temperature: float = option(1.0, 1.0, "of sampling, and of the scored distribution*")
    max_messages: int = option(16, 30, "agent messages a dialogue*")
    max_message_tokens: int = option(48, 1024, "tokens an agent message*")
    max_context: int = option(768, 32768, "tokens a dialogue*")
    max_errors: int = option(4, 10, "failed tool calls, of agent and user, that end a dialogue*")
    max_dialogue_steps: int = option(200, 200, "messages and tool rounds of both sides that end a dialogue*")
    void_retries: int = option(2, 2, "further tries of a rollout whose user or world failed")
    max_void_rate: float = option(0.2, 0.2, "share of void rollouts in a step that stops the run")
    sft_steps: int = option(200, 200, "SFT steps*")
    sft_batch: int = option(16, 16, "expert dialogues a step*")
    sft_dialogues: int = option(3, 3, "expert dialogues a task of the sft split*")
    sft_lr: float = option(6e-3, 1e-5, "AdamW's peak learning rate in SFT, cosine to 0*")
    tokens_per_microbatch: int = option(2048, 8192, "padded tokens in one forward pass")
    kv_tokens: int = option(65536, 262144, "tokens that the sampler's cache holds")
    eval_every: int = option(0, 0, "RL steps between evaluations on held-out tasks (0: before and after alone)")
    eval_trials: int = option(2, 1, "sampled dialogues a held-out task")


def parse_config(argv: list[str], description: str = "") -> Config:
    """Flags -> the resolved options. Raises UsageError, or exits with the help."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError(message)

    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in dataclasses.fields(Config):
        tiny, paper = f.metadata["tiny"], f.metadata["paper"]
        add_flag(parser, f.name, None, f"{tiny}" if tiny == paper else f"tiny {tiny}, else {paper}")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    list_worlds(given.get("env", ""))
    preset = preset_of(given.get("model", "tiny"))  # a checkpoint knows the preset that it was trained with
    config = Config(**{f.name: f.metadata[preset] for f in dataclasses.fields(Config)} | given)
    if config.method != "faca" and (given.get("lam") or config.control != "none"):
        raise UsageError(f"--method {config.method} uses no reactions: it takes neither --lam nor --control")
    if config.model != "tiny" and config.method != "sft" and any(name.startswith("sft_") for name in given):
        raise UsageError(f"--model {config.model} is trained by {config.method} alone: no --sft-... option applies")
    config = dataclasses.replace(config, lam=config.lam if config.method == "faca" else 0.0)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}-s{config.seed}"
    config = dataclasses.replace(config, out=config.out or f"runs/{name}",
                                 simulator_extra=config.simulator_extra or extra_for(config.simulator))
    check_config(config)
    return config


def add_flag(parser: argparse.ArgumentParser, name: str, default, shown: str) -> None:
    """A flag for the option of that name."""
    f = Config.__dataclass_fields__[name]
    parser.add_argument("--" + name.replace("_", "-"), type=f.type, default=default, metavar=f.type.__name__.upper(),
                        help=f"{f.metadata['help']} [{shown}]")


def list_worlds(env: str) -> None:
    """For "tau2:" and the like, prints what there is, and exits."""
    if env in {f"{family}:" for family in WORLDS}:
        print(listing(env[:-1]))
        sys.exit()


def preset_of(model: str) -> str:
    return "tiny" if model == "tiny" else note_of(model).get("preset", "paper")


def check_config(config: Config) -> None:
    """Raises UsageError for what can be known to be wrong before any work."""
    for name, known in (("method", ("sft", "grpo", "faca")), ("control", ("none", "shifted", "randomized"))):
        if getattr(config, name) not in known:
            raise UsageError(f"no {name} '{getattr(config, name)}'; there are: {', '.join(known)}")
    least = {"rollouts": 2, "kv_tokens": config.max_context + 16, "temperature": 1e-3, "clip": 1e-9, "grad_clip": 1e-9}
    least |= dict.fromkeys(("prompts", "max_messages", "max_message_tokens", "max_context", "max_errors", "sft_batch",
                            "max_dialogue_steps", "sft_dialogues", "tokens_per_microbatch", "eval_trials",
                            "concurrency", "simulator_timeout"), 1)
    least |= dict.fromkeys(("steps", "lr", "warmup", "weight_decay", "void_retries", "max_void_rate", "sft_steps",
                            "sft_lr", "eval_every", "seed"), 0)
    for name, low in least.items():
        value = getattr(config, name)
        if not low <= value < 2**31:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {low:g} and below 2^31, is {value}")
    if config.control != "none" and config.lam == 0:
        raise UsageError(f"--control {config.control} does nothing at --lam 0")
    try:
        faca.check_lam(config.lam)
        tasks = load_tasks(config.env, "train")
        held_out = tasks_beside(tasks, "test")
        with_sft = config.model == "tiny" or config.method == "sft"
        if with_sft and not all(task.domain.startswith("mini:") for task in tasks):
            raise UsageError(f"--method {config.method} of --model {config.model} begins with SFT on the dialogues of "
                             f"an expert, and only the mini: domains have one; for {config.env} name another --model")
        endpoint_of(config, {task.domain for task in tasks})
        find_policy(config.model)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if {task.identity for task in tasks} & {task.identity for task in held_out}:
        raise UsageError(f"--env {config.env} would train on held-out tasks, those that the run is evaluated on")
    if config.prompts > len(tasks):
        raise UsageError(f"--prompts {config.prompts} is more than the {len(tasks)} tasks of {config.env}")
    if Path(config.out).exists() and (not Path(config.out).is_dir() or any(Path(config.out).iterdir())):
        raise UsageError(f"--out {config.out} holds something already; name a new folder")


def tasks_beside(tasks: list[Task], split: str) -> list[Task]:
    """Another split of the same domains."""
    return load_tasks(",".join(f"{domain}/{split}" for domain in sorted({task.domain for task in tasks})), split)


# ------------------------------------------------------------------------------------------------ ranks, folder


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


def progress(steps, name: str, aside: bool = False, disable: bool = False) -> tqdm:
    """A bar that is drawn by time, so that a status shows while nothing ends; aside: only while it takes long."""
    pause = 0.1 if sys.stderr.isatty() else 10  # seconds between two redraws; a log file wants few
    return tqdm(steps, name, disable=disable, dynamic_ncols=True, mininterval=pause, miniters=0, leave=not aside,
                delay=5 if aside else 0)


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

    def bar(self, steps, name: str, aside: bool = False) -> tqdm:
        return progress(steps, name, aside, self.rank != 0)

    def log(self, row: dict) -> None:
        self.rows.append(row)
        if self.rank == 0:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def keep(self, name: str, records: list[Rollout]) -> None:
        """The rollouts of all ranks in one file, "step 00003" in step-00003.jsonl. Collective."""
        shares = all_gather(records)
        if self.rank == 0:
            every = sorted((r for share in shares for r in share), key=lambda r: (r.group, r.k))
            save_rollouts(self.path / "rollouts" / (re.sub(r"\W+", "-", name) + ".jsonl"), every)
