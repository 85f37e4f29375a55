"""The sampler's CUDA path without CUDA: its own code, with a reference in the kernel's place; sleeping and waking."""

import asyncio

import gpu_check
import numpy as np
import pytest
import torch
from gpu_check import varlen_reference
from test_sampler import BANNED, MODEL, assert_fresh, assert_idle, context, new, run, tiny
from transformers import Qwen3Config

import extras.pages
from extras.pages import bucket
from sampler import Request, Sampler, kv_bytes_per_token


@pytest.fixture
def kernel_calls(monkeypatch):
    """varlen_reference for torch's kernel; the list of its calls' arguments."""
    calls = []

    def varlen(*args, **options):
        calls.append((args, options))
        return varlen_reference(*args, **options)

    monkeypatch.setattr(extras.pages, "varlen_attn", varlen)
    return calls


def metadata(call):
    """starts, lengths, most, table of a kernel call."""
    args, options = call
    return args[3].tolist(), options["seqused_k"].tolist(), args[5], options["block_table"].tolist()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page", [4, 16])
def test_kernel_path_logprobs_equal_a_fresh_forward(kernel_calls, page, graphs):
    sampler = new(page=page, kernel=True, graphs=graphs)
    requests = [(context(n, n), 9, n) for n in (1, 2, 15, 16, 17, 33, 40, 64)] + [(context(33, 33), 5, 99)]
    for (ids, _, _), sample in zip(requests, run(sampler, requests)):
        assert_fresh(MODEL, ids, sample)
    assert len(kernel_calls) == 2 * sampler.stats["forwards"]  # once a layer
    assert_idle(sampler)


def test_kernel_path_logprobs_equal_a_fresh_forward_with_late_arrivals_turns_and_eviction(kernel_calls):
    sampler = new(page=4, kernel=True, kv_tokens=160)

    async def dialogue(k):
        ids = context(20, k % 3)
        for turn in range(3):
            for _ in range(k):
                await asyncio.sleep(0)
            sample = await sampler.sample(ids, 7, k)
            assert_fresh(MODEL, ids, sample)
            ids = ids + sample.tokens + context(3 + k, 100 * k + turn)

    async def main():
        await asyncio.gather(*[dialogue(k) for k in range(5)])

    asyncio.run(main())
    assert sampler.stats["tokens_reused"] > 100
    assert_idle(sampler)


def test_kernel_and_padding_change_no_token(kernel_calls):
    requests = [(context(10 + 3 * n, n % 4), 4 + n, n) for n in range(11)]
    plain = run(new(), requests)
    for options in (dict(graphs=True), dict(graphs=False)):
        samples = run(new(kernel=True, page=8, **options), requests)
        assert [s.tokens for s in samples] == [s.tokens for s in plain]
        for a, b in zip(samples, plain):
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)


def test_kernel_is_told_where_rows_start_how_long_they_are_and_which_pages_they_own(kernel_calls):
    """Contexts of 5 and 9 tokens in pages of 4, 2 new tokens each: 2 and 3 pages, from the pool's end: 7 first."""
    run(new(page=4, kernel=True, kv_tokens=32, end_ids=()), [(context(5), 2, 0), (context(9, 1), 2, 1)])
    prefill, decode = kernel_calls[0], kernel_calls[2]
    assert metadata(prefill) == ([0, 5, 14], [5, 9], 9, [[7, 6, 8], [5, 4, 3]])  # 8: the scratch page, never read
    assert prefill[1]["window_size"] == (-1, 0) and decode[1]["window_size"] == (-1, -1)
    starts, lengths, most, table = metadata(decode)
    assert (starts, lengths, most) == ([0, 1, 2], [6, 10], 1)
    assert [row[:3] for row in table] == [[7, 6, 8], [5, 4, 3]] and all(len(row) == 8 for row in table)


def test_rows_that_pad_a_decode_step_own_the_scratch_page_alone(kernel_calls):
    sampler = new(page=4, kernel=True, kv_tokens=64, end_ids=())
    run(sampler, [(context(6, k), 3, k) for k in range(3)])
    starts, lengths, most, table = metadata(kernel_calls[-1])
    assert starts == [0, 1, 2, 3, 4] and lengths == [8, 8, 8, 1] and most == 1
    assert table[3] == [16] * 16 and all(16 not in row[:2] for row in table[:3])


