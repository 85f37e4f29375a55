"""The sampler: `await sampler.sample(ids, max_tokens, seed)` takes a whole context in and gives the new ids out.

Many dialogues call it at once. One asyncio task steps while there are requests; a step is one forward of one packed
row that holds the newest token of every running request and the uncached context of those just admitted. After every
step other tasks run, so a dialogue whose message ended can call its tool and be back in the running batch.

How pages work. A layer's keys and values are tensors [pages, page, kv_heads, head_dim]. A request owns a list of page
numbers: its token at position p lives in number p // page of the list, at offset p % page. Admission reserves the worst
case, len(ids) + max_tokens, so a running request never lacks a page; until they are free it waits, first come, first
served. A full page is named by a digest of its ids and of the name before, hence of all that precedes it; admission
shares the pages whose names it finds. This alone gives both the prefix of K rollouts and a dialogue's cache between
turns. Every layer writes before it reads, so a page is shared from the moment it is promised, even within one forward.
Pages count their users; a named one without users stays until it is the least recently used and room is needed.
New weights forget every name.

Axes: B rows (requests), n new tokens of a row, T packed tokens, P pages, L = P * page positions, V ids, d head_dim.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

ATTENTION = "paged_sampler"  # our name in transformers' registry; no mask function has it, so transformers builds none
ADMIT_TOKENS = 8192  # a step that feeds this many admits no more, which bounds the forward's activations
GROUP_ROWS = 8  # attended together: few enough to be of like length, and to stay in a CPU's cache once gathered


@dataclass
class Sample:
    tokens: list[int]  # the new ids; when stop is "end" the last of them is the end id
    logprobs: list[float]  # one per token, under exactly the distribution it was drawn from
    stop: str  # "end" or "length"
    version: int  # how often the weights had changed


@dataclass(eq=False)
class Request:
    ids: list[int]  # context, then the tokens sampled so far
    max_tokens: int
    seed: int
    done: asyncio.Future
    digests: list[bytes] = field(default_factory=list)  # names of the full pages of ids
    pages: list[int] = field(default_factory=list)
    table: torch.Tensor | None = None  # pages on the device, int64
    cached: int = 0  # how many of ids have keys and values in pages
    logprobs: list[float] = field(default_factory=list)

    @property
    def new(self):
        return len(self.ids) - self.cached

    def extend_digests(self, page):
        for start in range(len(self.digests) * page, len(self.ids) - page + 1, page):
            text = b"".join(self.digests[-1:]) + repr(self.ids[start : start + page]).encode()
            self.digests.append(hashlib.blake2b(text, digest_size=16).digest())


def kv_bytes_per_token(config, dtype) -> int:
    """What one token's keys and values take in the cache, over all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize


class PagePool:
    """Which pages have users, and which digest names which page. The keys and values themselves are elsewhere."""

    def __init__(self, count):
        self.free = list(range(count))
        self.users = [0] * count
        self.page_of, self.digest_of = {}, {}  # inverse to each other
        self.idle = OrderedDict()  # named pages without users, least recently used first

    def reserve(self, digests, total):
        """`total` pages, the first of them found by `digests`: (pages, how many found), or None if too few are left."""
        found = []
        while len(found) < len(digests) and digests[len(found)] in self.page_of:
            found.append(self.page_of[digests[len(found)]])
        if total - len(found) > len(self.free) + len(self.idle) - sum(page in self.idle for page in found):
            return None
        for page in found:
            self.idle.pop(page, None)
        pages = found + [self.free.pop() if self.free else self._evict() for _ in range(total - len(found))]
        for page in pages:
            self.users[page] += 1
        return pages, len(found)

    def _evict(self):
        page, _ = self.idle.popitem(last=False)
        del self.page_of[self.digest_of.pop(page)]
        return page

    def name(self, pages, digests):
        for page, digest in zip(pages, digests):
            if digest not in self.page_of:  # else another request computes the same page, and this copy stays private
                self.page_of[digest], self.digest_of[page] = page, digest

    def release(self, pages):
        for page in reversed(pages):  # the deepest is evicted first: it is found only through those before it
            self.users[page] -= 1
            if self.users[page] == 0 and page in self.digest_of:
                self.idle[page] = None
            elif self.users[page] == 0:
                self.free.append(page)


