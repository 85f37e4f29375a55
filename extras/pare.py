"""Pare-Bench by its own code: a checkpoint, or a model behind an endpoint, as the proactive agent of its scenarios.

    python extras/pare.py --bench-python pare/.venv/bin/python --model runs/RUN/model --user-model gpt-5-mini
        --user-provider openai --observe-iterations 5 --execute-iterations 10 --out DIR
    python eval.py show DIR        python eval.py compare DIR OTHER

    DIR/pare/SCENARIO/K/         what Pare leaves of run K: log, results/*/*_result.json, traces/, logs/
    DIR/run.json, results.jsonl  made of its rows, as extras/results.py has them: what eval.py reads
    DIR/latency.jsonl            what our server measured, a line for each start of this program

Pare (github.com/deepakn97/pare, arXiv 2604.00842) has a Python of its own, --bench-python, and is started as it is. A
scenario is solved if all of its checks hold. Of R runs of each of n scenarios, c_i of scenario i are solved:

    Pass@1, first run = #{i: run 0 is solved} / n        Pass@1, mean of R runs = sum_i c_i / (n R)
    Pass@R, at least one of R = #{i: c_i > 0} / n        Pass^R, all of R = #{i: c_i = R} / n

The scenarios are those that Pare lists, not those that have a result: a run without one counts as failed, where Pare's
own rate is over the runs with a verdict. Chosen here:

  - A process for each scenario and run. Pare writes its rows when all is over; its time limit is lost in the agent's
    error handling where runs follow each other, and ends no thread where they don't. So a kill loses the runs under way
    alone, and the time limit is ours. The clock of a scenario starts after the start of its process.
  - Runs in turn: each scenario once, then each once more.
  - A run that was out of time is not tried again. One whose process ended without a row, or whose scenario had not
    begun by then, is, by the same command.
  - A folder goes on with the endpoints of user and agent that it was begun with, and with the same files of a model.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm  # noqa: E402  after the path

from eval import wilson  # noqa: E402
from extras.agent import AgentEndpoint  # noqa: E402
from extras.checkpoint import PolicyError, files_digest, note_of, trained_on_complete  # noqa: E402
from extras.endpoint import Endpoint, EndpointError, on_loopback  # noqa: E402
from extras.playing import made, now, occupy, training_of, weights_digest  # noqa: E402
from extras.pare_process import (  # noqa: E402
    BEGUN, INSTALL, KEY, Place, Running, check_user, clean, command, end, last_error, listing, log_of, logged,
    row_of, same_endpoints, start)
from extras.ranks import Lasting, UsageError  # noqa: E402
from extras.results import Log, Result, Results, load_results, started  # noqa: E402
from extras.run import progress  # noqa: E402
from extras.tables import grid  # noqa: E402
from rollout import Stop  # noqa: E402
from simulator import SimulatorError  # noqa: E402

NO_RESULT, LATE = "no result", "out of time"          # reasons of runs that are missing; the first is tried again
ENDPOINT = "an endpoint failed"                       # reason of a failed one; Pare does not tell it from others
IN_A_ROW = 3                                          # processes without a row, and it is no fault of one scenario


# ------------------------------------------------------------------------------------------------------------ the agent


@dataclass
class Agent:
    """A model at an endpoint; `told` is what run.json says of it."""

    name: str
    url: str
    key: str
    told: dict
    latency: Callable[[], dict] | None = None


@contextmanager
def agent_of(options: argparse.Namespace) -> Iterator[Agent]:
    """The endpoint that is named, after one small request, or the model, served here. Raises PolicyError, EndpointError
    and UsageError."""
    if options.agent_url:
        endpoint = AgentEndpoint(options.model, options.agent_url)
        endpoint.trial = [{"role": "user", "content": "Reply with only the word ok"}], {}
        try:
            Endpoint.check(endpoint)
        except SimulatorError as error:
            raise UsageError(str(error)) from None
        key = os.environ.get("AGENT_API_KEY") or os.environ.get(KEY) or "none"
        yield Agent(options.model, options.agent_url, key, {
            "agent_url": options.agent_url, "agent_extra": "", "weights": f"served as {options.model}",
            "temperature": math.nan})
        return
    from extras.serve import Server
    files = files_digest(options.model)
    with Server(options.model, temperature=options.temperature, max_tokens=options.max_tokens,
                max_context=options.max_context, kv_gib=options.kv_gib) as server:
        most = {"max_tokens": server.max_tokens, "context": server.context}
        yield Agent(server.name, server.url, os.environ.get(KEY) or "none", {
            "agent_url": "", "agent_extra": json.dumps(most), "weights": files or weights_digest(server.sampler.model),
            "temperature": float(server.sampler.temperature)}, server.latency)


def describe(options: argparse.Namespace, bench: dict, agent: dict) -> dict:
    """run.json: all that a result depends on. Another version of Pare makes other tasks of its scenarios."""
    domain, local = f"pare:{options.split}", not options.agent_url
    seen = note_of(options.model).get("trained_on", ()) if local else ()
    version = ", ".join(f"{name} {value}" for name, value in bench["versions"].items())
    caps = {"seconds": options.timeout, "concurrency": options.concurrency}
    caps |= {"first": options.limit} if options.limit else {}
    return {
        "made": made() | bench["versions"], "model": options.model, "env": domain,
        "seen_known": local and trained_on_complete(options.model),
        "training": training_of(options.model) if local else {},
        "tasks": {i: {"domain": domain, "digest": version, "seen": i in seen, "nothing": math.nan, "strata": []}
                  for i in bench["scenarios"][:options.limit]},
        "simulator": f"{options.user_provider}/{options.user_model}" + " (loopback)" * on_loopback(options.user_url),
        "simulator_url": options.user_url,
        "simulator_extra": "", "judge": "", "caps": caps,
        "limits": {domain: {"turns": options.max_turns, "user_iterations": 1,
                            "observe_iterations": options.observe_iterations,
                            "execute_iterations": options.execute_iterations}},
        "thinking": False, "trials": options.runs, "seed": 0, "void_retries": 0} | agent


# ----------------------------------------------------------------------------------------------------------------- runs


def run(options: argparse.Namespace) -> int:
    """Starts what is not there yet, and prints summary() of all; the exit code."""
    bench = listing(options.bench_python, options.split)
    folder, fresh = Path(options.out).absolute(), not Path(options.out).exists()
    held = occupy(folder)
    try:
        same_endpoints(options, folder)
        if told := through(options, folder):
            started(folder, describe(options, bench, told))
            print(summary(load_results(folder)))
            return 0
        with agent_of(options) as agent:
            begun = started(folder, describe(options, bench, agent.told))
            return play(options, folder, agent, begun)
    finally:
        held.close()
        if fresh and folder.is_dir() and [path.name for path in folder.iterdir()] == ["lock"]:  # refused
            shutil.rmtree(folder)


def through(options: argparse.Namespace, folder: Path) -> dict:
    """What run.json says of the agent, where all runs are there and no model has to be loaded; else nothing."""
    if not (folder / "run.json").is_file():
        return {}
    (folder / "results.jsonl").touch()  # a kill may have come between the two files
    results = load_results(folder)
    run = results.run | {"trials": options.runs}
    if to_do(run, results) or run["model"] != options.model:
        return {}
    told = {name: run[name] for name in ("agent_url", "agent_extra", "weights", "temperature")}
    if options.agent_url:
        return told
    heat = note_of(options.model).get("temperature", 1.0) if options.temperature is None else options.temperature
    told |= {"temperature": heat, "weights": files_digest(options.model) or run["weights"]}
    given = {"max_tokens": options.max_tokens, "context": options.max_context}
    if any(given.values()):
        given = {name: value for name, value in given.items() if value}
        told["agent_extra"] = json.dumps(json.loads(told["agent_extra"] or "{}") | given)  # none in another's folder
    return told


def to_do(run: dict, results: Results) -> list[Place]:
    """What has no result, the first runs first."""
    there = {(r.task, r.k) for r in results.records if not (r.void and r.reason == NO_RESULT)}
    return [Place(i, k, scenario) for k in range(run["trials"]) for i, scenario in enumerate(run["tasks"])
            if (scenario, k) not in there]


def play(options: argparse.Namespace, folder: Path, agent: Agent, begun: bool) -> int:
    """run(), once there are an agent and a folder. A signal stops it; the same one once more ends it at once."""
    log, told, since = Log(folder), [], now()
    log.cut()
    runs = Runs(options, folder, agent, log)
    print(f"going on in {folder}: {runs.total - len(runs.waiting)} of {runs.total} runs are there" if begun else
          f"results: {folder}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # which nohup asks for
            signal.signal(number, lambda number, _: (told.append(number), signal.signal(number, signal.SIG_DFL)))
    runs.play(told)
    if agent.latency and (measured := agent.latency())["requests"]:
        with (folder / "latency.jsonl").open("a") as file:
            file.write(json.dumps({"since": since} | measured) + "\n")
    results = load_results(folder)
    left = len(to_do(results.run, results))
    if runs.refusal or told:
        print(f"pare.py: {runs.refusal or 'stopped'}; {runs.total - left} of {runs.total} runs are in {folder}, and "
              "the same command goes on from there", file=sys.stderr)
        return 1 if runs.refusal else 128 + told[0]
    print(summary(results))
    if left:
        print(f"pare.py: {left} runs ended without a result, see {folder}/pare/SCENARIO/K/log; the same command tries "
              "them again", file=sys.stderr)
    return 1 if left else 0


class Runs:
    """What is still to be done in a folder, so many processes of Pare at a time; `refusal`: why it can't go on."""

    def __init__(self, options: argparse.Namespace, folder: Path, agent: Agent, log: Log):
        results = load_results(folder)
        self.options, self.folder, self.agent, self.log, self.total = options, folder, agent, log, results.expected
        self.domain, self.user = results.run["env"], results.run["simulator"]
        for place in to_do(results.run, results):  # of a start that was killed before it had noted them
            clean(self.at(place))
            with suppress(ValueError, OSError):
                log.append(result_of(place, self.domain, *row_of(self.at(place), place.scenario), "", self.user))
        self.waiting = to_do(results.run, load_results(folder))
        self.running: list[Running] = []
        self.refusal, self.failed = "", 0

    def at(self, place: Place) -> Path:
        return self.folder / "pare" / place.scenario / str(place.k)

    def play(self, told: list[int]) -> None:
        """Until all is done, or there is a refusal or something told."""
        try:
            with progress(range(self.total - len(self.waiting), self.total), "scenario runs") as bar:
                while (self.waiting or self.running) and not self.refusal and not told:
                    self.start()
                    self.collect()
                    self.tell(bar)
                    time.sleep(0.2)
        finally:
            end([one.process for one in self.running])
            for one in self.running:
                clean(one.folder)

    def start(self) -> None:
        while self.waiting and len(self.running) < self.options.concurrency:
            place = self.waiting.pop(0)
            argv = command(self.options, place.scenario, self.agent.name, self.agent.url)
            self.running.append(start(place, self.at(place), argv, self.agent.key))

    def collect(self) -> None:
        """The results of the processes that have ended, and of those that are out of time."""
        for one in list(self.running):
            late = one.seconds > self.options.timeout
            if one.process.poll() is None and not late:
                continue
            if late:
                end([one.process])
            clean(one.folder)
            self.running.remove(one)
            result, why = self.finished(one, late)
            self.log.append(result)
            self.failed = self.failed + 1 if result.reason == NO_RESULT else 0
            if why:
                tqdm.write(f"{one.place.scenario}, run {one.place.k}: {why}; see {one.folder}/log", file=sys.stderr)
            if self.failed == IN_A_ROW or "LLMProbeError" in why:
                self.refusal = f"Pare gave no result: {why}"

    def finished(self, one: Running, late: bool) -> tuple[Result, str]:
        """The result of a process that has ended, and what to say of it; void where it has left none."""
        place = one.place
        try:
            return result_of(place, self.domain, *row_of(one.folder, place.scenario), one.began, self.user), ""
        except ValueError as error:
            why = f"{LATE} after {one.seconds:.0f} s" if late else (
                f"{error}, exit code {one.process.returncode}, {last_error(log_of(one.folder))}")
        if late and not logged(one.folder, BEGUN):
            late, why = False, f"{why}, before its scenario began"
        return Result(place.scenario, self.domain, place.number, place.k, 0, stop=Stop.VOID_WORLD, began=one.began,
                      ended=now(), reason=LATE if late else NO_RESULT, private=[{"turn": 0, "fault": why}]), why

    def tell(self, bar: tqdm) -> None:
        self.log.poll()
        bar.n = self.total - len(self.waiting) - len(self.running)
        waits = [one.stage(self.options.max_turns) for one in self.running[:1]] or ["nothing"]
        bar.set_postfix_str(f"{self.log.solved} solved, {self.log.void} missing, waits for {waits[0]}"
                            + (f", and {len(self.running) - 1} more" if len(self.running) > 1 else ""), refresh=False)
        bar.update(0)


