"""Training: SFT, Interactive GRPO, FACA and its controls in one FSDP2 loop.

    torchrun train.py                                  tiny model, embedded domain, two CPU cores: SFT, then FACA
    torchrun train.py --method grpo --model RUN/sft    the matched control, from that run's SFT checkpoint
    torchrun --nproc-per-node 2 train.py               the same on two ranks
    torchrun train.py --resume RUN                     goes on with a run that was stopped or killed
    python train.py --from-rollouts FILE.jsonl         one recorded batch through every arm; trains nothing
    python train.py --plan --model Qwen3-8B            memory, disk and time from the config; --plan --help for more

One step: G prompts x K rollouts -> rewards and private reactions -> Eq. 6 -> Eqs. 7-8 -> one AdamW step. Interactive
GRPO is lambda 0 on the same path: the arms differ in the advantage and nothing else, and their first rollouts are equal
token for token. Whole groups stay on one rank; credit is computed from the rewards and reactions of all ranks, so that
controls and telemetry do not depend on their number; the loss is a mean over the trainable tokens of all rollouts of
all ranks. What the paper leaves open is chosen: a star in the help, and the list in the README.

Whatever is random is made from the seed and the step, so a run resumes exactly from weights, optimizer and step.

Axes: G prompts, K rollouts of each, N rollouts, Q segments, T tokens; 1T is a row of whole rollouts, packed.
"""

import asyncio
import math
import os
import random
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from tqdm import tqdm

import faca
from env import EnvError, Task
from eval import STREAM, figures, longest_prompt, summary, table
from extras.checkpoint import (PolicyError, SaveError, load_sharded, note_of, origin_of, resume, save, save_export,
                               trained_on_complete)
from extras.plan import flops_per_token, peak_flops, shape_from
from extras.ranks import (Actors, Lasting, RunStopped, UsageError, all_gather, all_reduce, ask_first, light,
                          peak_memory, start_processes)
from extras.run import Config, Run, parse_config, tasks_of
from extras.sft import DataError, load_dialogues, split
from rollout import Chat, Rollout, credit_tensors, packed, padded, stream_seed
from sampler import PACKED, Sampler, kv_bytes_per_token, score


# ----------------------------------------------------------------------------------------------------- the trainer


