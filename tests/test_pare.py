"""extras/pare.py: what it starts, what it reads, what it counts; Pare is a script here that the test writes."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from fake_user import FakeUser

from eval import compare, show
from extras import pare as P
from extras import pare_process as B
from extras.checkpoint import files_digest
from extras.ranks import UsageError
from extras.results import Log, Result, complete, load_results
from extras.tiny import make_tiny

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Pare's Python: asked for its scenarios it lists them; as `-m pare.main` it notes how it was called, and does what
# plan.json says for that scenario: "solved", "failed", "none", "exception", "crash", "probe", "cut", "two", "other",
# "odd", "sleep", "wait" (for an endpoint).
STAND_IN = '''#!{python}
import json, os, pathlib, subprocess, sys, time, urllib.request
home = pathlib.Path({home!r})
if sys.argv[1] == "-c" and (home / "slow").exists():
    (home / "slow").write_text(str(os.getpid()))
    time.sleep(600)
if sys.argv[1] == "-c":
    print("a library says something")
    print(json.dumps({{"scenarios": json.loads((home / "scenarios.json").read_text())[sys.argv[3]],
                      "versions": {{"pare": "0.0.1", "meta-are": "1.1.0", "litellm": "1.71.1"}}, "pare": "",
                      "meta-are": "", "commit": "b36de2414db660d6862aaf5cc6aad23f7546b685"}}))
    sys.exit()
arguments = sys.argv[1:]
scenario = arguments[arguments.index("--scenarios") + 1]
with (home / "calls.jsonl").open("a") as file:
    call = {{"argv": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "pid": os.getpid()}}
    file.write(json.dumps(call) + "\\n")
plan = json.loads((home / "plan.json").read_text()).get(scenario, "solved")
plan = plan if isinstance(plan, str) else plan[int(pathlib.Path.cwd().name)]
if plan == "wait":
    print("LLM u not ready (APIConnectionError), retrying in 10s", flush=True)
    time.sleep(600)
print("Scenario Start Time: now")
if plan == "sleep":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (home / "child").write_text(str(child.pid))
    print("Proactive-Agent Turn 0 Output: None", flush=True)
    time.sleep(600)
if plan == "asks":
    url, model = (next(a for a in arguments if a.startswith(f"--observe-{{what}}=")).partition("=")[2]
                  for what in ("endpoint", "model"))
    body = json.dumps({{"model": model, "messages": [{{"role": "user", "content": "Hello"}}]}}).encode()
    with urllib.request.urlopen(url + "/chat/completions", body) as answer:
        (home / "answer").write_text(answer.read().decode())
if plan == "crash":
    sys.exit("Traceback\\nValueError: of " + os.environ["HOSTED_VLLM_API_KEY"])
if plan == "probe":
    sys.exit("LLMProbeError: LLM m failed with non-retryable error: AuthenticationError: wrong key secret-of-the-user")
if plan == "endpoint":
    print("Exiting agent loop after 3 consecutive server errors: no answer, " + os.environ["HOSTED_VLLM_API_KEY"])
    print(("and much more" * 9 + "\\n") * 10_000)  # over 1 MiB
row = {{"base_scenario_id": scenario, "run_number": None, "success_numeric": float(plan == "solved"),
       "success_bool": plan == "solved", "status": "success" if plan == "solved" else "failed",
       "has_exception": plan == "exception", "exception_type": "KeyError" if plan == "exception" else None,
       "exception_message": None, "rationale": None if plan == "solved" else "the agent proposed nothing",
       "run_duration": 30.0, "user_model": "u", "proposal_count": 2, "acceptance_count": 1, "number_of_turns": 10}}
row |= {{"none": {{"success_bool": None, "status": "no_validation"}}, "odd": {{"success_bool": True}},
        "other": {{"base_scenario_id": "x"}}, "old": {{"number_of_turns": "10"}}}}.get(plan, {{}})
text = json.dumps([row] * (2 if plan == "two" else 1), indent=2)
folder = pathlib.Path(arguments[arguments.index("--results-dir") + 1]) / "benchmark_custom_user_u"
folder.mkdir(parents=True)
(folder / "obs_m_exec_m_result.json").write_text(text[:40] if plan == "cut" else text)
'''


@pytest.fixture
def bench(tmp_path):
    """The folder of a stand-in: the plan and the scenarios are files in it, and calls.jsonl is what was started."""
    home = tmp_path / "bench"
    home.mkdir()
    (home / "python").write_text(STAND_IN.format(python=sys.executable, home=str(home)))
    (home / "python").chmod(0o755)
    (home / "scenarios.json").write_text(json.dumps({"full": ["a", "b", "c"], "ablation": ["b"]}))
    plan(home)
    return home


@pytest.fixture
def agent():
    with FakeUser(lambda request, n: "ok") as server:
        yield server


def plan(home, **by_scenario):
    (home / "plan.json").write_text(json.dumps(by_scenario))


def calls(home):
    path = home / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def argv(bench, agent, out, *more, **changed):
    given = {"bench-python": bench / "python", "agent-url": agent.url, "model": "m", "user-model": "u",
             "user-provider": "openai", "observe-iterations": 5, "execute-iterations": 10, "runs": 1, "out": out}
    given |= {name.replace("_", "-"): value for name, value in changed.items()}
    return [*(f"--{name}={value}" for name, value in given.items() if value is not None), *more]


def play(*arguments, **changed):
    return P.run(P.parse(argv(*arguments, **changed)))


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """run() takes the signals over; the tests' own come back. No variable of whoever runs the tests names a user."""
    for name in filter(B.REDIRECTS.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------- what is started


def test_each_scenario_and_run_is_one_process_with_explicit_limits_and_both_modes_at_the_agents_endpoint(
        bench, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_API_KEY", "key-of-the-agent")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert play(bench, agent, tmp_path / "out", "--user-url=https://host/v1", max_turns=7, runs=2) == 0
    assert [(c["argv"][5], pathlib.Path(c["cwd"]).name) for c in calls(bench)] == [
        (scenario, k) for k in "01" for scenario in "abc"]  # the first runs first
    first = calls(bench)[0]
    url = agent.url
    assert first["argv"] == [
        "-m", "pare.main", "benchmark", "run", "--scenarios", "a", "--runs", "1", "--no-cache",
        "--executor-type", "sequential", "--max-concurrent", "1",
        "--observe-model=m", "--observe-provider=hosted_vllm", f"--observe-endpoint={url}",
        "--execute-model=m", "--execute-provider=hosted_vllm", f"--execute-endpoint={url}",
        "--user-model=u", "--user-provider=openai", "--user-endpoint=https://host/v1",
        "--max-turns", "7", "--user-max-iterations", "1", "--observe-max-iterations", "5",
        "--execute-max-iterations", "10", "--results-dir", "results", "--export", "--output-dir", "traces"]
    assert first["cwd"] == str(tmp_path / "out/pare/a/0")
    assert first["env"]["HOSTED_VLLM_API_KEY"] == "key-of-the-agent"
    assert not {"AGENT_API_KEY", "PYTHONPATH"} & set(first["env"]) and "127.0.0.1" in first["env"]["NO_PROXY"]


def test_without_a_key_of_the_agents_there_is_a_word_in_its_place_and_no_endpoint_of_the_user(
        bench, agent, tmp_path, monkeypatch):
    for name in ("AGENT_API_KEY", "HOSTED_VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    play(bench, agent, tmp_path / "out", split="ablation")
    (call,) = calls(bench)
    assert call["env"]["HOSTED_VLLM_API_KEY"] == "none" and call["argv"][5] == "b"
    assert not any("user-endpoint" in part for part in call["argv"])


def test_so_many_processes_run_at_once(bench, agent, tmp_path, monkeypatch):
    plan(bench, a="sleep", b="sleep", c="sleep")
    assert play(bench, agent, tmp_path / "out", concurrency=2, timeout=1) == 0
    began = [r.began for r in load_results(tmp_path / "out").records]
    assert began[0][:19] <= began[1][:19] < began[2] and len(began) == 3


def test_a_model_is_served_for_as_long_as_its_runs_take_and_its_files_are_what_a_folder_goes_on_with(
        bench, agent, tmp_path, capsys, monkeypatch):
    plan(bench, b="asks")
    path = tmp_path / "tiny"
    for part in make_tiny(0):
        part.save_pretrained(path)
    small = {"agent_url": None, "model": path, "split": "ablation", "kv_gib": 0.02, "max_context": 512}
    assert play(bench, agent, tmp_path / "out", "--max-tokens=4", **small) == 0
    answer = json.loads((bench / "answer").read_text())
    assert answer["model"] == "tiny" and 0 < answer["usage"]["completion_tokens"] <= 4 and not agent.requests
    run = load_results(tmp_path / "out").run
    assert run["temperature"] == 1.0 and json.loads(run["agent_extra"])["max_tokens"] == 4
    assert run["weights"] == files_digest(path) != ""
    assert "agent's server since" in (shown := capsys.readouterr().out) and ": 1 requests, median" in shown
    monkeypatch.setitem(sys.modules, "extras.serve", None)  # what is complete needs no model
    assert play(bench, agent, tmp_path / "out", **small) == 0
    assert capsys.readouterr().out in shown
    with pytest.raises(UsageError, match="begun with other options: agent_extra"):
        play(bench, agent, tmp_path / "out", "--max-tokens=5", **small)
    make_tiny(1)[1].save_pretrained(path)
    with pytest.raises(UsageError, match="begun with other options: weights"):
        play(bench, agent, tmp_path / "out", **small)
    assert "Pass@1" not in capsys.readouterr().out


@pytest.mark.parametrize("changed, told", [
    ({"bench_python": None}, "--bench-python is missing"), ({"bench_python": "/nowhere/python"}, "is no program"),
    ({"observe_iterations": None}, "--observe-iterations"), ({"execute_iterations": None}, "--execute-iterations"),
    ({"observe_iterations": 0}, "at least 1"), ({"runs": 0}, "at least 1"), ({"split": "train"}, "invalid choice"),
    ({"user_url": "https://me:secret@host/v1"}, "without user name"), ({"temperature": 1.0}, "served here"),
    ({"max_context": 9}, "served here"), ({"model": None}, "--model")])
def test_wrong_options_are_one_line_before_anything_starts(bench, agent, tmp_path, changed, told):
    with pytest.raises(UsageError, match=told) as error:
        play(bench, agent, tmp_path / "out", **changed)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)
    assert not calls(bench) and not (tmp_path / "out").exists()


def test_a_missing_or_wrong_python_is_one_line_with_the_steps_that_install_pare(bench, agent, tmp_path):
    with pytest.raises(UsageError, match="bench-python is missing") as error:
        play(bench, agent, tmp_path / "out", bench_python=None)
    assert B.INSTALL in str(error.value)
    asked = subprocess.run([sys.executable, ROOT / "extras/pare.py", *argv(
        bench, agent, tmp_path / "out", bench_python=sys.executable)], capture_output=True, text=True)
    assert asked.returncode == 2 and len(asked.stderr.splitlines()) == 1 and B.INSTALL in asked.stderr
    assert "exit code 1, ModuleNotFoundError: No module named 'pare'" in asked.stderr
    assert not asked.stdout and not (tmp_path / "out").exists()


def test_an_agent_that_gives_no_answer_is_one_line(bench, agent, tmp_path):
    with pytest.raises(UsageError, match="no answer|no connection"):
        play(bench, agent, tmp_path / "out", agent_url="http://127.0.0.1:9/v1")
    assert not calls(bench) and not (tmp_path / "out").exists()


def test_the_users_endpoint_does_not_get_the_agents_key(bench, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_API_KEY", "key-of-the-agent")
    with pytest.raises(UsageError, match="AGENT_API_KEY"):
        play(bench, agent, tmp_path / "out", user_provider="hosted_vllm", user_url="https://host/v1")


# -------------------------------------------------------------------------------------------------------- what is read


def test_what_a_process_leaves_is_a_result_and_what_is_missing_counts_as_failed(bench, agent, tmp_path, capsys):
    (bench / "scenarios.json").write_text(json.dumps({"full": ["a", "b", "c", "d", "e"]}))
    plan(bench, b="failed", c="exception", d="none", e="endpoint")
    assert play(bench, agent, tmp_path / "out") == 0
    results = complete(tmp_path / "out")
    assert results.expected == 5
    assert [(r.task, r.domain, r.k, r.reward, r.stop, r.reason) for r in results.records] == [
        ("a", "pare:full", 0, 1.0, "user_closed", ""), ("b", "pare:full", 0, 0.0, "user_closed", "checks not met"),
        ("c", "pare:full", 0, 0.0, "user_closed", "exception KeyError"),
        ("d", "pare:full", 0, 0.0, "void_world", "not validated"),
        ("e", "pare:full", 0, 0.0, "user_closed", "an endpoint failed")]
    told = results.records[1].private[0]
    assert (told["checks"], told["seconds"], told["turns"], told["proposals"], told["accepted"]) == (
        "the agent proposed nothing", 30.0, 10, 2, 1)
    run = results.run
    assert run["simulator"] == "openai/u" and run["limits"]["pare:full"]["observe_iterations"] == 5
    assert run["made"]["meta-are commit"] == "b36de2414db6" and math.isnan(run["tasks"]["a"]["nothing"])
    text = capsys.readouterr().out
    assert "Pass@1, first run  0.200" in text and "missing: 1 of 5 runs (1 not validated), counted as failed" in text
    assert "3.0 s a turn" in text and "1 runs at once" in text and "user: openai/u" in text
    assert "WARNING: in 1 of them requests" in text and "TRIAL" not in text
    assert "sampled as its endpoint does" in show(results)  # of eval.py


@pytest.mark.parametrize("left, why", [("cut", "no JSON"), ("two", "2 rows"), ("other", "another scenario, x"),
                                       ("odd", "status and success differ"), ("old", "without number_of_turns"),
                                       ("crash", "0 result files, exit code 1, ValueError")])
def test_a_run_without_a_row_of_its_own_is_missing_and_tried_again(bench, agent, tmp_path, capsys, left, why):
    plan(bench, b=left)
    assert play(bench, agent, tmp_path / "out") == 1
    told = capsys.readouterr()
    assert why in told.err and "1 runs ended without a result" in told.err and "0.667" in told.out
    before = complete(tmp_path / "out").records[1]
    assert (before.stop, before.reason) == ("void_world", "no result") and why in before.private[0]["fault"]
    plan(bench)
    assert play(bench, agent, tmp_path / "out") == 0
    assert [c["argv"][5] for c in calls(bench)] == ["a", "b", "c", "b"]
    after = complete(tmp_path / "out")
    assert [r.solved for r in after.records] == [True] * 3 and [r.task for r in after.tries] == ["b"]


def test_a_run_that_is_out_of_time_ends_with_all_that_it_started_and_is_not_tried_again(bench, agent, tmp_path, capsys):
    plan(bench, b="sleep")
    assert play(bench, agent, tmp_path / "out", timeout=1) == 0
    assert "missing: 1 of 3 runs (1 out of time), counted as failed" in capsys.readouterr().out
    assert gone(int((bench / "child").read_text())) and gone(calls(bench)[1]["pid"])
    assert play(bench, agent, tmp_path / "out", timeout=1) == 0 and len(calls(bench)) == 3


def test_an_endpoint_that_pare_cant_use_stops_all_at_once_without_a_word_of_what_it_said(
        bench, agent, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-user")
    plan(bench, a="probe", b="probe", c="probe")
    assert play(bench, agent, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "LLMProbeError: LLM m failed with non-retryable error: AuthenticationError" in told and "secret" not in told
    assert len(calls(bench)) == 1 and "the same command goes on" in told
    assert "secret" not in (tmp_path / "out/pare/a/0/log").read_text()


def test_processes_that_fail_one_after_the_other_stop_all(bench, agent, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AGENT_API_KEY", "key-of-the-agent")
    (bench / "scenarios.json").write_text(json.dumps({"full": list("abcdef")}))
    plan(bench, **dict.fromkeys("bcdef", "crash"))
    assert play(bench, agent, tmp_path / "out") == 1
    assert [c["argv"][5] for c in calls(bench)] == ["a", "b", "c", "d"]
    assert "3 of 6" not in capsys.readouterr().out and len(load_results(tmp_path / "out").records) == 4
    assert "key-of-the-agent" not in (tmp_path / "out/pare/b/0/log").read_text()


# --------------------------------------------------------------------------------------------------------- going on


def test_a_complete_folder_is_only_shown_and_more_runs_go_on_in_it(bench, agent, tmp_path, capsys):
    assert play(bench, agent, tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert play(bench, agent, tmp_path / "out") == 0 and len(calls(bench)) == 3
    assert capsys.readouterr().out in shown
    plan(bench, b="failed")
    assert play(bench, agent, tmp_path / "out", runs=3) == 0
    assert [pathlib.Path(c["cwd"]).name for c in calls(bench)] == list("000111222")
    assert "Pass@3, at least one of 3" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_kill_ends_pares_processes_and_loses_only_what_was_under_way(bench, agent, tmp_path, number):
    plan(bench, b="sleep")
    driver = forked(lambda: play(bench, agent, tmp_path / "out"), tmp_path / "told")
    until(lambda: (bench / "child").exists() and (bench / "child").read_text())
    os.kill(driver, number)
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: gone(calls(bench)[1]["pid"]))
    if number == signal.SIGKILL:  # the system ends Pare's process alone
        os.kill(int((bench / "child").read_text()), signal.SIGKILL)
    else:
        assert gone(int((bench / "child").read_text()))
        assert "stopped; 1 of 3 runs are in" in (tmp_path / "told").read_text()
    plan(bench)
    assert play(bench, agent, tmp_path / "out") == 0
    assert [c["argv"][5] for c in calls(bench)] == ["a", "b", "b", "c"]


def forked(act, told):
    """A process that ends with the exit code that act gives; what it prints is in the file."""
    driver = os.fork()
    if driver:
        return driver
    code = 99
    try:
        sys.stdout = sys.stderr = told.open("w", buffering=1)
        code = act()
    finally:
        os._exit(code)


def test_a_row_that_was_written_as_the_driver_died_is_taken(bench, agent, tmp_path):
    assert play(bench, agent, tmp_path / "out") == 0
    lines = (tmp_path / "out/results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out/results.jsonl").write_bytes(lines[0] + lines[1][:30])
    assert play(bench, agent, tmp_path / "out") == 0
    assert len(calls(bench)) == 3 and len(complete(tmp_path / "out").records) == 3
    (tmp_path / "out/results.jsonl").unlink()  # as if it had died between run.json and the first row
    assert play(bench, agent, tmp_path / "out") == 0
    assert len(calls(bench)) == 3 and len(complete(tmp_path / "out").records) == 3


# ------------------------------------------------------------------------------------------------------------- figures


def folder_of(path, rewards, url="", missing=()):
    """Results of runs: rewards[scenario][run]; missing: (scenario, run)s without a row."""
    options = P.parse(["--bench-python", sys.executable, "--agent-url", "http://127.0.0.1/v1", "--model", path.name,
                       "--user-model", "u", "--user-provider", "openai", "--observe-iterations", "1", f"--out={path}",
                       "--execute-iterations", "1", f"--runs={len(rewards[0])}", f"--user-url={url}"])
    bench = {"scenarios": [f"s{i}" for i in range(len(rewards))], "versions": {"pare": "0.0.1"}}
    path.mkdir()
    agent = {"agent_url": "", "agent_extra": "", "weights": path.name, "temperature": math.nan}
    (path / "run.json").write_text(json.dumps(P.describe(options, bench, agent)))
    log = Log(path)
    for i, row in enumerate(rewards):
        for k, reward in enumerate(row):
            void = (i, k) in missing
            log.append(Result(f"s{i}", "pare:full", i, k, 0, reward=float(reward), user="" if void else "openai/u",
                              stop="void_world" if void else "user_closed",
                              reason="out of time" if void else "" if reward else "checks not met"))
    return path


def test_the_figures_by_hand(tmp_path):
    """Four scenarios, four runs: all, three with the first, one without the first, and none, of which one is missing.

    First run 2/4; mean (4 + 3 + 1 + 0) / 16; at least one 3/4; all of four 1/4.
    """
    rows = [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    results = load_results(folder_of(tmp_path / "a", rows, missing=[(3, 1)]))
    assert P.metrics(results) == {"Pass@1, first run": 0.5, "Pass@1, mean of 4 runs": 0.5,
                                  "Pass@4, at least one of 4": 0.75, "Pass^4, all of 4": 0.25}
    text = P.summary(results)
    assert "Pass@4, at least one of 4  0.750" in text and "missing: 1 of 16 runs (1 out of time)" in text
    assert "failed: 7 checks not met" in text and "observe_iterations 1, execute_iterations 1" in text


def test_one_run_has_one_figure(tmp_path):
    assert P.metrics(load_results(folder_of(tmp_path / "a", [[1], [0]]))) == {"Pass@1, first run": 0.5}


def test_runs_that_are_not_there_yet_stay_in_the_denominator(tmp_path):
    path = folder_of(tmp_path / "a", [[1, 1], [1, 1]])
    lines = (path / "results.jsonl").read_bytes().splitlines(keepends=True)
    (path / "results.jsonl").write_bytes(b"".join(lines[:2]))
    results = load_results(path)
    assert P.metrics(results) == {"Pass@1, first run": 0.5, "Pass@1, mean of 2 runs": 0.5,
                                  "Pass@2, at least one of 2": 0.5, "Pass^2, all of 2": 0.5}
    assert "missing: 2 of 4 runs (2 no result)" in P.summary(results)


@pytest.mark.parametrize("url, trial", [("http://127.0.0.1:8000/v1", True), ("http://localhost/v1", True),
                                        ("https://host/v1", False), ("", False)])
def test_a_user_on_this_machine_is_a_trial_and_no_score(tmp_path, url, trial):
    text = P.summary(load_results(folder_of(tmp_path / "a", [[1]], url)))
    assert ("A TRIAL OF THE PLUMBING AND NO SCORE" in text.splitlines()[1]) == trial


def test_two_agents_are_compared_by_scenario(tmp_path):
    a, b = (complete(folder_of(tmp_path / name, rows)) for name, rows in (
        ("a", [[1], [1], [1], [0]]), ("b", [[0], [0], [1], [0]])))
    line = next(line.split() for line in compare(a, b).splitlines() if line.startswith("pare:full"))
    assert line[:10] == ["pare:full", "4", "4", "1", "2", "0", "1", "0.750", "0.250", "+0.500"] and line[-1] == "0.5"


def test_the_latency_of_our_server_stands_beside_the_score_for_each_start(tmp_path):
    path = folder_of(tmp_path / "a", [[1]])
    (path / "latency.jsonl").write_text(json.dumps(
        {"since": "2026-01-01T00:00:00", "requests": 7, "median": 0.5, "p95": 2.0, "peak": 3}) + "\n")
    assert "7 requests, median 0.50 s, 95 % within 2.00 s, at most 3 at once" in P.summary(load_results(path))


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
