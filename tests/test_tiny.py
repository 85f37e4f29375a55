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
from extras.tiny import SPECIAL, TAGS, TEMPLATE, ExpertSampler, make_tiny, make_tokenizer
from rollout import Caps, Chat, packed, play_groups
from extras.checkpoint import PolicyError, find_policy, load_policy, load_tokenizer, note_of, save_policy
import sampler as sampler_module
from sampler import PACKED, Sampler, score

torch.set_num_threads(1)
TOKENIZER, MODEL = make_tiny(0)
MODEL.eval()
MODEL.config._attn_implementation = PACKED
CHAT = Chat(TOKENIZER)
BANNED = torch.arange(len(TOKENIZER), MODEL.config.vocab_size)
TASKS = [task for domain in DOMAINS for task in load_tasks(f"{domain}/test", "test")[:20]]
EXPERT, _ = play_groups(list(enumerate(TASKS)), 2, (0, 0), ExpertSampler(CHAT), CHAT, Caps(errors=4))


def close(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=1e-4, rtol=0)


@torch.no_grad()
def scored(*records, model=MODEL):
    """Log-probs of each record, scored in one packed row; the row's entropy."""
    tokens, segment, _, _, lengths = packed(list(records), TOKENIZER.pad_token_id)
    logp, entropy = score(model, tokens, lengths, segment >= 0, 1.0, BANNED)
    return logp[0].split(lengths), entropy


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
    tokenizer, model = load_policy("tiny", 0, torch.device("cpu"), torch.float32)
    other = make_tiny(1)[1].state_dict()
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    for name, weight in MODEL.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
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


def test_scored_logprobs_are_the_sampled_ones_alone_and_packed_in_a_row():
    records = sampled([(0, TASKS[0]), (1, TASKS[25])], 2)
    assert len({len(r.tokens) for r in records}) > 1 and max(min(r.logprobs) for r in records) < -1
    for row, record in zip(scored(*records)[0], records, strict=True):
        assert close(row, record.logprobs) and close(scored(record)[0][0], record.logprobs)


def test_packed_sequences_do_not_see_each_other():
    """Other tokens in one of them change no bit of the others, before or behind it."""
    first, second, third = sampled([(0, TASKS[0]), (1, TASKS[25])], 2)[:3]
    other = dataclasses.replace(second, tokens=[(t + 7) % 90 for t in second.tokens])
    before, after = scored(first, second, third)[0], scored(first, other, third)[0]
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scoring_in_chunks_gives_the_same_and_never_holds_more_logits_than_told(monkeypatch, temperature):
    tokens, segment, _, _, lengths = packed(EXPERT[:4], 0)
    trained, seen, results = int((segment >= 0).sum()), [], []
    hook = MODEL.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[:-1].numel()))
    for rows in (10**6, 7):
        monkeypatch.setattr(sampler_module, "HEAD_LOGITS", rows * MODEL.lm_head.out_features)
        MODEL.zero_grad()
        logp, entropy = score(MODEL, tokens, lengths, segment >= 0, temperature, BANNED)
        (logp * torch.arange(len(logp[0]))).sum().backward()
        results.append((logp.detach(), entropy, [p.grad.clone() for p in MODEL.parameters()]))
    hook.remove()
    MODEL.zero_grad()
    (logp, entropy, grads), (logp_7, entropy_7, grads_7) = results
    assert close(logp, logp_7) and entropy_7 == pytest.approx(entropy.item(), rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * a.abs().max()) for a, b in zip(grads, grads_7, strict=True))
    assert seen[0] == trained and max(seen[1:]) == 7  # each chunk twice: recomputed in backward
    assert sum(seen[1:]) == 2 * trained


def test_a_first_token_has_no_context_and_is_refused():
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, True, True, False]])
    with pytest.raises(ValueError, match="first token"):
        score(MODEL, tokens, [2, 2], mask, 1.0, BANNED)