class Trainer:
    """The policy on this rank: sharded fp32 weights and AdamW to train, a whole replica to sample with (or none)."""

    def __init__(self, config: Config, sampling: bool = True):
        self.config = config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.tokenizer, self.model, replica = load_sharded(config.model, config.seed, self.device, self.half)
        self.model.config._attn_implementation = PACKED
        self.model.train(config.recompute)  # it has no dropout; transformers recomputes in this mode alone
        if config.recompute:
            self.model.activation_checkpointing_enable()
        self.model.score = score.__get__(self.model)
        register_fsdp_forward_method(self.model, "score")
        self.chat = Chat(self.tokenizer)
        banned = self.chat.banned_ids(self.model.config.vocab_size)
        self.banned = torch.tensor(banned, dtype=torch.long, device=self.device)
        self.optimizer, self.bad_steps = None, 0  # in a row
        self.at = self.saved = None  # (phase, step) that comes next; that of the newest checkpoint
        if not sampling:
            return
        kv_tokens = int(config.kv_gib * 2**30) // kv_bytes_per_token(replica.config, self.half)
        if kv_tokens < config.max_context + 512:
            raise UsageError(f"--kv-gib {config.kv_gib} holds {kv_tokens} tokens of {config.model}, too few for "
                             f"dialogues of --max-context {config.max_context}")
        self.sampler = Sampler(replica, self.chat.end_ids, banned, config.temperature, kv_tokens, graphs=config.graphs)
        self.refresh_sampler()
        self.actors = Actors(config, self.sampler, self.chat)
        self.trained_on = set(note_of(config.model).get("trained_on", ()))
        self.trained_on_complete = trained_on_complete(config.model) and not config.data  # a file names no tasks

    def update(self, records: list[Rollout], lr: float, objective, updates: int = 1) -> dict[str, float]:
        """Optimizer steps on the rollouts of all ranks, each on all of them; every rank runs as many forward passes.

        objective(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator) -> (loss, stats) as faca.clipped_loss.
        One whose loss or gradient is not finite is skipped on all ranks; too many steps with no other stop the run.
        """
        self.sampler.sleep()  # its weights and cache would stand idle until refresh_sampler()
        batches = self.batches_of(records)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        seen: list[dict[str, float]] = []
        for _ in range(updates):
            stats = self.loss_of(batches, objective)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip).full_tensor().item()
            finite = math.isfinite(norm) and math.isfinite(stats["loss"])
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append({"grad_norm": norm, "lr": lr, "skipped": int(not finite)} | stats)
        self.bad_steps = self.bad_steps + 1 if all(stats["skipped"] for stats in seen) else 0
        if self.bad_steps > self.config.max_bad_steps:
            raise RunStopped(f"the loss is {stats['loss']} and the gradient's norm {norm}, after {self.bad_steps} "
                             "skipped steps in a row: the run has diverged, try a lower learning rate")
        last = ("clipped", "k3", "ratio_max", "ratio_min")  # of the others, what the first update saw
        return seen[0] | {name: seen[-1][name] for name in last} | {"skipped": sum(s["skipped"] for s in seen)}

    def batches_of(self, records: list[Rollout]) -> list[dict]:
        """This rank's micro-batches on its device, as many as every other rank's. Collective."""
        batches = micro_batches(records, self.config.tokens_per_microbatch)
        passes = int(all_reduce(len(batches), max))
        names = ("tokens_1T", "segment_1T", "sampled_1T", "advantage_1Q", "lengths")
        return [{name: x.to(self.device) if torch.is_tensor(x) else x
                 for name, x in zip(names, packed(batch, self.tokenizer.pad_token_id), strict=True)}
                for batch in [*batches, *([] for _ in range(passes - len(batches)))]]

    def loss_of(self, batches: list[dict], objective, backward: bool = True) -> dict[str, float]:
        """The objective over the micro-batches of all ranks, its gradient, and what it saw. Collective.

        In bf16 sampler and trainer round differently: the old logprobs are the trainer's own, from the first time that
        a batch is here, which keeps the first ratio at 1. The batches carry them.
        """
        masks = [batch["segment_1T"] >= 0 for batch in batches]
        denominator = all_reduce(sum(mask.sum().item() for mask in masks))
        found = []
        for batch, mask_1T in zip(batches, masks, strict=True):
            with torch.set_grad_enabled(backward):
                logp_1T, entropy = self.model.score(batch["tokens_1T"], batch["lengths"], mask_1T,
                                                    self.config.temperature, self.banned)
            sampled_1T = batch["sampled_1T"]
            old_1T = batch.setdefault("old_1T", sampled_1T if self.half == torch.float32 else logp_1T.detach())
            advantage_1T = faca.token_advantage(batch["advantage_1Q"], batch["segment_1T"])
            loss, stats = objective(logp_1T, old_1T, advantage_1T, mask_1T, denominator)
            if backward:
                (loss * self.world).backward()  # FSDP averages over ranks, the denominator is global already
            gap = (logp_1T.detach() - sampled_1T)[mask_1T]
            found.append({"loss": loss.item(), "entropy": entropy.item(), "logprob_gap": gap.abs().sum().item(),
                          "logprob_gap_max": gap.abs().max().item() if len(gap) else 0.0,
                          "logprob_gap_clipped": (gap.expm1().abs() > self.config.clip).sum().item()}
                         | {name: value.item() for name, value in stats.items()})
        self.model.reshard()  # the root's weights stay whole after a forward without backward
        every = {name: [row[name] for rank in all_gather(found) for row in rank] for name in found[0]}
        return {"loss": sum(every["loss"]), "tokens": sum(every["tokens"]), "ratio_max": max(every["ratio_max"]),
                "ratio_min": min(every["ratio_min"]), "logprob_gap_max": max(every["logprob_gap_max"])} | {
            name: sum(every[name]) / denominator
            for name in ("clipped", "k3", "entropy", "logprob_gap", "logprob_gap_clipped")}

    @torch.no_grad()
    def refresh_sampler(self) -> None:
        """The trained weights into the replica, a parameter at a time; what the sampler had cached is forgotten.

        Then a probe: a few sampled tokens are scored by the trainer. Where the two disagree, weights, temperature or
        bans are not the same, and RuntimeError ends the run.
        """
        self.sampler.wake(parameter.full_tensor() for parameter in self.model.parameters())
        prompt = self.chat.open([{"role": "user", "content": "x"}], [])
        sample = asyncio.run(self.sampler.sample(prompt, 8, self.config.seed))
        self.sampler.weights_changed()  # nothing of it stays cached
        probe = Rollout("", "", 0, 0, 0)
        probe.append(prompt)
        probe.append(sample.tokens, 0, sample.logprobs)
        probe.advantage = [0.0]
        seen = self.loss_of(self.batches_of([probe]), negative_log_likelihood, backward=False)
        gap, most = (seen["logprob_gap"], 0.1) if self.half == torch.bfloat16 else (seen["logprob_gap_max"], 1e-3)
        if not gap <= most:
            raise RuntimeError(f"sampler and trainer differ by {gap:.3g} in log-prob, above {most}: not one policy")

    def begin(self, phase: str, weight_decay: float, run: Run) -> int:
        """A fresh optimizer for a phase, or that of the newest checkpoint; the step to begin at. Collective."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=weight_decay,
                                           fused=True)
        for p in self.model.parameters():  # else the first checkpoint would make them by a step, and count it as one
            count = torch.zeros((), device=self.device)
            self.optimizer.state[p] = {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        self.at = phase, 0
        if run.note and run.note["phase"] == phase:
            resume(self, run.note)
            self.refresh_sampler()
        return self.at[1]


def micro_batches(records: list[Rollout], budget: int) -> list[list[Rollout]]:
    """Records in batches of about equally many tokens, which keeps memory low: `budget` at most (a longer one alone).

    Longest first, each to the emptiest batch; packed rows have no padding, so lengths may mix.
    """
    records = sorted(records, key=lambda r: len(r.tokens), reverse=True)
    count = min(-(-sum(len(r.tokens) for r in records) // budget), len(records))
    while True:
        batches: list[list[Rollout]] = [[] for _ in range(count)]
        for record in records:
            min(batches, key=lambda batch: sum(len(r.tokens) for r in batch)).append(record)
        if all(len(batch) == 1 or sum(len(r.tokens) for r in batch) <= budget for batch in batches):
            return batches
        count += 1  # at the latest, each is alone in its own


def shuffled(items: list, step: int, count: int, seed: int) -> list:
    """The items of a step: all of them in an order of their own each epoch, one epoch after the other."""
    place = range(step * count, (step + 1) * count)
    order = {epoch: random.Random(f"{seed}/{epoch}").sample(items, len(items))
             for epoch in {i // len(items) for i in place}}
    return [order[i // len(items)][i % len(items)] for i in place]


def schedule(step: int, steps: int, warmup: int, decay: str) -> float:
    """What the learning rate is multiplied with: linear warm-up, and a decay over all steps."""
    factor = {"none": 1.0, "linear": 1 - step / steps, "cosine": 0.5 * (1 + math.cos(math.pi * step / steps))}[decay]
    return min(1.0, (step + 1) / max(warmup, 1)) * factor


# ------------------------------------------------------------------------------------------------------- the phases


def negative_log_likelihood(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator):
    """SFT's loss, with the same masks and the same denominator as RL's."""
    _, stats = faca.clipped_loss(logp_1T.detach(), logp_1T.detach(), advantage_1T, mask_1T, denominator=denominator)
    return -logp_1T[mask_1T].sum() / denominator, stats


def sft(trainer: Trainer, data: list[Rollout], run: Run) -> None:
    """Supervised fine-tuning: the loss is on the agent's tokens alone, tool calls and turn ends among them."""
    config = trainer.config
    if not data:
        from extras.tiny import expert_dialogues
        data = expert_dialogues(trainer, run)
    if run.stopped():
        return
    dialogues, validation = split(data, config.sft_validation, config.seed)
    epoch = math.ceil(len(dialogues) / config.sft_batch)
    steps = config.sft_steps or config.sft_epochs * epoch
    for step in (bar := run.bar(range(trainer.begin("sft", 0.0, run), steps), "SFT")):
        batch = shuffled(dialogues, step, config.sft_batch, config.seed)
        lr = config.sft_lr * schedule(step, steps, config.sft_warmup, "cosine")
        stats = trainer.update(batch[trainer.rank::trainer.world], lr, negative_log_likelihood)
        row = {name: stats[name] for name in ("loss", "grad_norm", "lr", "tokens", "skipped")}
        if validation and ((step + 1) % epoch == 0 or step + 1 == steps):
            batches = trainer.batches_of(validation[trainer.rank::trainer.world])
            row["validation_loss"] = trainer.loss_of(batches, negative_log_likelihood, backward=False)["loss"]
        run.log({"phase": "sft", "step": step} | row)
        bar.set_postfix(loss=f"{stats['loss']:.3f}", refresh=False)
        trainer.at = "sft", step + 1
        stopped = run.stopped()  # asked once: a signal that comes while it is saved would part the ranks
        if stopped or run.due(step, steps):
            trainer.refresh_sampler()
            save(trainer, run)
        if stopped:
            return


