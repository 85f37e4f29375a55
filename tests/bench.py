"""Speed and memory, measured: each line is one ratio from one run. Nothing about time is asserted.

    python tests/bench.py                          every section, about ten minutes on one core
    python tests/bench.py rollout training         some of them; --quick makes them small, to see that they run

    rollout    multi-turn rollouts against those of TRL's GRPOTrainer (environment_factory), where trl is installed
    training   one training step against TRL's: time, and peak memory above what was held before the first step
    cache      what the sampler saves: the cache kept between turns, the prefix that K rollouts share, rows dropped
    head       log-probs of a trainable 30 % at Qwen3's vocabulary: sampler.score against dense, and in more chunks
    growth     one step (rollouts and update) at more rollouts and at more turns
    share      how much of a step is not the model's arithmetic

`ratio` is the other's cost divided by ours: above 1, ours is the cheaper. In growth `other` is the cost of a rollout
(of a turn) at the larger size and `ours` that at the smallest: 1 is linear, below 1 better. In share, `ours` is a whole
step and `other` what of it lies outside forward, backward and the optimizer.

Times are CPU seconds of the process on one thread (what an idle machine would show as wall time), with wall seconds in
brackets. What is compared runs in turns, A B A B, and medians are shown. Each measurement has a process of its own,
forked from one that has done no arithmetic, so that one's peak of memory does not hide another's.
"""

import argparse
import asyncio
import functools
import importlib.util
import os
import random
import statistics
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace

os.environ.update(OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402  after the thread count
from bench_sides import (ENV, MESSAGE, PROMPT, REPLY, PlainChat, our_rollout, our_step, our_trainer,  # noqa: E402
                         play_steady, qwen3, steady_sampler, trl_rollout, trl_step, update)
import sampler  # noqa: E402
from env import load_tasks  # noqa: E402
from extras.tiny import make_tokenizer  # noqa: E402
from rollout import play_groups  # noqa: E402


# ------------------------------------------------------------------------------------------------------- measuring


def cost(work) -> dict[str, float]:
    """CPU and wall seconds of work(), and what it returned."""
    cpu, wall = process_time(), perf_counter()
    value = work()
    return {"cpu": process_time() - cpu, "wall": perf_counter() - wall, "value": value or 0}


def peak(work) -> dict[str, float]:
    """cost(), and the GiB by which memory came to lie above what was held before, at most. Linux alone."""
    def highest():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20

    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten: it becomes what is held
    held = highest()
    found = cost(work)
    return found | {"gib": highest() - held}


def forked(function, *arguments):
    """function(*arguments) in a child process -> what it returns."""
    receiver, sender = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=lambda: sender.send(function(*arguments)))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"bench.py: {function.__name__}{arguments} failed, see above") from None
    finally:
        child.join()


def alternate(repeats: int, *variants) -> list[dict[str, float]]:
    """Each variant's medians over calls in turns: A B A B ..."""
    found = [[variant() for variant in variants] for _ in range(repeats)]
    return [{name: statistics.median(run[i][name] for run in found) for name in found[0][i]}
            for i in range(len(variants))]


def line(name: str, ours: dict, other: dict, key: str = "cpu") -> None:
    def shown(x):
        return f"{x['gib']:.3f} GiB" if key == "gib" else f"{x['cpu']:.3f} s ({x['wall']:.3f})"

    print(f"{name:84}  {shown(ours):>20}  {shown(other):>20}  {other[key] / ours[key]:6.2f}", flush=True)


# ------------------------------------------------------------------------------------------------------ against TRL


def has_trl() -> bool:
    if importlib.util.find_spec("trl") is None:
        print("trl: not installed, not run")
        return False
    import trl.trainer.grpo_trainer  # noqa: F401  once, before all forks
    return True


def measured_rollouts(repeats: int, *case) -> list[dict[str, float]]:
    """Both sides in one process: each once, for memory is slow when first touched, and then in turns."""
    works = [side(*case) for side in (our_rollout, trl_rollout)]
    for work in works:
        work()
    return alternate(repeats, *(functools.partial(cost, work) for work in works))


def rollout(quick: bool) -> None:
    if not has_trl():
        return
    for size in [(2, 64)] if quick else [(2, 128), (4, 256)]:
        for turns in (1, 2) if quick else (1, 20):
            ours, trl = forked(measured_rollouts, 1 if quick else 5 if turns == 1 else 2, size, 8, turns)
            if ours["value"] != trl["value"]:
                raise SystemExit(f"bench.py: not the same work: {ours['value']} and {trl['value']} tokens")
            line(f"TRL's rollout: {shape(size)}, 8 rows, {turns} turns, {ours['value']:,.0f} tokens", ours, trl)