def result_of(place: Place, domain: str, row: dict, endpoint_failed: bool, began: str, user: str) -> Result:
    """Ours, of what row_of() gives for a run; of a row without verdict it is void."""
    reason = ("" if row["success_bool"] else "not validated" if row["success_bool"] is None else
              f"exception {row['exception_type']}" if row["exception_type"] else
              ENDPOINT if endpoint_failed else "checks not met")
    told = {"turn": 0, "checks": row["rationale"] or "", "seconds": row["run_duration"] or 0.0,
            "turns": row["number_of_turns"], "proposals": row["proposal_count"], "accepted": row["acceptance_count"]}
    stop = Stop.VOID_WORLD if row["success_bool"] is None else Stop.USER_CLOSED
    return Result(place.scenario, domain, place.number, place.k, 0, reward=float(row["success_bool"] is True),
                  stop=stop, private=[told], began=began, ended=now() if began else "", user=user, reason=reason)


# -------------------------------------------------------------------------------------------------------------- figures


def metrics(results: Results) -> dict[str, float]:
    """The figures by their names, over all scenarios and runs; what they mean stands at the top of this file."""
    scenarios, runs = results.run["tasks"], results.run["trials"]
    solved = Counter(r.task for r in results.records if r.solved)
    n = len(scenarios)
    found = {"Pass@1, first run": sum(r.solved for r in results.records if r.k == 0) / n}
    if runs > 1:
        found |= {f"Pass@1, mean of {runs} runs": solved.total() / (n * runs),
                  f"Pass@{runs}, at least one of {runs}": sum(solved[i] > 0 for i in scenarios) / n,
                  f"Pass^{runs}, all of {runs}": sum(solved[i] == runs for i in scenarios) / n}
    return found