def advantages(x: dict, lam: float, control: str, generator: torch.Generator) -> torch.Tensor:
    """Eq. 6 on rollout.credit_tensors' x, its reactions put through a control of Table 4 ("none": as they are). (N, Q).

    The generator decides where "randomized" puts each reaction; the others take nothing from it.
    """
    reaction_NQ, observed_NQ = x["reaction_NQ"], x["observed_NQ"] & x["valid_N"][:, None]
    if control == "shifted":
        reaction_NQ, observed_NQ = faca.shifted(reaction_NQ, observed_NQ, x["exists_NQ"])
    elif control == "randomized":
        reaction_NQ = faca.randomized(reaction_NQ, observed_NQ, generator)
    return faca.faca_advantage(x["reward_N"], reaction_NQ, observed_NQ, x["group_N"], lam, x["valid_N"])


def assign_credit(trainer: Trainer, records: list[Rollout], tries: list[Rollout], step: int) -> dict:
    """Eq. 6 on the rollouts of all ranks; writes each record's advantages, returns telemetry and counts of the step."""
    config = trainer.config
    segment_NT = padded([r.segment for r in records], -1, torch.long)  # as the loss reads it
    tokens = faca.segment_tokens(segment_NT, max([len(r.strategies) for r in records], default=0)).tolist()
    every = sorted((pair for share in all_gather(list(zip(light(records), tokens, strict=False))) for pair in share),
                   key=lambda pair: (pair[0].group, pair[0].k))
    everyone = [r for r, _ in every]
    x = credit_tensors(everyone)
    tokens_NQ = torch.tensor([t + [0] * (x["exists_NQ"].shape[1] - len(t)) for _, t in every])
    telemetry = faca.credit_telemetry(x["reward_N"], x["reaction_NQ"], x["observed_NQ"], x["exists_NQ"], tokens_NQ,
                                      x["group_N"], config.lam, x["valid_N"], [r.strategies for r in everyone])
    generator = torch.Generator().manual_seed(stream_seed(config.seed, step))
    outcome_N = faca.outcome_advantage(x["reward_N"], x["group_N"], x["valid_N"])
    advantage_NQ = advantages(x, config.lam, config.control, generator)
    place = {(r.group, r.k): i for i, r in enumerate(everyone)}
    for record in records:
        i = place[record.group, record.k]
        record.advantage = advantage_NQ[i, :len(record.strategies)].tolist()
        record.outcome_advantage = outcome_N[i].item()
    counts = summary(everyone, [r for share in all_gather(light(tries)) for r in share])
    return counts | telemetry | {"signal": bool(advantage_NQ[x["exists_NQ"]].any())}


