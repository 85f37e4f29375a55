"""The miniature of the paper's argument: its statistics, what its variations change, its jobs, and the quick check."""

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import miniature
import miniature_jobs
import pytest
import torch
import variations
from extras.ranks import RunStopped, UsageError
from extras.run import lock
from miniature_tables import curve_mean, digest, figure, paired_t, side_by_side, tables
from PIL import Image

import train
from env import load_tasks, make_env
from extras import tiny
from extras.mini import Telecom
from extras.scripted import TelecomUser
from faca import REACTION

TASKS = load_tasks("mini:telecom", "train")
STEPS = {fault: f"Please {step}." for fault, (_, step) in Telecom.FAULTS.items()}


def test_a_curves_mean_leaves_out_where_it_begins_and_what_comes_later():
    assert curve_mean({"0": 0.1, "10": 0.2, "20": 0.4, "30": 0.9}, 20) == pytest.approx(0.3)


def test_the_paired_t_test_agrees_with_its_closed_forms():
    t = 2 / (1 / math.sqrt(3))  # of 1, 2, 3; with 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2)
    assert paired_t([1.0, 2.0, 3.0]) == pytest.approx(1 - t / math.sqrt(t * t + 2), abs=1e-7)
    gains = [4.0, -1.0, 2.0, 3.0, 0.5]  # mean 1.7, sample deviation sqrt(4.2)
    t = 1.7 / math.sqrt(3.95) * math.sqrt(5)  # squares about the mean: 5.29 + 7.29 + 0.09 + 1.69 + 1.44 = 15.8
    sine, cosine2 = t / math.sqrt(4 + t * t), 4 / (4 + t * t)
    assert paired_t(gains) == pytest.approx(1 - sine * (1 + cosine2 / 2), abs=1e-7)  # 4 degrees of freedom
    assert math.isnan(paired_t([1.0])) and math.isnan(paired_t([2.0, 2.0]))


# ---------------------------------------------------------------------------------------------------------- tables


def made_up(folder, lead: float = 0.0) -> dict:
    """Results of runs in which every figure is the same function of the step for all arms, but for FACA's success."""
    for job in miniature.plan():
        setting, name = job.folder.split("/")[1:]
        if job.folder.startswith("results/"):
            continue
        steps = job.lines - job.lines // 10 if job.needs else 0
        path = folder / job.folder
        (path / "model").mkdir(parents=True)
        names = {n: f"RL step {n}" for n in range(10, steps, 10)} | {steps: "after RL" if steps else "after SFT"}
        spent = {f"seconds_{part}": 1.0 for part in ("rollout", "credit", "update", "refresh")}
        rows = [{"phase": "rl", "step": n, "success": n / 100, "segments": 10 + n, "observed": 10,
                 "coverage": 1 / (1 + n), "positive_share": 0.5, "process_share": n / 100, "groups_correct": n % 4,
                 "groups_wrong": 2, "groups_mixed": 6 - n % 4, "update_norm": n, "advantage_l1": 1.0,
                 "grad_norm": 2.0 * n} | spent for n in range(steps)]
        rows += [{"phase": "held_out", "at": at, "pass@1/mini:x": 0.3 + n / 200 + lead * (n > 0) * ("FACA" in name)}
                 for n, at in names.items()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "config.json").write_text(json.dumps({"method": "grpo", "lam": 0.0, "control": "none", "seed": 0,
                                                      "steps": steps}))
    runs = {job.folder.removeprefix("runs/"): miniature.of_run(folder / job.folder) for job in miniature.plan()
            if job.folder.startswith("runs/") and job.needs}
    flags = {job.folder.removeprefix("results/"): " ".join(["1100"] * 10) for job in miniature.plan()
             if job.folder.startswith("results/")}
    flags |= {name: "1110" + " 1100" * 9 for name in flags if "FACA" in name}
    return {"about": {"date": "2026-01-02", "commits": ["abc"], "processors": ["x"], "torch": "2", "cores": 2,
                      "runs": 62, "minutes": 1.0},
            "runs": runs, "results": flags, "leads": {}, "endpoint": {}, "credit": {"outcome": 0.001, "faca": 0.002}}


