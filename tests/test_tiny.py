"""The tiny tokenizer, model and expert; scoring, saving and loading, on them and through the real call path."""

import asyncio
import copy
import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from env import load_tasks
from eval import summary
from extras.mini import DOMAINS
from extras.tiny import SPECIAL, TAGS, ExpertSampler, make_tiny
from rollout import Caps, Chat, play_groups, token_tensors
from extras.checkpoint import PolicyError, find_policy, load_policy, note_of, save_policy
from sampler import Sampler, score

torch.set_num_threads(1)
TOKENIZER, MODEL = make_tiny(0)
MODEL.eval()
CHAT = Chat(TOKENIZER)
BANNED = torch.arange(len(TOKENIZER), MODEL.config.vocab_size)
TASKS = [task for domain in DOMAINS for task in load_tasks(f"{domain}/test", "test")[:20]]
EXPERT, _ = play_groups(list(enumerate(TASKS)), 2, (0, 0), ExpertSampler(CHAT), CHAT, Caps(errors=4))


def close(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=1e-4, rtol=0)


@torch.no_grad()
def scored(*records, model=MODEL):
    tokens, segment, _, _ = token_tensors(records, TOKENIZER.pad_token_id)
    return score(model, tokens, segment >= 0, 1.0, BANNED)


@given(st.lists(st.text() | st.sampled_from(SPECIAL + TAGS)).map("".join))
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
def test_any_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_words_of_the_domains_are_single_tokens_digits_too_and_unused_rows_exist():
    texts = [domain.policy for domain in DOMAINS.values()] + [TOKENIZER.decode(r.tokens) for r in EXPERT]
    words = {word for text in texts for word in re.findall(r" ?[A-Za-z_]{2,}", text)}
    assert len(words) > 200 and [word for word in words if len(TOKENIZER.encode(word)) > 1] == []
    assert all(len(TOKENIZER.encode(text)) == n for text, n in (("703", 3), (" 4", 2), ("<think>", 1)))
    assert len(BANNED) >= 64 and not set(BANNED.tolist()) & set(TOKENIZER.get_vocab().values())


def test_the_same_seed_makes_the_same_model_and_another_does_not():
    tokenizer, model, replica = load_policy("tiny", 0, torch.device("cpu"))
    other = make_tiny(1)[1].state_dict()
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    for name, weight in MODEL.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]) and torch.equal(weight, replica.state_dict()[name])
    assert not torch.equal(MODEL.lm_head.weight, other["lm_head.weight"])


def test_the_expert_reads_what_the_agent_reads_and_its_records_mask_as_rollouts_do():
    expert, messages = ExpertSampler(CHAT), 0
    for record in EXPERT:
        for q, run in itertools.groupby(range(len(record.tokens)), record.segment.__getitem__):
            start, *more = run
            if q >= 0:
                sample = asyncio.run(expert.sample(record.tokens[:start], 48, record.seed))
                assert sample.tokens == record.tokens[start:more[-1] + 1] and sample.tokens[-1] == CHAT.turn_end
                messages += 1
    assert messages == sum(m["role"] == "assistant" for r in EXPERT for m in r.messages)
    assert 0.3 < summary(EXPERT)["success"] < 0.8 and "errors/malformed" not in summary(EXPERT)


def sampled(groups, rollouts):
    sampler = Sampler(MODEL, CHAT.end_ids, BANNED.tolist())
    return play_groups(groups, rollouts, (0, 1), sampler, CHAT, Caps(3, 24, 768, 4))[0]


def test_rollouts_of_a_group_differ_and_each_is_the_same_whatever_runs_beside_it():
    together = sampled([(0, TASKS[0]), (1, TASKS[25]), (2, TASKS[0])], 3)
    assert len({tuple(r.tokens) for r in together}) == 9
    assert [r.tokens for r in sampled([(1, TASKS[25])], 2)] == [r.tokens for r in together[3:5]]


def test_scored_logprobs_are_the_sampled_ones_alone_and_padded_in_a_batch():
    records = sampled([(0, TASKS[0]), (1, TASKS[25])], 2)
    assert len({len(r.tokens) for r in records}) > 1 and max(min(r.logprobs) for r in records) < -1
    for row, record in zip(scored(*records)[0], records):
        assert close(row[:len(record.tokens)], record.logprobs) and not row[len(record.tokens):].any()
        assert close(scored(record)[0][0], record.logprobs)


