"""A model behind an OpenAI-compatible chat-completions endpoint: a user, a judge, a second labeller, or an agent.

What fails for now is tried again, and then raises simulator.UserFault: one dialogue is void. What is refused for good
raises simulator.SimulatorError: the run stops.
"""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2  # what openai speaks HTTP with
import openai
from tqdm import tqdm

from simulator import SimulatorError, UserFault


class ContextFull(SimulatorError):
    """The endpoint refuses a request for its length: the end of an agent's dialogue, but a user's stops the run."""


class EndpointError(ValueError):
    """Options that name no endpoint that could be asked; the message is one line that says what to give."""


KEY = "SIMULATOR_API_KEY"
READY = 'Answer with the json object {"ready": true}.'
FULL = re.compile(r"(?i)context[ _-]?(length|size|window)|maximum (context|number of tokens)|too many (input )?tokens|"
                  "prompt is too long|longer than the model")  # how servers refuse a request for its length
RETRIES = 10  # of a request that met 408, 409, 429, 5xx, a time-out or a lost connection: a minute of growing waits


class Client(openai.DefaultAsyncHttpxClient):
    """Bounds the requests in flight, not those that wait to be tried again, and the whole time of each: httpx's own
    time-out is for the next byte, and some servers send blank lines to keep a waiting client."""

    def __init__(self, slots: int, seconds: float, tally: Counter):
        super().__init__(timeout=None)
        self.slots, self.seconds, self.tally = asyncio.Semaphore(slots), seconds, tally

    async def send(self, request, **options):
        async with self.slots:
            self.tally["retries"] += request.headers.get("x-stainless-retry-count", "0") != "0"
            try:
                async with asyncio.timeout(self.seconds):
                    return await super().send(request, **options)
            except TimeoutError:
                raise httpx2.ReadTimeout(f"no answer in {self.seconds:g} s", request=request) from None


