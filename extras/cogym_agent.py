"""The agent of a Co-Gym session, in Co-Gym's own Python: its prompts go to a chat-completions endpoint of its own.

    python cogym_agent.py --check --redis-url URL [--docker IMAGE]     what is installed here, as one line of JSON
    python cogym_agent.py --session FILE                               one session, started by Co-Gym's Runner
    python cogym_agent.py --base-url URL --model NAME --tally FILE --node-name agent --env-uuid ID --redis-url URL

extras/cogym.py asks the first before anything starts, and starts the second, whose Runner starts the third, the agent;
nothing of this project is imported here. Co-Gym's contract: start(), then get_action() for each observation, then
end(). The observation, the chat and the action space are put into words by Co-Gym's ContextProcessor, as for Co-Gym's
own agents; the prompt around them is ours (chosen), and asks for "Thought: ..." and "Action: ...". What stands after
the last "Action:" goes to the environment as it is: one that fits no pattern there is logged as failed, and the agent
reads so in the chat.

The endpoint's address is an argument, and never OPENAI_BASE_URL, which Co-Gym's user and judge follow: an agent at the
same endpoint would be judged by itself, and is refused unless --same-endpoint says that it is wanted.

Chosen: where the endpoint gives no answer, the agent waits (WAIT_TEAMMATE_CONTINUE(), which Co-Gym does not log), for
an exception would leave the node deaf until the session's end; each such fault is counted in the file of --tally.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

WAIT = "WAIT_TEAMMATE_CONTINUE()"
OPENAI = "https://api.openai.com/v1"  # where Co-Gym's user and judge are without OPENAI_BASE_URL
REMEMBERED = 5                        # of its own actions in a prompt, as Co-Gym's agents have it

SYSTEM = """You are {name}, and you work on a task together with {others}. You share a workspace with them. Nobody \
takes turns: whenever something happens, you choose one action. The others may know what you don't, as preferences, \
limits or background: ask them where it matters, and take their answers into account. At the end, what stands in the \
shared editor is rated."""
PARTS = (("The task", "{task}"), ("The actions that there are", "{actions}"), ("An example", "{example}"),
         ("The workspace as it is now", "{observation}"), ("The messages so far", "{chat}"),
         ("Your own last actions, the latest below", "{own}"),
         ("Your answer", "Think first, then choose one action, in this form:\n\nThought: what you consider\nAction: "
          "one action that matches its pattern from the first to the last character, and nothing after it"))


def action_of(reply: str) -> str:
    """The text after the last "Action:", think blocks left out; the whole reply where there is none.

    >>> action_of("Thought: the plan stands.\\nAction: FINISH() ")
    'FINISH()'
    """
    reply = re.sub(r"<think>.*?(</think>|$)", "", reply, flags=re.DOTALL)
    return reply.rpartition("</think>")[2].rpartition("Action:")[2].strip()


def same_endpoint(one: str, other: str) -> bool:
    """Whether two base urls name one endpoint; what is no url is none."""
    def place(url: str) -> tuple:
        parts = urlsplit(url)
        host = "localhost" if parts.hostname in ("127.0.0.1", "::1", "0.0.0.0") else parts.hostname
        return host, parts.port or {"http": 80, "https": 443}.get(parts.scheme), parts.path.rstrip("/")
    try:
        return place(one) == place(other)
    except ValueError:  # a port that is no number
        return False


class Policy:
    """What Co-Gym's agent node calls; `client` is openai's, `words` Co-Gym's ContextProcessor, `tally` a file."""

    def __init__(self, client, words, model: str, tally: Path, options: dict):
        self.client, self.words, self.model, self.tally, self.options = client, words, model, tally, options
        self.task, self.own = {}, []
        self.counts: Counter = Counter()
        self.faults: Counter = Counter()  # by kind
        self.latencies: list[float] = []  # seconds, of each request with its retries
        self.answered: set[str] = set()   # models, by their own names
        self.note()

    def start(self, name: str, team_members: list[str], task_description: str, action_space: list[dict],
              example_question: str, example_trajectory: list) -> None:
        self.task = {
            "name": name, "others": ", ".join(m for m in team_members if m != name), "task": task_description,
            "actions": self.words.action_space_to_str(action_space),
            "example": self.words.task_example_to_str(example_question, example_trajectory)}
        self.note()

    def get_action(self, observation: dict, chat_history: list[dict]) -> str:
        """The next action. Raises nothing: see above."""
        if not self.task:  # the start was published before this node had subscribed to it
            self.counts["before_start"] += 1
            self.note()
            return WAIT
        began = time.monotonic()
        self.counts["requests"] += 1
        try:
            action = action_of(self.ask(self.messages(observation, chat_history)))
        except Exception as error:  # of any kind: an exception would leave the node deaf
            self.faults[str(getattr(error, "status_code", type(error).__name__))] += 1
            action = WAIT
        self.latencies.append(round(time.monotonic() - began, 3))
        self.own.append(action)
        self.note()
        return action

    def end(self, result_dir: str) -> None:
        self.counts["ended"] = 1
        self.note()

    def messages(self, observation: dict, chat_history: list[dict]) -> list[dict]:
        known = self.task | {
            "observation": self.words.observation_to_str(observation),
            "chat": self.words.chat_history_to_str(self.task["name"], chat_history),
            "own": "\n".join(self.own[-REMEMBERED:]) or "none"}
        text = "\n\n".join(f"# {title}\n\n{part.format_map(known)}" for title, part in PARTS)
        return [{"role": "system", "content": SYSTEM.format_map(known)}, {"role": "user", "content": text}]

    def ask(self, messages: list[dict]) -> str:
        answer = self.client.chat.completions.create(model=self.model, messages=messages, **self.options)
        self.answered.add(str(answer.model))
        for name in ("prompt_tokens", "completion_tokens"):
            self.counts[name] += getattr(answer.usage, name, 0) or 0
        return answer.choices[0].message.content or ""

    def note(self) -> None:
        """Writes the file anew, whole at any moment."""
        found = {"started": bool(self.task), "faults": dict(self.faults), "latencies": self.latencies,
                 "models": sorted(self.answered)} | {name: self.counts[name] for name in (
                     "requests", "before_start", "prompt_tokens", "completion_tokens", "ended")}
        part = self.tally.with_name(self.tally.name + ".part")
        part.write_text(json.dumps(found))
        part.replace(self.tally)


