"""An agent behind an endpoint, over a real loopback server: what it is sent, what its record holds, what goes wrong."""

import contextlib
import json
import math
import random
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from fake_user import Answer, FakeUser, completion
from hypothesis import example, given
from hypothesis import strategies as st

import rollout as R
from env import Call, load_tasks, make_env
from eval import figures
from extras.agent import READY, AgentEndpoint, read_message
from extras.arms import read_batch
from extras.endpoint import KEY, Endpoint, EndpointError
from extras.run import UsageError
from extras.show import load_rollouts, save_rollouts, show
from extras.tiny import EXPERTS, ExpertSample, call, make_tokenizer
from simulator import SimulatorError

TOKENIZER = make_tokenizer()
CHAT = R.Chat(TOKENIZER)
SECRET, USERS_SECRET = "sk-CANARY-7781", "sk-OTHER-4410"
TASK = next(task for task in load_tasks("mini:telecom", "train")
            if Call("resume_line", {"phone": task.facts["phone"]}) in task.gold)
PHONE = TASK.facts["phone"]
GET = ("get_line", {"phone": PHONE})
MEND = call("resume_line", phone=PHONE)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Two keys to be kept secret, no proxy before the loopback, and openai's own growing waits cut short."""
    monkeypatch.setenv("AGENT_API_KEY", SECRET)
    monkeypatch.setenv(KEY, USERS_SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)


@contextlib.contextmanager
def served(reply, retries=2, **options):
    """An agent's server, and the endpoint for it. A list: its answers in order, the last of them for ever."""
    answers = reply
    with FakeUser(reply if callable(reply) else lambda _, n: answers[min(n, len(answers) - 1)]) as server:
        endpoint = AgentEndpoint("agent-1", server.url, **options)
        endpoint.retries = retries
        yield server, endpoint


def groups(agent, tasks=(TASK,), rollouts=1, void_retries=0, **options):
    caps = R.Caps(**{"messages": 12, "message_tokens": 64} | options.pop("caps", {}))
    return R.play_groups(list(enumerate(tasks)), rollouts, (0, 0), agent, None, caps, void_retries, **options)


def one(reply, retries=2, **options):
    """-> the record of one dialogue, and the agent's server."""
    with served(reply, retries) as (server, agent):
        return groups(agent, **options)[0][0], server


def finished(text, reason):
    """An answer that ended otherwise than by its own end."""
    body = completion({"messages": [], "model": "agent-1"}, Answer(text))
    body["choices"][0]["finish_reason"] = reason
    return Answer(body=body)


def well_formed(messages):
    """Whether any server can read a history: calls with ids of their own, JSON objects, and their answers in order."""
    due = []
    for m in messages:
        if m["role"] == "tool":
            assert m["tool_call_id"] == due.pop(0)
            continue
        assert not due and isinstance(m["content"], str)
        due = [c["id"] for c in m.get("tool_calls", ())]
        assert len(set(due)) == len(due) and all(due)
        for c in m.get("tool_calls", ()):
            assert c["function"]["name"] and isinstance(json.loads(c["function"]["arguments"]), dict)
    return not due


# ------------------------------------------------------------------------------------------------- the same dialogue


class Sure(random.Random):
    def random(self):
        return 0.0  # the expert is always right


