"""The frozen user u: each user turn is one visible utterance and one private strategy, named in the same call.

The strategy is for credit alone (faca.py). It reaches no agent prompt, no trained token, and not the utterance. Here
are a user turn, its extraction from a model's JSON reply, and the user that a language model plays; its endpoint is in
extras/endpoint.py, and the scripted users of the embedded domains in extras/scripted.py, with the same interface:

    user = make_user(task, user_tools, act, seed, endpoint)  # act([(tool, arguments), ...]) -> [result, ...]: its tools
    turn = await user.open()                                 # UserTurn(utterance, strategy, end): the first message
    turn = await user.reply(text)                            # the next, to the text that the agent showed

A user sees the agent's visible text only, never its think blocks, tool calls or their results. Its own tool calls stay
between it and the world, within its turn. Of what can go wrong, UserFault makes one rollout void; SimulatorError stops
the run; neither is ever a reward of 0.

Chosen here, since the paper's prompt and fallback are not public: USER_PROMPT, the keys of the JSON object, what is
salvaged from a malformed one, at most 10 tool calls a turn, one further request after a blank or malformed reply.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from faca import REACTION


class UserFault(Exception):
    """The user gave no turn, by no fault of the agent's: the rollout is void, never a reward of 0."""


class SimulatorError(Exception):
    """The endpoint refuses for good, and says so in one line: the run stops."""


@dataclass(frozen=True)
class UserTurn:
    utterance: str  # what the agent reads
    strategy: str   # private: a label of Table 1, or "invalid"
    end: str = ""   # how the user ends the dialogue with this turn, a key of ENDS; "" if it does not


# ------------------------------------------------------------------------------------------------------- the prompt

GREETING = "Hi! How can I help you today?"  # what a model user takes the agent to have said first, as in tau-bench
ENDS = {"stop": "###STOP###", "transfer": "###TRANSFER###", "out_of_scope": "###OUT-OF-SCOPE###"}  # the tau markers

STRATEGIES = """\
- confirm: you agree, or confirm that a step was done, worked or is right
- close: what you came for is settled, and you end the conversation
- reveal_piece: you give information that the agent asked for
- be_vague: you answer without saying anything definite
- ask_clarification: you did not understand, or need something explained before you can go on
- challenge_solution: you object to what the agent says, proposes or has done
- change_mind: you want something else than before, or give up
"""  # chosen: what each label of Table 1 means

USER_PROMPT = """\
You play a customer who is writing with a service agent. The scenario at the end says who you are, what you know and
what you want. You are never the agent, and never do the agent's work.

How you behave
- One message at a time, short and natural, in your own words; never recite the scenario.
- One thing at a time. You give a piece of information when the agent asks for it or can't go on without it.
- You invent nothing. What neither the scenario nor your tools tell you, you don't know, and you say so.
- What the scenario tells you to insist on, accept or refuse, you do, whatever the agent suggests.
- If the agent asks you to do several things at once, you say that you can do only one at a time.
- If you have tools, they are what you can look at and do on your own side. You use one only when the agent asked for it
  or its question can't be answered otherwise; after an error you try again, better; you tell what really came back.
- You wait for results: after agreeing to something you don't end the conversation until the agent says it is done.

How you end the conversation: with a marker in your utterance, and not before its time
- ###STOP### when all that the scenario wants is settled: done, or finally refused.
- ###TRANSFER### when the agent has said that you are being transferred to another agent.
- ###OUT-OF-SCOPE### when the scenario does not say enough for you to go on.

Your strategy: beside each utterance you name, privately, what you do in it
""" + STRATEGIES + """\
It is for the record alone: never write the strategy's name, or anything about it, in the utterance.

Answer with one json object and nothing else, for example:
{"strategy": "reveal_piece", "utterance": "It is under the name of Mia Li."}

The scenario
"""
AGAIN = "(Answer as the customer, with the one json object alone.)"


# ------------------------------------------------------------------------------------------------------ extraction

