"""tau_k = (x, a_1, u_2, ..., a_T, u_{T+1}): one dialogue between agent, tools and user, kept token for token (Eq. 1).

Three things are here: the chat format, the dialogue loop, and the record that it fills (its file: extras/show.py). Ids
sampled are ids trained: nothing is decoded and encoded again. Whatever is not the agent's is appended as the chat
template's own delta, found by rendering it after a marked agent message and keeping what follows the mark; so the turn
borders, the newline after them and the generation prompt come from the template, whichever it is. Each token carries
the segment that it was sampled in, -1 for all others: mask and broadcast index in one, from provenance, never values.

    tokens    <|im_start|>system ... no internet.<|im_end|>\\n<|im_start|>assistant\\n  What is your number?<|im_end|>
    segment   -1 .......................................................................   0    0  0    0     0 0

One segment is all that the agent samples between two user messages: text, tool calls, text after their results. Chosen
here: a message with a tool call goes to the tools alone (its text is kept, but not shown to the user); a message cut at
its token cap is taken as it stands; an empty message ends the dialogue. Departure from Qwen3's template: a think block
stays in the history where it was generated, for the ids of message n+1's prompt must start with those of message n's.

`python rollout.py FILE.jsonl [INDEX]` shows a saved rollout: agent text in the colour of its segment's advantage, the
user's private label beside each turn, masked text grey.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate

import torch

from env import Call, Task, ToolResult, make_env, parse_call
from faca import reaction_of
from simulator import UserFault, UserTurn, make_user


class Stop(StrEnum):
    """How a dialogue ended. An end by user or agent is verified; any other is a failure, and void is neither."""

    USER_CLOSED = "user_closed"            # the user ended it, content
    USER_LEFT = "user_left"                # the user ended it otherwise, for instance out of patience
    TRANSFER = "transfer"                  # the user was, or a tool of the agent's put it, through to another agent
    OUT_OF_SCOPE = "out_of_scope"          # the user's instructions had no answer
    MAX_MESSAGES = "max_messages"          # the agent's message cap, a tool call pending or not
    MAX_STEPS = "max_steps"                # the cap on steps of both sides
    MAX_CONTEXT = "max_context"            # the context is full
    TOO_MANY_ERRORS = "too_many_errors"    # the error budget is spent
    EMPTY_MESSAGE = "empty_message"        # the agent said nothing and called nothing
    VOID_USER = "void_user"                # no user turn could be had
    VOID_USER_ERRORS = "void_user_errors"  # the user's tool errors alone spent the budget
    VOID_WORLD = "void_world"              # the environment broke
    VOID_AGENT = "void_agent"              # the agent's endpoint gave no message

    @property
    def void(self) -> bool:
        return self.startswith("void")

    @property
    def verified(self) -> bool:
        return self in (Stop.USER_CLOSED, Stop.USER_LEFT, Stop.TRANSFER, Stop.OUT_OF_SCOPE)


@dataclass(frozen=True)
class Caps:
    """The limits of a dialogue, the same for every arm."""

    messages: int = 30          # agent messages
    message_tokens: int = 1024  # tokens in one of them
    context: int = 32768        # tokens in all
    errors: int = 10            # tool errors of both sides: malformed calls, unknown tools, refused calls
    steps: int = 200            # as tau2 counts them: a message of either side, or the results of its tool calls
    official: bool = False      # a benchmark's own limits on these but tokens; the user's tool errors make no void

    def within(self, limits: dict[str, int]) -> "Caps":
        """These for a world with limits of its own: officially its limits, and no cap on what it does not limit."""
        free = dict.fromkeys(("messages", "errors", "steps"), 10**9)
        return replace(self, **free | limits) if self.official and limits else self


@dataclass
class Rollout:
    """The append-only record of one dialogue, and a line of a rollout file. T tokens, Q segments."""

    task: str
    domain: str
    group: int
    k: int
    seed: int
    tokens: list[int] = field(default_factory=list)             # (T,)
    segment: list[int] = field(default_factory=list)            # (T,) U2U index of a sampled token, else -1
    logprobs: list[float] = field(default_factory=list)         # (T,) of sampled tokens, else 0
    strategies: list[str | None] = field(default_factory=list)  # (Q,) private; None where no user turn followed
    reactions: list[int | None] = field(default_factory=list)   # (Q,) Table 1
    advantage: list[float] = field(default_factory=list)        # (Q,) Eq. 6, once the step is over
    outcome_advantage: float = 0.0                              # Eq. 2, likewise
    reward: float = 0.0
    stop: str = ""
    errors: dict[str, int] = field(default_factory=dict)        # the agent's by kind, and "user"
    messages: list[dict] = field(default_factory=list)          # the public transcript
    private: list[dict] = field(default_factory=list)           # strategies, and the user's own tool calls

    @property
    def void(self) -> bool:
        return Stop(self.stop).void

    @property
    def solved(self) -> bool:
        return self.reward == 1.0 and not self.void

    def append(self, ids: list[int], segment: int = -1, logprobs: list[float] | None = None) -> None:
        """The one way tokens enter the record; the three lists keep one length."""
        self.tokens += ids
        self.segment += [segment] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        if not len(self.tokens) == len(self.segment) == len(self.logprobs):
            raise RuntimeError(f"{len(ids)} ids came with {len(logprobs or [])} logprobs")


# ----------------------------------------------------------------------------------------------------- chat format

MARK = "\u241fagent\u241f"  # stands for an agent message while a template's delta is found
THINK = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class Said:
    """An agent message: the text outside think blocks and calls, and its calls, a str where one is malformed."""

    text: str
    calls: list[Call | str]


class Chat:
    """The chat format of one tokenizer: prompts and deltas from its template, agent messages out of ids.

    end_ids end an agent message: the template's turn end, the tokenizer's eos, <|endoftext|> where it exists.
    """

    def __init__(self, tokenizer, thinking: bool = False):
        self.tokenizer, self.thinking = tokenizer, thinking
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        delta = self._after_agent([{"role": "user", "content": "x"}])
        self.turn_end = self._encode(delta)[0]
        self.inside = "<think>" * (delta.count("<think>") - delta.count("</think>"))  # where the prompt leaves it open
        ends = {self.turn_end, tokenizer.eos_token_id, tokenizer.get_vocab().get("<|endoftext|>")}
        self.end_ids = frozenset(ends - {None})

    def banned_ids(self, rows: int) -> list[int]:
        """Neither sampled nor scored: the unused ones of the embedding's rows, and padding unless it ends a message."""
        return sorted({*range(len(self.tokenizer), rows), self.tokenizer.pad_token_id} - self.end_ids - {None})

    def open(self, messages: list[dict], tools: list[dict]) -> list[int]:
        """x: the ids of the first prompt, up to and with the generation prompt."""
        return self._encode(self._render(messages, tools or None))

    def delta(self, messages: list[dict], last_id: int) -> list[int]:
        """The ids between an agent message whose last id is last_id and the agent's next: messages, borders, prompt.

        The turn end is in the delta unless the agent sampled it itself.
        """
        ids = self._encode(self._after_agent(messages))
        return ids[1:] if last_id == self.turn_end else ids

    def parse(self, ids: list[int]) -> Said:
        """The message that ids decode to, from within the think block that the prompt may have left open."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return read(self.inside + text)

    def _after_agent(self, messages: list[dict]) -> str:
        marked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        return self._render(marked + messages, None).partition(MARK)[2]

    def _render(self, messages: list[dict], tools: list[dict] | None) -> str:
        # Special tokens inside a text (a user may write anything) must not become turn borders: "< |im_end|>".
        safe = [m | {"content": self.special.sub(lambda s: f"{s[0][0]} {s[0][1:]}", m["content"])} for m in messages]
        return self.tokenizer.apply_chat_template(safe, tools=tools, tokenize=False, add_generation_prompt=True,
                                                  enable_thinking=self.thinking)

    def _encode(self, text: str) -> list[int]:
        text = text.encode(errors="replace").decode()  # half a surrogate pair (JSON can hold one) has no ids
        return self.tokenizer.encode(text, add_special_tokens=False)


def read(text: str) -> Said:
    """Qwen3's tool-call syntax. What stands in a think block is neither said nor called, closed or not."""
    text = THINK.sub("", text).rpartition("</think>")[2]
    calls = [parse_call(body) if closed else "the tool call is not closed" for body, closed in TOOL_CALL.findall(text)]
    return Said(TOOL_CALL.sub("", text).strip(), calls)