def measured_step(side, *case) -> dict[str, float]:
    """Peak over two steps, the first of which makes the optimizer's state; time of the second."""
    work, second = side(*case), {}
    return {"gib": peak(lambda: (work(), second.update(cost(work))))["gib"]} | second


def training(quick: bool) -> None:
    if not has_trl():
        return
    size = (2, 64) if quick else (4, 256)
    cases = [(n, t, False) for t in (200, 800) for n in (8, 16, 32)] + [(32, 200, True), (32, 800, True)]
    for rows, longest, recompute in [(8, 100, True)] if quick else cases:
        batches = (8,) if longest < 800 else (8, 2)  # TRL's default, and about as many tokens at once as ours
        ours, *trl = alternate(1 if quick or rows * longest > 10_000 else 3, *(
            [lambda: forked(measured_step, our_step, size, rows, longest, recompute)]
            + [lambda b=b: forked(measured_step, trl_step, size, rows, longest, recompute, b) for b in batches]))
        for at_once, other in zip(batches, trl):
            name = f"{rows} rows of {longest // 2} to {longest}, {at_once} at once" + ", recomputed" * recompute
            line(f"TRL's training step: {shape(size)}, {name}", ours, other)
            line("  peak memory", ours, other, "gib")


def shape(size: tuple[int, int]) -> str:
    return "{}x{}".format(*size)  # layers x hidden


# ----------------------------------------------------------------------------------------------------------- cache


def sample_turns(engine, prompts: list[list[int]], turns: int, lengths: list[int], forget: bool = False) -> None:
    """`turns` messages a row, row i's of lengths[i]; all rows wait for each other. forget: the cache, at every turn."""
    async def everyone():
        contexts = [list(ids) for ids in prompts]
        for _ in range(turns):
            if forget:
                engine.weights_changed()
            samples = await asyncio.gather(*(
                engine.sample(ids, length, row) for row, (ids, length) in enumerate(zip(contexts, lengths))))
            for ids, sample in zip(contexts, samples):
                ids += sample.tokens + [8] * REPLY

    engine.weights_changed()
    asyncio.run(everyone())


def cache(quick: bool) -> None:
    repeats, size, turns = (1, (2, 64), 2) if quick else (3, (2, 128), 20)
    tokenizer, rng = make_tokenizer(), random.Random(0)
    play = functools.partial(sample_turns, steady_sampler(qwen3(tokenizer, *size), tokenizer, 32, turns))
    distinct = [rng.choices(range(9, 200), k=PROMPT) for _ in range(8)]
    same, short, message = distinct[:1] * 8, [ids[:40] for ids in distinct * 4], [MESSAGE] * 8
    lengths = [min(1 + int(rng.expovariate(1 / 30)), 128) for _ in short]
    play(distinct, turns, message)
    for name, ours, other in (
            (f"cache forgotten at each of {turns} turns, 8 rows", lambda: play(distinct, turns, message),
             lambda: play(distinct, turns, message, forget=True)),
            (f"8 distinct prompts of {PROMPT} tokens, not one 8 times, 1 turn", lambda: play(same, 1, message),
             lambda: play(distinct, 1, message)),
            (f"32 rows padded to the longest ({max(lengths)}; mean {sum(lengths) / 32:.0f})",
             lambda: play(short, 1, lengths), lambda: play(short, 1, [max(lengths)] * 32))):
        line(f"{name}: {shape(size)}", *alternate(repeats, lambda: cost(ours), lambda: cost(other)))


# ------------------------------------------------------------------------------------------------------------ head


