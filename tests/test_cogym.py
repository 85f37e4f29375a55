"""Co-Gym, from outside: the agent against a real loopback server, the driver with a stand-in for Co-Gym's Python, and
metrics of hand-written files."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_user import Answer, FakeUser
from openai import OpenAI

import eval as E
from extras import checkpoint, cogym, cogym_session
from extras.cogym_agent import Policy, action_of, same_endpoint
from extras.cogym_data import DATABASE
from extras.results import load_results

ROOT = Path(__file__).resolve().parent.parent
SECRET = "sk-CANARY-7781"

# What a session leaves, by what it is told to do; it runs in the place of Co-Gym's Python.
STAND_IN = '''#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path

here = Path(__file__).resolve().parent
if "--check" in sys.argv:
    print("some warning")
    print((here / "check.json").read_text())
    sys.exit()
told = json.loads(Path("session.json").read_text())
index = Path("env.toml").read_text().split("_idx = ")[1].split()[0]
act, _, value = json.loads((here / "acts.json").read_text()).get(index, "rate 0.5").partition(" ")
print("key", os.environ.get("OPENAI_API_KEY"), os.environ["OPENAI_BASE_URL"], os.environ["PATH"].split(":")[0])
folder = Path(told["result_dir"]) / ("env_" + told["session"])
folder.mkdir(parents=True)
tally = {{"started": act != "late", "requests": 2, "faults": {{}}, "latencies": [0.25, 0.75]}}
events = [("environment", "START(query)", "succeeded"), ("agent", "DANCE()", "failed (unknown)"),
          ("agent", "EDITOR_UPDATE(text=plan)", "succeeded"), ("user", "SEND_TEAMMATE_MESSAGE(message=good)",
                                                               "succeeded"), ("agent", "FINISH()", "succeeded")]
events += [("user", os.environ["OPENAI_API_KEY"], "failed (" + os.environ.get("HF_TOKEN", "") + ")")] * (act == "leak")
(folder / "event_log.jsonl").write_text("".join(json.dumps(dict(zip(
    ("role", "action", "action_status"), event))) + "\\n" for event in events) + '{{"role": "us')
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
if act == "hang":  # with a process of its own group, that does not hear SIGTERM, and a container
    Path("tmp/env_1").mkdir(parents=True)
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    time.sleep(100)
if act == "die":  # its environment does, and the others wait
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)", "start-env-node"], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    sys.exit(time.sleep(100))
if act == "outage":
    print("openai.AuthenticationError: Error code: 401")
if act in ("crash", "outage"):
    sys.exit(3)
if act in ("mute", "part"):
    tally["faults"] = {{"APIConnectionError": 2 if act == "mute" else 1}}
Path("agent.json").write_text(json.dumps(tally))
rating = json.loads(value if act == "rate" else "0.5")
done = {{"task_completion": int(act != "empty"), "performance_rating": rating}}
if act == "unread":
    done |= {{"commonsense_evaluation": {{}}, "preference_evaluation": {{}}, "performance_rating": 0}}
text = value if act == "broken" else json.dumps(done)
(folder / "task_performance.json").write_text(text)
if act == "linger":  # it has delivered, and does not end
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    time.sleep(100)
'''
CHECK = {"python": "3.11.9", "redis": "", "docker": "", "missing": [], "co-gym": "0.1.5"}


class Bench:
    """A stand-in for Co-Gym's Python, a checkout, and two endpoints."""

    def __init__(self, folder: Path, theirs: FakeUser, agent: FakeUser):
        self.folder, self.agent, self.theirs = folder, agent, theirs
        self.python = folder / "env" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.told()
        data = folder / "checkout" / "datasets"
        for name in DATABASE:
            (data / "TravelPlanner" / "database" / name).parent.mkdir(parents=True, exist_ok=True)
            (data / "TravelPlanner" / "database" / name).touch()
        (data / "TravelPlanner" / "validation_with_hidden_profile.csv").write_text(
            "org,query\n" + "".join(f'a{i},"two\nlines"\n' for i in range(102)))
        (data / "RelatedWorkWriting").mkdir()
        (data / "RelatedWorkWriting" / "test.json").write_text(json.dumps([{"title": i} for i in range(100)]))
        (data / "RelatedWorkWriting" / "rubric.txt").touch()
        (data / "discoverybench" / "real" / "test").mkdir(parents=True)
        (data / "discoverybench" / "real" / "test" / "answer_key_real.csv").write_text("x")

    def told(self, acts: dict = {}, **check) -> None:
        (self.python.parent / "acts.json").write_text(json.dumps(acts))
        (self.python.parent / "check.json").write_text(json.dumps(CHECK | check))

    def arguments(self, *more: str, out: str = "out") -> list[str]:
        return ["--bench-python", str(self.python), "--bench-data", str(self.folder / "checkout"), "--agent-url",
                self.agent.url, "--model", "m", "--tasks", "travel_planning", "--out", str(self.folder / out), *more]

    def run(self, *more: str, out: str = "out") -> int:
        return cogym.run(cogym.parse(self.arguments(*more, out=out)))

    def begun(self, *more: str, out: str = "out", until: str) -> subprocess.Popen:
        """The script itself, once a file of that pattern is there."""
        running = subprocess.Popen([sys.executable, ROOT / "extras" / "cogym.py", *self.arguments(*more, out=out)],
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        end = time.monotonic() + 60
        while time.monotonic() < end and running.poll() is None and not list((self.folder / out).glob(until)):
            time.sleep(0.1)
        return running

    def results(self, out: str = "out"):
        return load_results(self.folder / out)

    def forget(self, out: str = "out") -> None:
        """All of its lines but the first."""
        path = self.folder / out / "results.jsonl"
        path.write_bytes(path.read_bytes().splitlines(True)[0])


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeUser(lambda request, n: "ready") as theirs, FakeUser(lambda request, n: "ready") as agent:
        monkeypatch.setenv("OPENAI_BASE_URL", theirs.url)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        yield Bench(tmp_path, theirs, agent)


# --------------------------------------------------------------------------------------------------------- the agent


class Words:
    """In the place of Co-Gym's ContextProcessor."""

    action_space_to_str = staticmethod(lambda space: ", ".join(a["pattern"] for a in space))
    task_example_to_str = staticmethod(lambda question, trajectory: f"{question} {trajectory}")
    observation_to_str = staticmethod(json.dumps)
    chat_history_to_str = staticmethod(lambda role, chat: "; ".join(f"{m['role']}: {m['message']}" for m in chat))


def policy(server, tally: Path, words=Words) -> Policy:
    client = OpenAI(api_key="none", base_url=server.url, max_retries=0)
    return Policy(client, words, "m", tally, {"temperature": 0.5, "max_tokens": 77, "extra_body": {"top_k": 3}})


def begin(agent: Policy) -> None:
    agent.start(name="agent", team_members=["agent", "user"], task_description="Plan {a} trip.",
                action_space=[{"pattern": "^FINISH\\(\\)$"}], example_question="q", example_trajectory=[])


def test_the_action_is_the_text_after_the_last_mark():
    assert action_of("Thought: go.\nAction: FINISH()\n") == "FINISH()"
    assert action_of("Action: A()\nno,\nAction: EDITOR_UPDATE(text=Day 1:\nRest)") == "EDITOR_UPDATE(text=Day 1:\nRest)"
    assert action_of("<think>Action: A()</think>Action: B()") == "B()"
    assert action_of("Action: A()\n<think>cut at its end, Action: B()") == "A()"
    assert action_of("as the prompt has opened it, Action: A()</think>\nAction: B()") == "B()"
    assert action_of("I would finish now.") == "I would finish now." and action_of("") == ""


def test_a_request_holds_what_the_agent_knows_and_an_invalid_action_goes_out_as_it_is(tmp_path):
    with FakeUser(lambda request, n: ["Thought: x\nAction: DANCE(now)", "Action: FINISH()"][n]) as server:
        agent = policy(server, tmp_path / "agent.json")
        begin(agent)
        chat = [{"role": "user", "message": "To {Paris}, please."}]
        assert agent.get_action(observation={"editor": "EMPTY"}, chat_history=chat) == "DANCE(now)"
        assert agent.get_action(observation={"editor": "EMPTY"}, chat_history=chat) == "FINISH()"
        agent.end("results")
    first, second = server.requests
    assert (first["model"], first["temperature"], first["max_tokens"], first["top_k"]) == ("m", 0.5, 77, 3)
    text = first["messages"][1]["content"]
    for part in ("Plan {a} trip.", "^FINISH\\(\\)$", '{"editor": "EMPTY"}', "user: To {Paris}, please."):
        assert part in text
    assert "DANCE(now)" not in text and "DANCE(now)" in second["messages"][1]["content"]  # its own last actions
    tally = json.loads((tmp_path / "agent.json").read_text())
    assert (tally["requests"], tally["faults"], len(tally["latencies"]), tally["ended"]) == (2, {}, 2, 1)
    assert tally["started"] and tally["models"] == ["m"] and tally["prompt_tokens"] > 0


def test_a_fault_of_the_endpoint_is_a_wait_and_is_counted(tmp_path):
    answers = [Answer(status=500), Answer(drop=True), Answer(body={"no": "completion"}), "Action: FINISH()"]
    with FakeUser(lambda request, n: answers[n]) as server:
        agent = policy(server, tmp_path / "agent.json")
        begin(agent)
        said = [agent.get_action({}, []) for _ in answers]
    assert said == ["WAIT_TEAMMATE_CONTINUE()"] * 3 + ["FINISH()"]
    tally = json.loads((tmp_path / "agent.json").read_text())
    assert tally["requests"] == 4 and sum(tally["faults"].values()) == 3
    assert tally["faults"]["500"] == tally["faults"]["APIConnectionError"] == 1


def test_an_agent_that_missed_the_start_asks_nothing_and_says_so(tmp_path):
    agent = policy(SimpleNamespace(url="http://127.0.0.1:9/v1"), tmp_path / "agent.json")
    assert agent.get_action({}, []) == "WAIT_TEAMMATE_CONTINUE()"
    tally = json.loads((tmp_path / "agent.json").read_text())
    assert (tally["started"], tally["before_start"], tally["requests"]) == (False, 1, 0)


def test_one_endpoint_is_one_however_it_is_written():
    assert same_endpoint("http://127.0.0.1:80/v1/", "http://localhost/v1")
    assert same_endpoint("https://API.openai.com/v1", "https://api.openai.com:443/v1/")
    assert not same_endpoint("http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1")
    assert not same_endpoint("http://127.0.0.1:port/v1", "http://127.0.0.1:port/v1")


RUN_NODE = """
def _sync_run_node(config, redis_url):
    agent = config.node_args["agent"]
    agent.start(config.node_name, ["agent", "user"], "task", [], "q", [])
    print(config.node_class, redis_url, config.node_args["wait_time"], agent.get_action({}, []))
    agent.end("results")
"""


def agent_process(folder: Path, *arguments: str, base: str):
    """The script itself, as Co-Gym's Runner starts it, among stand-ins for what it imports."""
    files = {"aact/cli/launch/launch.py": RUN_NODE,
             "aact/cli/reader/__init__.py": "from types import SimpleNamespace as NodeConfig\n",
             "aact/cli/reader/dataflow_reader.py": "NodeArgs = dict\n",
             "collaborative_gym/utils/context_processing.py":
                 "class ContextProcessor:\n    action_space_to_str = task_example_to_str = observation_to_str = "
                 "chat_history_to_str = staticmethod(lambda *_: '')\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, ROOT / "extras" / "cogym_agent.py", *arguments, "--model", "m", "--node-name", "agent",
         "--env-uuid", "env_1", "--redis-url", "redis://x"], capture_output=True, text=True, cwd=folder, timeout=60,
        env=os.environ | {"PYTHONPATH": str(folder), "OPENAI_BASE_URL": base, "AGENT_API_KEY": SECRET})


