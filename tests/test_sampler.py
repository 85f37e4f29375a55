"""The sampler's promises, on a tiny random Qwen3 and through the real call path."""

import asyncio
import copy
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import sampler as sampler_module
from sampler import PagePool, Sampler, draw, uniform

torch.set_num_threads(1)
V, END, BANNED = 64, 1, (0, 62, 63)


def tiny(std=0.25, seed=0, cls=Qwen3ForCausalLM, config_cls=Qwen3Config, **options):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = config_cls(**sizes, num_key_value_heads=2, head_dim=8, initializer_range=std, **options)
    return cls(config).eval()


MODEL = tiny()


def context(length, seed=0):
    return torch.randint(2, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def fresh_logprobs(model, ids, tokens, temperature=1.0):
    """log p of `tokens` after `ids`, from one unpadded forward with the model's own attention."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens]), use_cache=False).logits[0, len(ids) - 1 : -1].float()
    logits[:, list(BANNED)] = float("-inf")
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_fresh(model, ids, sample, temperature=1.0):
    expected = fresh_logprobs(model, ids, sample.tokens, temperature)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def new(model=MODEL, end_ids=(END,), **options):
    return Sampler(model, end_ids, BANNED, **options)


def run(sampler, requests):
    """requests [(ids, max_tokens, seed)], all at once."""

    async def main():
        return await asyncio.gather(*[sampler.sample(*request) for request in requests])

    return asyncio.run(main())


def assert_idle(sampler):
    pool = sampler._pool
    assert not sampler._running and not sampler._waiting and sampler._task is None
    assert not any(pool.users) and len(pool.free) + len(pool.idle) == len(pool.users)
    assert sorted(pool.free + list(pool.idle)) == list(range(len(pool.users)))
    assert set(pool.digest_of) == set(pool.idle) and {v: k for k, v in pool.page_of.items()} == pool.digest_of


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("page", [4, 16])
def test_logprobs_equal_a_fresh_forward_with_ragged_contexts(page, temperature):
    sampler = new(page=page, temperature=temperature)
    requests = [(context(n, n), 9, n) for n in (1, 2, 15, 16, 17, 33, 40, 64)] + [(context(33, 33), 5, 99)]
    for (ids, _, _), sample in zip(requests, run(sampler, requests)):
        assert_fresh(MODEL, ids, sample, temperature)
    assert_idle(sampler)


def test_logprobs_equal_a_fresh_forward_with_late_arrivals_and_many_turns():
    sampler = new(page=4)

    async def dialogue(k):
        ids = context(20, k % 3)
        for turn in range(4):
            for _ in range(k):
                await asyncio.sleep(0)  # arrives in the middle of the others' decoding
            sample = await sampler.sample(ids, 7, k)
            assert_fresh(MODEL, ids, sample)
            ids = ids + sample.tokens + context(3 + k, 100 * k + turn)

    async def main():
        await asyncio.gather(*[dialogue(k) for k in range(6)])

    asyncio.run(main())
    assert sampler.stats["tokens_reused"] > 400
    assert_idle(sampler)


def test_other_models_of_the_same_attention_interface_work():
    model = tiny(cls=LlamaForCausalLM, config_cls=LlamaConfig)
    requests = [(context(n, n), 6, n) for n in (5, 21)]
    for (ids, _, _), sample in zip(requests, run(new(model), requests)):
        assert_fresh(model, ids, sample)


def test_bfloat16_models_work():
    model = tiny().bfloat16()
    sampler = new(model)
    ids = context(30)
    (sample,) = run(sampler, [(ids, 8, 0)])
    expected = fresh_logprobs(model, ids, sample.tokens)
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=0.1, rtol=0)
    assert sampler._cache[0][0].dtype == torch.bfloat16


def test_unknown_attention_features_are_refused():
    config = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        run(new(tiny(**config)), [(context(5), 2, 0)])


def test_zero_lm_head_gives_the_uniform_logprob_over_allowed_tokens():
    model = tiny()
    torch.nn.init.zeros_(model.lm_head.weight)
    (sample,) = run(new(model, end_ids=()), [(context(5), 20, 7)])
    allowed = [i for i in range(V) if i not in BANNED]
    assert sample.tokens == [allowed[int(uniform(7, position) * len(allowed))] for position in range(5, 25)]
    expected = torch.full((len(sample.tokens),), -torch.log(torch.tensor(V - len(BANNED))).item())
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected)


def heat(value, rows):
    return torch.full((rows,), value, dtype=torch.float64)


def test_draw_matches_hand_computed_cdf():
    """p = .1 .2 .3 .4; u decides by the CDF .1 .3 .6 1. At temperature .5 p is squared: 1 4 9 16 over 30."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.11, 0.31, 0.59, 1 - 2**-53], dtype=torch.float64)
    none = torch.zeros(4, dtype=torch.bool)
    tokens, logprobs = draw(logits, u, none, heat(1.0, 5))
    assert tokens.tolist() == [0, 1, 2, 2, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.2, 0.3, 0.3, 0.4]))
    tokens, logprobs = draw(logits, u, none, heat(0.5, 5))  # CDF .033 .167 .467 1
    assert tokens.tolist() == [0, 1, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([1, 4, 9, 16, 16]) / 30)
    tokens, logprobs = draw(logits, u, torch.tensor([False, False, False, True]), heat(0.0, 5))
    assert tokens.tolist() == [2] * 5
    torch.testing.assert_close(logprobs.exp(), torch.full((5,), 0.5))
    mixed = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)  # each row has its own
    tokens, logprobs = draw(logits, u, none, mixed)
    assert tokens.tolist() == [0, 1, 3, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 4 / 30, 0.4, 16 / 30, 0.4]))


