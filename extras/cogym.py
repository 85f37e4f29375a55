"""Co-Gym (Shao et al. 2024): a checkpoint or an endpoint in its sessions, with its own code, user and judge.

    python extras/cogym.py --bench-python ENV/bin/python --bench-data CHECKOUT --model RUN/model --out DIR
    python extras/cogym.py --bench-python ENV/bin/python --bench-data CHECKOUT --agent-url URL --model NAME --out DIR
    python eval.py show DIR        python eval.py compare DIR OTHER        once all sessions are there

Co-Gym lives in a Python environment of its own, where its Runner starts a session's processes: environment, clock, the
simulated user, and extras/cogym_agent.py as the agent. User and judge are the models that Co-Gym names, at
OPENAI_BASE_URL with the key in OPENAI_API_KEY; the agent's endpoint is another one, its key in AGENT_API_KEY. With
N sessions, of which session i has delivered d_i (0 or 1: its editor is not empty at the end, and for related_work the
library neither), and the rating r_i, in [0, 1]:

    DR = sum d_i / N        TP = sum d_i r_i / sum d_i        CS = sum d_i r_i / N

of each task; macro, the mean over tasks; pooled, over all sessions alike. A session that left no result, or a broken
one, is missing: it counts in N, as not delivered. A rating that is no number in [0, 1] counts as 0 (chosen), and is
named. A session ends when agent or user finishes it, after --max-steps actions of either, after five idle minutes, or
after --session-seconds (chosen: where an environment has died, the others wait for ever).

    DIR/run.json, results.jsonl     as of `eval.py run`: the reward is 1 where something was delivered, else 0
    DIR/sessions/TASK-I/try-N/      what the session itself has left: log.txt, agent.json, results/env_.../...

The same command goes on in DIR, where a delivery that a kill has left without its line is taken up. What is missing
there stays so, for sessions that are played until they deliver would raise DR; --again plays them once more, and the
figures say how many were. Not kept, and played once more by the same command, are those that an outage has ended
(chosen): none of the agent's requests had an answer, which stops the run; no result, and in its log an error of the
user's or judge's endpoint; three in a row without a result, which stop the run, too.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extras.checkpoint import PolicyError, files_digest, find_policy, note_of
from extras.cogym_agent import same_endpoint
from extras.cogym_data import CLONE, TASKS, USER, check_data, content
from extras.cogym_session import (AGENT, WAIT_SECONDS, Session, Settled, all_figures, earlier, environment,
                                  judge_endpoint, kill, mark_of, read_performance, result_of, tries_of, unanswered,
                                  user_model)
from extras.endpoint import Endpoint, EndpointError, extra_for, on_loopback
from extras.playing import made, occupy, training_of
from extras.ranks import Lasting, UsageError
from extras.results import Log, Result, Results, load_results, read_run, started
from extras.run import progress
from extras.tables import grid
from simulator import SimulatorError

IMAGE = "cogym-jupyter-cpu-image"  # that tabular_analysis runs code in
PACKAGES = "co-gym", "collaborative-gym", "dspy-ai"  # one of the first two; the third makes the user's prompts

# ------------------------------------------------------------------------------------------- what must be installed

INSTALL = ("pip install uv && uv venv --python 3.11 cogym-env && uv pip install "
           "--compile-bytecode --python cogym-env/bin/python co-gym==0.1.5 litellm==1.59.3 knowledge-storm==1.1.0 "
           "numpy==1.26.4 'pyarrow<19' 'datasets<3' transformers==4.46.3 sentence-transformers==3.3.1 "
           "'huggingface-hub<0.30'")
REDIS = "apt-get install redis-server && redis-server --daemonize yes, or docker run -d -p 127.0.0.1:6379:6379 redis"


class Theirs(Endpoint):
    """Where Co-Gym's user and judge are: asked once, before anything starts."""

    key, who, hint, form = "OPENAI_API_KEY", "user", "Co-Gym asks it for its user and judge", {}
    flags = ("Co-Gym's model", "OPENAI_BASE_URL", "")
    trial = [{"role": "user", "content": "Say ready."}], {"max_tokens": 16}


class Agents(Theirs):
    """The agent's own."""

    key, who, hint = "AGENT_API_KEY", "agent", "see --agent-extra"
    flags = ("--model", "--agent-url", "--agent-extra")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trial = self.trial[0], {n: value for n, value in self.trial[1].items() if n not in self.extra}
        self.extra = {n: value for n, value in self.extra.items() if value is not None}  # null leaves ours out


