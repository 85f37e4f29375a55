"""Measures extras/tau.py against the releases' own runners and evaluators, in one run; prints a row a domain.

    python tests/tau_check.py [--domains tau2:airline,...] [--mixes 300] [--seed 0]
    python tests/tau_check.py --transcript FILE [--domains tau2:telecom]     gold played to a user on loopback

tasks    all of the domain's (telecom: the 2285 of "full")
gold     of these, reward 1 once the gold calls are played and what is to be told is told
nothing  of the base split, reward 1 where the agent does nothing, with `held` true where a judge would decide
parity   random dialogues (gold calls, some dropped, altered, invented, out of order) with the official reward
build, call, score: milliseconds, ours/theirs; the median. Theirs: get_environment and set_state; get_response; the
         official evaluators together, as evaluate_simulation combines them. Ours: make_env; call; reward.
"""

import argparse
import importlib.util
import json
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from env import Call, EnvError  # noqa: E402
from extras import tau  # noqa: E402

# ------------------------------------------------------------------------------------------------- the official side


class stub:
    """A module that is imported and not used here, while its release is: pandas (where it is missing), litellm."""

    def __init__(self, name: str, **values):
        self.name, self.module = name, ModuleType(name)
        vars(self.module).update(values)

    def __enter__(self):
        self.used = self.name not in sys.modules and (self.name == "litellm" or not importlib.util.find_spec(self.name))
        if self.used:
            sys.modules[self.name] = self.module

    def __exit__(self, *_):
        if self.used:
            del sys.modules[self.name]


class Official2:
    """tau2 or tau3 by an import of its own: its tasks, environments and evaluators."""

    def __init__(self, domain: str):
        family, _, self.short = domain.partition(":")
        self.new, town = family == "tau3", f"domains.{self.short.partition('-')[0]}.environment"
        kinds = [f"evaluator.evaluator_{kind}" for kind in ("env", "action", "communicate")]
        with stub("pandas", DataFrame=object):
            m = tau.imported(tau.package_of(family), [""], ["data_model.message", town, *kinds])
        self.message, town, (env, action, told) = m["data_model.message"], m[town], (m[kind] for kind in kinds)
        self.evaluators = {"env": env.EnvironmentEvaluator, "ACTION": action.ActionEvaluator,
                           "COMMUNICATE": told.CommunicateEvaluator}
        kind = {"telecom": "_manual_policy", "telecom-workflow": "_workflow_policy"}.get(self.short, "")
        self.constructor = getattr(town, f"get_environment{kind}")
        self.tasks = {f"{domain}/{t.id}": t for t in town.get_tasks(None)}

    def options(self, task) -> dict:
        if self.short != "banking_knowledge":
            return {}
        names = [a.arguments.get("agent_tool_name") for a in task.evaluation_criteria.actions or ()
                 if a.name == "call_discoverable_agent_tool"]
        return {"retrieval_variant": "golden_retrieval", "task": task, "read_log_allowlist": set(names)}

    def environment(self, task_id: str):
        task = self.tasks[task_id]
        env = self.constructor(**self.options(task))
        start = task.initial_state
        env.set_state(start and start.initialization_data, start and start.initialization_actions, [])
        return env

    def trajectory(self, texts: list[str], played: list[tuple]) -> list:
        """Messages of a dialogue whose calls gave these results: the texts, then the calls."""
        m = self.message
        messages = [m.AssistantMessage(role="assistant", content=text) for text in texts]
        for i, (c, result) in enumerate(played):
            kind = m.UserMessage if c.requestor == "user" else m.AssistantMessage
            call = m.ToolCall(id=str(i), name=c.name, arguments=c.arguments, requestor=c.requestor)
            messages += [kind(role=c.requestor, tool_calls=[call]),
                         m.ToolMessage(id=str(i), role="tool", content=result.content, requestor=c.requestor,
                                       error=result.error)]
        return messages

    def reward(self, task_id: str, texts: list[str], played: list[tuple]) -> float:
        """As evaluate_simulation combines them, with a judge who finds all assertions to hold."""
        task, messages = self.tasks[task_id], self.trajectory(texts, played)
        basis = {b.value for b in task.evaluation_criteria.reward_basis}
        options = {"env_kwargs": self.options(task)} if self.new else {}
        env = self.evaluators["env"].calculate_reward(
            environment_constructor=self.constructor, task=task, full_trajectory=messages, **options).reward
        others = {kind: self.evaluators[kind].calculate_reward(task=task, full_trajectory=messages).reward
                  for kind in ("ACTION", "COMMUNICATE")}
        reward = env if basis & {"DB", "ENV_ASSERTION"} else 1.0
        for kind in basis & set(others):
            reward *= others[kind]
        return reward