def test_the_ends_of_the_cdf_never_give_a_banned_or_impossible_token():
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(500, V, generator=generator)
    logits[:, 30] = float("-inf")
    logits[:, 60] = -1e5  # its probability underflows to 0
    banned = torch.zeros(V, dtype=torch.bool)
    banned[list(BANNED)] = True  # the first id and the last ones
    zero = torch.zeros(500, dtype=torch.float64)
    rising = torch.arange(V).expand(500, V) / V
    assert draw(rising, zero, banned, heat(1.0, 500))[0].unique().tolist() == [1]  # the first id that has mass
    for value in (0.0, 1 - 2**-53, 1.0):  # even a u that should not occur
        tokens, logprobs = draw(logits, heat(value, 500), banned, heat(1.0, 500))
        assert not set(tokens.tolist()) & {*BANNED, 30, 60} and logprobs.isfinite().all()


def test_each_request_may_have_its_own_temperature_and_changes_no_other():
    requests = [(context(9, k), 6, k) for k in range(4)]
    alone = {t: run(new(temperature=t), requests) for t in (0.0, 0.5, 1.0)}
    temperatures = [None, 0.5, 0.0, None]
    together = run(new(temperature=1.0), [(*r, t) for r, t in zip(requests, temperatures, strict=True)])
    for k, t in enumerate(temperatures):
        assert together[k].tokens == alone[1.0 if t is None else t][k].tokens
        assert_fresh(MODEL, requests[k][0], together[k], t or 1.0)


def test_uniform_is_uniform_and_depends_on_seed_and_position():
    u = torch.tensor([uniform(seed, position) for seed in range(50) for position in range(50)])
    assert u.unique().numel() == 2500 and 0 <= u.min() and u.max() < 1
    assert (u.histc(10, 0, 1) - 250).abs().max() < 70


def test_tokens_are_the_same_alone_in_a_crowd_and_in_another_order():
    requests = [(context(10 + n, n % 4), 12, n) for n in range(16)]
    alone = [run(new(), [request])[0] for request in requests]
    crowd = run(new(), requests)
    backwards = run(new(max_batch=3, page=4), requests[::-1])[::-1]
    assert [s.tokens for s in alone] == [s.tokens for s in crowd] == [s.tokens for s in backwards]
    assert len({tuple(s.tokens) for s in alone}) == 16


def test_the_random_stream_goes_on_over_a_split_sample():
    """Position decides, so 4 + 4 tokens in two calls are the 8 tokens of one call."""
    sampler, ids = new(end_ids=()), context(13)
    (whole,) = run(sampler, [(ids, 8, 5)])
    (first,) = run(sampler, [(ids, 4, 5)])
    (second,) = run(sampler, [(ids + first.tokens, 4, 5)])
    assert first.tokens + second.tokens == whole.tokens


