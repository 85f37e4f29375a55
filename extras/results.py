"""Results: the folder that `eval.py run` fills and every other command of eval.py reads.

    DIR/run.json        what was run: model, tasks, user, caps, sampling; written once, and held to by whoever goes on
    DIR/results.jsonl   a Result a line, each as soon as its dialogue is over: a rollout without its tokens
    DIR/tau2/X.json     the same in tau2's own format, a file a domain, once all are there

results.jsonl is only ever appended to. The last line of a task and trial counts; lines before it are void tries. A line
that a kill has cut in two is the last one: whoever reads leaves it out and says so, whoever writes on cuts it off.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

from extras.ranks import UsageError
from extras.show import RolloutFileError, parse_rollout, write_whole
from rollout import Rollout, Stop


class ResultsError(UsageError):
    """A folder that holds no results, or whose results can't be used as asked; the message is one line."""


@dataclass
class Result(Rollout):
    """A dialogue of an evaluation; `group` is the number of its task, `k` that of the trial."""

    began: str = ""   # local time, ISO 8601
    ended: str = ""
    user: str = ""    # the model that has answered as the user, by its own name
    reason: str = ""  # why it has failed; "" if it is solved


@dataclass
class Results:
    """One evaluation: N results in the order of tasks and trials."""

    folder: Path
    run: dict
    records: list[Result]
    tries: list[Result] = field(default_factory=list)  # void ones that were played again
    torn: int = 0                                      # lines that a kill has cut in two

    @property
    def expected(self) -> int:
        return len(self.run["tasks"]) * self.run["trials"]

    @property
    def unfinished(self) -> str:
        """Where the model is not that of its run's end; "" where it is, or where that is not known."""
        made_by = self.run["training"]
        steps, of = made_by.get("steps", 0), made_by.get("of", 0)
        return f"step {steps} of {of}" if made_by.get("method") != "sft" and steps < of else ""

    def among(self, *, domain: str = "", stratum: str = "", unseen: bool = False) -> "Results":
        """Those of some tasks alone, the expected ones as well as the results."""
        tasks = {i: t for i, t in self.run["tasks"].items()
                 if (not domain or t["domain"] == domain) and (not stratum or stratum in t["strata"])
                 and not (unseen and t["seen"])}
        return Results(self.folder, self.run | {"tasks": tasks}, [r for r in self.records if r.task in tasks],
                       [r for r in self.tries if r.task in tasks], self.torn)


# What run.json holds. `training`: of the run that made the model, its config.json, where that lies beside it; `made`:
# commit, versions and time; `seen_known`: whether the model says which tasks it was trained on.
RUN = {"model": str, "weights": str, "agent_url": str, "agent_extra": str, "training": dict, "env": str, "tasks": dict,
       "simulator": str, "simulator_url": str, "simulator_extra": str, "judge": str, "caps": dict, "limits": dict,
       "temperature": float, "thinking": bool, "trials": int, "seed": int, "void_retries": int, "seen_known": bool,
       "made": dict}
TASK = {"domain": str, "digest": str, "seen": bool, "nothing": float, "strata": list}
FREE = ("model", "simulator_url", "agent_url", "void_retries", "training", "made")  # may change in a run that goes on


def of_kinds(found, kinds: dict) -> bool:
    return isinstance(found, dict) and found.keys() == kinds.keys() and all(
        isinstance(found[name], int | float if kind is float else kind) for name, kind in kinds.items())


def read_run(folder: Path) -> dict:
    """run.json. Raises ResultsError, one line, where there is none of this version."""
    path = folder / "run.json"
    if not path.is_file():
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        trained = "config.json" in names and "tokenizer_config.json" not in names  # a model's folder has both
        hint = ("a run folder of train.py: evaluate its model with `python eval.py run --model "
                f"{folder / 'model'} --out DIR`, and name DIR" if trained else
                "no folder of results" if folder.is_dir() else "no folder")
        makers = "; those are what `eval.py run`, extras/pare.py and extras/cogym.py make"
        raise ResultsError(f"{folder} is {hint}" + ("" if "DIR" in hint else makers))
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} can't be read ({type(error).__name__})") from None
    if not (of_kinds(run, RUN) and run["tasks"] and all(of_kinds(t, TASK) for t in run["tasks"].values())
            and run["trials"] > 0 and {t["domain"] for t in run["tasks"].values()} == run["limits"].keys()
            and all(isinstance(value, str | int | float) for value in run["training"].values())):
        raise ResultsError(f"{path} is not what `eval.py run` of this version writes")
    return run