def test_scores_are_known_probabilities_of_the_next_token_without_banned_ones():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
    model = SimpleNamespace(  # a bigram model: after token i, token j has p[i, j]
        model=lambda input_ids, use_cache: SimpleNamespace(last_hidden_state=torch.eye(4)[input_ids]),
        lm_head=lambda hidden: hidden @ p.log())
    tokens, mask = torch.tensor([[0, 1, 2, 2, 0, 1]]), torch.tensor([[0, 1, 1, 0, 0, 1]]).bool()
    logp, entropy = score(model, tokens, mask, 1.0, torch.tensor([], dtype=torch.long))
    assert close(logp.exp(), [[1, 0.2, 0.2, 1, 1, 0.2]]) and not logp[~mask].any()
    rows = -(p * p.log()).sum(1)
    assert close(entropy, 2 * rows[0] + rows[1])
    logp, entropy = score(model, tokens, mask, 1.0, torch.tensor([3]))
    assert close(logp.exp(), [[1, 0.2 / 0.6, 0.2 / 0.9, 1, 1, 0.2 / 0.6]]) and entropy.isfinite()
    logp, _ = score(model, tokens, mask, 0.5, torch.tensor([3]))  # squares
    assert close(logp.exp(), [[1, 4 / 14, 4 / 29, 1, 1, 4 / 14]])


def test_a_zeroed_head_scores_minus_log_of_the_allowed_tokens():
    model, uniform = copy.deepcopy(MODEL), torch.tensor(float(len(TOKENIZER))).log()
    torch.nn.init.zeros_(model.lm_head.weight)
    logp, entropy = scored(*EXPERT[:2], model=model)
    trained = token_tensors(EXPERT[:2], 0)[1] >= 0
    assert close(logp, torch.where(trained, -uniform, 0.0)) and close(entropy / trained.sum(), uniform)


def test_a_tool_result_is_read_but_not_scored():
    record = next(r for r in EXPERT if r.messages[5]["role"] == "tool")
    texts = list(itertools.accumulate(TOKENIZER.convert_ids_to_tokens(record.tokens)))
    at = next(t for t, text in enumerate(texts) if text.endswith("<tool_response>Ċ")) + 3  # inside the result
    first = next(t for t in range(at, len(texts)) if record.segment[t] >= 0)  # the agent's first token after it
    assert texts[first - 1].endswith("</tool_response><|im_end|>Ċ<|im_start|>assistantĊ") and at < first
    changed = dataclasses.replace(record, tokens=[*record.tokens[:at], *TOKENIZER.encode("7"), *record.tokens[at + 1:]])
    before, after = scored(record)[0][0], scored(changed)[0][0]
    assert torch.equal(after[:at], before[:at]) and not after[at:first].any() and not before[at:first].any()
    assert before[first] < 0 and (after[first:] - before[first:])[torch.tensor(record.segment[first:]) >= 0].all()


def test_a_saved_policy_loads_with_the_standard_classes_and_says_the_same(tmp_path):
    path, note = tmp_path / "m", {"preset": "tiny", "trained_on": ["a"], "caps": {}, "temperature": 0.7}
    save_policy(path, MODEL, TOKENIZER, CHAT.end_ids, note)
    save_policy(path, MODEL, TOKENIZER, CHAT.end_ids, note)  # over the one that is there
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    ids, said = torch.tensor([EXPERT[0].tokens]), [{"role": "user", "content": "Hé <think>"}]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, MODEL(ids).logits)
    assert Chat(tokenizer).open(said, []) == CHAT.open(said, []) and Chat(tokenizer).end_ids == CHAT.end_ids
    names = load_file(path / "model.safetensors")
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names  # tied: one key
    made = model.generation_config
    assert (made.do_sample, made.temperature, made.top_p, made.top_k) == (True, 0.7, 1.0, 0)
    assert sorted(made.eos_token_id) == sorted(CHAT.end_ids) and note_of(str(path)) == note
    assert find_policy(str(path)) == str(path) and not (tmp_path / "m.part").exists()


def test_what_names_no_policy_is_one_line(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in (str(tmp_path), str(tmp_path / "broken"), str(tmp_path / "none"), "a/b/c", ""):
        with pytest.raises(PolicyError, match="^no model '") as caught:
            find_policy(name)
        assert "\n" not in str(caught.value)
    assert find_policy("tiny") == "tiny"
