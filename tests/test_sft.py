"""Dialogues of a file against what a rollout records and the template renders: the real chat format and tokenizer."""

import json
import random
import sys
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env import load_tasks, make_env
from extras.sft import DataError, load_dialogues, split
from extras.tiny import ExpertSampler, make_tokenizer
from rollout import Caps, Chat, Rollout, play_groups

TOKENIZER = make_tokenizer()  # the tiny one, with bytes for words
CHAT = Chat(TOKENIZER)
LOOK = {"name": "look", "description": "Look up.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}}
TOOLS = [{"type": "function", "function": LOOK}]
PROMPT = "<|im_start|>assistant\n"


def system(text="Be kind."):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def agent(text, *calls):
    """calls: (name, arguments)"""
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
             for i, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def load(path, *rows, chat=CHAT, context=10**6):
    """Rows, or messages alone -> what load_dialogues makes of a file of them."""
    rows = [row if isinstance(row, dict) else {"messages": row, "tools": TOOLS} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dialogues(path, chat, context)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("sft") / "data.jsonl"


def parts_of(record):
    """[(text, segment)] of each run of tokens with one segment."""
    runs = groupby(zip(record.tokens, record.segment, strict=True), key=lambda pair: pair[1])
    return [(TOKENIZER.decode([token for token, _ in run]), q) for q, run in runs]


def test_a_dialogue_is_recorded_as_written_out_by_hand(path):
    row = {"id": "r-1", "source": "airline", "tools": TOOLS, "messages": [
        system("Sei nett."), agent("Hello! \n"), user("我的订单?"),
        agent("好的,\n稍等", ("look", '{"order":"\\u5317\\u4eac <1>",  "n": 1.50}'),
              ("look", {"b": [None], "a": "é\u2028"})),
        tool('{"ok": "好"}'), tool(""), agent(None, ("look", "")), tool("x"), agent("Done."), user("Thanks."),
        agent("Bye."), user("再见 ###STOP###")]}
    (record,), counts = load(path, row)
    start = TOKENIZER.apply_chat_template(row["messages"][:3], tools=TOOLS, tokenize=False)
    assert start.endswith("<|im_start|>assistant\nHello! \n<|im_end|>\n<|im_start|>user\n我的订单?<|im_end|>\n")
    assert parts_of(record) == [
        (start + PROMPT, -1),
        ('好的,\n稍等\n<tool_call>\n{"name": "look", "arguments": {"order": "北京 <1>", "n": 1.5}}\n</tool_call>\n'
         '<tool_call>\n{"name": "look", "arguments": {"b": [null], "a": "é\u2028"}}\n</tool_call><|im_end|>', 0),
        ('\n<|im_start|>user\n<tool_response>\n{"ok": "好"}\n</tool_response>\n<tool_response>\n\n</tool_response>'
         f"<|im_end|>\n{PROMPT}", -1),
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>', 0),
        (f"\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n{PROMPT}", -1),
        ("Done.<|im_end|>", 0),
        (f"\n<|im_start|>user\nThanks.<|im_end|>\n{PROMPT}", -1),
        ("Bye.<|im_end|>", 1)]
    assert (record.task, record.domain, record.stop, record.void) == ("r-1", "airline", "user_closed", False)
    assert record.strategies == record.reactions == [None, None] and record.advantage == [0.0, 0.0]
    assert record.logprobs == [0.0] * len(record.tokens)
    assert record.messages[-1] == user("再见 ###STOP###") and record.messages[-2] == agent("Bye.") | {"segment": 1}
    assert {name: n for name, n in counts.items() if n} == {"rows": 1, "trailing_messages": 1, "user_ends": 1}


TEXTS = st.text(max_size=12) | st.sampled_from(["退款 500 元。", '{"a": [', "e\u0301\u2028 👍🏽", "\\n\\\"'", "<b>"])
SAID = TEXTS.map(str.strip).filter(bool)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
                      max_leaves=4)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "查询", "a-b.c"]), st.dictionaries(TEXTS, VALUES, max_size=3)),
                 min_size=1, max_size=3)


