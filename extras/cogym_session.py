"""A session of Co-Gym: started by its own Runner in its own Python, read from the files that it leaves, and counted.

Every process of a session carries a mark in its environment, by which all of them are found and ended, whoever has
started them: Co-Gym gives each a process group of its own, and a dead one leaves the others waiting for ever.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from extras.cogym_agent import OPENAI
from extras.cogym_data import TASKS, USER
from extras.endpoint import on_loopback, without_keys
from extras.playing import now
from extras.ranks import end_with_parent
from extras.results import Log, Result, Results
from rollout import Stop

AGENT = Path(__file__).resolve().parent / "cogym_agent.py"
MARK = "FACA_COGYM_SESSION"          # in the environment of all processes of a session
LATE, FAILED = "no result within", "user or judge failed"  # reasons of missing sessions, or how they begin
OPENAI_ERRORS = re.compile(  # the agent's own are counted in its tally, and stand in no log
    rb"(?<!redis\.exceptions\.)\b(API(Connection|Timeout|Status|ResponseValidation)?|Authentication|PermissionDenied|"
    rb"RateLimit|InternalServer|ServiceUnavailable|BadRequest|NotFound|Conflict|UnprocessableEntity)Error\b")
IN_A_ROW = 3                         # sessions that end by themselves without a result, and stop the run (chosen)
WAIT_SECONDS, GRACE_SECONDS = 1, 30  # before an action goes out, as in Co-Gym's experiments; after a result (chosen)


def judge_endpoint() -> str:
    return os.environ.get("OPENAI_BASE_URL") or OPENAI


def user_model() -> str:
    return USER + " (loopback)" * on_loopback(judge_endpoint())


# ------------------------------------------------------------------------------------------------------ one session


def environment(options: argparse.Namespace, mark: str) -> dict[str, str]:
    """Of Co-Gym's processes: as if its environment were activated, and nothing of ours on its path."""
    folder = Path(options.bench_python).absolute().parent
    direct = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = ",".join(filter(None, [direct, "localhost", "127.0.0.1"]))
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {"LITELLM_LOCAL_MODEL_COST_MAP": "True"} | kept | {
        "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY") or "none",  # its user asks for one
        "OPENAI_BASE_URL": judge_endpoint(), "OPENAI_API_BASE": judge_endpoint(),  # the second is litellm's
        "VIRTUAL_ENV": str(folder.parent), "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1", "NO_PROXY": direct, "no_proxy": direct, MARK: mark}


def marked(*marks: str) -> dict[int, bytes]:
    """The living processes of sessions (pid -> command line), whoever has started them; Linux alone knows."""
    found, wanted = {}, {f"{MARK}={mark}".encode() for mark in marks}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another's
            if wanted & set((folder / "environ").read_bytes().split(b"\0")):
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def kill(*marks: str) -> None:
    """Ends all processes of these sessions, whoever has started them."""
    for _ in range(100):
        left = marked(*marks)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.1)


