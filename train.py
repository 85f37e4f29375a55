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

import dataclasses
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import faca
from env import EnvError, Task, load_tasks
from eval import STREAM, figures, longest_prompt, summary, table
from extras.checkpoint import PolicyError, load_policy, note_of, save_policy
from extras.run import (Config, Run, RunStopped, UsageError, all_gather, all_reduce, parse_config, preset_of,
                        start_processes, tasks_beside)
from rollout import Caps, Chat, Rollout, credit_tensors, play_groups, stream_seed, token_tensors
from sampler import Sampler, score
from simulator import SimulatorError, endpoint_of

EXPERT = -1  # stands for the step in the random streams of the expert's dialogues, as eval.STREAM's does in evaluation


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
        self.caps = Caps(config.max_messages, config.max_message_tokens, config.max_context, config.max_errors,
                         config.max_dialogue_steps)
        domains = {task.domain for task in load_tasks(config.env, "train")}
        self.endpoint = endpoint_of(config, domains, self.world)
        self.optimizer = None
        self.trained_on = set(note_of(config.model).get("trained_on", ()))

    def start(self, weight_decay: float) -> None:  # a fresh optimizer, for a phase of its own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=weight_decay)

    def roll_out(self, tasks: list[Task], rollouts: int, key: tuple[int, int], run: Run, name: str, official=False):
        """This rank's share of the tasks, a group each, and the void tries made again; none after a stop. Collective.

        Where the user's endpoint refuses for good, what is complete is kept, and the run stops on all ranks.
        """
        groups = list(enumerate(tasks))[self.rank::self.world]
        complete, tries, refusal, flag = [], [], "", run.path / "refused"
        with run.bar(range(len(groups) * rollouts), name, aside=not official) as bar:
            def halt() -> bool:
                if self.endpoint:
                    bar.set_postfix_str(self.endpoint.status(), refresh=False)
                    bar.update(0)  # shows it, when it is time to
                return run.signalled or flag.exists()

            try:
                records, tries = play_groups(
                    groups, rollouts, key, self.sampler, self.chat, dataclasses.replace(self.caps, official=official),
                    self.config.void_retries, lambda record: (complete.append(record), bar.update()), halt,
                    self.endpoint)
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
        shares = all_gather((self.endpoint.take(), sorted(set(self.endpoint.answered.values()))))
        models = sorted({model for _, answered in shares for model in answered})
        return {f"simulator/{name}": sum(tally[name] for tally, _ in shares) for name in shares[0][0]} | {
            "simulator/model": ", ".join(models)}

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


def micro_batches(records: list[Rollout], budget: int) -> list[list[Rollout]]:
    """Records by length, in batches of at most `budget` padded tokens (a longer one alone)."""
    batches: list[list[Rollout]] = []
    for record in sorted(records, key=lambda r: len(r.tokens), reverse=True):
        if batches and len(batches[-1][0].tokens) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(record)
        else:
            batches.append([record])
    return batches


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
    trainer.trained_on |= {task.identity for task in tasks}
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


def light(records: list[Rollout]) -> list[Rollout]:
    """The records without what is long, as the other ranks need them."""
    return [dataclasses.replace(r, tokens=[], segment=[], logprobs=[], messages=[], private=[]) for r in records]


