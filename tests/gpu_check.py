"""The GPU path, checked and timed on one card in under five minutes: `python tests/gpu_check.py`.

Random Qwen3 models, of 0.6B shape and of 8B shape with 6 of its 36 layers, in bfloat16. Every line with a bound ends in
PASS or FAIL; the exit status is 1 if one fails. `--device cpu --small` runs the same code on tiny shapes, with
varlen_reference in the kernel's place and nothing captured: it shows that this script works, and nothing about a GPU.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import extras.pages
import faca
from extras.checkpoint import shard
from extras.plan import flops_per_token, peak_flops, shape_from
from extras.ranks import start_processes
from sampler import PACKED, Sampler, score

SHAPES = {
    "0.6B": dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    "8B, 6 layers": dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=6,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),
}
SMALL = {"tiny": dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
                      initializer_range=0.1)}
FULL_LOAD = dict(dialogues=16, prompt=4096, turns=4, message=128, user=64)
SMALL_LOAD = dict(dialogues=5, prompt=40, turns=2, message=6, user=3)

# bfloat16 against fp32 at the 0.6B shape: mean 0.009, max 0.03; one context token of 80 exchanged: mean 0.06;
# a third of the keys lost: mean 0.7 (measured on a CPU). The bounds lie between.
MEAN_GAP, MAX_GAP = 0.03, 0.3
ATTENTION_GAP = 0.05  # of outputs up to 4 in size, where two bfloat16 are 0.016 apart; a wrong key moves one by about 1


class Table:
    """Lines (model, what, value, bound, verdict), printed when they come and once more together."""

    def __init__(self):
        self.lines, self.failed = [], 0

    def add(self, model, what, value, unit="", most=None, least=None):
        good = (most is None or value <= most) and (least is None or value >= least)  # False for nan
        self.failed += not good
        bound = f"<= {most:g}" if most is not None else f">= {least:g}" if least is not None else ""
        self.lines.append((model, what, f"{value:.5g} {unit}".strip(), bound, bound and ("PASS" if good else "FAIL")))
        print(self.text(self.lines[-1]), flush=True)

    @staticmethod
    def text(line):
        return "{:14} {:52} {:>16}  {:10} {}".format(*line).rstrip()

    def __str__(self):
        return "\n".join(self.text(line) for line in [("model", "what", "value", "bound", ""), *self.lines])


# ------------------------------------------------------------------------------------------------------- attention


def varlen_reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                     window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):
    """torch.nn.attention.varlen.varlen_attn with a block table, row by row in fp32, and as strict as the kernel."""
    T, heads, d = query.shape
    pages, page, kv_heads, _ = key.shape
    starts, lengths, B = cu_seq_q.tolist(), seqused_k.tolist(), len(block_table)
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(starts) == len(cu_seq_k) == B + 1 and len(lengths) == B and starts[0] == 0 and starts[-1] == T
    assert value.shape == key.shape and enable_gqa and heads % kv_heads == 0 and num_splits == 1
    assert max_k >= max(lengths) and 0 <= block_table.min() and block_table.max() < pages
    outputs = []
    for start, stop, length, row in zip(starts, starts[1:], lengths, block_table):
        n = stop - start
        assert 1 <= n <= max_q and n <= length and window_size == ((-1, 0) if max_q > 1 else (-1, -1))
        own = row[: -(-length // page)].long()
        k, v = (kv[own].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1) for kv in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), k) * (scale or d**-0.5)
        later = torch.arange(length, device=k.device) > torch.arange(length - n, length, device=k.device)[:, None]
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outputs).to(query.dtype)


def check_attention(table, name, shape, device, page):
    """The kernel in use against varlen_reference: decode rows, then decode rows and deltas packed together."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, d = (shape[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    lengths = [1, 7, page - 1, page, page + 1, 3 * page, 5 * page - 1, 8 * page]
    pages = sum(-(-length // page) for length in lengths)
    keys, values = (torch.randn(pages, page, kv_heads, d, generator=generator).bfloat16().to(device) for _ in range(2))
    numbers, block_table = iter(torch.randperm(pages, generator=generator).tolist()), torch.zeros(len(lengths), 8)
    for row, length in zip(block_table, lengths):
        row[: -(-length // page)] = torch.tensor([next(numbers) for _ in range(-(-length // page))])
    for what, news in (("decode", [1] * len(lengths)), ("mixed", [1, 7, 1, page, 1, 2 * page + 1, 5, 1])):
        query = torch.randn(sum(news), heads, d, generator=generator).bfloat16().to(device)
        starts = torch.tensor([0, *news], device=device).cumsum(0).int()
        used = (torch.tensor(lengths, dtype=torch.int32, device=device), block_table.int().to(device), max(news))
        out = extras.pages.attend_in_place(query, keys, values, d**-0.5, starts, *used)
        expected = varlen_reference(
            query, keys, values, starts, starts, max(news), 8 * page, scale=d**-0.5, enable_gqa=True, num_splits=1,
            window_size=(-1, 0) if max(news) > 1 else (-1, -1), seqused_k=used[0], block_table=used[1])
        table.add(name, f"paged attention, {what}: max |kernel - fp32|", (out - expected).abs().max().item(),
                  most=ATTENTION_GAP)


# --------------------------------------------------------------------------------------------------------- sampler


def random_model(shape, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=40960))
    return model.bfloat16().eval().requires_grad_(False)


def context(length, vocab, seed):
    return random.Random(f"{length} {seed}").choices(range(2, vocab), k=length)


def sample_all(sampler, requests):
    """requests [(ids, max_tokens, seed)], all at once."""

    async def main():
        return await asyncio.gather(*[sampler.sample(*request) for request in requests])

    return asyncio.run(main())


def played(sampler, load, vocab):
    """Dialogues of one shared prompt, each with its own user -> [(ids, places of the sampled ones, their logprobs)]."""
    prompt = context(load["prompt"], vocab, "prompt")

    async def dialogue(k):
        ids, places, logprobs = list(prompt), [], []
        for turn in range(load["turns"]):
            ids += context(load["user"] + k, vocab, (k, turn))
            sample = await sampler.sample(ids, load["message"], k)
            places += range(len(ids), len(ids) + len(sample.tokens))
            ids, logprobs = ids + sample.tokens, logprobs + sample.logprobs
        return ids, places, logprobs

    async def main():
        return await asyncio.gather(*[dialogue(k) for k in range(load["dialogues"])])

    return asyncio.run(main())


@torch.no_grad()
def scored_gap(model, dialogues):
    """|sampled - scored| log-prob of every sampled token, scored a dialogue at a time, unpadded."""
    gaps = []
    for ids, places, logprobs in dialogues:
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, places] = True
        mask = mask.to(model.device)
        banned = torch.tensor([0], device=model.device)
        with attention(model, PACKED):
            logp_1T, _ = score(model, torch.tensor([ids], device=model.device), [len(ids)], mask, 1.0, banned)
        gaps.append((logp_1T[mask].float().cpu() - torch.tensor(logprobs)).abs())
    return torch.cat(gaps)


@contextmanager
def attention(model, name):
    before, model.config._attn_implementation = model.config._attn_implementation, name
    yield
    model.config._attn_implementation = before


def check_sampler(table, name, model, load, **options):
    vocab = model.config.vocab_size
    for graphs in (True, False):
        gap = scored_gap(model, played(Sampler(model, (), (0,), graphs=graphs, **options), load, vocab))
        what = f"|sampled - scored| log-prob, graphs {'on' if graphs else 'off'}"
        table.add(name, f"{what}: mean of {len(gap)}", gap.mean().item(), most=MEAN_GAP)
        table.add(name, f"{what}: max", gap.max().item(), most=MAX_GAP)
    # A bucket full of rows that begin and end together: no step is padded, and so the arithmetic is the same.
    requests = [(context(load["prompt"] // 8 + 3 * k, vocab, k), load["message"], k) for k in range(8)]
    on, off = (sample_all(Sampler(model, (), (0,), graphs=graphs, **options), requests) for graphs in (True, False))
    same = [a == b for x, y in zip(on, off) for a, b in zip(x.tokens, y.tokens)]
    table.add(name, f"same tokens, graphs on and off: share of {len(same)}", sum(same) / len(same), least=1)
    # Greedy and one token only: a maximum moves as little as the logits do, while a longer sample may part for good.
    requests = [(ids, 1, k) for ids, _, k in requests]
    greedy = [sample_all(Sampler(model, (), (0,), 0.0, **options | dict(kernel=kernel)), requests)
              for kernel in (True, False)]
    gap = max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(*greedy))
    table.add(name, "kernel against gathered SDPA, greedy log-prob: max", gap, most=MAX_GAP)


@contextmanager
def timed_steps(sampler):
    """Yields [(rows, new tokens, seconds)], one for each of the sampler's steps; a step ends with the device idle."""
    steps, forward = [], sampler._forward

    def timed(rows):
        size, began = (len(rows), sum(row.new for row in rows)), time.perf_counter()
        result = forward(rows)
        steps.append((*size, time.perf_counter() - began))
        return result

    sampler._forward = timed
    yield steps
    del sampler._forward  # the class's own is seen again


def copy_bandwidth(device, size):
    """Bytes a second that a large copy reads and writes: the limit that a decode step is measured against."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size / min(seconds)


def rollout_speed(table, name, model, load, bandwidth, **options):
    """Multi-turn rollouts, graphs on and off. A decode step must at least read every weight that it multiplies by."""
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    weights = 2 * (sum(p.numel() for p in model.parameters()) - embedding)
    medians = {}
    for graphs in (True, False):
        sampler, way = Sampler(model, (), (0,), graphs=graphs, **options), f"graphs {'on' if graphs else 'off'}"
        played(sampler, load | dict(turns=1), model.config.vocab_size)  # captures, and warms up
        sampler.weights_changed()
        before = dict(sampler.stats)
        began = time.perf_counter()
        with timed_steps(sampler) as steps:
            played(sampler, load, model.config.vocab_size)
        seconds = time.perf_counter() - began
        counts = {key: sampler.stats[key] - before[key] for key in before}
        table.add(name, f"rollout, {way}: sampled", counts["tokens_sampled"] / seconds, "tokens/s")
        table.add(name, f"rollout, {way}: fed or found", (counts["tokens_fed"] + counts["tokens_reused"]) / seconds,
                  "tokens/s")
        table.add(name, f"rollout, {way}: outside the forwards", 1 - sum(s for _, _, s in steps) / seconds)
        medians[graphs] = statistics.median(s for rows, new, s in steps if rows == new == load["dialogues"])
        table.add(name, f"decode step of {load['dialogues']} rows, {way}", 1e3 * medians[graphs], "ms")
        table.add(name, f"decode step, {way}: weights at copy bandwidth", weights / bandwidth / medians[graphs])
    table.add(name, "decode step: graphs off / on", medians[False] / medians[True])


# --------------------------------------------------------------------------------------------------- training step


def training_step(table, name, shape, device, load):
    """The trainer's step on one packed row: against attention without packing, its speed, MFU and memory."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=40960))
    model.train().activation_checkpointing_enable()
    model.config._attn_implementation = PACKED
    shard(model, torch.bfloat16 if device == "cuda" else torch.float32)
    model.score = score.__get__(model)
    register_fsdp_forward_method(model, "score")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lengths, banned = [load["prompt"], load["prompt"] - 7, load["prompt"] // 2], torch.tensor([0], device=device)
    tokens = torch.tensor([[t for n in lengths for t in context(n, shape["vocab_size"], n)]], device=device)
    mask = torch.rand(tokens.shape, device=device) < 0.3
    mask[0, [0, lengths[0], sum(lengths[:2])]] = False
    with torch.no_grad():
        packed_row = model.score(tokens, lengths, mask, 1.0, banned)[0].split(lengths, 1)
        with attention(model, "sdpa"):
            rows = zip(tokens.split(lengths, 1), lengths, mask.split(lengths, 1), packed_row, strict=True)
            alone = [(model.score(row, [n], own, 1.0, banned)[0] - ours)[own].abs() for row, n, own, ours in rows]
    gap = torch.cat(alone)
    table.add(name, f"packed row against one by one in SDPA: mean of {len(gap)}", gap.mean().item(), most=MEAN_GAP)
    table.add(name, "packed row against one by one in SDPA: max", gap.max().item(), most=MAX_GAP)
    seconds = []
    for step in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        logp_1T, _ = model.score(tokens, lengths, mask, 1.0, banned)
        advantage_1T = torch.randn(tokens.shape, device=device)
        loss, _ = faca.clipped_loss(logp_1T, logp_1T.detach(), advantage_1T, mask)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    table.add(name, "training step: gradient norm above 0", float(norm > 0 and math.isfinite(norm)), least=1)
    table.add(name, f"training step of {tokens.numel()} tokens", statistics.median(seconds[1:]), "s")
    table.add(name, "training step", tokens.numel() / statistics.median(seconds[1:]), "tokens/s")
    if device == "cuda":
        table.add(name, "training step: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    if device == "cuda" and (peak := peak_flops(torch.cuda.get_device_name())):
        flops = flops_per_token(shape_from(model.config.to_dict()), sum(n * n for n in lengths) / tokens.numel(), 0.3)
        table.add(name, "training step: MFU", flops * tokens.numel() / statistics.median(seconds[1:]) / peak)


# ------------------------------------------------------------------------------------------------------------ main


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes, to exercise this script")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; nothing was checked")
        return 2  # a job script should not take it for a pass
    kernel = extras.pages.varlen_attn
    if args.device == "cpu":
        extras.pages.varlen_attn = varlen_reference
    alone = not dist.is_initialized()
    if alone:
        start_processes()
    try:
        table = check(args)
    finally:
        if alone:
            dist.destroy_process_group()
        extras.pages.varlen_attn = kernel
    print(f"\n{table}\n\n{f'{table.failed} failed' if table.failed else 'all passed'}")
    return int(table.failed > 0)


def check(args):
    table, load = Table(), SMALL_LOAD if args.small else FULL_LOAD
    page = 16 if args.small and args.device == "cpu" else extras.pages.KERNEL_PAGE
    bandwidth = copy_bandwidth(args.device, 2**20 if args.small else 2**31)
    table.add("", "memory bandwidth of a copy", bandwidth / 1e12, "TB/s")
    longest = load["prompt"] + load["turns"] * (load["message"] + load["user"] + load["dialogues"])
    options = dict(kv_tokens=load["dialogues"] * (longest + page), page=page, kernel=True)
    for name, shape in (SMALL if args.small else SHAPES).items():
        check_attention(table, name, shape, args.device, page)
        model = random_model(shape, args.device)
        check_sampler(table, name, model, load, **options)
        rollout_speed(table, name, model, load, bandwidth, **options)
        del model
        training_step(table, name, shape, args.device, load)
    if args.device == "cuda":
        table.add("", "peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return table


if __name__ == "__main__":
    sys.exit(main())