def expert(prompt: str) -> str:
    """What the sure expert says to a rendered prompt."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", prompt, re.DOTALL)
    return EXPERTS["mini:telecom" if "phone" in turns[0][1].lower() else "mini:retail"](turns[1:-1], Sure())


class Local:
    """The expert as a sampler; the prompts that it was given."""

    def __init__(self):
        self.prompts = []

    async def sample(self, ids, max_tokens, seed):
        self.prompts.append(TOKENIZER.decode(ids, clean_up_tokenization_spaces=False))
        tokens = TOKENIZER.encode(expert(self.prompts[-1])) + [CHAT.turn_end]
        return ExpertSample(tokens, [0.0] * len(tokens))


def render(request) -> str:
    """The prompt that a server makes of a request, as vLLM does: arguments as objects, then the model's template."""
    messages = [m | {"tool_calls": [{"function": c["function"] | {"arguments": json.loads(c["function"]["arguments"])}}
                                    for c in m.get("tool_calls", ())]} for m in request["messages"]]
    return TOKENIZER.apply_chat_template(messages, tools=request["tools"], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("parser", [True, False])
@pytest.mark.parametrize("domain", ["mini:telecom", "mini:retail"])
def test_the_same_agent_behind_an_endpoint_sees_the_same_prompts_and_leaves_the_same_record_but_tokens(domain, parser):
    """Once with the server's own tool parser, once with calls as text in the content."""
    tasks, local = load_tasks(domain, "test")[:6], Local()

    def reply(request, n):
        said = CHAT.parse(TOKENIZER.encode(expert(render(request))))
        calls = [(c.name, c.arguments) for c in said.calls]
        return Answer(said.text or None, calls) if parser else expert(render(request))

    with served(reply) as (server, agent):
        there, _ = groups(agent, tasks)
        here, _ = R.play_groups(list(enumerate(tasks)), 1, (0, 0), local, CHAT, R.Caps(messages=12, message_tokens=64))
        assert {m["content"] for r in there for m in r.messages if m["role"] == "tool"}
        assert sorted(map(render, server.requests)) == sorted(local.prompts)
    none = {"tokens": [], "segment": [], "logprobs": []}
    assert [asdict(r) for r in there] == [asdict(r) | none for r in here]
    assert sum(r.reward for r in there) == len(tasks) and all(well_formed(q["messages"]) for q in server.requests)


def test_a_request_carries_policy_greeting_user_tools_and_sampling_and_no_seed(monkeypatch):
    monkeypatch.setattr("extras.mini.Telecom.greeting", "Hello, how can I help?", raising=False)
    record, server = one([Answer(None, [GET]), Answer("")])
    env, (first, second), opening = make_env(TASK), server.requests, record.messages[2]["content"]
    assert first == {
        "model": "agent-1", "temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "tools": env.tools, "messages": [
            {"role": "system", "content": env.policy}, {"role": "assistant", "content": "Hello, how can I help?"},
            {"role": "user", "content": opening}]}
    called = {"id": "call_0", "type": "function", "function": {"name": GET[0], "arguments": json.dumps(GET[1])}}
    assert second["messages"][3:] == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_0", "content": record.messages[4]["content"]}]
    assert record.messages[3] == {"role": "assistant", "content": "", "segment": 0, "tool_calls": [
        {"type": "function", "function": {"name": GET[0], "arguments": GET[1]}}]}
    assert [h["authorization"] for h in server.headers] == [f"Bearer {SECRET}"] * 2
    assert (record.stop, record.tokens, record.segment, record.logprobs) == ("empty_message", [], [], [])


def test_extra_goes_over_what_we_would_send_and_a_null_leaves_it_out():
    extra = '{"temperature": 0.5, "max_tokens": null, "max_completion_tokens": 9, "top_k": -1}'
    with served([Answer("")], temperature=0.0, extra=extra) as (server, agent):
        groups(agent)
    told = {name: value for name, value in server.requests[0].items() if name not in ("messages", "tools", "model")}
    assert told == {"temperature": 0.5, "top_p": 1.0, "max_completion_tokens": 9, "top_k": -1}
    assert agent.sampled(48) == {"temperature": 0.5, "max_tokens": 9, "thinking": False}
    assert AgentEndpoint("deepseek-chat", "http://localhost/v1").extra == {"thinking": {"type": "disabled"}}


