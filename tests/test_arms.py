"""train.py --from-rollouts: what it prints for a batch computed by hand, the arms' gradients, a real run, bad input."""

import dataclasses
import json
import os
import pathlib
import runpy
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import extras.run
import train
from extras import arms
from extras.checkpoint import save_policy
from extras.show import load_rollouts, save_rollouts
from extras.tiny import make_tiny
from rollout import Caps, Chat, Rollout, credit_tensors

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = "Which of your orders is it that you would like to change, the first or the second one, please tell me now."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of the tiny model, untrained."""
    path, (tokenizer, tiny) = tmp_path_factory.mktemp("policy") / "tiny", make_tiny(0)
    save_policy(path, tiny, tokenizer, Chat(tokenizer).end_ids, {
        "preset": "tiny", "trained_on": [], "temperature": 1.0,
        "caps": dataclasses.asdict(Caps(4, 16, 768, 4))})
    return path


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A run of one step, evaluated on two tasks."""
    out, asked = tmp_path_factory.mktemp("run") / "one", extras.run.tasks_beside
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        patch.setattr(extras.run, "tasks_beside", lambda tasks, split: asked(tasks, split)[:2])
        patch.setattr(sys, "argv", ["train.py", "--model", str(model), *"""--env mini:retail --steps 1 --prompts 2
            --rollouts 4 --max-messages 3 --max-message-tokens 12 --eval-trials 1 --out""".split(), str(out)])
        train.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert exit_.value.code == 0
    return out


@pytest.fixture
def trainer(model):
    os.environ.pop("RANK", None)
    train.start_processes()
    config = train.parse_config(["--model", str(model), "--env", "mini:retail"])
    yield train.Trainer(config, sampling=False)
    dist.destroy_process_group()


def tell(arguments, monkeypatch, capsys) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python train.py ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    return exit_.value.code, *capsys.readouterr()


def record(group, k, reward, strategies, stop="user_closed"):
    """A rollout of three-token prompts and two-token messages, one a segment."""
    out = Rollout(f"mini:retail/train/{group:03}", "mini:retail", group, k, 0, reward=reward, stop=stop)
    for q, z in enumerate(strategies):
        out.append([5, 6, 7])
        out.append([8 + k, 9], q, [-2.0, -3.0])
        out.strategies.append(z)
        out.reactions.append(None if z is None else arms.faca.reaction_of(z))
        out.messages.append({"role": "assistant", "content": TEXT if q == 0 else "Done.", "segment": q})
    return out


def by_hand() -> list[Rollout]:
    """A mixed group with two segments, an all-wrong one with a void rollout, and one where reactions beat outcomes."""
    return [record(0, 0, 1.0, ["confirm", "change_mind"]), record(0, 1, 0.0, ["ask_clarification", None]),
            record(1, 0, 0.0, ["be_vague"]), record(1, 1, 0.0, ["reveal_piece"]),
            record(1, 2, 1.0, ["confirm"], stop="void_user"),
            record(2, 0, 1.0, ["challenge_solution"]), record(2, 1, 1.0, ["confirm"]),
            record(2, 2, 1.0, ["confirm"]), record(2, 3, 0.0, ["close"])]


def cells(printed: str, name: str) -> list[list[str]]:
    """The lines that begin with that name, as words after it."""
    return [line[len(name):].split() for line in printed.splitlines() if line.startswith(name + " ")]


# ------------------------------------------------------------------------------------------------------ advantages


def test_the_advantages_of_each_arm_by_hand():
    """R = [1, 0]: A^o = +-0.707; f = [+1, -1]: A^p = +-0.707; f = [-1, 1, 1, 1]: A^p = -1.5 and 0.5 three times."""
    found, _, _ = arms.credit(by_hand(), seed=0, step=0)
    h = 0.5 ** 0.5
    expected = {
        "GRPO": [[h, h], [-h, -h], [0], [0], [0], [0.5], [0.5], [0.5], [-1.5]],
        "FACA .5": [[1.5 * h, h], [-1.5 * h, -h], [-h / 2], [h / 2], [0], [-0.25], [0.75], [0.75], [-1.25]],
        "FACA .1": [[1.1 * h, h], [-1.1 * h, -h], [-h / 10], [h / 10], [0], [0.35], [0.55], [0.55], [-1.45]],
        "reversed -.5": [[0.5 * h, h], [-0.5 * h, -h], [h / 2], [-h / 2], [0], [1.25], [0.25], [0.25], [-1.75]],
        "shifted .5": [[h, 1.5 * h], [-h, -1.5 * h], [0], [0], [0], [0.5], [0.5], [0.5], [-1.5]]}
    for name, rows in expected.items():
        for got, want in zip(found[name].tolist(), rows, strict=True):
            assert got[:len(want)] == pytest.approx(want, abs=1e-5), name
    assert not torch.allclose(found["randomized .5"], found["FACA .5"]) and not found["randomized .5"][4].any()
    again, other = (arms.credit(by_hand(), seed=0, step=step)[0]["randomized .5"] for step in (0, 1))
    assert torch.equal(again, found["randomized .5"]) and not torch.equal(again, other)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(
    ["confirm", "be_vague", "change_mind", None])), min_size=1, max_size=12))