def test_the_script_plays_at_its_own_endpoint_with_its_own_key_and_refuses_the_judges(tmp_path):
    with FakeUser(lambda request, n: "Action: FINISH()") as server, FakeUser() as judge:
        done = agent_process(tmp_path, "--base-url", server.url, base=judge.url)
        assert done.stdout.split() == ["agent", "redis://x", "1", "FINISH()"], done.stderr
        assert server.headers[0]["authorization"] == f"Bearer {SECRET}" and not judge.requests
        same = agent_process(tmp_path, "--base-url", judge.url, base=judge.url)
        assert same.returncode == 1 and "--same-endpoint" in same.stderr and not judge.requests
        assert "Traceback" not in same.stderr
        wanted = agent_process(tmp_path, "--base-url", server.url, "--same-endpoint", base=server.url)
        assert wanted.returncode == 0 and len(server.requests) == 2
        assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (1.0, 4000)
        extra = '{"temperature": null, "top_k": 3}'
        agent_process(tmp_path, "--base-url", server.url, "--extra", extra, base=judge.url)
        assert "temperature" not in server.requests[2] and server.requests[2]["top_k"] == 3


# ---------------------------------------------------------------------------------------------------- what is missing


def test_whatever_is_missing_is_one_line_with_the_steps_before_anything_starts(bench, capsys, monkeypatch):
    def refused(*more, **check):
        bench.told(**check)
        with pytest.raises((cogym.UsageError, SystemExit)) as raised:
            bench.run(*more)
        said = capsys.readouterr().err + str(raised.value)
        assert not (bench.folder / "out").exists() and SECRET not in said and said.strip().count("\n") <= 1
        return said

    assert "uv pip install" in refused("--bench-python", str(bench.folder / "nowhere"))
    assert "uv pip install" in refused("--bench-python", "/bin/false")
    assert "uv pip install" in refused("--bench-python", "python3")
    assert "--agent-url" in refused("--agent-url", "http://127.0.0.1:port/v1")
    assert "collaborative_gym" in refused(missing=["collaborative_gym"])
    assert "redis-server" in refused(redis="ConnectionError")
    assert "docker build" in refused("--tasks", "tabular_analysis", docker="DockerException")
    assert "git clone" in refused("--bench-data", str(bench.folder))
    assert "VOYAGE_API_KEY" in refused("--tasks", "related_work")
    assert "--same-endpoint" in refused("--agent-url", bench.theirs.url)
    assert "there are: travel_planning" in refused("--tasks", "cooking")
    assert "--redis-url" in refused("--redis-url", "redis://:word@host:1/0")
    assert "--limit" in refused("--limit", "-1")
    for extra in ('{"top_k"', "[]", '{"messages": []}', '{"temperature": "hot"}', '{"temperature": true}', "[" * 9999):
        assert "--agent-extra" in refused("--agent-extra", extra) and not bench.theirs.requests
    assert "--agent-url" in refused("--agent-url", "agents.example/v1") and not bench.theirs.requests
    assert "no connection" in refused("--agent-url", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://judge.invalid/v1")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set" in refused()
    monkeypatch.setenv("OPENAI_BASE_URL", bench.theirs.url)
    (bench.folder / "checkout" / "datasets" / "TravelPlanner" / "database" / DATABASE[3]).unlink()
    assert DATABASE[3] in refused() and "drive.google.com" in refused()


# ---------------------------------------------------------------------------------------------------------- sessions


def processes_of(out: Path) -> list[int]:
    """Those of its sessions that live."""
    marks = [json.loads(p.read_text())["session"].rpartition("_")[2] for p in out.glob("sessions/*/*/session.json")]
    return [pid for mark in marks for pid in cogym_session.marked(mark)]


def test_sessions_become_results_and_the_same_command_goes_on(bench, capsys):
    bench.told({"0": "rate 0.5", "1": "rate 1", "2": "empty", "3": "broken {", "4": 'rate ""', "5": "late"})
    assert bench.run("--limit", "3") == 0
    assert bench.run("--limit", "3") == 0  # nothing is left to be done
    results = bench.results()
    assert [(r.reward, r.stop, r.reason, r.private[0]["rating"]) for r in results.records] == [
        (1.0, "user_closed", "", 0.5), (1.0, "user_closed", "", 1.0), (0.0, "user_closed", "nothing delivered", None)]
    said = capsys.readouterr().out
    assert re.search(r"travel_planning +3 +2 +0 +0.667 +0.750 +0.500\n", said)
    assert "A TRIAL OF THE PLUMBING AND NO SCORE" in said and "steps 30, session seconds 900" in said
    assert "6 requests, latency 0.50 s (median), 0.75 s (95 %), 0 faults" in said and "co-gym 0.1.5" in said
    log = next((bench.folder / "out").glob("sessions/travel_planning-000/try-1/log.txt")).read_text()
    assert log == f"key [key] {bench.theirs.url} {bench.python.parent}\n"
    assert [(m["role"], m["content"]) for m in results.records[0].messages] == [
        ("system", "START(query)"), ("assistant", "DANCE()"), ("tool", "failed (unknown)"),
        ("assistant", "EDITOR_UPDATE(text=plan)"), ("user", "SEND_TEAMMATE_MESSAGE(message=good)"),
        ("assistant", "FINISH()")]
    assert [m["segment"] for m in results.records[0].messages if m["role"] == "assistant"] == [0, 0, 1]
    assert results.records[0].errors == {"action": 1} and len(results.records[0].strategies) == 2
    with pytest.raises(cogym.UsageError, match="begun with other options: caps is steps 30 there, steps 9 here"):
        bench.run("--limit", "3", "--max-steps", "9")
    with pytest.raises(cogym.UsageError, match="other options: 3 others|tasks is"):
        bench.run("--limit", "6")
    assert bench.run("--limit", "6", out="other") == 0
    said = capsys.readouterr().out
    assert re.search(r"pooled +6 +3 +2 +0.500 +0.500 +0.250\n", said)  # (0.5 + 1 + 0) / 3 and / 6
    assert "missing: 1 task_performance.json is damaged; 1 the agent has missed the session's start\n" in said
    assert 'rated 0: 1 rating "" is no number in [0, 1]\n' in said


def test_show_and_compare_read_it_as_any_results(bench, capsys):
    for name, acts in (("a", {"1": "empty", "2": "crash"}), ("b", {"1": "rate 1", "2": "rate 0"})):
        bench.told(acts)
        assert bench.run("--limit", "3", out=name) == 0
    capsys.readouterr()
    a, b = (E.complete(bench.folder / name) for name in "ab")
    assert E.score(a)["pass@1"] == 1 / 3 and E.score(a)["missing"] == 1 and E.score(b)["pass@1"] == 1
    assert E.show(a) == cogym.report(a) and "user: gpt-4o-2024-08-06 (loopback)" in E.show(a)
    assert re.search(r"cogym:travel_planning +3 +3 +1 +0 +2 +0 ", E.compare(a, b))  # both, A only, B only, neither


def test_a_model_is_served_for_the_agent_and_its_latency_is_told(bench, capsys, monkeypatch):
    asked = []

    class Server:
        def __init__(self, model, temperature, max_tokens, kv_gib):
            asked.append((model, temperature, max_tokens, kv_gib))
            self.url, self.name = bench.agent.url, "served"

        __enter__, __exit__ = lambda self: self, lambda self, *_: asked.append("ended")

        def latency(self):
            return {"requests": 2, "median": 0.5, "p95": 0.75, "peak": 7}

    monkeypatch.setitem(sys.modules, "extras.serve", SimpleNamespace(Server=Server))
    arguments = bench.arguments("--limit", "1", "--max-tokens", "99", "--kv-gib", "0.5")
    at = arguments.index("--agent-url")
    arguments[at:at + 4] = ["--model", "tiny"]
    assert cogym.run(cogym.parse(arguments)) == 0
    assert asked == [("tiny", 1.0, 99, 0.5), "ended"] and "at most 7 at once" in capsys.readouterr().out
    told = json.loads(next((bench.folder / "out").glob("sessions/*/*/session.json")).read_text())
    assert f"--base-url {bench.agent.url} --model served" in told["members"][0]["start_node_base_command"]


def test_a_session_that_hangs_ends_at_its_limit_with_all_its_processes(bench, capsys, monkeypatch):
    docker = bench.folder / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$@" >> {bench.folder}/docker.log\necho c0ffee\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    bench.told({"0": "hang", "1": "rate 1"})
    assert bench.run("--limit", "2", "--session-seconds", "2", "--concurrency", "2") == 0
    first, second = bench.results().records
    assert (first.stop, first.reward, first.reason) == ("void_world", 0.0, "no result within 2 s")
    assert second.solved and not processes_of(bench.folder / "out")
    volume = bench.folder / "out/sessions/travel_planning-000/try-1/tmp/env_1"
    asked = (bench.folder / "docker.log").read_text().splitlines()
    assert asked[0] == f"ps -q --filter volume={volume}" and asked[1] == "rm -f c0ffee"
    assert re.search(r"travel_planning +2 +1 +1 +0.500 +1.000 +0.500\n", capsys.readouterr().out)
    bench.told()
    assert bench.run("--limit", "2", "--session-seconds", "2", "--concurrency", "2") == 0
    assert bench.results().records[0].void  # it stays as it was, unless told otherwise
    assert bench.run("--limit", "2", "--session-seconds", "2", "--concurrency", "2", "--again") == 0
    assert bench.results().records[0].solved and "1 missing sessions were played again" in capsys.readouterr().out
    assert (bench.folder / "out/sessions/travel_planning-000/try-1/log.txt").is_file()  # nothing is overwritten


def test_a_dead_environment_ends_its_session_at_once(bench):
    bench.told({"0": "die"})
    began = time.monotonic()
    assert bench.run("--limit", "1") == 0
    assert bench.results().records[0].reason == "Co-Gym's environment has died" and time.monotonic() - began < 60
    assert not processes_of(bench.folder / "out")


def test_sessions_that_fail_in_a_row_stop_the_run_and_an_agent_without_answers_does(bench, capsys):
    bench.told({"0": "crash", "2": "crash", "3": "crash", "4": "crash"})
    assert bench.run("--limit", "6") == 1
    assert "3 sessions in a row left no result and are not kept" in capsys.readouterr().err
    assert [(r.group, r.void) for r in bench.results().records] == [(0, True), (1, False)]  # the first is no row
    bench.told()
    assert bench.run("--limit", "6") == 0 and [r.void for r in bench.results().records] == [True] + [False] * 5
    capsys.readouterr()
    bench.told({"0": "part", "1": "mute"})
    assert bench.run("--limit", "2", out="other") == 1  # delivered by the user alone
    assert "answered none of 2 requests" in capsys.readouterr().err
    assert len(bench.results("other").records) == 1
    bench.told()
    assert bench.run("--limit", "2", out="other") == 0  # the second is played once more, not taken up
    assert "in 1 sessions (1 delivered) some of the agent's requests had no answer" in capsys.readouterr().out
    assert len(list((bench.folder / "other").glob("sessions/*-001/try-*"))) == 2


def test_an_outage_of_user_or_judge_is_no_result_and_is_played_again(bench, capsys):
    bench.told({"0": "outage", "1": "unread", "2": "crash"})
    assert bench.run("--limit", "3") == 1
    assert "user or judge failed" in capsys.readouterr().err
    assert [(r.group, r.reason) for r in bench.results().records] == [
        (1, ""), (2, "Co-Gym's runner has ended with code 3")]
    bench.told()
    assert bench.run("--limit", "3") == 0 and bench.results().records[0].solved
    said = capsys.readouterr().out
    assert "rated 0: 1 the plan was not read\n" in said and "played again" not in said
    bench.told({str(i): "outage" for i in range(4)})
    assert bench.run("--limit", "5", out="other") == 1
    assert "3 sessions in a row left no result" in capsys.readouterr().err and not bench.results("other").records


@pytest.mark.parametrize("text, found", [
    ("openai.APIConnectionError: Connection error.", True), ("litellm.RateLimitError: slow down", True),
    ("redis.exceptions.AuthenticationError: no", False), ("ValueError: no plan", False), (None, False)])
def test_an_endpoints_error_is_known_by_its_name(tmp_path, text, found):
    if text is not None:
        (tmp_path / "log.txt").write_text(f"Traceback\n{text}\n")
    assert cogym_session.user_failed(tmp_path) == found


def test_sessions_that_are_all_late_at_first_are_kept_with_a_warning(bench, capsys):
    bench.told({str(i): "hang" for i in range(3)})
    assert bench.run("--limit", "3", "--session-seconds", "1", "--concurrency", "3") == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warned) == 1 and "no result within 1 s" in warned[0] and "--again" in warned[0]
    assert [r.reason for r in bench.results().records] == ["no result within 1 s"] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_has_delivered_is_kept_though_the_run_ends_in_its_last_words(bench, number):
    bench.told({"0": "linger", "1": "rate 1"})
    run = bench.begun("--limit", "2", until="sessions/*-000/try-1/results/*/task_performance.json")
    time.sleep(0.5)  # the process of a group of its own
    run.send_signal(number)
    run.communicate(timeout=60)
    killed = number == signal.SIGKILL
    assert (len(bench.results().records), bool(processes_of(bench.folder / "out"))) == ((0, True) if killed else
                                                                                       (1, False))
    assert bench.run("--limit", "2") == 0 and not processes_of(bench.folder / "out")
    assert [(r.private[0]["rating"], r.private[0]["folder"]) for r in bench.results().records] == [
        (0.5, "sessions/travel_planning-000/try-1"), (1, "sessions/travel_planning-001/try-1")]


