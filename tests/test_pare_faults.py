"""extras/pare.py held to its folder, its model, its user's endpoint and its clock; Pare is test_pare.py's stand-in."""

import json
import os
import signal

import pytest
import test_pare
from fake_user import FakeUser
from test_pare import argv, calls, folder_of, forked, gone, plan, play, until

from eval import compare
from extras import pare as P
from extras.checkpoint import files_digest
from extras.endpoint import EndpointError
from extras.ranks import UsageError
from extras.results import Log, Result, ResultsError, complete, load_results

bench, agent, handlers = test_pare.bench, test_pare.agent, test_pare.handlers  # fixtures


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "https://me:secret@host/v1", "https://host/v1?key=secret"])
def test_a_malformed_agent_url_is_refused_before_pares_python_is_asked(bench, agent, tmp_path, url):
    (bench / "scenarios.json").unlink()  # so that it would be refused itself
    with pytest.raises(EndpointError, match="needs --agent-url") as error:
        play(bench, agent, tmp_path / "out", agent_url=url)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("provider, name", [("openai", "OPENAI_BASE_URL"), ("openai", "OPENAI_API_BASE"),
                                            ("azure", "AZURE_API_BASE"), ("vertex_ai", "VERTEXAI_API_BASE")])
def test_no_variable_redirects_the_user(bench, agent, tmp_path, monkeypatch, provider, name):
    monkeypatch.setenv(name, "https://secret@elsewhere/v1")
    with pytest.raises(UsageError, match=f"variable {name} names .* --user-url") as error:
        play(bench, agent, tmp_path / "out", user_provider=provider)
    assert "\n" not in str(error.value) and "secret" not in str(error.value) and not calls(bench)
    assert play(bench, agent, tmp_path / "out", user_provider=provider, user_url="https://host/v1") == 0
    assert play(bench, agent, tmp_path / "b", user_provider="other") == 0  # nothing to it
    assert not any(call["env"].get(name) for call in calls(bench))


@pytest.mark.parametrize("changed, told", [
    ({"model": "other"}, "weights"), ({"observe_iterations": 4}, "limits"), ({"timeout": 9}, "caps"),
    ({"user_model": "v"}, "simulator"), ({"split": "ablation"}, "env"), ({"limit": 2}, "tasks"),
    ({"concurrency": 2}, "concurrency")])
def test_a_folder_that_was_begun_with_other_options_is_refused(bench, agent, tmp_path, changed, told):
    assert play(bench, agent, tmp_path / "out") == 0
    before = (tmp_path / "out/run.json").read_bytes()
    with pytest.raises(UsageError, match=f"begun with other options: .*{told}"):
        play(bench, agent, tmp_path / "out", **changed)
    assert (tmp_path / "out/run.json").read_bytes() == before and len(calls(bench)) == 3


def test_another_version_of_pare_is_refused(bench, agent, tmp_path):
    assert play(bench, agent, tmp_path / "out") == 0
    text = (bench / "python").read_text()
    (bench / "python").write_text(text.replace("b36de24", "c47ef35"))
    with pytest.raises(UsageError, match="content of tasks"):
        play(bench, agent, tmp_path / "out")


def test_a_folder_of_something_else_is_refused(bench, agent, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter").write_text("dear")
    with pytest.raises(UsageError, match="no result"):
        play(bench, agent, tmp_path / "out")


@pytest.mark.parametrize("runs", [1, 2])
def test_a_folder_goes_on_with_the_endpoints_it_was_begun_with(bench, agent, tmp_path, runs):
    plan(bench, c="crash")
    assert play(bench, agent, tmp_path / "out") == 1
    before = (tmp_path / "out/run.json").read_bytes()
    with pytest.raises(UsageError, match="another --user-url: it is none there, http://127.0.0.1:9/v1 here"):
        play(bench, agent, tmp_path / "out", user_url="http://127.0.0.1:9/v1", runs=runs)
    with FakeUser(lambda request, n: "ok") as other:
        with pytest.raises(UsageError, match=f"another --agent-url: it is {agent.url} there, {other.url} here"):
            play(bench, other, tmp_path / "out", runs=runs)
    assert (tmp_path / "out/run.json").read_bytes() == before and len(calls(bench)) == 3


def local_folder(bench, agent, tmp_path, domain="pare:full", **told):
    """A complete folder of a model's folder that holds weights and a note; and the options of the command."""
    model = tmp_path / "M"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "faca.json").write_text(json.dumps({"preset": "tiny", "caps": {}, "temperature": 0.5, "trained_on": []}))
    options = P.parse(argv(bench, agent, tmp_path / "out", agent_url=None, model=model))
    run = P.describe(options, P.listing(options.bench_python, "full"), {
        "agent_url": "", "agent_extra": "", "weights": files_digest(model), "temperature": 0.5} | told)
    run |= {"env": domain, "limits": {domain: run["limits"]["pare:full"]}}
    run["tasks"] = {i: task | {"domain": domain} for i, task in run["tasks"].items()}
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text(json.dumps(run))
    log = Log(tmp_path / "out")
    for i, scenario in enumerate("abc"):
        log.append(Result(scenario, domain, i, 0, 0, reward=1.0, user="openai/u", stop="user_closed"))
    return options