def test_what_is_told_of_sampling_is_what_is_sent():
    def sampled(extra):
        return AgentEndpoint("agent-1", "http://localhost/v1", extra, temperature=1.0).sampled(48)

    assert sampled("") == {"temperature": 1.0, "max_tokens": 48, "thinking": False}
    assert sampled('{"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": true}}') == {
        "temperature": 1.0, "max_tokens": 9, "thinking": True}
    found = sampled('{"temperature": null, "max_tokens": null}')
    assert math.isnan(found["temperature"]) and found["max_tokens"] == 0
    for wrong in ('"hot"', "-1", "true"):
        with pytest.raises(EndpointError, match=f"--agent-extra has temperature {wrong}, which must be a number"):
            sampled(f'{{"temperature": {wrong}}}')


# ---------------------------------------------------------------------------------------------- the agent's own faults


@pytest.mark.parametrize("arguments", ['{"phone": ', "[1]", '"520"', "null", "{}}", '{"a": ' * 100 + "1" + "}" * 100])
def test_arguments_that_are_no_object_are_the_agents_error_and_go_back_inside_of_one(arguments):
    record, server = one([Answer(None, [("get_line", arguments)]), Answer("")])
    assert record.errors == {"malformed": 1} and record.stop == "empty_message"
    assert record.messages[3]["content"].startswith("Error: the tool call")
    back = server.requests[1]["messages"]
    assert well_formed(back) and json.loads(back[2]["tool_calls"][0]["function"]["arguments"]) == {
        "malformed": arguments}


@pytest.mark.parametrize("said, kind", [
    (Answer(None, [("no_such_tool", {})]), "tool"), (Answer(None, [("get_line", "")]), "tool"),
    (Answer(None, [("check_status_bar", {})]), "authority"), (Answer(None, [("", {})]), "tool"),
    ("<tool_call>{</tool_call>", "malformed"), ('So: <tool_call>{"name": "get_line"', "malformed"),
    ('<tool_call>{"name": "no such", "arguments": {}}</tool_call>', "tool"),
    ('<tool_call>{"name": "get_line", "arguments": [1]}</tool_call>', "tool")])
def test_a_wrong_call_costs_error_budget_and_the_history_stays_one_that_a_server_takes(said, kind):
    record, server = one([said, Answer(None, [GET]), Answer("")])
    assert record.errors == {kind: 1} and len(server.requests) == 3
    assert all(well_formed(request["messages"]) for request in server.requests)
    record, server = one([said], caps={"errors": 3})
    assert (record.stop, record.errors, record.reward) == ("too_many_errors", {kind: 3}, 0.0)


@pytest.mark.parametrize("form, ids", [
    (Answer(None, [GET, ("resume_line", {"phone": PHONE}), GET]), ["call_0", "call_1", "call_2"]),
    (call(*GET[:1], **GET[1]) + "\nAnd: " + MEND + call(*GET[:1], **GET[1]), ["call00000", "call00001", "call00002"])])