# ---------------------------------------------------------------------------------------------------- the dialogue


class WorldFault(Exception):
    """The environment raised: a bug of the world's, so that the rollout is void."""


class Over(Exception):
    """A limit ended the dialogue in the midst of the user's turn."""


class Dialogue:
    """One rollout under way: the world, the user, and the record that they fill."""

    def __init__(self, task: Task, group: int, k: int, seed: int, sampler, chat: Chat, caps: Caps,
                 endpoint=None):
        self.task, self.sampler, self.chat, self.endpoint = task, sampler, chat, endpoint
        self.record = Rollout(task.id, task.domain, group, k, seed)
        self.env = make_env(task)
        self.caps = caps.within(self.env.limits)
        self.user = make_user(task, self.env.user_tools, self.run_user_tools, seed, endpoint)
        self.users_own = {t["function"]["name"] for t in self.env.user_tools}
        self.steps, self.version = 0, None

    async def play(self) -> Rollout:
        """x, then a_q and u_{q+1} in turn until somebody ends it; a verified reward if that was user or agent."""
        record, env = self.record, self.env
        try:
            turn = await self.user.open()
            if turn.end:
                raise UserFault("the user ended the dialogue with its first message")
            record.messages.append({"role": "system", "content": env.policy})
            record.messages += [{"role": "assistant", "content": env.greeting}] if env.greeting else []
            self.hear(turn)
            self.tell(record.messages)
            if record.stop:
                raise UserFault("the prompt and the user's first message fill the context")
            while (said := await self.agent_segment(len(record.strategies))) is not None:
                turn = await self.user.reply(said)
                self.hear(turn)
                record.strategies[-1], record.reactions[-1] = turn.strategy, reaction_of(turn.strategy)
                if turn.end:
                    record.stop = {"transfer": Stop.TRANSFER, "out_of_scope": Stop.OUT_OF_SCOPE}.get(
                        turn.end, Stop.USER_CLOSED if turn.strategy == "close" else Stop.USER_LEFT)
                if not self.limited() and not turn.end:  # a limit wins over the user's end, as in tau2
                    self.tell(record.messages[-1:])
            if Stop(record.stop).verified:
                record.reward = await self.verify()
        except (Over, UserFault, WorldFault) as fault:
            if not isinstance(fault, Over):
                record.stop = Stop.VOID_USER if isinstance(fault, UserFault) else Stop.VOID_WORLD
            if record.void:
                record.private.append({"turn": len(record.strategies), "fault": str(fault)})
        return record

    async def verify(self) -> float:
        """The verifier's reward; a judge is asked only where all depends on it."""
        messages, held = self.record.messages, None
        if self.task.assertions:
            if not self.endpoint:
                raise WorldFault(f"task {self.task.id} needs a judge of its assertions, and there is no endpoint")
            held = bool(self.in_world(self.env.reward, messages, True))
            from extras.judge import judged
            held = held and await judged(self.task.assertions, messages, self.endpoint)
        return self.in_world(self.env.reward, messages, held)

    async def agent_segment(self, q: int) -> str | None:
        """a_q: messages and their tools until one is for the user; its text, or None if the dialogue ended."""
        record = self.record
        while not record.stop:
            said = await self.agent_message(q)
            self.steps += 1
            if not said.calls:
                if not said.text:
                    record.stop = Stop.EMPTY_MESSAGE
                return said.text if said.text and not self.limited() else None
            results = [{"role": "tool", "content": self.agent_tool(call)} for call in said.calls]
            record.messages += results
            self.steps += 1
            if self.env.ended:
                record.stop = Stop.TRANSFER
            elif not self.limited():
                self.tell(results)

    def limited(self) -> bool:
        """Whether errors or steps are spent; asked, as in tau2, wherever the next word is not the world's."""
        errors, budget = self.record.errors, self.caps.errors
        if sum(errors.values()) >= budget:  # where the user alone has spent it, the agent is not to blame
            users = errors.get("user", 0) >= budget and not self.caps.official
            self.record.stop = Stop.VOID_USER_ERRORS if users else Stop.TOO_MANY_ERRORS
        elif self.steps >= self.caps.steps:
            self.record.stop = Stop.MAX_STEPS
        return self.record.stop in (Stop.MAX_STEPS, Stop.TOO_MANY_ERRORS, Stop.VOID_USER_ERRORS)

    def tell(self, heard: list[dict]) -> None:
        """Appends what leads to the agent's next message; ends the dialogue where a cap leaves none to it."""
        record, caps = self.record, self.caps
        ids = self.chat.delta(heard, record.tokens[-1]) if record.tokens else self.chat.open(heard, self.env.tools)
        if sum("segment" in m for m in record.messages) >= caps.messages:
            record.stop = Stop.MAX_MESSAGES
        elif len(record.tokens) + len(ids) >= caps.context:
            record.stop = Stop.MAX_CONTEXT
        else:
            record.append(ids)

    async def speak(self, q: int) -> tuple[Said, bool]:
        """The agent's next message, and whether the token cap cut it."""
        record = self.record
        room = min(self.caps.message_tokens, self.caps.context - len(record.tokens))
        sample = await self.sampler.sample(record.tokens, room, record.seed)
        if self.version not in (None, sample.version):
            raise RuntimeError(f"the weights changed within a rollout: {self.version} -> {sample.version}")
        self.version = sample.version
        record.append(sample.tokens, q, sample.logprobs)
        return self.chat.parse(sample.tokens), sample.stop == "length"

    async def agent_message(self, q: int) -> Said:
        record = self.record
        said, cut = await self.speak(q)
        if q == len(record.strategies):  # the segment exists from its first message on
            record.strategies.append(None)
            record.reactions.append(None)
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} if isinstance(c, Call)
                 else {"malformed": c} for c in said.calls]
        record.messages.append({"role": "assistant", "content": said.text, "segment": q}
                               | ({"tool_calls": calls} if calls else {})
                               | ({"cut": True} if cut else {}))
        return said

    def agent_tool(self, call: Call | str) -> str:
        """Runs one call of the agent's. What is wrong with it goes back to the agent, and costs error budget."""
        errors, malformed = self.record.errors, isinstance(call, str)
        result = (ToolResult(f"Error: {call}.", error=True) if malformed else
                  self.in_world(self.env.call, call.name, call.arguments, "assistant"))
        if result.error:
            kind = "malformed" if malformed else "authority" if call.name in self.users_own else "tool"
            errors[kind] = errors.get(kind, 0) + 1
        return result.content

    def run_user_tools(self, calls: list[tuple]) -> list[str]:
        """Runs one round of the user's own calls. They and their results stay between user and world."""
        record, results = self.record, []
        for name, arguments in calls:
            result = self.in_world(self.env.call, name, arguments, "user")
            if result.error:
                record.errors["user"] = record.errors.get("user", 0) + 1
            record.private.append({"turn": len(record.strategies), "tool": name, "arguments": arguments,
                                   "result": result.content})
            results.append(result.content)
        self.steps += 2
        if self.limited():
            raise Over("the user's tool errors alone spent the budget")  # told where that made it void
        return results

    def hear(self, turn: UserTurn) -> None:
        """Enters the user's turn into both transcripts; the agent hears what stands in the public one."""
        self.record.messages.append({"role": "user", "content": turn.utterance})
        self.record.private.append({"turn": len(self.record.strategies), "strategy": turn.strategy}
                                   | ({"end": turn.end} if turn.end else {}))
        self.steps += 1

    def in_world(self, function: Callable, *arguments):
        """Calls into the environment; whatever it raises is its own fault, not the agent's."""
        try:
            return function(*arguments)
        except Exception as error:
            raise WorldFault(f"{type(error).__name__}: {error}") from error


