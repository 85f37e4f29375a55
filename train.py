"""Training: SFT, Interactive GRPO, FACA and its controls in one FSDP2 loop.

    torchrun train.py                                  tiny model, embedded domain, two CPU cores: SFT, then FACA
    torchrun train.py --method grpo --model RUN/sft    the matched control, from that run's SFT checkpoint
    torchrun --nproc-per-node 2 train.py               the same on two ranks

One step: G prompts x K rollouts -> rewards and private reactions -> Eq. 6 -> Eqs. 7-8 -> one AdamW step. Interactive
GRPO is lambda 0 on the same path: the arms differ in the advantage and nothing else, and their first rollouts are equal
token for token. Whole groups stay on one rank; credit is computed from the rewards and reactions of all ranks, so that
controls and telemetry do not depend on their number; the loss is a mean over the trainable tokens of all rollouts of
all ranks. What the paper leaves open is chosen: a star in the help, and the list in the README.

Axes: G prompts, K rollouts of each, N rollouts, Q segments, T tokens.
"""

import argparse
import dataclasses
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import faca
from env import Task, load_tasks, make_env
from eval import STREAM, Run, RunStopped, UsageError, all_gather, all_reduce, figures, start_processes, table
from rollout import (Caps, Chat, Rollout, credit_tensors, micro_batches, play_groups, stream_seed, summary,
                     token_tensors)
from sampler import PolicyError, Sampler, find_policy, load_policy, note_of, save_policy, score
EXPERT = -1  # stands for the step in the random streams of the expert's dialogues, as eval.STREAM's does in evaluation


def option(tiny, paper, help: str):
    """A field whose default depends on the preset."""
    return field(default=None, metadata={"tiny": tiny, "paper": paper, "help": help})


@dataclass(frozen=True)
class Config:
    """Every option of a run; each field is a flag. "paper" is for any model but the tiny one (* chosen, see README)."""

    method: str = option("faca", "faca", "sft, grpo (Interactive GRPO) or faca")
    model: str = option("tiny", "tiny", "tiny, or a Hugging Face folder or id; with tiny, RL comes after SFT")
    env: str = option("mini:telecom", "mini:telecom", "DOMAIN[/SPLIT], several with commas")
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
    max_errors: int = option(4, 10, "agent errors (malformed, unknown, refused calls) that end a dialogue*")
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