def test_several_calls_in_a_message_are_run_in_order_and_answered_each_by_its_id(form, ids):
    record, server = one([form, Answer("")])
    results = [m for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == ids and well_formed(server.requests[1]["messages"])
    assert [m["content"] for m in record.messages if m["role"] == "tool"] == [m["content"] for m in results]
    assert results[0]["content"] != results[2]["content"]  # the line was resumed between them


@pytest.mark.parametrize("ids", [["", ""], ["same", "same"], [None, "a"]])
def test_calls_whose_ids_are_missing_or_equal_get_ids_of_ours_that_never_come_again(ids):
    body = completion({"messages": [], "model": "m"}, Answer(None, [GET, GET]))
    for made, given_id in zip(body["choices"][0]["message"]["tool_calls"], ids, strict=True):
        made["id"] = given_id
    _, server = one([Answer(body=body), Answer(body=body), Answer("")])
    assert [m["tool_call_id"] for m in server.requests[2]["messages"] if m["role"] == "tool"] == [
        "call00000", "call00001", "call00002", "call00003"]
    assert well_formed(server.requests[2]["messages"])


@pytest.mark.parametrize("said, seen", [
    ("<think>It is 520. </think>\n\nWhat is your number?", "What is your number?"),
    ("It is 520.</think>What is your number?", "What is your number?"),
    (f"<think>maybe {MEND}</think>What is your number?", "What is your number?"),
    ("<think>It is 520.", ""), ("<think>a</think> \n", ""), (None, "")])
def test_a_think_block_is_seen_by_nobody_but_its_own_server(said, seen):
    record, server = one([said, Answer("")])
    assert record.messages[2] == {"role": "assistant", "content": seen, "segment": 0} and not record.errors
    if seen:
        assert server.requests[1]["messages"][2] == {"role": "assistant", "content": said}
    else:
        assert record.stop == "empty_message" and len(server.requests) == 1


def test_reasoning_that_stands_apart_is_neither_read_nor_sent_back():
    body = completion({"messages": [], "model": "m"}, Answer("Hello?"))
    body["choices"][0]["message"]["reasoning_content"] = "CANARY"
    record, server = one([Answer(body=body), Answer("")])
    assert "CANARY" not in json.dumps(asdict(record)) + json.dumps(server.requests)


def test_a_message_cut_at_its_cap_is_marked_and_taken_as_it_stands():
    record, _ = one([finished("What is your", "length"), finished("phone number?", "stop"), Answer("")])
    assert [m.get("cut") for m in record.messages if "segment" in m] == [True, None, None]


def test_the_cap_on_messages_is_ours_with_a_call_pending_or_not():
    for said in (Answer(None, [GET]), "Hello?"):
        record, server = one([said], caps={"messages": 2})
        assert (record.stop, len(server.requests), record.reward) == ("max_messages", 2, 0.0)


messages = st.builds(SimpleNamespace, content=st.none() | st.text() | st.lists(st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a b", "arguments": {}}', '{"name": "\ud83d"}', "{",
    '{"name": "f", "arguments": 1}', "x"])).map("".join), tool_calls=st.none() | st.lists(st.builds(
        SimpleNamespace, id=st.none() | st.text(max_size=3), function=st.builds(
            SimpleNamespace, name=st.text(max_size=3), arguments=st.none() | st.text(max_size=5) | st.sampled_from(
                ["{}", '{"a": "\ud83d"}', "[]", "NaN", "[" * 200]))), max_size=3))


@given(messages)
@example(SimpleNamespace(content="<think><tool_call></think><tool_call>{}</tool_call>", tool_calls=[]))
@example(SimpleNamespace(content=f"<think>maybe {MEND}</think>{MEND}", tool_calls=None))
def test_whatever_a_model_says_goes_back_as_a_message_that_any_server_takes(message):
    said, again = read_message(message)
    calls = again.get("tool_calls", [])
    assert len(calls) == len(said.calls) and ("tool_calls" in again) == bool(said.calls)
    for made in calls:
        made["id"] = made["id"] or "x"
        assert made["function"]["name"].encode() and made["function"]["arguments"].encode()
        assert isinstance(json.loads(made["function"]["arguments"]), dict)
    assert again["content"].encode() is not None and "<think>" not in said.text and "</think>" not in said.text


# ------------------------------------------------------------------------------------------------ its endpoint's faults


FULL = [
    {"error": {"message": "Too long.", "type": "invalid_request_error", "code": "context_length_exceeded"}},
    {"object": "error", "message": "This model's maximum context length is 512 tokens. However, you requested 700 "
     "tokens (636 in the messages, 64 in the completion).", "type": "BadRequestError", "code": 400},
    {"error": {"message": "'max_tokens' or 'max_completion_tokens' is too large: 64. This model's maximum context "
     "length is 512 tokens and your request has 480 input tokens.", "code": 400}},
    {"error": {"message": "The input (700 tokens) is longer than the model's context length (512 tokens)."}},
    {"error": {"code": 400, "message": "the request exceeds the available context size"}}]