# Where a reply is no valid JSON, what it was going to say is what a JSON string holds after this key.
SALVAGE = re.compile(r'"utterance"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|u[0-9a-fA-F]{0,3}$)?')  # group 1 where JSON knows it
LABEL = "|".join(label.replace("_", "[ _-]") for label in REACTION)
LONE = "|".join(label.replace("_", r"(?:\\?[_-])?\u200b?") for label in REACTION if "_" in label)  # is no English
PRIVATE_LINE = re.compile(rf"(?im)^[^\w\n]*(?:strategy\b.*|(?:{LABEL})[^\w\n]*)$")
MARK, GAP, BRACKETED = r"[^\w\s]{0,4}", r"[^\w\n]{0,4}", rf"[\[(<{{]{{1,3}}\s?(?:{LABEL})\s?[\])>}}]{{1,3}}"
PRIVATE = re.compile("|".join([  # repetitions are bounded, for a model may repeat itself without end
    r"\{[^{}]{0,300}\bstrategy\b[^{}]{0,300}\}",                             # an object, if it is no JSON
    rf"{MARK}\b\w{{0,9}}(?:strateg|label)\w{{0,9}}(?: used)?{GAP}[:=>\u2192\u2013\u2014-]{GAP}(?:{LABEL})\b{MARK}"
    r"(?:strategy>)?",
    rf"(?:(?<![^\n])|(?<=[.!?]\s)|(?<=[\[(<*_\"'`])){MARK}strategy{GAP}[:=]{GAP}[\w-]{{1,40}}{MARK}",  # and any label
    rf"\A\s{{0,3}}{BRACKETED}|{BRACKETED}\s{{0,3}}\Z|\A\s{{0,3}}(?:{LABEL})\s?:",   # [confirm] about the utterance
    LONE]), re.IGNORECASE)


@dataclass(frozen=True)
class Extracted:
    turn: UserTurn | None  # None if there is nothing that the agent could be shown
    parsed: bool           # the reply was a JSON object with an utterance
    cut: int               # places in the utterance that told the strategy, and were cut


def extract_turn(reply: str | None) -> Extracted:
    """A model's reply -> its user turn.

    Meant is one JSON object {"strategy": LABEL, "utterance": TEXT}, in a code fence or amid prose too. A strategy that
    is unknown, missing or no string is "invalid". A reply that holds no such object is "invalid" as a whole, and its
    visible text is salvaged: the utterance as far as it was written, or, where the reply is not JSON at all, the reply
    itself without a line that names the strategy. Markers (ENDS) are taken out of the text, and end the dialogue.
    """
    reply = re.sub(r"<think>.*?(</think>|$)", "", reply or "", flags=re.DOTALL).rpartition("</think>")[2]
    found, strategy, cut = json_object(reply), "invalid", 0
    text = found.get("utterance") if found else None
    parsed = isinstance(text, str)
    if found:
        named = found.get("strategy").strip().lower() if isinstance(found.get("strategy"), str) else ""
        strategy = named if named in REACTION else strategy
        while isinstance(text, str) and isinstance(inner := (json_object(text) or {}).get("utterance"), str):
            text, cut = inner, cut + 1  # the object once more, inside its own utterance
    elif begun := SALVAGE.search(reply):  # with what JSON doesn't know as an escape, or was cut in one, left out
        text = json.loads(f'"{ESCAPE.sub(lambda m: m[0] if m[1] else "", begun[1])}"', strict=False)
    else:
        text = "" if "{" in reply else PRIVATE_LINE.sub("", reply)  # half an object is not for the agent's eyes
    text = text.encode(errors="ignore").decode() if isinstance(text, str) else ""  # half a surrogate goes
    end = next((name for name, marker in ENDS.items() if marker in text), "")
    for _ in range(9):  # what is cut may leave the like behind: reveal_[confirm]piece
        before, objects = text, [o for o in json_objects(text) if "strategy" in o + str(json.loads(o, strict=False))]
        for one in objects:
            text = text.replace(one, "")
        text, more = PRIVATE.subn("", re.sub("|".join(ENDS.values()), "", text))
        cut += len(objects) + more
        if text == before:
            break
    else:
        text = ""
    text = text.strip()
    return Extracted(UserTurn(text, strategy, end) if text or end else None, parsed, cut)