def parse_config(argv: list[str]) -> Config:
    """Flags -> the resolved options. Raises UsageError, or exits with the help."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError(message)

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in dataclasses.fields(Config):
        tiny, paper = f.metadata["tiny"], f.metadata["paper"]
        shown = f" [{tiny}]" if tiny == paper else f" [tiny {tiny}, else {paper}]"
        parser.add_argument("--" + f.name.replace("_", "-"), type=f.type, metavar=f.type.__name__.upper(),
                            help=f.metadata["help"] + shown)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    preset = preset_of(given.get("model", "tiny"))  # a checkpoint knows the preset that it was trained with
    config = Config(**{f.name: f.metadata[preset] for f in dataclasses.fields(Config)} | given)
    if config.method != "faca" and (given.get("lam") or config.control != "none"):
        raise UsageError(f"--method {config.method} uses no reactions: it takes neither --lam nor --control")
    if config.model != "tiny" and config.method != "sft" and any(name.startswith("sft_") for name in given):
        raise UsageError(f"--model {config.model} is trained by {config.method} alone: no --sft-... option applies")
    config = dataclasses.replace(config, lam=config.lam if config.method == "faca" else 0.0)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.method}-s{config.seed}"
    config = dataclasses.replace(config, out=config.out or f"runs/{name}")
    check_config(config)
    return config


def preset_of(model: str) -> str:
    return "tiny" if model == "tiny" else note_of(model).get("preset", "paper")


def check_config(config: Config) -> None:
    """Raises UsageError for what can be known to be wrong before any work."""
    for name, known in (("method", ("sft", "grpo", "faca")), ("control", ("none", "shifted", "randomized"))):
        if getattr(config, name) not in known:
            raise UsageError(f"no {name} '{getattr(config, name)}'; there are: {', '.join(known)}")
    least = {"rollouts": 2, "kv_tokens": config.max_context + 16, "temperature": 1e-3, "clip": 1e-9, "grad_clip": 1e-9}
    least |= dict.fromkeys(("prompts", "max_messages", "max_message_tokens", "max_context", "max_errors", "sft_batch",
                            "sft_dialogues", "tokens_per_microbatch", "eval_trials"), 1)
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
        held_out = load_tasks(",".join(sorted({task.domain for task in tasks})), "test")
        find_policy(config.model)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if {task.id for task in tasks} & {task.id for task in held_out}:
        raise UsageError(f"--env {config.env} would train on held-out tasks, those that the run is evaluated on")
    if config.prompts > len(tasks):
        raise UsageError(f"--prompts {config.prompts} is more than the {len(tasks)} tasks of {config.env}")
    if Path(config.out).exists() and (not Path(config.out).is_dir() or any(Path(config.out).iterdir())):
        raise UsageError(f"--out {config.out} holds something already; name a new folder")


# ----------------------------------------------------------------------------------------------------- the trainer


class Trainer:
    """The policy on this rank: sharded fp32 weights and AdamW to train, a whole replica to sample with."""

    def __init__(self, config: Config):
        self.config = config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, self.model, replica = load_policy(config.model, config.seed, self.device)
        self.half = self.device.type == "cuda"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.half else MixedPrecisionPolicy()
        for layer in self.model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.model.score = score.__get__(self.model)
        register_fsdp_forward_method(self.model, "score")
        self.chat = Chat(self.tokenizer)
        banned = self.chat.banned_ids(self.model.config.vocab_size)
        self.banned = torch.tensor(banned, dtype=torch.long, device=self.device)
        self.sampler = Sampler(replica, self.chat.end_ids, banned, config.temperature, config.kv_tokens)
        self.caps = Caps(config.max_messages, config.max_message_tokens, config.max_context, config.max_errors)
        self.optimizer = None
        self.trained_on = set(note_of(config.model).get("trained_on", ()))

    def start(self, weight_decay: float) -> None:  # a fresh optimizer, for a phase of its own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=weight_decay)

    def roll_out(self, tasks: list[Task], rollouts: int, key: tuple[int, int], run: Run, done=None):
        """This rank's share of the tasks, a group each, and how many void tries were made again; none after a stop."""
        groups = list(enumerate(tasks))[self.rank::self.world]
        return play_groups(groups, rollouts, key, self.sampler, self.chat, self.caps, self.config.void_retries, done,
                           lambda: run.signalled)

    def update(self, records: list[Rollout], lr: float, objective) -> dict[str, float]:
        """One optimizer step on the rollouts of all ranks; every rank runs the same number of forward passes.

        objective(logp_NT, old_logp_NT, advantage_NT, mask_NT, denominator) -> (loss, stats) as faca.clipped_loss.
        """
        batches = micro_batches(records, self.config.tokens_per_microbatch)
        passes = int(all_reduce(len(batches), max))
        denominator = all_reduce(sum(s >= 0 for r in records for s in r.segment))
        found = []
        for i in range(passes):
            batch = token_tensors(batches[i] if i < len(batches) else [], self.tokenizer.pad_token_id)
            tokens_NT, segment_NT, sampled_NT, advantage_NQ = (x.to(self.device) for x in batch)
            mask_NT = segment_NT >= 0
            logp_NT, entropy = self.model.score(tokens_NT, mask_NT, self.config.temperature, self.banned)
            # In bf16 sampler and trainer round differently: the trainer's own logprobs keep the first ratio at 1.
            old_NT = logp_NT.detach() if self.half else sampled_NT
            advantage_NT = faca.token_advantage(advantage_NQ, segment_NT)
            loss, stats = objective(logp_NT, old_NT, advantage_NT, mask_NT, denominator)
            (loss * self.world).backward()  # FSDP averages over ranks, the denominator is global already
            gap = (logp_NT.detach() - sampled_NT)[mask_NT].abs()
            found.append({"loss": loss.item(), "entropy": entropy.item(), "logprob_gap": gap.sum().item()}
                         | {name: value.item() for name, value in stats.items()})
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip).full_tensor().item()
        if not math.isfinite(norm):
            raise RunStopped(f"the gradient's norm is {norm}: the run has diverged, try a lower learning rate")
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        every = {name: [row[name] for rank in all_gather(found) for row in rank] for name in found[0]}
        return {"loss": sum(every["loss"]), "grad_norm": norm, "lr": lr, "tokens": sum(every["tokens"]),
                "ratio_max": max(every["ratio_max"]), "ratio_min": min(every["ratio_min"])} | {
            name: sum(every[name]) / denominator for name in ("clipped", "k3", "entropy", "logprob_gap")}

    @torch.no_grad()
    def refresh_sampler(self) -> None:
        """The trained weights into the replica, a parameter at a time; what the sampler had cached is forgotten."""
        for copy, trained in zip(self.sampler.model.parameters(), self.model.parameters(), strict=True):
            copy.copy_(trained.full_tensor())
        self.sampler.weights_changed()

    def save(self, path: Path) -> None:
        """The weights as sampled, in a Hugging Face folder that knows what they were trained on."""
        if self.rank == 0:
            save_policy(path, self.sampler.model, self.tokenizer, self.chat.end_ids, {
                "preset": preset_of(self.config.model), "trained_on": sorted(self.trained_on),
                "caps": asdict(self.caps), "temperature": self.config.temperature})
        dist.barrier()


