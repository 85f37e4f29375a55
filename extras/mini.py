"""The embedded domains: plain English, generated from a fixed seed, for a tiny model and a real one alike.

They need no package, no network and no model of a user (extras/scripted.py has theirs). The reaction of a user can only
carry what the user can see (the paper's "reaction observability"), and there the two differ:

    mini:telecom   user and agent share control. The customer has no internet; the agent mends the account with its own
                   tools and leads the customer through the device's faults, whose effects the customer sees and tells.
                   One to four faults a task. What the agent does to the account, the customer doesn't see.
    mini:retail    returns, exchanges, new addresses, some of which the policy forbids. Nearly all that decides success
                   happens in tools and policy checks that the customer doesn't see.

Their numbers and rules are chosen here; they are no benchmark. Splits: "train" has 64 kinds of task (which faults,
which wish), "test" other kinds (100 and 96), "sft" the kinds of "train" again, 16 times with other numbers and names:
what an expert's dialogues are played on, so that copying a number is learned rather than the numbers.
"""

import copy
import hashlib
import inspect
import json
import random
from collections.abc import Callable
from functools import cache
from itertools import combinations, permutations, product
from typing import Any, Literal, get_args, get_origin, get_type_hints

from env import Call, Env, Task, ToolError, ToolResult, communicated, shown

# ------------------------------------------------------------------------------------------------ tools as methods


def tool(owner: Literal["assistant", "user"]) -> Callable:
    """Marks a method as a tool of the assistant or the user. Its signature and docstring are its schema."""
    def mark(method):
        method.owner = owner
        return method
    return mark