def test_aligned_and_reversed_average_to_interactive_grpo_for_any_batch(rows):
    x = credit_tensors([record(group, k, reward, [z]) for k, (group, reward, z) in enumerate(rows)])
    aligned, outcome, turned = (train.advantages(x, lam, "none", torch.Generator()) for lam in (0.5, 0.0, -0.5))
    assert torch.allclose(aligned + turned, 2 * outcome, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- what is shown


def test_what_is_printed_of_a_batch_computed_by_hand(model, tmp_path, monkeypatch, capsys):
    save_rollouts(tmp_path / "batch.jsonl", by_hand()[::-1])  # in whatever order
    code, out, _ = tell(["--from-rollouts", tmp_path / "batch.jsonl", "--model", model], monkeypatch, capsys)
    assert code == 0 and all(len(line) <= 100 or str(tmp_path) in line or str(model) in line
                             for line in out.splitlines())
    assert [(r.group, r.k) for r in arms.read_batch(str(tmp_path / "batch.jsonl"))] == [
        (r.group, r.k) for r in by_hand()]  # the order in which training puts the randomized reactions
    assert "9 in 3 groups: 0 all-correct, 1 all-wrong, 2 mixed; mean reward 0.500" in out
    assert "void       1 of them" in out and "segments   10, 9 with a reaction: 55.6% positive, 33.3% negative" in out
    assert "tokens     50, 20 of them trained" in out  # five a segment, two of them the agent's
    assert "coverage   80.0%" in out and "process    33.3%" in out  # 2.914 of 2.914 + 5.828
    assert "These are not the weights that sampled the file" in out
    shares = {  # mean |A|, sign differs, opposite, none
        "GRPO": ["0.5828", "0.0%", "0.0%", "20.0%"], "FACA .5": ["0.7243", "30.0%", "10.0%", "0.0%"],
        "FACA .1": ["0.6011", "20.0%", "0.0%", "0.0%"], "reversed -.5": ["0.6328", "20.0%", "0.0%", "0.0%"],
        "shifted .5": ["0.6536", "0.0%", "0.0%", "20.0%"]}
    for name, expected in shares.items():
        assert cells(out, name)[0][:4] == expected, name
    for i, name in enumerate(arms.ARMS):
        assert cells(out, name)[1][i] == "+1.0000"  # beside itself
    assert cells(out, "0") == [["8", "8", "+0.375", "+0.0000", "0.5518", "0.3643", "39.8%", "37.5%"]]
    assert cells(out, "1") == [["2", "1", "-1.000", "+0.0000", "0.7071", "0.0000", "0.0%", "0.0%"]]
    widest = out.split("differ most")[1].splitlines()
    assert widest[3].split() == ["mini:retail/train/002", "0", "0", "challenge_solution", "+0.5000", "-0.2500"]
    assert widest[4].strip() == TEXT[:72].strip() and len(widest) == 3 + 2 * arms.WIDEST


def test_a_real_run_goes_through_and_faca_has_the_loss_and_gradient_that_training_logged(
        folder, tmp_path, monkeypatch, capsys):
    """Found by itself: the model that RL began with, for the file is of step 0."""
    path = folder / "rollouts" / "step-00000.jsonl"
    before = sorted(folder.rglob("*"))
    code, out, _ = tell(["--from-rollouts", path], monkeypatch, capsys)
    assert code == 0 and sorted(folder.rglob("*")) == before
    row = next(row for row in map(json.loads, (folder / "metrics.jsonl").open()) if row["phase"] == "rl")
    assert row["signal"] and f"coverage   {row['coverage']:.1%}" in out
    aligned = cells(out, "FACA .5")[0]
    assert float(aligned[4]) == pytest.approx(row["grad_norm"], rel=1e-3)
    assert float(aligned[5]) == pytest.approx(row["loss"], abs=1e-6)
    assert "not the weights" not in out and "ratio      mean 1.0000" in out
    if row["groups_mixed"] == 0:
        assert cells(out, "GRPO")[1] == ["-"] * 6
    records = load_rollouts(path)
    for r in records:
        r.reward = float(r.k == 0)
    save_rollouts(tmp_path / "mixed.jsonl", records)  # in no run folder
    code, out, _ = tell(["--from-rollouts", tmp_path / "mixed.jsonl", "--model", folder / "model"], monkeypatch, capsys)
    assert code == 0 and "2 mixed" in out and cells(out, "GRPO")[1][0] == "+1.0000"


# ------------------------------------------------------------------------------------------------------- gradients


def test_gradients_add_up_as_equation_6_says_and_lambda_0_is_grpo(trainer):
    """At a ratio of 1 the gradient is linear in the advantage: g(.5) + g(-.5) = 2 g(0), 5 g(.1) = g(.5) + 4 g(0)."""
    records = [r for r in by_hand() if not r.void]
    for batch in trainer.batches_of([dataclasses.replace(r, advantage=[0.0] * len(r.strategies)) for r in records]):
        place = 0
        logp_1T, _ = trainer.model.score(batch["tokens_1T"], batch["lengths"], batch["segment_1T"] >= 0, 1.0,
                                         trainer.banned)
        for r in sorted(records, key=lambda r: len(r.tokens), reverse=True):  # as they are packed
            r.logprobs = logp_1T[0, place:(place := place + len(r.tokens))].tolist()
    credit, x, _ = arms.credit(records, 0, 0)
    g, stats = {}, {}
    for name in ("GRPO", "FACA .5", "FACA .1", "reversed -.5"):
        g[name], stats[name] = arms.gradient(trainer, records, credit[name])
    lambda_0, _ = arms.gradient(trainer, records, train.advantages(x, 0.0, "none", torch.Generator()))
    for name, seen in stats.items():
        assert seen["ratio"] == pytest.approx(1, abs=1e-5) and seen["clipped"] == 0, name
    for o, a, a1, r, same in zip(g["GRPO"], g["FACA .5"], g["FACA .1"], g["reversed -.5"], lambda_0, strict=True):
        assert torch.allclose(a + r, 2 * o, atol=1e-6) and torch.allclose(5 * a1, a + 4 * o, atol=1e-6)
        assert torch.equal(same, o)
    norms, cosines = arms.norms_and_cosines([g["GRPO"], lambda_0, g["FACA .5"]])
    assert cosines[0, 1].item() == pytest.approx(1, abs=1e-12) and norms[0] > 0 and 0 < cosines[0, 2] < 0.9999
    plain = sum((part.double() ** 2).sum() for part in g["FACA .5"]).sqrt()
    assert norms[2].item() == pytest.approx(plain.item())
    more = [*records, *(r for r in by_hand() if r.void)]
    _, seen = arms.gradient(trainer, more, arms.credit(more, 0, 0)[0]["FACA .5"])
    assert seen["tokens"] == 20 and seen["loss"] == stats["FACA .5"]["loss"]  # the void one is in no denominator
    assert all(p.grad is None for p in trainer.model.parameters())


def test_norms_and_cosines_by_hand(monkeypatch):
    """(3, 4), (4, -3), (6, 8) and 0 over two parameters, in chunks of one weight."""
    monkeypatch.setattr(arms, "CHUNK", 1)
    norms, cosines = arms.norms_and_cosines([[torch.tensor([a]), torch.tensor([b])]
                                             for a, b in ((3., 4.), (4., -3.), (6., 8.), (0., 0.))])
    assert norms.tolist() == [5, 5, 10, 0]
    assert torch.allclose(cosines[:3, :3], torch.tensor([[1., 0, 1], [0, 1, 0], [1, 0, 1]]).double())
    assert cosines[3].isnan().all()


def test_a_ratio_that_is_not_1_is_counted_and_clipped(trainer):
    """The recorded log-probs say twice and half as likely: the ratio is 0.5 and 2, beyond the clip on one side each."""
    up, down = record(0, 0, 1.0, ["confirm"]), record(0, 1, 1.0, ["confirm"])
    trainer.config = dataclasses.replace(trainer.config, tokens_per_microbatch=1)  # each alone
    for r, shift in ((up, 2.0), (down, 0.5)):
        batch, = trainer.batches_of([dataclasses.replace(r, advantage=[0.0])])
        logp_1T, _ = trainer.model.score(batch["tokens_1T"], batch["lengths"], batch["segment_1T"] >= 0, 1.0,
                                         trainer.banned)
        r.logprobs = (logp_1T[0] - torch.tensor(shift).log()).tolist()
    for advantage, clipped in (([[1.0], [1.0]], 0.5), ([[-1.0], [-1.0]], 0.5), ([[1.0], [-1.0]], 1.0),
                               ([[-1.0], [1.0]], 0.0)):
        _, stats = arms.gradient(trainer, [up, down], torch.tensor(advantage))
        assert stats["ratio"] == pytest.approx(1.25, abs=1e-4) and stats["clipped"] == clipped
        assert stats["ratio_max"] == pytest.approx(2, abs=1e-3)
        assert stats["logprob_gap_max"] == pytest.approx(0.6931, abs=1e-3)


# --------------------------------------------------------------------------------------------- options, and bad input


def test_the_model_is_the_one_that_sampled_the_file_where_the_run_has_it(model, tmp_path):
    run = tmp_path / "run"
    for name in ("model", "sft", "checkpoints/rl-000003/model"):
        (run / name).mkdir(parents=True)
        shutil.copy(model / "config.json", run / name)
    assert arms.model_of(run, 3, "tiny") == str(run / "checkpoints/rl-000003/model")
    assert arms.model_of(run, 2, "tiny") == str(run / "model")
    assert arms.model_of(run, 0, "tiny") == str(run / "sft")
    shutil.rmtree(run / "sft")
    assert arms.model_of(run, 0, str(model)) == str(model)
    assert arms.model_of(run, 0, "tiny") == str(run / "model")


def test_options_are_those_of_the_run_and_flags_override_them(folder):
    path = folder / "rollouts" / "step-00000.jsonl"
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | {"temperature": 0.7, "seed": 3}))
    config = train.parse_config(["--from-rollouts", str(path), "--clip", "0.3"])
    (folder / "config.json").write_text(json.dumps(options))
    assert (config.temperature, config.seed, config.clip, config.model) == (0.7, 3, 0.3, options["model"])


