"""Pare in its own Python: what it has, one process of it for each scenario and run, and the row that this leaves.

Nothing of Pare's is imported here; extras/pare.py says what the runs are for. A process has a folder of its own, in
which all lies that it writes:

    log                       what it has printed
    results/*/*_result.json   a list of rows; here of one, whose columns are Pare's
    traces/*/*/*.json, logs/  the dialogue
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from extras.endpoint import without_keys
from extras.playing import now
from extras.ranks import UsageError, end_with_parent
from extras.results import read_run
from extras.run import progress

# polars: Pare and its meta-are want two packages of one module, alike in this version alone; graphql-core: 3.3 breaks
# the strawberry-graphql that meta-are pins.
INSTALL = ("pip install uv && git clone https://github.com/deepakn97/pare && cd pare && uv venv --python 3.12 && "
           "uv pip install -e . 'polars==1.33.1' 'graphql-core<3.3' && cd ..")
PROVIDER, KEY = "hosted_vllm", "HOSTED_VLLM_API_KEY"  # of litellm, for any OpenAI-compatible endpoint
REDIRECTS = re.compile(r"\w+_(API_BASE|BASE_URL)")    # names by which litellm is told of another endpoint

BEGUN = "Scenario Start Time"  # in the log of a run whose endpoints have answered

# For Pare's Python: its scenarios, and what is installed there, as one JSON object on the last line.
LISTING = """
import json, sys
from importlib import metadata
from pathlib import Path
import pare
from are.simulation.exceptions import ServerError  # which the original of meta-are does not have
from pare.benchmark.scenario_loader import get_splits_dir, load_scenario_ids_from_file
from pare.cli import benchmark
names = {"pare": "proactive-agents-research-environment", "meta-are": "meta-agents-research-environments",
         "litellm": "litellm"}
source = json.loads(metadata.distribution(names["meta-are"]).read_text("direct_url.json") or "{}")
print("\\n" + json.dumps({
    "scenarios": load_scenario_ids_from_file(get_splits_dir() / f"{sys.argv[1]}.txt"),
    "versions": {name: metadata.version(found) for name, found in names.items()},
    "pare": str(Path(pare.__file__).parent), "meta-are": source.get("url", ""),
    "commit": source.get("vcs_info", {}).get("commit_id", "")}))
"""


# ---------------------------------------------------------------------------------------------------------- what it has


def listing(python: str, split: str) -> dict:
    """What Pare has: scenarios, in its order, and versions with commits. Raises UsageError where it can't be asked."""
    def refused(why: str) -> UsageError:
        return UsageError(f"--bench-python {python}: {why}; it must be the Python of an environment with Pare: "
                          f"{INSTALL}, then --bench-python pare/.venv/bin/python")

    try:
        asked = subprocess.Popen([python, "-c", LISTING, split], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, env=environment(""), errors="replace",
                                 preexec_fn=end_with_parent)
    except OSError as error:
        raise refused(error.strerror or type(error).__name__) from None
    said = ()
    with progress(range(1), "Pare's list of its scenarios", aside=True) as bar:
        while not said:
            bar.update(0)
            with suppress(subprocess.TimeoutExpired):
                said = asked.communicate(timeout=0.5)
    try:
        found = json.loads(said[0].strip().rpartition("\n")[2])
        scenarios, versions = found["scenarios"], found["versions"]
        commits = [commit_of(found["pare"]), found["commit"] or commit_of(urlsplit(found["meta-are"]).path)]
    except (ValueError, LookupError, TypeError):
        last = (said[1].strip().splitlines() or ["it lists no scenarios"])[-1]
        raise refused(f"exit code {asked.returncode}, {last[:200]}") from None
    if not scenarios or len(set(scenarios)) < len(scenarios) or not all(re.fullmatch(r"\w+", i) for i in scenarios):
        raise refused(f"its split {split} is no list of scenarios")
    return {"scenarios": scenarios, "versions": versions | {
        f"{name} commit": commit[:12] for name, commit in zip(("pare", "meta-are"), commits, strict=True)}}