def train(trainer: Trainer, tasks: list[Task], held_out: list[Task], run: Run) -> None:
    """Algorithm: roll out, credit, update, as long as there are steps."""
    config, actors = trainer.config, trainer.actors

    def objective(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator):
        return faca.clipped_loss(logp_1T, old_logp_1T, advantage_1T, mask_1T, config.clip, denominator)

    first = trainer.begin("rl", config.weight_decay, run)
    for step in (bar := run.bar(range(first, config.steps), config.method.upper())):
        if config.eval_every and step and step % config.eval_every == 0:  # here a run that resumes comes by, too
            evaluate(trainer, held_out, run, f"RL step {step}")
        began = time.perf_counter()
        prompts = shuffled(tasks, step, config.prompts, config.seed)
        records, tries = actors.roll_out(prompts, config.rollouts, (config.seed, step), run, f"step {step:05}")
        if run.stopped():  # asked of all ranks at once: where one was told to, the step is given up by all
            return
        rolled = time.perf_counter()
        counts = assign_credit(trainer, records, tries, step) | actors.spent()
        run.keep(f"step {step:05}", records)
        actors.stop_at_voids(counts, records, f"step {step}")
        trainer.trained_on |= {task.identity for task in prompts}
        credited, stats = time.perf_counter(), {}
        if counts["signal"]:  # else every advantage is 0 on every rank, and there is no update
            lr = config.lr * schedule(step, config.steps, config.warmup, config.lr_decay)
            stats = trainer.update([r for r in records if not r.void], lr, objective, config.updates_per_batch)
        updated = time.perf_counter()
        trainer.refresh_sampler()
        run.log({"phase": "rl", "step": step} | counts | stats | {
            "seconds_rollout": rolled - began, "seconds_credit": credited - rolled,
            "seconds_update": updated - credited, "seconds_refresh": time.perf_counter() - updated,
        } | speed(trainer, records, stats, rolled - began, updated - credited))
        recent = [row["success"] for row in run.rows if row["phase"] == "rl"][-8:]
        cost = sum(counts.get(f"simulator/{name}", 0) for name in ("prompt_tokens", "completion_tokens"))
        shown = {"success": f"{sum(recent) / len(recent):.2f}"} | ({"user tokens": f"{cost:,}"} if cost else {})
        bar.set_postfix(shown, refresh=False)
        trainer.at = "rl", step + 1
        if run.due(step, config.steps):
            save(trainer, run)