def test_a_complete_folder_is_not_shown_for_other_weights_at_its_path(bench, agent, tmp_path, capsys):
    options = local_folder(bench, agent, tmp_path)
    assert P.run(options) == 0 and "Pass@1" in capsys.readouterr().out
    (tmp_path / "M/model.safetensors").write_bytes(b"Weights")
    with pytest.raises(UsageError, match="begun with other options: weights is"):
        P.run(options)
    assert not capsys.readouterr().out


def test_the_temperature_that_none_is_given_for_is_the_models(bench, agent, tmp_path):
    options = local_folder(bench, agent, tmp_path, temperature=0.25)
    with pytest.raises(UsageError, match="temperature is 0.25 there, 0.5 here"):
        P.run(options)
    options.temperature = 0.25
    assert P.run(options) == 0


def test_a_complete_folder_of_eval_py_is_refused(bench, agent, tmp_path):
    options = local_folder(bench, agent, tmp_path, domain="mini:telecom")
    options.max_tokens = 5
    with pytest.raises(ResultsError, match="env is mini:telecom there, pare:full here"):
        P.run(options)


def test_a_trial_is_not_compared_with_a_run(tmp_path):
    a, b = (complete(folder_of(tmp_path / name, [[1], [0]], url)) for name, url in (
        ("a", "https://host/v1"), ("b", "http://127.0.0.1:8000/v1")))
    with pytest.raises(ResultsError, match=r"simulator: openai/u \| openai/u \(loopback\)"):
        compare(a, b)


def test_a_run_whose_scenario_never_began_is_tried_again_and_three_of_them_stop_all(bench, agent, tmp_path, capsys):
    (bench / "scenarios.json").write_text(json.dumps({"full": list("abcd")}))
    plan(bench, **dict.fromkeys("abcd", "wait"))
    assert play(bench, agent, tmp_path / "out", timeout=3, concurrency=3) == 1
    assert "before its scenario began; 0 of 4 runs are in" in capsys.readouterr().err
    assert {r.reason for r in load_results(tmp_path / "out").records} == {"no result"}
    plan(bench)
    assert play(bench, agent, tmp_path / "out", timeout=3, concurrency=3) == 0
    assert sorted(c["argv"][5] for c in calls(bench)[-4:]) == list("abcd")


def test_a_row_that_is_taken_after_a_kill_has_no_key_in_it(bench, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-user")
    plan(bench, c="failed")
    assert play(bench, agent, tmp_path / "out") == 0
    lines = (tmp_path / "out/results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out/results.jsonl").write_bytes(b"".join(lines[:2]))
    folder = tmp_path / "out/pare/c/0"
    (row,) = folder.glob("results/*/*_result.json")
    row.write_text(row.read_text().replace("the agent proposed nothing", "Incorrect key key-of-the-user"))
    (folder / "log").write_text("Incorrect key key-of-the-user")
    (folder / "tmp").mkdir()
    assert play(bench, agent, tmp_path / "out") == 0 and len(calls(bench)) == 3
    assert complete(tmp_path / "out").records[2].private[0]["checks"] == "Incorrect key [key]"
    assert not (folder / "tmp").exists()
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"key-of" in path.read_bytes()]


def test_pares_list_of_scenarios_ends_with_who_asked_for_it(bench, agent, tmp_path):
    (bench / "slow").touch()
    driver = forked(lambda: play(bench, agent, tmp_path / "out"), tmp_path / "told")
    until((bench / "slow").read_text)
    os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)
    until(lambda: gone(int((bench / "slow").read_text())))
