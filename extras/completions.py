"""OpenAI's chat completions as extras/serve.py takes them: a request read and checked, and the prompt that it means.

A prompt is built as a rollout builds it (rollout.py), not by the template in one go: the first prompt, and then by
turns what the agent said and the template's delta. An agent message that was sampled here, in this very place, has its
own ids again, think block and all; any other is written as SFT writes it (extras/sft.py).

Chosen here: whatever would bend the distribution otherwise than by its temperature (top_p, penalties, forced tools) is
refused, and so is a parameter that is not known, for to ignore it would be to answer another question.
"""

import hashlib
import json
import secrets
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

    messages: list[dict]      # role, content, and of an agent's own tool_calls
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
        if value not in NEUTRAL.get(key, (value,)):
            fine = " or ".join(json.dumps(each) for each in NEUTRAL[key])
            raise Refused(f"{key} must be {fine} here, is {json.dumps(value)[:80]}", param=key)
        if key not in NEUTRAL and key not in OURS | FREE:
            raise Refused(f"{key[:80]!r} is no parameter that is known here", param=key[:80])
    if given.get("model", name) != name:
        raise Refused(f"there is no model {str(given['model'])[:80]!r} here; it is {name!r}", 404, "model",
                      "model_not_found")
    limits = [given[key] for key in ("max_completion_tokens", "max_tokens") if key in given]
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise Refused("stop must be a text or a list of them", param="stop")
    options = given.get("stream_options", {})
    try:
        tools = tools_of(given.get("tools")) if given.get("tool_choice") != "none" else []
    except DataError as error:
        raise Refused(str(error), param="tools") from None
    return Asked(messages_of(given.get("messages")), tools, number(limits[0], "max_tokens", 1) if limits else None,
                 heat(given["temperature"]) if "temperature" in given else None,
                 tuple(stop), number(given.get("n", 1), "n", 1, 128),
                 number(given.get("seed", secrets.randbits(56)), "seed", -2**63, 2**63), bool(given.get("stream")),
                 isinstance(options, dict) and bool(options.get("include_usage")))


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
        try:
            calls = calls_of(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
        except DataError as error:
            raise Refused(str(error), param="messages") from None
        messages.append({"role": role, "content": content or ""} | ({"tool_calls": calls} if calls else {}))
    return messages


# --------------------------------------------------------------------------------------------------------- the prompt


class Memory:
    """The ids of agent messages that were sampled here, by the context before them and by what was said.

    The same context may have had two messages that read alike: then the later one's ids are taken.
    """

    def __init__(self, size: int = 8192):
        self.size, self.ids = size, OrderedDict()

    def key(self, context: list[int], message: dict) -> bytes:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = json.dumps([message["content"].strip(), calls], sort_keys=True)
        return hashlib.blake2b(array("q", context).tobytes() + said.encode(), digest_size=16).digest()

    def put(self, context: list[int], message: dict, ids: list[int]) -> None:
        self.ids[self.key(context, message)] = ids
        while len(self.ids) > self.size:
            self.ids.popitem(last=False)

    def get(self, context: list[int], message: dict) -> list[int] | None:
        return self.ids.get(self.key(context, message))


def prompt_of(messages: list[dict], tools: list[dict], chat: Chat, memory: Memory) -> list[int]:
    """The ids up to and with the generation prompt. Raises Refused where the template does."""
    ids, heard = [], []
    try:
        for message in messages:
            greeting = not ids and not any(m["role"] == "user" for m in heard)  # a part of the prompt
            if message["role"] != "assistant" or greeting:
                heard.append(message)
                continue
            ids += chat.delta(heard, ids[-1]) if ids else chat.open(heard, tools)
            heard = []
            said, _ = written(message["content"], message.get("tool_calls", []), chat)
            ids += memory.get(ids, message) or [*chat.tokenizer.encode(said, add_special_tokens=False), chat.turn_end]
        return ids + chat.delta(heard, ids[-1]) if ids else chat.open(heard, tools)
    except (TemplateError, TypeError, RecursionError) as error:  # TypeError: a tool's description is no text
        why = " ".join(str(error).split())[:160]
        raise Refused(f"the chat template refuses it ({why})", param="messages") from None
