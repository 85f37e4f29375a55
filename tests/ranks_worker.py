"""What test_scale.py lets happen in processes of its own: train.py's main(), and a Trainer's steps on several ranks.

Processes are forked from a server that has imported train and done nothing else, so each starts as `python train.py`
does (torchrun's environment variables for several ranks), without the seconds that its imports take.
"""

import dataclasses
import gc
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  else each process imports it anew

import extras.run
import faca
import sampler
import train
from extras import tiny
from extras.checkpoint import resume, save_state

ROOT = Path(__file__).resolve().parent.parent


# ------------------------------------------------------------------------------------------------------- processes


@dataclasses.dataclass
class Done:
    code: int  # the first that is not 0; -9 for SIGKILL
    out: str
    err: str


def start(folder: Path, function, *arguments, ranks: int = 1, **more):
    """function(*arguments, **more) in as many processes, whose prints go to `folder`; finish() waits for them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pytest"])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    processes = [context.Process(target=enter, args=(folder, rank, ranks, port, function, *arguments), kwargs=more)
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return folder, processes


def finish(folder: Path, processes, seconds: float = 240) -> Done:
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"not over after {seconds} s; it said: {(folder / 'stderr').read_text()}")
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    said = Done(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())
    for name in ("stdout", "stderr"):
        (folder / name).unlink()
    return said


def enter(folder: Path, rank: int, ranks: int, port: int, function, *arguments, **more) -> None:
    """In the new process."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind
    function(*arguments, **more)


# ---------------------------------------------------------------------------------------------------- train.py's run


def run(argv: list[str], words: list[str], dies=None, largest_file: int = 0, held_out: int = 2) -> None:
    """train.py on few held-out tasks, and few of the expert's, with the tiny tokenizer's words found before.

    dies: see kill_before. largest_file: in bytes, past which a write fails as on a full disk.
    """
    tiny.domain_words = lambda: words
    beside, few = extras.run.tasks_beside, {"test": held_out, "sft": 12}
    tiny.tasks_beside = extras.run.tasks_beside = lambda tasks, split: beside(tasks, split)[:few[split]]
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if dies:
        kill_before(*dies)
    sys.argv = ["train.py", *argv]
    train.main()


def kill_before(event: str, path: str, count: int) -> None:
    """SIGKILL before the count-th time that a path with that text is opened, renamed, removed: as Python audits it."""
    left = [count]

    def hook(name: str, arguments: tuple) -> None:
        if name == event and path in str(arguments[0]):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def under_torchrun(argv: list[str], words: list[str], how: str) -> None:
    """torchrun's own agent with two ranks, of which the second dies in its first RL step. Exit code 9: it ended."""
    settings = LaunchConfig(1, 1, 2, rdzv_endpoint="localhost:0", rdzv_backend="c10d", max_restarts=0,
                            start_method="fork", monitor_interval=0.1)
    try:
        elastic_launch(settings, dying)(argv, words, how)
    except (Exception, SignalException) as error:
        print(type(error).__name__)
        sys.exit(9)


def dying(argv: list[str], words: list[str], how: str) -> None:
    def last_words(*arguments):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the last words of rank 1")

    if os.environ["RANK"] == "1":
        train.assign_credit = last_words
    run(argv, words)


# ------------------------------------------------------------------------------------------------ steps of a Trainer


def objective(logp_1T, old_1T, advantage_1T, mask_1T, denominator):
    return faca.clipped_loss(logp_1T, old_1T, advantage_1T, mask_1T, 0.2, denominator)


def new_trainer(config: train.Config, **more) -> train.Trainer:
    trainer = train.Trainer(dataclasses.replace(config, **more))
    trainer.begin("rl", 0.01, SimpleNamespace(note=None))
    return trainer


def whole(tensors) -> list[torch.Tensor]:
    return [tensor.full_tensor().clone() for tensor in tensors]


def weights_and_moments(trainer) -> list[torch.Tensor]:
    moments = [value for p in trainer.model.parameters() for value in trainer.optimizer.state[p].values()]
    return whole([*trainer.model.parameters(), *(m for m in moments if hasattr(m, "full_tensor"))]) + [
        m.clone() for m in moments if not hasattr(m, "full_tensor")]


def check(out: Path, argv: list[str], shares: list[list], budgets: list[int], jobs: dict) -> None:
    """Runs the jobs on this rank's share of the records; what each returns goes to out/rank-R.pt, as {name: result}."""
    train.start_processes()
    rank = dist.get_rank()
    config = train.parse_config(argv)
    found = {name: globals()[name](config, shares[rank], budgets, **more) for name, more in jobs.items()}
    torch.save(found, out / f"rank-{rank}.pt")
    dist.destroy_process_group()


def gradients(config: train.Config, records: list, budgets: list[int], models: list[tuple[str, str, bool]]) -> dict:
    """For (name, folder, recompute) of `models`: {(name, recompute, budget): (gradient, stats, micro-batches)}.

    And {name: (logits of the sharded model, share of its layers on this rank)}, {"read": how often weights were read},
    {"forwards": those of a layer in a micro-batch, with recompute and without}.
    """
    out, read, load = {}, [], AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = lambda name, **more: read.append(name) or load(name, **more)
    forwards = {}
    for name, folder, recompute in models:
        trainer = new_trainer(config, model=folder, recompute=recompute)
        sampler.HEAD_LOGITS = 5 * trainer.model.config.vocab_size if recompute else 2**28  # in chunks of 5 rows
        for budget in budgets:
            trainer.config = dataclasses.replace(trainer.config, tokens_per_microbatch=budget)
            batches, calls = trainer.batches_of(records), []
            hook = trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
            stats = trainer.loss_of(batches, objective)
            hook.remove()
            forwards[recompute] = len(calls) / len(batches)
            out[name, recompute, budget] = whole(p.grad for p in trainer.model.parameters()), stats, len(batches)
            trainer.optimizer.zero_grad()
        logits = trainer.model(torch.arange(3, 40)[None], use_cache=False, lengths=[37], borders=None).logits.detach()
        layers = list(trainer.model.model.layers.parameters())
        out[name] = logits, sum(p.to_local().numel() for p in layers) / sum(p.numel() for p in layers)
    AutoModelForCausalLM.from_pretrained = load
    return out | {"read": len(read), "forwards": forwards}


