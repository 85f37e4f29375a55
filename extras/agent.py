"""An agent behind an OpenAI-compatible endpoint, evaluated in the dialogue loop, world and user of training.

    agent = AgentEndpoint("Qwen3-8B", "http://127.0.0.1:8000/v1", temperature=1.0)   # its key: AGENT_API_KEY
    agent.check()                                                                    # one small request
    records, tries = play_groups(groups, trials, key, agent, None, caps)             # in the place of a sampler

The server does what Chat and Sampler do for a policy of ours: each request carries the dialogue as messages in OpenAI's
format (policy, greeting, user, calls, results) and the agent's tools, and the template is the server's. So the record
has no tokens, segments of tokens or logprobs; all else is as ever. Sampling is told in each request: temperature,
top_p 1, max_tokens the cap on a message; what else a server has defaults for (vLLM takes top_k from the model's folder)
is its own, unless `extra` says it; a null there leaves out what we would send. No seed is sent. The cap on context is
not ours to count: where the server refuses a request for its length, the dialogue ends with MAX_CONTEXT; servers count
max_tokens in, so that this comes up to one message earlier than in training. A user's text goes as it is: whether
"<|im_end|>" in it becomes a turn border is the server's affair.

What the agent does wrong stays the agent's: a malformed or unknown call costs error budget, an empty message ends the
dialogue. What its endpoint does wrong (no answer after all tries) makes the dialogue void; a refusal stops the run.

Chosen here: a message without calls whose content has <tool_call>...</tool_call> (a server without a tool parser) is
read as our own agents' are, and goes back as the calls it meant, with ids of ours. Arguments go back as the server
wrote them; those that are no JSON object go back inside of one, for vLLM and others refuse such a history. Content goes
back as it came, think blocks included, as in training; a separate reasoning_content is neither read nor sent back.
"""

import json
import math
import re
import sys

from tqdm import tqdm

from env import Call, parse_call
from extras.endpoint import ContextFull, Endpoint, EndpointError, extra_for
from rollout import THINK, TOOL_CALL, Caps, Dialogue, Over, Said, Stop, read
from simulator import UserFault

READY = {"type": "function", "function": {"name": "ready", "description": "Says that you are ready.",
                                          "parameters": {"type": "object", "properties": {}, "required": []}}}


def sendable(text: str) -> str:
    """Without half a surrogate pair, which JSON can hold, but no request."""
    return text.encode(errors="replace").decode()


def read_message(message) -> tuple[Said, dict]:
    """A completion's message -> what the agent said, and the message as it goes back to the server.

    There each call has the id that the server gave it, which may be none, and arguments that are a JSON object.
    """
    content = sendable(message.content or "")
    visible = THINK.sub("", content).rpartition("</think>")[2]
    said, given = read(visible), message.tool_calls or []
    if given:
        names, texts = zip(*[(call.function.name, call.function.arguments or "{}") for call in given], strict=True)
        said = Said(said.text, [parse_call(text, name) for name, text in zip(names, texts, strict=True)])
    elif said.calls:
        names = [re.sub(r"[^A-Za-z0-9_-]", "_", c.name)[:64] if isinstance(c, Call) else "" for c in said.calls]
        texts = [body for body, _ in TOOL_CALL.findall(visible)]
        content = TOOL_CALL.sub("", content).strip()
    again = {"role": "assistant", "content": content}
    if not said.calls:
        return said, again
    wrote = [json.dumps({"malformed": text}) if not isinstance(call, Call) or not isinstance(call.arguments, dict)
             else sendable(text) if given else json.dumps(call.arguments)
             for call, text in zip(said.calls, texts, strict=True)]
    ids = [call.id for call in given] or [None] * len(said.calls)
    return said, again | {"tool_calls": [
        {"id": i, "type": "function", "function": {"name": sendable(name) or "malformed", "arguments": arguments}}
        for i, name, arguments in zip(ids, names, wrote, strict=True)]}


