"""extras/audit.py, labeller.py, alarm.py: figures computed by hand, bad input, the labeller on loopback, the alarm."""

import json
import random
import shutil
import signal

import pytest
import torch.distributed as dist
from fake_user import Answer, FakeUser
from hypothesis import given
from hypothesis import strategies as st

import extras.run
import train
from extras.alarm import proxy_alarm, rise
from extras.audit import AuditError, audit, interval, pearson, thirds
from extras.endpoint import Endpoint
from extras.labeller import kappa, visible
from extras.show import save_rollouts
from faca import REACTION, reaction_of
from rollout import Rollout
from simulator import STRATEGIES, USER_PROMPT

SECRET = "my password is hunter2"


def rollout(group, k, reward, *labels, stop="", end=False):
    """A dialogue in which user turn q + 1 says "uQ", its labels as given, the last one ending it or not."""
    said = [{"role": "system", "content": SECRET}, {"role": "user", "content": "good day"}]
    private = [{"turn": 0, "strategy": "reveal_piece"}]
    for q, label in enumerate(labels):
        said += [{"role": "assistant", "content": "hidden words", "segment": q, "tool_calls": [{"malformed": "f"}]},
                 {"role": "tool", "content": SECRET}, {"role": "assistant", "content": f"a{q}", "segment": q}]
        if label:
            said.append({"role": "user", "content": f"u{q}"})
            private += [{"turn": q + 1, "tool": "look", "arguments": {}, "result": SECRET},
                        {"turn": q + 1, "strategy": label} | ({"end": "stop"} if end and q + 1 == len(labels) else {})]
    reactions = [None if z is None else reaction_of(z) for z in labels]
    return Rollout("t", "mini:retail", group, k, 0, strategies=list(labels), reactions=reactions, reward=reward,
                   stop=stop or "user_closed", messages=said, private=private)


def row(step, success=0.5, positive=0.7, **more):
    return {"phase": "rl", "step": step, "success": success, "positive_share": positive, "coverage": 0.5,
            "segments": 10, "groups_correct": 1, "groups_wrong": 0, "groups_mixed": 3, "process_share": 0.25} | more


STEP = [  # one group with a winner; one without
    rollout(0, 0, 1.0, "reveal_piece", "close", end=True), rollout(0, 1, 0.0, "be_vague", "confirm"),
    rollout(0, 2, 0.0, "ask_clarification", None, stop="max_messages"),
    rollout(1, 0, 0.0, "reveal_piece", "change_mind", "nonsense"), rollout(1, 1, 0.0, "confirm", "confirm", None),
    rollout(1, 2, 0.0, "close", stop="void_user")]


@pytest.fixture
def folder(tmp_path):
    """A run of three equal steps, by hand."""
    (tmp_path / "rollouts").mkdir()
    for step in range(3):
        save_rollouts(tmp_path / "rollouts" / f"step-0000{step}.jsonl", STEP)
    shutil.copy(tmp_path / "rollouts/step-00000.jsonl", tmp_path / "rollouts/step-00003-unfinished.jsonl")
    write_metrics(tmp_path, [{"phase": "held_out", "at": "before"}, row(0), row(1, segments=30, coverage=0.9),
                             row(2, process_share=0.75, groups_wrong=4, groups_mixed=0)])
    (tmp_path / "config.json").write_text('{"simulator": "scripted"}')
    return tmp_path


def write_metrics(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def cells(page, name, nth=0):
    """What stands after the name in the nth line, without its indent, that begins with it."""
    return [line.strip()[len(name):].split() for line in page.splitlines() if line.strip().startswith(name)][nth]


# ------------------------------------------------------------------------------------------------------ statistics


def test_correlation_by_hand_and_undefined_where_one_side_is_constant():
    assert pearson([1, 1, -1, -1], [1, 0, 0, 0]) == pytest.approx(2 / 12 ** 0.5)  # phi of the table 1 1 / 0 2
    assert pearson([0.1, 0.1, 0.1], [0, 1, 0]) is None and pearson([], []) is None and pearson([1.0], [1.0]) is None
    assert interval(0.5, 103) == pytest.approx((0.3393, 0.6323), abs=1e-4)  # tanh(0.5493 -+ 0.196)
    assert interval(0.5, 3) is None and interval(1.0, 50) is None


def test_kappa_by_hand():
    first, second = ["y"] * 25 + ["n"] * 25, ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert kappa(first, second) == pytest.approx((0.4, (0.7 * 0.3 / 50) ** 0.5 / 0.5))  # agree 35/50, by chance 1/2
    # three labels: agree 3 of 5; chance (2*1 + 2*2 + 1*2) / 25 = 8/25; (15 - 8) / (25 - 8)
    assert kappa([1, 1, 0, 0, -1], [1, 0, 0, -1, -1])[0] == pytest.approx(7 / 17)
    assert kappa([1, 1], [1, 1]) is None and kappa([], []) is None
    assert kappa([1, 1, 1], [0, 0, 0])[0] == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), max_size=30))