class Endpoint:
    """A model behind an OpenAI-compatible chat-completions endpoint, and a tally of what was asked of it.

    At most `concurrency` requests are in flight; one that waits to be tried again is not. Raises EndpointError
    for options that can't be right. `extra` goes into each request's body as it is. Use it as `async with endpoint:`,
    once in each event loop. What differs for an agent (extras/agent.py) stands in the class.
    """

    key, who, hint = KEY, "user", "see --simulator-extra"
    flags = ("--simulator", "--simulator-url", "--simulator-extra")
    form = {"response_format": {"type": "json_object"}}  # of each request
    trial = [{"role": "user", "content": READY}], {}     # check()'s request

    def __init__(self, model: str, url: str, extra: str = "", concurrency: int = 128, timeout: float = 120.0,
                 judge: str = ""):
        try:
            where = urlsplit(url)
            fits = where.scheme in ("http", "https") and where.hostname and where.port != 0  # raises for a wrong one
        except ValueError:
            fits = False
        if not fits or re.search("[@?#]|[^!-~]", url):
            shown = f"; it is '{url}'" if re.fullmatch("[^@?#]+", url) else ""  # a key may stand in it
            raise EndpointError(f"{self.flags[0]} {model} needs {self.flags[1]}, the base url of an OpenAI-compatible "
                                f"endpoint, as https://HOST/v1, without user name, key or query{shown}")
        try:
            self.extra = json.loads(extra or "{}", parse_constant=int)  # int("NaN") is a ValueError, too
        except (ValueError, RecursionError):
            self.extra = None
        if not isinstance(self.extra, dict) or {"model", "messages", "tools"} & set(self.extra):
            raise EndpointError(f"{self.flags[2]} must be one JSON object, without what is ours, is '{extra}'")
        key = os.environ.get(self.key, "")
        if not key and not on_loopback(url):
            raise EndpointError(f"the environment variable {self.key} is not set: it holds the key for {where.hostname}"
                                " (any word where the endpoint wants none)")
        if not re.fullmatch(r"[!-~]*", key):
            raise EndpointError(f"the environment variable {self.key} holds a space, a line break or what no key has")
        self.model, self.url, self.concurrency, self.timeout = model, url, concurrency, timeout
        self.judge = judge or model
        self.tally: Counter = Counter()
        self.answered: dict[str, str] = {}  # model asked for -> that last answered; before a resume, of all ranks
        self.client, self.retries = None, RETRIES

    async def __aenter__(self):
        try:
            client = Client(self.concurrency, self.timeout, self.tally)
        except (ImportError, ValueError, OSError) as error:  # told without its text, in which a proxy's password may be
            raise SimulatorError(f"no connection can be set up to {self.url} ({type(error).__name__}): see HTTP_PROXY, "
                                 "ALL_PROXY and SSL_CERT_FILE in the environment") from None
        self.client = openai.AsyncOpenAI(api_key=os.environ.get(self.key) or "none", base_url=self.url,
                                         http_client=client, max_retries=self.retries)
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def chat(self, messages: list[dict], model: str = "", **options):
        """One completion's message; raises as complete() does."""
        return (await self.complete(messages, model, **options)).message

    async def complete(self, messages: list[dict], model: str = "", **options):
        """One completion's choice. Raises UserFault after the last retry, SimulatorError where none would help.

        Of a refusal only status and code are told: its text may repeat the key or the prompt.
        """
        model = model or self.model
        self.tally["requests"] += 1
        self.tally["waiting"] += 1
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=model, messages=messages, extra_body=self.extra, **self.form, **options)
            answer = raw.parse()
            message = answer.choices[0].message
            parts = [message.content or "", *(part for call in message.tool_calls or () for part in (
                call.id or "", call.function.name, call.function.arguments or ""))]
            if not all(isinstance(part, str) for part in parts):
                raise TypeError
            self.count(model, answer)
            return answer.choices[0]
        except openai.APIStatusError as error:
            line = f"{model} at {self.url} answered {error.status_code}{self.told(error)}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise UserFault(line + self.given_up(error)) from None
            if error.status_code in (400, 413, 422) and FULL.search(self.told(error) + str(error)):
                raise ContextFull(f"{line}: its context is too short for the request") from None
            why = {401: f"it refuses the key in {self.key}", 402: "the account's balance is used up",
                   403: f"the key in {self.key} has no right to it", 404: "no such model or path (does it end in /v1?)",
                   }.get(error.status_code, f"it refuses the request; {self.hint}")
            raise SimulatorError(f"{line}: {why}") from None
        except openai.APIConnectionError as error:
            late = isinstance(error, openai.APITimeoutError)
            what = f"in {self.timeout:g} s" if late else "(no connection; is the server running?)"
            raise UserFault(f"{model} at {self.url} gave no answer {what}{self.given_up(error)}") from None
        except (openai.OpenAIError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
            self.tally["faults"] += 1
            raise UserFault(f"{model} at {self.url} answered with something that is no chat completion") from None
        finally:
            self.tally["waiting"] -= 1

    def given_up(self, error: openai.APIError) -> str:
        """Counts a fault and what was tried, and says it."""
        tried = int(error.request.headers.get("x-stainless-retry-count", 0))
        self.tally["faults"] += 1
        return f", {tried + 1} times" if tried else ""

    def told(self, error: openai.APIStatusError) -> str:
        """What a refusal names in single words: OpenAI's code, type and parameter."""
        words = [str(getattr(error, name, None) or "") for name in ("code", "type", "param")]
        key = os.environ.get(self.key) or "\n"
        words = [word for word in words if re.fullmatch(r"[a-zA-Z][a-zA-Z_.]{2,39}", word) and key not in word]
        return f" ({', '.join(words)})" if words else ""

    def count(self, model: str, answer) -> None:
        usage = getattr(answer, "usage", None)
        for name in ("prompt_tokens", "completion_tokens"):
            used = getattr(usage, name, 0)
            self.tally[name] += used if isinstance(used, int) else 0
        now = str(getattr(answer, "model", None) or "unnamed")
        before = self.answered.get(model, now)
        self.answered[model] = now
        if now != before and now not in before.split(", "):
            self.tally["model_changes"] += 1
            tqdm.write(f"WARNING: for {model} now {now} answers, no longer {before}: the {self.who} has changed in the"
                       " run", file=sys.stderr)

    def status(self) -> str:
        """For a progress bar: what is waited for."""
        return (f"{self.tally['waiting']} requests under way, {self.tally['retries']} retries, "
                f"{self.tally['faults']} faults")

    def take(self) -> dict[str, int]:
        """The tally since it was last taken."""
        return {name: self.tally.pop(name, 0) for name in (
            "requests", "retries", "faults", "asked_again", "strategy_in_text", "model_changes", "prompt_tokens",
            "completion_tokens")}

    def check(self):
        """The answer to one small request. Raises SimulatorError, one line, where there is none."""
        async def once():
            async with self:
                return await self.chat(self.trial[0], **self.trial[1])
        self.retries = 1
        try:
            return asyncio.run(once())
        except UserFault as fault:
            raise SimulatorError(str(fault)) from None
        finally:
            self.retries = RETRIES


def on_loopback(url: str) -> bool:
    """Whether a url, or a HOST:PORT, is of this machine."""
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1") or host.startswith("127.")


def without_keys(folder: Path) -> None:
    """Takes the keys of our environment out of all that lies in a folder: an endpoint's refusal may repeat one."""
    keys = [value.encode() for name, value in os.environ.items()
            if name.endswith(("_API_KEY", "_TOKEN", "_SECRET_ACCESS_KEY")) and len(value) > 7]
    keys.sort(key=len, reverse=True)  # where one is a part of another
    for path in folder.rglob("*") if keys else ():
        with suppress(PermissionError):  # a container's
            if path.is_file() and not path.is_symlink():
                text = clean = path.read_bytes()
                for key in keys:
                    clean = clean.replace(key, b"[key]")
                if clean != text:
                    path.write_bytes(clean)


def extra_for(model: str) -> str:
    """What a model needs in each request's body and its name tells: DeepSeek's thinks, unless told not to."""
    return '{"thinking": {"type": "disabled"}}' if model.startswith("deepseek-") else ""


def endpoint_of(options, domains: set[str], ranks: int = 1) -> Endpoint | None:
    """The endpoint that --simulator and its kin name, with this rank's share of --concurrency; None for scripted users.

    Raises EndpointError, one line, for options that do not fit each other or the domains.
    """
    if options.simulator != "scripted":
        return Endpoint(options.simulator, options.simulator_url, options.simulator_extra,
                        max(1, options.concurrency // ranks), options.simulator_timeout, options.judge)
    from extras.scripted import SCRIPTS
    for domain in sorted(domains - set(SCRIPTS)):
        raise EndpointError(f"--env {domain} has no scripted user: name a model with --simulator, and the endpoint "
                            "that serves it with --simulator-url")
    for name in ("simulator_url", "simulator_extra", "judge"):
        if getattr(options, name):
            raise EndpointError(f"--{name.replace('_', '-')} needs --simulator MODEL: scripted users ask no endpoint")
    return None
