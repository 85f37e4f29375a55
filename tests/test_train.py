"""train.py and eval.py: the command line, the update on one and two ranks, the two arms' first step, the run folder."""

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import faca
import train
from env import load_tasks, make_env
from extras.checkpoint import trained_on_complete
from extras.playing import training_of
from extras.show import load_rollouts
from extras.tables import curves

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = ("--env", "mini:retail", "--steps", "2", "--prompts", "3", "--rollouts", "3", "--max-messages", "4",
         "--eval-trials", "1")
SFT = ("--sft-steps", "2", "--sft-dialogues", "1", "--sft-validation", "0.05")


def run(*arguments, ranks=0, **more):
    """A real process; ranks > 0 is under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    head = torchrun if ranks else [sys.executable]
    return subprocess.run([*head, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=240, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run of one process, start to end."""
    out = tmp_path_factory.mktemp("run") / "one"
    done = run("train.py", *SMALL, *SFT, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def rows(folder, phase):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["phase"] == phase]


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("arguments, named", [
    (["--model", "./nowhere/model", "--env", "mini:retail", "--simulator", "scripted"], "nowhere/model"),
    (["--model", "Qwen3-8B", "--env", "mini:retail"], "--simulator-url"), (["--env", "tau9:x"], "tau2:airline"),
    (["--env", "mini:banking"], "mini:banking"), (["--env", "tau2:airline/train"], "expert"),
    (["--env", "mini:telecom/dev"], "dev"), (["--env", "mini:telecom,mini:telecom"], "twice"),
    (["--method", "ppo"], "ppo"), (["--control", "reversed"], "reversed"), (["--lam", "0.6"], "0.6"),
    (["--lam", "nan"], "nan"), (["--rollouts", "1"], "--rollouts"), (["--steps", "-1"], "--steps"),
    (["--prompts", "65"], "64"), (["--lr", "inf"], "--lr"), (["--method", "grpo", "--lam", "0.5"], "grpo"),
    (["--method", "grpo", "--control", "shifted"], "grpo"), (["--control", "shifted", "--lam", "0"], "shifted"),
    (["--env", "mini:retail/test"], "held-out"), (["--method", "sft", "--lam", "0.1"], "sft"),
    (["--out", "/dev/null/x"], "/dev/null/x"),
    (["--steps", "many"], "many"), (["--nonsense"], "nonsense"),
])
def test_the_users_mistake_is_one_line_and_exit_code_2(arguments, named, monkeypatch, capsys):
    assert named in one_line(arguments, monkeypatch, capsys)