def test_runs_that_are_alike_have_cells_that_are_alike_whatever_their_length(tmp_path):
    """Telecom's runs of Table 2 are longer than those that they stand beside: windows have to be the same."""
    shown = tables(made_up(tmp_path))
    for name, first in (("controls", "lambda 0.5"), ("homogeneous", "extremes: Inter"), ("noise", "0 %"),
                        ("observability", "telecom  ")):
        lines = shown[name].split("\n")
        rows = [line for line in lines[next(i for i, line in enumerate(lines) if line.startswith(first)):] if line]
        cells = {tuple(re.findall(r"[-+]?\d+\.\d+ ±\d+\.\d+|\d\.\d{3}|\d+ %", row)) for row in rows if "±" in row}
        values = [{cell for row in cells for cell in row if kind in cell} for kind in ("42.5 ±0.0", "+0.0 ±0.0")]
        assert all(len(found) == 1 for found in values), shown[name]
    assert shown["homogeneous"].count("19.500") == 6  # the update, mean of steps 0-39, in each row


def test_gains_are_matched_and_shares_weighted_as_the_tables_say(tmp_path):
    results = made_up(tmp_path, lead=0.04)
    shown = tables(results)
    assert "FACA - Interactive GRPO, mean 10-60: +4.0 ±0.0" in shown["outcome"]  # 0.3 + n / 200 is 47.5 over 10-60
    assert "47.5 ±0.0" in shown["outcome"] and "51.5 ±0.0" in shown["outcome"]
    assert "FACA - Interactive GRPO, at the end: +2.5 ±0.0" in shown["outcome"]  # one more dialogue of forty
    coverage = sum((10 + n) / (1 + n) for n in range(20)) / sum(10 + n for n in range(20))  # by segments: 0.179
    assert results["runs"]["telecom/FACA-0"]["first"]["coverage"] == pytest.approx(coverage, abs=1e-5)
    assert f"{100 * coverage:.1f}" in shown["telemetry"]


def test_seeds_of_two_files_are_put_together_unless_they_are_the_same_runs(tmp_path):
    four, two = made_up(tmp_path / "4", 0.04), made_up(tmp_path / "2", 0.02)
    for run in two["runs"].values():  # both arms by as much: other runs with other gains
        run["curve"] = {step: value + 0.01 for step, value in run["curve"].items()}
    rows = {line.split("  ")[0]: re.findall(r"(\d+) +([+-]\S+ ±\S+)", line)
            for line in side_by_side([four, two]).split("\n")}
    # five times 4 and five times 2: squares about the mean add up to 10, a ninth of it is 1.11, its root 1.05
    assert rows["telecom: FACA"] == [("5", "+4.0 ±0.0"), ("5", "+2.0 ±0.0"), ("10", "+3.0 ±1.1")]
    assert rows["telecom: FACA less shifted"][-1] == ("6", "+3.0 ±1.1")  # root of 6 / 5
    assert rows["telecom: shifted"] == [("3", "+0.0 ±0.0")] * 2 + [("6", "+0.0 ±0.0")]
    again = side_by_side([four, json.loads(json.dumps(four))])
    assert "(1) and (2) are the same runs" in again and "all n" not in again


