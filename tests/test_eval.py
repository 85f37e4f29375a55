"""eval.py: its figures by hand, and its commands on what an agent behind a loopback endpoint has left."""

import csv
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
from itertools import combinations

import pytest
from fake_user import Answer, FakeUser
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent import render

import eval as E
import rollout as R
from env import digest, load_tasks, make_env
from extras.paper import COLUMNS, TABLE_2
from extras.playing import claim, training_of
from extras.replay import reason_of, replay
from extras.results import Log, Result, Results, ResultsError, complete, kept, load_results
from extras.tables import grid, seed_table
from extras.tiny import EXPERTS

ROOT = pathlib.Path(__file__).resolve().parent.parent


# ------------------------------------------------------------------------------------------------ figures by hand


def folder_of(path, rewards, domain="d", caps=(), seed=None, void=(), trials=None):
    """Results as `eval.py run` leaves them: rewards[task][trial]; void: (task, trial)s without one."""
    path.mkdir(parents=True)
    tasks = {f"{domain}/{i}": {"domain": domain, "digest": "0", "seen": i == 0, "nothing": float(i == 1),
                               "strata": [f"{1 + i % 2} issue"]} for i in range(len(rewards))}
    run = {"model": str(path), "weights": "", "agent_url": "", "agent_extra": "", "env": domain, "tasks": tasks,
           "training": {} if seed is None else {"seed": seed}, "simulator": "scripted", "simulator_url": "",
           "simulator_extra": "", "judge": "", "caps": dict(caps), "limits": {domain: {}}, "temperature": 1.0,
           "thinking": False, "trials": trials or len(rewards[0]), "seed": 0, "void_retries": 2,
           "seen_known": seed is not None, "made": {}}
    (path / "run.json").write_text(json.dumps(run))
    log = Log(path)
    for i, row in enumerate(rewards):
        for k, reward in enumerate(row):
            stop = "void_user" if (i, k) in void else "user_closed"
            log.append(Result(f"{domain}/{i}", domain, i, k, 0, reward=float(reward), stop=stop, user="u",
                              reason="" if reward else "missing" if (i, k) in void else "error budget spent"))
    return path


def test_pass_hat_and_pass_at_by_hand(tmp_path):
    """n 4, c 1: pass@2 = 1 - C(3, 2) / C(4, 2) = 0.5; c 3: pass^2 = C(3, 2) / C(4, 2) = 0.5. Of both a mean."""
    s = E.score(load_results(folder_of(tmp_path / "a", [[1, 0, 0, 0], [1, 1, 1, 0]])))
    assert (s["pass@1"], s["pass@2"], s["pass^2"]) == (0.5, (0.5 + 1) / 2, (0 + 0.5) / 2)
    assert (s["pass^3"], s["pass@3"], s["pass^4"], s["pass@4"]) == (0.125, (0.75 + 1) / 2, 0, 1)
    assert "pass^5" not in s and s["do-nothing"] == 0.5 and s["dialogues"] == 8 and s["tasks"] == 2


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_pass_hat_and_pass_at_are_the_shares_of_all_subsets_of_trials(rewards):
    records = [Result(f"d/{i}", "d", i, k, 0, reward=float(v), stop="user_closed")
               for i, row in enumerate(rewards) for k, v in enumerate(row)]
    tasks = {f"d/{i}": {"domain": "d", "nothing": 0.0} for i in range(len(rewards))}
    s = E.score(Results(pathlib.Path(), {"tasks": tasks, "trials": 5}, records))
    for k in range(2, 6):
        sets = [[some for some in combinations(row, k)] for row in rewards]
        assert s[f"pass^{k}"] == pytest.approx(sum(sum(map(all, x)) / len(x) for x in sets) / len(sets))
        assert s[f"pass@{k}"] == pytest.approx(sum(sum(map(any, x)) / len(x) for x in sets) / len(sets))


def test_a_missing_dialogue_stays_in_every_denominator(tmp_path):
    results = load_results(folder_of(tmp_path / "a", [[1, 0], [1, 1]], void=[(0, 1)], seed=0))
    s = E.score(results)
    assert (s["pass@1"], s["missing"], s["dialogues"]) == (0.75, 1, 4)
    assert re.search(r"^missing +1 +0 +100.0%$", E.show(results), re.MULTILINE)


