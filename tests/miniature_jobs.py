"""Commands that tests/miniature.py runs side by side in one folder, DIR: it skips what is through, and goes on."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extras.ranks import RunStopped, end_with_parent  # noqa: E402  after the path
from extras.results import ResultsError, complete  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal was closed


@dataclass(frozen=True)
class Job:
    """One command: a run of SFT or RL under DIR/runs, or an evaluation of its model under DIR/results."""

    folder: str              # below DIR
    command: tuple[str, ...]
    cost: float              # about as long as so many RL steps
    lines: int               # of its file of progress, when it is through
    needs: str = ""          # the folder of the job before it

    def through(self, out: Path) -> bool:
        if self.folder.startswith("runs/"):
            return (out / self.folder / "model").is_dir() and self.seen(out) >= self.lines
        try:
            return bool(complete(out / self.folder))
        except ResultsError:
            return False

    def seen(self, out: Path) -> int:
        """Lines of progress so far."""
        name = "results.jsonl" if self.folder.startswith("results/") else "metrics.jsonl"
        try:
            return (out / self.folder / name).read_bytes().count(b"\n")
        except OSError:
            return 0

    def start(self, out: Path, held) -> subprocess.Popen:
        """In a session of its own, so that a Ctrl-C reaches it once, from here. What it prints is in DIR/logs.

        held: the lock of DIR, which is free again when this command and all that it started have ended.
        """
        command = [part.replace("DIR", str(out)) for part in self.command]
        if (out / self.folder / "config.json").exists():
            command = [*command[:2], "--resume", str(out / self.folder)]
        self.log(out).parent.mkdir(exist_ok=True)
        with self.log(out).open("a") as file:
            return subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, cwd=ROOT,
                                    start_new_session=True, pass_fds=[held.fileno()], preexec_fn=end_with_parent)

    def log(self, out: Path) -> Path:
        return out / "logs" / (self.folder.replace("/", "-") + ".log")

    def fault(self, out: Path, code: int) -> str:
        """Why it ended too early, by the last line of its log."""
        last = [line.strip() for line in self.log(out).read_text(errors="replace").splitlines() if line.strip()][-1:]
        return (f"{self.folder} ended with exit code {code} before it was through: {''.join(last)[-300:]} (end of "
                f"{self.log(out)}). --out {out} goes on; if that ends so again, remove {out / self.folder} first")


def work(jobs: list[Job], out: Path, held, ended: Callable = lambda: None, at_once: int = 2) -> None:
    """Runs what is not through, at_once side by side; what a job needs that is none of jobs is there already.

    ended() is called when one has got through. Raises RunStopped, which names the log, where one fails. A signal stops
    all of them, and they save what is done; one more is handed on to them. It is only noted when it comes, so that no
    run is started and then forgotten.
    """
    through = {job.folder for job in jobs if job.through(out)} | {job.needs for job in jobs} - {j.folder for j in jobs}
    waiting, running, told = [job for job in jobs if job.folder not in through], {}, []

    def on_signal(number: int, frame) -> None:
        for process in running.values() if told else ():
            process.terminate()
        told.append(number)

    def done() -> int:
        return round(sum(job.cost * (job.folder in through or min(job.seen(out) / job.lines, 1)) for job in jobs))

    before = {n: signal.signal(n, on_signal) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
    bar = tqdm(total=round(sum(job.cost for job in jobs)), unit="step", dynamic_ncols=True, miniters=0, initial=done(),
               mininterval=0.1 if sys.stderr.isatty() else 30)
    try:
        while (waiting or running) and not told:
            for job in [job for job in waiting if job.needs in through][:at_once - len(running)]:
                running[job] = job.start(out, held)
                waiting.remove(job)
            time.sleep(0.5)
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                if not job.through(out):
                    raise RunStopped(job.fault(out, process.returncode))
                through.add(job.folder)
                ended()
            bar.n = done()
            bar.set_postfix_str(", ".join(job.folder for job in running), refresh=False)
            bar.update(0)
    finally:
        for process in running.values():
            process.terminate()  # a run saves what is done
        for process in running.values():
            process.wait()
        bar.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        raise KeyboardInterrupt
