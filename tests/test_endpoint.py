"""The user that a model plays, over a real loopback server: what it is sent, what the agent sees, what goes wrong."""

import asyncio
import contextlib
import json
import logging
import re
import signal
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_user import Answer, FakeUser, by_rule
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollout as R
from env import Call, load_tasks
from eval import figures
from extras.endpoint import KEY, Endpoint, EndpointError, endpoint_of
from extras.judge import judged
from extras.mini import DOMAINS, Telecom
from extras.results import load_results
from extras.show import load_rollouts
from extras.tiny import call, make_tokenizer
from faca import REACTION
from sampler import Sample
from simulator import ENDS, GREETING, ModelUser, SimulatorError, UserFault, extract_turn

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = make_tokenizer()
CHAT = R.Chat(TOKENIZER)
IM_END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SECRET = "sk-CANARY-7781"
TELECOM, RETAIL = load_tasks("mini:telecom", "train")[0], load_tasks("mini:retail", "train")[0]
PHONE = TELECOM.facts["phone"]
LOOK = ("check_status_bar", {})


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """A key to be kept secret, no proxy before the loopback, and openai's own growing waits cut short."""
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)  # 0.5 s there: their lengths are not ours


def by_rule_text(request, n):
    """fake_user's rule without its tools."""
    return by_rule({"messages": request["messages"]}, n)


def says(utterance, strategy="confirm", **more):
    return json.dumps({"strategy": strategy, "utterance": utterance} | more)


def answers(*prepared):
    """The prepared answers in order, the last of them for ever."""
    return lambda request, n: prepared[min(n, len(prepared) - 1)]


@contextlib.contextmanager
def served(reply, retries=2, **options):
    """A server, and an endpoint for it."""
    with FakeUser(reply) as server:
        endpoint = Endpoint("user-1", server.url, **options)
        endpoint.retries = retries
        yield server, endpoint


class Stub:
    """An agent that says its texts, the last of them for ever, in each dialogue anew; what it was asked is kept."""

    def __init__(self, *texts):
        self.texts, self.asked = texts, []

    async def sample(self, ids, max_tokens, seed):
        self.asked.append(list(ids))
        place = TOKENIZER.decode(ids).count("<|im_start|>assistant") - 1
        said = TOKENIZER.encode(self.texts[min(place, len(self.texts) - 1)])[:max_tokens - 1] + [IM_END]
        return Sample(said, [-1.0] * len(said), "end", 0)


def play(endpoint, *texts, task=TELECOM, **caps):
    """-> the record of one dialogue, its agent, and all text that agent or trainer could read of it."""
    stub = Stub(*texts)

    async def go():
        async with endpoint:
            return await R.Dialogue(task, 0, 0, 7, stub, CHAT, R.Caps(**caps), endpoint).play()

    record = asyncio.run(go())
    read = [TOKENIZER.decode(ids) for ids in [*stub.asked, record.tokens]]
    return record, stub, "\n".join([*read, json.dumps(record.messages)])


def one(endpoint, coroutine):
    """The result of coroutine() while the endpoint is open."""
    async def go():
        async with endpoint:
            return await coroutine()
    return asyncio.run(go())


def ask(endpoint):
    return one(endpoint, lambda: endpoint.chat([{"role": "user", "content": f"json {SECRET}-scenario"}])).content


def groups(endpoint, dialogues=1, *texts, task=TELECOM, **options):
    return R.play_groups([(0, task)], dialogues, (0, 0), Stub(*texts or ["Hm?"]), CHAT, R.Caps(), endpoint=endpoint,
                         **options)


def turns_of(request):
    """How many user turns the conversation of a request holds already."""
    return sum(m["role"] == "assistant" and "tool_calls" not in m for m in request["messages"])


# ------------------------------------------------------------------------------------------- what the model is sent


def test_a_turn_is_one_request_for_a_json_object_with_the_domains_tools_and_the_extra_body():
    for task, tools in ((TELECOM, ["check_status_bar", "try_internet", "do_step"]), (RETAIL, None)):
        with served(answers(says("Hello."), says("OK."), says("Bye. ###STOP###", "close")),
                    extra='{"thinking": {"type": "disabled"}}') as (server, endpoint):
            record, _, read = play(endpoint, "One.", "Two.", task=task)
        assert (len(server.requests), record.stop, record.strategies) == (3, "user_closed", ["confirm", "close"])
        for request, headers in zip(server.requests, server.headers, strict=True):
            assert (request["model"], request["response_format"]) == ("user-1", {"type": "json_object"})
            assert request["thinking"] == {"type": "disabled"} and headers["authorization"] == f"Bearer {SECRET}"
            assert [t["function"]["name"] for t in request["tools"]] == tools if tools else "tools" not in request
            prompt = request["messages"][0]["content"]
            assert "json" in prompt and prompt.endswith(task.instructions)  # the API refuses json_object without
            assert all(marker in prompt for marker in ENDS.values()) and all(label in prompt for label in REACTION)
        assert [m["content"] for m in server.requests[2]["messages"][1:]] == [
            GREETING, says("Hello."), "One.", says("OK."), "Two."]
        assert endpoint.answered == {"user-1": "user-1"} and endpoint.tally["requests"] == 3
        assert endpoint.tally["prompt_tokens"] > 1000 and endpoint.tally["completion_tokens"] > 30
        assert not [s for s in task.instructions.split(". ") if s in read] and GREETING not in read