# ------------------------------------------------------------------------------------------------------- the phases


def negative_log_likelihood(logp_NT, old_logp_NT, advantage_NT, mask_NT, denominator):
    """SFT's loss, with the same masks and the same denominator as RL's."""
    _, stats = faca.clipped_loss(logp_NT.detach(), logp_NT.detach(), advantage_NT, mask_NT, denominator=denominator)
    return -logp_NT[mask_NT].sum() / denominator, stats


def warm_up(trainer: Trainer, tasks: list[Task], run: Run) -> None:
    """SFT on the expert's dialogues, played by the same loop as rollouts are, and so rendered and masked alike."""
    from extras.tiny import ExpertSampler
    config = trainer.config
    with run.bar(range(len(tasks) * config.sft_dialogues), "expert") as bar:
        dialogues, _ = play_groups(list(enumerate(tasks)), config.sft_dialogues, (config.seed, EXPERT),
                                   ExpertSampler(trainer.chat), trainer.chat, trainer.caps,
                                   done=lambda record: bar.update(), halt=lambda: run.signalled)
    if run.stopped():
        return
    trainer.trained_on |= {task.id for task in tasks}
    for record in dialogues:
        record.advantage = [0.0] * len(record.strategies)
    rng = random.Random(config.seed)
    trainer.start(weight_decay=0.0)
    bar = run.bar(range(config.sft_steps), "SFT")
    for step in bar:
        batch = rng.sample(dialogues, min(config.sft_batch, len(dialogues)))
        lr = config.sft_lr * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / config.sft_steps))
        stats = trainer.update(batch[trainer.rank::trainer.world], lr, negative_log_likelihood)
        run.log({"phase": "sft", "step": step} | {name: stats[name] for name in ("loss", "grad_norm", "lr", "tokens")})
        bar.set_postfix(loss=f"{stats['loss']:.3f}", refresh=False)
        if run.stopped():
            break
    trainer.refresh_sampler()


def assign_credit(trainer: Trainer, records: list[Rollout], step: int) -> dict:
    """Eq. 6 on the rollouts of all ranks; writes each record's advantages, returns telemetry and counts of the step."""
    config = trainer.config
    segment_NT = token_tensors(records, pad_id=0)[1]  # made as the loss's is, so that telemetry checks what is trained
    tokens = faca.segment_tokens(segment_NT, max([len(r.strategies) for r in records], default=0)).tolist()
    light = [dataclasses.replace(r, tokens=[], segment=[], logprobs=[], messages=[], private=[]) for r in records]
    every = sorted((pair for share in all_gather(list(zip(light, tokens, strict=False))) for pair in share),
                   key=lambda pair: (pair[0].group, pair[0].k))
    everyone = [r for r, _ in every]
    x = credit_tensors(everyone)
    reaction_NQ, observed_NQ = x["reaction_NQ"], x["observed_NQ"] & x["valid_N"][:, None]
    tokens_NQ = torch.tensor([t + [0] * (reaction_NQ.shape[1] - len(t)) for _, t in every])
    telemetry = faca.credit_telemetry(x["reward_N"], reaction_NQ, observed_NQ, x["exists_NQ"], tokens_NQ, x["group_N"],
                                      config.lam, x["valid_N"], [r.strategies for r in everyone])
    if config.control == "shifted":
        reaction_NQ, observed_NQ = faca.shifted(reaction_NQ, observed_NQ, x["exists_NQ"])
    elif config.control == "randomized":
        generator = torch.Generator().manual_seed(stream_seed(config.seed, step))
        reaction_NQ = faca.randomized(reaction_NQ, observed_NQ, generator)
    outcome_N = faca.outcome_advantage(x["reward_N"], x["group_N"], x["valid_N"])
    advantage_NQ = faca.faca_advantage(x["reward_N"], reaction_NQ, observed_NQ, x["group_N"], config.lam, x["valid_N"])
    place = {(r.group, r.k): i for i, r in enumerate(everyone)}
    for record in records:
        i = place[record.group, record.k]
        record.advantage = advantage_NQ[i, :len(record.strategies)].tolist()
        record.outcome_advantage = outcome_N[i].item()
    return summary(everyone) | telemetry | {"signal": bool(advantage_NQ[x["exists_NQ"]].any())}