def summary(results: Results) -> str:
    """The figures, and beside them all that they depend on."""
    run, n = results.run, len(results.run["tasks"])
    (domain, limits), = run["limits"].items()
    void = Counter(r.reason for r in results.records if r.void)
    void[NO_RESULT] += results.expected - len(results.records)
    why = Counter(r.reason for r in results.records if not r.solved and not r.void)
    part = ", the first of the split alone" if "first" in run["caps"] else ""
    lines = [f"Pare-Bench, {domain}: {n} scenarios{part}, {run['trials']} runs each; {results.folder}", ""]
    if on_loopback(run["simulator_url"]):
        lines[1:1] = [f"A TRIAL OF THE PLUMBING AND NO SCORE: the user is a model on this machine, at "
                      f"{run['simulator_url']}"]
    figures = metrics(results)
    low, high = wilson(round(figures["Pass@1, first run"] * n), n)
    lines += [grid([["", "share", "95 %"], *([name, f"{value:.3f}", f"{low:.3f}-{high:.3f}" if "first" in name else ""]
                                            for name, value in figures.items())]),
              f"missing: {void.total()} of {results.expected} runs"
              + (f" ({', '.join(f'{n} {reason}' for reason, n in void.items() if n)})" if void.total() else "")
              + ", counted as failed; 95 %: Wilson's interval",
              "failed: " + (", ".join(f"{n} {reason}" for reason, n in why.most_common()) or "none")]
    if why[ENDPOINT]:
        lines.append(f"WARNING: in {why[ENDPOINT]} of them requests of user or agent had no answer: no failure of the "
                     "model, though Pare counts them so; see pare/SCENARIO/K/log")
    lines += ["",
              f"agent: {run['model']}{' at ' + run['agent_url'] if run['agent_url'] else ''}, "
              + ("sampled as its endpoint does" if math.isnan(run["temperature"]) else
                 f"temperature {run['temperature']:g}, {run['agent_extra']}"),
              f"user: {run['simulator']} (PROVIDER/MODEL){' at ' * bool(run['simulator_url'])}{run['simulator_url']}",
              f"limits: {', '.join(f'{name} {value}' for name, value in limits.items())}, "
              f"{run['caps']['seconds']} s a run",
              *latency_lines(results),
              "versions: " + ", ".join(f"{name} {value or 'unknown'}" for name, value in run["made"].items()
                                       if name != "began")]
    return "\n".join(lines)


