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

On CUDA torch's variable-length kernel reads the pages in place, and a step that only decodes replays a CUDA graph: one
small copy to the device, one replay, one copy back. Elsewhere the pages are gathered into SDPA, the readable reference.

Axes: B rows (requests), n new tokens of a row, T packed tokens, P pages, L = P * page positions, V ids, d head_dim.
"""

import asyncio
import hashlib
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from extras.pages import (ATTENTION, KERNEL_PAGE, Group, PagePool, attend_gathered, attend_in_place, bucket,
                          refuse_unknown)

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
    temperature: float
    done: asyncio.Future
    digests: list[bytes] = field(default_factory=list)  # names of the full pages of ids
    pages: list[int] = field(default_factory=list)
    table: np.ndarray | None = None  # pages again, int64
    cached: int = 0  # how many of ids have keys and values in pages
    logprobs: list[float] = field(default_factory=list)

    @property
    def new(self):
        return len(self.ids) - self.cached

    def extend_digests(self, page):
        for start in range(len(self.digests) * page, len(self.ids) - page + 1, page):
            text = b"".join(self.digests[-1:]) + repr(self.ids[start : start + page]).encode()
            self.digests.append(hashlib.blake2b(text, digest_size=16).digest())


def kv_bytes_per_token(config, dtype):
    """Bytes of one token's keys and values in all layers of a model of this config."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config) * dtype.itemsize


