"""What a user can get wrong with eval.py, and what a disk can: one line each, and nothing of the figures unsaid."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from test_eval import ROOT, folder_of

import eval as E
from extras.results import Log, Result, ResultsError, load_results
from extras.tables import curves, seed_table


def altered(folder, place, **change):
    """The folder, with other values in a line of its results."""
    path = folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[place] |= change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("change", [
    {"private": [{}]}, {"private": [{"turn": 0, "tool": "x"}]}, {"messages": [{}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": 3}]},
    {"began": "yesterday"}, {"reward": float("nan")}, {"domain": "another"}])
def test_a_damaged_result_is_named_by_its_line(tmp_path, change):
    with pytest.raises(ResultsError, match="results.jsonl: line 2 is "):
        load_results(altered(folder_of(tmp_path / "a", [[1, 0]]), 1, **change))


def test_the_table_names_missing_dialogues_in_every_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "x" / "0", [[1, 0], [1, 1]], void=[(0, 1), (1, 0)])
    told = "missing: x/0 2 of 4; they count as not solved"
    assert told in seed_table(["x/*"]).splitlines() and told in seed_table(["x/*"], "markdown").splitlines()
    run = json.loads((tmp_path / "x" / "0" / "run.json").read_text())
    (tmp_path / "x" / "0" / "run.json").write_text(json.dumps(run | {"seen_known": True}))
    assert "missing: x/0 1 of 2" in seed_table(["x/*"], unseen=True)  # task 0 was trained on
    assert "x/0,1,missing,2," in seed_table(["x/*"], "csv").splitlines()
    folder_of(tmp_path / "y" / "0", [[1, 0]])
    assert "missing" not in seed_table(["y/*"])


def test_two_runs_of_one_arm_and_seed_are_not_compared(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"method": "faca", "lam": 0.5, "control": "none", "seed": 3}))
        (tmp_path / name / "metrics.jsonl").write_text(
            json.dumps({"phase": "held_out", "at": "after RL", "pass@1/d": 0.5}) + "\n")
    assert "0.500" in curves([str(tmp_path / "a")])
    with pytest.raises(ResultsError, match="b is a second run of faca with seed 3"):
        curves([str(tmp_path / "a"), str(tmp_path / "b")])


def test_curves_are_of_runs_that_differ_in_arm_and_seed_alone(tmp_path):
    alike = {"method": "faca", "lam": 0.5, "control": "none", "seed": 0, "env": "d", "lr": 1.0, "model": "m",
             "steps": 3}
    for name, change in {"a": {}, "b": {"method": "grpo", "lam": 0.0}, "c": {"seed": 1, "model": "another"},
                         "env": {"method": "grpo", "env": "e"}, "lr": {"seed": 1, "lr": 2.0},
                         "steps": {"seed": 1, "steps": 4}, "model": {"method": "grpo", "model": "another"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(alike | change))
        (tmp_path / name / "metrics.jsonl").write_text(
            json.dumps({"phase": "held_out", "at": "after RL", "pass@1/d": 0.5}) + "\n")
    assert "0.500" in curves([str(tmp_path / name) for name in "abc"])  # each seed from a model of its own
    for name in ("env", "lr", "steps", "model"):
        with pytest.raises(ResultsError, match=f"a and .*{name} differ in more than arm and seed: {name} "):
            curves([str(tmp_path / "a"), str(tmp_path / name)])
    assert "seed: lr 1.0 | 2.0\n" in curves([str(tmp_path / "a"), str(tmp_path / "lr")], anyway=True)


def test_a_folder_with_a_model_is_not_taken_for_a_run(tmp_path):
    """A Hugging Face folder has a config.json, too."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ResultsError, match="is a run folder of train.py"):
        load_results(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ResultsError, match="is no folder of results"):
        load_results(tmp_path)


@pytest.mark.parametrize("command", ["compare a b", "audit a", "run --model m"])
def test_a_seed_below_0_is_one_line(command, capsys):
    with pytest.raises(SystemExit) as end:
        E.parse([*command.split(), "--seed", "-1"])
    assert end.value.code == 2 and capsys.readouterr().err == "eval.py: --seed must be at least 0, is -1\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="takes a disk that is full")
def test_a_full_disk_is_told_with_the_file_that_did_not_fit(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '.*results.jsonl'"):
        Log(tmp_path).append(Result("d/0", "d", 0, 0, 0, stop="user_closed"))


def test_an_interrupt_before_there_is_anything_to_keep_is_no_traceback(tmp_path):
    """A pipe that nobody writes to stands in for a file that takes long."""
    folder = folder_of(tmp_path / "a", [[1]])
    (folder / "results.jsonl").unlink()
    os.mkfifo(folder / "results.jsonl")
    shown = subprocess.Popen([sys.executable, "eval.py", "show", folder], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in background
    with (folder / "results.jsonl").open("w"):  # returns once it is being read
        while shown.poll() is None:  # a signal just before a read begins is seen after it, which would be never
            shown.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                shown.wait(5)
    assert (shown.communicate()[1], shown.returncode) == ("eval.py: stopped\n", 130)
