"""OpenAI's chat completions as extras/serve.py takes them: a request read and checked, and the prompt that it means.

A prompt is built as a rollout builds it (rollout.py), not by the template in one go: the first prompt, and then by
turns what the agent said and the template's delta. An agent message that was sampled here, in this very place, and
comes back as it was sent, has its own ids again, think block and all; any other is written as SFT writes it
(extras/sft.py).

Chosen here: whatever would bend the distribution otherwise than by its temperature (top_p, penalties, forced tools) is
refused, and so is a parameter that is not known, for to ignore it would be to answer another question. Tool results go
into the prompt in the order of their calls, by their ids, as in a rollout.
"""

import hashlib
import json
import secrets
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from jinja2 import TemplateError

from extras.sft import DataError, calls_of, tools_of, written
from rollout import Chat

# What may stand in a request because it changes nothing: parameters with the values that do not, and such as are only
# the client's own affair.
NEUTRAL = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "presence_penalty": (0,),
           "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,),
           "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "tool_choice": ("auto", "none")}
FREE = {"user", "store", "metadata", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"}
STOPS = 16  # stop strings of a request, at most
OURS = {"model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "stop", "n", "seed",
        "stream"}


class Refused(Exception):
    """A request that is not answered: the message, and what else OpenAI's error object has."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Asked:
    """A request for completions, checked."""

    messages: list[dict]      # role, content, an agent's tool_calls with their ids, its thoughts, what a result answers
    tools: list[dict]
    max_tokens: int | None
    temperature: float | None
    stop: tuple[str, ...]
    n: int
    seed: int
    stream: bool
    with_usage: bool          # in the stream, too


# -------------------------------------------------------------------------------------------------------- a request


def asked(body: bytes, name: str) -> Asked:
    """What a request asks the model of that name. Raises Refused, which names the parameter."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON ({str(error)[:80]})") from None
    if not isinstance(given, dict):
        raise Refused("the request must be a JSON object")
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key in NEUTRAL and not any(value == fine and isinstance(value, bool) == isinstance(fine, bool)
                                      for fine in NEUTRAL[key]):
            fine = " or ".join(json.dumps(each) for each in NEUTRAL[key])
            raise Refused(f"{key} must be {fine} here, is {json.dumps(value)[:80]}", param=key)
        if key not in NEUTRAL and key not in OURS | FREE:
            raise Refused(f"{key[:80]!r} is no parameter that is known here", param=key[:80])
    if given.get("model", name) != name:
        raise Refused(f"there is no model {str(given['model'])[:80]!r} here; it is {name!r}", 404, "model",
                      "model_not_found")
    limits = [number(given[key], key, 1) for key in ("max_tokens", "max_completion_tokens") if key in given]
    if len(set(limits)) > 1:
        raise Refused(f"max_tokens and max_completion_tokens differ: {limits[0]}, {limits[1]}", param="max_tokens")
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > STOPS or not all(isinstance(each, str) and each for each in stop):
        raise Refused(f"stop must be a text, or a list of at most {STOPS}", param="stop")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool) or not isinstance(options, dict):
        raise Refused("stream must be true or false, stream_options an object", param="stream")
    return Asked(messages_of(given.get("messages")), tools_in(given), limits[0] if limits else None,
                 heat(given["temperature"]) if "temperature" in given else None,
                 tuple(stop), number(given.get("n", 1), "n", 1, 128),
                 number(given.get("seed", secrets.randbits(56)), "seed", -2**63, 2**63), stream,
                 bool(options.get("include_usage")))


def tools_in(given: dict) -> list[dict]:
    """The tools of a request, each with parameters, which templates ask for; none where none may be called."""
    try:
        tools = tools_of(given.get("tools")) if given.get("tool_choice") != "none" else []
    except DataError as error:
        raise Refused(str(error), param="tools") from None
    none = {"type": "object", "properties": {}, "required": []}
    return [tool | {"function": {"description": "", "parameters": none} | tool["function"]} for tool in tools]


def number(value, name: str, low: float, high: float = 2**31, kind: type = int):
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool) and low <= value <= high  # NaN is in no range
    if not fits:
        raise Refused(f"{name} must be {'an integer' if kind is int else 'a number'} from {low} to {high}, is "
                      f"{json.dumps(value)[:80]}", param=name)
    return value


def heat(value) -> float:
    """A temperature; below 0.001, where logits may overflow, it is 0, the likeliest token."""
    value = number(value, "temperature", 0, 2, float)
    return value if value >= 1e-3 else 0.0