def changed(**more):
    return [dataclasses.replace(r, **more) for r in by_hand()]


@pytest.mark.parametrize("records, named", [
    (lambda: changed(stop="void_world"), "all 9 rollouts are void"),
    (lambda: [Rollout("t", "d", 0, 0, 0, stop="empty_message")], "segment"),
    (lambda: by_hand() + by_hand(), "one step"),
    (lambda: [dataclasses.replace(r, task=f"{r.k}") for r in by_hand()], "one step"),
    (lambda: [dataclasses.replace(r, logprobs=[float("nan")] * len(r.tokens)) for r in by_hand()], "log-prob"),
    (lambda: [dataclasses.replace(r, segment=[0] * len(r.tokens)) for r in by_hand()], "begins"),
    (lambda: [dataclasses.replace(r, segment=[-1] * len(r.tokens)) for r in by_hand()], "token tensors"),
    (lambda: changed(reward=float("nan")), "NaN"),
    (lambda: changed(messages=[{"role": "assistant", "segment": 0}]), "damaged"),
    (lambda: [dataclasses.replace(r, tokens=[10**6] * len(r.tokens)) for r in by_hand()], "1000000"),
    (lambda: [dataclasses.replace(r, tokens=[-1] * len(r.tokens)) for r in by_hand()], "token -1"),
])
def test_a_file_that_cannot_be_compared_is_one_line(records, named, model, tmp_path, monkeypatch, capsys):
    save_rollouts(tmp_path / "batch.jsonl", records())
    code, out, err = tell(["--from-rollouts", tmp_path / "batch.jsonl", "--model", model], monkeypatch, capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and named in err and "batch.jsonl" in err


def test_a_sampled_id_that_the_model_never_samples_is_one_line(model, tmp_path, monkeypatch, capsys):
    """An unused row of the embedding: the id has a row, but no tokenizer of this model made it."""
    unused = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    records = by_hand()
    records[0].tokens[4] = unused
    save_rollouts(tmp_path / "batch.jsonl", records)
    code, out, err = tell(["--from-rollouts", tmp_path / "batch.jsonl", "--model", model], monkeypatch, capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and f"token {unused}" in err and "--model" in err


def test_the_users_mistake_is_one_line(model, tmp_path, monkeypatch, capsys):
    save_rollouts(tmp_path / "batch.jsonl", by_hand())
    (tmp_path / "noise.jsonl").write_text("{}\n")
    batch = ["--from-rollouts", tmp_path / "batch.jsonl"]
    for arguments, named in (
            (batch, "needs --model"), ([*batch, "--model", "./nowhere/model"], "nowhere/model"),
            ([*batch, "--model", ""], "no model ''"), ([*batch, "--model", model, "--lam", "0.1"], "--lam"),
            ([*batch, "--model", model, "--resume", "runs/x"], "--resume"),
            ([*batch, "--model", model, "--temperature", "0"], "--temperature"),
            (["--from-rollouts", ""], "is no file"), (["--from-rollouts", tmp_path], "is no file"),
            (["--from-rollouts", tmp_path / "noise.jsonl", "--model", model], "line 1")):
        code, out, err = tell(arguments, monkeypatch, capsys)
        assert code == 2 and out == "" and err.count("\n") == 1 and named in err, arguments
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = tell([*batch, "--model", model], monkeypatch, capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and "one process" in err