def test_frequencies_match_probabilities():
    ids, N = context(12), 3000
    sampler = new(tiny(std=0.15))
    samples = run(sampler, [(ids, 1, seed) for seed in range(N)])
    with torch.no_grad():
        logits = sampler.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    logits[list(BANNED)] = float("-inf")
    p = torch.softmax(logits, -1)
    counts = torch.bincount(torch.tensor([s.tokens[0] for s in samples]), minlength=V)
    keep = p * N >= 5
    chi2 = ((counts - p * N) ** 2 / (p * N))[keep].sum().item()
    dof = keep.sum().item() - 1
    assert dof > 5 and chi2 < dof + 5 * (2 * dof) ** 0.5
    assert counts[list(BANNED)].sum() == 0


def test_temperature_0_is_greedy_with_the_logprob_of_temperature_1():
    ids = context(9)
    (a,), (b,) = run(new(temperature=0), [(ids, 6, 1)]), run(new(temperature=0), [(ids, 6, 2)])
    assert a.tokens == b.tokens
    assert_fresh(MODEL, ids, a)
    assert all(lp > -torch.log(torch.tensor(V)) for lp in a.logprobs)


def test_samples_end_at_an_end_id_or_at_max_tokens():
    samples = run(new(end_ids=range(1, 20)), [(context(5), 6, seed) for seed in range(60)])
    assert {s.stop for s in samples} == {"end", "length"}
    for s in samples:
        assert len(s.tokens) == len(s.logprobs) <= 6
        assert not any(t < 20 for t in s.tokens[:-1])
        assert (s.tokens[-1] < 20) == (s.stop == "end")
        assert s.stop == "end" or len(s.tokens) == 6


def test_a_second_turn_feeds_only_what_is_new_and_at_most_a_page():
    sampler, ids = new(end_ids=(), page=8), context(100)
    (first,) = run(sampler, [(ids, 10, 0)])
    before = sampler.stats["tokens_fed"]
    assert before == 100 + 9
    delta = context(6, 9)
    ids = ids + first.tokens + delta
    (second,) = run(sampler, [(ids, 5, 0)])
    fed_context = sampler.stats["tokens_fed"] - before - 4
    assert len(delta) < fed_context <= len(delta) + 8
    assert sampler.stats["tokens_reused"] + fed_context == len(ids)
    assert_fresh(MODEL, ids, second)


@pytest.mark.parametrize("length", [100, 96])
def test_rollouts_of_one_prompt_feed_it_once(length):
    sampler, ids = new(page=8), context(length)
    samples = run(sampler, [(ids, 1, k) for k in range(8)])
    tail = length - (length - 1) // 8 * 8
    assert sampler.stats == dict(
        forwards=1, tokens_fed=length + 7 * tail, tokens_sampled=8, tokens_reused=7 * (length - tail)
    )
    for sample in samples:
        assert_fresh(MODEL, ids, sample)


def test_no_cached_state_survives_new_weights():
    model = tiny()
    sampler, ids = new(model), context(50)
    (old,) = run(sampler, [(ids, 8, 0)])
    other = tiny(seed=1)
    with torch.no_grad():  # in place, as a trainer would
        for p, q in zip(model.parameters(), other.parameters()):
            p.copy_(q)
    sampler.weights_changed()
    (sample,) = run(sampler, [(ids, 8, 0)])
    assert (old.version, sample.version) == (0, 1) and sampler.stats["tokens_reused"] == 0
    assert_fresh(other, ids, sample)


def test_the_model_still_trains_and_scores_with_its_own_attention():
    model = tiny()
    ids = torch.tensor([context(12)])
    expected = copy.deepcopy(model)(ids).logits
    sampler = new(model)
    run(sampler, [(context(30), 5, 0)])
    assert model.config._attn_implementation == "sdpa"
    logits = model(ids).logits
    torch.testing.assert_close(logits, expected)
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.optim.SGD(model.parameters(), 1e-3).step()


def test_weights_must_not_change_under_requests():
    sampler = new(end_ids=())

    async def main():
        task = asyncio.create_task(sampler.sample(context(5), 10, 0))
        for _ in range(3):
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="in flight"):
                sampler.weights_changed()
        await task
        sampler.weights_changed()

    asyncio.run(main())
    assert sampler.version == 1


