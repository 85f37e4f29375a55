"""simulator.py: extraction for any text, and scripted users that hear what real models say."""

import asyncio
import json
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env import load_tasks, make_env
from extras.mini import Telecom
from extras.scripted import ScriptedUser
from faca import REACTION
from simulator import ENDS, PRIVATE, extract_turn, make_user

TESTS = pathlib.Path(__file__).resolve().parent
fixed = settings(deadline=None, derandomize=True, database=None, max_examples=200)
TELECOM, RETAIL = load_tasks("mini:telecom", "train"), load_tasks("mini:retail", "train")
SIGNS = [sign for sign, _ in Telecom.FAULTS.values()]


class Talk:
    """A scripted user in its live world, and what it did there. faults: the device's, with a fine account."""

    def __init__(self, task, seed=0, faults=None):
        self.task, self.env, self.did = task, make_env(task), []
        if faults is not None:
            self.env.state["device"] |= {fault: fault in faults for fault in Telecom.FAULTS}
            for line in self.env.state["lines"].values():
                line |= {"status": "active", "roaming": "on", "data": "left"}
        self.user = make_user(task, self.env.user_tools, self.act, seed)

    def act(self, calls):
        (tool, arguments), = calls
        result = self.env.call(tool, arguments, "user")
        assert not result.error, result
        self.did += arguments.values()
        return [result.content]

    def says(self, *texts):
        """The user's turn to the last of the texts."""
        return [asyncio.run(self.user.reply(text)) for text in texts][-1]


def retail(want, allowed=True):
    return next(t for t in RETAIL if t.facts["want"] == want and (t.gold[0].name != "refuse") == allowed)


# ------------------------------------------------------------------------------------------------------ extraction

GOOD = '{"strategy": "confirm", "utterance": "Yes."}'


@pytest.mark.parametrize("reply, expected", [
    (GOOD, ("Yes.", "confirm", False)),
    (f"```json\n{GOOD}\n```", ("Yes.", "confirm", False)),
    (f"Here is {{my}} reply: {GOOD} Bye.", ("Yes.", "confirm", False)),
    ('{"utterance": "Bye. ###STOP###", "strategy": "close"}', ("Bye.", "close", "stop")),
    ('{"utterance": "###STOP###", "strategy": "close"}', ("", "close", "stop")),
    ('{"utterance": "###TRANSFER### ", "strategy": "confirm"}', ("", "confirm", "transfer")),
    ('{"utterance": "I can\'t say.###OUT-OF-SCOPE###"}', ("I can't say.", "invalid", "out_of_scope")),
    ("Thanks! ###STOP###", ("Thanks!", "invalid", "stop")),
    ('{"utterance": "## STOP ##", "strategy": "confirm"}', ("## STOP ##", "confirm", False)),
    ('{"utterance": "Yes. (strategy: confirm)", "strategy": "confirm"}', ("Yes.", "confirm", False)),
    ('{"utterance": "[confirm] Yes.", "strategy": "confirm"}', ("Yes.", "confirm", False)),
    ('{"utterance": "Strategy: ask clarification. What is an APN?", "strategy": "ask_clarification"}',
     ("What is an APN?", "ask_clarification", False)),
    ('{"utterance": "Yes {\\"strategy\\": \\"confirm\\"}", "strategy": "confirm"}', ("Yes", "confirm", False)),
    ('{"utterance": "{\\"strategy\\": \\"close\\", \\"utterance\\": \\"Yes.\\"}", "strategy": "confirm"}',
     ("Yes.", "confirm", False)),  # the object once more, inside its own utterance
    ('{"utterance": "I use reveal_piece here: it is 42.", "strategy": "reveal_piece"}',
     ("I use  here: it is 42.", "reveal_piece", False)),
    ('{"utterance": "Please confirm and close it.", "strategy": "confirm"}',
     ("Please confirm and close it.", "confirm", False)),  # English is not cut
    ('{"utterance": "Bye.", "strategy": "CLOSE!"}', ("Bye.", "invalid", False)),
    ('{"utterance": "Bye."}', ("Bye.", "invalid", False)),
    ('{"utterance": "Bye.", "strategy": ["close"]}', ("Bye.", "invalid", False)),
    ('{"utterance": "a\nb", "strategy": "confirm"}', ("a\nb", "confirm", False)),  # a raw line break in the string
    ('{"strategy": "confirm", "utterance": "My number is 42', ("My number is 42", "invalid", False)),
    (r'{"utterance": "I said \"no\".\nThen \u00e9', ('I said "no".\nThen \u00e9', "invalid", False)),
    (r'{"utterance": "a\nb caf\u00e', ("a\nb caf", "invalid", False)),  # cut in an escape: the others stay escapes
    ('{"utterance": "caf\\', ("caf", "invalid", False)),
    (r'{"utterance": "hi \ud83d\ude0', ("hi", "invalid", False)),  # half an emoji can't be encoded as UTF-8
    (r'{"utterance": "I\'m here", "strategy": "confirm"}', ("I'm here", "invalid", False)),  # \' is no JSON escape
    (f"<think>I will {{lie}}.</think>\n{GOOD}", ("Yes.", "confirm", False)),
    (f"I will {{lie}}.</think>{GOOD}", ("Yes.", "confirm", False)),  # the template opened the block
    ("<think>hm</think> Yes, do.", ("Yes, do.", "invalid", False)),
    ("Yes, do.", ("Yes, do.", "invalid", False)),
    ("Strategy: reveal_piece\nIt is 421.", ("It is 421.", "invalid", False)),  # the label is private
    ("421", ("421", "invalid", False)),
    (f"[{GOOD}]", ("Yes.", "confirm", False)),
    *[(nothing, None) for nothing in [
        None, "", " \n", '{"utterance": " ", "strategy": "close"}', '{"strategy": "close"}', '{"utterance": 5}', "{}",
        '{"strategy": "con', "<think>never closed", '```json\n{"strat', 'Sure! {"strategy": "confirm", "utter',
        "{'strategy': 'confirm', 'utterance': 'Hi'}", '["confirm"]', "change_mind", '{"a":' * 100000]],
])
def test_a_reply_gives_the_turn_that_its_visible_text_and_label_say(reply, expected):
    turn = extract_turn(reply).turn
    assert turn == expected if expected is None else (turn.utterance, turn.strategy, turn.end or False) == expected


