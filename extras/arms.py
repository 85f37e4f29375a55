"""One recorded batch through every arm of Table 4: `python train.py --from-rollouts FILE.jsonl [--model M]`.

No user is asked, nothing is trained and no folder is made. The rollouts of FILE, those of one step, get the advantages
of each arm, and for each the model's gradient is computed as the arm's first update would have it: what a run on such
rollouts would learn from, and whether the arms would differ, before GPU hours are spent.

Options that are not given are those of the run that FILE lies in: RUN/rollouts/FILE. The randomized control then puts
the reactions where that run would have put them. The model is the one that sampled the file, if the run still has it
(its checkpoint of that step; for step 0 the model that RL began with), else the run's model/ or sft/. With other
weights the ratio is not 1, and the clip cuts in; that is legitimate, and what is printed shows it.

Host memory: six gradients, in fp32 on CPU (24 bytes a weight), in bf16 with a GPU (12).

Axes: N rollouts, Q segments, A arms, M weights of a chunk.
"""

import json
import math
import os
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

import faca
from extras.checkpoint import PolicyError, find_policy, note_of, preset_of
from extras.ranks import UsageError
from extras.run import Config, check_values, progress
from extras.show import RolloutFileError, agent_text, fits, load_rollouts, paint
from rollout import Rollout, credit_tensors, padded, stream_seed
from train import Trainer, advantages

ARMS = {"GRPO": (0.0, "none"), "FACA .5": (0.5, "none"), "FACA .1": (0.1, "none"), "reversed -.5": (-0.5, "none"),
        "shifted .5": (0.5, "shifted"), "randomized .5": (0.5, "randomized")}  # lambda and control of Table 4's rows
USED = ("from_rollouts", "model", "seed", "temperature", "clip", "tokens_per_microbatch", "recompute")
NONE = 1e-5  # an advantage this small is none: eps in the two deviations leaves 1e-6 of what should cancel (chosen)
WIDEST = 6  # segments shown, those where FACA and GRPO differ most
CHUNK = 2**22  # weights whose products are summed at once, in float64


# --------------------------------------------------------------------------------------------------------- options


def recorded(given: dict) -> Config:
    """The flags given, completed by the file's run, else by the model's preset. Raises UsageError or PolicyError."""
    path = Path(given["from_rollouts"])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--from-rollouts is for one process: run it by python, not torchrun")
    if other := [name for name in given if name not in USED]:
        raise UsageError(f"--from-rollouts puts a file through all arms and trains none: no --"
                         f"{other[0].replace('_', '-')}; options beside it: {', '.join(USED[1:])}")
    if not path.is_file():
        raise UsageError(f"--from-rollouts {path} is no file")
    run, step = path.resolve().parent.parent, step_of(path)
    options = run_options(run)
    model = given["model"] if "model" in given else model_of(run, step, options.get("model", ""))
    preset, note = preset_of(model), note_of(model)
    config = Config(**{f.name: f.metadata[preset] for f in fields(Config)}
                    | {name: value for name, value in note.items() if name == "temperature"}
                    | options | given | {"model": model})
    check_values(config)
    find_policy(config.model)
    return config


def step_of(path: Path) -> int:
    """The step that a run's file is named after; 0 for any other name."""
    found = re.match(r"step-(\d+)", path.name)
    return int(found[1]) if found else 0


