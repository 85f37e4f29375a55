"""The tiny model of the embedded run: a tokenizer built in code, a Qwen3 architecture of 0.5 M weights, and an expert.

    tokenizer, model = make_tiny(seed)
    sampler = ExpertSampler(chat)          # stands in for a model: its dialogues are what SFT learns from

The tokenizer has Qwen3's special tokens, one token for each word of the embedded domains, one for each digit, and bytes
for everything else, so any text survives it. Its chat template is ChatML with Qwen3's tool-call syntax, but lists tools
as signatures, for a schema in JSON costs six times the tokens.

The expert reads what the agent reads and nothing else. It is wrong systematically, not just now and then: for some
signs and rules its wrong answer is its usual one, so that RL has to change what the model does, and can't get by on
making it surer. Its errors are chosen so that SFT on its dialogues succeeds in about 0.4 of the held-out tasks.
"""

import json
import random
import re
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from env import load_tasks
from extras.mini import DOMAINS, Retail, Telecom
from extras.run import tasks_beside
from rollout import Caps, Chat, Rollout, play_groups

EXPERT = -1  # stands for the step in the random streams of the expert's dialogues, as eval.STREAM's does in evaluation
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = r" ?[A-Za-z_]+|[0-9]|\n|[^A-Za-z0-9_\s]+(?: [^A-Za-z0-9_\s]+)*|\s"  # punctuation may hold a space: ": {"

TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- if m.role == 'system' and tools -%}
      {{ '\\nTools, called with <tool_call>\\n{"name": NAME, "arguments": {NAME: TEXT}}\\n</tool_call>' }}
      {%- for tool in tools -%}
        {%- set t = tool.function -%}
        {{ '\\n' + t.name + '(' + t.parameters.required | join(', ') + '): ' + t.description }}
        {%- for name, p in t.parameters.properties.items() if p.enum -%}
          {{ ' ' + name + ': ' + p.enum | join(', ') + '.' }}
        {%- endfor -%}
      {%- endfor -%}
    {%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {{ '\\n' if m.content or not loop.first else '' }}
      {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' -}}
      {{- c.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor -%}
    {{ '<|im_end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def make_tokenizer(words: list[str] = ()) -> PreTrainedTokenizerFast:
    """Special tokens, bytes, and a token for each given word (as the pre-tokenizer cuts it); no merges, no training."""
    vocabulary = [*SPECIAL, *TAGS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary += [w for w in words if w not in set(vocabulary)]
    bpe = models.BPE(vocab={w: i for i, w in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=TEMPLATE, clean_up_tokenization_spaces=False)


def domain_words() -> list[str]:
    """The words of the embedded domains: of their prompts, and of some expert dialogues spelled out in bytes."""
    spelling = make_tokenizer()
    chat = Chat(spelling)
    groups = [(i, task) for domain in DOMAINS.values() for i, task in enumerate(domain.make_tasks()["train"])]
    records, _ = play_groups(groups, 2, (0, 0), ExpertSampler(chat), chat, Caps(errors=99))
    split = spelling.backend_tokenizer.pre_tokenizer
    texts = {spelling.decode(r.tokens, clean_up_tokenization_spaces=False) for r in records}
    return sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text) if len(piece) > 1})


def make_tiny(seed: int) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Tokenizer and randomly initialised model. The embedding has unused rows at its end, as Qwen3's has."""
    tokenizer = make_tokenizer(domain_words())
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64 + 64, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, rope_theta=10000.0,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        start_as_copier(layer.self_attn)
    return tokenizer, model


@torch.no_grad()
def start_as_copier(attention: torch.nn.Module) -> None:
    """W_O = W_V^T with orthogonal W_V, and sharper queries: each head starts by writing what it reads.

    The agent has to copy a number from the user's words into a call. From a plain random start 300 SFT steps don't
    teach that (a prompt of 200 tokens dilutes what a head reads); from here 50 do. It stands in for pretraining.
    """
    torch.nn.init.orthogonal_(attention.v_proj.weight)
    heads = attention.v_proj.weight.view(-1, attention.head_dim, attention.v_proj.in_features)
    heads = heads.repeat_interleave(attention.num_key_value_groups, 0)
    attention.o_proj.weight.copy_(heads.flatten(0, 1).T)
    attention.q_norm.weight.fill_(2.0)


# ------------------------------------------------------------------------------------------------------ the expert


@dataclass(frozen=True)
class ExpertSample:
    tokens: list[int]
    logprobs: list[float]
    stop: str = "end"
    version: int = 0


class ExpertSampler:
    """Answers sample() as a model would, from the ids of the context alone; its logprobs are 0."""

    def __init__(self, chat: Chat):
        self.chat = chat

    async def sample(self, ids: list[int], max_tokens: int, seed: int) -> ExpertSample:
        text = self.chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", text, re.DOTALL)
        expert = next(EXPERTS[name] for name, domain in DOMAINS.items() if turns[0][1].startswith(domain.policy))
        answer = expert(turns[1:-1], random.Random(f"{seed}/{len(ids)}"))
        tokens = self.chat.tokenizer.encode(answer, add_special_tokens=False) + [self.chat.turn_end]
        return ExpertSample(tokens, [0.0] * len(tokens))


def expert_dialogues(trainer, run) -> list[Rollout]:
    """An expert's dialogues on the embedded domains, played by the same loop as rollouts are. [] after a stop."""
    config = trainer.config
    tasks = tasks_beside(load_tasks(config.env, "train"), "sft")
    with run.bar(range(len(tasks) * config.sft_dialogues), "expert") as bar:
        dialogues, _ = play_groups(list(enumerate(tasks)), config.sft_dialogues, (config.seed, EXPERT),
                                   ExpertSampler(trainer.chat), trainer.chat, trainer.actors.caps,
                                   done=lambda record, last: bar.update(last), halt=lambda: run.signalled)
    trainer.trained_on |= {task.identity for task in tasks}
    for record in dialogues:
        record.advantage = [0.0] * len(record.strategies)
    return dialogues


def slip(name: str, rng: random.Random) -> str:
    """The tool's name; now and then one that isn't there, so that the model sees errors and how to go on from them."""
    return name if rng.random() < 0.97 else "look_up"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result_in(text: str) -> dict:
    """The last tool result of a turn; {} if there is none, or it is an error."""
    body = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
    return json.loads(body) if body.startswith("{") else {}


# sign of the status bar -> (how often the expert is right, the fault it mends instead)
SIGNS = {
    "airplane_mode": (0.95, "sim_card"),
    "sim_card": (0.9, "airplane_mode"),
    "mobile_data": (0.4, "apn"),
    "apn": (0.35, "mobile_data"),
    "data_saver": (0.3, "vpn"),
    "vpn": (0.3, "data_saver"),
}
# field of the line -> (how often right, the tool used instead)
FIELDS = {
    "status": (0.95, "refuel_data"),
    "roaming": (0.6, "refuel_data"),
    "data": (0.45, "enable_roaming"),
}
CHECK = "Please check the status bar."


def telecom_expert(turns: list[tuple[str, str]], rng: random.Random) -> str:
    last = turns[-1][1]
    told = [text for role, text in turns if role == "user" and "<tool_response>" not in text]
    number = next((n for text in told for n in re.findall(r"\d{3}", text)), None)
    if "<tool_response>" in last:
        found = result_in(last)
        wrong = [name for name, (_, bad, _) in Telecom.ACCOUNT.items() if found.get(name) == bad]
        if found and not wrong:
            return CHECK
        right, instead = FIELDS[wrong[0]] if wrong else (1.0, "")
        tool = Telecom.ACCOUNT[wrong[0]][2] if wrong else "get_line"
        return call(slip(tool if rng.random() < right else instead, rng), phone=number)
    for fault, (sign, _) in Telecom.FAULTS.items():
        if sign in last:
            right, instead = SIGNS[fault]
            step = Telecom.FAULTS[fault if rng.random() < right else instead][1]
            return f"Please {step}."
    if number is None:
        return "What is your phone number?" if rng.random() < 0.9 else CHECK
    return call(slip("get_line", rng), phone=number) if rng.random() < 0.95 else CHECK


# how often the expert sees that the policy forbids what the customer wants, by the reason; else it does it all the same
REASONS = {"too late": 0.4, "not delivered": 0.7, "already delivered": 0.5}


def retail_expert(turns: list[tuple[str, str]], rng: random.Random) -> str:
    last = turns[-1][1]
    told = [text for role, text in turns if role == "user" and "<tool_response>" not in text]
    opener, answers = told[0].lower(), " ".join(told[1:])
    want = "address" if "address" in opener else "exchange" if "size" in opener or "exchange" in opener else "return"
    order = next(iter(re.findall(r"\d{3}", answers)), None)
    looked_up = next((result_in(text) for _, text in turns if '"status"' in text), None)
    if order is None:
        return "What is the order number?"
    if looked_up is None:
        return call(slip("get_order", rng), order=order)
    found = result_in(last)
    if "done" in found:
        if found["done"].startswith("refused"):
            return f"Sorry, this is {found['done'].partition(': ')[2]}."
        refund = found["done"] == "returned" and rng.random() < 0.7
        return f"Done, the refund is {looked_up['price']}." if refund else "Done."
    state = "pending" if looked_up["status"] == "pending" else "fresh" if looked_up["days"] <= 30 else "old"
    reason = Retail.RULES[want].get(state, "already delivered")
    if reason and "status" in found and rng.random() < REASONS[reason]:
        return call(slip("refuse", rng), order=order, reason=reason)
    if want == "return":
        return call(slip("return_order", rng), order=order)
    if want == "exchange":
        size = next((s for s in Retail.SIZES if s in answers.lower()), None)
        return call(slip("exchange_order", rng), order=order, size=size) if size else "Which size do you want?"
    street = re.search(r"\d [A-Z]\w+ [A-Z]\w+", answers)
    if street:
        return call(slip("change_address", rng), order=order, address=street[0])
    return "What is the new address?"


EXPERTS = {Telecom.domain: telecom_expert, Retail.domain: retail_expert}