PIECES = ["{", "}", '"', "\\", ":", ",", "\n", "```json", "<think>", "</think>", "\\u00", "\\ud83d", "[", "strategy",
          '"strategy"', '"utterance"', '"utterance": "', "confirm", "null", "x", "\ud83d"]


@fixed
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_gives_a_turn_that_can_be_shown_or_none(reply):
    turn = extract_turn(reply).turn
    assert turn is None or (turn.utterance.strip() and turn.utterance.encode()
                            and turn.strategy in {*REACTION, "invalid"})


@fixed
@given(st.text(min_size=1).filter(lambda t: t.strip() and not PRIVATE.search(t) and not any(
           mark in t for mark in ("think>", *ENDS.values()))),
       st.sampled_from([*REACTION]),
       st.sampled_from(["", *ENDS]), st.booleans())
def test_any_turn_written_as_json_comes_back(text, strategy, end, ascii_only):
    written = {"utterance": text + ENDS.get(end, ""), "strategy": strategy}
    found = extract_turn(json.dumps(written, ensure_ascii=ascii_only))
    assert (found.turn.utterance, found.turn.strategy, found.turn.end) == (text.strip(), strategy, end)
    assert (found.parsed, found.cut) == (True, 0)


@fixed
@given(st.text(), st.integers(0, 60))
def test_an_utterance_cut_anywhere_is_a_prefix(text, cut):
    whole = '{"strategy": "confirm", "utterance": "' + json.dumps("x" + text)[1:]
    found = extract_turn(whole[:min(39 + cut, len(whole) - 1)])
    turn = found.turn
    assert not found.parsed and turn.strategy == "invalid" and ("x" + text).startswith(turn.utterance)


def phrases():
    for section in (TESTS / "phrases.txt").read_text(encoding="utf-8").split("\n# ")[1:]:
        head, *lines = section.strip().split("\n")
        where, _, what = head.partition(": ")
        strategy, _, tells = what.partition(", ")
        yield from (pytest.param(where, strategy, tells, t.replace("\\n", "\n"), id=f"{where}-{t[:40]}") for t in lines)


@pytest.mark.parametrize("where, strategy, tells, text", list(phrases()))
def test_the_user_reacts_to_free_text_as_a_person_would(where, strategy, tells, text):
    fault = where if where in Telecom.FAULTS else "vpn"
    task = next(t for t in RETAIL if t.facts["detail"] == "large") if where == "retail" else TELECOM[0]
    talk = Talk(task, faults=None if where == "retail" else [fault])
    turn = talk.says(text)
    assert (turn.strategy, bool(turn.end)) == (strategy, strategy == "close")
    for name, fact in {"fact": task.facts.get("phone", task.facts.get("order")), "detail": "large"}.items():
        assert (fact in turn.utterance) == (name == tells)
    if where != "retail":
        assert (fault in talk.did) == (strategy == "close")
        assert strategy == "challenge_solution" or (Telecom.FAULTS[fault][0] in turn.utterance) == (tells == "sign")


def test_the_address_is_told_when_asked_for_and_defended():
    task = retail("address")
    for question in ["Where should we send it?", "Please share the new address.", "To which address, please?"]:
        turn = Talk(task).says(question)
        assert turn.strategy == "reveal_piece" and task.facts["detail"] in turn.utterance
    assert Talk(task).says("Shall I send it to 77 Wrong Street?").strategy == "challenge_solution"
    assert Talk(task).says(f"Shall I send it to {task.facts['detail']}?").strategy == "confirm"
    assert Talk(retail("return")).says("What is the address?").strategy == "ask_clarification"


