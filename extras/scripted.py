"""The scripted users of the embedded domains: no model, no network, the same interface as simulator.ModelUser.

A scripted user answers from its task's facts, in words varied by its seed, and reacts to what the agent said, whoever
said it: it looks for what an agent may ask or tell (patterns over free text), and what it can't read it asks about. Its
patience is finite: messages that lead nowhere cost it, and then it gives up (change_mind) and ends. Chosen here, all of
it; a scripted user knows whether a step worked, so its labels flatter the method compared with a model's.
"""

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from faca import REACTION
from simulator import UserFault, UserTurn

Reaction = tuple[str, str]  # (strategy, utterance)


class ScriptedUser(ABC):
    """A user by rule. Subclasses give the opening words and `react`, the strategy and words for what the agent said.

    Every turn without progress (reaction 0 or -1) costs patience; at the third the user gives up. `close` ends the
    dialogue.
    """

    PATIENCE = 3
    GIVE_UP = ("Forget it, I give up.", "This leads nowhere. Goodbye.")
    UNCLEAR = ("What do you mean?", "I don't understand.", "Sorry, what should I do?")
    FORMS: tuple[tuple[str, str], ...] = ()  # (fact, pattern) of what an agent may get wrong about the user

    def __init__(self, facts: dict, act: Callable[[list[tuple]], list[str]], seed: int):
        self.facts, self.tools, self.rng = facts, act, random.Random(seed)
        self.patience = self.PATIENCE
        self.told: set[str] = set()  # what was revealed already

    async def open(self) -> UserTurn:
        return UserTurn(self.opening(), "reveal_piece")

    async def reply(self, text: str) -> UserTurn:
        """The user's turn to the agent's visible text; it is awaited, as a model's would be, and does not wait."""
        strategy, utterance = self.react(" ".join(text.lower().replace("\u2019", "'").split()))
        self.patience -= REACTION[strategy] <= 0
        if self.patience == 0:
            return UserTurn(self.say(*self.GIVE_UP), "change_mind", end="stop")
        return UserTurn(utterance, strategy, end="stop" if strategy == "close" else "")

    def act(self, tool: str, **arguments) -> dict:
        """Runs one of the user's own tools."""
        result = self.tools([(tool, arguments)])[0]
        try:
            return json.loads(result)
        except ValueError:  # an error's text is no JSON: these users make no mistake of that kind
            raise UserFault(f"the scripted user's tool {tool} failed: {result}") from None

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

    def objection(self, text: str) -> Reaction | None:
        """To a text that has a fact wrong: names another number, size or address than the user's, and not that."""
        for name, form in self.FORMS:
            fact, named = self.facts[name] or "", re.findall(rf"\b(?:{form})\b", text)
            if named and re.fullmatch(form, fact.lower()) and fact.lower() not in named:
                return "challenge_solution", f"No, {fact}."
        return None

    def agree(self, text: str) -> Reaction:
        """To "shall I go ahead?": confirmed once, then with a shrug, so that asking is no way to farm credit."""
        if wrong := self.objection(text):
            return wrong
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
ASK = (r"(?:what|which|tell|give|provide|share|send|enter|state|verify|let me know|may i|can i|could i|can you|"
       r"could you|would you|need|require|without|once|confirm|please)")
OFFER = re.compile(r"\b(?:(?:shall|should|may) (?:i|we) (?!(?:\w+ )?(?:ask|have|know|get|see))"
                   r"|(?:do you want|would you like) (?:me|us|to)\b"
                   r"|do you agree|are you ready|(?:go ahead|proceed)\b.*\?|(?:ok|okay|alright|right|correct)\?)")


def sentences(text: str) -> list[str]:
    return re.findall(r"[^.?!]+[.?!]?", text)


def asks(text: str, thing: str) -> bool:
    """A sentence that asks for the thing (a regular expression), or a sentence of the thing with a question mark."""
    return any(re.search(rf"\b{ASK}\b.*\b(?:{thing})\b|\b(?:{thing})\b.*(?:\bplease\b|\?$)", s)
               for s in sentences(text))


