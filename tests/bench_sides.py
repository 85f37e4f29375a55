"""What bench.py compares: ours and TRL's GRPOTrainer on equal models and tokens. Each side is a function that prepares
everything and gives back work(), the part to be measured; work() returns how many tokens its rollouts came to.

How TRL is made comparable: the same random Qwen3, tokenizer and template; end ids suppressed and messages cut at the
same length; the user played by a tool, whose answer has as many tokens as our user's; its parser replaced by one that
finds the call in any message and costs nothing. Its training step is compute_loss, backward, clipping and AdamW on a
batch laid out as it lays them out, without the loop around it; activations are recomputed on both sides or on none.
"""

import asyncio
import math
import random
import tempfile
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import faca
from extras.ranks import start_processes
from extras.run import parse_config
from extras.tiny import make_tokenizer
from rollout import Caps, Chat, Dialogue, Rollout, Said, padded
from sampler import Sampler
from simulator import UserTurn
from train import Trainer

ENV = "mini:telecom"
PROMPT, MESSAGE, REPLY = 400, 16, 48  # tokens: of the first prompt, of an agent message, of what leads to the next
GROUP = 8  # rollouts that share a prompt


# --------------------------------------------------------------------------------------------------- what is shared


def qwen3(tokenizer, layers: int, hidden: int) -> Qwen3ForCausalLM:
    """A random one with the tokenizer's vocabulary, in eval mode."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)
    return Qwen3ForCausalLM(config).eval()


def first_prompt(seed: int, digits: int) -> list[dict]:
    """System text of as many tokens, the same for the seeds of a group."""
    text = "".join(random.Random(seed // GROUP).choices("0123456789", k=digits))
    return [{"role": "system", "content": text}, {"role": "user", "content": "1"}]


def random_records(rows: int, longest: int, vocab: int) -> list[Rollout]:
    """Of longest / 2 to `longest` random tokens: a prompt of longest / 4, then a third of them sampled."""
    rng, records = random.Random(0), []
    for row in range(rows):
        record, length = Rollout("random", ENV, row // GROUP, row % GROUP, row), rng.randint(longest // 2, longest)
        record.append(rng.choices(range(vocab), k=longest // 4))
        while len(record.tokens) < length:
            n = min(MESSAGE, length - len(record.tokens))
            record.append(rng.choices(range(vocab), k=n), len(record.strategies), [-math.log(vocab)] * n)
            record.append(rng.choices(range(vocab), k=min(2 * MESSAGE, length - len(record.tokens))))
            record.strategies.append(None)
            record.advantage.append(rng.gauss(0, 1))
        records.append(record)
    return records


# ------------------------------------------------------------------------------------------------------------- ours


class PlainChat(Chat):
    """Takes any message as said to the user: random ids may hold a call, or nothing."""

    def parse(self, ids):
        super().parse(ids)
        return Said("1", [])


class SteadyUser:
    """Answers with as many digits, a token each, and closes after `turns` messages."""

    def __init__(self, turns: int, digits: int):
        self.left, self.text = turns, "1" * digits

    async def open(self):
        return UserTurn("1", "reveal_piece")

    async def reply(self, said):
        self.left -= 1
        return UserTurn(self.text, "reveal_piece") if self.left else UserTurn(self.text, "close", end="stop")


class Steady(Dialogue):
    """rollout.Dialogue with known lengths: PROMPT, then `turns` messages of MESSAGE tokens, REPLY between two."""

    def __init__(self, turns: int, seed: int, sampler, chat: Chat):
        system = first_prompt(seed, PROMPT - len(chat.open(first_prompt(seed, 0), [])))[0]["content"]
        self.task, self.sampler, self.chat, self.endpoint = SimpleNamespace(assertions=()), sampler, chat, None
        self.record, self.users_own, self.steps, self.version = Rollout("steady", ENV, 0, 0, seed), set(), 0, None
        self.env = SimpleNamespace(policy=system, greeting="", tools=[], ended=False, reward=lambda *_: 1.0)
        self.caps = Caps(messages=turns, message_tokens=MESSAGE)
        self.user = SteadyUser(turns, REPLY - len(chat.delta([{"role": "user", "content": ""}], last_id=-1)))


def steady_sampler(model, tokenizer, rows: int, turns: int) -> Sampler:
    """Nothing but its cap ends a message: the ids that would are banned."""
    chat, pages = Chat(tokenizer), -(-(PROMPT + turns * (MESSAGE + REPLY)) // 16) + 1
    return Sampler(model, (), [*chat.banned_ids(model.config.vocab_size), *chat.end_ids], kv_tokens=16 * pages * rows)


def play_steady(sampler, chat: Chat, rows: int, turns: int) -> list[Rollout]:
    """All at once, with nothing cached before."""
    async def everyone():
        return await asyncio.gather(*(Steady(turns, seed, sampler, chat).play() for seed in range(rows)))

    sampler.weights_changed()
    return asyncio.run(everyone())


def our_rollout(size: tuple[int, int], rows: int, turns: int):
    """Through the dialogue loop."""
    tokenizer = make_tokenizer()
    chat, sampler = PlainChat(tokenizer), steady_sampler(qwen3(tokenizer, *size), tokenizer, rows, turns)
    return lambda: sum(len(record.tokens) for record in play_steady(sampler, chat, rows, turns))


def our_trainer(size: tuple[int, int] | None = None, recompute: bool = False) -> Trainer:
    """train.py's own, on one rank: of the tiny model, or of a random one of this size."""
    start_processes()
    with tempfile.TemporaryDirectory() as folder:
        if size:
            tokenizer = make_tokenizer()
            tokenizer.save_pretrained(folder)
            qwen3(tokenizer, *size).save_pretrained(folder)
        trainer = Trainer(parse_config([
            "--model", folder if size else "tiny", "--env", ENV, "--simulator", "scripted", "--out", f"{folder}/run",
            "--max-message-tokens", "48", "--max-context", "1024", "--kv-gib", "0.125",
            "--tokens-per-microbatch", "2048", "--recompute" if recompute else "--no-recompute"]))
    trainer.begin("rl", 0.0, SimpleNamespace(note=None))
    return trainer