@pytest.mark.parametrize("task", [TELECOM[0], RETAIL[0]], ids=lambda t: t.domain)
def test_the_third_turn_without_progress_ends_the_dialogue_with_a_change_of_mind(task):
    talk = Talk(task)
    turns = [talk.says(text) for text in ["Blah.", "What is your number?", "Blah.", "Blah."]]
    assert [t.strategy for t in turns] == ["ask_clarification", "reveal_piece", "ask_clarification", "change_mind"]
    assert [bool(t.end) for t in turns] == [False, False, False, True]
    assert turns[-1].utterance in ScriptedUser.GIVE_UP


def test_asking_twice_for_the_same_thing_costs_and_agreeing_twice_is_no_progress():
    talk = Talk(retail("exchange"))
    ask, offer = "What is the order number?", "Shall I go ahead?"
    assert [talk.says(t).strategy for t in (ask, ask, "Size?", "Size?")] == ["reveal_piece", "challenge_solution"] * 2
    for user in (Talk(retail("exchange")), Talk(TELECOM[0])):
        assert [user.says(offer).strategy for _ in range(4)] == ["confirm", "be_vague", "be_vague", "change_mind"]


def test_the_sign_is_news_once_and_again_after_a_step_changed_it():
    talk = Talk(TELECOM[0], faults=["airplane_mode", "vpn"])
    talk.user.patience = 9
    look, step = "Please check the status bar.", "Turn off airplane mode."
    praise = "Great job turning off airplane mode! What shows now?"
    assert [talk.says(t).strategy for t in (look, look, step, look, praise, step)] == [
        "reveal_piece", "be_vague", "confirm", "be_vague", "be_vague", "challenge_solution"]
    turn = talk.says("Thanks for turning off airplane mode! Now disconnect the VPN.")  # what is done is no second step
    assert (turn.strategy, bool(turn.end), talk.did[-1]) == ("close", True, "vpn")


def test_the_user_closes_as_soon_as_it_sees_the_internet_and_not_before():
    task = next(t for t in TELECOM if t.gold[0].name == "enable_roaming")
    talk = Talk(task)
    for call in task.gold[1:]:
        assert not talk.says(f"Please {Telecom.FAULTS[call.arguments['fault']][1]}.").end
    assert not talk.says("I have enabled roaming.").end
    assert not talk.env.call("enable_roaming", {"phone": task.facts["phone"]}).error
    assert talk.says("I have enabled roaming.").strategy == "close"


STEPS = [f"Please {step}." for _, step in Telecom.FAULTS.values()]
WORDS = ["Please", "check", "VPN", "the", "SIM card", "turn", "off", "number", "size", "refund", "sorry", "done", "?",
         ".", "shall I", "status bar", "order", "421", "small", "not", "it", "works", "what", "¿", "’", "address"]
texts = st.lists(st.sampled_from(WORDS)).map(" ".join) | st.text(max_size=60) | st.sampled_from(STEPS)


@fixed
@given(st.sampled_from(TELECOM[:8] + RETAIL[:8]), st.integers(0, 2**56), st.lists(texts, min_size=1, max_size=8))
def test_any_dialogue_is_labelled_ends_in_time_repeats_and_names_no_strategy(task, seed, said):
    turns, one, other = [], Talk(task, seed), Talk(task, seed)
    first = asyncio.run(one.user.open())
    assert first == asyncio.run(other.user.open()) and first.strategy == "reveal_piece" and not first.end
    while said and not (turns and turns[-1].end):
        turns.append(one.says(said[0]))
        assert turns[-1] == other.says(said.pop(0))
    assert {t.strategy for t in turns} <= {*REACTION}
    fruitless = sum(REACTION[t.strategy] <= 0 for t in turns)
    assert fruitless <= 3 and (fruitless == 3) == (turns[-1].strategy == "change_mind")
    assert all(bool(t.end) == (t.strategy in ("close", "change_mind")) for t in turns)
    assert not any(re.search(rf"\b{z}\b|strategy", t.utterance.lower()) for t in [first, *turns] for z in REACTION)


def test_other_seeds_have_other_words():
    for task in (TELECOM[0], RETAIL[0]):
        assert len({Talk(task, seed).says("Blah.").utterance for seed in range(20)}) == 3
        assert len({asyncio.run(make_user(task, [], None, seed).open()).utterance for seed in range(20)}) >= 2


def test_nothing_is_told_that_was_not_asked_for():
    unasked = ["Hello!", "One moment.", "Shall I go ahead?", "I have turned on mobile data.", "Sorry.", "Try it again."]
    for task in TELECOM + RETAIL:
        for seed, text in enumerate(unasked):
            talk = Talk(task, seed)
            heard = asyncio.run(talk.user.open()).utterance + talk.says(text).utterance
            secrets = SIGNS + [task.facts.get(k) for k in ("phone", "order", "detail")]
            assert not [s for s in secrets if s and s in heard]
            assert not set(talk.did) & {*Telecom.FAULTS}