@pytest.mark.parametrize("body", FULL)
def test_a_full_context_ends_the_dialogue_and_is_neither_void_nor_tried_again(body):
    with served([Answer("Hello?"), Answer(status=400, body=body)]) as (server, agent):
        (record,), tries = groups(agent, void_retries=2)
    assert (record.stop, record.void, record.reward, len(server.requests), tries) == ("max_context", False, 0.0, 2, [])
    assert [z is not None for z in record.strategies] == [True]  # the user's turn is in it, the message is not


def test_a_context_that_has_no_room_for_the_first_message_is_not_the_agents_failure():
    record, _ = one([Answer(status=400, body=FULL[0])])
    assert record.stop == "void_user" and "fill the context" in record.private[-1]["fault"] and not record.strategies


@pytest.mark.parametrize("status, body, named", [
    (401, {"error": {"message": f"Bad key {SECRET}", "code": "invalid_api_key"}}, "the key in AGENT_API_KEY"),
    (402, {}, "balance"), (403, {}, "AGENT_API_KEY has no right"), (404, {}, "no such model"),
    (400, {"error": {"message": f"No tools, {SECRET}.", "param": "tools"}}, r"\(tools\): .* see --agent-extra"),
    (400, [1], "enable-auto-tool-choice")])
def test_a_refusal_stops_the_run_with_one_line_that_names_the_agents_endpoint_and_no_key(status, body, named):
    refused = Answer(status=status, body=body)
    with served([Answer("Hello?"), refused]) as (server, agent):
        with pytest.raises(SimulatorError, match=named) as caught:
            groups(agent)
        assert f"agent-1 at {server.url} answered {status}" in str(caught.value)
    with served([refused]) as (_, agent), pytest.raises(SimulatorError, match=named):
        agent.check()
    assert SECRET not in str(caught.value) and "SIMULATOR" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", [
    Answer(status=500), Answer(status=429), Answer(drop=True), Answer(delay=lambda: False), Answer(status=503)])
def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_void(fault):
    fine = Answer(None, [("get_line", {"phone": PHONE})])
    with served([fault, fine, fault, Answer("")], timeout=0.3) as (server, agent):
        (record,), _ = groups(agent)
    assert (record.stop, len(server.requests), agent.tally["retries"]) == ("empty_message", 4, 2)
    with served([fine, fault], timeout=0.3) as (server, agent):
        (record,), tries = groups(agent, void_retries=1)
    assert (record.stop, record.void, record.reward) == ("void_agent", True, 0.0) and len(tries) == 1
    assert f"agent-1 at {server.url}" in record.private[-1]["fault"] and "3 times" in record.private[-1]["fault"]
    found = figures([record], tries)
    assert (found["stop/void_agent"], found["tried_again/void_agent"], found["pass@1/mini:telecom"]) == (1, 1, 0.0)


@pytest.mark.parametrize("body", [b"<html>", {"choices": []}, [1], {"choices": [{"message": {"content": [1]}}]}])
def test_an_answer_that_is_no_completion_is_void_and_no_failure_of_the_agents(body):
    record, _ = one([Answer("Hello?"), Answer(body=body)])
    assert record.stop == "void_agent" and "no chat completion" in record.private[-1]["fault"]


# --------------------------------------------------------------------------------------------- agent and user together


def says(utterance, strategy):
    return json.dumps({"strategy": strategy, "utterance": utterance})


def test_eight_dialogues_are_in_flight_at_once_at_either_endpoint():
    def meet(text):
        return lambda server: Answer(text, delay=lambda: server[0].peak >= 8)

    agents, users = [], []
    with FakeUser(lambda *_: meet(says("Hello.", "reveal_piece"))(users)) as user, \
            served(lambda *_: meet("Hm?")(agents)) as (server, agent):
        users.append(user), agents.append(server)
        records, _ = groups(agent, rollouts=8, caps={"messages": 2}, endpoint=Endpoint("user-1", user.url))
    assert (user.peak, server.peak, [r.stop for r in records]) == (8, 8, ["max_messages"] * 8)