def head_dim_of(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unpack(flat, T, B):
    """Views of Sampler._pack's tensor: ids, positions, slots [T], starts [B + 1], lengths, u, temperature [B], table
    [B, P]."""
    *fields, u, heat, table = flat.split([T, T, T, B + 1, B, B, B, len(flat) - 3 * T - 4 * B - 1])
    return *fields, u.view(torch.float64), heat.view(torch.float64), table.view(B, -1)


def uniform(seed, position):
    """The number in [0, 1) that decides the token at `position`. No generator has a state, so no order matters."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def draw(logits, u, banned, temperature):
    """One token a row by inverse CDF: logits [B, V], u [B] in [0, 1), banned [V] bool, temperature [B] -> tokens [B],
    logprobs [B].

    Temperature 0 takes the likeliest token, and gives its log-prob at temperature 1.
    """
    heat = temperature.float()[:, None]
    logits = logits.float().masked_fill(banned, float("-inf"))
    logprobs = torch.log_softmax(logits / heat.where(heat > 0, 1.0), dim=-1)
    likeliest = logprobs.argmax(-1, keepdim=True)
    probs = logprobs.double().exp()
    cdf = probs.cumsum(-1)
    drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    fits = (heat > 0) & (probs.gather(1, drawn) > 0)  # rounding may step over the CDF's end
    tokens = torch.where(fits, drawn, likeliest)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


class Sampler:
    """Continuous batching over one Hugging Face causal LM: whole, on one device, in eval mode.

    end_ids stop a sample. banned_ids (control ids, the embedding's unused rows) are never drawn and hold no mass.
    kv_tokens is the cache's size in tokens (kv_bytes_per_token each), rounded up to whole pages; page the tokens of a
    page (256 with the kernel, else 16); max_batch the most requests that run at once. kernel, whether attention is
    torch's kernel: by default on CUDA in bfloat16 or float16, all that it takes. graphs, whether its decode steps are
    padded to a bucket() of rows, and on CUDA captured; padding rows write to a scratch page and are ignored.
    stats counts forwards, tokens_fed, tokens_sampled, and tokens_reused (context tokens found in the cache).
    """

    def __init__(self, model, end_ids, banned_ids=(), temperature=1.0, kv_tokens=2**16, page=None, max_batch=256,
                 kernel=None, graphs=True):
        self.model, self.temperature, self.max_batch = model, temperature, max_batch
        self.device, half = model.device, model.dtype in (torch.bfloat16, torch.float16)
        self.kernel = kernel if kernel is not None else self.device.type == "cuda" and half
        self.page = page or (KERNEL_PAGE if self.kernel else 16)
        if self.kernel and self.device.type == "cuda" and (not half or self.page % KERNEL_PAGE):
            raise ValueError(f"the attention kernel needs bfloat16 or float16 and pages of a multiple of {KERNEL_PAGE} "
                             f"tokens, got {model.dtype} and {self.page}: choose so, or kernel=False")
        self.end_ids = frozenset(end_ids)
        self.version = 0
        self.stats = dict.fromkeys(("forwards", "tokens_fed", "tokens_sampled", "tokens_reused"), 0)
        self._task = None  # runs _run while there are requests
        self._waiting, self._running = deque(), []
        banned = torch.zeros(model.get_output_embeddings().weight.shape[0], dtype=torch.bool)
        banned[list(banned_ids)] = True
        self._banned = banned.to(self.device)
        self._pool = PagePool(-(-kv_tokens // self.page))
        self._pad = graphs and self.kernel
        self._held = {}  # what was gathered for the rows that decoded in the last step, by pages and rows
        self._graphs = {}  # by batch size: (input, CUDA graph, output)
        self._shapes = [p.shape for p in model.parameters()]
        self._cache = self._new_cache()  # per layer (keys, values); None asleep

    def _new_cache(self):
        config, pages = self.model.config, len(self._pool.users) + 1  # the last is the scratch page
        shape = (2, pages, self.page, config.num_key_value_heads, head_dim_of(config))
        # zeros, not empty: what the mask hides still enters a product, and 0 * nan is nan
        layers = range(config.num_hidden_layers)
        return [torch.zeros(shape, dtype=self.model.dtype, device=self.device).unbind() for _ in layers]

    async def sample(self, ids, max_tokens, seed, temperature=None):
        """Continue `ids` by at most max_tokens -> Sample. The token at position p depends on ids, weights, seed and p.

        temperature: of this request alone; None is the sampler's. Raises ValueError for what can never be served,
        RuntimeError asleep, and whatever a forward raised while this request was waiting.
        """
        if self._cache is None:
            raise RuntimeError("the sampler is asleep: it has neither weights nor cache until wake(parameters)")
        ids, vocab, capacity = [int(i) for i in ids], len(self._banned), len(self._pool.users) * self.page
        if not ids or max_tokens < 1 or not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"needs context ids below {vocab} and max_tokens of 1 or more: {len(ids)}, {max_tokens}")
        if len(ids) + max_tokens > capacity:
            raise ValueError(f"{len(ids)} context ids + max_tokens {max_tokens} exceed the cache's {capacity} tokens")
        temperature = self.temperature if temperature is None else temperature
        request = Request(ids, max_tokens, seed, temperature, asyncio.get_running_loop().create_future())
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
        self._require_idle("weights changed")
        self.version += 1
        self._pool = PagePool(len(self._pool.users))

    def sleep(self):
        """Free the memory of the cache, the graphs and the model's parameters, until wake().

        Raises RuntimeError while requests are in flight; nothing to do if asleep.
        """
        self._require_idle("sleep")
        self._cache = None
        self._graphs.clear()  # they hold the addresses of what goes
        for p in self.model.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def wake(self, parameters):
        """New weights, asleep or awake: full tensors in the order of model.parameters(), copied one at a time.

        A tied weight comes once. What was cached is forgotten, as by weights_changed(). Raises RuntimeError while
        requests are in flight, ValueError for tensors of another number or shape; then the sampler is asleep.
        """
        self._require_idle("wake")
        self._cache = None
        self._graphs.clear()
        for (name, p), shape, new in zip(self.model.named_parameters(), self._shapes, parameters, strict=True):
            if new.shape != shape:
                raise ValueError(f"{name} has the shape {list(shape)}, the tensor to wake with {list(new.shape)}")
            p.data = torch.empty(shape, dtype=p.dtype, device=p.device).copy_(new)
        self._cache = self._new_cache()
        self.weights_changed()

    def _require_idle(self, what):
        if self._waiting or self._running:
            raise RuntimeError(f"{what} under {len(self._waiting) + len(self._running)} requests in flight")

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
            self._task, self._held = None, {}

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
            request.table = np.array(request.pages)
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
                raise FloatingPointError(f"a sampled token has log-prob {logprob}: the logits are not finite: the "
                                         "model's weights are damaged, or it has diverged (try a lower learning rate)")
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
        fed, most = sum(row.new for row in rows), rows[-1].new
        if self._pad and most == 1:
            B = bucket(len(rows))
            output = self._decode(self._pack(rows, B, len(self._pool.users)), B)
        else:
            packed = self._pack(rows, len(rows), max(-(-len(row.ids) // self.page) for row in rows))
            output = self._compute(packed.to(self.device, non_blocking=True), fed, len(rows), most, rows)
        tokens, logprobs = output.cpu()[:, : len(rows)].tolist()  # the one time that a step waits for the device
        self.stats["forwards"] += 1
        self.stats["tokens_fed"] += fed
        self.stats["tokens_sampled"] += len(rows)
        return [int(token) for token in tokens], logprobs

    def _pack(self, rows, B, P):
        """All that a forward needs of the rows, padded to B of them, in one int64 tensor for unpack()."""
        page, scratch, pad = self.page, len(self._pool.users), B - len(rows)
        fed = [(row, p) for row in rows for p in range(row.cached, len(row.ids))]
        ids = [row.ids[p] for row, p in fed] + [0] * pad
        positions = [p for _, p in fed] + [0] * pad
        slots = [row.pages[p // page] * page + p % page for row, p in fed] + [scratch * page] * pad
        starts = list(accumulate([row.new for row in rows] + [1] * pad, initial=0))
        lengths = [len(row.ids) for row in rows] + [1] * pad
        u = np.array([uniform(row.seed, len(row.ids)) for row in rows] + [0.0] * pad)
        heat = np.array([float(row.temperature) for row in rows] + [1.0] * pad)
        table = np.full((B, P), scratch)
        for i, row in enumerate(rows):
            used = row.table[:P]
            table[i, : len(used)] = used
        floats = u.view(np.int64), heat.view(np.int64)
        packed = torch.from_numpy(np.concatenate((ids, positions, slots, starts, lengths, *floats, table.ravel())))
        return packed.pin_memory() if self.device.type == "cuda" else packed

    def _decode(self, packed, B):
        """_compute for B rows of one token each. On CUDA by a graph, captured when this B is first met."""
        if self.device.type != "cuda":
            return self._compute(packed, B, B, 1)
        if B not in self._graphs:
            static, graph = packed.to(self.device), torch.cuda.CUDAGraph()
            memory = next((graph.pool() for _, graph, _ in self._graphs.values()), None)  # one for all: they take turns
            self._compute(static, B, B, 1)  # what libraries set up when first used cannot be captured
            with torch.cuda.graph(graph, memory, capture_error_mode="thread_local"):  # NCCL's thread is not held up
                output = self._compute(static, B, B, 1)
            self._graphs[B] = static, graph, output
        static, graph, output = self._graphs[B]
        static.copy_(packed, non_blocking=True)
        graph.replay()
        return output

    def _compute(self, packed, T, B, most, rows=None):
        """One forward and one draw: packed on the device -> [2, B] float64, tokens and log-probs."""
        ids, positions, slots, starts, lengths, u, heat, table = unpack(packed, T, B)
        if self.kernel:
            attend = partial(attend_in_place, starts=starts.int(), lengths=lengths.int(), table=table.int(), most=most)
        else:
            attend = partial(attend_gathered, groups=self._groups(rows, positions, slots, table))
        paged = {"pages": self._cache, "slots": slots, "attend": attend}
        config, original = self.model.config, self.model.config._attn_implementation
        config._attn_implementation = ATTENTION  # for this forward only: others use the model and its config
        try:
            output = self.model(ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=starts[1:] - 1,
                                **paged)
        finally:
            config._attn_implementation = original
        tokens, logprobs = draw(output.logits[0], u, self._banned, heat)
        return torch.stack((tokens.double(), logprobs.double()))

    def _groups(self, rows, positions, slots, table):
        """attend_gathered's groups. positions and slots [T], table [B, P]."""
        groups, held, start, first = [], {}, 0, 0
        for n in sorted({row.new for row in rows}):
            same = [row for row in rows if row.new == n]
            for few in (same[i : i + GROUP_ROWS] for i in range(0, len(same), GROUP_ROWS)):
                stop, last = start + len(few) * n, first + len(few)
                P, places, mask = -(-len(few[-1].ids) // self.page), positions[start:stop], None  # the last is longest
                if any(row.cached for row in few):
                    hidden = torch.arange(P * self.page, device=places.device) > places.view(len(few), 1, n, 1)
                    mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=places.device)
                    mask.masked_fill_(hidden, -math.inf)  # once a step: SDPA would turn bools into it in every layer
                mine = self._held.get((P, *few), {})
                groups.append(Group(start, n, table[first:last, :P], slots[start:stop], places, mask, mine))
                held |= {(P, *few): mine} if n == 1 else {}
                start, first = stop, last
        self._held = held
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
    logits_MV = head(hidden_MD).float().index_fill_(1, banned, -math.inf)  # in place: each copy would be HEAD_LOGITS
    logp_MV = logits_MV.div_(temperature).log_softmax(-1)
    entropy = torch.special.entr(logp_MV.detach().exp()).sum()
    return logp_MV.gather(1, tokens_M[:, None])[:, 0], entropy
