"""A checkpoint behind an OpenAI-compatible endpoint on this machine, on the sampler that training uses.

    python extras/serve.py --model runs/RUN/model --port 8000
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    with Server("runs/RUN/model") as server: ...     # in a program: server.url, server.name, server.latency()

POST /v1/chat/completions, with tools or without, and GET /v1/models. Requests that come together share the running
batch, and what they have in common is computed once. It listens on loopback alone, and asks for no key.

What is taken and what is refused, and how a history becomes a prompt, stands in extras/completions.py. Chosen here:
what a request does not say is said by this server's options, as the model was trained where they are silent, and never
by generation_config.json. max_tokens is cut to what the context leaves, as in a rollout. Stop strings are looked for in
the visible text, which ends before the first of them. A message with a malformed call is its text, tags and all, so
that the client sees what was said. With "stream" the answer comes in one piece.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import math
import select
import signal
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm  # noqa: E402  after the path

from extras.checkpoint import PolicyError  # noqa: E402
from extras.completions import Asked, Prompts, Refused, asked, messages_of  # noqa: E402
from extras.endpoint import on_loopback  # noqa: E402
from extras.playing import load_sampler  # noqa: E402
from extras.ranks import Lasting, UsageError  # noqa: E402
from rollout import THINK, Call, read, stream_seed  # noqa: E402

LARGEST = 2**26  # bytes of a request
PIECE = 32       # tokens sampled between two looks for a stop string; the same tokens as in one go


# ---------------------------------------------------------------------------------------------------------- the server


class Server:
    """The model, served from __enter__ to __exit__ by threads of its own; port 0 takes a free one.

    None for temperature and tokens is as the model was trained, else 1, 1024 tokens a message, and a context of 32768
    or what the model can take. Raises PolicyError for a model that can't be loaded, UsageError for a port that can't be
    had or a cache that is too small.
    """

    def __init__(self, model: str, port: int = 0, name: str = "", temperature: float | None = None,
                 max_tokens: int | None = None, max_context: int | None = None, kv_gib: float | None = None,
                 thinking: bool = False):
        try:  # before minutes go into loading
            self.http = Http(("127.0.0.1", port), Handler, bind_and_activate=False)
            self.http.server_bind()
        except (OSError, OverflowError) as error:
            self.http.server_close()
            raise UsageError(f"port {port} can't be used ({getattr(error, 'strerror', None) or error}); name another "
                             "with --port") from None
        given = {"message_tokens": max_tokens, "context": max_context}
        given = {key: value for key, value in given.items() if value is not None}
        self.sampler, self.chat, caps, _ = load_sampler(model, given, kv_gib, temperature, thinking)
        positions = self.sampler.model.config.max_position_embeddings
        if max_context and max_context > positions:
            self.http.server_close()
            raise UsageError(f"--max-context {max_context} is more than the {positions} positions of {model}")
        self.prompts = Prompts(self.chat, min(caps.context, positions))
        self.max_tokens, self.name = caps.message_tokens, name or name_of(model)
        self.seconds: list[float] = []  # of each request that was answered
        self.in_flight = self.peak = self.tokens = 0
        self.http.served = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.loop = asyncio.new_event_loop()
        self.threads = [threading.Thread(target=act, daemon=True)
                        for act in (self.loop.run_forever, self.http.serve_forever)]

    @property
    def context(self) -> int:
        """Tokens, prompt and answer."""
        return self.prompts.context

    def __enter__(self):
        self.http.server_activate()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        """Whoever waits for an answer is told that there will be none."""
        self.http.shutdown()
        asyncio.run_coroutine_threadsafe(self.give_up(), self.loop).result()
        self.http.hang_up()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in self.threads:
            thread.join()

    async def give_up(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def latency(self) -> dict[str, float]:
        """Of the requests answered so far: their number, median and 95th percentile in seconds, most at once."""
        each = sorted(self.seconds)
        return {"requests": len(each), "peak": self.peak} | {
            name: each[math.ceil(share * len(each)) - 1] if each else math.nan
            for name, share in (("median", 0.5), ("p95", 0.95))}

    async def complete(self, request: Asked, ids: list[int]) -> dict:
        """OpenAI's object for a request's completions, from the ids of its prompt."""
        most = min(request.max_tokens or self.max_tokens, self.context - len(ids))
        began = time.perf_counter()
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            found = await asyncio.gather(*(self.choice(request, ids, most, i) for i in range(request.n)))
        finally:
            self.in_flight -= 1
        self.seconds.append(time.perf_counter() - began)
        sampled = sum(tokens for _, tokens in found)
        self.tokens += sampled
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()),
                "model": self.name, "choices": [choice | {"index": i} for i, (choice, _) in enumerate(found)],
                "usage": {"prompt_tokens": len(ids), "completion_tokens": sampled, "total_tokens": len(ids) + sampled}}

    async def choice(self, request: Asked, ids: list[int], most: int, i: int) -> tuple[dict, int]:
        """One completion: OpenAI's choice without its index, and how many tokens were sampled."""
        seed, tokens, reason, places = stream_seed(request.seed, i), [], "length", []
        while len(tokens) < most and reason == "length" and not places:
            piece = min(PIECE, most - len(tokens)) if request.stop else most
            sample = await self.sampler.sample(ids + tokens, piece, seed, request.temperature)
            tokens += sample.tokens
            reason = "stop" if sample.stop == "end" else "length"
            text = self.chat.inside + self.chat.tokenizer.decode(tokens, skip_special_tokens=True,
                                                                 clean_up_tokenization_spaces=False)
            visible = THINK.sub("", text).rpartition("</think>")[2]
            looked = visible if reason == "stop" else visible.rstrip("\ufffd")  # half a letter is none yet
            places = [looked.find(stop) for stop in request.stop if stop in looked]
        message = self.message(visible[:min(places)] if places else visible, bool(request.tools))
        if thoughts := text[:len(text) - len(visible)] if text.endswith(visible) else "":
            message["reasoning_content"] = thoughts.replace("<think>", "").replace("</think>", "").strip()
        if not places:  # a text that was cut has no ids of its own
            back = messages_of([{"role": "user", "content": ""}, message])[1]  # as it will come back
            self.prompts.memory.put(ids, back, tokens)
        reason = "stop" if places else reason
        reason = "tool_calls" if message.get("tool_calls") and reason == "stop" else reason
        return {"message": message, "logprobs": None, "finish_reason": reason}, len(tokens)

    def message(self, visible: str, with_tools: bool) -> dict:
        """What a client gets: the calls apart, where there are tools and all calls are what a client can read."""
        said = read(visible)
        arguments = [json_of(call) for call in said.calls]
        if not with_tools or not arguments or None in arguments:
            return {"role": "assistant", "content": visible.strip()}
        return {"role": "assistant", "content": said.text or None, "tool_calls": [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": call.name,
                                                                                     "arguments": text}}
            for call, text in zip(said.calls, arguments, strict=True)]}


