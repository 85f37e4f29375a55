"""Dialogues of a file as records for SFT, token for token as a rollout records what the agent samples.

    records, counts = load_dialogues("sft.parquet", chat, context=32768)
    train, validation = split(records, share=0.05, seed=0)

A row is a JSON object or a line of Parquet: `messages` and `tools`, each an object or a JSON string; `id` and `source`,
where they are there, name the record. This is what is known of the MUA-RL release; other columns are not looked at.

Each agent message is encoded alone, as if sampled: its text, its calls in Qwen3's syntax, the turn end. Whatever stands
between two of them is the chat template's delta, so RL goes on from the very distribution that SFT taught. Chosen here:

- arguments are written as the template writes an object, whether the row holds them as one or as a string;
- white space around an agent's text, and in a chat without thinking its thoughts, are not learned;
- an agent message right after a text of the agent's is one with it (some exports part the text from its calls);
- a user's end marker (###STOP###) ends the dialogue there, as in a rollout; what the agent never answers has no tokens.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from jinja2 import TemplateError

from rollout import THINK, Chat, Rollout, Stop, parse_call
from simulator import ENDS

COUNTS = ("rows", "too_long", "trailing_messages", "user_ends", "after_end", "merged", "thoughts", "trimmed")


class DataError(ValueError):
    """A file that cannot be learned from; the message is one line: the file, the row's number, what is wrong."""


def load_dialogues(path: str | Path, chat: Chat, context: int,
                   shown: Callable = iter) -> tuple[list[Rollout], dict[str, int]]:
    """The rows of a .jsonl or .parquet file, in order, but those of more than `context` tokens; and counts.

    shown: what the rows pass through, such as a progress bar.

    A record has the tokens (T,), the segment (T,) of the agent's and -1 for all others, logprobs and advantages 0, no
    strategies or reactions, and as messages the public transcript, with what was said after the last agent message.

    counts: of all rows: rows, too_long (left out). Of those kept: trailing_messages (messages without tokens, as no
    agent message follows), user_ends (rows that a user's end marker ends), after_end (messages after it, dropped),
    merged (agent messages joined to the one before), thoughts (agent messages whose thoughts were dropped), trimmed
    (agent messages that lost white space).

    Raises DataError for a file that can't be read or has no row, for the first malformed row, by its number from 1 (in
    a .jsonl that of its line), and where all rows are too long.
    """
    records, counts = [], Counter(dict.fromkeys(COUNTS, 0))
    for number, row in shown(read_rows(Path(path))):
        tally = Counter()
        try:
            record = record_of(row, chat, tally)
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from None
        name, record.group = row.get("id"), number
        record.task = f"{path}:{number}" if name is None else str(name)
        fits = len(record.tokens) <= context
        records += [record] if fits else []
        counts["rows"] += 1
        counts.update(tally if fits else {"too_long": 1})
    if not records:
        raise DataError(f"{path}: all {counts['rows']} rows are longer than the context of {context} tokens"
                        if counts["rows"] else f"{path}: holds no row")
    return records, dict(counts)


def split(records: list[Rollout], share: float, seed: int) -> tuple[list[Rollout], list[Rollout]]:
    """(train, validation): of all records `share`, drawn by the seed, at least one where share > 0, and never all.

    Raises DataError where that can't be.
    """
    if not 0 <= share < 1 or share and len(records) < 2:
        raise DataError(f"a share of {share} of {len(records)} dialogues can't be set aside for validation: it must be "
                        "at least 0 and under 1, and needs two dialogues")
    number = min(max(1, round(share * len(records))), len(records) - 1) if share else 0
    drawn = set(random.Random(seed).sample(range(len(records)), number))
    return ([r for i, r in enumerate(records) if i not in drawn], [r for i, r in enumerate(records) if i in drawn])


# ------------------------------------------------------------------------------------------------------- the files


