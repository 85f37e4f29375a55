"""The frozen user u: each user turn is one visible utterance and one private strategy, named in the same call.

The strategy is for credit alone (faca.py). It reaches no agent prompt, no trained token, and not the utterance. Here
are a user turn, its extraction from a model's JSON reply, and the scripted users of the embedded domains:

    user = make_user(task, act, seed)      # act(tool, **arguments) -> dict, the user's own tools, run in the world
    turn = await user.open()               # UserTurn(utterance, strategy, done): the first message
    turn = await user.reply(text)          # the next, to the text that the agent showed

A user sees the agent's visible text only, never its tool calls or their results. A scripted user answers from its
task's facts, in words varied by its seed, and reacts to what the agent said, whoever said it: it looks for what an
agent may ask or tell (patterns over free text), and what it can't read it asks about. Its patience is finite: wrong or
unclear messages cost it, and then it gives up (change_mind) and ends. Chosen here, all of it; a scripted user knows
whether a step worked, so its labels flatter the method compared with a model's.
"""

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from faca import REACTION


class UserFault(Exception):
    """The user gave no turn, by no fault of the agent's: the rollout is void, never a reward of 0."""


@dataclass(frozen=True)
class UserTurn:
    utterance: str     # what the agent reads
    strategy: str      # private: a label of Table 1, or "invalid"
    done: bool = False  # the user ends the dialogue with this turn


# ------------------------------------------------------------------------------------------------------ extraction

# Where a reply is no valid JSON, what it was going to say is what a JSON string holds after this key. (The key's name
# and the fallback are chosen: the paper's Appendix B is not public.)
SALVAGE = re.compile(r'"utterance"\s*:\s*"((?:[^"\\]|\\.)*)')


