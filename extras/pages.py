"""The sampler's pages: who uses which, and attention over them, by torch's paged kernel or gathered into SDPA.

Axes as in sampler.py: B rows, n new tokens of a row, T packed tokens, P pages, L = P * page positions, d head_dim.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

ATTENTION = "paged_sampler"  # our name in transformers' registry; no mask function has it, so transformers builds none
KERNEL_PAGE = 256  # flash-attention 2, the kernel that torch brings, reads pages of a multiple of so many tokens


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


def paged_attention(module, query, key, value, attention_mask, pages, slots, attend, scaling=None, **options):
    """transformers' attention interface: query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    The forward's **kwargs bring the rest: pages, each layer's (keys, values); slots [T], where in [pages * page] each
    token's go; attend, one of the two functions below with what it needs to know of the rows.
    """
    refuse_unknown(options)
    for stored, new in zip(pages[module.layer_idx], (key, value)):
        stored.flatten(0, 1).index_copy_(0, slots, new[0].transpose(0, 1))
    return attend(query[0].transpose(0, 1), *pages[module.layer_idx], scaling)[None], None


@dataclass
class Group:
    """A few rows with equally many new tokens, attended together."""

    start: int  # of its first token in T
    n: int  # new tokens of each row
    table: torch.Tensor  # [B, P] pages
    slots: torch.Tensor  # [B * n] where in [pages * page] the new tokens are
    places: torch.Tensor  # [B * n] where in L they are
    mask: torch.Tensor | None  # [B, 1, n, L] added to the scores; None where nothing is cached, and causal will do
    held: dict  # by layer (its keys' id): what was gathered, where the same rows decoded in the step before


def attend_gathered(query, keys, values, scaling, groups):
    """query [T, heads, d], keys and values [pages, page, kv_heads, d] -> [T, heads, d]: the reference, on any device.

    Where the same rows decode again, their new token alone is copied to what was gathered before.
    """
    outputs = []
    for g in groups:
        B = len(g.table)
        q = query[g.start : g.start + B * g.n].unflatten(0, (B, g.n)).transpose(1, 2)  # [B, heads, n, d]
        if id(keys) in g.held:
            k, v = g.held[id(keys)]
            for kv, pages in ((k, keys), (v, values)):
                kv[torch.arange(B), :, g.places] = pages.flatten(0, 1).index_select(0, g.slots)
        else:
            k, v = (kv.index_select(0, g.table.flatten()).view(B, -1, *kv.shape[2:]).transpose(1, 2).contiguous()
                    for kv in (keys, values))  # [B, kv_heads, L, d]
            if g.n == 1:
                g.held[id(keys)] = k, v
        if g.mask is None:
            k, v = k[:, :, : g.n], v[:, :, : g.n]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=g.mask, is_causal=g.mask is None, scale=scaling,
                                             enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * n, heads, d]
    return torch.cat(outputs)


def attend_in_place(query, keys, values, scaling, starts, lengths, table, most):
    """The same by torch's kernel: starts [B + 1] in T, lengths [B] with the new tokens, table [B, P], all int32.

    A row's n tokens are the last n of its length. `most` is the largest n: where it is 1 no token has a later one to
    hide, and without the causal flag the kernel reads a kv head once for all the query heads that share it. One split:
    with more, the paged kernel of torch 2.13 leaves rows unwritten (pytorch issue 194167), and a row's result would
    depend on the others'. The kernel wants a cu_seq_k, but goes by seqused_k.
    """
    window, longest = (-1, -1) if most == 1 else (-1, 0), table.shape[1] * keys.shape[1]
    return varlen_attn(query, keys, values, starts, starts, most, longest, scale=scaling, window_size=window,
                       enable_gqa=True, seqused_k=lengths, block_table=table, num_splits=1)


AttentionInterface.register(ATTENTION, paged_attention)


def bucket(rows):
    """The batch size that a decode step of so many rows is padded to: 1, 2, 4, 8, 12, 16, 24, 32, 48, ... (chosen)."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 16 and rows <= power * 3 // 4 else power