class Official1:
    """tau-bench 1 likewise: its Env, with a user who says nothing."""

    def __init__(self, domain: str):
        town = f"envs.{domain.partition(':')[2]}"
        splits = ["test", *(["train", "dev"] if town.endswith("retail") else [])]
        names = ["envs.base", "types", *(f"{town}.{part}" for part in ("data", "tools", "wiki", "rules")),
                 *(f"{town}.tasks_{split}" for split in splits)]
        with stub("litellm", completion=None):
            self.m = tau.imported(tau.package_of("tau"), ["", "envs", town], names)
        self.town, self.tasks = town, {}
        for split in splits:
            listed = next(v for name, v in vars(self.m[f"{town}.tasks_{split}"]).items() if name.startswith("TASKS"))
            self.tasks |= {f"{domain}/{split}-{i}": task for i, task in enumerate(listed)}

    def environment(self, task_id: str):
        m, task = self.m, self.tasks[task_id]
        env = m["envs.base"].Env(m[f"{self.town}.data"].load_data, m[f"{self.town}.tools"].ALL_TOOLS, [task],
                                 m[f"{self.town}.wiki"].WIKI, m[f"{self.town}.rules"].RULES, "human", "", task_index=0)
        env.terminate_tools = ["transfer_to_human_agents"]
        return env

    def reward(self, task_id: str, texts: list[str], played: list[tuple]) -> float:
        env, action = self.environment(task_id), self.m["types"].Action
        env.actions = [action(name="respond", kwargs={"content": text}) for text in texts]
        for c, _ in played:
            if c.name not in env.terminate_tools:
                env.step(action(name=c.name, kwargs=c.arguments))
        return env.calculate_reward().reward


def official_of(domain: str):
    return Official1(domain) if domain.startswith("tau:") else Official2(domain)


# ------------------------------------------------------------------------------------------------ random dialogues


def altered(call: Call, pool: list[Call], rng: random.Random) -> Call:
    """One argument lost, or another value in its place."""
    arguments = json.loads(json.dumps(call.arguments))
    if not arguments:
        return Call(call.name, {"x": 1}, call.requestor)
    key = rng.choice(sorted(arguments))
    values = [c.arguments[key] for c in pool if isinstance(c.arguments, dict) and key in c.arguments]
    choice = rng.randrange(4)
    if choice == 0:
        del arguments[key]
    elif choice == 1 and isinstance(arguments[key], int | float):
        arguments[key] += rng.choice([0.0, 1])
    elif choice == 2:
        arguments[key] = rng.choice(["", "nobody", 7, None, [], "#W0000000"])
    else:
        arguments[key] = rng.choice(values)
    return Call(call.name, arguments, call.requestor)


def mix(task, pool: list[Call], user_tools: list[str], rng: random.Random) -> tuple[list[Call], list[str]]:
    """Calls of both sides and texts of the agent: close to gold, and in one of three but for extras as good."""
    good = rng.random() < 1 / 3
    calls = []
    for c in task.gold:
        luck = rng.random()
        if good or luck < 0.8:
            calls.append(c)
        elif luck < 0.9:
            calls.append(altered(c, pool, rng))
    reads = [c for c in pool if c.name.startswith(("get_", "find_", "check_", "list_", "calculate"))]
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(5)
        extra = (Call("no_such_tool", {"x": 1}) if kind == 0 else
                 Call(rng.choice(user_tools or ["no_such_tool"]), {}) if kind == 1 else
                 rng.choice(reads or pool) if kind == 2 or good else
                 altered(rng.choice(pool), pool, rng) if kind == 3 else rng.choice(pool))
        calls.insert(rng.randint(0, len(calls)), extra)
    if not good and rng.random() < 0.2:
        rng.shuffle(calls)
    texts = ["Certainly.", *(f"It is {told}, I see." for told in task.communicate if good or rng.random() < 0.85)]
    return calls, texts