def read_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """(number from 1, row). Rows are parsed as JSON or by Arrow, and never evaluated."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: the data must be a .jsonl or a .parquet file")
    try:
        if path.suffix == ".parquet":
            yield from enumerate(parquet_rows(path), 1)
            return
        with path.open("rb") as lines:  # in bytes: a text's lines would end at U+2028 too, which JSON allows in strings
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, json_of(line, f"{path}, row {number}: the row", dict)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({str(error.strerror or error)[:80]})") from None


def parquet_rows(path: Path) -> Iterator[dict]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: Parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=64):
            yield from map(without_nulls, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: is no Parquet file ({str(error).splitlines()[0][:80]})") from None


def without_nulls(value):
    """Arrow gives each object the fields of all its kin, as nulls: they are taken out again (not out of strings)."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def json_of(value, what: str, *kinds: type):
    """A value that is of a kind (dict, list), or JSON for one. Raises DataError, which calls the value `what`."""
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{what} is not JSON ({str(error)[:80]})") from None
    if not isinstance(value, kinds):
        wanted = " or ".join("an object" if kind is dict else "a list" for kind in kinds)
        raise DataError(f"{what} must be {wanted}, is {repr(value)[:40]}")
    return value


# ------------------------------------------------------------------------------------------------ one row's dialogue


def record_of(row: dict, chat: Chat, tally: Counter) -> Rollout:
    """The row's record, without its name. Raises DataError without file and row."""
    tools = tools_of(row.get("tools"))
    messages = messages_of(row.get("messages"), chat, tally)
    record = Rollout("", str(row.get("source") or "sft"), 0, 0, 0, messages=messages)
    unanswered, q = [], -1  # what the agent has yet to answer; the segment
    for message in messages:
        asked = any(m["role"] == "user" for m in unanswered)
        if message["role"] != "assistant" or q < 0 and not asked:  # a greeting is a part of the prompt
            unanswered.append(message)
            continue
        try:
            record.append(chat.delta(unanswered, record.tokens[-1]) if record.tokens else chat.open(unanswered, tools))
        except (TemplateError, TypeError, RecursionError) as error:  # TypeError: a tool's description is no text
            raise DataError(f"the chat template refuses it ({' '.join(str(error).split())[:80]})") from None
        unanswered, q = [], q + asked
        ids, heard = spoken(message["content"], message.get("tool_calls", []), chat)
        record.append(ids, q)
        message.update(heard | {"segment": q})
    if q < 0:
        raise DataError("no agent message answers a user")
    record.stop = Stop.USER_CLOSED if messages[-1]["role"] == "user" else Stop.MAX_MESSAGES
    record.strategies, record.reactions, record.advantage = [None] * (q + 1), [None] * (q + 1), [0.0] * (q + 1)
    tally["trailing_messages"] += len(unanswered)
    return record


def spoken(text: str, calls: list[dict], chat: Chat) -> tuple[list[int], dict]:
    """The ids that the agent would have sampled for a message, and the message as a rollout keeps it.

    Raises DataError where these ids would be heard as something else.
    """
    def ids(text: str) -> list[int]:
        return chat.tokenizer.encode(text, add_special_tokens=False)

    text, bodies = written(text, calls, chat)
    said = chat.parse(ids(text))
    # A tokenizer may normalise (Qwen3's composes accents): a call means what its own ids say.
    meant = [parse_call(chat.tokenizer.decode(ids(body), clean_up_tokenization_spaces=False)) for body in bodies]
    wrong = next((call for call in said.calls + meant if isinstance(call, str)), None)
    if wrong or bodies and said.calls != meant or not said.calls and not said.text:
        why = wrong or ("it says and calls nothing" if not text else "a tag or an open think block hides a part of it")
        raise DataError(f"the agent's message {text[:60]!r} would not be heard as it is meant: {why}")
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in said.calls]
    return ids(text) + [chat.turn_end], {"content": said.text} | ({"tool_calls": calls} if calls else {})