def check_python(options: argparse.Namespace) -> dict:
    """The versions there. Raises UsageError, one line, for a Python without Co-Gym, no Redis, no image."""
    python = Path(options.bench_python)
    try:
        python.stat()  # a bare name is not looked for in PATH
        asked = subprocess.run([python.absolute(), AGENT, "--check", "--redis-url", options.redis_url,
                                *(["--docker", IMAGE] if "tabular_analysis" in options.tasks else [])],
                               capture_output=True, text=True, timeout=300, env=environment(options, ""))
        found = json.loads(asked.stdout.splitlines()[-1])
        lacking = found["missing"] + ["a 'python' beside it"] * (not (python.parent / "python").exists())
    except (OSError, ValueError, LookupError, TypeError, subprocess.TimeoutExpired):
        lacking = ["any answer"]
    if lacking:
        raise UsageError(f"--bench-python {python} is no Python with Co-Gym, it lacks {', '.join(lacking)}; to install "
                         f"it: {INSTALL}; then --bench-python cogym-env/bin/python")
    if found["redis"]:
        raise UsageError(f"no Redis answers at {options.redis_url} ({found['redis']}): {REDIS}; another place is named "
                         "by --redis-url")
    if found["docker"]:
        raise UsageError(f"tabular_analysis needs Docker with the image {IMAGE} ({found['docker']}): cd "
                         f"{options.bench_data}/docker && docker build -f Dockerfile_cpu -t {IMAGE} . (or leave the "
                         "task out of --tasks)")
    return {name: found[name] for name in PACKAGES if name in found} | {
        "co-gym's python": found["python"]}


def check(options: argparse.Namespace) -> dict:
    """All that can be known to be missing before anything starts; Co-Gym's versions. Raises UsageError, one line."""
    for key in (key for name in options.tasks for key in TASKS[name].keys if not os.environ.get(key)):
        raise UsageError(f"the environment variable {key} is not set: related_work searches papers by Voyage and "
                         "Qdrant (see Co-Gym's documentation/indexing and secrets.example.toml), or leave it out of "
                         "--tasks")
    versions = check_python(options)
    try:
        for model in dict.fromkeys([USER, *(model for name in options.tasks for model in TASKS[name].models)]):
            Theirs(model, judge_endpoint()).check()
        if options.agent_url:
            Agents(options.model, options.agent_url, options.agent_extra).check()
        else:
            find_policy(options.model)
    except (EndpointError, SimulatorError, PolicyError) as error:
        raise UsageError(str(error)) from None
    return versions


def report(results: Results, peak: int = 0) -> str:
    """What is printed at the end."""
    run, rows = results.run, [["", "sessions", "delivered", "missing", "DR", "TP", "CS"]]
    for name, f in all_figures(results).items():
        rows.append([name, *(str(f[key]) for key in ("n", "delivered", "missing")),
                     *("-" if math.isnan(f[key]) else f"{f[key]:.3f}" for key in ("DR", "TP", "CS"))])
    notes = [r.private[0] for r in results.records]
    times = sorted(t for note in notes for t in note["latencies"])
    faults = sum((Counter(note["faults"]) for note in notes), Counter())
    seconds = [note["seconds"] for note in notes]
    heat = "sampled as its endpoint does" if math.isnan(run["temperature"]) else f"temperature {run['temperature']:g}"
    faulty = [r.solved for note, r in zip(notes, results.records, strict=True) if note["faults"]]
    lines = [f"Co-Gym: {run['model']}, {heat}; {results.folder}", "", grid(rows),
             "DR: delivered of all; TP: mean rating of the delivered; CS: mean of delivered x rating over all; macro: "
             "mean over tasks;\npooled: over all sessions; missing: left no result, and counts as not delivered", ""]
    for title, problems in (("missing", Counter(r.reason for r in results.records if r.void)),
                            ("rated 0", Counter(note["problem"] for note, r in zip(notes, results.records, strict=True)
                                                if r.solved and note["problem"]))):
        lines += [f"{title}: " + "; ".join(f"{n} {reason}" for reason, n in problems.most_common())] * bool(problems)
    lines += [f"a missing one's last words: {note['folder']}/log.txt"
              for note, r in zip(notes, results.records, strict=True) if r.void][:1]
    unasked = sum(r.void and not note["requests"] for note, r in zip(notes, results.records, strict=True))
    lines += [f"in {unasked} of these the agent was never asked: where they were late, their processes had not started "
              "by then (--session-seconds, --concurrency)"] * bool(unasked)
    lines += [f"{len(results.tries)} missing sessions were played again"] * bool(results.tries)
    lines += [f"in {len(faulty)} sessions ({sum(faulty)} delivered) some of the agent's requests had no answer"
              ] * bool(faulty)
    lines += [f"user: {run['simulator']}", f"judge: {run['judge']}", "limits: " + ", ".join(
                  f"{name.replace('_', ' ')} {value}" for name, value in run["caps"].items()),
              f"sessions: {statistics.median(seconds):.0f} s (median), {max(seconds):.0f} s at most",
              f"agent: {len(times)} requests, " + (
                  f"latency {statistics.median(times):.2f} s (median), {times[math.ceil(0.95 * len(times)) - 1]:.2f} s "
                  "(95 %), " if times else "") + f"{faults.total()} faults"
              + "".join(f", {kind} {n}" for kind, n in faults.items())
              + f", at most {peak} at once since this start" * bool(peak),
              "versions: " + ", ".join(f"{name} {value}" for name, value in run["made"].items() if value)]
    if on_loopback(run["simulator_url"]):
        lines[:0] = [f"A TRIAL OF THE PLUMBING AND NO SCORE: user and judge were on this machine, at "
                     f"{run['simulator_url']}", ""]
    if run["agent_url"] and same_endpoint(run["agent_url"], run["simulator_url"]):
        lines += ["", "agent, user and judge were at one endpoint: this may be a model's judgement of itself"]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- play