def test_a_try_that_was_killed_before_its_end_is_not_taken_up(bench):
    bench.told({"0": "hang"})
    run = bench.begun("--limit", "1", until="sessions/*-000/try-1/results/*")
    time.sleep(0.5)
    run.kill()
    run.communicate()
    assert processes_of(bench.folder / "out")
    bench.told()
    assert bench.run("--limit", "1") == 0 and not processes_of(bench.folder / "out")
    assert bench.results().records[0].private[0]["folder"].endswith("try-2")


# --------------------------------------------------------------------------------------- what must be alike, and keys


def test_another_version_or_other_data_are_another_run(bench):
    bench.run("--limit", "2")
    bench.run("--limit", "2", out="b")
    bench.forget()
    bench.told(**{"dspy-ai": "9"})
    with pytest.raises(cogym.UsageError, match="content of tasks"):
        bench.run("--limit", "2")
    bench.run("--limit", "2", out="c")
    with pytest.raises(E.ResultsError, match="content of tasks"):
        E.compare(bench.results("b"), bench.results("c"))
    bench.told()
    changed = bench.folder / "checkout" / "datasets" / "TravelPlanner" / "database" / DATABASE[0]
    changed.write_text("another flight")
    with pytest.raises(cogym.UsageError, match="content of tasks"):
        bench.run("--limit", "2")
    changed.write_text("")
    with pytest.raises(cogym.UsageError, match="caps is concurrency 1 there, concurrency 2 here"):
        bench.run("--limit", "2", "--concurrency", "2")
    assert bench.run("--limit", "2") == 0


