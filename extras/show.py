"""Rollouts in a file, and one of them in the terminal: `python rollout.py FILE.jsonl [INDEX]`.

Agent text stands in the colour of its segment's advantage (green above 0, red below, plain at 0), split into its
outcome and process part; the user's private strategy stands beside each turn; whatever is not trained is grey.
Colours are left out where the output is no terminal (FORCE_COLOR=1 keeps them, NO_COLOR=1 drops them).
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_origin

from rollout import Rollout, Stop

OF_RESULTS = ("began", "ended", "user", "reason")  # what extras/results.py adds to a rollout
GREY, GREEN, RED, BOLD, END = "\033[90m", "\033[32m", "\033[31m", "\033[1m", "\033[0m"


class RolloutFileError(ValueError):
    """A file that is no rollout file; the message is one line that names the file, the line and what is wrong."""


def fits(value, kind) -> bool:
    """Whether a value out of JSON is of a field's type, such as list[int | None]; an int passes for a float."""
    if get_origin(kind) in (list, dict):  # one value of each type is enough, for what is in there is flat
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, get_origin(kind)) and all(
            fits(v, get_args(kind)[-1]) for v in {type(v): v for v in values}.values())
    return isinstance(value, int | float if kind is float else kind)


def read_rollouts(path: str | Path) -> Iterator[Rollout]:
    """One after the other, so that a file of any size can be read. Raises RolloutFileError for what is no rollout."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield parse_rollout(line)
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutFileError(f"{path}: cannot be read as a rollout file ({error})") from None
    except RolloutFileError as error:
        raise RolloutFileError(f"{path}: line {number} is {error}") from None
    if not number:
        raise RolloutFileError(f"{path}: holds no rollout")


def load_rollouts(path: str | Path) -> list[Rollout]:
    """All of a file. Raises RolloutFileError for anything that save_rollouts did not write."""
    return list(read_rollouts(path))


def parse_rollout(line: str | bytes, kind: type = Rollout) -> Rollout:
    """A line of a rollout file, or of results, which are a kind with more fields and can be read as either."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise RolloutFileError("not JSON") from None
    found = found if isinstance(found, dict) else {}
    if kind is Rollout:
        found = {name: value for name, value in found.items() if name not in OF_RESULTS}
    wrong = [f.name for f in fields(kind) if not fits(found.get(f.name), f.type)]
    if wrong or len(found) > len(fields(kind)):
        raise RolloutFileError(f"no {kind.__name__.lower()} (wrong: {', '.join(wrong) or 'more fields'})")
    record = kind(**found)
    if not (len(record.tokens) == len(record.segment) == len(record.logprobs) and record.stop in list(Stop)
            and len(record.reactions) == len(record.strategies) > max(record.segment, default=-1)):
        raise RolloutFileError("no rollout (lists of unlike length, or no known stop)")
    return record


def save_rollouts(path: Path, records: list[Rollout]) -> None:
    """One JSON object a line."""
    write_whole(path, "".join(json.dumps(vars(r)) + "\n" for r in records).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Under a name of its own until it is whole: what was there before stays until then. A device is written to."""
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:  # a write names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        part.unlink(missing_ok=True)


def colours_wanted() -> bool:
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def paint(text: str, colour: str) -> str:
    """Every line for itself, so that a pager keeps the colour; control characters in the text are shown as a sign."""
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "\ufffd", text)
    return "\n".join(f"{colour}{line}{END}" for line in text.split("\n")) if colour and colours_wanted() else text


def show(record: Rollout, whole: bool = True) -> str:
    """The dialogue as text; whole: long prompts and tool results to their last line."""
    trained = sum(s >= 0 for s in record.segment)
    place = f"group {record.group}  rollout {record.k}" if record.tokens else f"trial {record.k}"
    lines = [paint(f"{record.task}  {place}  seed {record.seed}", BOLD),
             f"reward {record.reward:g}  stop {record.stop}  "
             + (f"outcome advantage {record.outcome_advantage:+.3f}  {trained} of {len(record.tokens)} tokens trained  "
                if record.tokens else "")
             + f"errors {record.errors or 'none'}", ""]
    lines[2:2] = [f"void: {p['fault']}" for p in record.private if "fault" in p]
    turn, shown = 0, -1
    for message in record.messages:
        role, text = message["role"], message["content"]
        if role == "assistant" and "segment" not in message:
            lines.append(paint(f"greeting  {text}", GREY))
        elif role == "assistant":
            q = message["segment"]
            if q != shown:
                lines.append(segment_line(record, q))
                shown = q
            lines.append(paint(agent_text(message), colour_of(record, q)))
        elif role == "user":
            lines += [paint(f"  {line}", GREY) for line in device_lines(record, turn)]
            label = next((p["strategy"] for p in record.private if p["turn"] == turn and "strategy" in p), "")
            lines.append(paint(f"user      {text}", GREY) + f"   [{label}]")
            turn += 1
        else:
            lines.append(paint(f"{role:10}{text if whole else folded(text)}", GREY))
    return "\n".join(lines)


def folded(text: str, lines: int = 3) -> str:
    head = text.split("\n")
    return text if len(head) <= lines + 1 else "\n".join([*head[:lines], f"[{len(head) - lines} more lines: --whole]"])


def segment_line(record: Rollout, q: int) -> str:
    strategy = record.strategies[q] or "no user turn followed"
    if not record.advantage:
        return f"-- segment {q}: {strategy}"
    total, outcome = record.advantage[q], record.outcome_advantage
    parts = f"outcome {outcome:+.3f} + lambda x process {total - outcome:+.3f}"
    return f"-- segment {q}: advantage {total:+.3f} = {parts}   <- {strategy}"


def colour_of(record: Rollout, q: int) -> str:
    value = record.advantage[q] if record.advantage else 0.0
    return GREEN if value > 0 else RED if value < 0 else ""


def agent_text(message: dict) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", []):
        f = call.get("function")
        parts.append(f"{f['name']}({json.dumps(f['arguments'])})" if f else f"[{call['malformed']}]")
    return "agent     " + "\n          ".join(parts or ["[nothing]"]) + ("  [cut]" if message.get("cut") else "")


def device_lines(record: Rollout, turn: int) -> list[str]:
    """The user's own tool calls before a turn, which no agent sees."""
    return [f"(private) {p['tool']}({json.dumps(p['arguments'])}) -> {p['result']}"
            for p in record.private if p["turn"] == turn and "tool" in p]


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollout.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("file", help="a file of a run's rollouts/")
    parser.add_argument("index", type=int, nargs="?", default=0, help="which of its rollouts, from 0 [%(default)s]")
    parser.add_argument("--whole", action="store_true", help="long prompts and tool results to their last line")
    options = parser.parse_args()
    try:
        records = load_rollouts(options.file)
    except RolloutFileError as error:
        fail(str(error))
    if not 0 <= options.index < len(records):
        fail(f"{options.file} has rollouts 0 to {len(records) - 1}, not {options.index}")
    try:
        text = show(records[options.index], options.whole)
    except (LookupError, TypeError, AttributeError) as error:  # messages are free in form: any JSON object passes there
        fail(f"{options.file}: rollout {options.index} is damaged ({type(error).__name__}: {error})")
    sys.stdout.reconfigure(errors="replace")  # what a model says may hold half a surrogate pair
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> None:
    print(f"rollout.py: {message}", file=sys.stderr)
    sys.exit(2)