def speed(trainer: Trainer, records: list[Rollout], stats: dict, rollout: float, update: float) -> dict[str, float]:
    """Tokens a second of all ranks, the fullest rank's memory, and on a known GPU the share of its peak. Collective."""
    every = [pair for share in all_gather([(len(r.tokens), sum(s >= 0 for s in r.segment), r.void) for r in records])
             for pair in share]
    lengths = [length for length, _, void in every if not void]
    out = {"sampled_per_second": sum(n for _, n, _ in every) / rollout, "peak_gib": all_reduce(peak_memory(), max)}
    if not stats:
        return out
    tokens = sum(lengths)
    out["trained_per_second"] = tokens * trainer.config.updates_per_batch / update
    if peak := trainer.device.type == "cuda" and peak_flops(torch.cuda.get_device_name()):
        shape, context = shape_from(trainer.model.config.to_dict()), sum(n * n for n in lengths) / tokens
        flops = flops_per_token(shape, context, stats["tokens"] / tokens)
        out["mfu"] = out["trained_per_second"] * flops / peak / trainer.world
    return out


def evaluate(trainer: Trainer, tasks: list[Task], run: Run, name: str) -> None:
    """Sampled dialogues on held-out tasks; users and streams are the same at every evaluation of every arm."""
    if not tasks or name in run.evaluated or run.stopped():
        return
    actors, trials = trainer.actors, trainer.config.eval_trials
    records, tries = actors.roll_out(tasks, trials, STREAM, run, f"held-out, {name}", official=True)
    trainer.sampler.weights_changed()  # what stays cached would round the next rollouts: evaluating changes no run
    spent = actors.spent()
    if run.stopped():
        return
    everyone = ([r for share in all_gather(light(part)) for r in share] for part in (records, tries))
    run.evaluated[name] = figures(*everyone)
    run.log({"phase": "held_out", "at": name} | run.evaluated[name] | spent)
    actors.stop_at_voids(run.evaluated[name], records, f"the evaluation {name}")