def test_a_folder_of_weights_has_one_digest_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WHOLE", 1000)
    monkeypatch.setattr(checkpoint, "SLICE", 10)
    large = bytes([16]) + bytes(7) + b"a header, 16 big" + bytes(5000)
    files = {"model.safetensors": b"weights", "large.safetensors": large, "tokenizer.json": b"{}", "config.json": b"{}",
             "chat_template.jinja": b"x", "faca.json": b"{}", "README.md": b"not of it"}

    def digest(name, **changed):
        (tmp_path / name).mkdir()
        for file, text in (files | changed).items():
            (tmp_path / name / file).write_bytes(text)
        return checkpoint.files_digest(tmp_path / name)

    first = digest("a")
    assert digest("b", **{"README.md": b"another"}) == first
    changed = [{"model.safetensors": b"Weights"}, {"large.safetensors": large[:-1] + b"x"},
               {"large.safetensors": large.replace(b"big", b"Big")}, {"large.safetensors": large + b"x"},
               {"chat_template.jinja": b"y"}, {"more.safetensors": b""}]
    assert len({first, *(digest(str(i), **change) for i, change in enumerate(changed))}) == 7
    assert checkpoint.files_digest("tiny") == checkpoint.files_digest(tmp_path / "nowhere") == ""


def test_the_temperature_is_what_the_endpoint_is_told(bench, capsys):
    bench.run("--limit", "1", "--agent-extra", '{"temperature": 0.25}')
    assert bench.results().run["temperature"] == 0.25 and "temperature 0.25;" in capsys.readouterr().out
    for _ in range(2):
        assert bench.run("--limit", "1", "--agent-extra", '{"temperature": null}', out="b") == 0
    assert "sampled as its endpoint does" in capsys.readouterr().out
    assert "sampled as its endpoint does" in E.show(bench.results("b"))