def describe(options: argparse.Namespace, versions: dict) -> dict:
    """run.json: all that a result depends on. What an agent that does nothing would get is not known: NaN.

    Another version of Co-Gym, or other files of its data, make other tasks of the same sessions.
    """
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    heat = json.loads(options.agent_extra or "{}").get("temperature", options.temperature)
    caps = {"steps": options.max_steps, "session_seconds": options.session_seconds,
            "message_tokens": options.max_tokens, "wait_seconds": WAIT_SECONDS, "concurrency": options.concurrency}
    digests = {name: content(name, Path(options.bench_data)) for name in options.tasks}
    return {
        "model": options.model, "weights": "" if options.agent_url else files_digest(options.model),
        "agent_url": options.agent_url, "agent_extra": options.agent_extra,
        "training": {} if options.agent_url else training_of(options.model),
        "env": ",".join(f"cogym:{name}" for name in options.tasks),
        "tasks": {f"cogym:{name}/{i}": {"domain": f"cogym:{name}", "digest": f"{digests[name][i]}, {packages}",
                                        "seen": False, "nothing": math.nan, "strata": []}
                  for name in options.tasks for i in range(min(options.limit or 10**9, TASKS[name].size))},
        "simulator": user_model(), "simulator_url": judge_endpoint(), "simulator_extra": "",
        "judge": "; ".join(f"{name}: {TASKS[name].judge}" for name in options.tasks), "caps": caps,
        "limits": {f"cogym:{name}": caps for name in options.tasks},
        "temperature": math.nan if heat is None else float(heat),
        "thinking": False, "trials": 1, "seed": 0, "void_retries": 0, "seen_known": False, "made": made() | versions}


def held_to(folder: Path, run: dict) -> bool:
    """Whether the folder's run is begun already; if not, it is now. Raises UsageError where it is another's."""
    if (folder / "run.json").is_file():
        before = read_run(folder)
        for name in ("simulator_url", *([] if run["weights"] else ["model"])):  # free to change elsewhere
            if before[name] != run[name]:
                raise UsageError(f"--out {folder} was begun with other options: {name} is {before[name]} there, "
                                 f"{run[name]} here")
    return started(folder, run)


def through(options: argparse.Namespace, folder: Path) -> Results | None:
    """What is in the folder, where nothing is left to be played, and nothing has to be asked or loaded."""
    if not (folder / "run.json").is_file() or not (folder / "results.jsonl").is_file():
        return None
    results = load_results(folder)
    if len(results.records) < results.expected or options.again and any(r.void for r in results.records):
        return None
    held_to(folder, describe(options, results.run["made"]))
    return results