def one_line(arguments, monkeypatch, capsys):
    """What train.py says of the user's mistake: one line on stderr, nothing on stdout, exit code 2."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        train.main()
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("train.py: ")]
    assert exit_.value.code == 2 and printed.out == "" and len(said) == 1 and printed.err.endswith(said[0] + "\n")
    return said[0]


def test_a_mistake_under_torchrun_is_said_once_by_rank_0():
    done = run("train.py", "--lam", "0.6", ranks=2)
    assert done.returncode != 0 and done.stderr.count("train.py: lambda must be") == 1


def test_help_under_torchrun_is_printed_once():
    done = run("train.py", "--help", ranks=2)
    assert done.returncode == 0 and done.stdout.count("usage: ") == 1


def test_a_folder_that_holds_another_run_is_refused_and_left_alone(folder):
    before = (folder[0] / "metrics.jsonl").read_bytes()
    done = run("train.py", *SMALL, *SFT, "--out", folder[0])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(folder[0]) in done.stderr
    assert (folder[0] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("arguments, named", [
    (["run", "--model", "./nowhere/model"], "nowhere/model"), (["run", "--model", "tiny", "--env", "mini:x"], "mini:x"),
    (["run", "--model", "tiny", "--trials", "0"], "--trials"), (["run"], "--model"), (["walk"], "walk"),
    (["curves", "tests"], "tests"), ([], "run")])
def test_eval_names_the_users_mistake_in_one_line(arguments, named, monkeypatch, capsys):
    import eval as evaluation
    monkeypatch.setattr(sys, "argv", ["eval.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        evaluation.main()
    printed = capsys.readouterr().err
    assert exit_.value.code == 2 and named in printed and printed.count("\n") == 1


def test_what_only_the_model_can_tell_is_one_line_too(folder, tmp_path, monkeypatch, capsys):
    """A context without room for the prompt; checkpoints with a weight missing, or a damaged file."""
    for name, cut in (("weights", "model.safetensors"), ("note", "faca.json"), ("config", "config.json")):
        shutil.copytree(folder[0] / "sft", tmp_path / name)
        (tmp_path / name / cut).write_bytes((tmp_path / name / cut).read_bytes()[:20])
    short = tmp_path / "short"
    shutil.copytree(folder[0] / "sft", short)
    weights = load_file(short / "model.safetensors")
    save_file({key: w for key, w in weights.items() if "layers.1.mlp.up" not in key}, short / "model.safetensors",
              metadata={"format": "pt"})
    wrong = [("--model", path) for path in (tmp_path / "weights", tmp_path / "note", short, tmp_path / "config")]
    for i, arguments in enumerate([*wrong, ("--max-context", "100")]):
        out = tmp_path / f"out{i}"
        assert str(arguments[-1]) in one_line([*SMALL, *arguments, "--out", out], monkeypatch, capsys)
        assert not out.exists()


def test_a_run_that_diverges_stops_with_one_line_and_keeps_the_last_good_weights(folder, tmp_path):
    done = run("train.py", *SMALL, "--model", folder[0] / "sft", "--lam=-1e39", "--max-bad-steps", "0", "--out",
               tmp_path / "far")
    assert done.returncode == 1 and "diverged" in done.stderr and "Traceback" not in done.stderr
    kept = load_file(tmp_path / "far" / "model" / "model.safetensors")
    assert all(w.isfinite().all() for w in kept.values())


# ------------------------------------------------------------------------------------------------------- options


def test_every_option_is_a_flag_resolved_by_the_model_and_overridden_by_hand(folder):
    tiny, paper = train.parse_config([]), train.parse_config(["--model", str(folder[0] / "model")])
    assert (tiny.rollouts, tiny.prompts, tiny.lam, tiny.model) == (4, 8, 0.5, "tiny")
    assert paper.rollouts == 4  # a checkpoint knows its preset
    assert train.parse_config(["--rollouts", "6"]).rollouts == 6
    assert train.parse_config(["--method", "grpo"]).lam == 0.0
    assert all(f.metadata["help"] for f in dataclasses.fields(train.Config))


def test_prompts_of_an_epoch_are_all_tasks_once_and_the_next_epoch_is_in_another_order():
    tasks = load_tasks("mini:telecom", "train")
    stream = [task.id for step in range(16) for task in train.shuffled(tasks, step, 24, 0)]  # 6 epochs of 64
    epochs = [stream[i:i + 64] for i in range(0, len(stream), 64)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 6
    assert [t.id for t in train.shuffled(tasks, 0, 24, 1)] != stream[:24]


def test_rl_from_a_model_that_nothing_calls_an_sft_checkpoint_is_warned_about(folder, tmp_path, capsys):
    shutil.copytree(folder[0] / "sft", tmp_path / "bare")
    (tmp_path / "bare" / "faca.json").unlink()
    train.start_processes()
    for model, warned in ((folder[0] / "sft", 0), (tmp_path / "bare", 1)):
        train.ask_first(train.parse_config(["--model", str(model), "--env", "mini:retail", "--simulator", "scripted"]))
        assert capsys.readouterr().err.count("SFT checkpoint") == warned
    dist.destroy_process_group()


def test_what_a_model_was_trained_on_is_known_only_where_all_of_it_was_noted(folder, tmp_path):
    assert trained_on_complete("tiny") and trained_on_complete(folder[0] / "model")
    shutil.copytree(folder[0] / "sft", tmp_path / "old")
    note = json.loads((tmp_path / "old" / "faca.json").read_text())
    (tmp_path / "old" / "faca.json").write_text(json.dumps(
        {name: note[name] for name in ("preset", "caps", "temperature", "trained_on")}))  # as before it was noted
    assert not trained_on_complete(tmp_path / "old")
    (tmp_path / "old" / "faca.json").unlink()
    assert not trained_on_complete(tmp_path / "old")
    done = run("train.py", *SMALL, "--model", tmp_path / "old", "--simulator", "scripted", "--steps", 1, "--out",
               tmp_path / "rl")
    assert done.returncode == 0, done.stderr
    note = json.loads((tmp_path / "rl" / "model" / "faca.json").read_text())
    assert note["trained_on"] and note["trained_on_complete"] is False  # RL's tasks, and whatever came before


def test_attention_that_is_not_supported_is_one_line(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder[0] / "sft", tmp_path / "windowed")
    path = tmp_path / "windowed" / "config.json"
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0,
               "layer_types": ["sliding_attention"] * 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    assert "sliding_window" in one_line([*SMALL, "--model", tmp_path / "windowed", "--out", tmp_path / "out"],
                                        monkeypatch, capsys)


# ----------------------------------------------------------------------------------------------------- a whole run


def test_a_run_leaves_options_metrics_rollouts_and_a_model_that_plain_transformers_loads(folder):
    out, done = folder
    config = json.loads((out / "config.json").read_text())
    assert config["env"] == "mini:retail" and set(config) == {f.name for f in dataclasses.fields(train.Config)}
    assert [row["step"] for row in rows(out, "rl")] == [0, 1] and len(rows(out, "sft")) == 2
    assert [row["at"] for row in rows(out, "held_out")] == ["before", "after SFT", "after RL"]
    assert "pass@1/mini:retail" in done.stdout and f"run folder: {out}" in done.stdout
    tokenizer, model = AutoTokenizer.from_pretrained(out / "model"), AutoModelForCausalLM.from_pretrained(out / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_tensors="pt", return_dict=False)
    assert model(ids).logits.isfinite().all()
    note = json.loads((out / "model" / "faca.json").read_text())
    trained = {r.task for step in range(2) for r in load_rollouts(out / f"rollouts/step-0000{step}.jsonl")}
    assert trained <= set(note["trained_on"]) and not any("/test/" in task for task in note["trained_on"])
    assert (note["phase"], note["step"], note["trained_on_complete"]) == ("rl", 2, True)
    note = json.loads((out / "sft" / "faca.json").read_text())
    assert (note["phase"], note["step"], note["trained_on_complete"]) == ("sft", 2, True)


def test_every_metric_of_a_run_is_in_the_readmes_glossary(folder):
    glossary = (ROOT / "README.md").read_text(encoding="utf-8").split("## Metrics")[1].split("**Why is my loss 0?**")[0]
    named = set(re.findall(r"`([\w@/]+)`", glossary))
    families = {key.partition("/")[0] for key in named if "/" in key}
    keys = {key for phase in ("sft", "rl", "held_out") for row in rows(folder[0], phase) for key in row}
    assert len(keys) > 40
    assert {key for key in keys if key not in named and key.partition("/")[0] not in families} == set()
    first_column = {key for line in glossary.splitlines() if line.startswith("| `")
                    for key in re.findall(r"`([\w@]+)`", line.split(" | ")[0])}
    assert first_column - {"mfu"} <= keys  # for that one it takes a GPU


def test_the_ratio_of_the_first_update_is_1(folder):
    for row in rows(folder[0], "rl"):
        if row["signal"]:
            assert row["logprob_gap"] < 1e-5 and abs(row["ratio_max"] - 1) < 1e-4 and abs(row["ratio_min"] - 1) < 1e-4


def test_saved_rollouts_hold_the_credit_that_faca_gives(folder):
    records = load_rollouts(folder[0] / "rollouts" / "step-00001.jsonl")
    assert len(records) == 9 and [(r.group, r.k) for r in records] == [(g, k) for g in range(3) for k in range(3)]
    width = max(len(r.strategies) for r in records)
    reaction = torch.tensor([[faca.reaction_of(z) for z in r.strategies + [None] * (width - len(r.strategies))]
                             for r in records])
    observed = torch.tensor([[z is not None for z in r.strategies + [None] * (width - len(r.strategies))]
                             for r in records])
    expected = faca.faca_advantage(torch.tensor([r.reward for r in records]), reaction, observed,
                                   torch.tensor([r.group for r in records]), 0.5)
    for record, row in zip(records, expected.tolist(), strict=True):
        assert record.advantage == pytest.approx(row[:len(record.strategies)], abs=1e-6)


def test_both_arms_begin_with_the_same_rollouts_token_for_token_and_differ_in_the_advantage(folder, tmp_path):
    for arm in ("faca", "grpo"):
        done = run("train.py", "--method", arm, "--model", folder[0] / "sft", *SMALL, "--steps", "1", "--out",
                   tmp_path / arm)
        assert done.returncode == 0, done.stderr
    faca_arm, grpo_arm = ([dataclasses.asdict(r) for r in load_rollouts(tmp_path / arm / "rollouts/step-00000.jsonl")]
                          for arm in ("faca", "grpo"))
    for a, b in zip(faca_arm, grpo_arm, strict=True):
        assert {**a, "advantage": 0} == {**b, "advantage": 0}
        assert b["advantage"] == [b["outcome_advantage"]] * len(b["strategies"])
    assert any(a["advantage"] != b["advantage"] for a, b in zip(faca_arm, grpo_arm, strict=True))


def test_two_ranks_train_as_one(folder, tmp_path):
    """3 groups on 2 ranks: uneven shares, and different numbers of forward passes."""
    done = run("train.py", *SMALL, *SFT, "--out", tmp_path / "two", ranks=2)
    assert done.returncode == 0, done.stderr
    for one, two in zip(rows(folder[0], "rl"), rows(tmp_path / "two", "rl"), strict=True):
        assert one["success"] == two["success"] and one["segments"] == two["segments"]
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    first, second = (load_rollouts(path / "rollouts" / "step-00000.jsonl") for path in (folder[0], tmp_path / "two"))
    assert [r.tokens for r in first] == [r.tokens for r in second]
    assert [r.advantage for r in first] == [r.advantage for r in second]


def test_ctrl_c_ends_a_run_with_what_is_done_saved(tmp_path):
    command = [sys.executable, "train.py", *SMALL, *SFT, "--steps", "500", "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = tmp_path / "cut" / "rollouts" / "step-00000.jsonl"
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert (tmp_path / "cut" / "model" / "model.safetensors").exists() and "stopped early" in stdout
    assert len(rows(tmp_path / "cut", "rl")) == len(list((tmp_path / "cut" / "rollouts").iterdir()))
    made_by = training_of(tmp_path / "cut" / "model")
    assert (made_by["steps"], made_by["of"]) == (len(rows(tmp_path / "cut", "rl")), 500)  # what its weights have
    assert training_of(tmp_path / "cut" / "sft")["method"] == "sft"
    note = json.loads((tmp_path / "cut" / "model" / "faca.json").read_text())
    old = {name: note[name] for name in ("preset", "caps", "temperature", "trained_on")}
    (tmp_path / "cut" / "model" / "faca.json").write_text(json.dumps(old))  # as before it had a step
    assert (made_by := training_of(tmp_path / "cut" / "model"))["method"] == "faca" and "steps" not in made_by


def test_eval_counts_the_checkpoint_on_seen_and_unseen_tasks(folder, tmp_path):
    done = run("eval.py", "run", "--model", folder[0] / "model", "--env", "mini:retail/train,mini:retail/test", "--out",
               tmp_path / "r")
    assert done.returncode == 0, done.stderr
    every, new = (line.split() for line in done.stdout.splitlines() if line.startswith("mini:retail"))
    records = load_rollouts(tmp_path / "r" / "results.jsonl")
    seen = set(json.loads((folder[0] / "model" / "faca.json").read_text())["trained_on"])
    unseen = [r.reward for r in records if r.task not in seen]
    assert re.search(r"^user turns, by label +all +unseen$", done.stdout, re.MULTILINE)
    assert every[1:4] == ["160", "160", "0"] and new[1:3] == [str(len(unseen))] * 2 and 64 + 96 == len(records)
    assert float(every[4]) == pytest.approx(sum(r.reward for r in records) / 160, abs=1e-3) and every[-1] == "0.000"
    assert float(new[4]) == pytest.approx(sum(unseen) / len(unseen), abs=1e-3) and new[-1] == "0.000"


# ---------------------------------------------------------------------------------------------------- the update


@pytest.fixture
def trainer(folder):
    os.environ.pop("RANK", None)
    train.start_processes()
    yield train.Trainer(train.parse_config(["--model", str(folder[0] / "sft"), "--env", "mini:retail"]))
    dist.destroy_process_group()


def objective(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator):
    return faca.clipped_loss(logp_1T, old_logp_1T, advantage_1T, mask_1T, 0.2, denominator)


def gradients(trainer, records, budget):
    """Of one update that moves nothing: the gradient as AdamW's first moment holds it, over 1 - beta_1."""
    trainer.config = dataclasses.replace(trainer.config, tokens_per_microbatch=budget, grad_clip=1e9)
    trainer.begin("rl", 0.0, SimpleNamespace(note=None))
    stats = trainer.update(records, 0.0, objective)
    return stats, [trainer.optimizer.state[p]["exp_avg"].full_tensor() / 0.1 for p in trainer.model.parameters()]