def test_no_key_stays_in_any_file(bench, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET + "-and-more")
    bench.told({"0": "leak"})
    assert bench.run("--limit", "1") == 0
    assert not [p for p in (bench.folder / "out").rglob("*") if p.is_file() and b"CANARY" in p.read_bytes()]
    assert "failed ([key])" in json.dumps(bench.results().records[0].messages)


def test_a_complete_folder_is_told_of_with_nothing_asked(bench, capsys):
    assert bench.run("--limit", "2") == 0
    asked = len(bench.theirs.requests), len(bench.agent.requests)
    before = capsys.readouterr().out
    bench.told(redis="ConnectionError", missing=["aact"])
    assert bench.run("--limit", "2") == 0 and (len(bench.theirs.requests), len(bench.agent.requests)) == asked
    assert capsys.readouterr().out == before.partition("\n")[2]  # without "results: DIR"


def test_what_is_on_this_machine_is_asked_without_a_proxy(bench, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "here.example")
    told = cogym_session.environment(cogym.parse(bench.arguments()), "")
    assert told["NO_PROXY"] == told["no_proxy"] == "here.example,localhost,127.0.0.1"


def test_a_kill_ends_all_processes_and_loses_nothing(bench):
    bench.told({"1": "hang"})
    run = bench.begun("--limit", "2", until="sessions/*-001/try-1/results/*")
    assert processes_of(bench.folder / "out")
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 143 and "1 of 2 sessions" in said and "Traceback" not in said and SECRET not in said
    assert not processes_of(bench.folder / "out")
    bench.told()
    assert bench.run("--limit", "2") == 0
    assert [r.solved for r in bench.results().records] == [True, True]
    assert len(list((bench.folder / "out").glob("sessions/*/try-*"))) == 3


