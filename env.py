"""The world: tasks, tools, state, and a reward that is verified on the final state.

The contract, which every domain keeps (the rollout knows nothing else of a world):

    tasks = load_tasks("mini:telecom/train")       # a frozen Task each: id, domain, split, what the user is told, gold
    env = make_env(task)                           # its own live state, shared with no other environment
    env.policy, env.tools, env.user_tools          # text, and tool schemas in OpenAI's format, for agent and user
    env.call(name, arguments, requestor)           # -> ToolResult(content, error); requestor "assistant" or "user"
    env.state_hash()                               # equal hashes = equal final states
    env.reward(messages)                           # 1.0 or 0.0: final state as gold's, and what had to be said was said

A fault of the caller's (unknown tool, wrong arguments, a rule of the domain) comes back as a ToolResult with error set;
any other exception out of call() or reward() is a bug of the world, and makes the rollout void.

Whoever keeps it stands in extras/, and is imported when a domain of its family is named: "mini:telecom", embedded
(extras/mini.py); "tau:retail", "tau2:airline", "tau3:banking_knowledge", the benchmarks tau-bench, tau2-bench and
tau3-bench with their own tasks, tools and verifiers (extras/tau.py). "tau2:" alone lists domains and splits.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from typing import Any


class EnvError(ValueError):
    """The user named a domain or a split that isn't there; the message is one line that says what is."""


class ToolError(Exception):
    """A call that the domain's rules refuse; the message is the tool's answer."""


@dataclass(frozen=True)
class ToolResult:
    content: str
    error: bool = False


@dataclass(frozen=True)
class Call:
    """One tool call; `arguments` is whatever the caller sent, checked when it is made."""

    name: str
    arguments: Any = field(default_factory=dict)
    requestor: str = "assistant"


def parse_call(body: str, name: str | None = None) -> Call | str:
    """The JSON of a call, or of its arguments alone where a name is given -> the call, or in words what is wrong."""
    if max(accumulate((c in "[{") - (c in "]}") for c in body), default=0) > 99:
        return "the tool call is nested too deep"  # to be copied and saved, at least
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"the tool call is not one JSON object ({str(error)[:80]})"
    if name is not None and isinstance(found, dict):
        return Call(name, found)
    if name is not None or not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return "the tool call must be a JSON object with a name and arguments"
    return Call(found["name"], found.get("arguments", {}))


@dataclass(frozen=True)
class Task:
    id: str                   # unique over all domains and splits
    domain: str               # "mini:telecom"
    split: str                # the split it comes from
    instructions: str         # what the user is told, in prose, for a user that can read it
    facts: dict = field(default_factory=dict)  # the same for a scripted user
    state: dict = field(default_factory=dict)  # the world before the first message
    gold: tuple[Call, ...] = ()        # one way to the right final state, by either side
    communicate: tuple[str, ...] = ()  # what the agent has to tell the user
    assertions: tuple[str, ...] = ()   # what a judge has to find true of the dialogue
    same_as: str = ""                  # the id of this task in an earlier release of its benchmark
    criteria: str = ""                 # all that its benchmark scores it by, for telling versions apart alone

    @property
    def identity(self) -> str:
        """What tells whether a model was trained on this task."""
        return self.same_as or self.id


class Env(ABC):
    """The live world of one task."""

    policy: str                  # the agent's system prompt
    tools: list[dict]            # schemas of the agent's tools, in OpenAI's format
    user_tools: list[dict] = []  # of the user's
    greeting: str = ""           # what the agent is taken to have said before the user's first message
    limits: dict[str, int] = {}  # a benchmark's own caps on a dialogue: fields of rollout.Caps
    ended: bool = False          # a tool has ended the dialogue

    @abstractmethod
    def call(self, name: str, arguments: Any, requestor: str = "assistant") -> ToolResult:
        """Runs one tool. Every fault of the caller's is an answer with error=True and leaves the state as it was."""

    @abstractmethod
    def state_hash(self) -> str:
        """Of all that the reward looks at in the state."""

    @abstractmethod
    def reward(self, messages: list[dict], held: bool | None = None) -> float:
        """1.0 if the final state is right and the agent told what it had to; else 0.0. Changes nothing.

        messages: the public transcript. held: whether a judge found the task's assertions true; a task that has some
        and is scored without raises EnvError.
        """