def test_a_batch_is_its_micro_batches_and_a_plain_loop_over_tokens(trainer, folder):
    records = load_rollouts(folder[0] / "rollouts" / "step-00000.jsonl")
    for i, record in enumerate(records):  # the small run may have given no signal
        record.advantage = [(-1) ** i * (0.5 + q) for q in range(len(record.strategies))]
    whole, g_whole = gradients(trainer, records, 10**6)
    split, g_split = gradients(trainer, records, 1)
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    for a, b in zip(g_whole, g_split, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    tokens = sum(s >= 0 for r in records for s in r.segment)
    plain = -sum(r.advantage[s] for r in records for s in r.segment if s >= 0) / tokens  # every ratio is 1
    assert whole["tokens"] == tokens and whole["loss"] == pytest.approx(plain, abs=1e-4)


def test_a_step_that_clips_nothing_away_changes_the_weights_and_the_sampler_follows(trainer, folder):
    records = load_rollouts(folder[0] / "rollouts" / "step-00000.jsonl")
    for record in records:
        record.advantage = [1.0] * len(record.strategies)
    before = trainer.sampler.model.lm_head.weight.clone()
    trainer.begin("rl", 0.0, SimpleNamespace(note=None))
    trainer.update(records, 1e-3, objective)
    trainer.refresh_sampler()
    assert trainer.sampler.version > 1 and not torch.equal(before, trainer.sampler.model.lm_head.weight)
    for copy, trained in zip(trainer.sampler.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(copy, trained.full_tensor()) and trained.dtype == torch.float32


def test_evaluating_leaves_nothing_cached_that_would_round_the_rollouts_after_it(trainer, tmp_path):
    """A cached prefix is right, but rounded in another batch: a run would depend on how often it is evaluated."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    run = train.Run(dataclasses.replace(trainer.config, out=str(tmp_path / "run")), {})
    task = load_tasks("mini:retail", "test")[0]
    train.evaluate(trainer, [task], run, "now")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert run.evaluated["now"]["rollouts"] == trainer.config.eval_trials
    world, reused = make_env(task), trainer.sampler.stats["tokens_reused"]
    prompt = trainer.chat.open([{"role": "system", "content": world.policy}], world.tools)
    assert len(prompt) > 100
    asyncio.run(trainer.sampler.sample(prompt, 1, 0))
    assert trainer.sampler.stats["tokens_reused"] == reused


# --------------------------------------------------------------------------------------------------- eval.py curves


def test_curves_compare_arms_by_seed_in_hand_computed_numbers(tmp_path):
    for arm, lam, seed, ends in (("faca", 0.5, 0, (0.4, 0.6, 0.8)), ("faca", 0.5, 1, (0.4, 0.5, 0.7)),
                                 ("grpo", 0.0, 0, (0.4, 0.5, 0.6)), ("grpo", 0.0, 1, (0.4, 0.5, 0.7))):
        folder = tmp_path / f"{arm}{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"method": arm, "lam": lam, "control": "none", "seed": seed}))
        lines = [{"phase": "held_out", "at": at, "pass@1/x": value}
                 for at, value in zip(("before", "RL step 1", "after RL"), ends, strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = curves([str(path) for path in sorted(tmp_path.iterdir())])
    assert "0.400     0.600     0.800   0.700" in printed  # the mean leaves the common start out
    assert "faca - grpo, at the end: +0.100, sample std 0.141  (seed 0: +0.200, 1: +0.000)" in printed
    assert "faca - grpo, mean over the curve: +0.075, sample std 0.106  (seed 0: +0.150, 1: +0.000)" in printed