def json_of(call: Call | str) -> str | None:
    """A call's arguments; None where it is malformed, or they are no JSON object (Python's reader takes NaN, too)."""
    if isinstance(call, Call) and isinstance(call.arguments, dict):
        with contextlib.suppress(ValueError):
            return json.dumps(call.arguments, allow_nan=False)
    return None


def name_of(model: str) -> str:
    """What a model is called where no name is given: RUN/model by its run, RUN/sft as RUN-sft, else by its folder."""
    path = Path(model)
    if not path.is_dir():
        return model
    path = path.resolve()
    return {"model": path.parent.name, "sft": f"{path.parent.name}-sft"}.get(path.name, path.name)


class Http(ThreadingHTTPServer):
    daemon_threads, request_queue_size, served = True, 1024, None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.connections: set[socket.socket] = set()

    def hang_up(self) -> None:
        """Reads no more of any client; an answer that is being written goes out."""
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is no fault of ours; any other fault is one line, without what was asked."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            tqdm.write(f"serve.py: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    timeout = 600                   # seconds that a silent connection is kept
    wbufsize = -1                   # head and body in one packet: a second one would wait for the first's receipt
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_) -> None:
        """Nothing: a log of requests is the client's to keep."""

    def send_error(self, code, message=None, explain=None) -> None:
        """What http.server itself refuses, as JSON."""
        self.close_connection = True
        self.refuse(Refused(str(message or self.responses.get(code, ("",))[0])[:200], int(code)))

    def do_GET(self) -> None:
        served = self.server.served
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "local",
                 "max_model_len": served.context}
        try:
            path = self.place(bodies=False)
            if path == "/v1/models":
                self.send({"object": "list", "data": [model]})
            elif path == f"/v1/models/{served.name}":
                self.send(model)
            else:
                raise Refused(f"there is no {path[:80]} here: see /v1/models", 404)
        except Refused as refused:
            self.refuse(refused)

    def do_POST(self) -> None:
        served = self.server.served
        try:
            path, body = self.place(), self.body()
            if path != "/v1/chat/completions":
                raise Refused(f"there is no {path[:80]} here: it is /v1/chat/completions", 404)
            request = asked(body, served.name)
            ids = served.prompts.of(request.messages, request.tools)
            answer = self.wait(asyncio.run_coroutine_threadsafe(served.complete(request, ids), served.loop))
        except Refused as refused:
            return self.refuse(refused)
        except concurrent.futures.CancelledError:
            self.close_connection = True
            return self.refuse(Refused("the server is being stopped", 503))
        except (RuntimeError, FloatingPointError, ValueError) as error:  # of the sampler
            return self.refuse(Refused(f"{type(error).__name__}: {str(error)[:300]}", 500))
        if request.stream:
            self.stream(answer, request.with_usage)
        else:
            self.send(answer)

    def place(self, bodies: bool = True) -> str:
        """The path. Refuses what a page of another site may have sent through a browser, and bodies out of place."""
        for name in ("origin", "host"):
            given = self.headers.get(name) or "localhost"
            if not on_loopback(given):
                self.close_connection = True
                raise Refused(f"{name} {given[:80]} is not of this machine", 403)
        if not bodies and (self.headers.get("content-length", "0") != "0" or self.headers.get("transfer-encoding")):
            self.close_connection = True
            raise Refused("a GET has no body", 400)
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).rstrip("/")

    def body(self) -> bytes:
        lengths = self.headers.get_all("content-length", [])
        length = int(lengths[0]) if len(lengths) == 1 and lengths[0].isdecimal() and len(lengths[0]) < 12 else None
        if length is None or length > LARGEST:
            self.close_connection = True
            raise Refused(f"a request needs one content-length, of at most {LARGEST} (and no chunks)",
                          413 if lengths else 411)
        return self.rfile.read(length)

    def wait(self, future: concurrent.futures.Future) -> dict:
        """The answer; a client that has gone is not sampled for any longer."""
        looked = select.poll()
        looked.register(self.connection, select.POLLIN)
        try:
            while not concurrent.futures.wait([future], timeout=0.5).done:
                if looked.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError
            return future.result()
        finally:
            future.cancel()  # nothing where it is done

    def refuse(self, refused: Refused) -> None:
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        self.send({"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}},
                  refused.status)

    def send(self, answer: dict, status: int = 200) -> None:
        self.write(json.dumps(answer).encode(), "application/json", status)

    def stream(self, answer: dict, with_usage: bool) -> None:
        """Server-sent events: a piece with the whole message of each choice, one with its end, and [DONE]."""
        head = answer | {"object": "chat.completion.chunk", "choices": []}
        usage = head.pop("usage")
        pieces = []
        for choice in answer["choices"]:
            calls = [call | {"index": i} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
            delta = choice["message"] | ({"tool_calls": calls} if calls else {})
            pieces += [head | {"choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]},
                       head | {"choices": [{"index": choice["index"], "delta": {},
                                            "finish_reason": choice["finish_reason"]}]}]
        pieces += [head | {"usage": usage}] * with_usage
        self.write("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces).encode() + b"data: [DONE]\n\n",
                   "text/event-stream", 200)

    def write(self, body: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


# -------------------------------------------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a run's model/ (or sft/), or a Hugging Face folder or id")
    parser.add_argument("--port", type=int, default=8000, help="on 127.0.0.1; 0 takes a free one [%(default)s]")
    parser.add_argument("--name", default="", help="what requests call the model [that of its run or folder]")
    parser.add_argument("--temperature", type=float, help="of requests that name none; 0 takes the likeliest token "
                        "[as trained, else 1]")
    parser.add_argument("--max-tokens", type=int, help="of requests that name none [as trained, else 1024]")
    parser.add_argument("--max-context", type=int, help="tokens, prompt and answer [as trained, else 32768]")
    parser.add_argument("--kv-gib", type=float, help="size of the cache, GiB [as trained, else 16]")
    parser.add_argument("--thinking", action="store_true", help="let the model think before it speaks")
    options = parser.parse_args()
    least = {"temperature": 0, "max_tokens": 1, "max_context": 2, "kv_gib": 1e-3, "port": 0}
    for name, low in least.items():
        most = 2 if name == "temperature" else 65535 if name == "port" else 2**31
        if (value := getattr(options, name)) is not None and not low <= value <= most:
            parser.error(f"--{name.replace('_', '-')} must be from {low:g} to {most}, is {value}")
    return options


def main() -> int:
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)
    options, over = parse(), threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:  # which nohup asks for
            signal.signal(each, lambda number, _: (over.set(), signal.signal(number, signal.SIG_DFL)))
    try:
        server = Server(**vars(options))
    except (PolicyError, UsageError) as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2
    with server:
        print(f"{server.name} at {server.url}: temperature {server.sampler.temperature:g}, at most {server.max_tokens} "
              f"tokens a message, context {server.context}    (Ctrl-C or kill ends it)", flush=True)
        told = ""
        with tqdm(bar_format="{desc}", disable=None) as bar:  # where it is seen, and when there is news
            while not over.wait(0.5):
                news = (f"{len(server.seconds)} requests answered, {server.in_flight} under way, {server.tokens:,} "
                        "tokens sampled")
                if news != told:
                    bar.set_description_str(told := news)
    told = server.latency()
    print(f"{told['requests']} requests, at most {told['peak']} at once"
          + (f"; median {told['median']:.2f} s, 95 % within {told['p95']:.2f} s" if told["requests"] else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