def head_step(how: str, hidden: int, tokens: int, vocab: int) -> dict[str, float]:
    """Forward and backward of the log-probs of 30 % of one row's tokens, from the backbone's output on."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False)
    hidden_1TD = torch.randn(1, tokens, hidden, requires_grad=True)
    tokens_1T, mask_1T = torch.randint(vocab, (1, tokens)), torch.rand(1, tokens) < 0.3
    mask_1T[:, 0] = False
    model = SimpleNamespace(lm_head=head, model=lambda **_: SimpleNamespace(last_hidden_state=hidden_1TD))
    if how == "chunks":
        sampler.HEAD_LOGITS = tokens * vocab // 10  # a third of what is selected at once

    def work():
        if how == "dense":
            logp = head(hidden_1TD[:, :-1]).log_softmax(-1).gather(-1, tokens_1T[:, 1:, None])[..., 0][mask_1T[:, 1:]]
        else:
            logp = sampler.score(model, tokens_1T, [tokens], mask_1T, 1.0, torch.tensor([0]))[0]
        logp.sum().backward()

    return peak(work)


def head(quick: bool) -> None:
    vocab, tokens = (2000, 64) if quick else (151_936, 2048)
    for hidden in (32,) if quick else (256, 1024):
        ours, chunks, dense = alternate(1, *(functools.partial(forked, head_step, how, hidden, tokens, vocab)
                                             for how in ("select", "chunks", "dense")))
        for name, other in (("dense T x V", dense), ("selected, in 3 recomputed chunks", chunks)):
            line(f"{name}: V {vocab:,}, hidden {hidden}, T {tokens:,}", ours, other)
            line("  peak memory", ours, other, "gib")


# ------------------------------------------------------------------------------------------------ growth and share


def learn(trainer, records) -> None:
    """What follows the rollouts in a step, with random advantages."""
    rng = random.Random(0)
    for record in records:
        record.advantage = [rng.gauss(0, 1) for _ in record.strategies]
    update(trainer, records)
    trainer.refresh_sampler()


def step(trainer, tasks, prompts: int) -> None:
    """One of train.py's: rollouts in groups of 4, and an update."""
    learn(trainer, play_groups(list(enumerate(tasks[:prompts])), 4, (0, 0), trainer.sampler, trainer.chat,
                               trainer.actors.caps)[0])


def growth(quick: bool) -> None:
    trainer, tasks, repeats = our_trainer(), load_tasks(ENV, "train"), 1 if quick else 3
    first, turns = (1, 1) if quick else (2, 5)
    step(trainer, tasks, 1)
    more = (1, 2) if quick else (1, 2, 4, 8)
    one, *there = alternate(repeats, *(lambda n=n: cost(lambda: step(trainer, tasks, first * n)) for n in more))
    for n, found in zip(more[1:], there):
        line(f"a rollout, of {4 * first * n} and of {4 * first} a step: tiny, {ENV}", one,
             {name: value / n for name, value in found.items()})

    steady = steady_sampler(trainer.sampler.model, trainer.tokenizer, 8, 4 * turns)
    chat, more = PlainChat(trainer.tokenizer), more[:3]
    one, *there = alternate(repeats, *(
        lambda n=n: cost(lambda: learn(trainer, play_steady(steady, chat, 8, turns * n))) for n in more))
    for n, found in zip(more[1:], there):
        line(f"a turn, of {turns * n} and of {turns}: tiny, 8 rows, first prompt of {PROMPT}", one,
             {name: value / n for name, value in found.items()})


def share(quick: bool) -> None:
    trainer, tasks = our_trainer(), load_tasks(ENV, "train")
    inside = {"cpu": 0.0, "wall": 0.0}

    def clocked(function):
        def timed(*arguments, **options):
            result = []
            spent = cost(lambda: result.append(function(*arguments, **options)))
            inside.update({name: inside[name] + spent[name] for name in inside})
            return result[0]

        return functools.wraps(function)(timed)

    step(trainer, tasks, 1)
    for owner, name in ((trainer.sampler.model, "forward"), (trainer.model, "score"), (trainer.optimizer, "step"),
                        (torch.Tensor, "backward")):
        setattr(owner, name, clocked(getattr(owner, name)))
    prompts = 1 if quick else 8
    whole = cost(lambda: step(trainer, tasks, prompts))
    line(f"a step's share outside the model's arithmetic: tiny, {ENV}, {4 * prompts} rows", whole,
         {name: whole[name] - inside[name] for name in inside})


# ------------------------------------------------------------------------------------------------------------ main


SECTIONS = {section.__name__: section for section in (rollout, training, cache, head, growth, share)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs; such ratios say nothing")
    options = parser.parse_args()
    if unknown := [name for name in options.section if name not in SECTIONS]:
        parser.error(f"no section '{unknown[0]}'; there are: {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"{'compared':84}  {'ours':>20}  {'other':>20}   ratio", flush=True)
    for name in options.section or SECTIONS:
        if name in ("cache", "growth", "share"):
            forked(SECTIONS[name], options.quick)
        else:
            SECTIONS[name](options.quick)


if __name__ == "__main__":
    main()