def test_decode_steps_are_padded_to_buckets_and_others_are_not(kernel_calls):
    assert [bucket(n) for n in (1, 2, 3, 5, 8, 9, 12, 13, 16, 17, 24, 25, 33, 49)] == [
        1, 2, 4, 8, 8, 12, 12, 16, 16, 24, 24, 32, 48, 64]
    assert all(bucket(n) >= n for n in range(1, 300))
    run(new(page=8, kernel=True, end_ids=()), [(context(9, k), 1 + k, k) for k in range(9)])
    rows = [len(args[0]) for args, _ in kernel_calls[::2]]  # tokens; in a decode step of 8, 7, 6, ... rows
    assert rows == [81, 8, 8, 8, 8, 4, 4, 2, 1]


class Cuda(str):  # the CPU's name, for tensors; the sampler asks for the type
    type = "cuda"


class Graph:
    """torch.cuda's CUDAGraph and graph in one, on a CPU: what was computed under it is computed again by replay()."""

    live = None  # the graph that captures now

    def __call__(self, graph, pool=None, stream=None, capture_error_mode="global"):
        graph.shared = pool
        Graph.live = graph
        return self

    def __enter__(self):
        pass

    def __exit__(self, *_):
        Graph.live = None

    def pool(self):
        return "pool"

    def replay(self):
        self.output.copy_(self.compute())


def test_every_bucket_is_captured_once_replayed_on_new_inputs_and_dropped_with_the_weights(kernel_calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    sampler = new(tiny(), kernel=True, page=8, end_ids=())
    sampler.device, compute = Cuda("cpu"), sampler._compute

    def recorded(*args):
        output = compute(*args)
        if Graph.live:
            Graph.live.compute, Graph.live.output = lambda: compute(*args), output
        return output

    sampler._compute = recorded
    requests = [(context(9 + k, k), 3 + k, k) for k in range(4)]
    samples = run(sampler, requests)
    assert [s.tokens for s in samples] == [s.tokens for s in run(new(tiny(), end_ids=()), requests)]
    for (ids, _, _), sample in zip(requests, samples):
        assert_fresh(sampler.model, ids, sample)
    assert set(sampler._graphs) == {1, 2, 4}
    assert [graph.shared for _, graph, _ in sampler._graphs.values()] == [None, "pool", "pool"]
    forwards, graphs = sampler.stats["forwards"], dict(sampler._graphs)
    sampler.weights_changed()  # in place: the addresses stay
    run(sampler, requests)
    assert sampler._graphs == graphs and sampler.stats["forwards"] == 2 * forwards
    sampler.wake(tiny(seed=1).parameters())
    assert not sampler._graphs


def test_a_decode_step_reads_nothing_back_and_mixes_no_devices():
    """On the meta device, that has no data: whatever would wait for the device, or meet a CPU tensor, raises."""
    with torch.device("meta"):
        model = tiny().bfloat16()
    sampler = Sampler(model, (1,), BANNED, kv_tokens=1024, kernel=True)  # torch's kernel itself, shapes only
    rows = [Request(context(5 + k), 4, k, 1.0, None, pages=[k], table=np.array([k]), cached=4 + k) for k in range(3)]
    with torch.no_grad():
        output = sampler._compute(sampler._pack(rows, 4, 4).to("meta"), 4, 4, 1)
        assert (output.shape, output.dtype, output.device.type) == ((2, 4), torch.float64, "meta")
        with pytest.raises(RuntimeError):
            sampler._compute(sampler._pack(rows, 4, 4), 4, 4, 1)
        with pytest.raises((RuntimeError, NotImplementedError)):
            output.cpu()
    assert sampler.page == 256 and len(sampler._cache[0][0]) == 1024 // 256 + 1


def test_kv_bytes_per_token_of_qwen3_8b_and_of_a_real_cache():
    config = Qwen3Config(num_hidden_layers=36, num_key_value_heads=8, head_dim=128)
    assert kv_bytes_per_token(config, torch.bfloat16) == 2 * 36 * 8 * 128 * 2 == 147456
    sampler = new(kv_tokens=60, page=16)  # rounded up to 4 pages, and the scratch page
    held = sum(kv.numel() * kv.element_size() for layer in sampler._cache for kv in layer)
    assert held == 5 * 16 * kv_bytes_per_token(MODEL.config, torch.float32)


# ------------------------------------------------------------------------------------------------ sleeping and waking


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_asleep_it_holds_no_memory_and_awake_it_samples_from_the_new_weights(kernel_calls, tied, kernel):
    model, other = tiny(tie_word_embeddings=tied), tiny(seed=1, tie_word_embeddings=tied)
    sampler, ids = new(model, kernel=kernel), context(50)
    run(sampler, [(ids, 8, 0)])
    sampler.sleep()
    sampler.sleep()  # nothing more to do
    assert sampler._cache is None and sum(p.numel() for p in model.parameters()) == 0
    with pytest.raises(RuntimeError, match="asleep"):
        run(sampler, [(ids, 8, 0)])
    sampler.wake(p.detach().double() for p in other.parameters())
    assert model.lm_head.weight.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    (sample,) = run(sampler, [(ids, 8, 0)])
    assert sample.version == 1 and sampler.stats["tokens_reused"] == 0
    assert_fresh(other, ids, sample)
    assert_fresh(model, ids, sample)


def test_waking_copies_and_needs_no_sleep_before():
    model, other = tiny(), tiny(seed=1)
    sampler, ids = new(model), context(30)
    run(sampler, [(ids, 3, 0)])
    sampler.wake(other.parameters())
    kept = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept))
    (sample,) = run(sampler, [(ids, 3, 0)])
    assert sample.version == 1 and sampler.stats["tokens_reused"] == 0
    assert_fresh(model, ids, sample)
    sampler.wake(model.parameters())  # even its own
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept)) and sampler.version == 2