def test_the_user_sees_visible_text_only_and_keeps_its_tools_and_strategies_to_itself():
    with served(answers(says("Hello."), Answer("Let me look.", calls=[LOOK]), says("There.", "reveal_piece"),
                        says("Bye. ###STOP###", "close"))) as (server, endpoint):
        record, _, read = play(endpoint, "<think>PLAN</think>" + call("get_line", phone=PHONE),
                               "<think>PLAN</think>Look.", "<think>PLAN</think>Well?")
    assert record.strategies == ["reveal_piece", "close"] and len(server.requests) == 4
    sent = json.dumps([request["messages"] for request in server.requests])
    assert not [word for word in ("PLAN", "think", "tool_call>", "get_line", "billed", "roaming") if word in sent]
    tool = next(m for m in server.requests[2]["messages"] if m["role"] == "tool")
    assert server.requests[2]["messages"][-2]["tool_calls"][0]["id"] == tool["tool_call_id"]
    assert json.loads(tool["content"]).keys() == {"shows"}
    private = [p for p in record.private if "tool" in p]
    assert private == [{"turn": 1, "tool": LOOK[0], "arguments": {}, "result": tool["content"]}]
    assert not [word for word in ("check_status_bar", tool["content"], "Let me look", "reveal_piece") if word in read]
    assert says("There.", "reveal_piece") in [m["content"] for m in server.requests[3]["messages"]]


# ------------------------------------------------------------------------------------------------- the user's tools


def results(request):
    return [m["content"] for m in request["messages"] if m["role"] == "tool"]


def test_ten_tool_calls_a_turn_are_made_and_then_a_text_is_asked_for():
    many = Answer(calls=[LOOK] * 7)
    with served(answers(says("Hello."), many, many, says("It shows nothing."), many, says("Bye.###STOP###"))
                ) as (server, endpoint):
        record, _, _ = play(endpoint, "Look.")
    assert [len(results(r)) for r in server.requests] == [0, 0, 7, 10, 10, 17]  # the next turn has ten of its own
    assert [r["tool_choice"] for r in server.requests] == ["auto", "auto", "auto", "none", "auto", "auto"]
    assert (record.stop, len(record.private)) == ("user_left", 3 + 17)
    for request in server.requests:  # as the API wants it: each call has its result
        calls = [c["id"] for m in request["messages"] for c in m.get("tool_calls", ())]
        assert calls == [m["tool_call_id"] for m in request["messages"] if m["role"] == "tool"]


def test_a_user_that_calls_for_ever_is_void():
    with served(lambda request, n: Answer(calls=[LOOK]) if n else says("Hello.")) as (server, endpoint):
        record, _, _ = play(endpoint, "Look.")
    assert (record.stop, record.reward, record.strategies) == ("void_user", 0.0, [None])
    assert len(server.requests) == 1 + 10 + 1 + 1  # the last: asked once more for a text


def test_what_is_wrong_with_a_users_call_goes_back_to_it_and_counts_as_its_own():
    wrong = [("do_step", '{"fault": '), ("fly", {}), ("do_step", {"fault": "hunger"}), ("get_line", {"phone": PHONE}),
             ("do_step", "[1]"), LOOK]
    with served(answers(says("Hello."), Answer(calls=wrong), says("Hm. ###STOP###", "close"))) as (server, endpoint):
        record, _, read = play(endpoint, "Look.")
        budget, _, _ = play(endpoint, "Look.", errors=5)
    found = results(server.requests[2])
    assert [r.startswith("Error: ") for r in found] == [True] * 5 + [False]
    assert "there is no tool 'fly'" in found[1] and "only the assistant" in found[3] and "JSON object" in found[0]
    assert (record.stop, record.errors) == ("user_closed", {"user": 5}) and "fly" not in read
    assert [json.loads(c["function"]["arguments"]) for c in server.requests[2]["messages"][-7]["tool_calls"]] == [
        {}, {}, {"fault": "hunger"}, {"phone": PHONE}, {}, {}]  # what an API would refuse is not sent back to it


def test_an_error_budget_spent_by_the_user_alone_is_void_and_costs_the_agent_nothing():
    with served(answers(says("Hello."), Answer(calls=[("fly", {})]))) as (server, endpoint):
        record, _, _ = play(endpoint, "Look.", errors=3)
    assert (record.stop, record.errors, record.reward) == ("void_user_errors", {"user": 3}, 0.0)
    assert len(server.requests) == 4 and not R.credit_tensors([record])["valid_N"].any()


# ------------------------------------------------------------------------------------- ends, and replies that are off


@pytest.mark.parametrize("end, strategy, stop", [
    ("stop", "close", "user_closed"), ("stop", "change_mind", "user_left"), ("transfer", "confirm", "transfer"),
    ("out_of_scope", "be_vague", "out_of_scope")])
def test_a_marker_ends_the_dialogue_and_is_read_by_nobody(end, strategy, stop):
    with served(answers(says("Hello."), says(f"So be it. {ENDS[end]}", strategy))) as (server, endpoint):
        record, _, read = play(endpoint, "Done?")
        bare, _, _ = play(endpoint, "Done?")
    assert (record.stop, record.strategies, record.messages[-1]["content"]) == (stop, [strategy], "So be it.")
    assert "###" not in read and len(server.requests) > 1


def test_a_bare_marker_ends_the_dialogue():
    with served(answers(says("Hello."), says("###STOP###", "close"))) as (_, endpoint):
        record, _, read = play(endpoint, "Done?")
    assert (record.stop, record.messages[-1]) == ("user_closed", {"role": "user", "content": ""}) and "###" not in read