def shown(messages: list[dict]) -> list[str]:
    """The agent's texts that the user was shown: those of messages without a tool call."""
    return [m["content"] for m in messages if m["role"] == "assistant" and "tool_calls" not in m]


def communicated(needed: Iterable[str], said: Iterable[str]) -> bool:
    """Each needed string stands in one of the texts; a number as a number ("10" is not in "100"), words case-blind."""
    def plain(text: str) -> str:
        return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).lower()  # 1,000 is 1000

    texts = [plain(text) for text in said]

    def told(want: str) -> bool:
        if re.fullmatch(r"\d+(\.\d+)?", want):
            return any(float(n) == float(want) for text in texts for n in re.findall(r"\d+(?:\.\d+)?", text))
        return any(want in text for text in texts)

    return all(told(plain(want)) for want in needed)


# ----------------------------------------------------------------------------------------------------- tasks by name

# What comes before the colon of a domain -> the module that knows it, imported when it is named. Each gives
# FAMILIES (name -> its domains), tasks_of(domain) -> {split: tasks} and make_env(task).
WORLDS = {"mini": "extras.mini", "tau": "extras.tau", "tau2": "extras.tau", "tau3": "extras.tau"}


def domains_of(family: str) -> list[str]:
    """All domains of a family ("tau2"), their names as load_tasks takes them."""
    return [f"{family}:{domain}" for domain in import_module(WORLDS[family]).FAMILIES[family]]


def splits_of(domain: str) -> dict[str, list[Task]]:
    """Split -> tasks, a benchmark's official base set first. Raises EnvError where there is no such domain."""
    family = domain.partition(":")[0]
    known = domains_of(family) if family in WORLDS else [d for name in WORLDS for d in domains_of(name)]
    if domain not in known:
        raise EnvError(f"no environment '{domain}'; there are: {', '.join(known)}")
    return import_module(WORLDS[family]).tasks_of(domain)


def listing(family: str) -> str:
    """The family's domains and splits with their numbers of tasks, a line for each domain; what "tau2:" alone shows."""
    return "\n".join(f"{domain:24}" + ", ".join(f"{split} {len(tasks)}" for split, tasks in splits_of(domain).items())
                     for domain in domains_of(family))


def load_tasks(spec: str, split: str) -> list[Task]:
    """The tasks of "DOMAIN" or "DOMAIN/SPLIT", several with commas.

    Where no split is named, the official base set is meant, and `split` where the domain has none. Raises EnvError, one
    line that says what there is, for an unknown domain or split, a missing package, or tasks that are named twice.
    """
    tasks: list[Task] = []
    for name in spec.split(","):
        domain, _, named = name.strip().partition("/")
        splits = splits_of(domain)
        meant = named or ("base" if "base" in splits else split)
        if meant not in splits:
            known = ", ".join(f"{domain}/{s} ({len(t)} tasks)" for s, t in splits.items())
            raise EnvError(f"environment {domain} has no split '{meant}'; it has: {known}")
        tasks += splits[meant]
    if len({task.id for task in tasks}) < len(tasks):
        raise EnvError(f"environment '{spec}' names the same tasks twice")
    return tasks


def make_env(task: Task) -> Env:
    """A fresh world for one rollout of the task."""
    return import_module(WORLDS[task.domain.partition(":")[0]]).make_env(task)


def digest(task: Task) -> str:
    """Of a task and of the world that it begins in: another version of its benchmark has another policy, say."""
    env = make_env(task)
    parts = task, env.policy, env.tools, env.user_tools, env.greeting, env.limits, env.state_hash()
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()
