"""Rollouts for the report's browser: which are shown, and what of each, within a budget of bytes.

A run of 120 steps x 128 rollouts has gigabytes of them. Chosen: the first step, the last, and steps evenly between; of
each, whole groups, for a segment means something beside its neighbours alone: those of mixed rewards first, one place
kept for a group of equal rewards. No file is read but those of the steps shown, and of these one group at a time.
An evaluation is shown as a step whose groups are the trials of its tasks, without advantages.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from extras.results import Results
from extras.runs import is_number
from extras.show import RolloutFileError, read_rollouts
from rollout import Rollout

STEPS, GROUPS = 9, 6  # shown of a run, and of a step, at most
LONG = 1200  # characters of a tool's result or call that are shown
SHARED = 60  # a text of so many characters is stored once


class Texts:
    """Texts of a page: a long one stands in a list once, and is referred to by its place."""

    def __init__(self):
        self.texts: list[str] = []
        self.place: dict[str, int] = {}
        self.size = self.cut = 0

    def put(self, text: str, limit: int | None = None) -> str | int:
        """The text, or its place if it is long; beyond the limit it is cut, which is said and counted."""
        if limit and len(text) > limit:
            self.cut += 1
            text = f"{text[:limit]}\n... {len(text) - limit:,} more characters"
        if len(text) < SHARED:
            return text
        if text not in self.place:
            self.place[text] = len(self.texts)
            self.texts.append(text)
            self.size += size_of(text)
        return self.place[text]

    def forget(self, count: int, size: int, cut: int) -> None:
        """Back to the first count texts, of so many bytes."""
        for text in self.texts[count:]:
            del self.place[text]
        self.texts, self.size, self.cut = self.texts[:count], size, cut


def size_of(value) -> int:
    """Bytes that it takes in the page."""
    return len(as_json(value).encode())


def as_json(value) -> str:
    """JSON that may stand in a script element: no "<", so that no text in it can end the element; plain ASCII."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def step_files(folder: Path) -> dict[int, Path]:
    """{step: file} of a run folder, by step."""
    found = {re.fullmatch(r"step-(\d+)\.jsonl", path.name): path for path in folder.glob("rollouts/*.jsonl")}
    return dict(sorted((int(name[1]), path) for name, path in found.items() if name))


def chosen_steps(steps: list[int], count: int = STEPS) -> list[int]:
    """At most count of them: the first, the last, then halves, quarters, ...: wherever one stops, they are spread."""
    last, order = len(steps) - 1, []
    for parts in (1, 2, 4, 8, 16, 32):
        order += [round(last * i / parts) for i in range(parts + 1)]
    return [steps[i] for i in dict.fromkeys(order)][:count] if steps else []


def groups_of(path: Path) -> Iterator[list[Rollout]]:
    """The groups of a step's file, one after the other, without their tokens."""
    def light(record: Rollout) -> Rollout:
        record.tokens, record.segment, record.logprobs = [], [], []
        return record

    for _, records in itertools.groupby(map(light, read_rollouts(path)), lambda record: record.group):
        yield list(records)


def is_mixed(records: list[Rollout]) -> bool:
    return len({record.reward for record in records if not record.void}) > 1


def chosen_groups(path: Path, count: int = GROUPS) -> tuple[list[list[Rollout]], int]:
    """At most count groups of a step, mixed ones first and one of equal rewards among them; and how many there are."""
    mixed, equal, total = [], [], 0
    for records in groups_of(path):
        total += 1
        kind = mixed if is_mixed(records) else equal
        if len(kind) < count:
            kind.append(records)
    kept = mixed[:count - 1] + equal[:1]
    rest = [group for group in mixed[count - 1:] + equal[1:]][:count - len(kept)]
    return sorted(kept + rest, key=lambda records: records[0].group), total


def sampled(folder: Path, budget: float, texts: Texts, read: Callable = lambda: None,
            most: float = math.inf) -> tuple[list[dict], str, list[str]]:
    """Steps of a run with groups of rollouts, of about budget bytes; what was left out; and what could not be read.

    Each step has an even share of the budget, what those before it left included; it has one group at least, as long as
    there is budget at all, and it takes no more than most. read() is called after each file.
    """
    files, shown, faults, cut = step_files(folder), {}, [], texts.cut
    spent = totals = 0
    steps = chosen_steps(list(files))
    for number, step in enumerate(steps, 1):
        if spent >= budget:
            break
        try:
            groups, total = chosen_groups(files[step])
            read()
        except RolloutFileError as error:
            faults.append(f"step {step} is not shown: {error}")
            continue
        totals += total
        shown[step], size, damaged = within(groups, budget * number / len(steps) - spent, texts,
                                            most - spent)
        spent += size
        faults += [f"{fault} (step {step})" for fault in damaged]
    shown = {step: shown[step] for step in sorted(shown) if shown[step]}
    left_out = f"{len(shown)} of {len(files)} steps are shown" if files else "it has no rollouts"
    if shown:
        count = sum(map(len, shown.values()))
        left_out += f" ({', '.join(map(str, shown))}), with {count} of their {totals} groups"
    if texts.cut > cut:
        left_out += f"; {texts.cut - cut:,} tool calls or results are cut at {LONG:,} characters"
    return [{"step": step, "groups": groups} for step, groups in shown.items()], left_out, faults