def stream_seed(*parts: int) -> int:
    """The random stream of one rollout, from (seed, step, group, k, attempt): the same in any order, on any rank."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def play_groups(groups: list[tuple[int, Task]], rollouts: int, key: tuple[int, int], sampler, chat: Chat, caps: Caps,
                void_retries: int = 2, done: Callable[[Rollout, bool], None] = lambda record, last: None,
                halt: Callable[[], bool] = lambda: False, endpoint=None, at_once: int = 10**9,
                first: Callable[[int, int], int | None] = lambda group, k: 0) -> tuple[list[Rollout], list[Rollout]]:
    """K rollouts of each (group, task), at_once of them under way: in the order of group and k, and the void tries.

    key: (seed, step). A void rollout is tried again with a stream of its own, and kept as void after void_retries.
    done(rollout, last) hears of each when it ends; last: it is not tried again. Once halt() is true, or one has raised
    SimulatorError, all are given up. first(group, k): the number of the first try, or None to leave the rollout out.
    """
    tries: list[Rollout] = []
    slots, dialogue = asyncio.Semaphore(at_once), getattr(sampler, "dialogue", Dialogue)  # an endpoint has its own

    async def one(group: int, task: Task, k: int) -> Rollout | None:
        async with slots:
            if (begin := first(group, k)) is None:
                return None
            for attempt in range(begin, begin + void_retries + 1):
                seed = stream_seed(*key, group, k, attempt)
                record = await dialogue(task, group, k, seed, sampler, chat, caps, endpoint).play()
                last = not record.void or attempt == begin + void_retries
                done(record, last)
                if last:
                    return record
                tries.append(record)

    async def everyone() -> list[Rollout]:
        async with endpoint or nullcontext(), nullcontext() if dialogue is Dialogue else sampler:
            work = [asyncio.create_task(one(group, task, k)) for group, task in groups for k in range(rollouts)]
            waiting, failed = set(work), None
            while waiting and not failed and not halt():
                over, waiting = await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                failed = next((task.exception() for task in over if task.exception()), None)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            if failed:
                raise failed
            return [] if waiting else [record for task in work if (record := task.result())]

    return asyncio.run(everyone()), tries


# --------------------------------------------------------------------------------------------------------- tensors


def padded(lists: list[list], fill, dtype: torch.dtype) -> torch.Tensor:
    """Rows of unlike length as one tensor, at least one wide, filled on the right."""
    width = max([1, *map(len, lists)])
    return torch.tensor([v + [fill] * (width - len(v)) for v in lists], dtype=dtype).view(len(lists), width)


def credit_tensors(records: list[Rollout]) -> dict[str, torch.Tensor]:
    """What faca.py reads of a step's rollouts: reward_N, reaction_NQ, observed_NQ, exists_NQ, group_N, valid_N."""
    return {
        "reward_N": torch.tensor([r.reward for r in records]),
        "reaction_NQ": padded([[f or 0 for f in r.reactions] for r in records], 0, torch.float32),
        "observed_NQ": padded([[f is not None for f in r.reactions] for r in records], False, torch.bool),
        "exists_NQ": padded([[True] * len(r.strategies) for r in records], False, torch.bool),
        "group_N": torch.tensor([r.group for r in records], dtype=torch.long),
        "valid_N": torch.tensor([not r.void for r in records], dtype=torch.bool),
    }


def packed(records: list[Rollout], pad_id: int) -> tuple:
    """Rollouts end to end in one row, without padding: (tokens_1T, segment_1T, logprob_1T, advantage_1Q, lengths).

    Segments are numbered through, so that each token finds its own advantage in advantage_1Q. For no records, one token
    that has nothing to train: a rank without a share still joins every forward pass.
    """
    records = records or [Rollout("", "", 0, 0, 0, [pad_id], [-1], [0.0])]
    before = accumulate((len(r.advantage) for r in records), initial=0)
    segment = [s if s < 0 else s + n for r, n in zip(records, before, strict=False) for s in r.segment]
    return (torch.tensor([[t for r in records for t in r.tokens]]), torch.tensor([segment]),
            torch.tensor([[p for r in records for p in r.logprobs]]),
            torch.tensor([[a for r in records for a in r.advantage]]), [len(r.tokens) for r in records])


if __name__ == "__main__":
    from extras.show import main
    main()
