"""A run, from outside: its options, and the folder that training writes and evaluation reads.

Config holds every option of train.py once; flags, help and presets come from it, and it is written into the folder.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

import faca
from env import WORLDS, Task, listing, load_tasks
from extras.alarm import ALARM, proxy_alarm
from extras.checkpoint import PolicyError, find_policy, flush, newest_note, preset_of
from extras.endpoint import endpoint_of, extra_for
from extras.ranks import UsageError, all_gather, all_reduce
from extras.show import fits, save_rollouts
from rollout import Rollout


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
    lr_decay: str = option("none", "none", "after it: none, linear or cosine, to 0 at the last step*")
    updates_per_batch: int = option(1, 1, "optimizer steps on a step's rollouts, each on all of them*")
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
    data: str = option("", "", "SFT's dialogues, .jsonl or .parquet with messages and tools (an expert's)")
    sft_epochs: int = option(1, 2, "epochs of SFT, where --sft-steps is 0*")
    sft_steps: int = option(200, 0, "SFT steps*")
    sft_batch: int = option(16, 16, "dialogues a step*")
    sft_dialogues: int = option(3, 3, "expert dialogues a task of the sft split*")
    sft_lr: float = option(6e-3, 1e-5, "AdamW's peak learning rate in SFT, cosine to 0*")
    sft_warmup: int = option(10, 10, "SFT steps of linear warm-up*")
    sft_validation: float = option(0.0, 0.05, "share of the dialogues kept for the validation loss*")
    tokens_per_microbatch: int = option(2048, 8192, "tokens in one forward pass of training (a longer rollout: alone)")
    recompute: bool = option(False, True, "recompute a layer's activations in backward: memory for time")
    kv_gib: float = option(0.0625, 16.0, "GiB of the sampler's cache, on each rank")
    graphs: bool = option(True, True, "decode by CUDA graphs, on a GPU")
    max_bad_steps: int = option(3, 3, "steps in a row that may be skipped for a loss or gradient that is not finite*")
    save_every: int = option(10, 10, "steps between checkpoints that --resume finds (0: at the end of a phase alone)")
    keep: int = option(2, 2, "checkpoints kept")
    from_rollouts: str = option("", "", "rollout file to put through every arm, instead of a run (extras/arms.py)")
    resume: str = option("", "", "run folder to go on with; its options are the run's")
    eval_every: int = option(0, 0, "RL steps between evaluations on held-out tasks (0: before and after alone)")
    eval_trials: int = option(2, 1, "sampled dialogues a held-out task (0: no evaluation, as by default with --data)")
    tensorboard: bool = option(False, False, "metrics to TensorBoard too, in the run folder")
    wandb: bool = option(False, False, "metrics to Weights & Biases too")

    @property
    def plays(self) -> bool:
        """Whether there will be dialogues with users: all but SFT on data without evaluation."""
        return self.method != "sft" or self.eval_trials > 0 or not self.data


# What may change when a run resumes, for it changes no weight of it (steps: without a decay alone).
FREE = ("steps", "simulator_url", "simulator_timeout", "concurrency", "tokens_per_microbatch", "recompute", "kv_gib",
        "graphs", "max_void_rate", "max_bad_steps", "save_every", "keep", "resume", "eval_every", "tensorboard",
        "wandb")


def parse_config(argv: list[str], description: str = "") -> Config:
    """Flags -> the resolved options. Raises UsageError, or exits with the help."""
    if "--plan" in argv:
        from extras.plan import plan
        print(plan(argv))
        sys.exit()

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError(message)

    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in dataclasses.fields(Config):
        tiny, paper = f.metadata["tiny"], f.metadata["paper"]
        add_flag(parser, f.name, None, f"{tiny}" if tiny == paper else f"tiny {tiny}, else {paper}")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    list_worlds(given.get("env", ""))
    if "from_rollouts" in given:
        from extras.arms import recorded
        return recorded(given)
    if "resume" in given:  # an empty one, as of a shell's unset variable, is no wish for a new run
        return resumed(Path(given["resume"]), given)
    preset = preset_of(given.get("model", "tiny"))  # a checkpoint knows the preset that it was trained with
    config = Config(**{f.name: f.metadata[preset] for f in dataclasses.fields(Config)} | given)
    if config.method != "faca" and (given.get("lam") or config.control != "none"):
        raise UsageError(f"--method {config.method} uses no reactions: it takes neither --lam nor --control")
    if config.model != "tiny" and config.method != "sft" and any(name.startswith(("sft_", "data")) for name in given):
        raise UsageError(f"--model {config.model} is trained by {config.method} alone: no --sft-... option applies")
    if config.data and "eval_trials" not in given:
        config = dataclasses.replace(config, eval_trials=0)
    config = dataclasses.replace(config, lam=config.lam if config.method == "faca" else 0.0)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}-s{config.seed}"
    config = dataclasses.replace(config, out=config.out or f"runs/{name}",
                                 simulator_extra=config.simulator_extra or extra_for(config.simulator))
    check_config(config)
    return config


def resumed(folder: Path, given: dict) -> Config:
    """The options of the run in that folder, and what may change of them."""
    try:
        config = Config(**json.loads((folder / "config.json").read_text()))
        if wrong := [f.name for f in dataclasses.fields(Config) if not fits(getattr(config, f.name), f.type)]:
            raise ValueError(f"no value, or none of its type: {', '.join(wrong)}")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--resume {folder} is no run folder of this version ({error})") from None
    config, free = dataclasses.replace(config, out=str(folder)), free_of(config)  # it may have been moved
    for name, value in given.items():
        value = str(Path(value)) if name == "out" else value
        if name not in free and value != getattr(config, name):
            raise UsageError(f"--{name.replace('_', '-')} {value} is not what {folder} began with, "
                             f"{getattr(config, name)}; a run resumes with its own options (free: {', '.join(free)})")
    config = dataclasses.replace(config, **given | {"out": str(folder)})
    check_config(config)
    return config


def free_of(config: Config) -> tuple[str, ...]:
    return FREE if config.lr_decay == "none" else FREE[1:]


def digest_of(config: Config) -> str:
    """Of the options that make a run what it is; where its folder, model and data lie is not among them."""
    fixed = {name: value for name, value in asdict(config).items()
             if name not in (*free_of(config), "out", "model", "data")}
    return hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=8).hexdigest()


def add_flag(parser: argparse.ArgumentParser, name: str, default, shown: str) -> None:
    """A flag for the option of that name."""
    f = Config.__dataclass_fields__[name]
    kind = ({"action": argparse.BooleanOptionalAction} if f.type is bool else
            {"type": f.type, "metavar": f.type.__name__.upper()})
    parser.add_argument("--" + name.replace("_", "-"), default=default, **kind,
                        help=f"{f.metadata['help']} [{shown}]")


def list_worlds(env: str) -> None:
    """For "tau2:" and the like, prints what there is, and exits."""
    if env in {f"{family}:" for family in WORLDS}:
        print(listing(env[:-1]))
        sys.exit()


def check_values(config: Config) -> None:
    """Raises UsageError for a value that no option of that name takes."""
    for name, known in (("method", ("sft", "grpo", "faca")), ("control", ("none", "shifted", "randomized")),
                        ("lr_decay", ("none", "linear", "cosine"))):
        if getattr(config, name) not in known:
            raise UsageError(f"no {name} '{getattr(config, name)}'; there are: {', '.join(known)}")
    least = {"rollouts": 2, "kv_gib": 1e-3, "temperature": 1e-3, "clip": 1e-9, "grad_clip": 1e-9}
    least |= dict.fromkeys(("prompts", "max_messages", "max_message_tokens", "max_context", "max_errors", "sft_batch",
                            "max_dialogue_steps", "sft_dialogues", "tokens_per_microbatch",
                            "concurrency", "simulator_timeout", "keep", "updates_per_batch", "sft_epochs"), 1)
    least |= dict.fromkeys(("steps", "lr", "warmup", "weight_decay", "void_retries", "max_void_rate", "sft_steps",
                            "sft_lr", "sft_warmup", "sft_validation", "eval_every", "eval_trials", "save_every",
                            "max_bad_steps", "seed"), 0)
    for name, low in least.items():
        value = getattr(config, name)
        if not low <= value < 2**31:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {low:g} and below 2^31, is {value}")


def check_config(config: Config) -> None:
    """Raises UsageError for what can be known to be wrong before any work."""
    check_values(config)
    if config.control != "none" and config.lam == 0:
        raise UsageError(f"--control {config.control} does nothing at --lam 0")
    try:
        faca.check_lam(config.lam)
        tasks, held_out = tasks_of(config)
        with_sft = config.model == "tiny" or config.method == "sft"
        if with_sft and not config.data and not all(task.domain.startswith("mini:") for task in tasks):
            raise UsageError(f"--method {config.method} of --model {config.model} begins with SFT on the dialogues of "
                             f"an expert, and only the mini: domains have one; for {config.env} name another --model, "
                             "or the dialogues in --data")
        if config.plays:
            endpoint_of(config, {task.domain for task in tasks})
        find_policy(config.model)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if {task.identity for task in tasks} & {task.identity for task in held_out}:
        raise UsageError(f"--env {config.env} would train on held-out tasks, those that the run is evaluated on")
    if config.method != "sft" and config.prompts > len(tasks):
        raise UsageError(f"--prompts {config.prompts} is more than the {len(tasks)} tasks of {config.env}")
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and not importlib.util.find_spec(package):
            raise UsageError(f"--{package} needs that package: pip install {package}")
    if config.data and not Path(config.data).is_file():
        raise UsageError(f"--data {config.data} is no file")
    if config.sft_validation >= 1:
        raise UsageError(f"--sft-validation {config.sft_validation} leaves nothing to train on; it must be below 1")
    out = Path(config.out)
    if not config.resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {config.out} holds something already; name a new folder, or --resume it")


def tasks_of(config: Config) -> tuple[list[Task], list[Task]]:
    """Those to train on, and those to evaluate on; none where no dialogue is played."""
    tasks = load_tasks(config.env, "train") if config.plays else []
    return tasks, tasks_beside(tasks, "test") if config.eval_trials else []


def tasks_beside(tasks: list[Task], split: str) -> list[Task]:
    """Another split of the same domains."""
    domains = sorted({task.domain for task in tasks})
    return load_tasks(",".join(f"{domain}/{split}" for domain in domains), split) if domains else []


# ---------------------------------------------------------------------------------------------------------- folder


def progress(steps, name: str, aside: bool = False, disable: bool = False) -> tqdm:
    """A bar that is drawn by time, so that a status shows while nothing ends; aside: only while it takes long."""
    pause = 0.1 if sys.stderr.isatty() else 10  # seconds between two redraws; a log file wants few
    return tqdm(steps, name, disable=disable, dynamic_ncols=True, mininterval=pause, miniters=0, leave=not aside,
                delay=5 if aside else 0, initial=steps.start, total=steps.stop)


def rows_before(note: dict | None, metrics: Path, config: Config) -> list[dict]:
    """The metrics that a resumed run goes on from: those of its checkpoint, and evaluations of these very weights.

    Rows that are lost or damaged change no weight: one line on stderr says how many there were.
    """
    def read(line: bytes) -> dict | None:
        try:
            row = json.loads(line)
        except ValueError:
            return None
        return row if isinstance(row, dict) and "phase" in row else None

    def evaluated(row: dict | None) -> bool:
        over = row and row.get("at") == "after RL" and note["step"] < config.steps  # it goes on with more steps
        return bool(row) and row["phase"] == "held_out" and not over and (
            row["void"] <= config.max_void_rate * row["rollouts"])  # else the run stopped, and it is asked for again

    every = [read(line) for line in metrics.read_bytes().splitlines()] if note and metrics.exists() else []
    rows = [row for row in every[:note["rows"] if note else 0] if row]
    if note and len(rows) < note["rows"]:
        print(f"warning: {note['rows'] - len(rows)} of the {note['rows']} rows before the checkpoint are lost or "
              f"damaged in {metrics}", file=sys.stderr)
    return rows + list(itertools.takewhile(evaluated, every[note["rows"]:] if note else []))


def lock(folder: Path):
    """The folder is this process's as long as the file lives that comes back; OSError where it is another's."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # dropped with the process, however it ends
    except BlockingIOError:
        raise OSError("another process is at work in it") from None
    return file


