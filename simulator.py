"""The frozen user u: each user turn is one visible utterance and one private strategy, named in the same call.

The strategy is for credit alone (faca.py). It reaches no agent prompt, no trained token, and not the utterance. Here
are a user turn, its extraction from a model's JSON reply, the user that a language model plays, and the endpoint that
the model stands behind; the scripted users of the embedded domains are in extras/scripted.py, with the same interface:

    user = make_user(task, user_tools, act, seed, endpoint)  # act([(tool, arguments), ...]) -> [result, ...]: its tools
    turn = await user.open()                                 # UserTurn(utterance, strategy, end): the first message
    turn = await user.reply(text)                            # the next, to the text that the agent showed

A user sees the agent's visible text only, never its think blocks, tool calls or their results. Its own tool calls stay
between it and the world, within its turn. Of what can go wrong, UserFault makes one rollout void; SimulatorError stops
the run; neither is ever a reward of 0.

Chosen here, since the paper's prompt and fallback are not public: USER_PROMPT, the keys of the JSON object, what is
salvaged from a malformed one, at most 10 tool calls a turn, one further request after a blank or malformed reply.
"""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2  # what openai speaks HTTP with
import openai
from tqdm import tqdm

from faca import REACTION


class UserFault(Exception):
    """The user gave no turn, by no fault of the agent's: the rollout is void, never a reward of 0."""


class SimulatorError(Exception):
    """The endpoint refuses for good, and says so in one line: the run stops."""


class ContextFull(SimulatorError):
    """The endpoint refuses a request for its length: the end of an agent's dialogue, but a user's stops the run."""


class EndpointError(ValueError):
    """Options that name no endpoint that could be asked; the message is one line that says what to give."""


@dataclass(frozen=True)
class UserTurn:
    utterance: str  # what the agent reads
    strategy: str   # private: a label of Table 1, or "invalid"
    end: str = ""   # how the user ends the dialogue with this turn, a key of ENDS; "" if it does not


# ------------------------------------------------------------------------------------------------------- the prompt

GREETING = "Hi! How can I help you today?"  # what a model user takes the agent to have said first, as in tau-bench
ENDS = {"stop": "###STOP###", "transfer": "###TRANSFER###", "out_of_scope": "###OUT-OF-SCOPE###"}  # the tau markers

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
- confirm: you agree, or confirm that a step was done, worked or is right
- close: what you came for is settled, and you end the conversation
- reveal_piece: you give information that the agent asked for
- be_vague: you answer without saying anything definite
- ask_clarification: you did not understand, or need something explained before you can go on
- challenge_solution: you object to what the agent says, proposes or has done
- change_mind: you want something else than before, or give up
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


# ----------------------------------------------------------------------------------------------------- the endpoint

KEY = "SIMULATOR_API_KEY"
READY = 'Answer with the json object {"ready": true}.'
FULL = re.compile(r"(?i)context[ _-]?(length|size|window)|maximum (context|number of tokens)|too many (input )?tokens|"
                  "prompt is too long|longer than the model")  # how servers refuse a request for its length
RETRIES = 10  # of a request that met 408, 409, 429, 5xx, a time-out or a lost connection: a minute of growing waits


class Client(openai.DefaultAsyncHttpxClient):
    """Bounds the requests in flight, not those that wait to be tried again, and the whole time of each: httpx's own
    time-out is for the next byte, and some servers send blank lines to keep a waiting client."""

    def __init__(self, slots: int, seconds: float, tally: Counter):
        super().__init__(timeout=None)
        self.slots, self.seconds, self.tally = asyncio.Semaphore(slots), seconds, tally

    async def send(self, request, **options):
        async with self.slots:
            self.tally["retries"] += request.headers.get("x-stainless-retry-count", "0") != "0"
            try:
                async with asyncio.timeout(self.seconds):
                    return await super().send(request, **options)
            except TimeoutError:
                raise httpx2.ReadTimeout(f"no answer in {self.seconds:g} s", request=request) from None