def test_scores_are_known_probabilities_of_the_next_token_without_banned_ones():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
    model = SimpleNamespace(  # a bigram model: after token i, token j has p[i, j]
        model=lambda input_ids, **_: SimpleNamespace(last_hidden_state=torch.eye(4)[input_ids]),
        lm_head=torch.nn.Linear(4, 4, bias=False))
    model.lm_head.weight.data = p.log().T
    tokens, mask = torch.tensor([[0, 1, 2, 2, 0, 1]]), torch.tensor([[0, 1, 1, 0, 0, 1]]).bool()  # 0 1 2 2 | 0 1
    logp, entropy = score(model, tokens, [4, 2], mask, 1.0, torch.tensor([], dtype=torch.long))
    assert close(logp.exp(), [[1, 0.2, 0.2, 1, 1, 0.2]]) and not logp[~mask].any()
    rows = -(p * p.log()).sum(1)
    assert close(entropy, 2 * rows[0] + rows[1])
    logp, entropy = score(model, tokens, [4, 2], mask, 1.0, torch.tensor([3]))
    assert close(logp.exp(), [[1, 0.2 / 0.6, 0.2 / 0.9, 1, 1, 0.2 / 0.6]]) and entropy.isfinite()
    logp, _ = score(model, tokens, [4, 2], mask, 0.5, torch.tensor([3]))  # squares
    assert close(logp.exp(), [[1, 4 / 14, 4 / 29, 1, 1, 4 / 14]])


def test_a_zeroed_head_scores_minus_log_of_the_allowed_tokens():
    model, uniform = copy.deepcopy(MODEL), torch.tensor(float(len(TOKENIZER))).log()
    torch.nn.init.zeros_(model.lm_head.weight)
    logp, entropy = scored(*EXPERT[:2], model=model)
    trained = torch.tensor([s >= 0 for r in EXPERT[:2] for s in r.segment])
    assert close(torch.cat(logp), torch.where(trained, -uniform, 0.0)) and close(entropy / trained.sum(), uniform)


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
    plain = copy.deepcopy(MODEL)
    plain.config._attn_implementation = "sdpa"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert Chat(tokenizer).open(said, []) == CHAT.open(said, []) and Chat(tokenizer).end_ids == CHAT.end_ids
    names = load_file(path / "model.safetensors")
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names  # tied: one key
    made = model.generation_config
    assert (made.do_sample, made.temperature, made.top_p, made.top_k) == (True, 0.7, 1.0, 0)
    assert sorted(made.eos_token_id) == sorted(CHAT.end_ids) and note_of(str(path)) == note
    assert find_policy(str(path)) == str(path) and not (tmp_path / "m.part").exists()


EMPTY = "<think>\\n\\n</think>\\n\\n"


def thinks(where):
    """The tiny template, but with an empty think block in the generation prompt and in agent messages at `where`."""
    block = f"('{EMPTY}' if m.role == 'assistant' and {where} else '')"
    return TEMPLATE.replace("m.role + '\\n' +", f"m.role + '\\n' + {block} +").replace(
        "assistant\\n' }}", f"assistant\\n{EMPTY}' }}}}")


@pytest.mark.parametrize("template, told", [
    (TEMPLATE, ""), (thinks("true"), ""),
    (thinks("loop.index0 > ns.last_query_index"), ""),  # which becomes the one before
    (thinks("loop.last"), "renders a dialogue otherwise"), (thinks("false"), "renders a dialogue otherwise"),
    (None, "ValueError"), ("{{ raise_exception('no\ntools') }}", "TemplateError: no"), ("{{", "TemplateSyntaxError")])
def test_a_template_that_renders_histories_otherwise_than_training_is_told_and_one_that_fails_refused(
        template, told, tmp_path, capsys, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    if "Error" in told:
        with pytest.raises(PolicyError, match=f"can't be used: {told}") as caught:
            load_tokenizer(str(tmp_path))
        assert "\n" not in str(caught.value)
        return
    kept = load_tokenizer(str(tmp_path)).chat_template
    out, error = capsys.readouterr()
    assert kept == template.replace("loop.index0 > ns.last_query_index", "true")
    assert not out and told in error and error.count("\n") == bool(told)
    monkeypatch.setenv("RANK", "1")  # one rank says it
    load_tokenizer(str(tmp_path))
    assert not capsys.readouterr().err


def test_what_names_no_policy_is_one_line(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in (str(tmp_path), str(tmp_path / "broken"), str(tmp_path / "none"), "a/b/c", ""):
        with pytest.raises(PolicyError, match="^no model '") as caught:
            find_policy(name)
        assert "\n" not in str(caught.value)
    assert find_policy("tiny") == "tiny"


def test_a_run_folder_is_no_model_and_the_line_names_the_one_inside(tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=f"'{tmp_path / 'sft'}' does$"):
        find_policy(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=f"'{tmp_path / 'model'}' does$"):
        find_policy(str(tmp_path))
