"""One run of train.py, with something changed in it that no option changes: what tests/miniature.py trains.

    python tests/variations.py VARIATION [options of train.py]

    plain        train.py as it is
    vague        the customer of mini:telecom answers every step vaguely, and tells what there is to see when asked
    noise-P      P percent of the user's private labels are turned: +1 <-> -1, and 0 to either
    extremes     the expert of mini:telecom is nearly always right in some things, and nearly never in others
    dropped      rollouts of groups with constant rewards are dropped: from the loss and from its denominator
    scaled       Interactive GRPO's advantages, times what gives a step's batch the L1 magnitude of FACA's

Whatever the variation, the metrics of each RL step have two more figures: `update_norm`, the L2 norm of what the step
changed in the weights, and `advantage_l1`, the mean of |A| over trainable tokens. Evaluations begin after SFT, or
after the first RL steps.
"""

import math
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # noqa: E402  after the path
from extras import scripted, tiny  # noqa: E402
from extras.scripted import Reaction, ScriptedUser, TelecomUser  # noqa: E402
from faca import REACTION  # noqa: E402
from rollout import Rollout  # noqa: E402
from simulator import UserTurn  # noqa: E402

NAMES = ("plain", "vague", "extremes", "dropped", "scaled")  # and noise-P


class VagueUser(TelecomUser):
    """Does what it is told to, and doesn't say what came of it; looks, and ends the call, only when asked to look.

    A wrong step costs the patience that it costs with the clear user, and the look at what it left costs no more.
    """

    VAGUE = ("OK.", "Done.")
    failed = False  # a step since the last look

    def take_step(self, fault: str, text: str) -> Reaction:
        if self.carry_out(fault, text):
            self.told.add(fault)
            self.patience += 1  # reply() takes one off for each vague answer
        else:
            self.failed = True
        return "be_vague", self.say(*self.VAGUE)

    def tell_sign(self, strategy: str = "reveal_piece", *wordings: str) -> Reaction:
        strategy, words = super().tell_sign(strategy, *wordings)
        self.patience += strategy == "be_vague" and self.failed
        self.failed = False
        return strategy, words


def asking_expert(turns: list[tuple[str, str]], rng: random.Random) -> str:
    """The expert for that user: asks what there is to see after each vague answer."""
    return tiny.CHECK if turns[-1][1] in VagueUser.VAGUE else tiny.telecom_expert(turns, rng)


def noisy(user: type[ScriptedUser], share: float) -> type[ScriptedUser]:
    """The user's class, with a share of its labels turned; words, patience and end stay as they were."""
    class NoisyUser(user):
        def __init__(self, facts, act, seed):
            super().__init__(facts, act, seed)
            self.noise = random.Random(f"labels/{seed}")  # its own stream: the words are those of the clear user

        async def reply(self, text: str) -> UserTurn:
            turn = await super().reply(text)
            turned, side = self.noise.random() < share, self.noise.choice((-1, 1))
            if turned:
                strategy = {1: "challenge_solution", -1: "confirm"}[REACTION[turn.strategy] or side]
                return replace(turn, strategy=strategy)
            return turn
    return NoisyUser


def make_extreme() -> None:
    """The expert's chances, so that a task of the usual ones is solved nearly always, or nearly never."""
    hard = ("vpn", "data")
    for table in (tiny.SIGNS, tiny.FIELDS):
        for name, (_, instead) in table.items():
            table[name] = 0.05 if name in hard else 0.99, instead


def scaled(advantages):
    """train.advantages, where outcome credit has the L1 magnitude over segments that FACA's would have."""
    def wrapped(x, lam, control, generator):
        outcome_NQ, faca_NQ = advantages(x, 0.0, "none", generator), advantages(x, 0.5, "none", generator)
        exists_NQ = x["exists_NQ"]
        own, other = (a_NQ[exists_NQ].abs().sum() for a_NQ in (outcome_NQ, faca_NQ))
        return outcome_NQ * (other / own) if own else outcome_NQ
    return wrapped


def dropped(update):
    """Trainer.update, of rollouts with outcome credit alone: a group of constant rewards has none."""
    def wrapped(self, records, lr, objective, updates=1):
        if objective is not train.negative_log_likelihood:
            records = [r for r in records if r.outcome_advantage]
        return update(self, records, lr, objective, updates)
    return wrapped


def measured(update):
    """Trainer.update, with the two figures more."""
    def wrapped(self, records: list[Rollout], lr, objective, updates=1):
        if objective is train.negative_log_likelihood:
            return update(self, records, lr, objective, updates)
        before = [p.full_tensor().clone() for p in self.model.parameters()]
        stats = update(self, records, lr, objective, updates)
        moved = sum((p.full_tensor() - b).square().sum().item() for p, b in zip(self.model.parameters(), before))
        each = [abs(r.advantage[s]) for r in records for s in r.segment if s >= 0]
        return stats | {"update_norm": math.sqrt(moved), "advantage_l1": sum(each) / len(each)}
    return wrapped


def sparing(evaluate):
    """train.evaluate, but not where a run begins: that is SFT's figure, the same for all that start from it."""
    def wrapped(trainer, tasks, run, name):
        if name != "before":
            evaluate(trainer, tasks, run, name)
    return wrapped


def fitting(name: str, run_all):
    """train.run_all, which refuses a run that the variation would leave as it is, or does not know."""
    def wrapped(config) -> int:
        if name in ("vague", "extremes") and config.env.partition("/")[0] != "mini:telecom":
            raise train.UsageError(f"variation {name} is of mini:telecom, not of --env {config.env}")
        if name in ("dropped", "scaled") and config.method != "grpo":
            raise train.UsageError(f"variation {name} is of --method grpo, not of {config.method}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise train.UsageError("variations are measured on one rank: run them by python, not torchrun")
        return run_all(config)
    return wrapped


def vary(name: str) -> None:
    """Puts the variation in place, in this process. Raises UsageError for a name that is none."""
    noise = re.fullmatch(r"noise-(\d{1,2}|100)", name)
    if name not in NAMES and not noise:
        raise train.UsageError(f"no variation '{name}'; there are: {', '.join(NAMES)}, noise-P (P from 0 to 100)")
    if name == "vague":
        scripted.SCRIPTS["mini:telecom"], tiny.EXPERTS["mini:telecom"] = VagueUser, asking_expert
    elif noise:
        for domain, user in scripted.SCRIPTS.items():
            scripted.SCRIPTS[domain] = noisy(user, int(noise[1]) / 100)
    elif name == "extremes":
        make_extreme()
    elif name == "scaled":
        train.advantages = scaled(train.advantages)
    train.run_all, train.evaluate = fitting(name, train.run_all), sparing(train.evaluate)
    update = train.Trainer.update
    train.Trainer.update = dropped(measured(update)) if name == "dropped" else measured(update)


if __name__ == "__main__":
    try:
        vary(sys.argv[1] if len(sys.argv) > 1 else "")
    except train.UsageError as error:
        sys.exit(print(f"variations.py: {error}", file=sys.stderr) or 2)
    sys.argv = ["train.py", *sys.argv[2:]]
    train.main()