def load_results(folder: str | Path) -> Results:
    """What a folder holds so far. Raises ResultsError, one line, for anything that is no results of this version."""
    folder = Path(folder)
    run, path = read_run(folder), folder / "results.jsonl"
    last: dict[tuple[int, int], Result] = {}
    tries, order, torn, number = [], list(run["tasks"]), 0, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # the last one, of course
                    torn = 1
                    break
                record = parse_rollout(line, Result)
                known = 0 <= record.group < len(order) and 0 <= record.k < run["trials"]
                if not known or record.task != order[record.group] or (
                        record.domain != run["tasks"][record.task]["domain"]):
                    raise RolloutFileError(f"of a task or trial that {folder / 'run.json'} does not have")
                if not whole(record):
                    raise RolloutFileError("damaged")
                before = last.pop((record.group, record.k), None)
                if before and not before.void:
                    raise RolloutFileError("a second result of one task and trial")
                tries += [before] if before else []
                last[record.group, record.k] = record
    except RolloutFileError as error:
        raise ResultsError(f"{path}: line {number} is {error}") from None
    except OSError as error:
        raise ResultsError(f"{path} can't be read ({error.strerror})") from None
    return Results(folder, run, [last[place] for place in sorted(last)], tries, torn)


def whole(record: Result) -> bool:
    """Whether what is free in form is as a dialogue leaves it, so that whoever reads it need not ask."""
    own = [p for p in record.private if "tool" in p]
    try:
        calls = [call for m in record.messages for call in m.get("tool_calls", ()) if "malformed" not in call]
        [datetime.fromisoformat(time) for time in (record.began, record.ended) if time]
        return (math.isfinite(record.reward) and all(isinstance(p["turn"], int) for p in record.private)
                and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in record.messages)
                and all({"name", "arguments"} <= call["function"].keys() for call in calls)
                and all("arguments" in p and isinstance(p["result"], str) for p in own))
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


class Log:
    """results.jsonl, which all ranks write to, line by line, under a lock."""

    def __init__(self, folder: Path):
        self.path = folder / "results.jsonl"
        self.file = self.path.open("ab+", buffering=0)
        self.seen: dict[tuple[int, int], tuple[bool, bool]] = {}
        self.read, self.solved, self.void = 0, 0, 0

    def append(self, record: Result) -> None:
        line = json.dumps(vars(record)).encode() + b"\n"
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            self.cut()
            while line:  # a nearly full disk takes a part
                line = line[self.file.write(line):]
        except OSError as error:  # which a file that is open does not name
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def poll(self) -> int:
        """Reads what all ranks have written since: `solved` and `void` are brought up to date; how many there are."""
        self.file.seek(self.read)
        new = self.file.read()
        new = new[:new.rfind(b"\n") + 1]
        self.read += len(new)
        for found in map(json.loads, new.splitlines()):
            self.seen[found["group"], found["k"]] = found["reward"] == 1, Stop(found["stop"]).void
        self.solved, self.void = (sum(column) for column in zip(*self.seen.values())) if self.seen else (0, 0)
        return len(self.seen)

    def cut(self) -> None:
        """Takes off a last line that is not whole."""
        size = place = self.file.seek(0, os.SEEK_END)
        tail = b""
        while place > 0 and not tail.endswith(b"\n"):
            start = max(0, place - 2**16)
            self.file.seek(start)
            tail = self.file.read(place - start)
            tail = tail[:tail.rfind(b"\n") + 1]
            place = start + len(tail)
        if place < size:
            self.file.truncate(place)