def test_wilsons_interval_by_hand():
    """5 of 10 at z 1.96: centre (0.5 + 0.19207) / 1.38415, spread 1.96 sqrt(0.025 + 0.0096) / 1.38415."""
    assert E.wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert E.wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert E.wilson(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_mcnemar_by_hand():
    """Six discordant pairs, five of them B's: 2 (C(6,0) + C(6,1)) / 64."""
    assert E.mcnemar(1, 5) == E.mcnemar(5, 1) == 14 / 64
    assert E.mcnemar(0, 0) == E.mcnemar(3, 3) == 1.0 and E.mcnemar(0, 6) == 2 / 64


def test_the_bootstrap_draws_whole_tasks():
    """A wins both trials of one task of two: samples of two tasks have a difference of 0, 1/2 or 1."""
    pairs = {("a", 0): (True, False), ("a", 1): (True, False), ("b", 0): (True, True), ("b", 1): (False, False)}
    assert E.bootstrap(pairs, 0) == (0.0, 1.0)
    many = {(f"t{i}", 0): (i < 60, i >= 60) for i in range(100)}  # +1 in 60, -1 in 40: sd of a mean of 100 is 0.098
    low, high = E.bootstrap(many, 0)
    assert low == pytest.approx(0.2 - 1.96 * 0.098, abs=0.02) and high == pytest.approx(0.2 + 1.96 * 0.098, abs=0.02)
    assert E.bootstrap(many, 0) == (low, high) != E.bootstrap(many, 1)


def test_compare_by_hand(tmp_path):
    a, b = [[1, 1], [1, 0], [0, 0]], [[1, 0], [0, 1], [0, 0]]
    text = E.compare(*(load_results(folder_of(tmp_path / n, rows)) for n, rows in (("a", a), ("b", b))))
    line = next(line.split() for line in text.splitlines() if line.startswith("d "))
    assert line[:10] == ["d", "3", "6", "1", "2", "1", "2", "0.500", "0.333", "+0.167"] and line[-1] == "1"
    assert "why B failed where A alone won (2): error budget spent 2" in text
    assert "why A failed where B alone won (1): error budget spent 1" in text


def test_what_differs_is_refused_and_named_and_paired_anyway_on_request(tmp_path):
    a = load_results(folder_of(tmp_path / "a", [[1, 1], [1, 0]]))
    fewer = load_results(folder_of(tmp_path / "b", [[1, 1]]))
    caps = load_results(folder_of(tmp_path / "c", [[1, 1], [1, 0]], caps={"errors": 3}))
    for other, named in ((fewer, r"tasks: 1 others \(d/1\) \| 0 others"), (caps, r"caps: errors none \| errors 3")):
        with pytest.raises(ResultsError, match=named):
            E.compare(a, other)
    assert "differs: tasks: 1 others" in (text := E.compare(a, fewer, anyway=True))
    assert next(line.split() for line in text.splitlines() if line.startswith("d "))[1:3] == ["1", "2"]
    with pytest.raises(ResultsError, match="no task in common"):
        E.compare(a, load_results(folder_of(tmp_path / "e", [[1, 1]], "other")), anyway=True)


def test_the_table_of_seeds_by_hand(tmp_path, monkeypatch):
    """Means and sample deviations of (50, 100) and (25, 50); gains by training seed, however the folders are called."""
    monkeypatch.chdir(tmp_path)
    for name, seed, rows in (("x/1", 1, [[1, 0], [1, 0]]), ("x/2", 2, [[1, 1], [1, 1]]),
                             ("y/b", 2, [[1, 0], [0, 0]]), ("y/c", 1, [[1, 0], [1, 0]])):
        folder_of(tmp_path / name, rows, "tau2:airline", seed=seed)
    text = seed_table(["x/*", "y/*"])
    cells = {line.split("  ")[0]: re.split(r"\s{2,}", line) for line in text.splitlines()}
    assert cells["x/*"][1:6] == ["2", "not run", "not run", "75.0 ±35.4", "not run"]
    assert cells["x/*"][-2:] == ["75.00 ±35.36", "not run"]
    assert cells["y/*"][4] == "37.5 ±17.7"
    assert "x/* - y/*, by seed: +37.50 ±53.03  (1: +0.00, 2: +75.00)" in text
    assert cells["paper, 8B FACA"][2:] == [*(f"{x:.1f}" for x in TABLE_2["8B FACA"][:-1]), "not run",
                                           "40.57 ±1.04"]
    assert "paper, 8B FACA - Interactive GRPO: +5.92 ±1.10  (s1: +4.67, s2: +6.33, s3: +6.75)" in text
    assert "s1: +4.67" not in (four := seed_table(["x/*", "y/*"], paper=4)) and "paper, 8B lambda -0.5" in four
    assert re.split(r"\s{2,}", text.splitlines()[0])[-2:] == ["mean of 1", "Avg of the paper's 9"]
    markdown, table = seed_table(["x/*", "y/*"], "markdown"), seed_table(["x/*", "y/*"], "csv")
    assert {line.count("|") for line in markdown.splitlines() if line.startswith("|")} == {len(COLUMNS) + 5}
    rows = list(csv.reader(table.splitlines()))
    assert rows[0] == ["row", "seeds", "figure", "mean", "sd"] and {len(row) for row in rows} == {5}
    assert ["x/*", "2", "tau2:airline", "75.00", "35.36"] in rows
    assert ["paper, 8B base", "1", "tau:airline", "20.00", ""] in rows
    assert ["x/* - y/*, by seed", "2", "gain", "37.50", "53.03"] in rows
    brief = seed_table(["x/*", "y/*"], brief=True).splitlines()
    assert "tau2 Air" in brief[0] and "tau3" not in brief[0] and "not run" in brief[1]
    unseen = seed_table(["x/*"], unseen=True)
    assert "paper, 8B FACA, all tasks" in unseen
    with pytest.raises(ResultsError, match="it is not known which tasks the model of z was trained on"):
        folder_of(tmp_path / "z", [[1, 0], [1, 0]], "tau2:airline")
        seed_table(["z"], unseen=True)
    assert re.split(r"\s{2,}", unseen.splitlines()[1])[4] == "75.0 ±35.4"


def test_a_grid_keeps_its_columns_in_every_form():
    rows = [["", "a, b"], ["one|two", "1"]]
    assert grid(rows) == "         a, b\none|two     1"
    assert grid(rows, "csv") == ',"a, b"\none|two,1'
    assert len({line.replace("\\|", "").count("|") for line in grid(rows, "markdown").splitlines()}) == 1


# ------------------------------------------------------------------------------------------------------------- replay


class Says:
    """A sampler that says the texts in order."""

    def __init__(self, chat, *texts):
        self.chat, self.texts = chat, list(texts)

    async def sample(self, ids, max_tokens, seed):
        from extras.tiny import ExpertSample
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        tokens = self.chat.tokenizer.encode(text, add_special_tokens=False) + [self.chat.turn_end]
        return ExpertSample(tokens, [0.0] * len(tokens))


def retail(want, ok=True):
    """A task of mini:retail of that wish, which the policy allows, or not; and its order."""
    task = next(t for t in load_tasks("mini:retail", "test") if t.facts["want"] == want
                and (t.gold[0].name == "refuse") != ok)
    return task, task.facts["order"]


def called(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def cases():
    """(reason, task, what the agent says)"""
    task, order = retail("return")
    price = task.communicate[0]
    ask, give = "What is the order number?", called("return_order", order=order)
    yield "", task, [ask, give, f"Done, the refund is {price}."]
    yield "not communicated", task, [ask, give, "Done."]
    yield "wrong final state", task, [ask, f"Done, the refund is {price}."]
    yield "user gave up", task, ["Hm?"]
    yield "empty message", task, [ask, ""]
    yield "error budget spent", task, [ask, called("look_up", order=order)]
    yield "step cap", task, [ask, *[called("get_order", order=order)] * 30]


@pytest.mark.parametrize("reason, task, texts", [pytest.param(*case, id=case[0] or "solved") for case in cases()])
def test_each_dialogue_that_is_not_solved_has_the_reason_that_stopped_it(reason, task, texts):
    from test_agent import CHAT
    caps = R.Caps(messages=12, errors=4)
    (record,), _ = R.play_groups([(0, task)], 1, (0, 0), Says(CHAT, *texts), CHAT, caps)
    assert reason_of(record, task) == reason and (record.reward == 1) == (reason == "")


def test_the_reasons_of_endings_that_only_other_worlds_have():
    task, _ = retail("return")
    for stop, strategy, reason in (
            ("transfer", "confirm", "agent transferred"), ("max_context", "confirm", "context full"),
            ("user_left", "reveal_piece", "stopped without closure"), ("void_agent", None, "missing"),
            ("user_left", "change_mind", "user gave up"), ("max_steps", None, "step cap"),
            ("out_of_scope", "be_vague", "user out of scope")):
        f = {"change_mind": -1, None: None}.get(strategy, 1)
        assert reason_of(R.Rollout(task.id, task.domain, 0, 0, 0, strategies=[strategy], reactions=[f], stop=stop),
                         task) == reason


def test_replay_makes_the_calls_of_both_sides_in_their_order():
    """In mini:telecom the user's own steps are private; the same world comes out of them."""
    from extras.tiny import ExpertSampler
    from test_agent import CHAT
    tasks = load_tasks("mini:telecom", "test")[:8]
    records, _ = R.play_groups(list(enumerate(tasks)), 2, (0, 0), ExpertSampler(CHAT), CHAT, R.Caps(errors=4))
    assert any(p.get("tool") == "do_step" for r in records for p in r.private)
    for record in records:
        env = replay(record, tasks[record.group])
        assert env.state != make_env(tasks[record.group]).state
        if R.Stop(record.stop).verified:
            assert env.reward(record.messages) == record.reward
    assert {r.reward for r in records} == {0.0, 1.0}


# --------------------------------------------------------------------------------------------- an agent on loopback


ENVIRONMENT = os.environ | {"NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def by_expert(request, n):
    """The embedded domains' expert, as a server's agent; the same prompt gets the same answer."""
    prompt = render(request)
    if "Call the tool ready" in prompt:
        return Answer(calls=[("ready", {})])
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", prompt, re.DOTALL)
    domain = "mini:telecom" if "phone" in turns[0][1].lower() else "mini:retail"
    return EXPERTS[domain](turns[1:-1], random.Random(prompt))


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def command(server, out, *more):
    return ["run", "--model", "expert", "--agent-url", server.url, "--out", str(out), *map(str, more)]


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        E.main()
    return caught.value.code or 0


BOTH = ("--env", "mini:telecom,mini:retail")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """An agent on both domains, and a copy in which every third dialogue that was solved was not: -> their folder, and
    what was printed of the first."""
    folder = tmp_path_factory.mktemp("results")
    with FakeUser(by_expert) as server:
        done = subprocess.run([sys.executable, "eval.py", *command(server, folder / "a", *BOTH)], cwd=ROOT,
                              env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "a", folder / "b")
    rows = plain(folder / "b")
    for row in [row for row in rows if row["reward"] == 1][::3]:
        row |= {"reward": 0.0, "reason": "step cap"}
    (folder / "b" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, done.stdout


def plain(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_run_leaves_each_task_and_trial_once_and_prints_what_a_plain_count_gives(evaluated):
    folder, said = evaluated
    rows = plain(folder / "a")
    tasks = load_tasks("mini:telecom,mini:retail", "test")
    assert sorted((row["task"], row["k"]) for row in rows) == sorted((t.id, 0) for t in tasks)
    assert not any(row[name] for row in rows for name in ("tokens", "segment", "logprobs", "advantage"))
    assert all(row["reason"] == "" if row["reward"] == 1 else row["reason"] for row in rows)
    shares = {}
    for domain in ("mini:telecom", "mini:retail"):
        mine = [row["reward"] for row in rows if row["domain"] == domain]
        shares[domain] = sum(mine) / len(mine)
        cells = next(line.split() for line in said.splitlines() if line.startswith(domain))
        assert 0 < shares[domain] < 1 and cells[1:5] == [str(len(mine)), str(len(mine)), "0",
                                                         f"{shares[domain]:.3f}"]
    average = next(line.split() for line in said.splitlines() if line.startswith("average"))
    assert average[4] == f"{sum(shares.values()) / 2:.3f}"
    for count in (2, 3):
        some = {t.id for t in tasks if t.domain == "mini:telecom" and len(t.gold) == count}
        mine = [row["reward"] for row in rows if row["task"] in some]
        assert re.search(rf"^  {count} issues +{len(some)} +{len(mine)} +0 +{sum(mine) / len(mine):.3f} ", said, re.M)
    reasons = re.findall(r"^([a-z ]+?) {2,}(\d+) +[\d.]+%$", said.partition("why not solved")[2], re.M)
    assert {name: int(n) for name, n in reasons} == {
        reason: sum(row["reason"] == reason for row in rows) for reason in {row["reason"] for row in rows} - {""}}


def test_show_prints_the_same_again_and_rescore_finds_the_same_rewards(evaluated, monkeypatch, capsys, tmp_path):
    folder, said = evaluated
    assert main(monkeypatch, "show", folder / "a") == 0
    assert capsys.readouterr().out.strip() in said
    assert main(monkeypatch, "rescore", folder / "a") == 0
    assert capsys.readouterr().out == f"{folder / 'a'}: {len(plain(folder / 'a'))} same\n"
    shutil.copytree(folder / "a", tmp_path / "c")
    rows = plain(tmp_path / "c")
    i = next(i for i, row in enumerate(rows) if row["reward"] == 1)
    rows[i]["reward"] = 0.0
    (tmp_path / "c" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(monkeypatch, "rescore", tmp_path / "c") == 1
    assert f"{rows[i]['task']} trial {rows[i]['k']}: saved 0, replayed 1" in capsys.readouterr().out


def taus(results, domain):
    """tau2's own Results, of one domain; its own metrics, from the wheel, give our figures."""
    simulation = pytest.importorskip("tau2.data_model.simulation")
    metrics = pytest.importorskip("tau2.metrics.agent_metrics")
    found = simulation.Results.load(results.folder / "tau2" / f"{domain.replace(':', '-')}.json")
    theirs, ours = metrics.compute_metrics(found), E.score(results.among(domain=domain))
    ours = {1: ours["pass@1"]} | {k: ours[f"pass^{k}"] for k in range(2, results.run["trials"] + 1)}
    assert theirs.pass_hat_ks == pytest.approx(ours) and theirs.avg_reward == pytest.approx(ours[1])
    return found


def test_taus_metrics_give_the_same_figures_on_the_same_results(evaluated):
    """What both sides have said and called is there, and the user's strategies are not."""
    results = load_results(evaluated[0] / "a")
    for domain in ("mini:telecom", "mini:retail"):
        found = taus(results, domain)
        assert all((sim.termination_reason == "user_stop") or sim.reward_info.reward == 0 for sim in found.simulations)
        calls = [c for sim in found.simulations for m in sim.messages for c in getattr(m, "tool_calls", None) or ()]
        assert {c.requestor for c in calls} == ({"assistant", "user"} if domain == "mini:telecom" else {"assistant"})
        assert found.info.environment_info.domain_name == domain and found.info.num_trials == 1
    text = (results.folder / "tau2" / "mini-telecom.json").read_text()
    assert not re.search("strategy|reveal_piece|ask_clarification|change_mind", text)


def test_compare_and_table_read_what_run_has_written(evaluated, monkeypatch, capsys):
    folder, _ = evaluated
    assert main(monkeypatch, "compare", folder / "a", folder / "b") == 0
    out = capsys.readouterr().out
    a, b = ({(row["task"], row["k"]): row["reward"] for row in plain(folder / name)} for name in "ab")
    cells = [sum((a[p], b[p]) == pair for p in a) for pair in ((1, 1), (1, 0), (0, 1), (0, 0))]
    assert f"why B failed where A alone won ({cells[1]}): step cap {cells[1]}" in out and cells[2] == 0
    line = next(line.split() for line in out.splitlines() if line.startswith("all "))
    assert [int(x) for x in line[3:7]] == cells and line[-1] == f"{E.mcnemar(*cells[1:3]):.2g}" and cells[1] > cells[2]
    assert main(monkeypatch, "table", folder / "a", folder / "b") == 0
    mine = [reward for (task, _), reward in a.items() if "retail" in task]
    assert f"  {100 * sum(mine) / len(mine):.1f}  " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- killed, and failing


def processes(word):
    """Those whose command line has the word."""
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if word in line and line[0] != "Z"]


def without_times(folder):
    return {(row["task"], row["k"]): {name: v for name, v in row.items() if name not in ("began", "ended")}
            for row in plain(folder)}


def test_a_run_that_is_killed_again_and_again_loses_and_repeats_nothing(evaluated, tmp_path):
    """SIGKILL to two ranks and to one process, each time with a line cut in two; then it is the same run."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "a"

    def slow(request, n):
        answer = by_expert(request, n)
        answer = answer if isinstance(answer, Answer) else Answer(answer)
        answer.delay = 0.005
        return answer

    with FakeUser(slow) as server:
        arguments = ["eval.py", *command(server, out, *BOTH, "--concurrency", 16)]
        for head, more in ((ranks, 30), ([], 20)):
            before = (out / "results.jsonl").read_bytes().count(b"\n") if out.exists() else 0
            process = subprocess.Popen([sys.executable, *head, *arguments], cwd=ROOT, env=ENVIRONMENT,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while process.poll() is None and (not (out / "results.jsonl").exists() or len(
                    (out / "results.jsonl").read_bytes().splitlines()) < before + more):
                time.sleep(0.02)
            process.kill()
            process.wait()
            while processes(str(out)):  # torchrun's ranks are told by the kernel, and end what they have under way
                time.sleep(0.02)
            with (out / "results.jsonl").open("ab") as file:
                file.write(b'{"task": "mini:')  # what a kill in mid-write leaves
            assert load_results(out).torn == 1
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"going on in {out}: \d\d+ of {len(plain(evaluated[0] / 'a'))} dialogues are there", done.stdout)
    assert len(plain(out)) == len(without_times(out)) and without_times(out) == without_times(evaluated[0] / "a")


def test_a_void_dialogue_is_tried_again_counted_as_missing_and_played_when_the_run_goes_on(
        tmp_path, monkeypatch, capsys):
    """The agent's server gives no answer to dialogues about one item, until it is mended."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("extras.endpoint.RETRIES", 1)
    broken = [True]
    task = load_tasks("mini:retail", "test")[0]
    item = task.facts["item"]

    def failing(request, n):
        first = next((m["content"] for m in request["messages"] if m["role"] == "user"), "")
        return Answer(status=500) if broken and re.search(rf"\b{item}\b", first) else by_expert(request, n)

    with FakeUser(failing) as server:
        arguments = command(server, tmp_path / "r", "--env", "mini:retail", "--void-retries", 1, "--trials", 2)
        assert main(monkeypatch, *arguments) == 0
        said, results = capsys.readouterr().out, load_results(tmp_path / "r")
        hit = [i for i, t in enumerate(load_tasks("mini:retail", "test")) if t.facts["item"] == item]
        missing = [r for r in results.records if r.void]
        assert [r.group for r in missing] == [i for i in hit for _ in range(2)] and missing[0].stop == "void_agent"
        assert [r.reason for r in missing] == ["missing"] * len(missing) and len(results.tries) == len(missing)
        assert E.score(results)["missing"] == len(missing) and E.score(results)["dialogues"] == len(results.records)
        assert f"{len(missing)} void dialogues were played again: void_agent {len(missing)}" in said
        broken.clear()
        assert main(monkeypatch, *arguments) == 0
    said, mended = capsys.readouterr().out, load_results(tmp_path / "r")
    assert f"{len(results.records) - len(missing)} of {len(results.records)} dialogues are there" in said
    assert not any(r.void for r in mended.records) and len(mended.tries) == 2 * len(missing)
    taus(mended, "mini:retail")
    kept_ones = [r for r in results.records if not r.void]
    assert kept_ones == [r for r in mended.records if r.group not in hit]
    assert len({r.seed for r in mended.tries + mended.records if r.group == hit[0] and r.k == 0}) == 3


def test_other_options_on_the_same_folder_are_refused_and_change_nothing(evaluated, tmp_path, monkeypatch, capsys):
    shutil.copytree(evaluated[0] / "a", tmp_path / "a")
    before = (tmp_path / "a" / "results.jsonl").read_bytes()
    with FakeUser(by_expert) as server:
        for more, named in ((("--seed", 1), "seed is 0 there, 1 here"), (("--greedy",), "temperature is 1.0 there"),
                            (("--max-message-tokens", 9), "caps is"), (("--env", "mini:retail"), "env is"),
                            (("--model", "another"), "model is expert there, another here"),
                            (("--model", "another", "--trials", 3), "model is expert there, another here"),
                            (("--agent-extra", '{"temperature": 0}'), "temperature is 1.0 there, 0.0 here")):
            assert main(monkeypatch, *command(server, tmp_path / "a", *BOTH, *more)) == 2
            error = capsys.readouterr().err
            assert named in error and error.count("eval.py: ") == 1 and "Traceback" not in error
    assert (tmp_path / "a" / "results.jsonl").read_bytes() == before


def test_a_folder_can_be_given_more_trials_but_not_fewer(tmp_path):
    folder = folder_of(tmp_path / "a", [[1, 0], [0, 0]], void=[(1, 1)])
    run = json.loads((folder / "run.json").read_text())
    assert claim(folder, run | {"trials": 3}) == {(0, 0): None, (0, 1): None, (1, 0): None, (1, 1): 1}
    results = load_results(folder)
    assert (results.run["trials"], results.expected, len(results.records)) == (3, 6, 4)
    with pytest.raises(ResultsError, match="trials is 3 there, 2 here"):
        claim(folder, run)
    with pytest.raises(ResultsError, match="has 4 of 6 dialogues"):
        complete(folder)


def test_a_model_that_has_moved_goes_on_for_its_weights_tell_what_it_is(tmp_path):
    run = json.loads((folder_of(tmp_path / "a", [[1, 0]]) / "run.json").read_text()) | {"weights": "1"}
    (tmp_path / "a/run.json").write_text(json.dumps(run))
    assert claim(tmp_path / "a", run | {"model": "elsewhere"})
    with pytest.raises(ResultsError, match="weights is 1 there, 2 here"):
        claim(tmp_path / "a", run | {"weights": "2"})


def test_what_rl_began_from_is_of_no_arm_and_a_name_at_an_endpoint_of_no_run(tmp_path, monkeypatch):
    options = {"method": "grpo", "lam": 0.0, "control": "none", "seed": 3, "steps": 60, "model": "tiny", "env": "d",
               "simulator": "scripted"}
    (tmp_path / "config.json").write_text(json.dumps(options))
    assert training_of(tmp_path / "model")["method"] == "grpo" and training_of(tmp_path / "sft")["method"] == "sft"
    (tmp_path / "expert").mkdir()
    monkeypatch.chdir(tmp_path)  # where "expert" would be the model of that run
    with FakeUser(by_expert) as server:
        assert main(monkeypatch, *command(server, tmp_path / "r", "--env", "mini:retail")) == 0
    assert load_results(tmp_path / "r").run["training"] == {}


def test_no_task_is_called_unseen_where_only_a_part_of_the_training_tasks_is_known(tmp_path):
    part, whole = (E.show(load_results(folder_of(tmp_path / name, [[1, 0], [1, 1]], seed=seed)))
                   for name, seed in (("part", None), ("whole", 0)))  # of both, task 0 is known to be trained on
    assert "it is not known which tasks this model was trained on" in part and "unseen tasks" not in part
    assert "the 1 unseen tasks" in whole and "not known" not in whole


def test_the_model_of_a_run_that_was_stopped_is_named_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, steps in (("x/1", 17), ("x/2", 60)):
        run = json.loads((folder_of(tmp_path / name, [[1, 0]]) / "run.json").read_text())
        (tmp_path / name / "run.json").write_text(json.dumps(run | {"training": {
            "method": "faca", "seed": steps, "steps": steps, "of": 60}}))
    assert "the model is of step 17 of 60 of its run" in E.show(load_results("x/1"))
    assert "of its run" not in E.show(load_results("x/2"))
    assert "unfinished: the model of x/1 is of step 17 of 60" in (text := seed_table(["x/*"])) and "x/2 is" not in text


def test_results_that_were_decoded_otherwise_are_not_paired(tmp_path):
    a, b, c = (load_results(folder_of(tmp_path / name, [[1, 1], [1, 0]])) for name in "abc")
    b.run["temperature"], c.run["thinking"] = 0.0, True
    for other, named in ((b, r"temperature: 1.0 \| 0.0"), (c, r"thinking: False \| True")):
        with pytest.raises(ResultsError, match=named):
            E.compare(a, other)
        assert "differs: " in E.compare(a, other, anyway=True)


def test_what_is_no_result_is_named_in_one_line(evaluated, tmp_path, monkeypatch, capsys):
    good, run, rows = evaluated[0] / "a", tmp_path / "run", plain(evaluated[0] / "a")
    (run / "model").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    assert main(monkeypatch, "run", "--model", run, "--out", tmp_path / "out") == 2 and not (tmp_path / "out").exists()
    assert f"it is a run folder of train.py; its model is '{run / 'model'}'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    cases = [(tmp_path / "none", "no folder"), (tmp_path / "empty", "no folder of results"),
             (run, "eval.py run --model")]

    def damaged(name, **files):
        shutil.copytree(good, tmp_path / name)
        for file, content in files.items():
            (tmp_path / name / {"run": "run.json", "results": "results.jsonl"}[file]).write_text(content)
        return tmp_path / name

    lines = [json.dumps(row) + "\n" for row in rows]
    cases += [(damaged("foreign", run='{"a": 1}'), "run.json is not what"), (damaged("text", run="x"), "can't be read"),
              (damaged("twice", results="".join([*lines, lines[0]])), "a second result"),
              (damaged("cut", results="".join([lines[0][:50] + "\n", *lines])), "line 1 is not JSON"),
              (damaged("other", results='{"a": 1}\n'), "line 1 is no result"),
              (damaged("few", results="".join(lines[:5])), f"has 5 of {len(lines)} dialogues"),
              (damaged("torn", results="".join(lines)[:-9]), f"has {len(lines) - 1} of {len(lines)} dialogues")]
    for folder, named in cases:
        for words in (("show", folder), ("compare", folder, good), ("compare", good, folder), ("table", folder)):
            assert main(monkeypatch, *words) == 2, folder
            error = capsys.readouterr().err
            known = "no folder matches" if words[0] == "table" and not folder.exists() else named
            assert known in error and error.count("\n") == 1, (words, error)


def test_two_processes_do_not_share_a_folder(evaluated, tmp_path, monkeypatch, capsys):
    from extras.run import lock
    (tmp_path / "a").mkdir()
    held = lock(tmp_path / "a")
    with FakeUser(by_expert) as server:
        assert main(monkeypatch, *command(server, tmp_path / "a")) == 2
    assert "another process is at work in it" in capsys.readouterr().err
    held.close()


def test_the_tasks_of_other_code_are_not_replayed(evaluated, tmp_path, monkeypatch, capsys):
    shutil.copytree(evaluated[0] / "a", tmp_path / "a")
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    next(iter(run["tasks"].values()))["digest"] = digest(load_tasks("mini:retail", "train")[0])
    (tmp_path / "a" / "run.json").write_text(json.dumps(run))
    assert main(monkeypatch, "rescore", tmp_path / "a") == 2
    assert "are not those of" in capsys.readouterr().err


def test_a_result_is_a_rollout_that_the_viewer_shows_without_its_tokens():
    record = R.Rollout("d/0", "d", 0, 0, 0, tokens=[1], segment=[0], logprobs=[0.0], strategies=["close"],
                       reactions=[1], advantage=[0.5], reward=1.0, stop="user_closed")
    result = kept(record, began="x", ended="y", user="u", reason="")
    assert (result.tokens, result.segment, result.logprobs, result.advantage) == ([], [], [], [])
    assert (result.reward, result.strategies, result.solved, result.user) == (1.0, ["close"], True, "u")