def refuse_unknown(options):
    """Attention that a model asks for and that isn't here is an error, not left out."""
    if unknown := [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)} is not supported")


def paged_attention(module, query, key, value, attention_mask, pages, slots, groups, scaling=None, **options):
    """transformers' attention interface: query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    The forward's **kwargs bring the rest: pages, each layer's (keys, values); slots [T], where in [pages * page] each
    token's go; groups, for rows with equally many new tokens (see Sampler._groups). A varlen kernel would go in here.
    """
    refuse_unknown(options)
    for stored, new in zip(pages[module.layer_idx], (key, value)):
        stored.flatten(0, 1).index_copy_(0, slots, new[0].transpose(0, 1))
    outputs = []
    for start, table, mask in groups:
        B, _, n, L = mask.shape
        q = query[0, :, start : start + B * n].unflatten(1, (B, n)).transpose(0, 1)  # [B, heads, n, d]
        k, v = (kv.index_select(0, table).view(B, L, *kv.shape[2:]).transpose(1, 2) for kv in pages[module.layer_idx])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * n, heads, d]
    return torch.cat(outputs)[None], None


AttentionInterface.register(ATTENTION, paged_attention)


def uniform(seed, position):
    """The number in [0, 1) that decides the token at `position`. No generator has a state, so no order matters."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def draw(logits, u, banned, temperature):
    """One token a row by inverse CDF: logits [B, V], u [B] in [0, 1), banned [V] bool -> tokens [B], logprobs [B].

    Temperature 0 takes the likeliest token, and gives its log-prob at temperature 1.
    """
    logits = logits.float().masked_fill(banned, float("-inf"))
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    tokens = logprobs.argmax(-1, keepdim=True)
    if temperature:
        probs = logprobs.double().exp()
        cdf = probs.cumsum(-1)
        drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
        tokens = torch.where(probs.gather(1, drawn) > 0, drawn, tokens)  # rounding may step over the CDF's end
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


class Sampler:
    """Continuous batching over one Hugging Face causal LM: whole, on one device, in eval mode.

    end_ids stop a sample. banned_ids (control ids, the embedding's unused rows) are never drawn and hold no mass.
    kv_tokens is the cache's size in tokens, page the tokens of a page, max_batch the most requests that run at once.
    stats counts forwards, tokens_fed, tokens_sampled, and tokens_reused (context tokens found in the cache).
    """

    def __init__(self, model, end_ids, banned_ids=(), temperature=1.0, kv_tokens=2**16, page=16, max_batch=256):
        self.model, self.temperature, self.page, self.max_batch = model, temperature, page, max_batch
        self.end_ids = frozenset(end_ids)
        self.version = 0
        self.stats = dict.fromkeys(("forwards", "tokens_fed", "tokens_sampled", "tokens_reused"), 0)
        self._task = None  # runs _run while there are requests
        self._waiting, self._running = deque(), []
        config, vocab = model.config, model.get_output_embeddings().weight.shape[0]
        self._banned = torch.zeros(vocab, dtype=torch.bool, device=model.device)
        self._banned[list(banned_ids)] = True
        self._pool = PagePool(kv_tokens // page)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, kv_tokens // page, page, config.num_key_value_heads, head_dim)
        # zeros, not empty: what the mask hides still enters a product, and 0 * nan is nan
        layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_hidden_layers)]
        self._cache = [layer.unbind() for layer in layers]  # per layer (keys, values)

    async def sample(self, ids, max_tokens, seed):
        """Continue `ids` by at most max_tokens -> Sample. The token at position p depends on ids, weights, seed and p.

        Raises ValueError for what can never be served, and whatever a forward raised while this request was waiting.
        """
        ids, vocab, capacity = [int(i) for i in ids], len(self._banned), len(self._pool.users) * self.page
        if not ids or max_tokens < 1 or not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"needs context ids below {vocab} and max_tokens of 1 or more: {len(ids)}, {max_tokens}")
        if len(ids) + max_tokens > capacity:
            raise ValueError(f"{len(ids)} context ids + max_tokens {max_tokens} exceed the cache's {capacity} tokens")
        request = Request(ids, max_tokens, seed, asyncio.get_running_loop().create_future())
        request.extend_digests(self.page)
        self._waiting.append(request)
        if self._task is None or self._task.done():  # done but there: cancelled before its first step
            self._task = asyncio.create_task(self._run())
        try:
            return await request.done
        finally:
            self._leave(request)  # does something only if this caller was cancelled

    def weights_changed(self):
        """Forget every cached page and count a new version. Raises RuntimeError while requests are in flight."""
        if self._waiting or self._running:
            raise RuntimeError(f"weights changed under {len(self._waiting) + len(self._running)} requests in flight")
        self.version += 1
        self._pool = PagePool(len(self._pool.users))

    async def _run(self):
        try:
            while self._waiting or self._running:
                self._admit()
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._abort(error)
        except BaseException:
            self._abort(RuntimeError("the sampler's task was cancelled"))
            raise
        finally:
            self._task = None

    def _abort(self, error):
        """Every caller gets the error; pages that the failed step may have half written are forgotten."""
        for request in [*self._running, *self._waiting]:
            self._leave(request)
            if not request.done.done():
                request.done.set_exception(error)
        self._pool = PagePool(len(self._pool.users))
        for tensor in (tensor for layer in self._cache for tensor in layer):
            tensor.zero_()  # they may hold nan

    def _leave(self, request):
        """Out of the queue or the batch, with its pages; nothing if it has left."""
        for place in (self._waiting, self._running):
            if request in place:
                place.remove(request)
                self._pool.release(request.pages)

    def _admit(self):
        fed = len(self._running)
        while self._waiting and len(self._running) < self.max_batch and fed < ADMIT_TOKENS:
            request = self._waiting[0]
            matchable = (len(request.ids) - 1) // self.page  # one token at least is fed, or there would be no logits
            total = -(-(len(request.ids) + request.max_tokens) // self.page)
            reserved = self._pool.reserve(request.digests[:matchable], total)
            if reserved is None:
                return
            request.pages, found = reserved
            request.table = torch.tensor(request.pages, device=self._banned.device)
            request.cached = found * self.page
            self._pool.name(request.pages[found:], request.digests[found:])
            self._running.append(self._waiting.popleft())
            self.stats["tokens_reused"] += request.cached
            fed += request.new

    def _step(self):
        """One forward, and one new token for every running request."""
        rows = sorted(self._running, key=lambda row: (row.new, len(row.ids)))  # like beside like, for the groups
        tokens, logprobs = self._forward(rows)
        for row, token, logprob in zip(rows, tokens, logprobs):
            if not logprob > float("-inf"):
                raise FloatingPointError(f"a sampled token has log-prob {logprob}: the logits are not finite")
            row.cached, named = len(row.ids), len(row.digests)
            row.extend_digests(self.page)
            self._pool.name(row.pages[named:], row.digests[named:])
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in self.end_ids or len(row.logprobs) == row.max_tokens:
                self._leave(row)
                stop = "end" if token in self.end_ids else "length"
                sample = Sample(row.ids[-len(row.logprobs) :], row.logprobs, stop, self.version)
                if not row.done.done():  # its caller may have been cancelled a moment ago
                    row.done.set_result(sample)

    @torch.no_grad()  # inference_mode would leave tensors in the model that autograd refuses
    def _forward(self, rows):
        """Feed every row's uncached ids; rows come sorted by how many. -> (tokens, log-probs), one per row."""
        device, page = self._banned.device, self.page
        ids = [i for row in rows for i in row.ids[row.cached :]]
        positions = [p for row in rows for p in range(row.cached, len(row.ids))]
        slots = [row.pages[p // page] * page + p % page for row in rows for p in range(row.cached, len(row.ids))]
        packed = torch.tensor([ids, positions, slots], device=device)  # [3, T]
        last = torch.tensor([row.new for row in rows], device=device).cumsum(0) - 1
        paged = {"pages": self._cache, "slots": packed[2], "groups": self._groups(rows, packed[1])}
        config, original = self.model.config, self.model.config._attn_implementation
        config._attn_implementation = ATTENTION  # for this forward only: others use the model and its config
        try:
            output = self.model(packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=last, **paged)
        finally:
            config._attn_implementation = original
        u = torch.tensor([uniform(row.seed, len(row.ids)) for row in rows], dtype=torch.float64, device=device)
        tokens, logprobs = draw(output.logits[0], u, self._banned, self.temperature)
        self.stats["forwards"] += 1
        self.stats["tokens_fed"] += len(ids)
        self.stats["tokens_sampled"] += len(rows)
        return tokens.tolist(), logprobs.tolist()

    def _groups(self, rows, positions):
        """(first token in T, page table [B * P], mask [B, 1, n, L]) for each few rows of equal n. positions [T]."""
        groups, start = [], 0
        for n in sorted({row.new for row in rows}):
            same = [row for row in rows if row.new == n]
            for few in (same[i : i + GROUP_ROWS] for i in range(0, len(same), GROUP_ROWS)):
                stop = start + len(few) * n
                P = -(-len(few[-1].ids) // self.page)  # the last is the longest
                table = torch.nn.utils.rnn.pad_sequence([row.table[:P] for row in few], batch_first=True)
                gathered = torch.arange(P * self.page, device=positions.device)
                groups.append((start, table.flatten(), gathered <= positions[start:stop].view(len(few), 1, n, 1)))
                start = stop
        return groups


# ----------------------------------------------------------------------------------------------------------- scoring

PACKED = "packed_sequences"
HEAD_LOGITS = 2**28  # logits held at once in scoring: 1 GiB in fp32 (chosen)


def packed_attention(module, query, key, value, attention_mask, lengths, borders, scaling=None, **options):
    """transformers' attention interface for one row of whole sequences, each causal in itself: no mask, no padding.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. lengths, of the sequences, add up to
    T; borders [sequences + 1] int32 are where they begin and end, for the kernel that CUDA has.
    """
    refuse_unknown(options)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(q, k, v, borders, borders, max(lengths), max(lengths), scale=scaling, window_size=(-1, 0),
                          enable_gqa=True)
        return out[None], None
    rows = zip(*(x.split(lengths, 2) for x in (query, key, value)))
    out = [F.scaled_dot_product_attention(*row, is_causal=True, scale=scaling, enable_gqa=True) for row in rows]
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register(PACKED, packed_attention)


def score(model, tokens_1T, lengths, mask_1T, temperature: float, banned):
    """log pi(token t | tokens of its sequence before t) where mask_1T is True, else 0; and the summed entropy there.

    tokens_1T is one row of sequences packed end to end, lengths are theirs; model.config names PACKED as attention. The
    distribution is the one that draw() samples from: temperature applied, banned ids excluded. The head sees those
    places alone, never T x V, and above HEAD_LOGITS a chunk at a time, recomputed in backward. Returns (1, T) and ().
    Raises ValueError for a mask that is True at the first token of a sequence, which nothing predicts.
    """
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    if mask_1T[0, starts.to(mask_1T.device)].any():
        raise ValueError("the first token of a sequence has no context: it can't be scored")
    positions = torch.arange(tokens_1T.shape[1]) - starts.repeat_interleave(torch.tensor(lengths))
    borders = F.pad(ends, (1, 0)).to(tokens_1T.device, torch.int32)
    hidden_1TD = model.model(input_ids=tokens_1T, position_ids=positions[None].to(tokens_1T.device), use_cache=False,
                             lengths=lengths, borders=borders).last_hidden_state
    hidden_MD = hidden_1TD[:, :-1][mask_1T[:, 1:]]  # position t-1 predicts token t
    rows = max(1, HEAD_LOGITS // model.lm_head.out_features)
    chunks = list(zip(hidden_MD.split(rows), tokens_1T[mask_1T].split(rows), strict=True))
    if len(chunks) == 1:
        scored = [score_rows(model.lm_head, *chunks[0], temperature, banned)]
    else:
        scored = [checkpoint(score_rows, model.lm_head, *chunk, temperature, banned, use_reentrant=False)
                  for chunk in chunks]
    logp_M = torch.cat([logp for logp, _ in scored])
    logp_1T = torch.zeros_like(tokens_1T, dtype=torch.float32).masked_scatter(mask_1T, logp_M)
    return logp_1T, sum(entropy for _, entropy in scored)


def score_rows(head, hidden_MD, tokens_M, temperature: float, banned):
    """Log-probs of tokens_M under the head's distribution at each row, (M,), and the rows' summed entropy."""
    logits_MV = head(hidden_MD).float().index_fill(1, banned, -math.inf)
    logp_MV = (logits_MV if temperature == 1 else logits_MV / temperature).log_softmax(-1)
    entropy = torch.special.entr(logp_MV.detach().exp()).sum()
    return logp_MV.gather(1, tokens_M[:, None])[:, 0], entropy