def test_what_was_not_run_is_named_in_tables_and_left_out_of_the_figure(tmp_path):
    results = made_up(tmp_path)
    for name in list(results["runs"]):
        if not name.startswith("retail/"):
            del results["runs"][name]
    results |= {"results": {}, "credit": {}}
    shown = tables(results)
    assert shown["controls"].count("not run") >= 6 and "not run" in shown["noise"]
    figure(results, tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as picture:
        assert picture.info["Description"] == f"results {digest(results)}" and picture.size[0] > 1000


# ------------------------------------------------------------------------------------------------------- variations


class Talk:
    """A user of that class in its world."""

    def __init__(self, user: type, task, seed: int = 0):
        self.env = make_env(task)
        self.user = user(task.facts, lambda calls: [self.env.call(*calls[0], "user").content], seed)

    def says(self, text: str):
        return asyncio.run(self.user.reply(text))

    def until_the_end(self, texts: list[str]) -> list:
        """The user's turns, as long as the user goes on."""
        said = []
        while len(said) < len(texts) and not (said and said[-1].end):
            said.append(self.says(texts[len(said)]))
        return said


def dialogue(user: type, task, seed: int) -> list:
    """What the user says to an agent that tries every step in an order of its own."""
    steps = random.Random(seed).sample(list(STEPS.values()), 6)
    return Talk(user, task, seed).until_the_end(["What is your phone number?", tiny.CHECK, *steps])


def test_noise_turns_that_share_of_the_labels_and_nothing_else():
    clear = [turn for seed in range(150) for turn in dialogue(TelecomUser, TASKS[seed % 64], seed)]
    for share in (0.0, 0.1, 0.5, 1.0):
        noisy = [turn for seed in range(150)
                 for turn in dialogue(variations.noisy(TelecomUser, share), TASKS[seed % 64], seed)]
        assert [(t.utterance, t.end) for t in noisy] == [(t.utterance, t.end) for t in clear]
        f = [(REACTION[a.strategy], REACTION[b.strategy]) for a, b in zip(clear, noisy, strict=True)]
        turned = [a != b for a, b in f]
        assert sum(turned) / len(turned) == pytest.approx(share, abs=0.05)
        assert all(b == -a for (a, b), here in zip(f, turned, strict=True) if here and a)


def test_a_vague_user_tells_what_a_step_did_only_when_asked_to_look():
    task = next(t for t in TASKS if [c.arguments.get("fault") for c in t.gold] == ["mobile_data", "vpn"])
    talk = Talk(variations.VagueUser, task)
    for text, strategy in [("What is your phone number?", "reveal_piece"), (tiny.CHECK, "reveal_piece"),
                           (STEPS["apn"], "be_vague"), (tiny.CHECK, "be_vague"),  # it was wrong: patience 2
                           (STEPS["mobile_data"], "be_vague"), (tiny.CHECK, "reveal_piece"),
                           (STEPS["apn"], "be_vague"), (tiny.CHECK, "be_vague"),  # patience 1
                           (STEPS["vpn"], "be_vague"), (tiny.CHECK, "close")]:
        turn = talk.says(text)
        assert (turn.strategy, turn.end) == (strategy, "stop" * (strategy == "close")), text
        if strategy == "be_vague" and text != tiny.CHECK:
            assert turn.utterance in variations.VagueUser.VAGUE
    for texts, turns in (([STEPS["apn"], tiny.CHECK] * 3, 5), ([STEPS["apn"]] * 3, 3)):
        said = Talk(variations.VagueUser, task).until_the_end([tiny.CHECK, *texts])
        assert len(said) == 1 + turns and said[-1].strategy == "change_mind"  # the third wrong step, as when clear
    asked = [("user", "It is 520."), ("assistant", STEPS["vpn"]), ("user", "OK.")]
    assert variations.asking_expert(asked, random.Random(0)) == tiny.CHECK


def batch():
    """Two prompts of two rollouts and two segments: one group mixed, one all wrong."""
    return {"reward_N": torch.tensor([1.0, 0, 0, 0]), "group_N": torch.tensor([0, 0, 1, 1]),
            "valid_N": torch.ones(4, dtype=torch.bool), "exists_NQ": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]) > 0,
            "observed_NQ": torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]]) > 0,
            "reaction_NQ": torch.tensor([[1.0, 1], [-1, 0], [1, 0], [-1, 0]])}


def test_scaled_outcome_credit_has_the_magnitude_of_facas_and_the_direction_of_grpos():
    x, generator = batch(), torch.Generator()
    scaled_NQ = variations.scaled(train.advantages)(x, 0.0, "none", generator)
    faca_NQ, grpo_NQ = (train.advantages(x, lam, "none", generator) for lam in (0.5, 0.0))
    # each |A^o| and |A^p| is 1/sqrt 2: FACA's segments have 1.5, 1 (alone at q 1: no process), 1.5 and .5, 0, .5, 0
    assert float(faca_NQ[x["exists_NQ"]].abs().sum()) == pytest.approx(5 / math.sqrt(2), rel=1e-5)
    assert float(scaled_NQ[x["exists_NQ"]].abs().sum()) == pytest.approx(5 / math.sqrt(2), rel=1e-5)
    torch.testing.assert_close(scaled_NQ, grpo_NQ * 5 / 3)
    x["reward_N"] = torch.zeros(4)  # nothing to scale
    assert not variations.scaled(train.advantages)(x, 0.0, "none", generator).any()