def two_updates(config: train.Config, records: list, budgets: list[int]) -> dict:
    """Two updates on one batch, with what each saw; then the weights."""
    trainer, seen = new_trainer(config, tokens_per_microbatch=budgets[1]), []
    batches = len(trainer.batches_of(records))

    def watched(logp_1T, old_1T, *rest):
        ratio = (logp_1T.detach() - old_1T)[rest[1]].exp()
        seen.append((ratio, old_1T.clone()))
        return objective(logp_1T, old_1T, *rest)

    stats = trainer.update(records, 1e-2, watched, updates=2)
    return {"weights": whole(trainer.model.parameters()), "first": seen[:batches], "second": seen[batches:],
            "stats": stats}


def bad_steps(config: train.Config, records: list, budgets: list[int]) -> dict:
    """A good step, then bad ones, whose cause is on the last rank alone: {kind: (untouched, stats, in a row)}."""
    trainer, out = new_trainer(config, max_bad_steps=2), {}
    passes = len(trainer.batches_of(records))
    trainer.update(records, 1e-3, objective)
    before = weights_and_moments(trainer)

    def nan_loss(logp_1T, *rest):  # with a gradient that is finite
        loss, stats = objective(logp_1T, *rest)
        return (loss + float("nan") if trainer.rank == trainer.world - 1 else loss), stats

    def infinite_gradient(logp_1T, *rest):
        if trainer.rank == trainer.world - 1:
            logp_1T.register_hook(lambda gradient: gradient + float("inf"))
        return objective(logp_1T, *rest)

    for kind in (nan_loss, infinite_gradient):
        stats = trainer.update(records, 1e-3, kind)
        same = all(torch.equal(a, b) for a, b in zip(before, weights_and_moments(trainer), strict=True))
        out[kind.__name__] = same, stats, trainer.bad_steps
    try:
        trainer.update(records, 1e-3, nan_loss)
    except train.RunStopped as error:
        out["stopped"] = str(error)
    losses = iter([objective] * passes + [nan_loss] * passes)
    stats = trainer.update(records, 1e-3, lambda *x: next(losses)(*x), updates=2)
    out["half"] = stats["skipped"], trainer.bad_steps
    trainer.update(records, 1e-3, objective)
    after = weights_and_moments(trainer)
    return out | {"good": (trainer.bad_steps, all(t.isfinite().all() for t in after),
                           any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))}


def live_tensors(config: train.Config, records: list, budgets: list[int]) -> list[tuple[int, int]]:
    """How many tensors there are after the second step and the fourth, and how many numbers they hold."""
    trainer, out = new_trainer(config), []
    for step in range(4):
        trainer.update(records, 1e-3, objective, updates=2)
        trainer.refresh_sampler()
        if step % 2:
            gc.collect()
            sizes = [x.numel() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            out.append((len(sizes), sum(sizes)))
    return out


def checkpoints(config: train.Config, records: list, budgets: list[int], folder: Path) -> dict[str, list]:
    """Weights and moments after a first step: plain, with a checkpoint made before it, and resumed from that one."""
    out, note = {}, {"path": str(folder), "trained_on": [], "bad_steps": 0, "phase": "rl", "step": 0}
    for name in ("plain", "saved", "resumed"):
        trainer = new_trainer(config)
        if name == "saved":
            save_state(folder, trainer.model, trainer.optimizer, note, lambda path: None)
        if name == "resumed":
            resume(trainer, note)
        trainer.update(records, 1e-3, objective)
        out[name] = weights_and_moments(trainer)
    return out


def probe(config: train.Config, records: list, budgets: list[int]) -> dict[str, str]:
    """What refresh_sampler() says after a step with a large learning rate, and when the replica is another policy."""
    trainer = new_trainer(config)
    model, out, forget = trainer.sampler.model, {}, trainer.sampler.weights_changed
    before = model.lm_head.weight.clone()
    trainer.update(records, 0.1, objective)
    trainer.refresh_sampler()
    out["moved"] = (before - model.lm_head.weight).abs().max().item()

    def spoil(what):
        trainer.sampler.weights_changed = lambda: (what(), forget())
        try:
            trainer.refresh_sampler()
            return ""
        except RuntimeError as error:
            return str(error)

    inv_freq, few = model.model.rotary_emb.inv_freq.clone(), trainer.sampler._banned.clone()
    out["a weight"] = spoil(lambda: model.model.layers[1].mlp.down_proj.weight.mul_(1.1))
    out["a buffer"] = spoil(lambda: model.model.rotary_emb.inv_freq.copy_(inv_freq * 0.5))
    model.model.rotary_emb.inv_freq.copy_(inv_freq)
    out["the temperature"] = spoil(lambda: setattr(trainer.sampler, "temperature", 0.9))
    trainer.sampler.temperature = trainer.config.temperature
    out["the bans"] = spoil(lambda: trainer.sampler._banned[::3].fill_(True))
    trainer.sampler._banned.copy_(few)
    out["nothing"] = spoil(lambda: None)
    return out
