"""tau_k = (x, a_1, u_2, ..., a_T, u_{T+1}): one dialogue between agent, tools and user, kept token for token (Eq. 1).

Three things are here: the chat format, the dialogue loop, and the record that it fills, with its file format. Ids
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
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import get_args, get_origin

import torch

from env import Call, Task, ToolResult, make_env
from faca import reaction_of
from simulator import UserFault, UserTurn, make_user


class Stop(StrEnum):
    """How a dialogue ended. Only the user's own end is verified; any other is a failure, and void is neither."""

    USER_CLOSED = "user_closed"            # the user ended it, content
    USER_LEFT = "user_left"                # the user ended it otherwise, for instance out of patience
    MAX_MESSAGES = "max_messages"          # the agent's message cap, a tool call pending or not
    MAX_CONTEXT = "max_context"            # the context is full
    TOO_MANY_ERRORS = "too_many_errors"    # the agent's error budget is spent
    EMPTY_MESSAGE = "empty_message"        # the agent said nothing and called nothing
    VOID_USER = "void_user"                # no user turn could be had
    VOID_WORLD = "void_world"              # the environment broke

    @property
    def void(self) -> bool:
        return self in (Stop.VOID_USER, Stop.VOID_WORLD)


@dataclass(frozen=True)
class Caps:
    """The limits of a dialogue, the same for every arm."""

    messages: int = 30          # agent messages
    message_tokens: int = 1024  # tokens in one of them
    context: int = 32768        # tokens in all
    errors: int = 10            # of the agent's: malformed calls, unknown tools, refused calls


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
    errors: dict[str, int] = field(default_factory=dict)        # of the agent's, by kind
    messages: list[dict] = field(default_factory=list)          # the public transcript
    private: list[dict] = field(default_factory=list)           # strategies, and the user's own tool calls

    @property
    def void(self) -> bool:
        return Stop(self.stop).void

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
        """Qwen3's tool-call syntax. What stands in a think block is neither said nor called, closed or not."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = THINK.sub("", self.inside + text).rpartition("</think>")[2]
        calls = [parse_call(body) if closed else "the tool call is not closed"
                 for body, closed in TOOL_CALL.findall(text)]
        return Said(TOOL_CALL.sub("", text).strip(), calls)

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


def parse_call(body: str) -> Call | str:
    """The JSON between tool-call tags -> the call, or what is wrong with it, in words for the agent."""
    if max(accumulate((c in "[{") - (c in "]}") for c in body), default=0) > 99:
        return "the tool call is nested too deep"  # to be copied and saved, at least
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"the tool call is not one JSON object ({str(error)[:80]})"
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return "the tool call must be a JSON object with a name and arguments"
    return Call(found["name"], found.get("arguments", {}))


# ---------------------------------------------------------------------------------------------------- the dialogue


class Dialogue:
    """One rollout under way: the world, the user, and the record that they fill."""

    def __init__(self, task: Task, group: int, k: int, seed: int, sampler, chat: Chat, caps: Caps):
        self.env, self.sampler, self.chat, self.caps = make_env(task), sampler, chat, caps
        self.record = Rollout(task.id, task.domain, group, k, seed)
        self.user = make_user(task, self.user_tool, seed)
        self.user_tools = {t["function"]["name"] for t in self.env.user_tools}
        self.version = None

    async def play(self) -> Rollout:
        """x, then a_q and u_{q+1} in turn until somebody ends it; a verified reward if that was the user."""
        record = self.record
        try:
            turn = await self.user.open()
            opener = [{"role": "system", "content": self.env.policy}, {"role": "user", "content": turn.utterance}]
            self.hear(turn, opener)
            self.tell(self.chat.open(opener, self.env.tools))
            while (said := await self.agent_segment(len(record.strategies))) is not None:
                turn = await self.user.reply(said)
                heard = [{"role": "user", "content": turn.utterance}]
                self.hear(turn, heard)
                record.strategies[-1], record.reactions[-1] = turn.strategy, reaction_of(turn.strategy)
                if turn.done:
                    record.stop = Stop.USER_CLOSED if turn.strategy == "close" else Stop.USER_LEFT
                    seen = [m["content"] for m in record.messages if m["role"] == "assistant" and "tool_calls" not in m]
                    record.reward = self.in_world(self.env.reward, seen)
                else:
                    self.tell(self.chat.delta(heard, record.tokens[-1]))
        except (UserFault, WorldFault) as fault:
            record.stop = Stop.VOID_USER if isinstance(fault, UserFault) else Stop.VOID_WORLD
            record.private.append({"turn": len(record.strategies), "fault": str(fault)})
        return record

    async def agent_segment(self, q: int) -> str | None:
        """a_q: messages and their tools until one is for the user; its text, or None if the dialogue ended."""
        record = self.record
        while not record.stop:
            said = await self.agent_message(q)
            if not said.calls:
                if not said.text:
                    record.stop = Stop.EMPTY_MESSAGE
                return said.text or None
            results = [{"role": "tool", "content": self.agent_tool(call)} for call in said.calls]
            record.messages += results
            if sum(record.errors.values()) >= self.caps.errors:
                record.stop = Stop.TOO_MANY_ERRORS
            else:
                self.tell(self.chat.delta(results, record.tokens[-1]))

    def tell(self, ids: list[int]) -> None:
        """Appends the ids that lead to the agent's next message; ends the dialogue where a cap leaves none to it."""
        record, caps = self.record, self.caps
        if sum(m["role"] == "assistant" for m in record.messages) == caps.messages:
            record.stop = Stop.MAX_MESSAGES
        elif len(record.tokens) + len(ids) >= caps.context:
            record.stop = Stop.MAX_CONTEXT
        else:
            record.append(ids)

    async def agent_message(self, q: int) -> Said:
        record = self.record
        room = min(self.caps.message_tokens, self.caps.context - len(record.tokens))
        sample = await self.sampler.sample(record.tokens, room, record.seed)
        if self.version not in (None, sample.version):
            raise RuntimeError(f"the weights changed within a rollout: {self.version} -> {sample.version}")
        self.version = sample.version
        if q == len(record.strategies):  # the segment exists from its first token on
            record.strategies.append(None)
            record.reactions.append(None)
        record.append(sample.tokens, q, sample.logprobs)
        said = self.chat.parse(sample.tokens)
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} if isinstance(c, Call)
                 else {"malformed": c} for c in said.calls]
        cut = {"cut": True} if sample.stop == "length" else {}
        record.messages.append({"role": "assistant", "content": said.text, "segment": q}
                               | ({"tool_calls": calls} if calls else {}) | cut)
        return said

    def agent_tool(self, call: Call | str) -> str:
        """Runs one call of the agent's. What is wrong with it goes back to the agent, and costs error budget."""
        errors, malformed = self.record.errors, isinstance(call, str)
        result = (ToolResult(f"Error: {call}.", error=True) if malformed else
                  self.in_world(self.env.call, call.name, call.arguments, "assistant"))
        if result.error:
            kind = "malformed" if malformed else "authority" if call.name in self.user_tools else "tool"
            errors[kind] = errors.get(kind, 0) + 1
        return result.content

    def user_tool(self, name: str, **arguments) -> dict:
        result = self.in_world(self.env.call, name, arguments, "user")
        self.record.private.append({"turn": len(self.record.strategies), "tool": name, "arguments": arguments,
                                    "result": result.content})
        return self.in_world(json.loads, result.content)  # an error's text is no JSON: a fault, and not the agent's

    def hear(self, turn: UserTurn, messages: list[dict]) -> None:
        self.record.messages += messages
        self.record.private.append({"turn": len(self.record.strategies), "strategy": turn.strategy})

    def in_world(self, function: Callable, *arguments):
        """Calls into the environment; whatever it raises is its own fault, not the agent's."""
        try:
            return function(*arguments)
        except Exception as error:
            raise WorldFault(f"{type(error).__name__}: {error}") from error