def play(env, calls: list[Call]) -> list[tuple]:
    """(call, result) of each call until the dialogue has ended."""
    played = []
    for c in calls:
        if not env.ended:
            played.append((c, env.call(c.name, c.arguments, c.requestor)))
    return played


def spoken(texts: list[str]) -> list[dict]:
    return [{"role": "assistant", "content": text} for text in texts]


def compare(domain: str, mixes: int, seed: int, tick=lambda: None) -> dict:
    """Ours and theirs on random dialogues: how many agree, how many are worth 1, the rest, and milliseconds."""
    rng, official = random.Random(seed), official_of(domain)
    tasks = list({t.id: t for split in tau.tasks_of(domain).values() for t in split}.values())
    pool = [c for t in tasks for c in t.gold]
    found = {"agreed": 0, "won": 0, "differ": [], "official raised": [],
             **{f"{what} {whose}": [] for what in ("build", "call", "score") for whose in ("ours", "theirs")}}

    def timed(what: str, function):
        began = time.perf_counter()
        try:
            return function()
        finally:
            found[what].append((time.perf_counter() - began) * 1000)

    for task in rng.choices(tasks, k=mixes):
        env = timed("build ours", lambda: tau.make_env(task))
        calls, texts = mix(task, pool, [t["function"]["name"] for t in env.user_tools], rng)
        played = []
        for c in calls:
            if not env.ended:
                played.append((c, timed("call ours", lambda: env.call(c.name, c.arguments, c.requestor))))
        held = True if task.assertions else None
        env.world.gold_hash(task)  # kept from a task's first rollout on
        ours = timed("score ours", lambda: env.reward(spoken(texts), held, official=True))
        theirs_env = timed("build theirs", lambda: official.environment(task.id))
        if domain.startswith("tau:"):
            for c, _ in played[:-1]:
                step = official.m["types"].Action(name=c.name, kwargs=c.arguments)
                if c.name not in theirs_env.terminate_tools:
                    timed("call theirs", lambda: theirs_env.step(step))
        else:
            for c, _ in played:
                call = official.message.ToolCall(name=c.name, arguments=c.arguments, requestor=c.requestor)
                timed("call theirs", lambda: theirs_env.get_response(call))
        theirs_env = None
        try:
            theirs = timed("score theirs", lambda: official.reward(task.id, texts, played))
            found["agreed"] += ours == theirs
            found["differ"] += [(task.id, ours, theirs, calls, texts)] if ours != theirs else []
        except Exception as error:
            found["official raised"].append((task.id, ours, f"{type(error).__name__}: {str(error)[:200]}"))
        found["won"] += ours
        tick()
    return found


# ---------------------------------------------------------------------------------------------------------- the table