def schema_of(method: Callable) -> dict:
    """The OpenAI-format schema of a tool method: string parameters, all required, Literal as an enum."""
    types = {name: t for name, t in get_type_hints(method).items() if name != "return"}
    properties = {name: {"type": "string"} | ({"enum": list(get_args(t))} if get_origin(t) is Literal else {})
                  for name, t in types.items()}
    return {"type": "function", "function": {
        "name": method.__name__, "description": inspect.getdoc(method),
        "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}


def check_arguments(arguments: Any, parameters: dict) -> None:
    """Raises ToolError, in one line for whoever called, unless arguments fit the schema's `parameters`."""
    if not isinstance(arguments, dict):
        raise ToolError(f"arguments must be a JSON object, not {type(arguments).__name__}")
    properties = parameters["properties"]
    for name in parameters["required"]:
        if name not in arguments:
            raise ToolError(f"argument '{name}' is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"there is no argument '{name}'")
        if not isinstance(value, str):
            raise ToolError(f"argument '{name}' must be a string")
        if value not in properties[name].get("enum", [value]):
            raise ToolError(f"argument '{name}' must be one of {', '.join(properties[name]['enum'])}")


class MiniEnv(Env):
    """A world whose tools are methods. Subclasses give `domain`, `policy`, their tools, and `make_tasks`."""

    domain: str

    def __init_subclass__(cls):
        methods = [m for m in vars(cls).values() if hasattr(m, "owner")]
        cls.tools = [schema_of(m) for m in methods if m.owner == "assistant"]
        cls.user_tools = [schema_of(m) for m in methods if m.owner == "user"]
        cls.parameters = {m.__name__: (m.owner, schema_of(m)["function"]["parameters"]) for m in methods}

    def __init__(self, task: Task):
        self.task, self.state = task, copy.deepcopy(task.state)

    def call(self, name: str, arguments: Any, requestor: str = "assistant") -> ToolResult:
        owner, parameters = self.parameters.get(name, (None, None))
        try:
            if owner is None:
                raise ToolError(f"there is no tool '{name}'")
            if owner != requestor:
                raise ToolError(f"only the {owner} can use the tool '{name}'")
            check_arguments(arguments, parameters)
            return ToolResult(json.dumps(getattr(self, name)(**arguments)))
        except ToolError as error:
            return ToolResult(f"Error: {error}.", error=True)

    def state_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.state, sort_keys=True).encode()).hexdigest()

    def reward(self, messages: list[dict], held: bool | None = None) -> float:
        """The path to the state is free: gold is one of them."""
        gold = type(self)(self.task)
        for c in self.task.gold:
            result = gold.call(c.name, c.arguments, c.requestor)
            if result.error:
                raise RuntimeError(f"task {self.task.id}: gold call {c.name} fails: {result.content}")
        return float(self.state_hash() == gold.state_hash() and communicated(self.task.communicate, shown(messages)))


# Numbers of lines and orders: three different digits, since a repeated one is hard to copy for a model of two layers.
NUMBERS = ["".join(digits) for digits in permutations("0123456789", 3) if digits[0] != "0"]


# ---------------------------------------------------------------------------------------------------- mini:telecom


class Telecom(MiniEnv):
    """Shared control: an account that the agent sees and changes, a device that only the customer sees and changes."""

    domain = "mini:telecom"
    # fault of the device -> (what the status bar shows, the step that mends it). Of several faults the bar shows the
    # first in this order, so they come out one by one.
    FAULTS = {
        "airplane_mode": ("an airplane", "turn off airplane mode"),
        "sim_card": ("a crossed card", "reseat the SIM card"),
        "mobile_data": ("grey bars", "turn on mobile data"),
        "apn": ("a red mark", "reset the APN"),
        "data_saver": ("a leaf", "turn off data saver"),
        "vpn": ("a key", "disconnect the VPN"),
    }
    # field of the line -> (its right value, its wrong value, the tool that mends it)
    ACCOUNT = {
        "status": ("active", "suspended", "resume_line"),
        "roaming": ("on", "off", "enable_roaming"),
        "data": ("left", "used", "refuel_data"),
    }
    policy = (
        "You help a customer whose phone has no internet. Ask for the phone number and look up the line. "
        + " ".join(f"If {name} is {wrong}, use {mend}." for name, (_, wrong, mend) in ACCOUNT.items())
        + " Each change is billed: change nothing else. Then let the customer check the status bar, "
        "and give one step at a time. "
        + " ".join(f"For {sign}, {step}." for sign, step in FAULTS.values()))

    @tool("assistant")
    def get_line(self, phone: str) -> dict:
        """Look up a line."""
        line = self._line(phone)
        return {name: line[name] for name in self.ACCOUNT}

    @tool("assistant")
    def resume_line(self, phone: str) -> dict:
        """Resume a suspended line."""
        return self._change(phone, "status")

    @tool("assistant")
    def enable_roaming(self, phone: str) -> dict:
        """Turn roaming on."""
        return self._change(phone, "roaming")

    @tool("assistant")
    def refuel_data(self, phone: str) -> dict:
        """Add data to a line."""
        return self._change(phone, "data")

    @tool("user")
    def check_status_bar(self) -> dict:
        """Look at the phone's status bar."""
        return {"shows": next((sign for fault, (sign, _) in self.FAULTS.items() if self.state["device"][fault]), None)}

    @tool("user")
    def try_internet(self) -> dict:
        """Open a page, to see whether the internet works."""
        line = self._line(self.task.facts["phone"])
        fine = all(line[name] == right for name, (right, _, _) in self.ACCOUNT.items())
        return {"works": fine and not any(self.state["device"].values())}

    @tool("user")
    def do_step(self, fault: Literal[*FAULTS]) -> dict:
        """Carry out on the phone the step that mends this fault; without the fault it changes nothing."""
        had, self.state["device"][fault] = self.state["device"][fault], False
        return {"changed": had}

    def _line(self, phone: str) -> dict:
        if phone not in self.state["lines"]:
            raise ToolError(f"there is no line {phone}")
        return self.state["lines"][phone]

    def _change(self, phone: str, name: str) -> dict:
        right, _, mend = self.ACCOUNT[name]
        line = self._line(phone)
        line[name] = right
        line["billed"].append(mend)  # needed or not: a change too many is on the bill for good
        return {name: right}

    @classmethod
    def make_tasks(cls) -> dict[str, list[Task]]:
        """Every set of one to three device faults, with each account fault or none."""
        rng = random.Random("mini:telecom")
        kinds = list(product([c for n in (1, 2, 3) for c in combinations(cls.FAULTS, n)], [None, *cls.ACCOUNT]))
        rng.shuffle(kinds)
        return {"train": [cls._make(rng, "train", i, *kind) for i, kind in enumerate(kinds[:64])],
                "test": [cls._make(rng, "test", i, *kind) for i, kind in enumerate(kinds[64:164])],
                "sft": [cls._make(rng, "sft", i, *kind) for i, kind in enumerate(kinds[:64] * 16)]}

    @classmethod
    def _make(cls, rng: random.Random, split: str, index: int, faults: tuple[str, ...], account: str | None) -> Task:
        phones = rng.sample(NUMBERS, 2)
        lines = {p: {name: right for name, (right, _, _) in cls.ACCOUNT.items()} | {"billed": []} for p in phones}
        gold = [Call("do_step", {"fault": fault}, "user") for fault in faults]
        if account:
            lines[phones[0]][account] = cls.ACCOUNT[account][1]
            gold.insert(0, Call(cls.ACCOUNT[account][2], {"phone": phones[0]}))
        return Task(
            id=f"{cls.domain}/{split}/{index:03}", domain=cls.domain, split=split,
            instructions=f"Your phone number is {phones[0]}. Your phone has no internet, and you want it back. You "
                         "know nothing about phones: you look at the status bar when asked, do the one step that the "
                         "agent names, and say what you see then. Say so when a step changed nothing. You end the call "
                         "when the internet works, or when three steps led nowhere.",
            facts={"phone": phones[0]}, gold=tuple(gold),
            state={"lines": lines, "device": {fault: fault in faults for fault in cls.FAULTS}})


# ----------------------------------------------------------------------------------------------------- mini:retail


class Retail(MiniEnv):
    """Orders and a policy: what decides success is done where the customer doesn't see it."""

    domain = "mini:retail"
    ITEMS = ("lamp", "mug", "shirt", "jacket", "chair", "desk", "kettle", "radio", "camera", "clock",
             "blanket", "pillow", "hat", "scarf", "belt", "ring", "vase", "rug", "tent", "bag")
    SIZES = ("small", "medium", "large")
    STREETS = ("Oak Street", "Hill Road", "Lake Avenue", "Mill Lane")
    # what the customer wants -> state of the order -> None where the policy allows it, else the reason to refuse
    RULES = {
        "return": {"fresh": None, "old": "too late", "pending": "not delivered"},
        "exchange": {"fresh": None, "old": "too late", "pending": "not delivered"},
        "address": {"pending": None, "fresh": "already delivered"},
    }
    policy = (
        "You help customers with their orders. Ask for the order number and look up the order. "
        "A return or an exchange needs an order delivered at most 30 days ago. A new address needs a pending order. "
        "Ask for the new size or the new address. After a return, tell the refund, which is the price. "
        "What is not allowed you refuse with its reason, and tell the customer.")

    @tool("assistant")
    def get_order(self, order: str) -> dict:
        """Look up an order."""
        found = self._order(order)
        return {name: found[name] for name in ("item", "status", "days", "price")}

    @tool("assistant")
    def return_order(self, order: str) -> dict:
        """Take an order back."""
        return self._log(order, "returned")

    @tool("assistant")
    def exchange_order(self, order: str, size: Literal[*SIZES]) -> dict:
        """Exchange an order for another size."""
        return self._log(order, f"exchanged for {size}")

    @tool("assistant")
    def change_address(self, order: str, address: str) -> dict:
        """Send an order to a new address."""
        return self._log(order, f"sent to {' '.join(address.lower().split())}")

    @tool("assistant")
    def refuse(self, order: str, reason: Literal["too late", "not delivered", "already delivered"]) -> dict:
        """Put a refusal on record."""
        return self._log(order, f"refused: {reason}")

    def _order(self, order: str) -> dict:
        if order not in self.state["orders"]:
            raise ToolError(f"there is no order {order}")
        return self.state["orders"][order]

    def _log(self, order: str, entry: str) -> dict:
        self._order(order)["log"].append(entry)
        return {"done": entry}

    @classmethod
    def make_tasks(cls) -> dict[str, list[Task]]:
        """Every item with every wish and state of the order."""
        rng = random.Random("mini:retail")
        kinds = [(item, want, state) for item in cls.ITEMS for want, states in cls.RULES.items() for state in states]
        rng.shuffle(kinds)
        return {"train": [cls._make(rng, "train", i, *kind) for i, kind in enumerate(kinds[:64])],
                "test": [cls._make(rng, "test", i, *kind) for i, kind in enumerate(kinds[64:])],
                "sft": [cls._make(rng, "sft", i, *kind) for i, kind in enumerate(kinds[:64] * 16)]}

    @classmethod
    def _make(cls, rng: random.Random, split: str, index: int, item: str, want: str, state: str) -> Task:
        mine, other = rng.sample(NUMBERS, 2)
        days = {"fresh": rng.randint(2, 30), "old": rng.randint(31, 90), "pending": 0}

        def order(kind: str, thing: str) -> dict:
            return {"item": thing, "status": "pending" if kind == "pending" else "delivered", "days": days[kind],
                    "price": int("".join(rng.sample("123456789", 2))), "log": []}

        orders = {mine: order(state, item), other: order(rng.choice(list(days)), rng.choice(cls.ITEMS))}
        detail = {"return": None, "exchange": rng.choice(cls.SIZES),
                  "address": f"{rng.randint(2, 9)} {rng.choice(cls.STREETS)}"}[want]
        reason = cls.RULES[want][state]
        gold = {"return": Call("return_order", {"order": mine}),
                "exchange": Call("exchange_order", {"order": mine, "size": detail}),
                "address": Call("change_address", {"order": mine, "address": detail})}[want]
        wish = {"return": f"You want to return the {item}.", "exchange": f"You want the {item} in {detail} instead.",
                "address": f"You want the {item} sent to {detail}."}[want]
        return Task(
            id=f"{cls.domain}/{split}/{index:03}", domain=cls.domain, split=split,
            instructions=f"{wish} Your order number is {mine}. You tell the number and the details only when asked. "
                         "You end the call when the agent says that it is done, or why it can't be done.",
            facts={"order": mine, "want": want, "item": item, "detail": detail},
            gold=(Call("refuse", {"order": mine, "reason": reason}) if reason else gold,),
            communicate=(str(orders[mine]["price"]),) if want == "return" and not reason else (),
            state={"orders": orders})


# ---------------------------------------------------------------------------------------------- the domains by name

DOMAINS: dict[str, type[MiniEnv]] = {cls.domain: cls for cls in (Telecom, Retail)}
FAMILIES = {"mini": ("telecom", "retail")}


@cache
def tasks_of(domain: str) -> dict[str, list[Task]]:
    return DOMAINS[domain].make_tasks()


def make_env(task: Task) -> MiniEnv:
    return DOMAINS[task.domain](task)