def claim(folder: Path, run: dict, options: argparse.Namespace) -> Results:
    """What is in the folder already, once it is this run's. Raises UsageError where it is another's.

    Of a start that was killed its processes are ended, and what it has delivered without a line is taken up.
    """
    begun = held_to(folder, run)
    log = Log(folder)
    log.cut()
    results = load_results(folder)
    there = {r.group: r for r in results.records}
    tries = {i: tries_of(*place(task), folder) for i, task in enumerate(results.run["tasks"])}
    kill(*(mark_of(path) for paths in tries.values() for path in paths))
    for i, task in enumerate(results.run["tasks"]):
        before, last = there.get(i), tries[i][-1:]
        if not last or before and (not before.void or (folder / before.private[0]["folder"]) == last[0]):
            continue
        session = earlier(*place(task), i, last[0], options)
        session.end()
        result = result_of(session)
        if not result.void and not unanswered(result):
            log.append(result)
    results = load_results(folder)
    print(f"going on in {folder}: {len(results.records)} of {results.expected} sessions are there" if begun else
          f"results: {folder}")
    return results


def place(task: str) -> tuple[str, int]:
    """The name of a session's task, and its number there."""
    name, _, index = task.removeprefix("cogym:").partition("/")
    return name, int(index)


def new_session(group: int, task: str, folder: Path, options: argparse.Namespace) -> Session:
    tries = tries_of(*place(task), folder)
    last = int(tries[-1].name[4:]) if tries else 0
    name, index = place(task)
    return Session(name, index, group, folder / "sessions" / f"{name}-{index:03d}" / f"try-{last + 1}", options)


def status(under_way: list[Session], results: list[Result]) -> str:
    waited = ", ".join(f"{s.task}/{s.index} ({time.monotonic() - s.since:.0f} of {s.options.session_seconds} s)"
                       for s in under_way[:2]) + f" and {len(under_way) - 2} more" * (len(under_way) > 2)
    rate = f"DR so far {sum(r.solved for r in results) / len(results):.3f}, " if results else ""
    return f"{rate}{sum(r.void for r in results)} missing, waiting for {waited or 'nothing'}"


@contextlib.contextmanager
def ending(under_way: list[Session], settled: Settled):
    """The signals that have come, to be looked at; whatever happens, the sessions under way end with it. One that has
    its result, and was left a moment for its last words, is kept."""
    told, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in handlers.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # which nohup asks for
            signal.signal(number, lambda number, _: told.append(number))
    try:
        yield told
    finally:
        if told:
            tqdm.write("stopping: sessions under way are given up, what is over is saved", file=sys.stderr)
        for session in under_way:
            session.process.terminate()  # all at once, then one after the other to its end
        for session in under_way:
            session.end()
        for session in under_way:
            if read_performance(session.folder)[0]:
                settled.take(session)
        settled.go_on()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def play(options: argparse.Namespace, folder: Path, before: Results, url: str, model: str) -> str:
    """Plays what is not there yet; why it has stopped early (a signal's name, or a line), "" if it has not."""
    there = {r.group: r for r in before.records if not (options.again and r.void)}
    todo = [(i, task) for i, task in enumerate(before.run["tasks"]) if i not in there]
    settled, under_way = Settled(Log(folder)), []
    with progress(range(len(there), before.expected), "sessions") as bar, ending(under_way, settled) as told:
        while (todo or under_way) and not told and not settled.why:
            while todo and len(under_way) < options.concurrency:
                session = new_session(*todo.pop(0), folder, options)
                session.start(url, model)
                under_way.append(session)
            for session in [session for session in under_way if session.over()]:
                session.end()
                under_way.remove(session)
                settled.take(session)
            bar.n = len(there) + len(settled.kept) + len(settled.row)
            bar.set_postfix_str(status(under_way, [*there.values(), *settled.kept, *settled.row]), refresh=False)
            bar.update(0)
            time.sleep(0.2)
    return signal.Signals(told[0]).name if told else settled.why