def started(folder: Path, run: dict) -> bool:
    """Writes run.json, on one rank; where one is there, True: the run goes on, with more trials if more are wanted.

    Raises ResultsError where it differs in anything that can change a result. A folder may have moved, for its weights
    tell what it is; of an agent at an endpoint there is nothing but its name.
    """
    if (folder / "run.json").is_file():
        before = read_run(folder)
        more = run["trials"] > before["trials"]  # further trials of the same tasks
        free = set(FREE) - ({"model"} if not run["weights"] else set())
        differing = [f"{name} is {was} there, {now} here" for name, was, now in differences(before, run)
                     if name not in free and not (more and name == "trials")]
        if differing:
            raise ResultsError(f"--out {folder} was begun with other options: {'; '.join(differing)}")
        if not more:
            return True
    begun = (folder / "run.json").is_file()
    write_whole(folder / "run.json", (json.dumps(run, indent=1) + "\n").encode())
    return begun


def differences(a: dict, b: dict) -> list[tuple[str, object, object]]:
    """What differs between two runs: (name, the one's, the other's), the tasks as numbers of them."""
    found = []
    for name in RUN:
        one, other = a[name], b[name]
        if isinstance(one, dict) and name != "tasks":  # of caps and the like, what differs alone
            keys = [key for key in one | other if one.get(key) != other.get(key)]
            one, other = ({key: part.get(key, "none") for key in keys} for part in (one, other))
        if name != "tasks" and one != other and not (one != one and other != other):  # not known on both sides
            found.append((name, told(one), told(other)))
    only = [i for i in a["tasks"] if i not in b["tasks"]], [i for i in b["tasks"] if i not in a["tasks"]]
    changed = [i for i in a["tasks"] if i in b["tasks"] and a["tasks"][i]["digest"] != b["tasks"][i]["digest"]]
    if any(only):
        found.append(("tasks", f"{len(only[0])} others ({', '.join(only[0][:1]) or 'none'})",
                      f"{len(only[1])} others ({', '.join(only[1][:1]) or 'none'})"))
    if changed:
        found.append(("content of tasks", f"{len(changed)} ({changed[0]})", "another"))
    return found


def events(record: Rollout) -> Iterator[tuple[dict, list[dict], list[str]]]:
    """The public messages in order, with the user's own tool calls before each, and the results of the agent's after.

    Tool results are with the message that called; what the user still called after the last message comes with an
    empty one.
    """
    turn, messages = 0, record.messages
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            continue
        own = []
        if message["role"] == "user":
            own = [p for p in record.private if p["turn"] == turn and "tool" in p]
            turn += 1
        answers = []
        for later in messages[i + 1:]:
            if later["role"] != "tool":
                break
            answers.append(later["content"])
        yield message, own, answers
    if rest := [p for p in record.private if p["turn"] >= turn and "tool" in p]:
        yield {"role": "", "content": ""}, rest, []


def kept(record: Rollout, **more) -> Result:
    """The result that a dialogue leaves: all of it but its tokens."""
    values = {f.name: getattr(record, f.name) for f in fields(Rollout)}
    return Result(**values | {"tokens": [], "segment": [], "logprobs": [], "advantage": []} | more)


def told(value) -> str:
    """A value of run.json in words."""
    return ", ".join(f"{key} {told(part)}" for key, part in value.items()) if isinstance(value, dict) else str(value)


# ---------------------------------------------------------------------------------------------------------- matching

# What may differ between two results that are compared: the agent, and how its results were had.
AGENTS = ("model", "weights", "agent_url", "agent_extra", "training", "simulator_url", "void_retries", "env",
          "seen_known", "made")


def complete(folder: str | Path) -> Results:
    """load_results(), and ResultsError where some are not there yet."""
    results = load_results(folder)
    if len(results.records) < results.expected:
        raise ResultsError(f"{folder} has {len(results.records)} of {results.expected} dialogues: the command that "
                           "began it goes on there")
    return results


def must_match(a: Results, b: Results, anyway: bool = False) -> list[str]:
    """What differs between two results, but for the agent, a line each; ResultsError where something does, unless
    anyway."""
    lines = [f"{name}: {one} | {other}" for name, one, other in differences(a.run, b.run) if name not in AGENTS]
    users = [", ".join(sorted({r.user for r in results.records if r.user})) for results in (a, b)]
    if users[0] != users[1]:
        lines.append(f"the model that answered as user: {users[0] or 'none'} | {users[1] or 'none'}")
    if lines and not anyway:
        raise ResultsError(f"{a.folder} and {b.folder} differ in more than the agent: {'; '.join(lines)} (--anyway "
                           "takes what they have in common)")
    return lines
