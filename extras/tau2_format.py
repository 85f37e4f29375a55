"""Results in the format of tau2's `Results`, a file a domain, which its viewer and its metrics read."""

import json
import math
from collections.abc import Iterable
from datetime import datetime

from env import Call, Task
from extras.results import Result, Results, events
from extras.show import write_whole
from rollout import Stop

ENDS = {Stop.USER_CLOSED: "user_stop", Stop.USER_LEFT: "user_stop", Stop.OUT_OF_SCOPE: "user_stop",
        Stop.TRANSFER: "user_stop", Stop.TOO_MANY_ERRORS: "too_many_errors", Stop.MAX_MESSAGES: "max_steps",
        Stop.MAX_STEPS: "max_steps", Stop.MAX_CONTEXT: "agent_error", Stop.EMPTY_MESSAGE: "agent_error"}


def tau2_results(results: Results, tasks: dict[str, Task], domain: str) -> dict:
    """One domain's results as tau2's `Results` takes them: with what the user did privately, without its strategies.

    Missing dialogues (void) stand there with reward 0, so that their numbers are those of this code.
    """
    run, mine = results.run, [tasks[i] for i, t in results.run["tasks"].items() if t["domain"] == domain]
    records = [r for r in results.records if r.domain == domain]
    limits = run["limits"][domain]
    return {
        "timestamp": max((r.ended for r in records), default=""),
        "info": {
            "git_commit": run["made"].get("commit", ""), "num_trials": run["trials"],
            "max_steps": limits["steps"], "max_errors": limits["errors"],
            "user_info": {"implementation": "faca", "llm": run["simulator"], "llm_args": None,
                          "global_simulation_guidelines": None},
            "agent_info": {"implementation": "faca", "llm": run["model"],
                           "llm_args": {} if math.isnan(run["temperature"]) else {
                               "temperature": run["temperature"]}},
            "environment_info": {"domain_name": official(domain), "policy": policy_of(records)},
            "seed": run["seed"]},
        "tasks": [tau2_task(task) for task in mine],
        "simulations": [{
            "id": f"{r.task}#{r.k}", "task_id": short(r.task), "timestamp": r.ended, "start_time": r.began,
            "end_time": r.ended, "duration": (datetime.fromisoformat(r.ended)
                                              - datetime.fromisoformat(r.began)).total_seconds(),
            "termination_reason": ENDS.get(Stop(r.stop), "user_error"), "agent_cost": None, "user_cost": None,
            "reward_info": {"reward": float(r.solved), "info": {"reason": r.reason, "stop": r.stop}},
            "messages": list(tau2_messages(r)), "trial": r.k, "seed": r.seed} for r in records]}


def policy_of(records: list[Result]) -> str:
    return next((m["content"] for r in records for m in r.messages if m["role"] == "system"), "")


def official(domain: str) -> str:
    """tau2's own name of a domain; another world keeps all of its name, for it is not tau2's."""
    return domain.partition(":")[2] if domain.startswith(("tau2:", "tau3:")) else domain


def short(task_id: str) -> str:
    return task_id.partition("/")[2]


def tau2_task(task: Task) -> dict:
    """The benchmark's own task, or one of another world in its form."""
    if task.domain.startswith(("tau2:", "tau3:")):
        from extras.tau import domain_of
        return domain_of(task.domain).official[task.id].model_dump(mode="json")
    actions = [{"action_id": f"{short(task.id)}_{i}", "requestor": c.requestor, "name": c.name,
                "arguments": c.arguments} for i, c in enumerate(task.gold)]
    return {"id": short(task.id), "user_scenario": {"persona": None, "instructions": task.instructions},
            "evaluation_criteria": {"actions": actions, "communicate_info": list(task.communicate)}}


def tau2_messages(record: Result) -> Iterable[dict]:
    number = 0

    def called(calls: list[Call], requestor: str, results: list[str]):
        nonlocal number
        made = [{"id": f"call_{number + i}", "name": c.name, "requestor": requestor,
                 "arguments": c.arguments if isinstance(c.arguments, dict) else {}} for i, c in enumerate(calls)]
        number += len(calls)
        return made, [{"role": "tool", "id": call["id"], "content": result, "requestor": requestor}
                      for call, result in zip(made, results, strict=False)]

    for message, own, answers in events(record):
        if own:
            made, heard = called([Call(p["tool"], p["arguments"]) for p in own], "user", [p["result"] for p in own])
            yield {"role": "user", "content": None, "tool_calls": made}
            yield from heard
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = [Call(c["function"]["name"], c["function"]["arguments"]) if "function" in c else
                     Call("malformed", {"error": c["malformed"]}) for c in message["tool_calls"]]
            made, heard = called(calls, "assistant", answers)
            yield {"role": "assistant", "content": message["content"] or None, "tool_calls": made}
            yield from heard
        elif message["role"] in ("assistant", "user"):
            yield {"role": message["role"], "content": message["content"]}


def write_tau2(results: Results, tasks: list[Task]) -> None:
    """DIR/tau2/DOMAIN.json for each domain."""
    (results.folder / "tau2").mkdir(exist_ok=True)
    for domain in results.run["limits"]:
        path = results.folder / "tau2" / f"{domain.replace(':', '-')}.json"
        write_whole(path, json.dumps(tau2_results(results, {task.id: task for task in tasks}, domain)).encode())