def test_wrong_weights_are_a_value_error_and_leave_it_asleep():
    sampler = new(tiny())
    right = [p.detach() for p in tiny(seed=1).parameters()]
    for wrong in (right[:-1], [*right, right[0]], [right[0].T.clone(), *right[1:]], [right[0][:, :1], *right[1:]]):
        with pytest.raises(ValueError) as error:
            sampler.wake(wrong)
        assert "\n" not in str(error.value)
        with pytest.raises(RuntimeError, match="asleep"):
            run(sampler, [(context(5), 2, 0)])
    sampler.wake(right)
    (sample,) = run(sampler, [(context(5), 2, 0)])
    assert_fresh(tiny(seed=1), context(5), sample)


def test_it_neither_sleeps_nor_wakes_under_requests():
    sampler = new(tiny(), end_ids=())

    async def main():
        task = asyncio.create_task(sampler.sample(context(5), 10, 0))
        for _ in range(3):
            await asyncio.sleep(0)
            for change in (sampler.sleep, lambda: sampler.wake(MODEL.parameters())):
                with pytest.raises(RuntimeError, match="in flight"):
                    change()
        assert_fresh(sampler.model, context(5), await task)

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------- gpu_check


def test_gpu_check_runs_on_tiny_shapes_and_passes(capsys):
    assert gpu_check.main(["--device", "cpu", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all passed" and sum(line.endswith(" PASS") for line in lines) == 2 * 11


def test_gpu_check_finds_a_kernel_that_reads_wrong_pages(monkeypatch, capsys):
    def wrong(*args, seqused_k, block_table, **options):
        return varlen_reference(*args, seqused_k=seqused_k, block_table=block_table.flip(0), **options)

    monkeypatch.setattr(gpu_check, "varlen_reference", wrong)  # in the kernel's place
    monkeypatch.setattr(gpu_check, "check_attention", lambda *_: None)  # would compare it with itself
    assert gpu_check.main(["--device", "cpu", "--small"]) == 1
    assert "|sampled - scored| log-prob, graphs on: mean" in capsys.readouterr().out


def test_gpu_check_without_a_card_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out == "gpu_check: no CUDA device here; nothing was checked\n"