def test_a_page_is_found_only_behind_the_same_prefix():
    sampler, same = new(page=4), context(8)
    requests = [(context(4, 1) + same, 3, 0), (context(4, 2) + same, 3, 0), (same + [5], 3, 0)]
    for (ids, _, _), sample in zip(requests, run(sampler, requests)):
        assert_fresh(MODEL, ids, sample)
    assert sampler.stats["tokens_reused"] == 0


def test_the_pool_evicts_the_deepest_page_first_and_never_promises_a_page_twice():
    pool, names = PagePool(4), [b"a", b"b", b"c"]
    pages, found = pool.reserve([], 3)
    assert found == 0
    pool.name(pages, names)
    pool.release(pages)
    assert pool.reserve(names, 5) is None  # 3 found + 1 free; those found cannot be evicted for the fifth
    assert not any(pool.users) and len(pool.idle) == 3
    (fourth, evicted), _ = pool.reserve([], 2)
    assert fourth not in pages and evicted == pages[2] and set(pool.page_of) == {b"a", b"b"}


def test_eviction_keeps_results_right_and_takes_the_least_recently_used():
    sampler = new(kv_tokens=64, page=4, end_ids=())
    for turn in range(30):
        ids = context(40, turn % 3)
        (sample,) = run(sampler, [(ids, 8, turn)])
        assert_fresh(MODEL, ids, sample)
        assert_idle(sampler)
    run(sampler, [(context(20, 50), 1, 0), (context(20, 51), 1, 0)])
    before = sampler.stats["tokens_reused"]
    run(sampler, [(context(20, 50), 1, 0)])  # now 51 is the older
    assert sampler.stats["tokens_reused"] - before == 16
    run(sampler, [(context(28, 52), 4, 0)])
    before = sampler.stats["tokens_reused"]
    run(sampler, [(context(20, 50), 1, 0)])
    assert sampler.stats["tokens_reused"] - before == 16


def test_a_request_that_can_never_fit_or_makes_no_sense_is_one_value_error():
    sampler = new(kv_tokens=64)
    (sample,) = run(sampler, [(context(60), 4, 0)])
    assert len(sample.tokens) <= 4
    for ids, max_tokens in ((context(60), 5), ([], 4), ([3], 0), ([3, V], 4), ([-1], 4)):
        with pytest.raises(ValueError) as error:
            run(sampler, [(ids, max_tokens, 0)])
        assert "\n" not in str(error.value)
    assert_idle(sampler)


def test_more_requests_than_fit_all_finish_in_arrival_order():
    sampler = new(kv_tokens=64, page=4, end_ids=())
    finished = []

    async def caller(k):
        sample = await sampler.sample(context(20, k), 5, k)
        finished.append(k)
        return sample

    async def main():
        return await asyncio.gather(*[caller(k) for k in range(12)])

    for k, sample in enumerate(asyncio.run(main())):
        assert_fresh(MODEL, context(20, k), sample)
    assert finished == list(range(12))
    assert_idle(sampler)


def test_max_batch_and_admission_bound_a_step(monkeypatch):
    monkeypatch.setattr(sampler_module, "ADMIT_TOKENS", 50)
    sampler, sizes = new(max_batch=5, end_ids=()), []
    forward = sampler._forward
    sampler._forward = lambda rows: sizes.append((len(rows), sum(row.new for row in rows))) or forward(rows)
    run(sampler, [(context(20, k), 6, k) for k in range(9)])
    assert max(rows for rows, _ in sizes) == 5 and max(tokens for _, tokens in sizes) < 50 + 20
    assert sizes[0] == (3, 60)