def assign_credit(trainer: Trainer, records: list[Rollout], tries: list[Rollout], step: int) -> dict:
    """Eq. 6 on the rollouts of all ranks; writes each record's advantages, returns telemetry and counts of the step."""
    config = trainer.config
    segment_NT = token_tensors(records, pad_id=0)[1]  # made as the loss's is, so that telemetry checks what is trained
    tokens = faca.segment_tokens(segment_NT, max([len(r.strategies) for r in records], default=0)).tolist()
    every = sorted((pair for share in all_gather(list(zip(light(records), tokens, strict=False))) for pair in share),
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
    counts = summary(everyone, [r for share in all_gather(light(tries)) for r in share])
    return counts | telemetry | {"signal": bool(advantage_NQ[x["exists_NQ"]].any())}


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
        records, tries = trainer.roll_out(prompts, config.rollouts, (config.seed, step), run, f"step {step:05}")
        if run.stopped():  # asked of all ranks at once: where one was told to, the step is given up by all
            break
        trainer.trained_on |= {task.identity for task in prompts}
        rolled = time.perf_counter()
        counts = assign_credit(trainer, records, tries, step) | trainer.spent()
        run.keep(f"step {step:05}", records)
        stop_at_voids(trainer, counts, records, f"step {step}")
        stats = {}
        if counts["signal"]:  # else every advantage is 0 on every rank, and there is no update
            lr = config.lr * min(1.0, (step + 1) / max(config.warmup, 1))
            stats = trainer.update([r for r in records if not r.void], lr, objective)
            trainer.refresh_sampler()
        run.log({"phase": "rl", "step": step} | counts | stats | {
            "seconds_rollout": rolled - began, "seconds_update": time.perf_counter() - rolled})
        recent = [row["success"] for row in run.rows if row["phase"] == "rl"][-8:]
        cost = sum(counts.get(f"simulator/{name}", 0) for name in ("prompt_tokens", "completion_tokens"))
        shown = {"success": f"{sum(recent) / len(recent):.2f}"} | ({"user tokens": f"{cost:,}"} if cost else {})
        bar.set_postfix(shown, refresh=False)
        if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
            evaluate(trainer, held_out, run, f"RL step {step + 1}")


def stop_at_voids(trainer: Trainer, counts: dict, records: list[Rollout], where: str) -> None:
    """Stops a run whose users or worlds fail too often to be trained or judged on. Collective."""
    most = trainer.config.max_void_rate
    if counts["void"] > most * counts["rollouts"]:
        faults = sum(all_gather(Counter(p["fault"] for r in records for p in r.private if "fault" in p)), Counter())
        raise RunStopped(f"{counts['void']} of {counts['rollouts']} rollouts of {where} are void, above "
                         f"--max-void-rate {most}; mostly: {faults.most_common(1)[0][0]}")


def evaluate(trainer: Trainer, tasks: list[Task], run: Run, name: str) -> None:
    """Sampled dialogues on held-out tasks; users and streams are the same at every evaluation of every arm."""
    trials = trainer.config.eval_trials
    records, tries = trainer.roll_out(tasks, trials, STREAM, run, f"held-out, {name}", official=True)
    trainer.sampler.weights_changed()  # what stays cached would round the next rollouts: evaluating changes no run
    spent = trainer.spent()
    if run.stopped():
        return
    everyone = ([r for share in all_gather(light(part)) for r in share] for part in (records, tries))
    run.evaluated[name] = figures(*everyone)
    run.log({"phase": "held_out", "at": name} | run.evaluated[name] | spent)
    stop_at_voids(trainer, run.evaluated[name], records, f"the evaluation {name}")


def prompts_of(step: int, tasks: list[Task], config: Config) -> list[Task]:
    """The G prompts of a step: the tasks in an order of their own each epoch, one epoch after the other."""
    place = range(step * config.prompts, (step + 1) * config.prompts)
    order = {epoch: random.Random(f"{config.seed}/{epoch}").sample(tasks, len(tasks))
             for epoch in {i // len(tasks) for i in place}}
    return [order[i // len(tasks)][i % len(tasks)] for i in place]


def ask_first(config: Config) -> None:
    """One small request to the user's endpoint before any model is loaded. Collective; raises UsageError."""
    refusal = ""
    endpoint = endpoint_of(config, set()) if dist.get_rank() == 0 else None
    if endpoint:
        try:
            endpoint.check()
        except SimulatorError as error:
            refusal = str(error)
    refusal = all_gather(refusal)[0]
    if refusal:
        raise UsageError(refusal)
    if dist.get_rank() == 0 and preset_of(config.model) == "paper" and not note_of(config.model):
        print(f"warning: the paper's RL starts from an SFT checkpoint; nothing says that {config.model} is one",
              file=sys.stderr)


def run_all(config: Config) -> int:
    """Everything between the options and the table; collective. Returns the exit code."""
    trainer = Trainer(config)
    tasks = load_tasks(config.env, "train")
    held_out = tasks_beside(tasks, "test")
    longest = longest_prompt(tasks + held_out, trainer.chat)
    if config.max_context < longest + config.max_message_tokens:
        raise UsageError(f"--max-context {config.max_context} has no room for a message after a prompt of {longest}")
    run = Run(config)
    evaluate(trainer, held_out, run, "before")
    if (config.model == "tiny" or config.method == "sft") and not run.stopped():
        warm_up(trainer, tasks_beside(tasks, "sft"), run)
        trainer.save(run.path / ("model" if config.method == "sft" else "sft"))
        evaluate(trainer, held_out, run, "after SFT")
    if config.method != "sft" and not run.stopped():
        try:
            train(trainer, tasks, held_out, run)
        except RunStopped:  # on all ranks alike; after any other exception they may not meet to save
            trainer.save(run.path / "model")
            raise
        trainer.save(run.path / "model")
        if not run.stopped():
            evaluate(trainer, held_out, run, "after RL")
    if trainer.rank == 0:
        print("\n" + "\n\n".join(filter(None, [table(run.evaluated), run.stop_line(), f"run folder: {run.path}"])))
    return run.exit_code


def main() -> None:
    try:
        config = parse_config(sys.argv[1:], __doc__)
        start_processes()
        ask_first(config)
        code = run_all(config)
    except (UsageError, EnvError, PolicyError, RunStopped) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RunStopped) else 2
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