def commit_of(folder: str) -> str:
    """With "-dirty" if it was changed; "" where the folder is no part of a checkout."""
    if not folder or not shutil.which("git") or not Path(folder).is_dir():
        return ""
    asked = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"], cwd=folder,
                           capture_output=True, text=True)
    return asked.stdout.strip() if not asked.returncode else ""


def environment(key: str) -> dict[str, str]:
    """That of Pare's processes: ours, without what is meant for our Python or names an endpoint that no option names,
    and the agent's key by litellm's name."""
    kept = {name: value for name, value in os.environ.items() if not REDIRECTS.fullmatch(name)
            and name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "AGENT_API_KEY", "SIMULATOR_API_KEY")}
    kept |= {"OPENAI_BASE_URL": "", "OPENAI_API_BASE": ""}  # so that no .env beside Pare sets them
    direct = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    direct = ",".join(filter(None, [direct, "localhost", "127.0.0.1"]))
    return kept | {KEY: key, "PYTHONUNBUFFERED": "1", "NO_PROXY": direct, "no_proxy": direct}


def check_user(options: argparse.Namespace, fail: Callable[[str], None]) -> None:
    """The user's options: its endpoint is the one that they name, and must not get the agent's key."""
    url = options.user_url
    if url and (not re.fullmatch(r"https?://[^@?#\s]+", url) or not urlsplit(url).hostname):
        fail("--user-url must be the base url of an endpoint, as https://HOST/v1, without user name, key or query")
    own = re.split("[^A-Z0-9]", options.user_provider.upper())[0]
    redirects = [name for name, value in os.environ.items()
                 if value and REDIRECTS.fullmatch(name) and name.startswith(own)]
    if redirects and not url:
        fail(f"the environment variable {redirects[0]} names an endpoint of --user-provider {options.user_provider}, "
             "which run.json would not tell of: name it with --user-url, or unset the variable")
    hosts = {urlsplit(each).netloc for each in (url, options.agent_url)}
    if options.user_provider == PROVIDER and os.environ.get("AGENT_API_KEY") and len(hosts) > 1:
        fail(f"--user-provider {PROVIDER} would send the user's endpoint the key of the agent's, AGENT_API_KEY; with "
             "--user-provider openai any OpenAI-compatible --user-url has its own, OPENAI_API_KEY")


def same_endpoints(options: argparse.Namespace, folder: Path) -> None:
    """Raises UsageError for others than those of a folder that goes on: behind another one may be another model."""
    before = read_run(folder) if (folder / "run.json").is_file() else {}
    for name, option in ("simulator_url", "user_url"), ("agent_url", "agent_url"):
        given = getattr(options, option)
        if before and before[name] != given:
            raise UsageError(f"--out {folder} was begun with another --{option.replace('_', '-')}: it is "
                             f"{before[name] or 'none'} there, {given or 'none'} here")


def command(options: argparse.Namespace, scenario: str, name: str, url: str) -> list[str]:
    """Of one scenario and run; observe and execute are the agent's two modes, and both its endpoint's."""
    agent = [f"--{mode}-{what}={value}" for mode in ("observe", "execute")
             for what, value in (("model", name), ("provider", PROVIDER), ("endpoint", url))]
    user = [f"--user-model={options.user_model}", f"--user-provider={options.user_provider}"]
    user += [f"--user-endpoint={options.user_url}"] if options.user_url else []
    return [options.bench_python, "-m", "pare.main", "benchmark", "run", "--scenarios", scenario, "--runs", "1",
            "--no-cache", "--executor-type", "sequential", "--max-concurrent", "1", *agent, *user,
            "--max-turns", str(options.max_turns), "--user-max-iterations", "1",
            "--observe-max-iterations", str(options.observe_iterations),
            "--execute-max-iterations", str(options.execute_iterations),
            "--results-dir", "results", "--export", "--output-dir", "traces"]