def run_options(run: Path) -> dict:
    """The options used here, as a run's config.json has them; {} where the folder is no run's."""
    try:
        found = json.loads((run / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    ours = isinstance(found, dict) and {"method", "lam", "control"} <= found.keys()
    kinds = {f.name: f.type for f in fields(Config)}
    return {name: found[name] for name in USED if ours and name in found and fits(found[name], kinds[name])}


def model_of(run: Path, step: int, named: str) -> str:
    """The model nearest to the one that sampled a step of that run; named: its --model. Raises UsageError."""
    began = [str(run / "sft"), *([named] if named not in ("", "tiny") else [])]  # tiny has sampled nothing that is kept
    model = str(run / "model")
    for name in [str(run / f"checkpoints/rl-{step:06}/model"), *([*began, model] if step == 0 else [model, *began])]:
        try:
            find_policy(name)
        except PolicyError:
            continue
        return name
    raise UsageError("--from-rollouts needs --model: the file lies in no run folder with a model; name a checkpoint "
                     "whose tokenizer made its tokens")


# ----------------------------------------------------------------------------------------------------------- batch


def read_batch(path: str) -> list[Rollout]:
    """The rollouts of one step, by group and k. Raises UsageError for a file that is none, or has nothing to learn."""
    try:
        records = sorted(load_rollouts(path), key=lambda r: (r.group, r.k))
    except RolloutFileError as error:
        raise UsageError(str(error)) from None
    if all(r.void for r in records):
        raise UsageError(f"{path}: all {len(records)} rollouts are void: there is nothing to learn from")
    if not any(r.strategies for r in records if not r.void):
        raise UsageError(f"{path}: no rollout that is not void has a segment: there is nothing to learn from")
    if not any(r.tokens for r in records):
        raise UsageError(f"{path}: holds no tokens, like results of an evaluation: name a file of a run's rollouts/")
    task_of = {r.group: r.task for r in records}
    if len({(r.group, r.k) for r in records}) < len(records) or any(r.task != task_of[r.group] for r in records):
        raise UsageError(f"{path}: a group holds two tasks, or a rollout twice: give the rollouts of one step")
    for r in records:
        sampled = [p for p, s in zip(r.logprobs, r.segment, strict=True) if s >= 0]
        if r.segment[:1] > [-1] or not all(map(math.isfinite, sampled)):
            raise UsageError(f"{path}: group {r.group}, rollout {r.k} can't be scored: it begins with a sampled token, "
                             "or a log-prob is not finite")
    return records


def credit(records: list[Rollout], seed: int, step: int) -> tuple[dict[str, Tensor], dict, dict]:
    """Each arm's advantages (N, Q); credit_tensors' x; telemetry for lambda .5. ValueError for damaged records."""
    x = credit_tensors(records)
    tokens_NQ = faca.segment_tokens(padded([r.segment for r in records], -1, torch.long), x["exists_NQ"].shape[1])
    telemetry = faca.credit_telemetry(x["reward_N"], x["reaction_NQ"], x["observed_NQ"], x["exists_NQ"], tokens_NQ,
                                      x["group_N"], 0.5, x["valid_N"])
    return {name: advantages(x, lam, control, torch.Generator().manual_seed(stream_seed(seed, step)))
            for name, (lam, control) in ARMS.items()}, x, telemetry


def check_tokens(path: str, records: list[Rollout], trainer: Trainer) -> None:
    """Raises UsageError for a token that the model has no row for, or a sampled one that it never samples."""
    rows, banned = trainer.model.config.vocab_size, set(trainer.banned.tolist())
    wrong = next((t for r in records for t, s in zip(r.tokens, r.segment, strict=True)
                  if not 0 <= t < rows or s >= 0 and t in banned), None)
    if wrong is not None:
        raise UsageError(f"{path} holds token {wrong}, which {trainer.config.model} does not have or never samples: "
                         "name in --model a checkpoint whose tokenizer made the file")


# ------------------------------------------------------------------------------------------------------- gradients


def gradient(trainer: Trainer, records: list[Rollout], advantage_NQ: Tensor) -> tuple[list[Tensor], dict[str, float]]:
    """Of Eq. 8 at the trainer's weights, nothing clipped off its norm: a flat tensor for each parameter, on the CPU.

    And what Trainer.backward saw, with "ratio", the mean over trainable tokens.
    """
    ratios = []

    def objective(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator):
        log_ratio = (logp_1T.detach() - old_logp_1T)[mask_1T]
        ratios.append(log_ratio.clamp(max=faca.LOG_RATIO_CAP).exp().sum().item() / denominator)
        return faca.clipped_loss(logp_1T, old_logp_1T, advantage_1T, mask_1T, trainer.config.clip, denominator)

    batches = trainer.batches_of([replace(r, advantage=row[:len(r.strategies)])
                              for r, row in zip(records, advantage_NQ.tolist(), strict=True)
                              if not r.void and r.strategies])
    stats = trainer.loss_of(batches, objective)
    parts = [p.grad.full_tensor().flatten().to("cpu", trainer.half) for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    return parts, stats | {"ratio": sum(ratios)}


def norms_and_cosines(gradients: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """L2 norms (A,) and cosines (A, A), NaN where a gradient is 0."""
    gram_AA = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for same in zip(*gradients, strict=True):  # one parameter's, of all arms
        for chunk in zip(*(part.split(CHUNK) for part in same), strict=True):
            g_AM = torch.stack(chunk).double()
            gram_AA += g_AM @ g_AM.T
    norm_A = gram_AA.diagonal().sqrt()
    return norm_A, gram_AA / norm_A[:, None] / norm_A


# ---------------------------------------------------------------------------------------------------------- tables


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they must be, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                     for row in [head, *rows])


def signed(x: float | Tensor, digits: int = 4) -> str:
    return f"{round(float(x), digits) + 0.0:+.{digits}f}"  # the sum makes +0 of -0


def signs(advantage: Tensor) -> Tensor:
    return advantage.sign() * (advantage.abs() > NONE)


def batch_table(records: list[Rollout], telemetry: dict) -> str:
    valid = [r for r in records if not r.void]
    trained = sum(s >= 0 for r in valid for s in r.segment)
    kinds = ", ".join(f"{telemetry[f'groups_{kind}']} all-{kind}" for kind in ("correct", "wrong"))
    return "\n".join([
        f"rollouts   {len(records)} in {len({r.group for r in records})} groups: {kinds}, "
        f"{telemetry['groups_mixed']} mixed; mean reward {sum(r.reward for r in valid) / len(valid):.3f}",
        f"void       {len(records) - len(valid)} of them, left out of all that follows",
        f"segments   {telemetry['segments']}, {telemetry['observed']} with a reaction: "
        f"{telemetry['positive_share']:.1%} positive, {telemetry['negative_share']:.1%} negative",
        f"tokens     {sum(len(r.tokens) for r in valid):,}, {trained:,} of them trained",
        f"coverage   {telemetry['coverage']:.1%} of segments have a process advantage",
        f"process    {telemetry['process_share']:.1%} of sum |A| is process advantage, at lambda .5"])


def model_table(config: Config, half: torch.dtype, seen: dict[str, float]) -> str:
    recomputed = half != torch.float32
    lines = [f"model      {config.model}",
             f"computed   in {'bf16' if recomputed else 'fp32'}, temperature {config.temperature:g}",
             f"log-probs  |trainer - recorded|: largest {seen['logprob_gap_max']:.2g}, mean {seen['logprob_gap']:.2g}; "
             f"beyond 1 +- {config.clip:g}: {seen['logprob_gap_clipped']:.1%} of tokens",
             f"ratio      mean {seen['ratio']:.4f}, {seen['ratio_min']:.4g} to {seen['ratio_max']:.4g}, to "
             + ("the trainer's own log-probs, as in training in bf16" if recomputed else "the recorded log-probs")]
    if seen["logprob_gap"] > 0.05:
        lines.append("           These are not the weights that sampled the file, or its options were others.")
    return "\n".join(lines)


def arm_table(arms: dict[str, Tensor], exists_NQ: Tensor, stats: dict[str, dict], norm_A: Tensor) -> str:
    """Over segments: mean |A|; shares whose sign is not GRPO's, is the opposite, or that have no advantage."""
    base = signs(arms["GRPO"][exists_NQ])
    rows = []
    for (name, advantage_NQ), norm in zip(arms.items(), norm_A.tolist(), strict=True):
        advantage = advantage_NQ[exists_NQ]
        sign = signs(advantage)
        shares = [(sign != base), (sign * base < 0), (sign == 0)]
        rows.append([name, f"{advantage.abs().mean():.4f}", *(f"{share.double().mean():.1%}" for share in shares),
                     f"{norm:.4g}", signed(stats[name]["loss"], 6), f"{stats[name]['clipped']:.2%}"])
    return table(["arm", "mean |A|", "sign differs", "opposite", "no advantage", "gradient", "loss", "clipped"], rows)


def cosine_table(cosine_AA: Tensor) -> str:
    cells = [[signed(c) if math.isfinite(c) else "-" for c in row] for row in cosine_AA.tolist()]
    return table(["", *ARMS], [[name, *row] for name, row in zip(ARMS, cells, strict=True)])


def index_table(arms: dict[str, Tensor], x: dict[str, Tensor], exists_NQ: Tensor) -> str:
    """By U2U index: the two parts of FACA's advantage at lambda .5. The process part's own mean is 0 in each B^p."""
    outcome_NQ, process_NQ = arms["GRPO"], arms["FACA .5"] - arms["GRPO"]
    differs_NQ = signs(arms["FACA .5"]) != signs(outcome_NQ)
    rows = []
    for q in exists_NQ.any(0).nonzero().flatten().tolist():
        here = exists_NQ[:, q]
        reaction = x["reaction_NQ"][here & x["observed_NQ"][:, q], q]
        outcome, process = outcome_NQ[here, q], process_NQ[here, q].abs().mean()
        both = outcome.abs().mean() + process
        rows.append([f"{q}", f"{here.sum()}", f"{len(reaction)}", signed(reaction.mean(), 3) if len(reaction) else "-",
                     signed(outcome.mean()), f"{outcome.abs().mean():.4f}", f"{process:.4f}",
                     f"{process / both:.1%}" if both else "-", f"{differs_NQ[here, q].double().mean():.1%}"])
    return table(["q", "segments", "reactions", "mean f", "mean A^o", "mean |A^o|", "mean .5|A^p|", "process",
                  "sign differs"], rows)


def widest_table(arms: dict[str, Tensor], exists_NQ: Tensor, records: list[Rollout]) -> str:
    """The segments where FACA and GRPO differ most, opposite signs first among equals; under each the agent's text."""
    outcome_NQ, faca_NQ = arms["GRPO"], arms["FACA .5"]
    gap_NQ = (faca_NQ - outcome_NQ).abs() * exists_NQ
    places = (gap_NQ > NONE).nonzero().tolist()
    places.sort(key=lambda p: (-round(gap_NQ[*p].item(), 4), signs(faca_NQ[*p]) * signs(outcome_NQ[*p]) >= 0, p))
    shown = places[:WIDEST]
    if not shown:
        return "no segment: no group has reactions that differ at the same U2U index"
    lines = table(["task", "k", "q", "strategy", "GRPO", "FACA .5"],
                  [[records[n].task[-40:], f"{records[n].k}", f"{q}", str(records[n].strategies[q]),
                    signed(outcome_NQ[n, q]), signed(faca_NQ[n, q])] for n, q in shown]).split("\n")
    texts = [f"    {said(records[n], q)[:72]}" for n, q in shown]
    return "\n".join([lines[0], *(line for pair in zip(lines[1:], texts, strict=True) for line in pair)])


def said(record: Rollout, q: int) -> str:
    """What the agent said and called in a segment, in one line."""
    words = [word for m in record.messages if m.get("segment") == q for word in agent_text(m).split()[1:]]
    return paint(" ".join(words), "")


# ------------------------------------------------------------------------------------------------------------ main


def compare(config: Config) -> None:
    """Prints the tables. Raises UsageError or PolicyError, before any of them."""
    path = config.from_rollouts
    records = read_batch(path)
    try:
        arms, x, telemetry = credit(records, config.seed, step_of(Path(path)))
        exists_NQ = x["exists_NQ"] & x["valid_N"][:, None]
        widest = widest_table(arms, exists_NQ, records)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # messages are free in form
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    trainer = Trainer(config, sampling=False)
    check_tokens(path, records, trainer)
    gradients, stats = [], {}
    for name, _ in zip(ARMS, progress(range(len(ARMS)), "arms", aside=True), strict=True):
        parts, stats[name] = gradient(trainer, records, arms[name])
        gradients.append(parts)
    norm_A, cosine_AA = norms_and_cosines(gradients)
    sys.stdout.reconfigure(errors="replace")  # what a model says may hold half a surrogate pair
    print("\n\n".join([
        f"One batch through every arm (GRPO: Interactive GRPO):\n{path}\n\n" + batch_table(records, telemetry),
        model_table(config, trainer.half, stats["GRPO"]),
        "Arms: shares are of segments, beside GRPO; the gradient's L2 norm before clipping\n\n"
        + arm_table(arms, exists_NQ, stats, norm_A),
        "Cosine between the arms' gradients (-: a gradient is 0)\n\n" + cosine_table(cosine_AA),
        "By U2U index q, FACA at lambda .5: reaction f, outcome A^o, process A^p and its share of both\n\n"
        + index_table(arms, x, exists_NQ),
        "Where FACA and GRPO differ most: the user's strategy after it, both advantages, the agent's words\n\n"
        + widest]))