def written(text: str, calls: list[dict], chat: Chat) -> tuple[str, list[str]]:
    """An agent message as one text in Qwen3's syntax, and of its calls what stands between their tags."""
    bodies = [plain(json.dumps(call["function"], ensure_ascii=False), chat) for call in calls]
    return "\n".join([plain(text, chat)] * bool(text)
                     + [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]), bodies


def plain(text: str, chat: Chat) -> str:
    """The text without turn borders of its own, and without halves of surrogate pairs; as Chat treats all others'."""
    return chat.special.sub(lambda s: f"{s[0][0]} {s[0][1:]}", text).encode(errors="replace").decode()


def messages_of(found, chat: Chat, tally: Counter) -> list[dict]:
    """The messages with nothing but role, content and calls, up to the user's end of the dialogue.

    Raises DataError for an unknown role, a content that is no text, and calls and results that do not match.
    """
    found, messages, pending = json_of(found, "messages", list), [], 0
    for i, message in enumerate(found):
        where = f"messages[{i}]"
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant", "tool"):
            raise DataError(f"{where} must be an object with a role (system, user, assistant, tool), is "
                            f"{repr(message)[:40]}")
        if not isinstance(content, str) and (role != "assistant" or content is not None):
            raise DataError(f"{where} ({role}): the content must be a text, is {repr(content)[:40]}")
        if role == "system" and i:
            raise DataError(f"{where}: a system message can only be the first")
        calls = calls_of(message.get("tool_calls"), f"{where}.tool_calls")
        answers = role == "assistant" and any(m["role"] == "user" for m in messages)
        if calls and not answers:
            raise DataError(f"{where} ({role}): only an agent that a user has spoken to can call tools")
        if (role == "tool") != (pending > 0):
            raise DataError(f"{where}: a tool result that no call asked for" if role == "tool" else
                            f"{where} ({role}): there are calls before it without a result ({pending})")
        pending += len(calls) - (role == "tool")
        if answers:
            content = as_said(message, chat, tally)
        if answers and messages[-1]["role"] == "assistant":
            tally["merged"] += 1
            content = "\n\n".join(filter(None, [messages.pop()["content"], content]))
        messages.append({"role": role, "content": content or ""} | ({"tool_calls": calls} if calls else {}))
        if role == "user" and any(marker in content for marker in ENDS.values()):
            tally.update(user_ends=1, after_end=len(found) - i - 1)
            break
    return messages


def as_said(message: dict, chat: Chat, tally: Counter) -> str:
    """An agent's text without white space around it, nor thoughts, unless this chat's agent thinks."""
    text = message.get("content") or ""
    if chat.thinking or chat.inside:  # what the prompt already ends on is not said again
        kept = text.strip().removeprefix(chat.inside)
    else:
        kept = THINK.sub("", text).rpartition("</think>")[2]
        tally["thoughts"] += kept != text or bool(message.get("reasoning_content"))
    tally["trimmed"] += kept == text != text.strip()
    return kept.strip()


def calls_of(found, where: str) -> list[dict]:
    """The calls of a message, their arguments as objects ("" and null are none)."""
    calls = []
    for call in json_of([] if found is None else found, where, list):
        function = named(call.get("function", call) if isinstance(call, dict) else call, f"{where}: each")
        name, arguments = function["name"], function.get("arguments")
        arguments = json_of({} if arguments in (None, "") else arguments, f"{where}: arguments of {name!r:.40}", dict)
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def tools_of(found) -> list[dict]:
    """A list of tools, or one container whose `function` is a list -> tools as a chat template takes them."""
    found, functions = json_of(found or [], "tools", list, dict), []
    for tool in found if isinstance(found, list) else [found]:
        inner = tool.get("function") if isinstance(tool, dict) else tool
        functions += inner if isinstance(inner, list) else [inner]
    return [{"type": "function", "function": named(function, "tools: each")} for function in functions]


def named(function, where: str) -> dict:
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return function
    raise DataError(f"{where} must have a function with a name, one is {repr(function)[:40]}")