def memory() -> float:
    """Megabytes of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def row(domain: str, mixes: int, seed: int, tqdm) -> tuple:
    splits = tau.tasks_of(domain)
    base = next(iter(splits.values()))
    tasks = list({t.id: t for split in splits.values() for t in split}.values())
    won = 0
    for task in tqdm(tasks, f"{domain} gold", leave=False):
        env = tau.make_env(task)
        play(env, task.gold)
        won += env.reward(spoken(["".join(f" {told} ;" for told in task.communicate)]), True)
    nothing = sum(tau.make_env(task).reward([], True) for task in base)
    with tqdm(total=mixes, desc=f"{domain} mixes", leave=False) as bar:
        found = compare(domain, mixes, seed, bar.update)
    raised = f", official raised {len(found['official raised'])}" if found["official raised"] else ""
    for task_id, ours, theirs, calls, texts in found["differ"]:
        tqdm.write(f"{task_id}: ours {ours}, theirs {theirs}: {calls} {texts}")
    for task_id, ours, error in found["official raised"][:3]:
        tqdm.write(f"{task_id}: ours {ours}, the official evaluator raised {error}")
    times = [f"{statistics.median(found[f'{what} ours']):.2f}/{statistics.median(found[f'{what} theirs']):.2f}"
             for what in ("build", "call", "score")]
    return (domain, len(tasks), f"{won:.0f}", f"{nothing:.0f}/{len(base)}",
            f"{found['agreed']}/{mixes}{raised}", f"{found['won']:.0f}", *times)


def airline(number: int = 128, theirs: int = 8) -> str:
    """Seconds and megabytes of a training step's environments: read only, and once each has written."""
    domain = "tau2:airline"
    try:
        tasks = tau.tasks_of(domain)["base"]
    except EnvError:  # the table says so
        return ""
    writer = next(t for t in tasks if any(map(tau.domain_of(domain).writes, t.gold)))
    tau.make_env(writer).reward([])  # what is made once
    lines = []
    for what, calls in ((f"{number} built", ()), (f"{number} built, all of which write", writer.gold)):
        before, began = memory(), time.perf_counter()
        envs = []
        for _ in range(number):
            envs.append(tau.make_env(writer))
            play(envs[-1], calls)
        lines.append(f"{what}: {time.perf_counter() - began:.2f} s, {memory() - before:.0f} MB")
        del envs
    official = official_of(domain)
    before, began = memory(), time.perf_counter()
    envs = [official.environment(writer.id) for _ in range(theirs)]
    seconds, size = time.perf_counter() - began, memory() - before
    lines.append(f"theirs, estimated from {len(envs)}: {seconds / theirs * number:.1f} s, "
                 f"{size / theirs * number:.0f} MB")
    return "tau2:airline, " + "\n              ".join(lines)


class GoldAgent:
    """In a sampler's place: makes the agent's gold calls, tells the user to make theirs, says what is to be told."""

    def __init__(self, task, chat):
        told = f" That is {' ; '.join(task.communicate)} ." if task.communicate else ""
        self.texts = [f"Please do {c.name}({json.dumps(c.arguments)})." if c.requestor == "user" else
                      f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>"
                      for c in task.gold] + [f"Anything else?{told} It is done, goodbye."]
        self.chat, self.made = chat, 0

    async def sample(self, ids, max_tokens, seed):
        from sampler import Sample
        tokens = [*self.chat.tokenizer.encode(self.texts[min(self.made, len(self.texts) - 1)]), self.chat.turn_end]
        self.made += 1
        return Sample(tokens, [0.0] * len(tokens), "end", 0)


def gold_dialogue(task, **caps):
    """The rollout in which gold is played, with the user by rule of fake_user.py over HTTP."""
    from extras.tiny import make_tokenizer
    from fake_user import FakeUser
    from rollout import Caps, Chat, play_groups
    from extras.endpoint import Endpoint
    chat = Chat(make_tokenizer())
    with FakeUser() as server:
        endpoint = Endpoint("loopback-user", server.url)
        caps = Caps(**{"context": 10**6} | caps)
        (record,), _ = play_groups([(0, task)], 1, (0, 0), GoldAgent(task, chat), chat, caps, 0, endpoint=endpoint)
    return record


def main() -> None:
    from tqdm import tqdm
    every = [f"{family}:{short}" for family, shorts in tau.FAMILIES.items() for short in shorts]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domains", default=",".join(every))
    parser.add_argument("--mixes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transcript", type=Path, metavar="FILE", help="write a rollout of gold for each domain there")
    args = parser.parse_args()
    if args.transcript:
        from extras.show import save_rollouts
        save_rollouts(args.transcript, [gold_dialogue(next(iter(tau.tasks_of(domain).values()))[0])
                                        for domain in args.domains.split(",")])
        return
    # First, while the process has no freed memory that would be used again unseen.
    memory_line = airline() if "tau2:airline" in args.domains.split(",") else ""
    rows = [("", "tasks", "gold", "nothing", "parity", "won", "build ms", "call ms", "score ms")]
    for domain in tqdm(args.domains.split(","), "domains"):
        try:
            rows.append(row(domain, args.mixes, args.seed, tqdm))
        except EnvError as error:
            tqdm.write(f"{domain}: {error}")
    widths = [max(len(str(r[i])) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  ".join(str(v).ljust(width) if i == 0 else str(v).rjust(width)
                        for i, (v, width) in enumerate(zip(r, widths))))
    print(memory_line)


if __name__ == "__main__":
    main()