def run_all(config: Config) -> int:
    """Everything between the options and the table; collective. Returns the exit code."""
    trainer = Trainer(config)
    tasks, held_out = tasks_of(config)
    longest = longest_prompt(tasks + held_out, trainer.chat)
    if config.max_context < longest + config.max_message_tokens:
        raise UsageError(f"--max-context {config.max_context} has no room for a message after a prompt of {longest}")
    data, counts = [], {}
    if config.data:
        data, counts = load_dialogues(config.data, trainer.chat, config.max_context,
                                      lambda rows: tqdm(rows, "rows", disable=trainer.rank > 0))
        split(data, config.sft_validation, config.seed)  # what it refuses is refused before there is a folder
    run = Run(config, origin_of(trainer.model, trainer.tokenizer, tasks + held_out, config.data))
    trainer.actors.go_on(run.rows)
    done = run.note["phase"] if run.note else ""
    try:
        if counts and not done:
            run.log({"phase": "data"} | counts)
        if not done:
            evaluate(trainer, held_out, run, "before")
        if (config.model == "tiny" or config.method == "sft") and done != "rl" and not run.stopped():
            sft(trainer, data, run)
            if not run.stopped():
                save_export(trainer, run.path / ("model" if config.method == "sft" else "sft"))
                evaluate(trainer, held_out, run, "after SFT")
        if config.method != "sft" and not run.stopped():
            train(trainer, tasks, held_out, run)
    finally:
        if isinstance(sys.exception(), RunStopped | None) and trainer.at:  # else the ranks may not meet to save
            trainer.refresh_sampler()
            save(trainer, run)
            if trainer.at[0] == "rl":
                save_export(trainer, run.path / "model")
    if config.method != "sft":
        evaluate(trainer, held_out, run, "after RL")
    if trainer.rank == 0:
        parts = [run.evaluated and table(run.evaluated), run.stop_line(), f"run folder: {run.path}"]
        print("\n" + "\n\n".join(filter(None, parts)))
    return run.exit_code


def main() -> None:
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # of each machine: its files may be what is wrong
    sys.stdout, sys.stderr = Lasting(sys.stdout if first else open(os.devnull, "w")), Lasting(sys.stderr)
    try:
        config = parse_config(sys.argv[1:], __doc__)
        start_processes()
        if config.from_rollouts:
            from extras.arms import compare
            compare(config)
            code = 0
        else:
            ask_first(config)
            code = run_all(config)
    except (UsageError, EnvError, PolicyError, DataError, NotImplementedError, RunStopped, SaveError) as error:
        if first:
            print(f"train.py: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RunStopped | SaveError) else 2
    except KeyboardInterrupt:  # later Run takes the signal
        if os.environ.get("RANK", "0") == "0":
            print("train.py: stopped before the run began, with nothing to save", file=sys.stderr)
        os._exit(130)
    except Exception as error:  # the other ranks may be waiting for this one: no teardown that waits for them
        if isinstance(error, OSError | FloatingPointError):  # the disk, most likely; or weights that are not finite
            print(f"train.py: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