# ----------------------------------------------------------------------------------------------------------- metrics


def test_figures_by_hand():
    found = cogym_session.figures([(True, 0.5), (True, None), (False, None), (False, 0.9)])
    assert found == {"n": 4, "delivered": 2, "DR": 0.5, "TP": 0.25, "CS": 0.125}
    none = cogym_session.figures([(False, None)])
    assert none["DR"] == none["CS"] == 0 and none["TP"] != none["TP"]


def test_macro_and_pooled_differ_where_tasks_differ_in_size(bench, monkeypatch):
    """DR 1 of 1 and 1 of 3: macro 2/3, pooled 2/4; TP 0.5 and 1, CS 0.5 and 1/3."""
    for key in cogym.TASKS["related_work"].keys:
        monkeypatch.setenv(key, "word")
    bench.told({"0": "rate 0.5"})
    options = cogym.parse(bench.arguments("--tasks", "travel_planning,related_work", "--limit", "1"))
    assert cogym.run(options) == 0
    results = bench.results()
    related = next(r for r in results.records if r.domain == "cogym:related_work")
    related.private[0]["rating"] = 1.0
    more = [json.loads(json.dumps(vars(related))) for _ in range(2)]
    for i, record in enumerate(more):
        results.run["tasks"][f"cogym:related_work/{i + 1}"] = results.run["tasks"][related.task]
        results.records.append(type(related)(**record | {
            "task": f"cogym:related_work/{i + 1}", "reward": 0.0, "stop": "void_world"}))
    found = cogym_session.all_figures(results)
    assert [found["travel_planning"][k] for k in ("DR", "TP", "CS")] == [1, 0.5, 0.5]
    assert [found["related_work"][k] for k in ("n", "missing", "DR", "TP", "CS")] == [3, 2, 1 / 3, 1, 1 / 3]
    assert [found["macro"][k] for k in ("DR", "TP", "CS")] == pytest.approx([2 / 3, 0.75, 5 / 12])
    assert [found["pooled"][k] for k in ("n", "missing", "DR", "TP", "CS")] == [4, 2, 0.5, 0.75, 0.375]
    assert {request["model"] for request in bench.theirs.requests} == {
        "gpt-4o-2024-08-06", "gpt-4-0613", "gpt-4o-mini"}