def check(redis_url: str, image: str) -> dict:
    """What a session needs of this Python: versions, and "" or what is wrong with Redis and Docker."""
    found = {"python": sys.version.split()[0], "redis": "", "docker": "", "missing": [
        name for name in ("collaborative_gym", "aact", "openai", "redis") if not find_spec(name)]}
    found["missing"] += [] if shutil.which("jupyter") else ["jupyter"]  # which ag2 runs from PATH at import
    for name in ("co-gym", "collaborative-gym", "openai", "dspy-ai"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    try:
        import redis
        redis.Redis.from_url(redis_url, socket_timeout=10, socket_connect_timeout=10).ping()
    except Exception as error:  # told by its kind alone
        found["redis"] = type(error).__name__
    try:
        if image:
            import docker
            docker.from_env().images.get(image)
    except Exception as error:
        found["docker"] = type(error).__name__
    return found


def session(path: Path) -> None:
    """One session as in Co-Gym's experiments: options, members and limits as the file says; ends with its processes."""
    from collaborative_gym.core import TeamMemberConfig
    from collaborative_gym.runner import Runner

    told = json.loads(path.read_text())
    runner = Runner(told["result_dir"], told["redis_url"])  # its own command line knows no other Redis than its default

    def stop(number, frame):
        signal.signal(number, signal.SIG_IGN)
        runner.cleanup_subprocesses()
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    runner.start_session(
        session_uuid=told["session"], env_config_path=told["env"], max_steps=told["max_steps"], add_tick=True,
        members=[TeamMemberConfig(**member) for member in told["members"]])
    for process in runner.subprocesses:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="say what is installed here, and end")
    parser.add_argument("--docker", default="", metavar="IMAGE", help="with --check: an image that must be there")
    parser.add_argument("--session", metavar="FILE", help="start the session that the file tells of")
    parser.add_argument("--base-url", default="", help="the agent's endpoint")
    parser.add_argument("--model", default="", help="by the name that the endpoint knows it by")
    parser.add_argument("--key-variable", default="AGENT_API_KEY", help="variable that holds its key [%(default)s]")
    parser.add_argument("--same-endpoint", action="store_true", help="though user and judge are at the same endpoint")
    parser.add_argument("--temperature", type=float, default=1.0, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=4000, help="of an answer [%(default)s]")
    parser.add_argument("--extra", default="{}", help="JSON object for the body of each request; null leaves out "
                        "what is sent otherwise")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a request may take [%(default)s]")
    parser.add_argument("--wait-time", type=int, default=1, help="seconds before an action goes out [%(default)s]")
    parser.add_argument("--tally", default="agent.json", help="file of requests, latencies and faults [%(default)s]")
    parser.add_argument("--node-name", default="agent", help="[%(default)s]")
    parser.add_argument("--env-uuid", default="", help="the session's environment")
    parser.add_argument("--redis-url", default="redis://localhost:6379/0", help="[%(default)s]")
    args = parser.parse_args()
    if args.check:
        print(json.dumps(check(args.redis_url, args.docker)))
        return
    if args.session:
        session(Path(args.session))
        return
    judge = os.environ.get("OPENAI_BASE_URL") or OPENAI
    if not args.base_url or same_endpoint(args.base_url, judge) and not args.same_endpoint:
        sys.exit(f"cogym_agent.py: --base-url '{args.base_url}' must be an endpoint of the agent's own, not {judge}, "
                 "where Co-Gym's user and judge are (--same-endpoint if that is wanted)")

    from aact.cli.launch.launch import _sync_run_node  # as Co-Gym's own agents are started
    from aact.cli.reader import NodeConfig
    from aact.cli.reader.dataflow_reader import NodeArgs
    from collaborative_gym.utils.context_processing import ContextProcessor
    from openai import OpenAI

    client = OpenAI(api_key=os.environ.get(args.key_variable) or "none", base_url=args.base_url, timeout=args.timeout,
                    max_retries=3)
    extra = json.loads(args.extra)
    ours = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    policy = Policy(client, ContextProcessor, args.model, Path(args.tally), {
        **{name: value for name, value in ours.items() if name not in extra},
        "extra_body": {name: value for name, value in extra.items() if value is not None}})
    _sync_run_node(NodeConfig(node_name=args.node_name, node_class="agent", node_args=NodeArgs(
        env_uuid=args.env_uuid, node_name=args.node_name, agent=policy, wait_time=args.wait_time)), args.redis_url)


if __name__ == "__main__":
    main()