def offers(text: str) -> bool:
    """A sentence that asks for a yes to what the agent means to do; "anything else?" and "where should I?" do not."""
    return any(OFFER.search(s) and not re.search(r"\b(?:else|what|which|where)\b", s) for s in sentences(text))


class TelecomUser(ScriptedUser):
    """mini:telecom: looks when asked to, does the one step that it is told to, and says what it then sees."""

    FORMS = (("phone", r"\d{3}"),)
    # fault -> what an instruction to mend it says, whatever its wording: a verb and the thing, in either order
    VERB = (r"(?:turn|switch|toggl|disabl|enabl|deactivat|activat|disconnect|reset|re-?seat|remov|re-?insert|insert|"
            r"take|put|set|stop|restor|exit|leave|close|clear|eject|tap|press|check that|make sure)")
    THING = {
        "airplane_mode": r"air ?plane|aeroplane|flight mode",
        "sim_card": r"sim",
        "mobile_data": r"(?:mobile|cellular) data",
        "apn": r"apn|access point",
        "data_saver": r"data[ -]?saver|data saving",
        "vpn": r"vpns?",
    }
    # No instruction: what is so or not to be done; what the agent has done, will do or proposes to do.
    TOLD = re.compile(rf"(?<!\bis )(?<!\bare )(?<!\bwas )(?<!\bnot )(?<!n't )(?<!no need to )\b{VERB}")
    MINE = re.compile(r"\b(?:(?:shall|should|may) i (?!ask)|(?:want|like) me to |(?:i|me|we(?='ve| have))"
                      rf"(?:'\w+| (?:have|will|can|could|am|just|now|already|also|to))* {VERB})[^,;:]*")
    ON = r"\b(?:(?:turn|switch|put)(?:ing)? on|(?:mode|data|saver|vpn|it) on(?! your)|(?:enabl|activat)(?:e|ing))\b"
    OFF = r"\b(?:(?:turn|switch|put)(?:ing)? off|(?:mode|data|saver|vpn|it) off|(?:disabl|deactivat)(?:e|ing))\b"
    MENDS = {"airplane_mode": (OFF, ON), "mobile_data": (ON, OFF), "data_saver": (OFF, ON), "vpn": (OFF, ON)}
    LOOK = r"status bar|icons?|see|shows?|shown|screen|symbols?|display|top of"
    TRY = r"try|tried|test|works?|working|solved|fixed|resolved|back|connected|speed|restart|reboot|browser?|website"

    def opening(self) -> str:
        return self.say("Hi, my phone has no internet.", "Hello, the internet on my phone is dead.",
                        "My phone won't go online.")

    def react(self, text: str) -> Reaction:
        looks = asks(text, self.LOOK) or re.search(rf"\b(?:check|look at) (?:\w+ )*(?:{self.LOOK})\b", text)
        steps = self.steps_in(text)
        steps = [fault for fault in steps if fault not in self.told] or ([] if looks else steps)  # "thanks for ..."
        if len(steps) == 1:
            return self.take_step(steps[0], text)
        if len(steps) > 1:
            return "ask_clarification", self.say("One step at a time, please.", "Which step first?")
        if offers(text):
            return self.agree(text)
        if asks(text, "number|which (?:phone )?line") and not (looks and "phone" in self.told):
            return self.reveal("phone", f"It is {self.facts['phone']}.", f"My number is {self.facts['phone']}.")
        if looks or asks(text, "|".join(self.THING.values())):
            return self.closing() or self.tell_sign()
        if re.search(rf"\b(?:{self.TRY})\b", text):
            return self.closing() or ("challenge_solution", self.say("No, it is still dead.", "It does not work."))
        return self.closing() or self.unclear()

    def steps_in(self, text: str) -> list[str]:
        """The faults that the text tells to mend. A question about what the user sees is no instruction."""
        told = [s for s in sentences(self.MINE.sub("", text)) if self.TOLD.search(s)
                and not (s.endswith("?") and re.match(r" ?(?:is|are|do|does|did|have|has|what|which)\b", s))]
        if not any(self.things_in(s) for s in told):
            told = [text] if any(re.search(r"\b(?:it|this|that)\b", s) for s in told) else []  # "Turn it off."
        return [fault for fault in self.THING if any(fault in self.things_in(s) for s in told)]

    def things_in(self, text: str) -> list[str]:
        return [fault for fault, thing in self.THING.items() if re.search(rf"\b(?:{thing})\b", text)]

    def take_step(self, fault: str, text: str) -> Reaction:
        if not self.carry_out(fault, text):
            words = self.say("That changed nothing, still {}.", "It did not help, I see {}.")
            return "challenge_solution", words.format(self.sign())
        self.told.add(fault)
        return self.closing() or self.tell_sign("confirm", "Done, now I see {}.", "OK, now there is {}.")

    def carry_out(self, fault: str, text: str) -> bool:
        """Does what the text tells to do about the fault; whether that changed anything."""
        right, wrong = self.MENDS.get(fault, ("", "(?!)"))
        backwards = re.search(wrong, text) and not re.search(right, text)
        return not backwards and self.act("do_step", fault=fault)["changed"]

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
    """mini:retail: gives the number and the detail when asked, and believes what it is told but for these facts."""

    FORMS = (("order", r"\d{3}"), ("detail", "small|medium|large"), ("detail", r"\d+ \w+ (?:street|road|avenue|lane)"))
    DONE = (r"(?<!\bbe )\b(?:done|complete|returned|exchanged|changed|updated|processed|refunded|sent|booked|completed|"
            r"accepted|submitted|initiated|successful|all set|refund (?:is|of)|on its way)\b")
    OPEN = r"\b(?:if|once|before|until|can|could)\b"  # a sentence about what may yet be done
    NO = (r"can ?not|can't|unable|(?:not|isn't|don't|doesn't) (?:possible|allow|allowed|eligible|able|accept)|"
          r"unfortunately|refus(?:e|ed|al)|declined|no longer|too late|outside|beyond")
    WHY = r"late|days?|delivered|pending|shipped|transit|policy|window"

    def opening(self) -> str:
        item = self.facts["item"]
        return {"return": self.say(f"I want to return my {item}.", f"Can I give the {item} back?"),
                "exchange": self.say(f"I need another size of my {item}.", f"Can I exchange the {item}?"),
                "address": self.say(f"Please send my {item} to a new address.", f"My {item} needs a new address."),
                }[self.facts["want"]]

    def react(self, text: str) -> Reaction:
        detail = self.facts["detail"]
        if offers(text):
            return self.agree(text)
        if asks(text, "(?<!phone )(?<!and )number|order id|which order"):
            return self.reveal("order", f"It is {self.facts['order']}.", f"My order is {self.facts['order']}.")
        if detail and asks(text, "size|instead" if self.facts["want"] == "exchange" else "address|where"):
            return self.reveal("detail", f"To {detail}." if self.facts["want"] == "address" else f"I want {detail}.",
                               f"{detail}, please.")
        done = any(re.search(self.DONE, s) and not re.search(self.OPEN, s) for s in sentences(text))
        if re.search(rf"\b(?:{self.NO})\b", text) or ("sorry" in text and not done):  # not "Done, sorry for the wait"
            if re.search(rf"\b(?:{self.WHY})\b", text):
                return "close", self.say("A pity. Goodbye.", "All right, goodbye.")
            return "challenge_solution", self.say("Why not?", "Why is that?")
        if done:
            return self.objection(text) or ("close", self.say("Thank you, goodbye.", "Great, thanks!"))
        return self.unclear()


SCRIPTS: dict[str, type[ScriptedUser]] = {"mini:telecom": TelecomUser, "mini:retail": RetailUser}