def row_of(folder: Path, scenario: str) -> tuple[dict, bool]:
    """The one row that Pare has written of a run, and whether its log tells of an endpoint that failed, which the row
    does not. Raises ValueError, which says what is wrong, and OSError."""
    files = sorted(folder.glob("results/*/*_result.json"))
    if len(files) != 1:
        raise ValueError(f"{len(files)} result files")
    try:
        rows = json.loads(files[0].read_bytes())
    except (ValueError, RecursionError):
        raise ValueError("a result file that is no JSON") from None
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
        raise ValueError(f"{len(rows) if isinstance(rows, list) else 'no'} rows for one run")
    row, kinds = rows[0], {"base_scenario_id": str, "success_bool": bool | None, "run_duration": int | float | None,
                           "exception_type": str | None, "rationale": str | None, "number_of_turns": int,
                           "proposal_count": int, "acceptance_count": int}
    wrong = [name for name, kind in kinds.items() if name not in row or not isinstance(row[name], kind)]
    if wrong:
        raise ValueError(f"a row without {', '.join(wrong)} as Pare had it")
    if row["base_scenario_id"] != scenario:
        raise ValueError(f"a row of another scenario, {row['base_scenario_id'][:60]}")
    if row.get("status", "") not in ("success", "failed", "exception", "no_validation") or (
            (row["status"] == "success") != (row["success_bool"] is True)):
        raise ValueError("a row whose status and success differ")
    return row, logged(folder, "Fatal error - |consecutive server errors")


# ---------------------------------------------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Place:
    """Which run it is: number and name of the scenario, and of its runs number k."""

    number: int
    k: int
    scenario: str


@dataclass
class Running:
    """The process of one scenario and run."""

    place: Place
    folder: Path
    process: subprocess.Popen
    began: str
    clock: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.clock

    def stage(self, turns: int) -> str:
        """What it is at, for the progress bar."""
        text = log_of(self.folder, 2**15)
        done = re.findall(r"Proactive-Agent Turn (\d+) Output", text)
        at = (f"turn {min(int(done[-1]) + 2, turns)} of {turns}" if done else f"turn 1 of {turns}" if BEGUN in text else
              "an endpoint that is not ready" if "retrying in" in text else "its start")
        return f"{self.place.scenario}, run {self.place.k}: {at}"


def clean(folder: Path) -> None:
    """No key stays in what is kept, for an endpoint's refusal may repeat it. Temporary files go."""
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    without_keys(folder)


def log_of(folder: Path, most: int = 2**20) -> str:
    """What a process has printed, the last bytes of it."""
    with (folder / "log").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read().decode(errors="replace")


def logged(folder: Path, pattern: str) -> bool:
    """Whether a line of all that a process has printed has it. Raises OSError."""
    with (folder / "log").open(errors="replace") as file:
        return any(re.search(pattern, line) for line in file)


def start(place: Place, folder: Path, argv: list[str], key: str) -> Running:
    """In a session of its own, so that a Ctrl-C reaches it once, from here; it ends with this program, however that
    ends."""
    shutil.rmtree(folder, ignore_errors=True)  # of a try without a row
    (folder / "tmp").mkdir(parents=True)
    with (folder / "log").open("wb") as file:
        process = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                   env=environment(key) | {"TMPDIR": str(folder / "tmp")}, start_new_session=True,
                                   preexec_fn=end_with_parent)
    return Running(place, folder, process, now(), time.monotonic())


def end(processes: list[subprocess.Popen], seconds: float = 5) -> None:
    """All of them and what they have started: asked first, and killed after so many seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        until = time.monotonic() + seconds
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))


def last_error(text: str) -> str:
    """The last line of a log that names an exception, without what a server said: a key may be in it."""
    found = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.*)", text, re.MULTILINE)
    if not found:
        return "no error is in its log"
    kind, said = found[-1]
    told = re.match(r"LLM \S+ (?:failed with non-retryable error: \w+|not ready after \d+s)", said)
    return f"{kind}" + (f": {told[0]}" if told else "")