class Run:
    """The folder that training writes and evaluation reads (config.json, metrics.jsonl, rollouts/), and how it ends.

    SIGINT, SIGTERM and SIGHUP ask the run to stop: dialogues under way are given up, and what is done is saved. A
    further one after two seconds quits at once (within them, for torchrun hands on what a terminal has sent already).
    """

    def __init__(self, config, origin: dict[str, str]):
        self.origin = origin | {"config.json": digest_of(config)}
        self.rank, self.path = dist.get_rank(), Path(config.out)
        self.rows: list[dict] = []
        self.evaluated: dict[str, dict] = {}
        self.signalled, self.exit_code, self.told_at = False, 0, 0.0
        self.sinks, self.step, self.every = [], 0, config.save_every
        self.note = self.claim(config)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the last: the terminal was closed
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup asks for
                signal.signal(number, self.on_signal)

    def claim(self, config) -> dict | None:
        """Makes the folder this run's own; the note of the checkpoint that it resumes from, if any. Collective."""
        refusal, note = "", None
        if self.rank == 0:
            try:
                note = self.open(config)
            except (UsageError, PolicyError) as error:
                refusal = str(error)
            except OSError as error:
                refusal = f"--out {self.path} can't be made this run's folder: {error.strerror or error}"
        refusal, note, self.rows = all_gather((refusal, note, self.rows))[0]
        if refusal:
            raise UsageError(refusal)
        self.evaluated = {row["at"]: row for row in self.rows if row["phase"] == "held_out"}
        return note

    def open(self, config) -> dict | None:
        """On rank 0: the lock, the options, and where the run resumes, its metrics cut back to the checkpoint's."""
        (self.path / "rollouts").mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.path)
        note, options = None, json.dumps(asdict(config), indent=1) + "\n"
        if config.resume:
            note = newest_note(self.path)
            changed = [name for name, digest in self.origin.items() if note and note["origin"].get(name) != digest]
            if changed:
                raise UsageError(f"{changed[0]} is not what {self.path} began with: it can't be resumed")
            if note and note["phase"] == "rl" and note["step"] > config.steps:
                raise UsageError(f"--steps {config.steps} is less than the {note['step']} that {self.path} has done")
            (self.path / "refused").unlink(missing_ok=True)
            for part in self.path.glob("checkpoints/*.part"):
                shutil.rmtree(part)
            self.rows = rows_before(note, self.path / "metrics.jsonl", config)
            for name, text in (("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows)),
                               ("config.json", options)):
                part = self.path / f"{name}.part"
                part.write_text(text)
                flush(part)
                part.replace(self.path / name)
            print(f"resuming {self.path} from "
                  f"{Path(note['path']).name if note else 'the beginning: it has no checkpoint'}", file=sys.stderr)
        else:
            with (self.path / "config.json").open("x") as file:
                file.write(options)
        print(" ".join(f"{name}={value}" for name, value in asdict(config).items()), file=sys.stderr)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(self.path)
            self.sinks.append(lambda row, step: [writer.add_scalar(name, value, step) for name, value in row.items()])
        if config.wandb:
            import wandb
            name = re.sub(r"\W+", "-", str(self.path)).strip("-")
            run = wandb.init(project="faca", id=name, name=name, config=asdict(config), dir=self.path, resume="allow")
            self.sinks.append(lambda row, step: run.log(row | {"step": step}))
        return note

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

    def due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint is, after that step."""
        return step + 1 == steps or self.every > 0 and (step + 1) % self.every == 0

    def stop_line(self) -> str:
        return f"stopped early, after {len(self.rows)} rows of metrics" if self.signalled else ""

    def bar(self, steps, name: str, aside: bool = False) -> tqdm:
        return progress(steps, name, aside, self.rank != 0)

    def log(self, row: dict) -> None:
        before = [r for r in self.rows if r["phase"] == "rl"][-1:]
        self.rows.append(row)
        if row["phase"] == "rl":
            row["proxy_alarm"] = proxy_alarm(self.rows)
            if self.rank == 0 and row["proxy_alarm"] and not any(r.get("proxy_alarm") for r in before):
                tqdm.write(f"WARNING: step {row['step']}: {ALARM}; see python eval.py audit {self.path}",
                           file=sys.stderr)
        if self.rank == 0:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.step = row.get("step", self.step)
        numbers = {f"{row['phase']}/{name}": x for name, x in row.items() if isinstance(x, int | float)}
        for sink in self.sinks:
            sink(numbers, self.step)

    def keep(self, name: str, records: list[Rollout]) -> None:
        """The rollouts of all ranks in one file, "step 00003" in step-00003.jsonl. Collective."""
        shares = all_gather(records)
        if self.rank == 0:
            every = sorted((r for share in shares for r in share), key=lambda r: (r.group, r.k))
            save_rollouts(self.path / "rollouts" / (re.sub(r"\W+", "-", name) + ".jsonl"), every)