def test_dropped_takes_rollouts_of_constant_groups_out_of_rl_and_out_of_rl_alone():
    records = [SimpleNamespace(outcome_advantage=a) for a in (0.7, -0.7, 0.0, 0.0)]
    seen = variations.dropped(lambda self, records, lr, objective, updates: records)
    assert seen(None, records, 0.1, None) == records[:2]
    assert seen(None, records, 0.1, train.negative_log_likelihood) == records


def test_a_variation_that_is_none_is_one_line_and_exit_code_2():
    for name in ("", "noise", "noise-101", "plainer"):
        with pytest.raises(UsageError, match="noise-P"):
            variations.vary(name)
    found = subprocess.run([sys.executable, "tests/variations.py", "plainer"], cwd=miniature.ROOT, capture_output=True,
                           text=True)
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and "noise-P" in found.stderr


def test_a_variation_refuses_a_run_that_it_would_not_change_as_it_says():
    """vague of another domain trained the plain run; dropped with FACA's credit met a step without any rollout."""
    def ran(name, env, method):
        return variations.fitting(name, lambda config: 0)(SimpleNamespace(env=env, method=method))
    for refused in (("vague", "mini:retail", "faca"), ("scaled", "mini:telecom", "faca"),
                    ("dropped", "mini:telecom", "faca")):
        with pytest.raises(UsageError, match=refused[0]):
            ran(*refused)
    assert ran("dropped", "mini:telecom/train", "grpo") == ran("noise-10", "mini:retail", "faca") == 0


# ------------------------------------------------------------------------------------------------------------- jobs


def test_the_plan_has_every_arm_of_the_issue_on_matched_seeds():
    jobs = miniature.plan()
    folders = [job.folder for job in jobs]
    assert len(set(folders)) == len(folders)
    for job in jobs:
        assert not job.needs or folders.index(job.needs) < folders.index(job.folder)
    seeds = {}
    for folder in folders:
        if folder.startswith("runs/") and not folder.endswith("sft"):
            seeds.setdefault(folder.rpartition("-")[0].removeprefix("runs/"), []).append(folder.rpartition("-")[2])
    five = {"telecom/FACA", "telecom/GRPO", "retail/FACA", "retail/GRPO"}
    three = {"telecom/lambda_0.1", "telecom/lambda_-0.5", "telecom/shifted", "telecom/randomized",
             "telecom/noise_10", "telecom/noise_30", "telecom/noise_50", "vague/FACA", "vague/GRPO", "extremes/FACA",
             "extremes/GRPO", "extremes/dropped", "extremes/scaled"}
    assert seeds == {arm: list("01234" if arm in five else "012") for arm in five | three}


def small_jobs() -> list:
    """One step of each arm, from two steps of SFT."""
    first = miniature.sft("telecom", steps=2)
    jobs = [replace(first, command=(*first.command, "--sft-dialogues", "1", "--eval-trials", "1"))]
    for arm, options in (("FACA", miniature.FACA), ("GRPO", miniature.GRPO)):
        job = miniature.rl("telecom", arm, "plain", [*options, "--prompts", "2", "--eval-trials", "0"], 0, steps=2)
        jobs.append(replace(job, lines=2))
    return jobs


