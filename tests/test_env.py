"""env.py: every task can be won and is not won by accident; a faulty call harms nothing but itself."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env import Call, EnvError, communicated, load_tasks, make_env
from extras.mini import DOMAINS, Retail, Telecom

ROOT = pathlib.Path(__file__).resolve().parent.parent
fixed = settings(deadline=None, derandomize=True, database=None, max_examples=100)
SPLITS = {domain: cls.make_tasks() for domain, cls in DOMAINS.items()}
TASKS = [task for splits in SPLITS.values() for tasks in splits.values() for task in tasks]
TELECOM, RETAIL = SPLITS["mini:telecom"]["train"], SPLITS["mini:retail"]["train"]


def play(env, calls):
    for c in calls:
        assert not env.call(c.name, c.arguments, c.requestor).error
    return env


def says(*texts):
    return [{"role": "assistant", "content": text} for text in texts]


def said(task):
    return says(*[f"Done, the refund is {amount}." for amount in task.communicate])


def wins(task, calls, texts=None):
    return play(make_env(task), calls).reward(said(task) if texts is None else says(*texts))


def wish(want, allowed=True):
    return next(t for t in RETAIL if t.facts["want"] == want and (t.gold[0].name != "refuse") == allowed)


BILLED = next(t for t in TELECOM if t.gold[0].name == "resume_line")
DEVICE = next(t for t in TELECOM if len(t.gold) == 3 and t.gold[0].requestor == "user")
PHONE, OTHER = BILLED.facts["phone"], next(p for p in BILLED.state["lines"] if p != BILLED.facts["phone"])


def test_gold_wins_every_task_and_doing_nothing_none_and_gold_that_fails_is_a_bug():
    assert [wins(task, task.gold) for task in TASKS] == [1.0] * len(TASKS)
    assert [wins(task, []) for task in TASKS] == [0.0] * len(TASKS)
    with pytest.raises(RuntimeError, match="gold call resume_line fails"):
        make_env(dataclasses.replace(BILLED, gold=(Call("resume_line", {"phone": "000"}),))).reward([])


def kind(task):
    """What a task is about, whatever its numbers: all that is broken, or item, wish and state of the order."""
    if task.domain == "mini:telecom":
        return tuple(c.arguments.get("fault", c.name) for c in task.gold)
    order = task.state["orders"][task.facts["order"]]
    return task.facts["item"], task.facts["want"], "old" if order["days"] > 30 else order["status"]


def test_splits_are_what_the_docstring_promises_and_no_kind_of_test_task_is_trained_on():
    assert [len(t) for s in SPLITS.values() for t in s.values()] == [64, 100, 1024, 64, 96, 1024]
    assert len({task.id for task in TASKS}) == len(TASKS)
    assert all(task.id.startswith(f"{task.domain}/{task.split}/") for task in TASKS)
    for splits in SPLITS.values():
        train, test, sft = ([kind(t) for t in splits[name]] for name in ("train", "test", "sft"))
        assert len({*train}) == 64 and not {*train} & {*test} and sft == train * 16
        states = {json.dumps([t.state, t.instructions]) for tasks in splits.values() for t in tasks}
        assert len(states) == sum(len(tasks) for tasks in splits.values())  # other numbers and names each time


def test_every_process_generates_the_same_tasks():
    code = [sys.executable, "-c", "from extras import mini; print([c.make_tasks() for c in mini.DOMAINS.values()])"]
    hashed = os.environ | {"PYTHONHASHSEED": "12"}
    assert subprocess.check_output(code, cwd=ROOT, env=hashed, text=True).strip() == repr([*SPLITS.values()])


@pytest.mark.parametrize("spec, split, names", [
    ("mini:telekom", "train", ["mini:telekom", "mini:telecom", "mini:retail"]), ("", "train", ["mini:telecom"]),
    ("mini:retail/dev", "train", ["dev", "train (64 tasks)", "test (96 tasks)", "sft (1024 tasks)"]),
    ("mini:telecom", "dev", ["test (100 tasks)"]), ("mini:retail,mini:retail/train", "train", ["twice"])])
def test_tasks_load_by_name_and_a_name_that_is_not_there_is_one_line_that_says_what_is(spec, split, names):
    with pytest.raises(EnvError) as e:
        load_tasks(spec, split)
    assert "\n" not in str(e.value) and all(name in str(e.value) for name in names)
    assert load_tasks("mini:retail/test, mini:telecom", "train") == SPLITS["mini:retail"]["test"] + TELECOM


def test_another_path_to_the_same_state_wins():
    idle = next(f for f in Telecom.FAULTS if not DEVICE.state["device"][f])
    looks = [Call("check_status_bar", {}, "user"), Call("try_internet", {}, "user"),
             Call("do_step", {"fault": idle}, "user"), Call("get_line", {"phone": DEVICE.facts["phone"]})]
    assert wins(DEVICE, [*looks, *reversed(DEVICE.gold), *looks]) == 1.0
    task = wish("address")
    spelled = {"order": task.facts["order"], "address": f" {task.facts['detail'].upper().replace(' ', '  ')} "}
    assert wins(task, [Call("change_address", spelled)]) == 1.0


@pytest.mark.parametrize("name, phone", [("refuel_data", PHONE), ("resume_line", PHONE), ("enable_roaming", OTHER)])
def test_a_needless_billed_change_loses(name, phone):
    extra = Call(name, {"phone": phone})
    assert wins(BILLED, [*BILLED.gold, extra]) == wins(BILLED, [extra, *BILLED.gold]) == 0.0
    assert wins(BILLED, BILLED.gold[1:]) == wins(BILLED, BILLED.gold[:-1]) == 0.0


@pytest.mark.parametrize("want", Retail.RULES)
def test_a_wrong_or_repeated_write_loses(want):
    task = wish(want)
    name, arguments = task.gold[0].name, task.gold[0].arguments
    other = next(o for o in task.state["orders"] if o != task.facts["order"])
    size = "small" if task.facts["detail"] != "small" else "large"
    wrong = {"return": {"order": other}, "exchange": {"size": size}, "address": {"address": "1 Wrong Street"}}[want]
    refusal = Call("refuse", {"order": task.facts["order"], "reason": "too late"})
    for calls in ([Call(name, arguments | wrong)], [*task.gold, *task.gold], [*task.gold, refusal], [refusal]):
        assert wins(task, calls) == 0.0


def test_a_refusal_has_to_be_on_record_with_its_reason():
    for task in (wish(want, allowed=False) for want in Retail.RULES):
        order, reason = task.gold[0].arguments.values()
        assert wins(task, [], [f"Sorry, I refuse, this is {reason}."]) == 0.0
        for put in ("too late", "not delivered", "already delivered"):
            assert wins(task, [Call("refuse", {"order": order, "reason": put})], []) == (put == reason)


def test_a_return_needs_the_refund_said():
    task = wish("return")
    price = int(task.communicate[0])
    assert wins(task, task.gold, [f"You get ${price}.00 back.", "Bye."]) == 1.0
    for texts in ([], ["Done."], [f"The refund is {price + 1}."], [f"The refund is 1{price}."]):
        assert wins(task, task.gold, texts) == 0.0


@pytest.mark.parametrize("needed, texts, told", [
    (["10"], ["100"], False), (["10"], ["It is 10."], True), (["10"], ["$10.00"], True), (["10"], ["10.5"], False),
    (["1000"], ["1,000 dollars"], True), (["1,000"], ["1000"], True), (["1234567"], ["1,234,567"], True),
    (["45"], ["12,45"], True), (["1245"], ["12,45"], False), (["1", "2"], ["1", "2"], True), (["1", "2"], ["1"], False),
    (["Too Late"], ["too late"], True), (["A, b"], ["a, b."], True), (["x"], [], False), ([], [], True)])
def test_numbers_are_told_as_numbers_and_words_whatever_their_case(needed, texts, told):
    assert communicated(needed, texts) is told


@fixed
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_number_is_told_by_itself_alone(want, other):
    assert communicated([str(want)], [f"Pay ${want:,}, please."])
    assert communicated([str(want)], [f"Pay {other}."]) == (want == other)


SWAP = wish("exchange")
FAULTS = [
    *[(BILLED, x, {"phone": PHONE}, "assistant", "there is no tool") for x in ("resume", "", "__init__", "state_hash")],
    (BILLED, "do_step", {"fault": "vpn"}, "assistant", "only the user"),
    (BILLED, "resume_line", {}, "user", "only the assistant"), (BILLED, "resume_line", {}, "assistant", "is missing"),
    *[(BILLED, "resume_line", {"phone": PHONE, x: "x"}, "assistant", f"no argument '{x}'") for x in ("now", "self")],
    *[(BILLED, "resume_line", {"phone": x}, "assistant", "must be a string") for x in (int(PHONE), None, [PHONE], {})],
    *[(BILLED, "resume_line", x, "assistant", "must be a JSON object") for x in (None, [PHONE], PHONE, 3)],
    (BILLED, "resume_line", {"phone": "000"}, "assistant", "no line 000"),
    (BILLED, "do_step", {"fault": "rain"}, "user", "must be one of airplane_mode, "),
    (SWAP, "exchange_order", SWAP.gold[0].arguments | {"size": "Huge"}, "assistant", "must be one of small, "),
    (SWAP, "return_order", {"order": "000"}, "assistant", "no order 000")]


@pytest.mark.parametrize("task, name, arguments, requestor, message", FAULTS)
def test_a_faulty_call_is_an_error_that_leaves_the_world_as_it_was(task, name, arguments, requestor, message):
    env, before = make_env(task), make_env(task).state_hash()
    result = env.call(name, arguments, requestor)
    assert result.error and message in result.content and "\n" not in result.content
    assert env.state_hash() == before
    assert play(env, task.gold).reward(said(task)) == 1.0


anything = st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
NAMES = [name for cls in DOMAINS.values() for name in cls.parameters]


@fixed
@given(st.sampled_from([BILLED, SWAP]), st.sampled_from(NAMES) | st.text(),
       anything | st.dictionaries(st.sampled_from(["phone", "order", "size", "fault"]), anything),
       st.sampled_from(["assistant", "user"]))
def test_any_call_answers_and_writes_only_where_it_succeeds(task, name, arguments, requestor):
    env, before = make_env(task), make_env(task).state_hash()
    result = env.call(name, arguments, requestor)
    assert isinstance(result.content, str) and (env.state_hash() == before or not result.error)


def test_environments_of_a_task_share_nothing_and_reward_changes_nothing():
    for task in (BILLED, DEVICE, wish("return"), wish("address", allowed=False)):
        before, one, other = repr(task), make_env(task), make_env(task)
        hashed = other.state_hash()
        assert play(one, task.gold).state_hash() != hashed
        assert [one.reward(said(task)) for _ in range(2)] + [other.reward(said(task))] == [1.0, 1.0, 0.0]
        assert (other.state_hash(), repr(task)) == (hashed, before)
        assert play(other, task.gold).state_hash() == one.state_hash()


def test_tools_are_valid_function_schemas():
    for cls in DOMAINS.values():
        tools = cls.tools + cls.user_tools
        assert json.loads(json.dumps(tools)) == tools and all(t["type"] == "function" for t in tools)
        for function in (t["function"] for t in tools):
            arguments = function["parameters"]["properties"]
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", function["name"]) and function["description"].strip()
            assert function["parameters"] == {"type": "object", "properties": arguments, "required": [*arguments]}
            assert all(a["type"] == "string" and {*a} <= {"type", "enum"} for a in arguments.values())
    assert Retail.parameters["exchange_order"][1]["properties"] == {
        "order": {"type": "string"}, "size": {"type": "string", "enum": ["small", "medium", "large"]}}


def test_policy_and_tools_take_less_than_500_tokens_of_the_tiny_tokenizer():
    from extras.tiny import make_tokenizer
    from rollout import Chat
    spelling = make_tokenizer()
    for cls in DOMAINS.values():
        prompt = [{"role": "system", "content": cls.policy}], cls.tools
        text = spelling.decode(Chat(spelling).open(*prompt))
        words = {w for w, _ in spelling.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) if len(w) > 1}
        assert cls.policy in text and 100 < len(Chat(make_tokenizer(sorted(words))).open(*prompt)) < 500