def update(trainer: Trainer, records: list[Rollout]) -> None:
    """At learning rate 0, which costs the same and leaves the same rollouts to whoever comes next."""
    def objective(logp_1T, old_logp_1T, advantage_1T, mask_1T, denominator):
        return faca.clipped_loss(logp_1T, old_logp_1T, advantage_1T, mask_1T, 0.2, denominator)

    trainer.update(records, 0.0, objective)


def our_step(size: tuple[int, int], rows: int, longest: int, recompute: bool):
    """Trainer.update on one rank, in micro-batches of 2,048 tokens."""
    trainer = our_trainer(size, recompute)
    records = random_records(rows, longest, trainer.model.config.vocab_size)
    trainer.sampler.sleep()  # else what it gives back in the first step would be counted in our favour
    return lambda: update(trainer, records)


# ------------------------------------------------------------------------------------------------------------ TRL's


class Answers:
    """SteadyUser as an environment of TRL's: its one tool answers with as many digits."""

    digits = 0

    def reset(self, **row) -> None:
        return None

    def get_reward(self) -> float:
        return 1.0

    def say(self) -> str:
        """Say it to the user.

        Returns:
            What the user answers.
        """
        return "1" * Answers.digits


def trl_trainer(size: tuple[int, int], rows: int, turns: int):
    """A GRPOTrainer that samples `rows` completions of `turns` messages a step."""
    import datasets
    import trl.trainer.grpo_trainer as grpo
    datasets.disable_progress_bars()
    tokenizer = make_tokenizer()
    tokenizer.response_template = {}  # it has one, so it is parsed with
    call = {"type": "function", "function": {"name": "say", "arguments": {}}}
    grpo.parse_response = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": [call]}
    with tempfile.TemporaryDirectory() as folder:
        options = grpo.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, beta=0.0,
            gradient_checkpointing=False, per_device_train_batch_size=rows, num_generations=GROUP,
            max_completion_length=8192, max_tool_calling_iterations=turns - 1, temperature=1.0, top_p=1.0, top_k=0,
            generation_kwargs={"max_new_tokens": MESSAGE, "suppress_tokens": sorted(Chat(tokenizer).end_ids)})
        data = datasets.Dataset.from_list([{"prompt": first_prompt(0, 1)}] * rows)
        trainer = grpo.GRPOTrainer(qwen3(tokenizer, *size), args=options, train_dataset=data,
                                   processing_class=tokenizer, environment_factory=Answers)
    trainer.model.train()
    return trainer


def trl_rollout(size: tuple[int, int], rows: int, turns: int):
    """Its batched generate and tool loop, with the advantages and the layout of a batch that come with them."""
    trainer = trl_trainer(size, rows, turns)
    tokenizer = trainer.processing_class
    Answers.digits = REPLY - len(trainer._get_tool_suffix_ids([{"role": "tool", "name": "say", "content": ""}]))
    rest = len(tokenizer.apply_chat_template(first_prompt(0, 0), tools=[Answers().say], add_generation_prompt=True,
                                             return_dict=False))
    inputs = [{"prompt": first_prompt(seed, PROMPT - rest)} for seed in range(rows)]

    def work():
        made = trainer._generate_and_score_completions(inputs)
        return int(made["prompt_mask"].sum() + made["completion_mask"].sum())

    return work


def trl_step(size: tuple[int, int], rows: int, longest: int, recompute: bool, at_once: int):
    """Micro-batches of `at_once` rows, all padded to the longest of the step as TRL pads them."""
    parts = [slice(i, i + at_once) for i in range(0, rows, at_once)]
    trainer = trl_trainer(size, GROUP, 2)
    if recompute:
        trainer.model.activation_checkpointing_enable()
    pad, prompt = trainer.processing_class.pad_token_id, longest // 4
    records = random_records(rows, longest, trainer.model.config.vocab_size)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)  # its default
    tokens, segment = padded([r.tokens for r in records], pad, torch.long), [r.segment for r in records]
    sampled = (padded(segment, -1, torch.long) >= 0).long()
    real = padded([[1] * len(s) for s in segment], 0, torch.long)
    advantage = torch.tensor([r.advantage[0] for r in records])

    def work():
        for part in parts:
            trainer.compute_loss(trainer.model, {
                "prompt_ids": tokens[part, :prompt], "prompt_mask": real[part, :prompt],
                "completion_ids": tokens[part, prompt:], "completion_mask": real[part, prompt:],
                "tool_mask": sampled[part, prompt:], "advantages": advantage[part],
                "num_items_in_batch": sampled.sum()}).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return work