class WorldFault(Exception):
    """The environment raised: a bug of the world's, so that the rollout is void."""


def stream_seed(*parts: int) -> int:
    """The random stream of one rollout, from (seed, step, group, k, attempt): the same in any order, on any rank."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def play_groups(groups: list[tuple[int, Task]], rollouts: int, key: tuple[int, int], sampler, chat: Chat, caps: Caps,
                void_retries: int = 2, done: Callable[[Rollout], None] | None = None,
                halt: Callable[[], bool] = lambda: False) -> tuple[list[Rollout], int]:
    """K rollouts of each (group, task), all under way at once; in the order of group and k, with the void tries' count.

    key: (seed, step). A void rollout is tried again with a stream of its own, and kept as void after void_retries.
    As soon as halt() is true the dialogues under way are given up, and none is returned.
    """
    retried = 0

    async def one(group: int, task: Task, k: int) -> Rollout:
        nonlocal retried
        for attempt in range(void_retries + 1):
            seed = stream_seed(*key, group, k, attempt)
            record = await Dialogue(task, group, k, seed, sampler, chat, caps).play()
            if not record.void:
                break
            retried += attempt < void_retries
        if done:
            done(record)
        return record

    async def everyone() -> list[Rollout]:
        work = asyncio.gather(*[one(group, task, k) for group, task in groups for k in range(rollouts)])
        while not work.done() and not halt():
            await asyncio.wait([work], timeout=0.2)
        if work.done():
            return work.result()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        return []

    return asyncio.run(everyone()), retried


def summary(records: list[Rollout]) -> dict[str, float]:
    """Success (mean reward) of the rollouts that are not void, and counts by stop and by kind of the agent's errors."""
    valid = [r for r in records if not r.void]
    errors = sum((Counter(r.errors) for r in valid), Counter())
    return {"rollouts": len(records), "void": len(records) - len(valid),
            "success": sum(r.reward for r in valid) / max(len(valid), 1),
            **{f"stop/{stop}": n for stop, n in sorted(Counter(str(r.stop) for r in records).items())},
            **{f"errors/{kind}": n for kind, n in sorted(errors.items())}}


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