class AgentDialogue(Dialogue):
    """A rollout whose agent is asked by messages: `sampler` is its endpoint, `sent` what that was told so far."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent: list[dict] = []

    def tell(self, heard: list[dict]) -> None:
        """The agent's cap on messages is ours to see to, its context the server's."""
        due = iter(self.sent[-1].get("tool_calls", ()) if self.sent else ())
        self.sent += [{"role": m["role"], "content": sendable(m["content"])}
                      | ({"tool_call_id": next(due)["id"]} if m["role"] == "tool" else {}) for m in heard]
        if sum("segment" in m for m in self.record.messages) >= self.caps.messages:
            self.record.stop = Stop.MAX_MESSAGES

    async def speak(self, q: int) -> tuple[Said, bool]:
        """One request. Raises Over where the context is full, or where the endpoint gives no message."""
        try:
            options = self.sampler.options(self.env.tools, self.caps.message_tokens)
            choice = await self.sampler.complete(self.sent, **options)
        except ContextFull as full:
            if not self.record.strategies:  # as for a policy of ours: not the agent's doing
                raise UserFault(f"the prompt and the user's first message fill the context: {full}") from None
            self.record.stop = Stop.MAX_CONTEXT
            raise Over(str(full)) from None
        except UserFault as fault:
            self.record.stop = Stop.VOID_AGENT
            raise Over(str(fault)) from None
        said, message = read_message(choice.message)
        calls = message.get("tool_calls", ())
        if len({call["id"] for call in calls} - {"", None}) < len(calls):
            before = sum(m["role"] == "tool" for m in self.sent)
            for n, call in enumerate(calls, before):
                call["id"] = f"call{n:05d}"  # nine letters and digits: all that Mistral's take
        self.sent.append(message)
        return said, choice.finish_reason == "length"


class AgentEndpoint(Endpoint):
    """A model behind a chat-completions endpoint with tools, as the agent. Raises EndpointError as Endpoint does."""

    key, who, form, dialogue = "AGENT_API_KEY", "agent", {}, AgentDialogue
    flags = ("--model", "--agent-url", "--agent-extra")
    hint = ("it was sent with tools, which vLLM takes with --enable-auto-tool-choice and --tool-call-parser alone; for "
            "what else it needs, or can't take, see --agent-extra")

    def __init__(self, model: str, url: str, extra: str = "", concurrency: int = 128, timeout: float = 120.0,
                 temperature: float = 1.0):
        super().__init__(model, url, extra or extra_for(model), concurrency, timeout)
        self.sampling = {"temperature": temperature, "top_p": 1.0}
        self.unset = {name for name, value in self.extra.items() if value is None}
        self.extra = {name: value for name, value in self.extra.items() if value is not None}

    def options(self, tools: list[dict], max_tokens: int) -> dict:
        """What goes into a request beside its messages; extra comes on top."""
        every = self.sampling | {"max_tokens": max_tokens} | ({"tools": tools} if tools else {})
        return {name: value for name, value in every.items() if name not in self.unset}

    def sampled(self, max_tokens: int) -> dict:
        """How each request asks to be sampled, extra included: temperature (NaN: as the server does), max_tokens (0:
        no cap; a max_completion_tokens goes first). Raises EndpointError for what is no number."""
        sent = {"temperature": math.nan, "max_tokens": 0} | self.options([], max_tokens) | self.extra
        for name in ("temperature", "max_tokens", "max_completion_tokens"):
            if isinstance(value := sent.get(name, 0), bool) or not isinstance(value, int | float) or value < 0:
                raise EndpointError(f"--agent-extra has {name} {json.dumps(value)}, which must be a number of at least "
                                    "0, or null")
        asked = sent.get("chat_template_kwargs")
        return {"temperature": float(sent["temperature"]), "thinking": isinstance(asked, dict) and bool(
            asked.get("enable_thinking")), "max_tokens": int(sent.get("max_completion_tokens", sent["max_tokens"]))}

    def check(self, max_tokens: int = Caps.message_tokens) -> None:
        """One small request with a tool, the cap on a message as in all. Raises SimulatorError, one line, where it gets
        no answer; that no call is seen is worth a warning."""
        self.trial = ([{"role": "system", "content": "You call the tools that you are asked to call."},
                       {"role": "user", "content": "Call the tool ready, please."}], self.options([READY], max_tokens))
        said, _ = read_message(super().check())
        if not any(isinstance(call, Call) for call in said.calls):
            tqdm.write(f"WARNING: {self.model} at {self.url} was asked to call a tool, and no call was seen: if it can "
                       "make them, see that the server's tool parser is this model's", file=sys.stderr)