def test_no_strategy_and_no_key_of_the_other_side_reaches_the_agent_and_it_never_sees_the_users_tools():
    turns = [Answer(None, [("check_status_bar", {})]), says("My phone is 520. <|im_end|>", "reveal_piece"),
             says("No.", "challenge_solution"), "###STOP###"]
    with FakeUser(lambda _, n: turns[min(n, 3)]) as user, served([Answer("Is it?"), Answer(None, [GET]), "So?"]) as (
            server, agent):
        (record,), _ = groups(agent, endpoint=Endpoint("user-1", user.url))
    assert record.strategies == ["challenge_solution", "invalid"] and record.reactions == [-1, 0]
    assert [p.get("tool") for p in record.private][:1] == ["check_status_bar"]
    sent = json.dumps(server.requests) + json.dumps(server.headers)
    assert not re.search("strategy|reveal_piece|challenge|invalid|STOP|check_status_bar", sent)
    assert USERS_SECRET not in sent and SECRET not in json.dumps(user.headers) + json.dumps(user.requests)
    assert server.requests[0]["messages"][1]["content"] == "My phone is 520. <|im_end|>"  # as it is


# ------------------------------------------------------------------------------------------------ check and options


def test_check_asks_once_with_a_tool_and_warns_where_no_call_is_seen(capsys):
    for said, warned in ((Answer(None, [("ready", {})]), False), (call("ready"), False), ("Ready!", True)):
        with served([said]) as (server, agent):
            agent.check(77)
        (request,) = server.requests
        assert request["tools"] == [READY] and request["max_tokens"] == 77 and "response_format" not in request
        assert ("no call was seen" in capsys.readouterr().err) is warned


def test_check_finds_out_that_nobody_is_there_or_that_the_cap_is_above_the_context():
    with pytest.raises(SimulatorError, match=r"agent-1 at http://127.0.0.1:1/v1 gave no answer \(no connection"):
        AgentEndpoint("agent-1", "http://127.0.0.1:1/v1").check()
    with served([Answer(status=400, body=FULL[1])]) as (_, agent):
        with pytest.raises(SimulatorError, match="agent-1 at .*: its context is too short"):
            agent.check()


@pytest.mark.parametrize("given_options, named", [
    ({"url": ""}, "--model agent-1 needs --agent-url"), ({"extra": "{"}, "--agent-extra must be one JSON object"),
    ({"extra": '{"tools": []}'}, "--agent-extra"), ({"url": "https://host.example/v1"}, "AGENT_API_KEY is not set")])
def test_options_that_fit_no_agent_are_one_line_with_the_agents_own_flags(given_options, named, monkeypatch):
    monkeypatch.delenv("AGENT_API_KEY")
    with pytest.raises(EndpointError) as caught:
        AgentEndpoint(**{"model": "agent-1", "url": "http://127.0.0.1:1/v1"} | given_options)
    assert named in str(caught.value) and "simulator" not in str(caught.value).lower()


# ----------------------------------------------------------------------------------------------------- without tokens


def test_a_record_without_tokens_is_saved_loaded_and_shown_and_refused_by_what_needs_tokens(tmp_path):
    record, _ = one([Answer(None, [GET]), "Is it mended?", Answer("")])
    file = tmp_path / "results.jsonl"
    save_rollouts(file, [record])
    assert load_rollouts(file) == [record]
    text = show(record)
    assert "tokens" not in text and f"get_line({json.dumps(GET[1])})" in text and "errors none" in text
    assert "tokens trained" in show(replace(record, tokens=[1], segment=[-1], logprobs=[0.0]))
    with pytest.raises(UsageError, match="holds no tokens.* rollouts/"):
        read_batch(str(file))