def within(groups: list[list[Rollout]], budget: float, texts: Texts,
           most: float) -> tuple[list[dict], int, list[str]]:
    """The first groups until they take budget bytes, one at least, but never more than most bytes; how many they take;
    and what is damaged or too large."""
    shown, faults, size, start = [], [], 0, texts.size
    for records in groups:
        before = len(texts.texts), texts.size, texts.cut
        try:
            shown.append(group_of(records, texts))
        except (LookupError, TypeError, AttributeError) as error:  # messages are free in form
            faults.append(f"group {records[0].group} is damaged ({type(error).__name__}: {error})")
            continue
        size += (own := size_of(shown[-1]))
        if size + texts.size - start > most:
            took, size = own + texts.size - before[1], size - own
            group = shown.pop()["group"]
            texts.forget(*before)
            if shown:
                break
            if not faults:  # one tells enough
                faults.append(f"group {group} is not shown: its dialogues take {took / 1e3:,.0f} kB, more than there "
                              "is room for")
        elif size + texts.size - start >= budget:
            break
    return shown, size + texts.size - start, faults


def judged(results: Results, hardest: dict[str, int], budget: float, texts: Texts,
           most: float = math.inf) -> tuple[list[dict], str, list[str]]:
    """As sampled(), of an evaluation: one step, a group of trials for each task, those with most failures first.

    hardest: the place of each task, so that where there are too many all evaluations show the same.
    """
    groups = [list(records) for _, records in itertools.groupby(results.records, lambda record: record.group)]
    shown, _, faults = within(sorted(groups, key=lambda records: hardest[records[0].task]), budget, texts, most)
    shown.sort(key=lambda group: group["solved"] - len(group["rollouts"]))
    left_out = "" if len(shown) == len(groups) else (
        f"{len(shown)} of {len(groups)} tasks are shown, those with most failures in all evaluations")
    return [{"step": 0, "groups": shown}] if shown else [], left_out, faults


def by_failures(every: list[Results]) -> dict[str, int]:
    """Tasks of all evaluations, the one with most failures first: the place of each."""
    failed = Counter(record.task for results in every for record in results.records if not record.solved)
    tasks = dict.fromkeys(record.task for results in every for record in results.records)
    return {task: place for place, task in enumerate(sorted(tasks, key=lambda task: -failed[task]))}


def group_of(records: list[Rollout], texts: Texts) -> dict:
    """The K rollouts of a prompt. solved: those with reward exactly 1."""
    return {"group": records[0].group, "task": records[0].task, "mixed": is_mixed(records),
            "solved": sum(record.reward == 1 and not record.void for record in records),
            "rollouts": [dialogue(record, texts) for record in records]}


def dialogue(record: Rollout, texts: Texts) -> dict:
    """One rollout by turns: what opened it, then each U2U segment with its credit and the user turn that followed.

    Raises LookupError, TypeError or AttributeError for messages that are none of ours.
    """
    advantage = record.advantage or [None] * len(record.strategies)
    segments = [{"total": rounded(a), "strategy": z, "reaction": f, "parts": [], "user": None}
                for a, z, f in zip(advantage, record.strategies, record.reactions, strict=False)]
    out = {"k": record.k, "reward": rounded(record.reward), "stop": record.stop, "void": record.void,
           "outcome": rounded(record.outcome_advantage), "errors": record.errors, "segments": segments,
           "fault": next((p["fault"] for p in record.private if "fault" in p), "")}
    out |= {"reason": record.reason} if getattr(record, "reason", "") else {}
    turn, last, waiting = 0, None, []
    for message in record.messages:
        role, text = message["role"], message["content"]
        if role == "user":
            heard = user_turn(record, turn, text, texts)
            out |= {"opening": heard} if turn == 0 else {}
            if turn and last:
                last["user"] = heard
            turn += 1
        elif role == "assistant" and "segment" in message:
            last = segments[message["segment"]]
            if text or not message.get("tool_calls"):
                last["parts"].append({"say": texts.put(text)} | ({"cut": True} if message.get("cut") else {}))
            waiting = [call_of(call, texts) for call in message.get("tool_calls", [])]
            last["parts"] += waiting
        elif role == "tool":
            call = waiting.pop(0) if waiting else last["parts"][-1]
            call["result"] = texts.put(text, LONG)
        else:
            out["greeting" if role == "assistant" else "system"] = texts.put(text)
    if last and last["user"] is None and (tools := user_tools(record, turn, texts)):
        last["user"] = {"tools": tools}
    return out


def call_of(call: dict, texts: Texts) -> dict:
    """A tool call of the agent's, its result still to come."""
    if "function" not in call:
        return {"malformed": texts.put(call["malformed"], LONG)}
    return {"call": call["function"]["name"], "arguments": texts.put(arguments_of(call["function"]["arguments"]), LONG)}


def arguments_of(arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def user_turn(record: Rollout, turn: int, text: str, texts: Texts) -> dict:
    """What the user said, how it ended the dialogue, if it did, and the calls that it made on its own side before."""
    end = next((p["end"] for p in record.private if p["turn"] == turn and "end" in p), "")
    out = {"say": texts.put(text)} | ({"end": end} if end else {})
    return out | ({"tools": tools} if (tools := user_tools(record, turn, texts)) else {})


def user_tools(record: Rollout, turn: int, texts: Texts) -> list[dict]:
    return [{"call": p["tool"], "arguments": texts.put(arguments_of(p["arguments"]), LONG),
             "result": texts.put(p["result"], LONG)} for p in record.private if p["turn"] == turn and "tool" in p]


def rounded(value: float | None) -> float | None:
    return round(value, 3) if is_number(value) else None
