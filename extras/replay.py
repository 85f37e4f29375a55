"""A saved dialogue in its world once more: the same reward, and why it was not 1."""

from collections import Counter

from env import Env, Task, digest, load_tasks, make_env
from extras.results import Results, ResultsError, events
from extras.run import progress
from rollout import Rollout, Stop


def replay(record: Rollout, task: Task) -> Env:
    """The world after the calls of both sides, in the order in which the dialogue made them."""
    env = make_env(task)
    for message, own, _ in events(record):
        for p in own:
            env.call(p["tool"], p["arguments"], "user")
        for call in message.get("tool_calls", ()):
            if "function" in call:
                env.call(call["function"]["name"], call["function"]["arguments"], "assistant")
    return env


ENDS = {Stop.TOO_MANY_ERRORS: "error budget spent", Stop.MAX_MESSAGES: "step cap", Stop.MAX_STEPS: "step cap",
        Stop.MAX_CONTEXT: "context full", Stop.EMPTY_MESSAGE: "empty message", Stop.TRANSFER: "agent transferred",
        Stop.OUT_OF_SCOPE: "user out of scope"}


def reason_of(record: Rollout, task: Task) -> str:
    """Why a dialogue is not solved, one reason each; "" for a solved one.

    A user that ends with a reaction of -1 gave up, one that ends otherwise than with `close` left without closure.
    Where it closed, content, the replayed world tells what was missing: had the agent told all that it had to, and had
    a judge found all statements true, would the reward be 1?
    """
    stop = Stop(record.stop)
    if record.void or record.solved:
        return "missing" if record.void else ""
    if stop == Stop.USER_LEFT:
        return "user gave up" if record.reactions[-1] == -1 else "stopped without closure"
    if stop != Stop.USER_CLOSED:
        return ENDS[stop]
    env = replay(record, task)
    if env.reward(record.messages, held=True) == 1:
        return "judged not done"
    told = {"role": "assistant", "content": " ".join(task.communicate)}
    return "not communicated" if env.reward([*record.messages, told], held=True) == 1 else "wrong final state"


def rescored(results: Results) -> tuple[Counter, list[str]]:
    """Scores each dialogue again, by replay: how many have the "same" reward, another ("differing", each of which is
    named in a line), are "void", or are "judged": saved as failed, and solved but for what a judge had to say.
    """
    tasks, counts, lines = tasks_of(results), Counter(), []
    for i in progress(range(len(results.records)), "replay"):
        record = results.records[i]
        task, reward = tasks[record.task], 0.0
        if Stop(record.stop).verified:
            reward = replay(record, task).reward(record.messages, held=True)
        judged = bool(task.assertions) and reward > record.reward
        kind = "void" if record.void else "judged" if judged else "same" if reward == record.reward else "differing"
        counts[kind] += 1
        if kind == "differing":
            lines.append(f"{record.task} trial {record.k}: saved {record.reward:g}, replayed {reward:g}")
    return counts, lines


def tasks_of(results: Results) -> dict[str, Task]:
    """The tasks of results, as they are in this installation. Raises ResultsError where they are not the same."""
    tasks = {task.id: task for task in load_tasks(results.run["env"], "test")}
    digests = {i: t["digest"] for i, t in results.run["tasks"].items()}
    if {i: digest(task) for i, task in tasks.items()} != digests:
        raise ResultsError(f"the tasks of {results.run['env']} here are not those of {results.folder}: another version "
                           "of the benchmark, or of this code")
    return tasks