def extract_turn(reply: str | None) -> UserTurn | None:
    """A model's reply -> its user turn; None if there is nothing that the agent could be shown.

    Meant is one JSON object {"strategy": LABEL, "utterance": TEXT, "done": BOOL (false if absent)}, in a code fence or
    amid prose too. A strategy that is unknown, missing or no string is "invalid". A reply that holds no such object is
    "invalid" as a whole, and its visible text is salvaged: the utterance as far as it was written, or, where the reply
    is not JSON at all, the reply itself.
    """
    reply = re.sub(r"<think>.*?(</think>|$)", "", reply or "", flags=re.DOTALL).strip()
    start = reply.find("{")
    try:
        found = json.JSONDecoder().raw_decode(reply, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        utterance, strategy = found.get("utterance"), found.get("strategy")
        text = utterance.strip() if isinstance(utterance, str) else ""
        known = strategy if isinstance(strategy, str) and strategy in REACTION else "invalid"
        return UserTurn(text, known, found.get("done") is True) if text else None
    begun = SALVAGE.search(reply)
    if begun:
        text = _unescape(begun[1])
    else:
        text = reply if start < 0 else reply[:start].strip(" `\n")  # half an object is not for the agent's eyes
    return UserTurn(text.strip(), "invalid") if text.strip() else None


def _unescape(text: str) -> str:
    """The text of a JSON string that may have been cut off, an unfinished escape at its end left out."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return re.sub(r"\\.?[0-9a-fA-F]{0,4}$", "", text)


# ---------------------------------------------------------------------------------------------------- scripted users

Reaction = tuple[str, str]  # (strategy, utterance)


class ScriptedUser(ABC):
    """A user by rule. Subclasses give the opening words and `react`, the strategy and words for what the agent said.

    Every friction (reaction -1) costs patience; at the third the user gives up. `close` ends the dialogue.
    """

    PATIENCE = 3
    GIVE_UP = ("Forget it, I give up.", "This leads nowhere. Goodbye.")
    UNCLEAR = ("What do you mean?", "I don't understand.", "Sorry, what should I do?")

    def __init__(self, facts: dict, act: Callable[..., dict], seed: int):
        self.facts, self.act, self.rng = facts, act, random.Random(seed)
        self.patience = self.PATIENCE
        self.told: set[str] = set()  # what was revealed already

    async def open(self) -> UserTurn:
        return UserTurn(self.opening(), "reveal_piece")

    async def reply(self, text: str) -> UserTurn:
        """The user's turn to the agent's visible text; it is awaited, as a model's would be, and does not wait."""
        strategy, utterance = self.react(" ".join(text.lower().split()))
        self.patience -= REACTION[strategy] < 0
        if self.patience == 0:
            return UserTurn(self.say(*self.GIVE_UP), "change_mind", done=True)
        return UserTurn(utterance, strategy, done=strategy == "close")

    def say(self, *wordings: str) -> str:
        return self.rng.choice(wordings)

    def unclear(self) -> Reaction:
        return "ask_clarification", self.say(*self.UNCLEAR)

    def reveal(self, what: str, *wordings: str) -> Reaction:
        """A fact that the agent asked for: progress the first time, a challenge when it is asked for again."""
        if what in self.told:
            return "challenge_solution", "I told you: " + self.say(*wordings)
        self.told.add(what)
        return "reveal_piece", self.say(*wordings)

    def agree(self) -> Reaction:
        """To "shall I go ahead?": confirmed once, then with a shrug, so that asking is no way to farm credit."""
        if "agreed" in self.told:
            return "be_vague", self.say("Whatever you think.", "I don't mind.")
        self.told.add("agreed")
        return "confirm", self.say("Yes, please.", "Yes, go ahead.")

    @abstractmethod
    def opening(self) -> str:
        """The first utterance: the wish, and nothing that was not asked for."""

    @abstractmethod
    def react(self, text: str) -> Reaction:
        """The strategy and the words for an agent's text, given in lower case with single spaces."""


# Ways of asking, in free text. Each is searched within one sentence of lower-case text.
ASK = r"(?:what|which|tell|give|provide|share|send|may i|can i|could i|can you|could you|would you|need|confirm|please)"
OFFER = re.compile(r"\b(?:(?:shall|should|may) i (?!ask|have|know)|(?:do you want|would you like) (?:me|us|to)\b"
                   r"|do you agree|(?:ok|go ahead|proceed|right|correct)\?)")


def asks(text: str, thing: str) -> bool:
    """A sentence that asks for the thing (a regular expression), or a sentence of the thing with a question mark."""
    return any(re.search(rf"\b{ASK}\b.*\b(?:{thing})\b", s) or (s.endswith("?") and re.search(rf"\b(?:{thing})\b", s))
               for s in sentences(text))


def sentences(text: str) -> list[str]:
    return re.findall(r"[^.?!]+[.?!]?", text)


class TelecomUser(ScriptedUser):
    """mini:telecom: looks when asked to, does the one step that it is told to, and says what it then sees."""

    # fault -> what an instruction to mend it says, whatever its wording: a verb and the thing, in either order
    VERB = (r"turn|switch|toggle|disabl|enabl|deactivat|activat|disconnect|reset|reseat|remov|reinsert|insert|take|put|"
            r"set|stop|restor|check that|make sure")
    THING = {
        "airplane_mode": r"air ?plane|aeroplane|flight mode",
        "sim_card": r"sim",
        "mobile_data": r"(?:mobile|cellular) data",
        "apn": r"apn|access point",
        "data_saver": r"data[ -]?saver|data saving",
        "vpn": r"vpn",
    }
    LOOK = r"status bar|icons?|see|show|shows|screen|symbols?|display"
    TRY = r"try|test|work|works|working|solved|fixed|resolved|back|connected|speed"

    def opening(self) -> str:
        return self.say("Hi, my phone has no internet.", "Hello, the internet on my phone is dead.",
                        "My phone won't go online.")

    def react(self, text: str) -> Reaction:
        steps = self.steps_in(text)
        if len(steps) == 1:
            return self.take_step(steps[0])
        if len(steps) > 1:
            return "ask_clarification", self.say("One step at a time, please.", "Which step first?")
        if OFFER.search(text):
            return self.agree()
        if asks(text, "number|phone number|line"):
            return self.reveal("phone", f"It is {self.facts['phone']}.", f"My number is {self.facts['phone']}.")
        if asks(text, self.LOOK):
            return self.closing() or self.tell_sign()
        if re.search(rf"\b(?:{self.TRY})\b", text):
            return self.closing() or ("challenge_solution", self.say("No, it is still dead.", "It does not work."))
        return self.unclear()

    def steps_in(self, text: str) -> list[str]:
        """The faults that the text tells to mend. A question about what the user sees is no instruction."""
        told = [s for s in sentences(text) if re.search(rf"\b(?:{self.VERB})", s)
                and not (s.endswith("?") and re.match(r" ?(?:is|are|do|does|did|have|has|what|which)\b", s))]
        return [fault for fault, thing in self.THING.items() if any(re.search(rf"\b(?:{thing})\b", s) for s in told)]

    def take_step(self, fault: str) -> Reaction:
        if not self.act("do_step", fault=fault)["changed"]:
            sign = self.sign()
            words = self.say("That changed nothing, still {}.", "It did not help, I see {}.")
            return "challenge_solution", words.format(sign)
        return self.closing() or self.tell_sign("confirm", "Done, now I see {}.", "OK, now there is {}.")

    def tell_sign(self, strategy: str = "reveal_piece", *wordings: str) -> Reaction:
        """What the status bar shows; asked for again without a change between, it is no news."""
        sign = self.sign()
        if sign in self.told:
            return "be_vague", self.say(f"Still {sign}.", f"As before, {sign}.")
        self.told.add(sign)
        return strategy, self.say(*wordings or ("I see {}.", "There is {}.")).format(sign)

    def sign(self) -> str:
        return self.act("check_status_bar")["shows"] or "no sign, but no internet"

    def closing(self) -> Reaction | None:
        if self.act("try_internet")["works"]:
            return "close", self.say("It works now, thank you!", "The internet is back, thanks!")
        return None


class RetailUser(ScriptedUser):
    """mini:retail: gives the number and the detail when asked, and believes what it is told."""

    DONE = r"done|returned|exchanged|changed|updated|processed|refund|refunded|sent|on its way|booked|completed"
    NO = r"can ?not|can't|sorry|unable|not (?:possible|allowed|eligible)|unfortunately|refuse|refused"
    WHY = r"late|days|delivered|pending|shipped|policy"

    def opening(self) -> str:
        item = self.facts["item"]
        return {"return": self.say(f"I want to return my {item}.", f"Can I give the {item} back?"),
                "exchange": self.say(f"I need another size of my {item}.", f"Can I exchange the {item}?"),
                "address": self.say(f"Please send my {item} to a new address.", f"My {item} needs a new address."),
                }[self.facts["want"]]

    def react(self, text: str) -> Reaction:
        detail = self.facts["detail"]
        if OFFER.search(text):
            return self.agree()
        if asks(text, "order number|number|order id"):
            return self.reveal("order", f"It is {self.facts['order']}.", f"My order is {self.facts['order']}.")
        if detail and asks(text, "size" if self.facts["want"] == "exchange" else "address|where"):
            return self.reveal("detail", f"To {detail}." if self.facts["want"] == "address" else f"I want {detail}.",
                               f"{detail}, please.")
        if re.search(rf"\b(?:{self.NO})\b", text):
            if re.search(rf"\b(?:{self.WHY})\b", text):
                return "close", self.say("A pity. Goodbye.", "All right, goodbye.")
            return "challenge_solution", self.say("Why not?", "Why is that?")
        if re.search(rf"\b(?:{self.DONE})\b", text):
            return "close", self.say("Thank you, goodbye.", "Great, thanks!")
        return self.unclear()


SCRIPTS: dict[str, type[ScriptedUser]] = {"mini:telecom": TelecomUser, "mini:retail": RetailUser}


def make_user(task, act: Callable[..., dict], seed: int) -> ScriptedUser:
    """The scripted user of the task's domain. act(tool, **arguments) runs one of the user's own tools."""
    return SCRIPTS[task.domain](task.facts, act, seed)