def latency_lines(results: Results) -> list[str]:
    """Pare's clock is the wall's: how long the turns took, and how many runs went on at once."""
    told = [p for r in results.records for p in r.private if p.get("turns")]
    seconds = sorted(p["seconds"] / p["turns"] for p in told)
    lines = [f"latency: {statistics.median(seconds):.1f} s a turn of both sides (median; 95 % of runs within "
             f"{seconds[math.ceil(0.95 * len(seconds)) - 1]:.1f} s)" if seconds else "latency: not known"]
    lines[0] += (f", {results.run['caps']['concurrency']} runs at once; Pare's clock is the wall's, so that the score "
                 "depends on both")
    with suppress(OSError, ValueError, LookupError, TypeError):
        for line in (results.folder / "latency.jsonl").read_text().splitlines():
            m = json.loads(line)
            lines.append(f"agent's server since {m['since'][:19]}: {m['requests']} requests, median {m['median']:.2f} "
                         f"s, 95 % within {m['p95']:.2f} s, at most {m['peak']} at once")
    return lines


# --------------------------------------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError or EndpointError, one line, for what can be known to be wrong."""
    parser = argparse.ArgumentParser(prog="pare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)

    def fail(message: str) -> None:
        raise UsageError(message)

    parser.error = fail
    parser.add_argument("--bench-python", help=f"the Python of an environment with Pare: {INSTALL}".replace("%", "%%"))
    parser.add_argument("--model", required=True, help="a run's model/ (or sft/), or a Hugging Face folder or id; with "
                        "--agent-url the name of the model there")
    parser.add_argument("--agent-url", default="", help="an OpenAI-compatible endpoint; its key is in AGENT_API_KEY")
    parser.add_argument("--temperature", type=float, help="of a model that is served here [as trained, else 1]")
    parser.add_argument("--max-tokens", type=int, help="likewise, of a message [as trained, else 1024]")
    parser.add_argument("--max-context", type=int, help="likewise, prompt and message: Pare's prompts begin with some "
                        "5,000 tokens [as trained, else 32768]")
    parser.add_argument("--kv-gib", type=float, help="likewise, size of the cache, GiB [as trained, else 16]")
    parser.add_argument("--user-model", required=True, help="of Pare's simulated user")
    parser.add_argument("--user-provider", required=True, help="as litellm calls it, such as openai; its key is where "
                        "litellm looks for it, such as OPENAI_API_KEY")
    parser.add_argument("--user-url", default="", help="the user's endpoint, if it is not the provider's own; no "
                        "environment variable names it")
    parser.add_argument("--observe-iterations", type=int, required=True, help="steps of the agent a turn while it "
                        "observes; Pare's command has 1, its agents 5")
    parser.add_argument("--execute-iterations", type=int, required=True, help="and while it executes; Pare's command "
                        "has 1, its agents 10")
    parser.add_argument("--max-turns", type=int, default=10, help="of user and agent, a scenario [%(default)s]")
    parser.add_argument("--split", choices=("full", "ablation"), default="full", help="[%(default)s]")
    parser.add_argument("--limit", type=int, help="its first scenarios alone, for a trial [all]")
    parser.add_argument("--runs", type=int, default=4, help="of each scenario; a folder can be given more "
                        "[%(default)s]")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds of a run, its start included [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=1, help="runs at once [%(default)s]")
    parser.add_argument("--out", required=True, help="folder of results, a new one, or one to go on in")
    options = parser.parse_args(argv)
    for name in ("observe_iterations", "execute_iterations", "max_turns", "runs", "timeout", "concurrency", "limit",
                 "max_tokens", "max_context"):
        if (value := getattr(options, name)) is not None and not 1 <= value < 2**31:
            fail(f"--{name.replace('_', '-')} must be at least 1 and below 2^31, is {value}")
    if options.temperature is not None and not 0 <= options.temperature <= 2:
        fail(f"--temperature must be from 0 to 2, is {options.temperature}")
    if options.kv_gib is not None and not 1e-3 <= options.kv_gib < 2**31:
        fail(f"--kv-gib must be at least 0.001 and below 2^31, is {options.kv_gib}")
    served = [name for name in ("temperature", "max_tokens", "max_context", "kv_gib")
              if getattr(options, name) is not None]
    if options.agent_url and served:
        fail(f"--{served[0].replace('_', '-')} is of a model that is served here: Pare's requests name a model and "
             "messages alone, so that with --agent-url the endpoint's own defaults hold")
    check_user(options, fail)
    if options.agent_url:
        AgentEndpoint(options.model, options.agent_url)  # raises where it can't be right
    python = options.bench_python and shutil.which(options.bench_python)
    if not python:
        given = f" {options.bench_python} is no program" if options.bench_python else " is missing"
        fail(f"--bench-python{given}: it is the Python of an environment with Pare: {INSTALL}, then --bench-python "
             "pare/.venv/bin/python")
    options.bench_python = os.path.abspath(python)  # a link stays one: it is what makes the environment
    return options


def main() -> None:
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    code = 0
    try:
        code = run(parse(sys.argv[1:]))
    except (UsageError, EndpointError, PolicyError) as error:
        print(f"pare.py: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:  # where there is nothing to be kept yet
        print("pare.py: stopped", file=sys.stderr)
        code = 130
    except OSError as error:
        print(f"pare.py: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