# ------------------------------------------------------------------------------------------------------ command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cogym.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(message + (
        f"; the Python of an environment with Co-Gym: {INSTALL}; and its checkout: {CLONE}" * ("--bench-" in message)))
    parser.add_argument("--bench-python", required=True, help="the Python of Co-Gym's own environment")
    parser.add_argument("--bench-data", required=True, metavar="CHECKOUT", help="a checkout of Co-Gym's repository")
    parser.add_argument("--model", required=True, help="a run's model/, a Hugging Face folder or id, or with "
                        "--agent-url the name that it is served by")
    parser.add_argument("--agent-url", default="", help="an OpenAI-compatible endpoint that serves the model; its key "
                        "is in AGENT_API_KEY")
    parser.add_argument("--agent-extra", default="", help="JSON object for the body of each of its requests")
    parser.add_argument("--tasks", default=",".join(TASKS), help="several with commas [%(default)s]")
    parser.add_argument("--limit", type=int, default=0, help="the first N sessions of each task alone [all]")
    parser.add_argument("--session-seconds", type=int, default=900, help="a session may take [%(default)s]*")
    parser.add_argument("--max-steps", type=int, default=30, help="actions of agent or user in a session [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=4000, help="of an answer of the agent's [%(default)s]")
    parser.add_argument("--temperature", type=float, help="of its sampling; 0 is greedy [as trained, else 1]")
    parser.add_argument("--kv-gib", type=float, help="GiB of the server's cache [as trained, else 16]")
    parser.add_argument("--concurrency", type=int, default=1, help="sessions at once, of five processes [%(default)s]")
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0", help="[%(default)s]")
    parser.add_argument("--same-endpoint", action="store_true", help="though agent, user and judge are at one endpoint")
    parser.add_argument("--again", action="store_true", help="play those once more that left no result in --out")
    parser.add_argument("--out", required=True, help="folder of results, a new one, or one to go on in")
    options = parser.parse_args(argv)
    options.tasks = list(dict.fromkeys(options.tasks.split(",")))
    for name in options.tasks:
        if name not in TASKS:
            fail(f"--tasks names '{name}'; there are: {', '.join(TASKS)}")
    least = {"limit": 0, "session_seconds": 1, "max_steps": 1, "max_tokens": 1, "concurrency": 1, "temperature": 0,
             "kv_gib": 1e-3}
    for name, low in least.items():
        if (value := getattr(options, name)) is not None and not low <= value < 2**31:
            fail(f"--{name.replace('_', '-')} must be at least {low:g} and below 2^31, is {value}")
    if not re.fullmatch(r"rediss?://[\w.:\[\]-]+(/\d+)?", options.redis_url):
        fail("--redis-url must be as redis://HOST:PORT/0, without user and password, which Co-Gym would print")
    if options.agent_url and same_endpoint(options.agent_url, judge_endpoint()) and not options.same_endpoint:
        fail("--agent-url is where Co-Gym's user and judge are, too (OPENAI_BASE_URL): the agent would be judged by "
             "itself; --same-endpoint if that is wanted")
    if options.agent_extra and not options.agent_url:
        fail("--agent-extra needs --agent-url")
    if options.kv_gib and options.agent_url:
        fail("--kv-gib is of a model that is served here, and not of --agent-url")
    options.agent_extra = options.agent_extra or (extra_for(options.model) if options.agent_url else "")
    try:
        heat = Agents(options.model, options.agent_url, options.agent_extra).extra.get("temperature", 0) if (
            options.agent_url) else 0
    except EndpointError as error:
        fail(str(error))
    if not isinstance(heat, int | float) or isinstance(heat, bool) or not 0 <= heat < 2**31:
        fail(f"--agent-extra has temperature {json.dumps(heat)}, which must be a number of at least 0, or null")
    return options


def fail(message: str) -> None:
    print(f"cogym.py: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def served(options: argparse.Namespace):
    """(url, name, server or None) of the agent's endpoint."""
    if options.agent_url:
        yield options.agent_url, options.model, None
        return
    from extras.serve import Server  # loads the model
    with Server(options.model, temperature=options.temperature, max_tokens=options.max_tokens,
                kv_gib=options.kv_gib) as server:
        yield server.url, server.name, server


def run(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    if options.temperature is None:
        options.temperature = 1.0 if options.agent_url else note_of(options.model).get("temperature", 1.0)
    check_data(options.tasks, Path(options.bench_data))
    if results := through(options, folder):
        print(report(results))
        return 0
    described = describe(options, check(options))
    held = occupy(folder)
    before, peak, why = claim(folder, described, options), 0, ""
    if options.again or len(before.records) < before.expected:
        with served(options) as (url, model, server):
            why = play(options, folder, before, url, model)
            peak = server.latency()["peak"] if server else 0
    results = load_results(folder)
    held.close()
    if why or len(results.records) < results.expected:
        told = why.startswith("SIG")
        why = why or "user or judge failed in the others, which are not kept"
        print(f"cogym.py: {'stopped' if told else why}; {len(results.records)} of {results.expected} sessions are in "
              f"{folder}, and the same command goes on from there", file=sys.stderr)
        return 128 + signal.Signals[why] if told else 1
    print(report(results, peak))
    return 0


def main() -> None:
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except (UsageError, PolicyError, EndpointError) as error:
        fail(str(error))
    except KeyboardInterrupt:  # where there is nothing to be kept yet
        print("cogym.py: stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        print(f"cogym.py: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
