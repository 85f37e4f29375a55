"""A second model that labels user turns from the words alone, and how far two labellers agree (Cohen 1960).

It is told what the simulator was told of each label, but neither the scenario nor the first label: where it disagrees,
the label does not show in what was said. Prompt and sampling are chosen; the paper has no second labeller.
"""

import asyncio
import math
from collections import Counter

from tqdm import tqdm

from extras.endpoint import Endpoint
from faca import REACTION
from rollout import Rollout
from simulator import STRATEGIES, SimulatorError, UserFault, json_object

LABEL_PROMPT = f"""\
You read a conversation between a customer and a service agent, and name what the customer does in their last message,
with one of these strategies. They stand here as the customer was told them: "you" is the customer.
{STRATEGIES}\
Answer with one json object and nothing else, for example:
{{"strategy": "reveal_piece"}}
"""


class Labeller(Endpoint):
    """The second model's endpoint; its key is the simulator's."""

    who, flags = "labeller", ("--second-labeller", "--simulator-url", "--simulator-extra")


async def second_label(dialogue: str, endpoint: Endpoint) -> str:
    """A label of Table 1 from a model that sees the visible dialogue alone; "" where, asked twice, it names none.

    Raises UserFault where the endpoint gives no answer, SimulatorError where it refuses.
    """
    for _ in range(2):
        message = await endpoint.chat([{"role": "system", "content": LABEL_PROMPT},
                                       {"role": "user", "content": dialogue}])
        named = (json_object((message.content or "").rpartition("</think>")[2]) or {}).get("strategy")
        if isinstance(named, str) and named.strip().lower() in REACTION:
            return named.strip().lower()
    return ""


async def ask(dialogues: list[str], endpoint: Endpoint) -> list[str | None]:
    """The second label of each; "" where it could not be read, None without an answer. Raises SimulatorError."""
    work, refusals = [], []
    with tqdm(total=len(dialogues), desc="second labeller", unit=" turns", dynamic_ncols=True, mininterval=1) as bar:
        async def one(dialogue: str) -> str | None:
            try:
                return await second_label(dialogue, endpoint)
            except UserFault:
                return None
            finally:
                bar.set_postfix_str(endpoint.status(), refresh=False)
                bar.update()

        try:
            async with endpoint, asyncio.TaskGroup() as tasks:  # which gives up the others once one is refused
                work = [tasks.create_task(one(dialogue)) for dialogue in dialogues]
        except* SimulatorError as group:
            refusals = group.exceptions
    if refusals:
        raise refusals[0]
    return [task.result() for task in work]


def visible(record: Rollout, q: int) -> str:
    """The dialogue as agent and user see it of each other, up to the user turn after segment q; and if it ends there.

    Raises ValueError for a record that does not hold that turn.
    """
    lines, turn = [], 0
    try:
        for message in record.messages:
            if message["role"] == "user":
                lines.append(f"customer: {message['content']}")
                if turn == q + 1:  # turn 0 is the opening
                    ended = any(p["turn"] == turn and "end" in p for p in record.private)
                    return "\n".join(lines + ["(The customer ends the conversation here.)"] * ended)
                turn += 1
            elif message["role"] == "assistant" and message["content"] and not message.get("tool_calls"):
                lines.append(f"agent: {message['content']}")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a message is damaged ({type(error).__name__}: {error})") from None
    raise ValueError(f"the user turn after segment {q} is missing")


def kappa(first: list, second: list) -> tuple[float, float] | None:
    """Cohen's kappa of two labellers on the same items, (agreement - chance) / (1 - chance), and its standard error.

    Chance is the agreement of labellers with these shares who do not look: sum over labels of share * share. None
    where it is 1 (both gave one label throughout) or there is no item.
    """
    n, one, two = len(first), Counter(first), Counter(second)
    by_chance = sum(one[label] * two[label] for label in one)
    if by_chance == n * n:
        return None
    agreement, chance = sum(a == b for a, b in zip(first, second, strict=True)) / n, by_chance / n**2
    return (agreement - chance) / (1 - chance), math.sqrt(agreement * (1 - agreement) / n) / (1 - chance)