class Endpoint:
    """A model behind an OpenAI-compatible chat-completions endpoint, and a tally of what was asked of it.

    At most `concurrency` requests are in flight; one that waits to be tried again is not. Raises EndpointError
    for options that can't be right. `extra` goes into each request's body as it is. Use it as `async with endpoint:`,
    once in each event loop. What differs for an agent (extras/agent.py) stands in the class.
    """

    key, who, hint = KEY, "user", "see --simulator-extra"
    flags = ("--simulator", "--simulator-url", "--simulator-extra")
    form = {"response_format": {"type": "json_object"}}  # of each request
    trial = [{"role": "user", "content": READY}], {}     # check()'s request

    def __init__(self, model: str, url: str, extra: str = "", concurrency: int = 128, timeout: float = 120.0,
                 judge: str = ""):
        try:
            where = urlsplit(url)
            fits = where.scheme in ("http", "https") and where.hostname and where.port != 0  # raises for a wrong one
        except ValueError:
            fits = False
        if not fits or re.search("[@?#]|[^!-~]", url):
            shown = f"; it is '{url}'" if re.fullmatch("[^@?#]+", url) else ""  # a key may stand in it
            raise EndpointError(f"{self.flags[0]} {model} needs {self.flags[1]}, the base url of an OpenAI-compatible "
                                f"endpoint, as https://HOST/v1, without user name, key or query{shown}")
        try:
            self.extra = json.loads(extra or "{}", parse_constant=int)  # int("NaN") is a ValueError, too
        except ValueError:
            self.extra = None
        if not isinstance(self.extra, dict) or {"model", "messages", "tools"} & set(self.extra):
            raise EndpointError(f"{self.flags[2]} must be one JSON object, without what is ours, is '{extra}'")
        key = os.environ.get(self.key, "")
        if not key and where.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise EndpointError(f"the environment variable {self.key} is not set: it holds the key for {where.hostname}"
                                " (any word where the endpoint wants none)")
        if not re.fullmatch(r"[!-~]*", key):
            raise EndpointError(f"the environment variable {self.key} holds a space, a line break or what no key has")
        self.model, self.url, self.concurrency, self.timeout = model, url, concurrency, timeout
        self.judge = judge or model
        self.tally: Counter = Counter()
        self.answered: dict[str, str] = {}  # model asked for -> model that last answered
        self.client, self.retries = None, RETRIES

    async def __aenter__(self):
        try:
            client = Client(self.concurrency, self.timeout, self.tally)
        except (ImportError, ValueError, OSError) as error:  # told without its text, in which a proxy's password may be
            raise SimulatorError(f"no connection can be set up to {self.url} ({type(error).__name__}): see HTTP_PROXY, "
                                 "ALL_PROXY and SSL_CERT_FILE in the environment") from None
        self.client = openai.AsyncOpenAI(api_key=os.environ.get(self.key) or "none", base_url=self.url,
                                         http_client=client, max_retries=self.retries)
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def chat(self, messages: list[dict], model: str = "", **options):
        """One completion's message; raises as complete() does."""
        return (await self.complete(messages, model, **options)).message

    async def complete(self, messages: list[dict], model: str = "", **options):
        """One completion's choice. Raises UserFault after the last retry, SimulatorError where none would help.

        Of a refusal only status and code are told: its text may repeat the key or the prompt.
        """
        model = model or self.model
        self.tally["requests"] += 1
        self.tally["waiting"] += 1
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=model, messages=messages, extra_body=self.extra, **self.form, **options)
            answer = raw.parse()
            message = answer.choices[0].message
            parts = [message.content or "", *(part for call in message.tool_calls or () for part in (
                call.id or "", call.function.name, call.function.arguments or ""))]
            if not all(isinstance(part, str) for part in parts):
                raise TypeError
            self.count(model, answer)
            return answer.choices[0]
        except openai.APIStatusError as error:
            line = f"{model} at {self.url} answered {error.status_code}{self.told(error)}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise UserFault(line + self.given_up(error)) from None
            if error.status_code in (400, 413, 422) and FULL.search(self.told(error) + str(error)):
                raise ContextFull(f"{line}: its context is too short for the request") from None
            why = {401: f"it refuses the key in {self.key}", 402: "the account's balance is used up",
                   403: f"the key in {self.key} has no right to it", 404: "no such model or path (does it end in /v1?)",
                   }.get(error.status_code, f"it refuses the request; {self.hint}")
            raise SimulatorError(f"{line}: {why}") from None
        except openai.APIConnectionError as error:
            late = isinstance(error, openai.APITimeoutError)
            what = f"in {self.timeout:g} s" if late else "(no connection; is the server running?)"
            raise UserFault(f"{model} at {self.url} gave no answer {what}{self.given_up(error)}") from None
        except (openai.OpenAIError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
            self.tally["faults"] += 1
            raise UserFault(f"{model} at {self.url} answered with something that is no chat completion") from None
        finally:
            self.tally["waiting"] -= 1

    def given_up(self, error: openai.APIError) -> str:
        """Counts a fault and what was tried, and says it."""
        tried = int(error.request.headers.get("x-stainless-retry-count", 0))
        self.tally["faults"] += 1
        return f", {tried + 1} times" if tried else ""

    def told(self, error: openai.APIStatusError) -> str:
        """What a refusal names in single words: OpenAI's code, type and parameter."""
        words = [str(getattr(error, name, None) or "") for name in ("code", "type", "param")]
        key = os.environ.get(self.key) or "\n"
        words = [word for word in words if re.fullmatch(r"[a-zA-Z][a-zA-Z_.]{2,39}", word) and key not in word]
        return f" ({', '.join(words)})" if words else ""

    def count(self, model: str, answer) -> None:
        usage = getattr(answer, "usage", None)
        for name in ("prompt_tokens", "completion_tokens"):
            used = getattr(usage, name, 0)
            self.tally[name] += used if isinstance(used, int) else 0
        now = str(getattr(answer, "model", None) or "unnamed")
        before = self.answered.setdefault(model, now)
        if now != before:
            self.answered[model] = now
            self.tally["model_changes"] += 1
            tqdm.write(f"WARNING: for {model} now {now} answers, no longer {before}: the {self.who} has changed in the"
                       " run", file=sys.stderr)

    def status(self) -> str:
        """For a progress bar: what is waited for."""
        return f"{self.tally['waiting']} requests under way, {self.tally['retries']} retries"

    def take(self) -> dict[str, int]:
        """The tally since it was last taken."""
        return {name: self.tally.pop(name, 0) for name in (
            "requests", "retries", "faults", "asked_again", "strategy_in_text", "model_changes", "prompt_tokens",
            "completion_tokens")}

    def check(self):
        """The answer to one small request. Raises SimulatorError, one line, where there is none."""
        async def once():
            async with self:
                return await self.chat(self.trial[0], **self.trial[1])
        self.retries = 1
        try:
            return asyncio.run(once())
        except UserFault as fault:
            raise SimulatorError(str(fault)) from None
        finally:
            self.retries = RETRIES


def extra_for(model: str) -> str:
    """What a model needs in each request's body and its name tells: DeepSeek's thinks, unless told not to."""
    return '{"thinking": {"type": "disabled"}}' if model.startswith("deepseek-") else ""


def endpoint_of(options, domains: set[str], ranks: int = 1) -> Endpoint | None:
    """The endpoint that --simulator and its kin name, with this rank's share of --concurrency; None for scripted users.

    Raises EndpointError, one line, for options that do not fit each other or the domains.
    """
    if options.simulator != "scripted":
        return Endpoint(options.simulator, options.simulator_url, options.simulator_extra,
                        max(1, options.concurrency // ranks), options.simulator_timeout, options.judge)
    from extras.scripted import SCRIPTS
    for domain in sorted(domains - set(SCRIPTS)):
        raise EndpointError(f"--env {domain} has no scripted user: name a model with --simulator, and the endpoint "
                            "that serves it with --simulator-url")
    for name in ("simulator_url", "simulator_extra", "judge"):
        if getattr(options, name):
            raise EndpointError(f"--{name.replace('_', '-')} needs --simulator MODEL: scripted users ask no endpoint")
    return None