def json_objects(text: str) -> list[str]:
    """The JSON objects that stand in a text, as they are written; what begins like one and is none ends the search."""
    found, place = [], 0
    while start := re.compile(r'\{\s*"').search(text, place):
        try:
            place = json.JSONDecoder(strict=False).raw_decode(text, start.start())[1]
        except (ValueError, RecursionError):
            break
        found.append(text[start.start():place])
    return found


def json_value(text: str):
    """A call's arguments; what is no JSON, or nested too deep to be kept, stays text, which the tool refuses."""
    try:
        return json.loads(text or "{}") if text.count("{") + text.count("[") < 100 else text
    except (ValueError, RecursionError, AttributeError):
        return text or {}


def json_object(text: str) -> dict | None:
    """The first JSON object in a text."""
    found = json_objects(text)
    return json.loads(found[0], strict=False) if found else None


# -------------------------------------------------------------------------------------------------------- the user


class ModelUser:
    """The user that a language model plays: one request a turn, and one more for each round of its own tool calls."""

    TOOL_CALLS = 10  # in one turn

    def __init__(self, instructions: str, tools: list[dict], act: Callable[[list[tuple]], list[str]], endpoint):
        self.tools, self.act, self.endpoint = tools, act, endpoint
        self.messages = [{"role": "system", "content": USER_PROMPT + instructions}]

    async def open(self) -> UserTurn:
        return await self.reply(GREETING)

    async def reply(self, text: str) -> UserTurn:
        """The turn that answers the agent's visible text. Raises UserFault where, asked twice, the model shows none."""
        self.messages.append({"role": "user", "content": text})
        found = extract_turn(await self.after_tools())
        if not found.parsed or not found.turn:
            self.endpoint.tally["asked_again"] += 1
            again = extract_turn((await self.ask([*self.messages, {"role": "user", "content": AGAIN}], "none")).content)
            found = again if again.turn else found
        self.endpoint.tally["strategy_in_text"] += found.cut
        turn = found.turn
        if not turn:
            raise UserFault("the user model's reply was blank twice, or had nothing to be shown")
        said = " ".join(filter(None, [turn.utterance, ENDS.get(turn.end)]))
        own = {"strategy": turn.strategy} if turn.strategy in REACTION else {}  # it is to learn no label of ours
        own |= {"utterance": said}
        self.messages.append({"role": "assistant", "content": json.dumps(own, ensure_ascii=False)})
        return turn

    async def after_tools(self) -> str | None:
        """The model's text, once it has used what it wanted of its tools."""
        used = 0
        while True:
            message = await self.ask(self.messages, "auto" if used < self.TOOL_CALLS else "none")
            if not message.tool_calls or used >= self.TOOL_CALLS:
                return message.content
            calls = [(call.id or f"call_{i}", call.function.name, json_value(call.function.arguments))
                     for i, call in enumerate(message.tool_calls[:self.TOOL_CALLS - used], used)]
            used += len(calls)
            results = self.act([(name, arguments) for _, name, arguments in calls])
            self.messages.append({"role": "assistant", "content": message.content or "", "tool_calls": [
                {"id": i, "type": "function", "function": {
                    "name": name, "arguments": json.dumps(arguments if isinstance(arguments, dict) else {})}}
                for i, name, arguments in calls]})
            self.messages += [{"role": "tool", "tool_call_id": i, "content": result}
                              for (i, _, _), result in zip(calls, results, strict=True)]

    async def ask(self, messages: list[dict], choice: str):
        tools = {"tools": self.tools, "tool_choice": choice} if self.tools else {}
        return await self.endpoint.chat(messages, **tools)


def make_user(task, tools: list[dict], act: Callable[[list[tuple]], list[str]], seed: int, endpoint=None):
    """The user of a task: a model's where there is an endpoint, else the scripted one of the task's domain."""
    if endpoint:
        return ModelUser(task.instructions, tools, act, endpoint)
    from extras.scripted import SCRIPTS
    return SCRIPTS[task.domain](task.facts, act, seed)