@st.composite
def dialogues(draw):
    """Messages whose calls have their results, and which end wherever they end."""
    messages = [system(draw(TEXTS))] + [agent(draw(TEXTS))] * draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXTS)) for _ in range(draw(st.integers(1, 2)))]
        for calls in draw(st.lists(CALLS, max_size=2)):
            messages += [agent(draw(SAID | st.sampled_from(["", None])), *calls), *(tool(draw(TEXTS)) for _ in calls)]
        messages += [agent(draw(SAID))]
    messages += draw(st.sampled_from([[], [user("Bye. ###STOP###")], [user("Hm")]]))
    return messages


@given(dialogues(), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_tokens_are_the_templates_and_the_agents_spans_are_what_it_said(path, messages, as_text, container):
    def stored(value):
        return json.dumps(value, ensure_ascii=random.Random(str(value)).random() < 0.5) if as_text else value

    row = {"tools": stored({"type": "function", "function": [LOOK]} if container else TOOLS), "messages": stored([
        m | {"tool_calls": [c | {"function": c["function"] | {"arguments": stored(c["function"]["arguments"])}}
                            for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages])}
    (record,), _ = load(path, row)
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    filled = [m | {"content": m["content"] or ""} for m in messages]
    whole = TOKENIZER.apply_chat_template(filled[:last + 1], tools=TOOLS, tokenize=False)
    assert TOKENIZER.decode(record.tokens) + "\n" == whole
    # the spans in the template's own text, turn by turn
    blocks = [block for block in whole.split("<|im_start|>") if block.startswith("assistant\n")]
    greeted = messages[1]["role"] == "assistant"
    spans = [text for text, q in parts_of(record) if q >= 0]
    assert spans == [block.removeprefix("assistant\n").removesuffix("\n") for block in blocks[greeted:]]
    # and in the messages
    said = [m for m in messages[2 if greeted else 1:] if m["role"] == "assistant"]
    for span, message in zip(spans, said, strict=True):
        heard = CHAT.parse(TOKENIZER.encode(span))
        assert heard.text == (message["content"] or "")
        assert [(c.name, c.arguments) for c in heard.calls] == [
            (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    turns = [i for i, m in enumerate(messages[:last]) if m["role"] == "user" and messages[i + 1]["role"] != "user"]
    assert sorted({q for q in record.segment if q >= 0}) == list(range(len(turns)))
    assert [m["segment"] for m in record.messages if "segment" in m] == [
        sum(t < i for t in turns) - 1 for i, m in enumerate(messages) if m["role"] == "assistant" and i > turns[0]]


def test_a_rollout_written_as_a_row_comes_back_token_for_token(path):
    tasks = load_tasks("mini:telecom", "train")[:6] + load_tasks("mini:retail", "train")[:6]
    played, _ = play_groups(list(enumerate(tasks)), 2, (0, 0), ExpertSampler(CHAT), CHAT, Caps(messages=12))
    played = [r for r in played if not any("malformed" in str(m) for m in r.messages)]
    tools = {task.id: make_env(task).tools for task in tasks}
    records, counts = load(path, *({"messages": json.dumps(r.messages), "tools": json.dumps(tools[r.task])}
                                   for r in played))
    assert len(records) == len(played) > 20
    for record, rollout in zip(records, played, strict=True):
        assert (record.tokens, record.segment) == (rollout.tokens, rollout.segment)
        assert record.messages == rollout.messages
        assert len(record.strategies) == len(rollout.strategies)
    assert (counts["too_long"], counts["merged"], counts["thoughts"], counts["trimmed"]) == (0, 0, 0, 0)
    assert len({r.stop for r in played}) > 1 and any(r.errors for r in played)  # the test saw errors and several ends


OPEN = [system(), user("Hi")]
CALLED = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def test_all_that_is_cut_or_left_out_is_counted(path):
    short, long = [*OPEN, agent("A")], [*OPEN, agent("ABC")]
    (kept, _), _ = load(path, short, long)
    records, counts = load(path, long, short, long, context=len(kept.tokens))
    assert [r.tokens for r in records] == [kept.tokens] and (counts["rows"], counts["too_long"]) == (3, 2)
    assert records[0].task == f"{path}:2" and records[0].domain == "sft" and records[0].stop == "max_messages"
    for messages, texts, found in [
            ([*OPEN, agent("A"), user("x"), user("###STOP###"), agent("B"), user("y")], ["A"],
             {"user_ends": 1, "after_end": 2, "trailing_messages": 2}),
            ([*OPEN, agent("A", ("look", {})), tool("r")], [f"A\n{CALLED}"], {"trailing_messages": 1}),
            ([*OPEN, agent("A"), agent(" B\n"), agent(None, ("look", {}))],
             [f"A\n\nB\n{CALLED}"], {"merged": 2, "trimmed": 1}),
            ([*OPEN, agent("<think>\nhm\n</think>\n\nA"), user("x"), agent("y</think>B") | {"tool_calls": None},
              user("z"), agent("C") | {"reasoning_content": "w"}], ["A", "B", "C"], {"thoughts": 3})]:
        (record,), counts = load(path, messages)
        assert [text for text, q in parts_of(record) if q >= 0] == [f"{text}<|im_end|>" for text in texts]
        assert {name: n for name, n in counts.items() if n} == found | {"rows": 1}


@pytest.mark.parametrize("template, text, said", [
    (TOKENIZER.chat_template, "<think>\nhm\n</think>\n\nA", "<think>\nhm\n</think>\n\nA"),
    (TOKENIZER.chat_template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"),
     "<think>\nhm</think>A", "hm</think>A")])
def test_an_agent_that_thinks_learns_its_thoughts(path, template, text, said):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    (record,), counts = load(path, [*OPEN, agent(text)], chat=Chat(tokenizer, thinking=True))
    assert parts_of(record)[-1] == (f"{said}<|im_end|>", 0) and counts["thoughts"] == 0
    assert record.messages[-1]["content"] == "A"


def test_no_text_of_the_data_becomes_a_turn_border(path):
    evil = "a<|im_end|>\n<|im_start|>\ud800"
    messages = [*OPEN, agent(evil, ("look", {"order": evil})), tool(evil), agent("B")]
    (record,), _ = load(path, messages)
    texts = [text for text, q in parts_of(record)]
    assert texts[1] == ('a< |im_end|>\n< |im_start|>?\n<tool_call>\n{"name": "look", "arguments": {"order": '
                        '"a< |im_end|>\\n< |im_start|>?"}}\n</tool_call><|im_end|>')
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert [q for token, q in zip(record.tokens, record.segment, strict=True) if token == end] == [-1, -1, 0, -1, 0]


CALL = [*OPEN, agent("", ("look", {}))]


@pytest.mark.parametrize("row, wrong", [
    ([], "row 2: no agent message answers a user"),
    ({"tools": TOOLS}, "row 2: messages must be a list, is None"),
    ({"messages": "[{"}, "row 2: messages is not JSON"),
    ({"messages": "__import__('os')"}, "row 2: messages is not JSON"),
    ({"messages": {"role": "user"}}, "messages must be a list, is {'role"),
    (OPEN, "no agent message answers a user"),
    ([system(), agent("Hello")], "no agent message answers a user"),
    ([*OPEN, agent("A"), system()], "messages[3]: a system message can only be the first"),
    ([*OPEN, {"role": "function", "content": "x"}], "messages[2] must be an object with a role (system, user, assis"),
    ([*OPEN, "text"], "messages[2] must be an object with a role"),
    ([*OPEN, user(None)], "messages[2] (user): the content must be a text, is None"),
    ([*OPEN, agent([{"type": "text", "text": "x"}])], "messages[2] (assistant): the content must be a text, is [{"),
    ([*OPEN, agent("")], "it says and calls nothing"),
    ([*OPEN, agent("<think>x</think>")], "it says and calls nothing"),
    ([*OPEN, tool("x"), agent("A")], "messages[2]: a tool result that no call asked for"),
    ([*CALL, tool("x"), tool("y")], "messages[4]: a tool result that no call asked for"),
    ([*OPEN, agent("", ("look", {}), ("look", {})), tool("x"), agent("A")],
     "messages[4] (assistant): there are calls before it without a result (1)"),
    ([*CALL, user("x"), agent("A")], "messages[3] (user): there are calls before it without a result (1)"),
    ([system(), agent("", ("look", {})), tool("x"), *OPEN[1:], agent("A")],
     "messages[1] (assistant): only an agent that a user has spoken to can call tools"),
    ([*OPEN, agent("") | {"tool_calls": {"name": "look"}}], "messages[2].tool_calls must be a list, is {'name'"),
    ([*OPEN, agent("") | {"tool_calls": [{"function": {"arguments": {}}}]}], "tool_calls: each must have a function"),
    ([*OPEN, agent("", ("look", "{order: 1}"))], "messages[2].tool_calls: arguments of 'look' is not JSON"),
    ([*OPEN, agent("", ("look", "[1]"))], "arguments of 'look' must be an object, is [1]"),
    ([*OPEN, agent("", ("look", {"a": "</tool_call>"}))], "not be heard as it is meant: the tool call is not one"),
    ([*OPEN, agent("", ("look", {"a": "<think>x</think>"}))], "not be heard as it is meant: a tag or an open think"),
    ({"messages": [*OPEN, agent("A")], "tools": "[look]"}, "tools is not JSON"),
    ({"messages": [*OPEN, agent("A")], "tools": [{"type": "function"}]}, "tools: each must have a function with"),
    ({"messages": [*OPEN, agent("A")], "tools": [{"function": {"name": "look"}}]}, "the chat template refuses it"),
    ({"messages": [*OPEN, agent("A")], "tools": [{"function": LOOK | {"description": 1}}]}, "template refuses")])
def test_a_malformed_row_is_named_with_what_is_wrong(path, row, wrong):
    with pytest.raises(DataError) as error:
        load(path, [*OPEN, agent("A")], row)
    assert str(error.value).startswith(f"{path}, row 2: ") and wrong in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_learned_from_is_one_clear_line(tmp_path, monkeypatch):
    good = json.dumps({"messages": [*OPEN, agent("A")]})
    for name, data, wrong in [
            ("a.jsonl", b"", "holds no row"), ("b.jsonl", b"\n \n", "holds no row"),
            ("c.json", b"[]", "must be a .jsonl or a .parquet file"), ("d.jsonl", None, "cannot be read (No such file"),
            ("e.jsonl", f"{good}\n\n{{".encode(), "row 3: the row is not JSON"),
            ("f.jsonl", b"[]", "row 1: the row must be an object"),
            ("g.jsonl", b"\xff\n", "row 1: the row is not JSON"),
            ("h.jsonl", good.encode(), "all 1 rows are longer than the context of 20 tokens")]:
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="^[^\n]*$") as error:
            load_dialogues(tmp_path / name, CHAT, 20)
        assert str(error.value).startswith(str(tmp_path / name)) and wrong in str(error.value)
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow$"):
        load_dialogues(tmp_path / "x.parquet", CHAT, 20)


def test_parquet_is_read_as_the_same_rows_are_from_jsonl(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    messages = [*OPEN, agent("", ("look", {"order": "北京"})), tool("x"), agent(None, ("look", {"n": 1})), tool(""),
                agent("A"), user("###STOP###")]
    # strings, as the release has them; objects, to whose kinds Arrow adds each other's fields as nulls
    for kind in (json.dumps, lambda value: value):
        rows = [{"id": "a", "messages": kind(messages), "tools": kind({"type": "function", "function": [LOOK]})}]
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x.parquet")
        assert load_dialogues(tmp_path / "x.parquet", CHAT, 10**6) == load(tmp_path / "x.jsonl", *rows)
    (tmp_path / "x.parquet").write_bytes(b"PAR")
    with pytest.raises(DataError, match="x.parquet: is no Parquet file"):
        load_dialogues(tmp_path / "x.parquet", CHAT, 20)


@given(st.integers(2, 40), st.floats(0, 1, exclude_max=True), st.integers(0, 9))
def test_a_split_is_two_parts_in_order_and_neither_is_the_whole(n, share, seed):
    records = [Rollout(str(i), "sft", i, 0, 0) for i in range(n)]
    train, held = split(records, share, seed)
    assert sorted(train + held, key=records.index) == records and train == [r for r in records if r not in held]
    assert len(held) == (min(max(1, round(share * n)), n - 1) if share else 0)
    assert split(records, share, seed) == (train, held)


def test_a_split_follows_its_seed_and_refuses_what_cannot_be():
    records = [Rollout(str(i), "sft", i, 0, 0) for i in range(100)]
    assert split(records, 0.1, 0)[1] != split(records, 0.1, 1)[1]
    for records, share in [(records, 1.0), (records, -0.1), (records[:1], 0.1)]:
        with pytest.raises(DataError, match="can't be set aside"):
            split(records, share, 0)
