"""A user model by rule, on loopback, behind OpenAI's /v1/chat/completions: to try the commands without a key.

    python tests/fake_user.py --port 8123
    python train.py --simulator loopback-user --simulator-url http://127.0.0.1:8123/v1

The tests give it the answers: reply(request, n) -> text or Answer, to the n-th request from 0, in order of arrival.

    with FakeUser(lambda request, n: '{"strategy": "confirm", "utterance": "Yes."}') as server:
        ...  # asked at server.url; then server.requests, server.headers, server.times, server.peak
"""

import argparse
import asyncio
import json
import random
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Answer:
    text: str | None = None
    calls: list = field(default_factory=list)        # tool calls, (name, arguments); a str goes out as it is
    status: int = 200
    headers: dict = field(default_factory=dict)
    body: object = None                              # instead of a completion; bytes as they are, all else as JSON
    delay: float | Callable[[], bool] = 0.0          # seconds, or until it is true
    drop: bool = False                               # the connection
    model: str = ""                                  # that is said to have answered


def completion(request: dict, answer: Answer) -> dict:
    """What the API answers; four characters are a token."""
    message = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {
                "name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(answer.calls)]
    used = [len(json.dumps(part)) // 4 for part in (request["messages"], message)]
    usage = {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)}
    return {"id": "chatcmpl-0", "object": "chat.completion", "created": int(time.time()),
            "model": answer.model or request["model"], "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}]}


# ---------------------------------------------------------------------------------------------------- the user by rule

LINES = {
    "confirm": ("Yes, please.", "All right, I did that.", "That is right."),
    "be_vague": ("I'm not sure.", "Something like that, I think."),
    "ask_clarification": ("What do you mean?", "How do I do that?"),
    "challenge_solution": ("That doesn't look right to me.", "No, that did not help."),
}
DONE = re.compile(r"\b(?:done|all set|goodbye|bye|anything else|resolved|completed)\b", re.IGNORECASE)
MINE = {"your": "my", "you": "I", "are": "am"}


def by_rule(request: dict, n: int) -> str | Answer:
    """The user's turn, or a call of one of its tools; the same request gets the same answer."""
    messages = request["messages"]
    rng = random.Random(zlib.crc32(json.dumps(messages).encode()))
    if messages[0]["role"] != "system":
        return '{"ready": true}'
    if "\n\nStatements:\n" in messages[-1]["content"]:  # a judge is asked
        statements = re.findall(r"(?m)^\d+\. ", messages[-1]["content"].rpartition("\n\nStatements:\n")[2])
        return json.dumps({"verdicts": [{"reason": "by rule", "true": True} for _ in statements]})
    scenario = messages[0]["content"].rpartition("The scenario\n")[2]
    facts = re.sub(r"(?i)\b(your|you|are)\b", lambda m: MINE[m[0].lower()], scenario.strip() or "You need help.")
    facts = [fact[:1].upper() + fact[1:] for fact in re.split(r"(?<=[.!?])\s+|\s*\n\s*", facts)]
    turn = sum(m["role"] == "assistant" and not m.get("tool_calls") for m in messages)
    seen = messages[-1]["content"] if messages[-1]["role"] == "tool" else ""
    free = [tool["function"]["name"] for tool in request.get("tools", ())
            if not tool["function"].get("parameters", {}).get("required")]
    if not seen and request.get("tool_choice") != "none":
        told = re.search(r"\b(\w+)\((\{.*\})\)", messages[-1]["content"])  # "Please do toggle_data({})."
        if told and told[1] in {tool["function"]["name"] for tool in request.get("tools", ())}:
            return Answer(calls=[told.groups()])
        if turn and free and rng.random() < 0.4:
            return Answer(calls=[(rng.choice(free), {})])
    if turn == 0:
        strategy, text = "reveal_piece", next((f for f in facts if re.search(r"\b(want|need)\b", f)), facts[0])
    elif DONE.search(messages[-1]["content"]) and not seen:
        strategy, text = "close", "Thank you, goodbye. ###STOP###"
    elif seen:
        strategy, text = "reveal_piece", f"I see {' '.join(seen.split())[:80]}."
    elif turn > 4 + len(scenario) % 3:
        strategy, text = "change_mind", "I have no more time, forget it. ###STOP###"
    else:
        strategy = rng.choice(["reveal_piece", *LINES])
        text = rng.choice(facts if strategy == "reveal_piece" else LINES[strategy])
    return json.dumps({"strategy": strategy, "utterance": text})


# ---------------------------------------------------------------------------------------------------------- the server


class FakeUser:
    """The server, in a thread of its own; `port` 0 takes a free one."""

    def __init__(self, reply: Callable[[dict, int], str | Answer] = by_rule, port: int = 0, model: str = ""):
        self.reply, self.port, self.model = reply, port, model
        self.requests, self.headers, self.times = [], [], []  # of each request; header names in lower case
        self.in_flight = self.peak = 0
        self.failed: Exception | None = None  # what reply raised: the test's own fault, told at the end
        self.ready = threading.Event()
        self.told = lambda: None  # called once the port is ours
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)

    def __enter__(self):
        self.thread.start()
        self.ready.wait(10)
        return self

    def __exit__(self, kind, *_):
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join()
        if self.failed and not kind:
            raise self.failed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self.connection, "127.0.0.1", self.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        self.told()
        await self.over.wait()
        server.close()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.split()[:2] != ["POST", "/v1/chat/completions"]:
                    await self.send(writer, Answer(status=404), b"{}")
                else:
                    await self.answer(json.loads(body), headers, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed
        except Exception as error:
            self.failed = error
        finally:
            writer.transport.abort()

    async def answer(self, request: dict, headers: dict, writer: asyncio.StreamWriter) -> None:
        n = len(self.requests)
        self.requests.append(request)
        self.headers.append(headers)
        self.times.append(time.monotonic())
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            answer = self.reply(request, n)
            answer = answer if isinstance(answer, Answer) else Answer(answer)
            await asyncio.sleep(0 if callable(answer.delay) else answer.delay)
            while callable(answer.delay) and not answer.delay():
                await asyncio.sleep(0.01)
        finally:
            self.in_flight -= 1
        if answer.drop:
            raise ConnectionResetError
        body = completion(request | {"model": self.model or request["model"]}, answer) if answer.body is None else (
            answer.body)
        await self.send(writer, answer, body if isinstance(body, bytes) else json.dumps(body).encode())

    async def send(self, writer: asyncio.StreamWriter, answer: Answer, body: bytes) -> None:
        headers = {"content-type": "application/json", "content-length": len(body)} | answer.headers
        head = f"HTTP/1.1 {answer.status} -\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8123, help="[%(default)s]")
    parser.add_argument("--model", default="loopback-user", help="the name that it answers by [%(default)s]")
    options = parser.parse_args()
    server = FakeUser(port=options.port, model=options.model)
    server.told = lambda: print(f"--simulator {options.model} --simulator-url {server.url}    (Ctrl-C or kill ends it)",
                                flush=True)
    try:
        asyncio.run(server.serve())
    except OSError as error:
        sys.exit(f"fake_user.py: port {options.port} can't be used ({error.strerror}); name another with --port")
    except KeyboardInterrupt:
        print(f"{len(server.requests)} requests, at most {server.peak} at once")


if __name__ == "__main__":
    main()
