"""The judge of tau3: whether statements in words are true of a dialogue, as the model at the user's endpoint sees it.

Prompt and JSON are ours; tau3's own judge is another model with another prompt.
"""

from extras.endpoint import Endpoint
from simulator import UserFault, json_object

JUDGE_PROMPT = """\
You check a finished conversation between a service agent and a customer against a list of statements. Decide for each,
by itself, whether the conversation shows it to be true. Judge what the agent did and said, not what it may have meant.
Answer with one json object and nothing else, a verdict for each statement, in their order, for example:
{"verdicts": [{"reason": "the agent named the refund", "true": true}]}
"""


async def judged(assertions: tuple[str, ...], messages: list[dict], endpoint: Endpoint) -> bool:
    """Whether a judge finds all assertions true of the transcript. Raises UserFault where it gives no verdict."""
    text = "\n".join(f"{m['role']}: {m['content']}" for m in messages if m["role"] != "system")
    text += "\n\nStatements:\n" + "\n".join(f"{i}. {a}" for i, a in enumerate(assertions, 1))
    for _ in range(2):
        message = await endpoint.chat([{"role": "system", "content": JUDGE_PROMPT}, {"role": "user", "content": text}],
                                      endpoint.judge)
        found = (json_object(message.content or "") or {}).get("verdicts")
        verdicts = [v.get("true") if isinstance(v, dict) else None for v in found] if isinstance(found, list) else []
        if len(verdicts) == len(assertions) and all(isinstance(v, bool) for v in verdicts):
            return all(verdicts)
    raise UserFault(f"the judge {endpoint.judge} gave no verdict on {len(assertions)} statements, asked twice")