def token_tensors(records: list[Rollout], pad_id: int) -> tuple[torch.Tensor, ...]:
    """(tokens_NT, segment_NT, logprob_NT, advantage_NQ), padded on the right, where causal attention never looks.

    For no records, one row that has nothing to train: a rank without a share still joins every forward pass.
    """
    records = records or [Rollout("", "", 0, 0, 0)]
    return (padded([r.tokens for r in records], pad_id, torch.long),
            padded([r.segment for r in records], -1, torch.long),
            padded([r.logprobs for r in records], 0.0, torch.float32),
            padded([r.advantage for r in records], 0.0, torch.float32))


def micro_batches(records: list[Rollout], budget: int) -> list[list[Rollout]]:
    """Records by length, in batches of at most `budget` padded tokens (a longer one alone)."""
    batches: list[list[Rollout]] = []
    for record in sorted(records, key=lambda r: len(r.tokens), reverse=True):
        if batches and len(batches[-1][0].tokens) * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(record)
        else:
            batches.append([record])
    return batches


# ------------------------------------------------------------------------------------------------------------ files


class RolloutFileError(ValueError):
    """A file that is no rollout file; the message is one line that names the file, the line and what is wrong."""


def save_rollouts(path: Path, records: list[Rollout]) -> None:
    """One JSON object a line, under a name of its own until it is whole."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(asdict(r)) + "\n" for r in records))
    part.replace(path)


def fits(value, kind) -> bool:
    """Whether a value out of JSON is of a field's type, such as list[int | None]; an int passes for a float."""
    if get_origin(kind) in (list, dict):
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, get_origin(kind)) and all(fits(v, get_args(kind)[-1]) for v in values)
    return isinstance(value, int | float if kind is float else kind)


def load_rollouts(path: str | Path) -> list[Rollout]:
    """Raises RolloutFileError for anything that save_rollouts did not write."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutFileError(f"{path}: cannot be read as a rollout file ({error})") from None
    records, kinds = [], {f.name: f.type for f in fields(Rollout)}
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise RolloutFileError(f"{path}: line {number} is not JSON") from None
        found = found if isinstance(found, dict) else {}
        wrong = [name for name, kind in kinds.items() if not fits(found.get(name), kind)]
        if wrong or len(found) > len(kinds):
            raise RolloutFileError(f"{path}: line {number} is no rollout (wrong: {', '.join(wrong) or 'more fields'})")
        record = Rollout(**found)
        if not (len(record.tokens) == len(record.segment) == len(record.logprobs) and record.stop in list(Stop)
                and len(record.reactions) == len(record.strategies) > max(record.segment, default=-1)):
            raise RolloutFileError(f"{path}: line {number} is no rollout (lists of unlike length, or no known stop)")
        records.append(record)
    if not records:
        raise RolloutFileError(f"{path}: holds no rollout")
    return records


if __name__ == "__main__":
    from extras.show import main
    main()