def test_a_finished_row_leaves_at_once_and_its_next_turn_joins_the_running_batch():
    sampler, sizes = new(end_ids=()), []
    forward = sampler._forward
    sampler._forward = lambda rows: sizes.append(len(rows)) or forward(rows)

    async def short():
        first = await sampler.sample(context(5), 3, 0)
        await asyncio.sleep(0)  # a tool
        await sampler.sample(context(5) + first.tokens + [7], 3, 0)

    async def main():
        await asyncio.gather(sampler.sample(context(8), 12, 1), short())

    asyncio.run(main())
    assert sum(sizes) == 18 and len(sizes) == 12 and sizes[:3] == [2, 2, 2] and sizes[3] == 1


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_cancelled_caller_frees_its_pages_and_disturbs_nobody(steps):
    sampler = new(kv_tokens=128, page=4, end_ids=())

    async def main():
        tasks = [asyncio.create_task(sampler.sample(context(20, k), 20, k)) for k in range(5)]  # 3 run, 2 wait
        for _ in range(steps):
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[4].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if steps:  # at once, not when it would have ended
            assert len(sampler._running) == 3 and len(sampler._waiting) == 0  # 3 took the place of 0
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results[0], asyncio.CancelledError) and isinstance(results[4], asyncio.CancelledError)
    for k in (1, 2, 3):
        assert_fresh(MODEL, context(20, k), results[k])
    assert_idle(sampler)


def test_an_exception_in_a_forward_reaches_every_caller_and_the_sampler_recovers():
    model = tiny()
    sampler = new(model, max_batch=2, end_ids=())
    fail = lambda *_: 1 / 0 if sampler.stats["forwards"] == 2 else None  # noqa: E731
    handle = model.model.layers[1].register_forward_pre_hook(fail)

    async def main():
        requests = [sampler.sample(context(30, k), 5, k) for k in range(4)]
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)

    assert all(isinstance(error, ZeroDivisionError) for error in asyncio.run(main()))
    assert model.config._attn_implementation == "sdpa"
    assert_idle(sampler)
    handle.remove()
    ids = context(30, 0)
    (sample,) = run(sampler, [(ids, 5, 0)])
    assert sampler.stats["tokens_reused"] == 0
    assert_fresh(model, ids, sample)


def test_weights_that_are_not_finite_are_an_error_and_poison_nothing():
    model = tiny()
    sampler, weight = new(model, kv_tokens=64), model.model.layers[0].self_attn.v_proj.weight
    saved = weight.detach().clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        run(sampler, [(context(50), 5, 0)])
    weight.data.copy_(saved)
    sampler.weights_changed()
    requests = [(context(3), 2, 0), (context(29), 2, 0)]
    for (ids, _, _), sample in zip(requests, run(sampler, requests)):
        assert_fresh(model, ids, sample)


def test_one_sampler_lives_through_several_event_loops_even_abandoned_ones():
    sampler = new(end_ids=())

    async def abandon(steps):
        asyncio.create_task(sampler.sample(context(5), 50, 0))
        for _ in range(steps):
            await asyncio.sleep(0)

    for k in range(5):
        asyncio.run(abandon(steps=k))
        (sample,) = run(sampler, [(context(17, k), 4, k)])
        assert_fresh(MODEL, context(17, k), sample)
        assert_idle(sampler)


def test_a_caller_does_not_hang_when_the_samplers_own_task_is_cancelled():
    sampler = new(end_ids=())

    async def main():
        task = asyncio.create_task(sampler.sample(context(5), 50, 0))
        for _ in range(3):
            await asyncio.sleep(0)
        sampler._task.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())
    assert_idle(sampler)


REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 26), st.integers(1, 8), st.integers(0, 5), st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(REQUEST, min_size=1, max_size=7), st.integers(9, 24), st.sampled_from([1, 2, 8]))
def test_any_interleaving_of_prefix_sharing_requests_equals_a_fresh_forward(requests, pages, max_batch):
    """(which prompt, how much of it, max_tokens, when it arrives, whether it is cancelled) with very few pages."""
    sampler = new(kv_tokens=4 * pages, page=4, max_batch=max_batch, end_ids=range(1, 8))

    async def caller(prompt, length, max_tokens, arrival, cancelled):
        ids = context(26, prompt)[:length]
        for _ in range(arrival):
            await asyncio.sleep(0)
        for turn in range(2):
            if len(ids) + max_tokens > 4 * pages:
                return
            task = asyncio.create_task(sampler.sample(ids, max_tokens, prompt))
            if cancelled:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                return
            sample = await task
            assert_fresh(MODEL, ids, sample)
            ids = ids + sample.tokens + [turn + 9]

    async def main():
        await asyncio.wait_for(asyncio.gather(*[caller(*request) for request in requests]), 20)
        while sampler._task:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert_idle(sampler)