def messages_of(found) -> list[dict]:
    """The messages with what a prompt is made of. Raises Refused with the place of the first that has none."""
    if not isinstance(found, list) or not found:
        raise Refused("messages must be a list with one message at least", param="messages")
    messages = []
    for i, message in enumerate(found):
        where = f"messages[{i}]"
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant", "tool"):
            raise Refused(f"{where}: the role must be system, developer, user, assistant or tool", param="messages")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                     for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else False
        if not isinstance(content, str) and (content is not None or role != "assistant"):
            raise Refused(f"{where} ({role}): the content must be text, or a list of parts of text", param="messages")
        if message.get("function_call"):
            raise Refused(f"{where}: a function_call has to be among tool_calls", param="messages")
        try:
            calls = calls_of(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
        except DataError as error:
            raise Refused(str(error), param="messages") from None
        if calls and not any(m["role"] == "user" for m in messages):
            raise Refused(f"{where}: only an agent that a user has spoken to can call tools", param="messages")
        ids = [str(call.get("id") or "") for call in message.get("tool_calls") or () if isinstance(call, dict)]
        thoughts = message.get("reasoning_content") if role == "assistant" else None
        messages.append({"role": role, "content": content or ""} | (
            {"tool_calls": calls, "ids": ids} if calls else {"answers": message["tool_call_id"]}
            if role == "tool" and isinstance(message.get("tool_call_id"), str) else {}) | (
            {"thoughts": thoughts} if isinstance(thoughts, str) and thoughts else {}))
    return in_order_of_calls(messages)


def in_order_of_calls(messages: list[dict]) -> list[dict]:
    """The same with the results of a message's calls in the order of these. Raises Refused for one of no call."""
    ordered, start = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            start = i
        last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
        if not last:
            continue
        results, due = messages[start + 1:i + 1], messages[start].get("ids", [])
        if due and all("answers" in result for result in results):
            if unknown := [result["answers"] for result in results if result["answers"] not in due]:
                raise Refused(f"messages[{start + 1}]: no call before it has the id {unknown[0][:80]!r}",
                              param="messages")
            results = sorted(results, key=lambda result: due.index(result["answers"]))
        ordered += [messages[start], *results]
    return ordered


# --------------------------------------------------------------------------------------------------------- the prompt


class Memory:
    """The ids of agent messages that were sampled here, by the context before them and by what was said.

    Two messages may read alike in one context: then the ids of calls or the thoughts tell them apart, where the client
    sends them back, and else neither is taken. tokens bounds what is kept, the least recently sampled goes first.
    """

    def __init__(self, tokens: int = 2**22):
        self.tokens, self.held, self.kept = tokens, 0, OrderedDict()

    def keys(self, context, message: dict) -> list[bytes]:
        """The most telling first. context: a hash of the ids before the message."""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = json.dumps([message["content"].strip(), calls], sort_keys=True)
        own = "".join(message.get("ids", ())) + message.get("thoughts", "")
        keys = []
        for more in dict.fromkeys((own, "")):
            key = context.copy()
            key.update(json.dumps([said, more]).encode())
            keys.append(key.digest())
        return keys

    def put(self, context: list[int], message: dict, ids: list[int]) -> None:
        for key in self.keys(hashed(context), message):
            before = self.kept.pop(key, None)
            self.kept[key] = now = array("q", ids if before is None or list(before) == ids else ())
            self.held += len(now) - len(before or ())
        while self.held > self.tokens:
            self.held -= len(self.kept.popitem(last=False)[1])

    def get(self, context, message: dict) -> list[int]:
        """[] where there are none."""
        return list(next((found for key in self.keys(context, message) if (found := self.kept.get(key))), ()))


def hashed(ids: list[int], before=None):
    """A running hash of ids."""
    found = before or hashlib.blake2b(digest_size=16)
    found.update(array("q", ids).tobytes())
    return found


class Prompts:
    """What makes prompts of messages, for one tokenizer and a context of so many tokens; used by one thread a time."""

    def __init__(self, chat: Chat, context: int):
        self.chat, self.context, self.memory = chat, context, Memory()
        self.longest = 4 * max(map(len, chat.tokenizer.get_vocab()))  # bytes of a token, at most
        self.lock = threading.Lock()

    def of(self, messages: list[dict], tools: list[dict]) -> list[int]:
        """The ids up to and with the generation prompt. Raises Refused where they leave no room for an answer, and
        where the template refuses the messages."""
        length = sum(len(message["content"].encode(errors="replace")) for message in messages)
        if length > self.longest * self.context:  # told before minutes go into encoding it
            raise self.full(f"at least {length // self.longest}")
        try:
            with self.lock:
                return self.ids_of(messages, disarmed(tools, self.chat))
        except (TemplateError, TypeError, RecursionError) as error:  # TypeError: a tool's description is no text
            why = " ".join(str(error).split())[:160]
            raise Refused(f"the chat template refuses it ({why})", param="messages") from None

    def ids_of(self, messages: list[dict], tools: list[dict]) -> list[int]:
        ids, heard, chat, context = [], [], self.chat, hashed([])

        def add(more: list[int]) -> None:
            ids.extend(more)
            hashed(more, context)
            if len(ids) >= self.context:
                raise self.full(f"at least {len(ids)}")

        for message in messages:
            greeting = not ids and not any(m["role"] == "user" for m in heard)  # a part of the prompt
            if message["role"] != "assistant" or greeting:
                heard.append(message)
                continue
            add(chat.delta(heard, ids[-1]) if ids else chat.open(heard, tools))
            heard = []
            said, _ = written(message["content"], message.get("tool_calls", []), chat)
            add(self.memory.get(context, message)
                or [*chat.tokenizer.encode(said, add_special_tokens=False), chat.turn_end])
        add(chat.delta(heard, ids[-1]) if ids else chat.open(heard, tools))
        return ids

    def full(self, tokens: str) -> Refused:
        return Refused(f"the prompt has {tokens} tokens: this model's maximum context length is {self.context}",
                       param="messages", code="context_length_exceeded")


def disarmed(value, chat: Chat):
    """Tools without turn borders in their texts, as Chat treats messages."""
    if isinstance(value, str):
        return chat.special.sub(lambda s: f"{s[0][0]} {s[0][1:]}", value)
    if isinstance(value, dict):
        return {disarmed(key, chat): disarmed(part, chat) for key, part in value.items()}
    return [disarmed(part, chat) for part in value] if isinstance(value, list) else value