@pytest.mark.parametrize("text, found", [
    ('{"task_completion": 1, "performance_rating": 0.5}', ({"delivered": True, "rating": 0.5}, "")),
    ('{"task_completion": 0, "performance_rating": 0}', ({"delivered": False, "rating": 0.0}, "")),
    ('{"task_completion": 1, "performance_rating": 1.5}', ({"delivered": True, "rating": None},
                                                          "rating 1.5 is no number in [0, 1]")),
    ('{"task_completion": 1, "performance_rating": NaN}', ({"delivered": True, "rating": None},
                                                          "rating NaN is no number in [0, 1]")),
    ('{"task_completion": 1}', ({"delivered": True, "rating": None}, "rating null is no number in [0, 1]")),
    ('{"performance_rating": 1}', (None, "task_performance.json is damaged")),
    ('{"task_completion": 1, "perf', (None, "task_performance.json is damaged")),
    ("[" * 100000, (None, "task_performance.json is damaged")), ("[]", (None, "task_performance.json is damaged")),
    ("\xff", (None, "task_performance.json is damaged")), (None, (None, "no task_performance.json"))])
def test_a_result_file_is_read_or_named(tmp_path, text, found):
    if text is not None:
        (tmp_path / "results" / "env_1").mkdir(parents=True)
        (tmp_path / "results" / "env_1" / "task_performance.json").write_text(text, encoding="latin-1")
    assert cogym_session.read_performance(tmp_path) == found


def test_a_broken_tally_or_log_is_read_as_far_as_it_goes(tmp_path):
    assert cogym_session.read_agent(tmp_path)["requests"] == 0
    (tmp_path / "agent.json").write_text('{"requests": "many", "faults": [], "latencies": [1, "x"], "started": true}')
    found = cogym_session.read_agent(tmp_path)
    assert (found["requests"], found["faults"], found["latencies"], found["started"]) == (0, {}, [1], True)
    assert cogym_session.read_transcript(tmp_path) == ([], 0, 0)