def train(trainer: Trainer, tasks: list[Task], held_out: list[Task], run: Run) -> None:
    """Algorithm: roll out, credit, update, as long as there are steps."""
    config = trainer.config

    def objective(logp_NT, old_logp_NT, advantage_NT, mask_NT, denominator):
        return faca.clipped_loss(logp_NT, old_logp_NT, advantage_NT, mask_NT, config.clip, denominator)

    trainer.start(config.weight_decay)
    bar = run.bar(range(config.steps), config.method.upper())
    for step in bar:
        began = time.perf_counter()
        prompts = prompts_of(step, tasks, config)
        records, retried = trainer.roll_out(prompts, config.rollouts, (config.seed, step), run)
        if run.stopped():  # asked of all ranks at once: where one was told to, the step is given up by all
            break
        trainer.trained_on |= {task.id for task in prompts}
        rolled = time.perf_counter()
        counts = assign_credit(trainer, records, step)
        run.keep(step, records)
        if counts["void"] > config.max_void_rate * counts["rollouts"]:
            raise RunStopped(f"{counts['void']} of {counts['rollouts']} rollouts of step {step} are void, above "
                             f"--max-void-rate {config.max_void_rate}; see {run.path}/rollouts for their stops")
        stats = {}
        if counts["signal"]:  # else every advantage is 0 on every rank, and there is no update
            lr = config.lr * min(1.0, (step + 1) / max(config.warmup, 1))
            stats = trainer.update([r for r in records if not r.void], lr, objective)
            trainer.refresh_sampler()
        run.log({"phase": "rl", "step": step} | counts | stats | {
            "void_retried": int(all_reduce(retried)), "seconds_rollout": rolled - began,
            "seconds_update": time.perf_counter() - rolled})
        recent = [row["success"] for row in run.rows if row["phase"] == "rl"][-8:]
        bar.set_postfix(success=f"{sum(recent) / len(recent):.2f}", refresh=False)
        if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
            evaluate(trainer, held_out, run, f"RL step {step + 1}")


def evaluate(trainer: Trainer, tasks: list[Task], run: Run, name: str) -> None:
    """Sampled dialogues on held-out tasks; users and streams are the same at every evaluation of every arm."""
    trials = trainer.config.eval_trials
    with run.bar(range(len(tasks[trainer.rank::trainer.world]) * trials), f"held-out, {name}") as bar:
        records, _ = trainer.roll_out(tasks, trials, STREAM, run, lambda record: bar.update())
    trainer.sampler.weights_changed()  # what stays cached would round the next rollouts: evaluating changes no run
    if run.stopped():
        return
    light = [dataclasses.replace(r, tokens=[], segment=[], logprobs=[]) for r in records]
    run.evaluated[name] = figures([r for share in all_gather(light) for r in share])
    run.log({"phase": "held_out", "at": name} | run.evaluated[name])


def prompts_of(step: int, tasks: list[Task], config: Config) -> list[Task]:
    """The G prompts of a step: the tasks in an order of their own each epoch, one epoch after the other."""
    place = range(step * config.prompts, (step + 1) * config.prompts)
    order = {epoch: random.Random(f"{config.seed}/{epoch}").sample(tasks, len(tasks))
             for epoch in {i // len(tasks) for i in place}}
    return [order[i // len(tasks)][i % len(tasks)] for i in place]


def run_all(config: Config) -> int:
    """Everything between the options and the table; collective. Returns the exit code."""
    trainer = Trainer(config)
    tasks = load_tasks(config.env, "train")
    domains = ",".join(sorted({task.domain for task in tasks}))
    held_out = load_tasks(domains, "test")
    longest = max(len(trainer.chat.open([{"role": "system", "content": env.policy}], env.tools))
                  for env in map(make_env, tasks))
    if config.max_context < longest + config.max_message_tokens:
        raise UsageError(f"--max-context {config.max_context} has no room for a message after a prompt of {longest}")
    run = Run(config)
    evaluate(trainer, held_out, run, "before")
    if (config.model == "tiny" or config.method == "sft") and not run.stopped():
        warm_up(trainer, load_tasks(domains, "sft"), run)
        trainer.save(run.path / ("model" if config.method == "sft" else "sft"))
        evaluate(trainer, held_out, run, "after SFT")
    if config.method != "sft" and not run.stopped():
        try:
            train(trainer, tasks, held_out, run)
        except RunStopped:  # on all ranks alike; after any other exception they may not meet to save
            trainer.save(run.path / "model")
            raise
        trainer.save(run.path / "model")
        evaluate(trainer, held_out, run, "after RL")
    if trainer.rank == 0:
        print("\n" + "\n\n".join(filter(None, [table(run.evaluated), run.stop_line(), f"run folder: {run.path}"])))
    return run.exit_code


def main() -> None:
    try:
        config = parse_config(sys.argv[1:])
        start_processes()
        code = run_all(config)
    except (UsageError, PolicyError, RunStopped) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RunStopped) else 2
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