def locked(folder, seconds: float):
    """The folder's lock, once nobody holds it: a job that outlives its command does until it ends."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return lock(folder)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_jobs_that_were_stopped_or_killed_go_on_and_a_failed_one_is_named(tmp_path):
    """A stopped command leaves nothing at work; the next one skips what is through, and resumes what is not."""
    jobs = small_jobs()
    script = (f"import sys; sys.path[:0] = [{str(miniature.ROOT / 'tests')!r}]; import test_miniature as t\n"
              f"from pathlib import Path; out = Path({str(tmp_path)!r})\n"
              "t.miniature.work(t.small_jobs(), out, t.lock(out))")
    killed = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, cwd=tmp_path)
    while not (tmp_path / "runs/telecom/sft/model").exists():
        assert killed.poll() is None, killed.stderr.read()
        time.sleep(0.1)
    killed.terminate()
    killed.wait()
    held = locked(tmp_path, 120)
    before = (tmp_path / "runs/telecom/sft/metrics.jsonl").read_bytes()
    miniature.work(jobs, tmp_path, held)
    after = (tmp_path / "runs/telecom/sft/metrics.jsonl").read_bytes()  # it may have been stopped in its evaluation
    assert after.startswith(before) and after.count(b"\n") == jobs[0].lines
    assert all(job.through(tmp_path) for job in jobs)
    rows = [json.loads(line) for line in (tmp_path / jobs[1].folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1] and all(row["update_norm"] > 0 for row in rows if row["signal"])
    wrong = miniature.rl("telecom", "FACA", "plain", ["--lam", "0.6"], 7)
    with pytest.raises(RunStopped, match=r"runs/telecom/FACA-7 ended with exit code 2 .* lambda .*telecom-FACA-7.log"):
        miniature.work([*jobs, wrong], tmp_path, held)


def test_a_command_that_is_killed_takes_its_jobs_with_it(tmp_path):
    """They once stayed at work, and held the folder until they were through."""
    (tmp_path / "logs").mkdir()
    script = (f"import sys; sys.path[:0] = [{str(miniature.ROOT / 'tests')!r}]; import test_miniature as t\n"
              f"from pathlib import Path; out = Path({str(tmp_path)!r})\n"
              "t.miniature.work([t.stub('runs/a/b', 'import time; time.sleep(600)')], out, t.lock(out))")
    killed = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (tmp_path / "runs/a/b").exists():
        assert killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    locked(tmp_path, 30).close()


def stub(folder: str, code: str, needs: str = "") -> miniature_jobs.Job:
    """A job of one line of progress, by a line of Python in its folder."""
    begin = f"from pathlib import Path; p = Path('DIR/{folder}'); p.mkdir(parents=True, exist_ok=True); "
    return miniature_jobs.Job(folder, ("-c", begin + code), 1, 1, needs)


DONE = "(p / 'model').mkdir(); (p / 'metrics.jsonl').write_text('{}\\n')"


def test_a_job_that_needs_what_is_no_job_here_is_run_like_any_other(tmp_path):
    """The two runs of the endpoint, each a plan of its own, once waited for their SFT checkpoint for ever."""
    miniature.work([stub("runs/a/b", DONE, needs="runs/a/sft")], tmp_path, lock(tmp_path))
    assert (tmp_path / "runs/a/b/model").is_dir()


@pytest.mark.parametrize("number", miniature_jobs.SIGNALS)
def test_a_signal_ends_all_jobs_and_then_the_command(number, tmp_path):
    """Hanging up once left the runs at work: nothing but the command had been told, and it ended at once."""
    before = signal.signal(number, signal.SIG_DFL)  # nohup, or a shell's &, may have it ignored
    jobs = [stub(f"runs/a/{name}", "print(flush=True); import time; time.sleep(60)") for name in "bc"]
    timer = threading.Timer(1, os.kill, (os.getpid(), number))
    timer.start()
    held, began = lock(tmp_path), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        miniature.work(jobs, tmp_path, held)
    assert time.monotonic() - began < 30 and signal.signal(number, before) == signal.SIG_DFL
    held.close()
    lock(tmp_path).close()  # nobody holds it


def test_a_folder_belongs_to_one_plan(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/about.json").touch()
    jobs = small_jobs()
    for _ in range(2):
        held, about = miniature.begin(tmp_path / "new", jobs)
        held.close()
    assert about["minutes"] == 0 and len(about["commits"]) == len(about["processors"]) == 1
    assert len(about["jobs"]) == 3
    for name, plan, words in [("new", miniature.plan(), "begun with another command for runs/telecom/sft"),
                              ("other", jobs, "something else already, thesis.tex"), ("damaged", jobs, "is damaged"),
                              ("other/thesis.tex", jobs, "can't be used: File exists")]:
        with pytest.raises(UsageError, match=words):
            miniature.begin(tmp_path / name, plan)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"about": {}, "runs": {"x": {}}}', '{"about": {}, "runs": {}}'])
def test_a_file_that_holds_no_results_is_one_line(content, tmp_path):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(UsageError, match=r"r\.json holds no results of this version"):
        miniature.show(tmp_path / "r.json")


def test_the_quick_check_holds(tmp_path):
    """Trains both arms on the embedded domain: a regression in what is learned fails here."""
    found = subprocess.run([sys.executable, "tests/miniature.py", "--quick", "--out", str(tmp_path)],
                           cwd=miniature.ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.count("\nok ") == 4, found.stdout + found.stderr[-2000:]