@dataclass
class Session:
    """One session under way. Its processes are in groups of their own; all of them carry its mark."""

    task: str
    index: int
    group: int
    folder: Path
    options: argparse.Namespace
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: str = field(default_factory=now)
    since: float = field(default_factory=time.monotonic)
    over_since: float = 0.0  # when its result was first seen
    world: bool = False      # whether its environment's process has been seen
    looked: float = 0.0      # when, last
    why: str = ""            # it was ended without a result
    process: subprocess.Popen | None = None  # none of an earlier start's

    def start(self, url: str, model: str) -> None:
        """Writes what Co-Gym's Runner is told, and starts it."""
        task, options, self.folder = TASKS[self.task], self.options, self.folder.absolute()
        python = str(Path(options.bench_python).absolute())
        self.folder.mkdir(parents=True)
        data = {name: str(Path(options.bench_data).absolute() / part) for name, part in task.data.items()}
        env = {"use_simulated_dataset": True, task.index: self.index} | data
        (self.folder / "env.toml").write_text(f'env_class = "{task.env}"\n\n[env_args]\n' + "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in env.items()))
        agent = [python, str(AGENT), "--base-url", url, "--model", model, "--tally", "agent.json", "--temperature",
                 f"{options.temperature:g}", "--max-tokens", str(options.max_tokens), "--extra",
                 options.agent_extra or "{}", "--wait-time", str(WAIT_SECONDS),
                 *(["--same-endpoint"] if options.same_endpoint else [])]
        members = (("agent", "agent", shlex.join(agent)),  # Co-Gym counts actions by "agent" and "user" in the names
                   ("user", "simulated_user", "python -m collaborative_gym.command start-simulated-user-node "
                    "--proactive-feedback --proactive-action"))
        told = {"session": f"{self.task}_{self.index}_{self.mark}", "env": "env.toml", "result_dir": "results",
                "redis_url": options.redis_url, "max_steps": options.max_steps,
                "members": [{"name": name, "type": kind, "start_node_base_command": command}
                            for name, kind, command in members]}
        (self.folder / "session.json").write_text(json.dumps(told, indent=1) + "\n")
        with (self.folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [python, AGENT, "--session", "session.json"], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=environment(options, self.mark), start_new_session=True,
                preexec_fn=end_with_parent)

    def over(self) -> bool:
        """Whether nothing more is to be waited for."""
        seconds = time.monotonic() - self.since
        if read_performance(self.folder)[0] is not None:  # their last words take a moment more
            self.over_since = self.over_since or time.monotonic()
            return self.process.poll() is not None or time.monotonic() - self.over_since > GRACE_SECONDS
        if self.process.poll() is not None:
            self.why = f"Co-Gym's runner has ended with code {self.process.returncode}"
        elif seconds > self.options.session_seconds:
            self.why = f"{LATE} {self.options.session_seconds} s"
        elif time.monotonic() - self.looked > 1:
            self.looked = time.monotonic()
            there = any(b"start-env-node" in command for command in marked(self.mark).values())
            if self.world and not there:
                self.why = "Co-Gym's environment has died"
            self.world = self.world or there
        return bool(self.why)

    def end(self) -> None:
        """Ends all its processes, and what it has in Docker; takes the keys out of its files."""
        for _ in range(100 if self.process else 0):  # the runner asks its processes to end, and waits for them
            if self.process.poll() is not None or self.process.terminate():
                break
            time.sleep(0.1)
        kill(self.mark)
        if self.process:
            self.process.kill()
            self.process.wait()
        for volume in (self.folder / "tmp").glob("*") if shutil.which("docker") else ():
            listed = subprocess.run(["docker", "ps", "-q", "--filter", f"volume={volume}"], capture_output=True,
                                    text=True)
            if listed.stdout.split():
                subprocess.run(["docker", "rm", "-f", *listed.stdout.split()], capture_output=True)
        without_keys(self.folder)


def tries_of(name: str, index: int, folder: Path) -> list[Path]:
    """The folders of a session's tries, the last one last."""
    found = (folder / "sessions" / f"{name}-{index:03d}").glob("try-*")
    return sorted((path for path in found if path.name[4:].isdigit()), key=lambda path: int(path.name[4:]))


def mark_of(path: Path) -> str:
    """The mark of a try, as its session.json has it; one that no process has where that is damaged."""
    return str((read_json(path / "session.json")[0] or {}).get("session")).rpartition("_")[2]


def earlier(name: str, index: int, group: int, path: Path, options: argparse.Namespace) -> Session:
    """A session of a start that was killed, as far as its files tell of it."""
    times = [file.stat().st_mtime for part in ("session.json", "results/env_*/task_performance.json")
             for file in path.glob(part)] or [path.stat().st_mtime]
    return Session(name, index, group, path.absolute(), options, mark_of(path),
                   datetime.fromtimestamp(times[0]).isoformat(timespec="milliseconds"),
                   time.monotonic() - max(0.0, times[-1] - times[0]))


# ------------------------------------------------------------------------------------- what a session has left behind


def read_json(path: Path) -> tuple[dict | None, str]:
    """A file's JSON object; else None and why."""
    try:
        found = json.loads(path.read_bytes())
        return (found, "") if isinstance(found, dict) else (None, f"{path.name} is damaged")
    except FileNotFoundError:
        return None, f"no {path.name}"
    except (OSError, ValueError, RecursionError):
        return None, f"{path.name} is damaged"


def read_performance(folder: Path) -> tuple[dict | None, str]:
    """What Co-Gym's environment says of a session, {"delivered": bool, "rating": float or None}; else None and why."""
    paths = sorted(folder.glob("results/env_*/task_performance.json"))
    found, problem = read_json(paths[0] if paths else folder / "task_performance.json")
    if found is None:
        return None, problem
    done, rating = found.get("task_completion"), found.get("performance_rating")
    if done not in (0, 1):
        return None, "task_performance.json is damaged"
    if done == 1 and found.get("commonsense_evaluation") == found.get("preference_evaluation") == {}:
        return {"delivered": True, "rating": 0.0}, "the plan was not read"  # its reader gave nothing to be rated
    fits = isinstance(rating, int | float) and not isinstance(rating, bool) and 0 <= rating <= 1
    return ({"delivered": done == 1, "rating": float(rating) if fits else None},
            f"rating {json.dumps(rating)[:40]} is no number in [0, 1]" if done == 1 and not fits else "")


def read_agent(folder: Path) -> dict:
    """The agent's tally; what is not there, or broken, is 0."""
    found = read_json(folder / "agent.json")[0] or {}
    faults, times = found.get("faults"), found.get("latencies")
    return {"requests": 0, "started": False, "prompt_tokens": 0, "completion_tokens": 0} | {
        name: value for name, value in found.items() if name in ("requests", "started", "prompt_tokens",
                                                                 "completion_tokens") and isinstance(value, int)} | {
        "faults": {k: n for k, n in faults.items() if isinstance(n, int)} if isinstance(faults, dict) else {},
        "latencies": [t for t in times if isinstance(t, int | float)] if isinstance(times, list) else []}


def read_transcript(folder: Path) -> tuple[list[dict], int, int]:
    """The log of events as messages, in order; how many segments of the agent's; how many of its actions failed."""
    messages, segment, failed, lines = [], -1, 0, []
    for path in sorted(folder.glob("results/env_*/event_log.jsonl"))[:1]:
        lines = path.read_bytes().splitlines()
    for line in lines:
        try:
            event = json.loads(line)
            role, action, status = (str(event[name]) for name in ("role", "action", "action_status"))
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # a line that a kill has cut in two
        if "agent" in role:
            segment += not messages or messages[-1]["role"] not in ("assistant", "tool")
            messages.append({"role": "assistant", "content": action, "segment": max(segment, 0)})
            failed += status != "succeeded"
        else:
            messages.append({"role": "user" if "user" in role else "system", "content": action})
        if status != "succeeded":
            messages.append({"role": "tool" if "agent" in role else "system", "content": status})
    return messages, segment + 1, failed


def result_of(session: Session) -> Result:
    """The session as a line of results.jsonl."""
    performance, problem = read_performance(session.folder)
    agent = read_agent(session.folder)
    user = [read_json(path)[0] for path in session.folder.glob("results/env_*/simulated_user/info.json")]
    deaf = "agent" if not agent["started"] else "user" if user and user[0] and user[0].get("persona") is None else ""
    if performance and deaf:  # Redis keeps no message for a process that comes later
        performance, problem = None, f"the {deaf} has missed the session's start"
    why = problem if "damaged" in problem or not session.why else session.why
    if not performance and user_failed(session.folder):
        why = FAILED
    delivered = bool(performance and performance["delivered"])
    messages, segments, failed = read_transcript(session.folder)
    return Result(
        f"cogym:{session.task}/{session.index}", f"cogym:{session.task}", session.group, 0, 0,
        strategies=[None] * segments, reactions=[None] * segments, reward=float(delivered),
        stop=(Stop.USER_CLOSED if performance else Stop.VOID_WORLD).value, errors={"action": failed} if failed else {},
        messages=messages, private=[
            {"turn": 0, "rating": performance["rating"] if delivered else None, "problem": problem,
             "folder": str(session.folder.relative_to(Path(session.options.out).absolute())),
             "seconds": round(time.monotonic() - session.since, 1)} | agent],
        began=session.began, ended=now(), user=user_model(),
        reason="" if delivered else "nothing delivered" if performance else why)


def user_failed(folder: Path) -> bool:
    """Whether an endpoint's error stands in a session's log; its user and judge write theirs there."""
    with contextlib.suppress(OSError):
        return bool(OPENAI_ERRORS.search((folder / "log.txt").read_bytes()))
    return False


def unanswered(result: Result) -> str:
    """Says that none of a session's requests had an answer; "" where one had, or there was none."""
    note = result.private[0]
    if not note["requests"] or sum(note["faults"].values()) < note["requests"]:
        return ""
    return (f"the agent's endpoint has answered none of {note['requests']} requests in {note['folder']} "
            f"({', '.join(note['faults'])})")


class Settled:
    """The results of this start, `kept` in the log; `why`: the run can't go on, or "".

    What has left no result waits in `row` for what comes after it: IN_A_ROW of them are not kept.
    """

    def __init__(self, log: Log):
        self.log, self.kept, self.row, self.late, self.why = log, [], [], [], ""

    def take(self, session: Session) -> None:
        """Keeps the result of a session that has ended, if it is one."""
        result = result_of(session)
        late = result.reason.startswith(LATE)
        self.late.append(late)
        if self.late == [True] * IN_A_ROW:
            tqdm.write(f"WARNING: the first {IN_A_ROW} sessions left {result.reason}: is --session-seconds too few for "
                       "this machine? They count as not delivered; --again plays them once more", file=sys.stderr)
        if said := unanswered(result):
            self.why = said
        elif result.void and not late:
            self.row.append(result)
            if len(self.row) == IN_A_ROW:
                self.why = (f"{IN_A_ROW} sessions in a row left no result and are not kept, the last: {result.reason}; "
                            f"see {session.folder}/log.txt")
        else:
            self.go_on()
            self.keep(result)

    def go_on(self) -> None:
        """What waits is kept, but for what user or judge have failed in, unless the run has stopped."""
        for result in self.row if not self.why else ():
            if result.reason != FAILED:
                self.keep(result)
        self.row = []

    def keep(self, result: Result) -> None:
        self.log.append(result)
        self.kept.append(result)


# ---------------------------------------------------------------------------------------------------------- figures


def figures(sessions: list[tuple[bool, float | None]]) -> dict[str, float]:
    """n, delivered, DR, TP, CS of sessions (delivered, rating); a rating of None counts as 0; TP of none is NaN."""
    earned = [rating or 0.0 for delivered, rating in sessions if delivered]
    n = len(sessions)
    return {"n": n, "delivered": len(earned), "DR": len(earned) / n if n else math.nan,
            "TP": sum(earned) / len(earned) if earned else math.nan, "CS": sum(earned) / n if n else math.nan}


def all_figures(results: Results) -> dict[str, dict[str, float]]:
    """figures() by task, "macro" (mean over tasks; TP over those that have one), "pooled"; each with `missing`."""
    found = {}
    for name, some in {name.partition(":")[2]: results.among(domain=name) for name in results.run["limits"]}.items():
        found[name] = figures(outcomes(some)) | {"missing": sum(r.void for r in some.records)}
    parts = list(found.values())
    mean = {key: statistics.fmean(values) if (values := [p[key] for p in parts if not math.isnan(p[key])]) else math.nan
            for key in ("DR", "TP", "CS")}
    sums = {key: sum(p[key] for p in parts) for key in ("n", "delivered", "missing")}
    return found | {"macro": sums | mean, "pooled": figures(outcomes(results)) | {"missing": sums["missing"]}}


def outcomes(results: Results) -> list[tuple[bool, float | None]]:
    return [(r.solved, r.private[0]["rating"]) for r in results.records]