def test_the_same_marker_from_the_agent_ends_nothing():
    with served(answers(says("Hello."), says("Why?", "ask_clarification"), says("OK ###STOP###"))) as (
            server, endpoint):
        record, _, _ = play(endpoint, "I end this. ###STOP###", "###TRANSFER###")
    assert (record.stop, len(record.strategies), len(server.requests)) == ("user_left", 2, 3)
    assert server.requests[1]["messages"][-1]["content"] == "I end this. ###STOP###"


def test_an_end_in_the_first_message_is_void():
    with served(answers(says("Bye. ###STOP###", "close"))) as (_, endpoint):
        record, stub, _ = play(endpoint, "Hello?")
    assert (record.stop, record.tokens, stub.asked, record.reward) == ("void_user", [], [], 0.0)


FINE = says("Fine.")


@pytest.mark.parametrize("replies, turn, tally", [
    (["", FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    ([None, FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    (['{"strategy": "confirm", "utterance": "Half a', FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    (['{"strategy": "confirm"}', FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    ([says(" "), FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    (["<think>Never closed", FINE], ("Fine.", "confirm"), {"asked_again": 1}),
    (["Plain words.", ""], ("Plain words.", "invalid"), {"asked_again": 1}),  # salvaged where there is nothing better
    (["Plain words.", "Other words."], ("Other words.", "invalid"), {"asked_again": 1}),
    ([f"Of course:\n```json\n{FINE}\n```\nBye."], ("Fine.", "confirm"), {}),
    ([says("Fine.", "agree")], ("Fine.", "invalid"), {}),  # kept as it is, not asked for again
    ([says("Fine.", None)], ("Fine.", "invalid"), {}),
    ([says("Fine.", " Confirm")], ("Fine.", "confirm"), {}),
    ([says("Fine. (strategy: confirm)")], ("Fine.", "confirm"), {"strategy_in_text": 1}),
    ([says("My strategy is close to failing.")], ("My strategy is close to failing.", "confirm"), {}),
    ([says("The investment strategy: growth, to *close* it.")],
     ("The investment strategy: growth, to *close* it.", "confirm"), {}),  # plain English
    ([says("[confirm] I change_mind it.")], ("I  it.", "confirm"), {"strategy_in_text": 2}),
    (["", "Strategy: confirm"], None, {"asked_again": 1}),
    ([says("reveal_piece", "reveal_piece")], None, {"asked_again": 1, "strategy_in_text": 1}),
])
def test_only_a_blank_or_unreadable_reply_is_asked_for_again_and_once(replies, turn, tally):
    with served(answers(*replies)) as (server, endpoint):
        user = ModelUser("You are Mia.", [], None, endpoint)
        with contextlib.nullcontext() if turn else pytest.raises(UserFault, match="blank twice"):
            found = one(endpoint, user.open)
            assert (found.utterance, found.strategy) == turn
            history = [m["content"] for m in user.messages[1:]]
            own = says(*turn) if turn[1] in REACTION else json.dumps({"utterance": turn[0]})
            assert history == [GREETING, own]  # neither what was off nor the second request, nor a label of ours
    counted = {name: endpoint.tally[name] for name in ("asked_again", "strategy_in_text") if endpoint.tally[name]}
    assert counted == tally and len(server.requests) == 1 + tally.get("asked_again", 0)


@pytest.mark.parametrize("planted", [
    says("Yes.", "CANARY_1"), says("Yes. strategy: CANARY_1"), says('Yes. {"strategy": "CANARY_1"}'),
    says(says("Yes.", "CANARY_1")), says("Yes.", why="CANARY_1"), says("Yes.", {"is": "CANARY_1"}),
    says('Yes. {"strategy": {"is": "CANARY_1"}}'), says('Yes. {"a": {"b": 1}, "strategy": "CANARY_1"}'),
    '{"strategy": "CANARY_1", "utterance": "Yes', 'CANARY_1? {"strategy": "CANARY_1", "utterance": "Yes."} CANARY_1',
    "Strategy: CANARY_1\nYes.", "<think>CANARY_1</think>Yes."])
def test_what_the_user_means_privately_reaches_no_prompt_no_trained_token_and_no_transcript(planted):
    with served(answers(says("Hello."), planted, planted, says("Bye. ###STOP###", "close"))) as (_, endpoint):
        record, stub, read = play(endpoint, "Well?", "And?")
    assert "Yes" in read and "CANARY" not in read and record.stop == "user_closed" and len(stub.asked) >= 2
    assert set(record.strategies) <= {*REACTION, "invalid"} and "CANARY" not in json.dumps(asdict(record))


@pytest.mark.parametrize("text", [
    "Yes.\n\n**Strategy:** {}", "Yes. <strategy>{}</strategy>", "Yes. Strategy - {}", "Yes. Strategy used: {}",
    "Yes. Strategies: {}", "Yes. user_strategy: {}", "Yes. strategy_label = {}", "Yes. [label: {}]", "[{}] Yes.",
    "Yes. ({})", "{}: Yes.", 'Yes. {{"strat\\u0065gy": "{}"}}'])
def test_a_label_that_is_told_in_the_text_is_cut_whatever_its_form(text):
    for label in REACTION:
        found = extract_turn(says(text.format(label), label))
        assert found.turn.utterance.strip(" .") == "Yes" and found.cut >= 1
    for form in ("reveal_piece", "reveal-piece", "revealPiece", "reveal\\_piece", "reveal_\u200bpiece",
                 "_reveal_piece_"):
        assert "piece" not in extract_turn(says(f"Yes {form} Yes.")).turn.utterance.lower()


def test_plain_english_is_not_cut():
    for text in ("I'm *close* to giving up", "I want to *confirm* that", "Press [Close] or [Confirm] now?",
                 "I'll be vague.", "Your strategy is close to mine", "What pricing strategy: flat or tiered?",
                 "I changed my mind."):
        found = extract_turn(says(text))
        assert (found.turn.utterance, found.cut) == (text, 0)


PIECES = [*ENDS.values(), *REACTION, *'#:= {}"[]()_*x1', "\n", "###", "STOP", "strategy", '"strategy"', '"utterance"',
          '{"strategy": "confirm"}', "confirm", "change", "mind", "is"]
WHOLE = st.lists(st.sampled_from(PIECES)).map("".join)


@settings(deadline=None, derandomize=True, database=None, max_examples=1000)
@given(st.text() | WHOLE | WHOLE.map(says) | WHOLE.map(says).map(says))
@example(says("###ST###STOP###OP### Hi"))  # a marker that the cut of another leaves behind
@example(says("reveal_[confirm]piece"))
@example(says("I _reveal_piece_ this"))  # as in Markdown
@example(says('Yes {"strategy": {"is": "confirm"}}'))
def test_whatever_a_model_replies_the_utterance_holds_no_marker_and_no_label(reply):
    turn = extract_turn(reply).turn
    text = turn.utterance if turn else ""
    assert not any(marker in text for marker in ENDS.values())
    assert not re.search(r'"strategy"\s*:', text)
    assert not [label for label in REACTION if "_" in label and label in text.lower()]


# ------------------------------------------------------------------------------------------- faults that are retried


@pytest.mark.parametrize("faults", [
    [Answer(status=500)], [Answer(status=503), Answer(status=529)], [Answer(drop=True)], [Answer(delay=3.0)],
    [Answer(status=408)], [Answer(status=409)], [Answer(status=429)]])
def test_a_passing_fault_is_retried_and_counted(faults):
    with served(answers(*faults, FINE), timeout=2.0) as (server, endpoint):
        assert ask(endpoint) == FINE
    assert (endpoint.tally["retries"], len(server.requests)) == (len(faults), 1 + len(faults))
    assert (endpoint.tally["requests"], endpoint.tally["faults"], endpoint.tally["waiting"]) == (1, 0, 0)


@pytest.mark.parametrize("header, least", [({"Retry-After": "1"}, 1.0), ({"Retry-After-Ms": "400"}, 0.4)])
def test_a_429_is_waited_for_as_long_as_it_says(header, least):
    with served(answers(Answer(status=429, headers=header), FINE)) as (server, endpoint):
        assert ask(endpoint) == FINE
    assert least <= server.times[1] - server.times[0] < least + 3


@pytest.mark.parametrize("fault, told", [
    (Answer(status=500), "answered 500, 3 times"), (Answer(status=429), "answered 429, 3 times"),
    (Answer(drop=True), "gave no answer (no connection; is the server running?), 3 times"),
    (Answer(delay=2.0), "gave no answer in 1 s, 3 times")])
def test_after_all_retries_the_dialogue_is_void(fault, told):
    with served(answers(says("Hello."), fault), timeout=1.0) as (server, endpoint):
        record, _, _ = play(endpoint, "Hm?")
    assert (record.stop, record.reward, record.strategies) == ("void_user", 0.0, [None])
    assert record.private[-1]["fault"] == f"user-1 at {server.url} {told}" and len(server.requests) == 1 + 3
    assert endpoint.tally["faults"] == 1


def test_a_void_dialogue_is_tried_again_in_another_stream_and_kept_out_of_the_credit():
    with served(answers(Answer(status=500)), retries=0) as (server, endpoint):
        (record,), tries = groups(endpoint, void_retries=2)
    assert len(server.requests) == 3 and [r.stop for r in [record, *tries]] == ["void_user"] * 3
    assert [r.seed for r in [*tries, record]] == [R.stream_seed(0, 0, 0, 0, attempt) for attempt in range(3)]
    assert R.credit_tensors([record])["valid_N"].tolist() == [False] and record.reward == 0.0
    passing = [Answer(status=500), says("Hello."), says("Bye.###STOP###", "close")]
    with served(answers(*passing), retries=0) as (_, endpoint):
        (record,), tries = groups(endpoint, void_retries=2)
    assert (record.stop, record.seed, len(tries)) == ("user_closed", R.stream_seed(0, 0, 0, 0, 1), 1)


SHAPES = [b"[" * 100_000, b'{"a":' * 5000, [], [1], "x", None, 5, {}, {"error": {"message": "x"}}, b""]
SHAPES += [b"<html>busy</html>", b'{"cho', b"\xff\xfe"]
SHAPES += [{"choices": c} for c in ([], None, "x", {}, [{}], [None], [{"message": None}], [{"message": "x"}])]
SHAPES += [{"choices": [{"message": message}]} for message in (
    {"content": 5}, {"content": [{"type": "text", "text": "x"}]}, {"content": "x", "tool_calls": "x"},
    {"content": "x", "tool_calls": ["x"]}, {"content": "x", "tool_calls": [{"id": 1, "function": None}]},
    {"content": "x", "tool_calls": [{"id": "1", "function": {"name": ["x"], "arguments": {"a": 1}}}]})]


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_an_answer_that_is_no_completion_is_a_fault_and_no_crash(kind):
    for shape in SHAPES:
        body = b"null" if shape is None else shape
        with served(answers(Answer(body=body, headers={"content-type": kind})), retries=0) as (_, endpoint):
            record, _, _ = play(endpoint, "Hm?")
        assert record.stop == "void_user" and "no chat completion" in record.private[-1]["fault"], shape
        assert endpoint.tally["faults"] == 1


def test_an_answer_without_usage_or_name_is_taken():
    bare = {"choices": [{"message": {"content": FINE}}]}
    for more in ({}, {"usage": None, "model": None}, {"usage": {}}, {"usage": {"prompt_tokens": None}},
                 {"usage": {"prompt_tokens": "12"}}):
        with served(answers(Answer(body=bare | more))) as (_, endpoint):
            assert ask(endpoint) == FINE
        assert endpoint.tally["prompt_tokens"] == 0 and endpoint.answered == {"user-1": "unnamed"}


# ----------------------------------------------------------------------------------------- refusals that stop the run


@pytest.mark.parametrize("status, advice", [
    (401, f"it refuses the key in {KEY}"), (402, "the account's balance is used up"),
    (403, f"the key in {KEY} has no right to it"), (404, "no such model or path (does it end in /v1?)"),
    (400, "it refuses the request; see --simulator-extra"), (422, "it refuses the request; see --simulator-extra")])
def test_a_refusal_for_good_stops_all_and_says_in_one_line_what_to_do(status, advice):
    refusal = Answer(status=status, body={"error": {"message": "x\ny", "code": "some_code", "type": 3}})
    with served(answers(refusal)) as (server, endpoint):
        with pytest.raises(SimulatorError) as caught:
            groups(endpoint)
        assert str(caught.value) == f"user-1 at {server.url} answered {status} (some_code): {advice}"
        with pytest.raises(SimulatorError, match=f"answered {status}"):
            endpoint.check()
    assert len(server.requests) == 2  # not asked again


def test_a_refusal_leaves_what_is_complete_and_leaves_nothing_running():
    """Two dialogues end, one is refused, and three wait for a user who would take 30 s."""
    def reply(request, n):
        if turns_of(request) == 0:
            return says("Hello.")
        if n < 8:
            return says("Bye.###STOP###", "close")
        return Answer(status=402, delay=0.3) if n == 8 else Answer(delay=30)

    complete = []
    with served(reply) as (server, endpoint):
        began = time.monotonic()
        with pytest.raises(SimulatorError) as caught:
            groups(endpoint, 6, done=lambda record, last: complete.append(record))
        assert time.monotonic() - began < 15 and endpoint.tally["waiting"] == 0
        asked = len(server.requests)
        time.sleep(0.3)
        assert len(server.requests) == asked == 12
    assert [r.stop for r in complete] == ["user_closed"] * 2 and "answered 402" in str(caught.value)


@pytest.mark.parametrize("status", [401, 403, 400, 429, 500])
@pytest.mark.parametrize("key", [SECRET, "lettersalone"])
def test_no_key_and_no_prompt_is_in_an_error_a_log_or_a_record_though_the_server_repeats_both(
        status, key, monkeypatch, caplog, capfd):
    monkeypatch.setenv(KEY, key)

    def reply(request, n):
        echo = json.dumps(request) + server.headers[-1]["authorization"]
        return Answer(status=status, headers={"x-echo": key}, body={
            "error": {"message": echo, "type": echo, "code": key, "param": f"Bearer {key}"}, "echo": request})

    with served(reply, retries=0) as (server, endpoint):
        with caplog.at_level(logging.INFO):  # openai's own DEBUG log holds each request, and is the user's to turn on
            with pytest.raises((SimulatorError, UserFault)) as caught:
                ask(endpoint)
            said = traceback.format_exception(caught.value)
            with contextlib.suppress(SimulatorError):
                (record,), _ = groups(endpoint, void_retries=0)
                said.append(json.dumps(asdict(record)))
            with pytest.raises(SimulatorError) as caught:
                endpoint.check()
    said = "".join([*said, *traceback.format_exception(caught.value), caplog.text, *capfd.readouterr()])
    assert f"answered {status}" in said
    words = [key, "Bearer", f"{SECRET}-scenario", "Your phone", "You play a customer"]
    assert not [word for word in words if word in said.replace(json.dumps(TELECOM.instructions), "")]


# ------------------------------------------------------------------------------------------------- many at once


def test_64_dialogues_are_asked_for_together():
    with served(lambda request, n: Answer(
            says("Bye.###STOP###", "close") if turns_of(request) else says("Hello."),
            delay=0.0 if n >= 64 else lambda: server.peak == 64)) as (server, endpoint):
        records, tries = groups(endpoint, 64)
    assert server.peak == 64 and [r.stop for r in records] == ["user_closed"] * 64 and not tries


def test_no_more_requests_than_allowed_are_in_flight():
    with served(lambda request, n: Answer(says("Bye.###STOP###", "close") if turns_of(request) else says("Hello."),
                                          delay=0.02), concurrency=4) as (server, endpoint):
        records, _ = groups(endpoint, 24)
    assert server.peak == 4 and len(server.requests) == 48 and {r.stop for r in records} == {"user_closed"}


def test_a_slow_user_and_a_long_wait_for_the_next_try_hold_up_no_other():
    """Two slots: one is taken by a slow answer; the 429 has given its own back, or nobody could go on."""
    over = {}

    def reply(request, n):
        if n < 2:
            return Answer(says("Hello."), delay=4) if n else Answer(status=429, headers={"Retry-After": "4"})
        return says("Bye.###STOP###", "close") if turns_of(request) else says("Hello.")

    with served(reply, concurrency=2) as (server, endpoint):
        began = time.monotonic()
        records, _ = groups(endpoint, 8, done=lambda record, last: over.setdefault(record.k, time.monotonic() - began))
    late = sorted(over.values())
    assert len(late) == 8 and late[5] < 3.5 and late[6] > 3.9 and {r.stop for r in records} == {"user_closed"}


def test_another_model_that_answers_is_told_once_and_counted(capsys):
    with served(answers(*[Answer(FINE, model=m) for m in ("a-1", "a-1", "b-2", "b-2")])) as (_, endpoint):
        for _ in range(4):
            ask(endpoint)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "WARNING: for user-1 now b-2 answers, no longer a-1" in said
    assert endpoint.tally["model_changes"] == 1 and endpoint.answered == {"user-1": "b-2"}


# --------------------------------------------------------------------------------------------------------- options


def options(**given):
    return SimpleNamespace(**{"simulator": "m", "simulator_url": "http://localhost:1/v1", "simulator_extra": "",
                              "concurrency": 8, "simulator_timeout": 9.0, "judge": ""} | given)


@pytest.mark.parametrize("given, domain, named", [
    ({"simulator_url": ""}, "mini:telecom", "--simulator m needs --simulator-url"),
    ({"simulator_url": "ftp://host/v1"}, "mini:telecom", "it is 'ftp://host/v1'"),
    ({"simulator_url": "localhost:1"}, "mini:telecom", "it is 'localhost:1'"),
    ({"simulator_url": f"https://user:{SECRET}@host/v1"}, "mini:telecom", "without user name"),
    ({"simulator_url": f"https://:{SECRET}@host/v1"}, "mini:telecom", "without user name"),
    ({"simulator_url": f"https://host/v1?key={SECRET}"}, "mini:telecom", "without user name"),
    ({"simulator_url": f"https://host/v1#{SECRET}"}, "mini:telecom", "without user name"),
    ({"simulator_url": "http://[::1"}, "mini:telecom", "--simulator m needs --simulator-url"),
    ({"simulator_url": "http://localhost:port/v1"}, "mini:telecom", "--simulator m needs --simulator-url"),
    ({"simulator_extra": "{thinking}"}, "mini:telecom", "--simulator-extra must be one JSON object"),
    ({"simulator_extra": '{"temperature": NaN}'}, "mini:telecom", "--simulator-extra must be one JSON object"),
    ({"simulator_extra": '{"model": "other"}'}, "mini:telecom", "without what is ours"),
    ({"simulator_url": "http://localhost/v1 "}, "mini:telecom", "it is 'http://localhost/v1 '"),
    ({"simulator_extra": "[1]"}, "mini:telecom", "--simulator-extra must be one JSON object"),
    ({"simulator": "scripted", "simulator_url": ""}, "tau2:airline", "--env tau2:airline has no scripted user"),
    ({"simulator": "scripted"}, "mini:telecom", "--simulator-url needs --simulator MODEL"),
    ({"simulator": "scripted", "simulator_url": "", "judge": "j"}, "mini:telecom", "--judge needs"),
    ({"simulator": "scripted", "simulator_url": "", "simulator_extra": "{}"}, "mini:telecom", "--simulator-extra"),
])
def test_options_that_fit_no_endpoint_are_one_line(given, domain, named):
    with pytest.raises(EndpointError) as caught:
        endpoint_of(options(**given), {domain})
    assert named in str(caught.value) and "\n" not in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "sk-one\n", "sm\u00f6rg\u00e5s"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    with pytest.raises(EndpointError, match=f"{KEY} holds a space") as caught:
        Endpoint("user-1", "http://127.0.0.1:1/v1")
    assert key.strip() not in str(caught.value)


def test_a_reply_that_repeats_itself_without_end_is_read_at_once():
    """A second or two; with patterns that are not bounded, minutes."""
    for piece in ("(", "strategy ", "{ strategy ", "*", "{", '{"', "[confirm", '"utterance": "', "strategy: "):
        text = piece * (10**5 // len(piece))
        assert extract_turn(says(text)).parsed and not extract_turn(text).parsed


def test_a_key_is_needed_for_any_host_but_this_one(monkeypatch):
    monkeypatch.delenv(KEY)
    with pytest.raises(EndpointError, match=f"{KEY} is not set: it holds the key for host.example"):
        endpoint_of(options(simulator_url="https://host.example/v1"), set())
    with served(answers(FINE)) as (server, endpoint):
        assert ask(endpoint) == FINE and server.headers[0]["authorization"] == "Bearer none"
    assert endpoint_of(options(), set(), ranks=3).concurrency == 2  # the ranks share the 8
    assert endpoint_of(options(simulator="scripted", simulator_url=""), {"mini:telecom"}) is None


# --------------------------------------------------------------------------------------------------------- the judge


@pytest.mark.parametrize("name, value", [("ALL_PROXY", "socks5://127.0.0.1:1"), ("HTTP_PROXY", "ftp://x")])
def test_a_proxy_that_can_not_be_used_is_one_line(name, value, monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv(name, value)
    with pytest.raises(SimulatorError, match=r"no connection can be set up .* see HTTP_PROXY, ALL_PROXY"):
        Endpoint("user-1", "http://127.0.0.1:1/v1").check()


def verdicts(*found):
    return json.dumps({"verdicts": [{"reason": "so", "true": true} for true in found]})


TALK = [{"role": "system", "content": "POLICY"}, {"role": "user", "content": "Refund?"},
        {"role": "assistant", "content": "Done."}]


@pytest.mark.parametrize("replies, held", [
    ([verdicts(True, True)], True), ([verdicts(True, False)], False), ([verdicts(True), verdicts(True, True)], True),
    ([verdicts(True, "true"), verdicts(False, True)], False), (["Both hold.", verdicts(True, True)], True),
    ([verdicts(True, True, True)], None), ([verdicts(1, 1)], None), ([""], None), (['{"verdicts": true}'], None),
    (["[true, true]"], None), (['{"verdicts": [true, true]}'], None)])
def test_a_judges_verdicts_are_all_taken_in_order_or_asked_for_once_more(replies, held):
    with served(answers(*replies), judge="judge-1") as (server, endpoint):
        with contextlib.nullcontext() if held is not None else pytest.raises(UserFault, match="judge-1 gave no"):
            assert one(endpoint, lambda: judged(("it was polite", "it paid"), TALK, endpoint)) is held
    assert len(server.requests) == (2 if held is None else len(replies))
    assert {r["model"] for r in server.requests} == {"judge-1"}
    asked = server.requests[0]["messages"][1]["content"]
    assert asked == "user: Refund?\nassistant: Done.\n\nStatements:\n1. it was polite\n2. it paid"


class Judged(Telecom):
    domain = "mini:judged"  # the mini worlds have no assertions: here a judge has the last word, as in tau3

    def reward(self, messages, held=None):
        return super().reward(messages) * bool(held)


Judged.parameters = Telecom.parameters
MEND = (Call("resume_line", {"phone": PHONE}),)


@pytest.mark.parametrize("gold, verdict, reward", [
    ((), True, 1.0), ((), False, 0.0), ((), None, 0.0), (MEND, True, 0.0)])
def test_a_judge_is_asked_only_where_the_state_is_right_and_decides_the_reward(gold, verdict, reward, monkeypatch):
    monkeypatch.setitem(DOMAINS, Judged.domain, Judged)
    task = replace(TELECOM, domain=Judged.domain, assertions=("it was polite",), gold=gold)
    replies = [says("Hello."), says("Bye.###STOP###", "close"), "" if verdict is None else verdicts(verdict)]
    with served(answers(*replies)) as (server, endpoint):
        record, _, _ = play(endpoint, "Hm?", task=task)
    assert (record.stop, record.reward) == ("user_closed" if verdict is not None else "void_user", reward)
    assert len(server.requests) == (2 if gold else 3 if verdict is not None else 4)


# ------------------------------------------------------------------------------------------------------- whole runs

SMALL = ["--env", "mini:telecom", "--steps", "2", "--prompts", "2", "--rollouts", "2", "--max-messages", "2",
         "--max-message-tokens", "16", "--eval-trials", "1", "--simulator", "user-1"]
SFT = ["--sft-steps", "2", "--sft-dialogues", "1"]


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of train.py against the user by rule, start to end; its folder, its process and its server."""
    out = tmp_path_factory.mktemp("run") / "model-user"
    with FakeUser() as server:
        return out, run("train.py", *SMALL, *SFT, "--simulator-url", server.url, "--out", out), server


def test_another_model_that_answers_after_a_resume_is_told_and_counted(trained, tmp_path):
    def renamed(request, n):
        answer = by_rule(request, n)
        answer = answer if isinstance(answer, Answer) else Answer(answer)
        answer.model = "user-2"
        return answer

    shutil.copytree(trained[0], tmp_path / "again")
    with FakeUser(renamed) as server:
        done = run("train.py", "--resume", tmp_path / "again", "--steps", 3, "--simulator-url", server.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING: for user-1 now user-2 answers, no longer user-1") == 1
    rows = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [row["simulator/model_changes"] for row in rows if row.get("step") == 2] == [1]


def test_training_with_a_model_for_its_user_logs_what_was_asked_of_it(trained):
    out, done, server = trained
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    asked = [row for row in rows if row["phase"] != "sft"]
    assert [row["phase"] for row in asked] == ["held_out", "held_out", "rl", "rl", "held_out"]
    for row in asked:
        assert row["simulator/model"] == "user-1" and row["simulator/requests"] >= 4 and row["void"] == 0
        assert row["simulator/prompt_tokens"] > 1000 and row["simulator/completion_tokens"] > 10
        assert row["simulator/retries"] == row["simulator/faults"] == row["simulator/model_changes"] == 0
    assert sum(row["simulator/requests"] for row in asked) == len(server.requests) - 1  # one to see that it answers
    assert not any("simulator/requests" in row for row in rows if row["phase"] == "sft")  # its users are scripted
    assert SECRET not in done.stderr + done.stdout + (out / "config.json").read_text()


def test_an_endpoint_that_refuses_from_the_start_is_one_line_before_any_model_is_loaded(
        trained, tmp_path, monkeypatch, capsys):
    """The weights are damaged: whoever loaded them would say so instead."""
    model = tmp_path / "model"
    shutil.copytree(trained[0] / "sft", model)
    (model / "model.safetensors").write_bytes(b"damaged")
    for name, command in (("train", []), ("eval", ["run"])):
        with FakeUser(lambda request, n: Answer(status=401)) as server:
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *command, "--model", str(model), "--simulator", "user-1",
                                              "--simulator-url", server.url, "--out", str(tmp_path / "out")])
            with pytest.raises(SystemExit) as caught:
                import_module(name).main()
        out, error = capsys.readouterr()
        said = [line for line in error.splitlines() if line.startswith(f"{name}.py: ")]
        assert said == [f"{name}.py: user-1 at {server.url} answered 401: it refuses the key in {KEY}"]
        assert caught.value.code == 2 and out == "" and error.endswith(said[0] + "\n") and len(server.requests) == 1
        assert not (tmp_path / "out").exists()


def test_an_endpoint_that_refuses_in_mid_run_keeps_the_complete_rollouts(trained, tmp_path):
    """In the first step of RL, and in the evaluation of the model that was saved then."""
    def refusing(last):
        """A server that refuses a dialogue, the last of its batch, a second after another one has ended."""
        def reply(request, n):
            if request["messages"][0]["role"] != "system" or turns_of(request):
                ended.append(time.monotonic())
                return says("Bye.###STOP###", "close")
            begun.append(n)
            before = len(ended)
            return Answer(status=402, delay=lambda: len(ended) > before and time.monotonic() > ended[before] + 1) if (
                len(begun) == last) else says("Hello.")
        begun, ended = [], []
        return FakeUser(reply)

    out, saved = tmp_path / "out", tmp_path / "saved"
    with refusing(104) as server:  # 100 dialogues before RL, and 4
        done = run("train.py", "--model", trained[0] / "sft", *SMALL, "--simulator-url", server.url, "--out", out)
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert (done.returncode, done.stderr.count("Traceback"), len(said)) == (1, 0, 1)
    assert f"answered 402: the account's balance is used up; complete rollouts are kept in {out}/rollouts" in said[0]
    assert [p.name for p in (out / "rollouts").iterdir()] == ["step-00000-unfinished.jsonl"]
    kept = load_rollouts(out / "rollouts" / "step-00000-unfinished.jsonl")
    assert 0 < len(kept) < 4 and not any(r.void for r in kept) and (out / "model" / "faca.json").exists()
    with refusing(100) as server:
        done = run("eval.py", "run", "--model", out / "model", "--simulator", "user-1", "--simulator-url", server.url,
                   "--out", saved)
    said = [line for line in done.stderr.splitlines() if line.startswith("eval.py: ")]
    kept = load_results(saved).records
    assert (done.returncode, done.stderr.count("Traceback"), len(said)) == (1, 0, 1) and "pass@1" not in done.stdout
    assert said[0].endswith(f"used up; {len(kept)} of 100 dialogues are in {saved}, and the same command goes on from "
                            "there")
    assert 0 < len(kept) < 100 and not any(r.void for r in kept)


def test_a_refusal_that_one_rank_meets_stops_the_other_too_which_waits_for_slow_users(trained, tmp_path):
    """The 130th request is refused, and those from the 110th on take two minutes."""
    def reply(request, n):
        return Answer(status=402) if n == 130 else Answer(by_rule_text(request, n), delay=0.0 if n < 110 else 120)

    with FakeUser(reply) as server:
        done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "train.py", "--model",
                   trained[0] / "sft", *SMALL, "--simulator-url", server.url, "--out", tmp_path / "run")
    assert "answered 402: the account's balance is used up; complete rollouts are kept in" in done.stderr
    assert done.returncode == 1 and not (tmp_path / "run/refused").exists()


def test_ctrl_c_in_an_evaluation_keeps_what_is_complete_and_says_so_in_one_line(trained, tmp_path):
    """One dialogue of three ends; the others wait for a user who would take a minute."""
    def reply(request, n):
        if request["messages"][0]["role"] != "system" or turns_of(request):
            return says("Bye.###STOP###", "close")
        begun.append(n)
        return says("Hello.") if len(begun) < 4 else Answer(delay=60)

    begun = []
    with FakeUser(reply) as server:
        process = subprocess.Popen(
            [sys.executable, "eval.py", "run", "--model", trained[0] / "sft", "--simulator", "user-1",
             "--simulator-url", server.url, "--out", tmp_path / "e"],
            cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        while not (len(begun) == 100 and any(turns_of(r) for r in server.requests)):
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    kept = load_results(tmp_path / "e").records
    assert process.returncode == 130 and "Traceback" not in error and 0 < len(kept) < 4
    assert error.endswith(f"eval.py: stopped; {len(kept)} of 100 dialogues are in {tmp_path / 'e'}, and the same "
                          "command goes on from there\n")


def test_void_tries_in_an_evaluation_are_counted(trained):
    metrics = trained[0] / "metrics.jsonl"
    assert all(row["void_retried"] == 0 for row in map(json.loads, metrics.read_text().splitlines()) if "void" in row)
    tries = [R.Rollout("t", "d", 0, 0, 0, stop="void_user", strategies=[None] * n) for n in (1, 3)]
    found = figures([R.Rollout("t", "d", 0, 0, 0, stop="user_closed", reward=1.0)], tries)
    counts = [found[name] for name in ("void", "void_retried", "tried_again/void_user", "void_segments")]
    assert counts == [0, 2, 2, 2.0]


def test_a_user_that_fails_too_often_stops_the_run_and_says_why(tmp_path):
    with FakeUser(lambda request, n: by_rule(request, n) if turns_of(request) < 1 else says(" ")) as server:
        done = run("train.py", *SMALL, *SFT, "--void-retries", "0", "--simulator-url", server.url,
                   "--out", tmp_path / "run")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "rollouts of the evaluation before are void, above --max-void-rate 0.2" in last
    assert last.endswith("mostly: the user model's reply was blank twice, or had nothing to be shown")