def test_kappa_does_not_know_which_labeller_is_first_and_is_1_for_equal_ones(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assert kappa(first, second) == kappa(second, first)
    assert (kappa(first, first) or (1.0,))[0] == 1.0
    assert (kappa(first, second) or (0.0,))[0] <= 1.0


def test_thirds_are_as_equal_as_can_be_and_named_by_their_steps():
    assert thirds(range(120)) == {"0-39": range(40), "40-79": range(40, 80), "80-119": range(80, 120)}
    assert list(thirds([4, 0, 1, 2])) == ["0-0", "1-1", "2-4"] and thirds([0, 1]) == {}


# -------------------------------------------------------------------------------------------------------- the page


def test_labels_and_reactions_before_a_failure_by_hand(folder):
    page = audit(folder, None, 200, 0)
    # turn 1: reveal, vague, ask, reveal, confirm; turn 2: close, confirm, change, confirm; turn 3: nonsense
    assert cells(page, "reveal_piece (+1)") == ["40.0%", "0.0%", "0.0%", "-", *["20.0%"] * 4]
    assert cells(page, "confirm (+1)") == ["20.0%", "50.0%", "0.0%", "-", *["30.0%"] * 4]
    assert cells(page, "invalid (0)") == ["0.0%", "0.0%", "100.0%", "-", *["10.0%"] * 4]
    assert cells(page, "all of +1") == ["60.0%", "75.0%", "0.0%", "-", *["60.0%"] * 4]
    assert cells(page, "user turns") == ["15", "12", "3", "0", "30", "10", "10", "10"]
    assert cells(page, "turns with +1: those in failed rollouts") == ["66.7%"] * 4  # all but reveal, close of (0, 0)
    assert [cells(page, label) for label in ("confirm  ", "close  ", "reveal_piece  ")] == [
        ["100.0%"] * 4, ["0.0%"] * 4, ["50.0%"] * 4]
    assert cells(page, "any turns, for comparison: those in failed rollouts") == ["80.0%"] * 4
    assert cells(page, "failed rollouts: those whose last reaction was +1") == ["50.0%"] * 4  # of 4, two on confirm
    assert cells(page, "confirm  ", 1) == ["50.0%"] * 4 and cells(page, "close  ", 1) == ["0.0%"] * 4
    assert cells(page, "won rollouts: those whose last reaction was -1") == ["0.0%"] * 4
    assert cells(page, "rollouts: those that failed") == ["80.0%"] * 4
    assert "invalid labels (missing, unknown, malformed; reaction 0): 3, 10.0% of turns" in page
    assert "after retries): 3 (void_user 3)" in page and "rollouts: 15 and 3 void ones" in page


def test_reaction_against_reward_and_lead_by_hand(folder):
    page = audit(folder, None, 200, 0)
    # turn 1: f = 1, 0, -1, 1, 1 against R = 1, 0, 0, 0, 0: cov .6, var f 3.2, var R .8: r = .6 / sqrt(2.56) = .375
    assert cells(page, "turn 1 ", 1)[:2] == ["15", "+0.37"]
    assert cells(page, "turn 2 ")[:2] == ["12", "+0.33"]  # 1, 1, -1, 1 against 1, 0, 0, 0: cov .5, .75 * 3
    assert cells(page, "turn 3-4")[:3] == ["3", "-", "-"] and cells(page, "turn 5+")[:2] == ["0", "-"]
    # the winner's turn 1 (+1) leads both 0 and -1; its turn 2 ties: 1, 0, and 2/3 over the three pairs; 3 equal groups
    assert cells(page, "turn 1 ", 1)[-3:] == ["3", "+1.00", "0.00"]
    assert cells(page, "turn 2 ")[-3:] == ["3", "+0.00", "0.00"]
    assert cells(page, "all turns ")[-3:] == ["3", "+0.67", "0.00"]
    assert cells(page, "all but the last")[-3:] == ["3", "+1.00", "0.00"]  # of (0, 0) and (0, 1): turn 1
    assert cells(page, "all turns, steps 1-1")[-3:] == ["1", "+0.67", "-"]
    assert "reactions point to the rollouts that win (lead +0.67 +- 0.00" in page


def test_a_proxy_that_points_to_the_losers_is_called_so(folder):
    for path in (folder / "rollouts").glob("step-*.jsonl"):
        save_rollouts(path, [rollout(0, 0, 1.0, "challenge_solution"), rollout(0, 1, 0.0, "confirm")])
    page = audit(folder, None, 200, 0)
    assert "reactions point to the rollouts that lose (lead -1.00 +- 0.00" in page
    assert cells(page, "turn 1 ", 1)[:2] == ["6", "-1.00"]


def test_credit_by_hand(folder):
    page = audit(folder, None, 200, 0)
    assert cells(page, "coverage: segments whose A^p is not 0 [86.16% -> 82.50%]") == [  # (5 + 27 + 5) / 50
        "74.0%", "50.0%", "90.0%", "50.0%"]
    assert cells(page, "groups with equal rewards [39.27% 8B, 31.04% 14B]") == [  # 1 of 4, 1 of 4, 5 of 5: 7 of 13
        "53.8%", "25.0%", "25.0%", "100.0%"]
    assert cells(page, "process share of L1, mean over steps [36.00%, 33.79%]") == ["41.7%", "25.0%", "25.0%", "75.0%"]
    assert cells(page, "steps where it is above 50% [6 and 1 of 120]") == ["1", "0", "0", "1"]


def test_what_the_endpoint_had_to_be_asked_is_summed(folder):
    more = {"simulator/requests": 50, "simulator/asked_again": 2, "simulator/strategy_in_text": 1, "void_retried": 3,
            "simulator/model_changes": 1, "simulator/model": "m1, m2"}
    write_metrics(folder, [row(step, **more) for step in range(3)])
    page = audit(folder, None, 200, 0)
    assert "(asked_again): 6 of 150 requests" in page and "(strategy_in_text): 3\n" in page
    assert "models that answered: m1, m2; changes: 3" in page and "played again: 9\n" in page


def test_the_page_is_one_page_and_tells_nothing_that_was_said(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    page = audit(folder.relative_to(folder.parent), None, 200, 0)
    lines = page.splitlines()
    assert len(lines) < 80 and max(map(len, lines)) <= 100
    assert not any(word in page for word in (SECRET, "hidden words", "good day", "u1"))


def test_results_of_an_evaluation_are_audited_without_steps(folder, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    lines = (folder / "rollouts" / "step-00000.jsonl").read_text().splitlines()
    timed = [json.dumps(json.loads(line) | {"began": 1.0, "ended": 2.0}) + "\n" for line in lines]
    (results / "results.jsonl").write_text("".join(timed))
    (results / "run.json").write_text('{"simulator": "loopback-user"}')
    page = audit(results, None, 200, 0)
    assert "user: loopback-user" in page and "no row of RL" in page
    assert cells(page, "rollouts: those that failed") == ["80.0%"] and cells(page, "user turns")[-1] == "10"


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_torn_last_line_is_accepted_and_counted(folder):
    for name in ("metrics.jsonl", "rollouts/step-00002.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text + text.splitlines()[-1][:30])
    page = audit(folder, None, 200, 0)
    assert "cut off, left out: 2" in page and cells(page, "user turns")[4] == "30"


@pytest.mark.parametrize("name, text, told", [
    ("rollouts/step-00001.jsonl", '{"a": 1}\n', "no rollout"), ("rollouts/step-00001.jsonl", "\n", "not JSON"),
    ("rollouts/step-00001.jsonl", "", "holds no rollout"), ("metrics.jsonl", "[1]\n", "line 1 is no row of metrics"),
    ("metrics.jsonl", '{"phase"\n{"phase": "sft"}\n', "line 1 is no row"), ("metrics.jsonl", None, "metrics.jsonl"),
    ("metrics.jsonl", '{"phase": "rl", "step": 0, "success": "high"}\n', "success"),
    ("config.json", "{", "config.json"), ("config.json", "[]", "no JSON object")])
def test_a_damaged_or_foreign_file_is_one_line_that_names_it(folder, name, text, told):
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(AuditError, match=told) as error:
        audit(folder, None, 200, 0)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize("change, told", [({"reactions": [1, 0]}, "Table 1"), ({"reward": float("nan")}, "no number")])
def test_a_record_that_contradicts_itself_is_refused(folder, change, told):
    record = rollout(3, 1, 1.0, "confirm", "challenge_solution")
    save_rollouts(folder / "rollouts" / "step-00001.jsonl", [Rollout(**vars(record) | change)])
    with pytest.raises(AuditError, match=f"group 3, rollout 1.*{told}"):
        audit(folder, None, 200, 0)


def test_a_folder_without_rollouts_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(AuditError, match="nothing to audit"):
            audit(path, None, 200, 0)
    (tmp_path / "rollouts").mkdir()
    save_rollouts(tmp_path / "rollouts" / "step-00000.jsonl", [STEP[-1]])
    write_metrics(tmp_path, [row(0)])
    with pytest.raises(AuditError, match="0 rollouts have a result, 1 are void"):
        audit(tmp_path, None, 200, 0)
    save_rollouts(tmp_path / "rollouts" / "step-00000.jsonl", [rollout(0, 0, 0.0, None, stop="empty_message")])
    with pytest.raises(AuditError, match="1 rollouts have a result, .*no segment is followed by a user turn"):
        audit(tmp_path, None, 200, 0)


# ------------------------------------------------------------------------------------------------ the second labeller


def test_the_labeller_is_told_what_the_simulator_was_told_of_each_label():
    assert STRATEGIES in USER_PROMPT
    assert [line.split(":")[0] for line in STRATEGIES.splitlines()] == [f"- {label}" for label in REACTION]


def test_what_the_labeller_sees_is_what_agent_and_user_see_of_each_other():
    assert visible(STEP[0], 0) == "customer: good day\nagent: a0\ncustomer: u0"
    assert visible(STEP[0], 1).endswith("agent: a1\ncustomer: u1\n(The customer ends the conversation here.)")
    with pytest.raises(ValueError, match="segment 1 is missing"):
        visible(STEP[2], 1)
    with pytest.raises(ValueError, match="damaged"):
        visible(Rollout("t", "d", 0, 0, 0, messages=[{"role": "user"}]), 0)


def test_agreement_by_hand_and_what_could_not_be_read(folder):
    for path in (folder / "rollouts").glob("step-*.jsonl"):
        path.unlink()
    labels = ["reveal_piece", "confirm", "confirm", "challenge_solution", "be_vague", "invalid"]
    save_rollouts(folder / "rollouts" / "step-00000.jsonl", [rollout(0, 0, 1.0, *labels)])
    answers = {"u0": "confirm", "u1": " Confirm ", "u2": "be_vague", "u3": "challenge_solution", "u4": "bored"}

    def reply(request, n):
        last = request["messages"][-1]["content"].rpartition("customer: ")[2]
        return json.dumps({"strategy": answers[last]}) if last in answers else '{"ready": true}'

    with FakeUser(reply) as server:
        page = audit(folder, Endpoint("second", server.url), 200, 0)
    asked = [r["messages"][-1]["content"] for r in server.requests[1:]]  # after the endpoint's check
    assert sorted(text[-2:] for text in asked) == ["u0", "u1", "u2", "u3", "u4", "u4"]  # no invalid; u4 again
    for request in server.requests[1:]:
        assert SECRET not in json.dumps(request) and "hidden words" not in json.dumps(request)
        assert STRATEGIES in request["messages"][0]["content"]
    assert "asked about 5 turns" in page and "labels: 4," in page and "unreadable: 1, no answer: 0" in page
    # reveal/confirm, confirm/confirm, confirm/vague, challenge/challenge; chance of labels (0 + 4 + 0 + 1) / 16:
    # (8 - 5) / 11 = .27, error sqrt(.25 / 4) * 16 / 11 = .36; of reactions + + + - against + + 0 -: (3*2 + 1) / 16
    assert cells(page, "the seven labels") == ["4", "4", "50.0%", "+0.27", "0.36"]
    assert cells(page, "reactions -1, 0, +1: what training sees") == ["4", "4", "75.0%", "+0.56", "0.38"]
    assert cells(page, "confirm  ", 2) == ["2", "2", "50.0%", "+0.00", "0.50"]
    assert cells(page, "challenge_solution  ") == ["1", "1", "100.0%", "+1.00", "0.00"]
    assert cells(page, "close  ", 2) == ["0", "0", "100.0%", "-", "-"]
    assert page.splitlines()[-1].endswith("-> be_vague (1)") or page.splitlines()[-1].endswith("-> confirm (1)")
    assert len(page.splitlines()) < 90 and max(map(len, page.splitlines()[1:])) <= 100


def test_the_sample_is_seeded_has_its_size_and_draws_from_all_of_the_run(folder):
    for step in range(3):
        save_rollouts(folder / "rollouts" / f"step-0000{step}.jsonl",
                      [rollout(step, k, 0.0, *["confirm"] * 3) for k in range(9)])

    def sampled(sample, seed):
        with FakeUser(lambda request, n: '{"strategy": "confirm"}') as server:
            audit(folder, Endpoint("second", server.url, concurrency=1), sample, seed)
        return [request["messages"][-1]["content"] for request in server.requests[1:]]

    assert len(sampled(500, 0)) == 81
    assert sampled(20, 0) == sampled(20, 0) and len(sampled(20, 0)) == 20
    assert sampled(20, 0) != sampled(20, 1)


@pytest.mark.parametrize("first", [0, 3])
def test_a_refusal_of_the_labellers_endpoint_is_one_line(folder, first):
    with FakeUser(lambda request, n: Answer(status=402) if n >= first else '{"strategy": "close"}') as server:
        with pytest.raises(AuditError, match="answered 402.*used up") as error:
            audit(folder, Endpoint("second", server.url, concurrency=2), 200, 0)
    assert "\n" not in str(error.value) and len(server.requests) < first + 4


def test_turns_without_an_answer_are_counted(folder):
    with FakeUser(lambda request, n: Answer(body={"no": "completion"}) if n % 2 else '{"strategy": "close"}') as server:
        page = audit(folder, Endpoint("second", server.url), 10, 0)
    assert "labels: 5," in page and "no answer: 5;" in page
    with pytest.raises(AuditError, match="at least 1"):
        audit(folder, Endpoint("second", server.url), 0, 0)


# ------------------------------------------------------------------------------------------------------- the alarm


def noisy(means, spread=0.1):
    """Rows of (success, positive share), `count` of each: mean + spread, mean - spread, in turn."""
    rows = []
    for count, success, positive in means:
        rows += [row(len(rows) + i, success + spread * (-1) ** i, positive + spread * (-1) ** i) for i in range(count)]
    return rows


def test_a_rise_in_standard_errors_by_hand():
    assert rise([0, 1, 0, 1], [1, 2, 1, 2]) == pytest.approx(6 ** 0.5)  # 1 / sqrt(1/3 / 4 + 1/3 / 4)
    assert rise([0.35] * 20, [0.35] * 20) == 0 and rise([0.1] * 20, [0.3] * 20) == float("inf")
    assert rise([0.3] * 20, [0.1] * 20) == -float("inf")


def test_the_alarm_rings_where_success_falls_and_positive_reactions_rise_and_only_there():
    # windows of 20 values mean +- 0.1: the error of a difference is 0.1 sqrt(2 / 19) = 0.0324; 3.5 of them: 0.1135
    assert proxy_alarm(noisy([(20, 0.6, 0.7), (20, 0.48, 0.82)]))
    assert not proxy_alarm(noisy([(20, 0.6, 0.7), (19, 0.48, 0.82)]))
    assert not proxy_alarm(noisy([(20, 0.6, 0.7), (20, 0.49, 0.82)]))
    assert not proxy_alarm(noisy([(20, 0.6, 0.7), (20, 0.48, 0.81)]))
    assert not proxy_alarm(noisy([(20, 0.6, 0.7), (20, 0.48, 0.58)]))
    assert not proxy_alarm(noisy([(20, 0.6, 0.7), (20, 0.72, 0.82)]))
    # against the best steps before, not the first ones or those just before
    rows = noisy([(20, 0.3, 0.7), (20, 0.6, 0.75), (20, 0.53, 0.8), (20, 0.45, 0.9)])
    assert proxy_alarm(rows) and not proxy_alarm(rows[:20] + rows[60:]) and not proxy_alarm(rows[40:])


def test_the_alarm_reads_the_rl_rows_alone():
    rows = noisy([(20, 0.6, 0.7), (20, 0.48, 0.82)])
    mixed = [r for x in rows for r in (x, {"phase": "held_out", "success": 0.0})] + [{"phase": "sft"}]
    assert proxy_alarm(mixed) and not proxy_alarm(mixed[:60])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=40, max_size=45))
def test_the_alarm_never_rings_while_success_or_positive_reactions_go_the_right_way(values):
    rises = sorted(success for success, _ in values)
    falls = sorted((positive for _, positive in values), reverse=True)
    assert not proxy_alarm([row(0, s, p) for s, (_, p) in zip(rises, values, strict=True)])
    assert not proxy_alarm([row(0, s, p) for (s, _), p in zip(values, falls, strict=True)])


def test_noise_alone_rings_in_no_run_of_120_steps_and_a_gamed_proxy_in_all():
    draw = random.Random(0)

    def steps(success, positive):
        return [row(t, draw.gauss(success(t), 0.08), draw.gauss(positive(t), 0.025)) for t in range(120)]

    for _ in range(20):
        rows = steps(lambda t: 0.5, lambda t: 0.75)
        assert not any(proxy_alarm(rows[:n]) for n in range(121))
        assert proxy_alarm(steps(lambda t: 0.6 - 0.2 * t / 120, lambda t: 0.7 + 0.15 * t / 120))


def test_the_page_says_where_it_rings(folder):
    write_metrics(folder, noisy([(20, 0.6, 0.7), (20, 0.3, 0.95), (30, 0.65, 0.7)]))
    page = audit(folder, None, 200, 0)
    rows = noisy([(20, 0.6, 0.7), (20, 0.3, 0.95), (30, 0.65, 0.7)])
    rings = [n - 1 for n in range(71) if proxy_alarm(rows[:n])]
    assert rings[0] == 39 and len(rings) == rings[-1] - 38 < 20
    assert f"It rings at steps 39-{rings[-1]}" in page
    write_metrics(folder, rows[:39])
    assert "takes 40 steps of RL, and there are 39" in audit(folder, None, 200, 0)


def logged(path, rows, before=()):
    """Run.log on a run's rows, without what else a run is."""
    run = extras.run.Run.__new__(extras.run.Run)
    run.rank, run.path, run.rows, run.sinks, run.step = 0, path, list(before), [], 0
    for one in rows:
        run.log(dict(one))
    return run.rows


def test_training_logs_the_alarm_and_says_it_once_each_time_it_turns_on(tmp_path, capsys):
    rows = noisy([(20, 0.6, 0.7), (20, 0.48, 0.82), (2, 0.4, 0.9)])
    rows.insert(41, {"phase": "held_out", "at": "RL step 40", "success": 0.5})
    out = logged(tmp_path, rows)
    assert [r["step"] for r in out if r.get("proxy_alarm")] == [39, 40, 41]
    assert all(r["proxy_alarm"] is False for r in out[:39]) and "proxy_alarm" not in out[41]
    told = capsys.readouterr().err
    assert told.count("WARNING") == 1 and "step 39" in told
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "again").mkdir()
    assert kept == out and logged(tmp_path / "again", rows[40:], before=kept[:40]) == out  # a run that resumes
    assert "WARNING" not in capsys.readouterr().err


def test_a_run_of_train_py_can_be_audited(tmp_path, monkeypatch):
    said = [{"role": role, "content": "Hello."} for role in ("user", "assistant")]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": said, "tools": []}) + "\n")
    flags = ("--env mini:retail --steps 3 --prompts 2 --rollouts 2 --max-messages 3 --sft-steps 1 --save-every 0 "
             f"--data {tmp_path / 'data.jsonl'} --out {tmp_path / 'run'}").split()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.delenv("RANK", raising=False)
    train.start_processes()
    try:
        train.run_all(train.parse_config(flags))
    finally:
        dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["proxy_alarm"] for r in rows if r["phase"] == "rl"] == [False] * 3
    page = audit(tmp_path / "run", None, 200, 0)
    turns = [r["observed"] for r in rows if r["phase"] == "rl"]
    assert cells(page, "user turns")[-4:] == [f"{n:,}" for n in (sum(turns), *turns)]
    positive = cells(page, "all of +1")[-3:]
    assert positive == [f"{r['positive_share']:.1%}" if r["observed"] else "-" for r in rows if r["phase"] == "rl"]
