"""FACA, Feedback-Aware Credit Assignment: the whole algorithm, on tensors alone.

"Towards Better Agents for Multi-Turn User Interaction: The Next User Turn Is More Than Context", arXiv 2608.17499.
This file imports torch and the standard library only, writes into none of its arguments, prints nothing and knows no
tokenizer and no process group: copy it whole into verl, TRL or your own loop (tests/vectors.jsonl proves the copy).

    Table 1   strategy z of a user turn -> reaction f in {-1, 0, +1}                      REACTION, reaction_of
    Eq. 2     A^o_k     = (R_k - mu_R(x)) / (sigma_R(x) + eps)                            outcome_advantage
    Eq. 4     B^p(x, q) = {f_{i,q} : rollout i of prompt x has a reaction to segment q}   the mask observed_NQ
    Eq. 5     A^p_{k,q} = (f_{k,q} - mu_f(x, q)) / (sigma_f(x, q) + eps)                  process_advantage
    Eq. 6     A_{k,q}   = A^o_k + lambda A^p_{k,q}                                        faca_advantage
    Eq. 7-8   loss      = -E_{k,t}[min(rho A, clip(rho, 1 - clip, 1 + clip) A)]           token_advantage, clipped_loss

Axes: N rollouts (all groups of a step together), Q user-to-user (U2U) segments, padded, T tokens, padded. A segment is
all that the agent emits between two user messages; its reaction is read from the user turn that follows it.

Chosen here, because the paper does not say: sigma is the sample standard deviation (ddof 1); eps is 1e-6; an invalid
label on a real user turn is a reaction of 0 and stays in B^p; a segment with no next user turn is in no B^p and has
A^p = 0; the clip range is 0.2 on both sides; E_{k,t} is the mean over all trainable tokens of the whole batch.

One prompt, three rollouts. The first has three segments, and its user never answered the third:

>>> reward = torch.tensor([1.0, 0.0, 0.0])
>>> strategies = [["reveal_piece", "confirm", None], ["ask_clarification", "confirm"], ["reveal_piece", "change_mind"]]
>>> reaction = torch.tensor([[reaction_of(z) for z in (row + [None])[:3]] for row in strategies])
>>> observed = torch.tensor([[z is not None for z in (row + [None])[:3]] for row in strategies])
>>> reaction.tolist()
[[1, 1, 0], [-1, 1, 0], [1, -1, 0]]
>>> advantage = faca_advantage(reward, reaction, observed, torch.zeros(3, dtype=torch.long), lam=0.5)
>>> [[round(a, 3) for a in row] for row in advantage.tolist()]
[[1.443, 1.443, 1.155], [-1.155, -0.289, -0.577], [-0.289, -1.155, -0.577]]

The first rollout's tokens: prompt, segment 0 (two tokens), user, segment 1 (a tool call, its result, a text), user,
segment 2. The segment index is mask and broadcast index in one, -1 for every token the agent did not sample:

>>> segment = torch.tensor([[-1, -1, 0, 0, -1, 1, -1, 1, -1, 2]])
>>> [round(a, 3) for a in token_advantage(advantage[:1], segment)[0].tolist()]
[0.0, 0.0, 1.443, 1.443, 0.0, 1.443, 0.0, 1.443, 0.0, 1.155]
"""

import math
from collections import Counter

import torch
from torch import Tensor

# Table 1, complete. "invalid" is what extraction calls a malformed, unknown or missing label.
REACTION: dict[str, int] = {
    "confirm": +1,             # progress
    "close": +1,               # completion
    "reveal_piece": +1,        # requested state elicited
    "be_vague": 0,             # ambiguous
    "ask_clarification": -1,   # local interaction friction
    "challenge_solution": -1,  # proposal challenged
    "change_mind": -1,         # goal friction, possibly exogenous
}


def reaction_of(strategy) -> int:
    """Table 1 and Eq. 3: the reaction f of a strategy; 0 for whatever is not one of the seven labels, of any type."""
    return REACTION.get(strategy, 0) if isinstance(strategy, str) else 0


# ---------------------------------------------------------------------------------------------------- advantages


def outcome_advantage(reward_N: Tensor, group_N: Tensor, valid_N: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Eq. 2: A^o_k = (R_k - mu_R(x)) / (sigma_R(x) + eps) over the valid rollouts of each prompt. Returns (N,).

    reward_N: any real numbers; group_N: the prompt of each rollout, any integers in any order, groups of any size;
    valid_N: bool, False for a void rollout, which is in no mean and gets 0, whatever its reward (NaN included).
    A group that is constant or has one member gets exactly 0. Raises ValueError for shapes or types that do not fit.
    """
    valid_N = _valid(reward_N, group_N, valid_N)
    return _normalise_within_group(reward_N[:, None], valid_N[:, None], group_N, eps)[:, 0]


def process_advantage(reaction_NQ: Tensor, observed_NQ: Tensor, group_N: Tensor, valid_N: Tensor | None = None,
                      eps: float = 1e-6) -> Tensor:
    """Eqs. 4-5: A^p_{k,q} = (f_{k,q} - mu_f(x,q)) / (sigma_f(x,q) + eps) over B^p(x,q). Returns (N, Q).

    reaction_NQ: f of the user turn that follows segment q of rollout k; observed_NQ: bool, there was such a turn.
    B^p(x,q) holds the valid rollouts of prompt x observed at q; what is not in it gets 0, and so does a singleton or
    constant B^p. The immediate reaction only: nothing is summed over turns. Raises ValueError as outcome_advantage.
    """
    _need(reaction_NQ.dim() == 2, f"reaction_NQ must be (N, Q), is {tuple(reaction_NQ.shape)}")
    _need_mask(observed_NQ, reaction_NQ.shape, "observed_NQ")
    valid_N = _valid(reaction_NQ.sum(1), group_N, valid_N)
    return _normalise_within_group(reaction_NQ, observed_NQ & valid_N[:, None], group_N, eps)


def faca_advantage(reward_N: Tensor, reaction_NQ: Tensor, observed_NQ: Tensor, group_N: Tensor, lam: float = 0.5,
                   valid_N: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Eq. 6: A_{k,q} = A^o_k + lambda A^p_{k,q}. Returns (N, Q), one advantage for every token of segment q.

    lam 0 is Interactive GRPO, the outcome advantage bit for bit; a negative lam is the sign-reversed control. Rows that
    are not valid are 0. Raises ValueError for lam above 0.5 (the paper's cap, which keeps the outcome dominant) or not
    finite, and as process_advantage.
    """
    check_lam(lam)
    outcome_N = outcome_advantage(reward_N, group_N, valid_N, eps)
    process_NQ = process_advantage(reaction_NQ, observed_NQ, group_N, valid_N, eps)
    outcome_NQ = outcome_N[:, None].expand(process_NQ.shape)
    return outcome_NQ.clone() if lam == 0 else outcome_NQ + lam * process_NQ.to(outcome_NQ.dtype)


def check_lam(lam: float) -> None:
    """Raises ValueError unless lambda is finite and at most 0.5 (section 3; negative is the sign-reversed control)."""
    _need(math.isfinite(lam) and lam <= 0.5, f"lambda must be finite and at most 0.5 (the paper's cap), is {lam}")


def token_advantage(advantage_NQ: Tensor, segment_NT: Tensor) -> Tensor:
    """A_{k,q(t)} of Eq. 8: the advantage of the segment that token t belongs to, 0 where segment is -1. Returns (N, T).

    Raises ValueError for a segment index outside -1..Q-1: a token that no advantage was computed for.
    """
    _need(advantage_NQ.dim() == segment_NT.dim() == 2 and len(segment_NT) == len(advantage_NQ),
          f"segment_NT {tuple(segment_NT.shape)} does not fit advantage_NQ {tuple(advantage_NQ.shape)}")
    _need_segments(segment_NT, advantage_NQ.shape[1])
    none_N1 = advantage_NQ.new_zeros(len(advantage_NQ), 1)  # what segment -1 gathers
    return torch.cat([none_N1, advantage_NQ], 1).gather(1, segment_NT.long() + 1)


def _normalise_within_group(x_NC: Tensor, member_NC: Tensor, group_N: Tensor, eps: float) -> Tensor:
    """z = (x - mean) / (std + eps) over the members with the same group and the same column; 0 for non-members.

    Serves Eq. 2 (one column) and Eq. 5 (a column for each U2U index). Two passes, in float64: E[x^2] - E[x]^2 would
    leave a residue that 1 / (std + eps) blows up. A constant group is detected as such (its largest member equals its
    smallest) rather than hoped to cancel, and a group of one is constant.
    """
    _need(eps >= 0, f"eps must not be negative, is {eps}")
    _need(bool(torch.isfinite(x_NC[member_NC]).all()), "a valid rollout's reward or reaction is NaN or infinite")
    out_dtype = x_NC.dtype if x_NC.is_floating_point() else torch.float32
    index_N, groups = _group_index(group_N)
    index_NC = index_N[:, None].expand(x_NC.shape)
    x_NC = torch.where(member_NC, x_NC.double(), 0.0)  # what stands at non-members, NaN included, ends here

    def per_group(y_NC: Tensor, reduce: str = "sum", identity: float = 0.0) -> Tensor:
        y_GC = y_NC.new_full((groups, y_NC.shape[1]), identity)
        return y_GC.scatter_reduce(0, index_NC, y_NC, reduce).gather(0, index_NC)

    count_NC = per_group(member_NC.double())
    centred_NC = torch.where(member_NC, x_NC - per_group(x_NC) / count_NC.clamp(min=1), 0.0)
    std_NC = (per_group(centred_NC.square()) / (count_NC - 1).clamp(min=1)).sqrt()
    low_NC = per_group(torch.where(member_NC, x_NC, math.inf), "amin", math.inf)
    high_NC = per_group(torch.where(member_NC, x_NC, -math.inf), "amax", -math.inf)
    return torch.where(low_NC < high_NC, centred_NC / (std_NC + eps), 0.0).to(out_dtype)


def _group_index(group_N: Tensor) -> tuple[Tensor, int]:
    """Any integers in any order -> (N,) in 0..G-1, and G."""
    ids_G, index_N = torch.unique(group_N, return_inverse=True)
    return index_N, len(ids_G)


# ---------------------------------------------------------------------------------------------------------- loss


LOG_RATIO_CAP = 20.0  # chosen: exp overflows at 88 in float32, and one such token would make the whole gradient NaN


def clipped_loss(logp_NT: Tensor, old_logp_NT: Tensor, advantage_NT: Tensor, mask_NT: Tensor, clip: float = 0.2,
                 denominator: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Eqs. 7-8: -sum_{k,t} min(rho A, clip(rho, 1 - clip, 1 + clip) A) / denominator, rho = exp(logp - old_logp).

    mask_NT: bool, True at the tokens the agent sampled in rollouts that are valid. Only those are read, so whatever
    stands elsewhere, NaN included, reaches neither value nor gradient. Gradient flows through logp_NT alone.
    denominator: the number of trainable tokens of the whole batch, over all micro-batches and ranks, so that their
    losses add up to the batch's; by default this call's own count. With no trainable token the loss is 0 and has a
    gradient of 0. Half precision is raised to float32 before anything is subtracted or summed; log rho is capped at 20.

    Returns (loss, stats), stats detached, each with the way it combines over micro-batches and ranks:
      tokens    sum  trainable tokens
      clipped   sum  tokens whose gradient the clip cut off (rho beyond the bound on the side that A pushes to)
      k3        sum  rho - 1 - log rho, an estimate of KL(old || new) that is never negative
      ratio_max max  largest rho (-inf if there is no token)
      ratio_min min  smallest rho (+inf if there is no token)
    Raises ValueError for shapes that differ, a mask that is not bool, a clip or denominator that is not positive.
    """
    for name, x in (("old_logp_NT", old_logp_NT), ("advantage_NT", advantage_NT)):
        _need(x.shape == logp_NT.shape, f"{name} {tuple(x.shape)} does not fit logp_NT {tuple(logp_NT.shape)}")
    _need_mask(mask_NT, logp_NT.shape, "mask_NT")
    _need(clip > 0, f"clip must be above 0, is {clip}")
    _need(denominator is None or 0 < denominator < math.inf, f"denominator must be above 0, is {denominator}")

    old, advantage = old_logp_NT.detach()[mask_NT], advantage_NT.detach()[mask_NT]
    log_ratio = (_at_least_float(logp_NT[mask_NT]) - _at_least_float(old)).clamp(max=LOG_RATIO_CAP)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    tokens = mask_NT.sum()
    loss = -surrogate.sum() / (tokens.clamp(min=1) if denominator is None else denominator)

    with torch.no_grad():
        stats = {
            "tokens": tokens,
            "clipped": (((ratio > 1 + clip) & (advantage > 0)) | ((ratio < 1 - clip) & (advantage < 0))).sum(),
            "k3": (log_ratio.expm1() - log_ratio).sum(),  # rho - 1 would cancel near rho = 1
            "ratio_max": ratio.max() if len(ratio) else ratio.new_tensor(-math.inf),
            "ratio_min": ratio.min() if len(ratio) else ratio.new_tensor(math.inf),
        }
    return loss, {name: value.detach() for name, value in stats.items()}


# ------------------------------------------------------------------------------------------------ Table 4's controls


def shifted(reaction_NQ: Tensor, observed_NQ: Tensor, exists_NQ: Tensor) -> tuple[Tensor, Tensor]:
    """The temporal control, "one U2U shifted" (chosen): segment q takes the reaction to segment q-1, the first none.

    exists_NQ: bool, the rollout has that segment; an observed reaction is never moved onto a segment that is not there.
    Returns (reaction_NQ, observed_NQ).
    """
    _need_mask(observed_NQ, reaction_NQ.shape, "observed_NQ")
    _need_mask(exists_NQ, reaction_NQ.shape, "exists_NQ")
    moved_NQ, seen_NQ = torch.zeros_like(reaction_NQ), torch.zeros_like(observed_NQ)
    seen_NQ[:, 1:] = observed_NQ[:, :-1] & exists_NQ[:, 1:]
    moved_NQ[:, 1:] = torch.where(seen_NQ[:, 1:], reaction_NQ[:, :-1], moved_NQ[:, 1:])
    return moved_NQ, seen_NQ


def randomized(reaction_NQ: Tensor, observed_NQ: Tensor, generator: torch.Generator) -> Tensor:
    """The polarity control (chosen): a seeded permutation of the observed reactions across the whole batch.

    Reaction frequency is kept, and so is the place of each observation. Void rollouts must not be marked observed.
    """
    _need_mask(observed_NQ, reaction_NQ.shape, "observed_NQ")
    values = reaction_NQ[observed_NQ]
    order = torch.randperm(len(values), generator=generator, device=generator.device).to(values.device)
    return torch.zeros_like(reaction_NQ).masked_scatter(observed_NQ, values[order])


# ----------------------------------------------------------------------------------------------------- telemetry


def segment_tokens(segment_NT: Tensor, segments: int) -> Tensor:
    """The trainable tokens in each segment, counted in the tensor that the loss reads. Returns (N, Q) integers."""
    _need_segments(segment_NT, segments)
    index_NT = segment_NT.long() + 1
    return index_NT.new_zeros(len(segment_NT), segments + 1).scatter_add(1, index_NT, torch.ones_like(index_NT))[:, 1:]


def credit_telemetry(reward_N: Tensor, reaction_NQ: Tensor, observed_NQ: Tensor, exists_NQ: Tensor, tokens_NQ: Tensor,
                     group_N: Tensor, lam: float, valid_N: Tensor | None = None,
                     strategies: list[list[str | None]] | None = None, eps: float = 1e-6) -> dict[str, float]:
    """What the paper reports of its credit (Figures 4-6), for one step. Void rollouts count nowhere.

    exists_NQ comes from the dialogues' records, tokens_NQ from the token tensors (segment_tokens). Where the two do not
    name the same segments it raises ValueError: credit would fall on the wrong tokens. Shares weigh segments equally:

      segments           U2U segments of valid rollouts
      observed           of these, those a user turn followed: the members of all B^p
      positive_share     reaction +1 / observed            (negative_share alike)
      coverage           A^p not 0 / segments: nonzero normalised process advantage
      groups_correct     groups whose rewards are all equal and above 0;  groups_wrong: all equal and not above 0;
      groups_mixed       groups with differing rewards: the only ones with outcome credit. Groups without a valid
                         rollout are in none of the three, and a group of one is homogeneous
      process_share      sum |lam A^p| / sum (|A^o| + |lam A^p|) over segments; 0 if both are 0 everywhere
      strategy/LABEL     user turns after a segment with that label, "invalid" for what Table 1 does not know
    """
    valid_N = _valid(reward_N, group_N, valid_N)
    _need_mask(exists_NQ, reaction_NQ.shape, "exists_NQ")
    _need(tokens_NQ.shape == exists_NQ.shape, f"tokens_NQ {tuple(tokens_NQ.shape)} does not fit exists_NQ")
    _need(strategies is None or len(strategies) == len(reward_N), f"{len(strategies or [])} rows of strategies")
    check_lam(lam)
    wrong = ((tokens_NQ > 0) != exists_NQ).nonzero()
    _need(len(wrong) == 0, f"the records name {int(exists_NQ.sum())} segments, the token tensors hold "
                           f"{int((tokens_NQ > 0).sum())}; first difference at [rollout, segment] {wrong[:1].tolist()}")
    _need(not (observed_NQ & ~exists_NQ).any(), "a reaction is marked observed on a segment that does not exist")
    exists_NQ, observed_NQ = exists_NQ & valid_N[:, None], observed_NQ & valid_N[:, None]
    outcome_N = outcome_advantage(reward_N, group_N, valid_N, eps)
    process_NQ = process_advantage(reaction_NQ, observed_NQ, group_N, valid_N, eps)
    process_l1 = (lam * process_NQ)[exists_NQ].abs().sum().item()
    outcome_l1 = outcome_N[:, None].expand(exists_NQ.shape)[exists_NQ].abs().sum().item()
    segments, observed = int(exists_NQ.sum()), int(observed_NQ.sum())
    out = {
        "segments": segments,
        "observed": observed,
        "positive_share": int((reaction_NQ[observed_NQ] > 0).sum()) / max(observed, 1),
        "negative_share": int((reaction_NQ[observed_NQ] < 0).sum()) / max(observed, 1),
        "coverage": int((process_NQ[exists_NQ] != 0).sum()) / max(segments, 1),
        **_group_kinds(reward_N[valid_N], group_N[valid_N]),
        "process_share": process_l1 / ((process_l1 + outcome_l1) or 1.0),
    }
    labels = Counter(z if isinstance(z, str) and z in REACTION else "invalid"
                     for row, valid in zip(strategies or [], valid_N.tolist()) if valid for z in row if z is not None)
    return out | {f"strategy/{label}": labels[label] for label in (*REACTION, "invalid") if strategies is not None}


def _group_kinds(reward_N: Tensor, group_N: Tensor) -> dict[str, int]:
    """How many groups are all-correct, all-wrong and mixed."""
    index_N, groups = _group_index(group_N)
    reward_N = reward_N.double()
    low_G = reward_N.new_full((groups,), math.inf).scatter_reduce(0, index_N, reward_N, "amin")
    high_G = reward_N.new_full((groups,), -math.inf).scatter_reduce(0, index_N, reward_N, "amax")
    correct, mixed = int(((low_G == high_G) & (low_G > 0)).sum()), int((low_G < high_G).sum())
    return {"groups_correct": correct, "groups_wrong": groups - correct - mixed, "groups_mixed": mixed}


# -------------------------------------------------------------------------------------------------------- checks


def _at_least_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _need(true: bool, message: str) -> None:
    if not true:
        raise ValueError(message)


def _need_mask(mask: Tensor, shape: torch.Size, name: str) -> None:
    _need(mask.dtype == torch.bool, f"{name} must be a bool tensor, is {mask.dtype}")
    _need(mask.shape == shape, f"{name} must have shape {tuple(shape)}, has {tuple(mask.shape)}")


def _need_segments(segment_NT: Tensor, count: int) -> None:
    _need(not segment_NT.is_floating_point() and segment_NT.dtype != torch.bool,
          f"segment_NT must hold integers (a U2U index, -1 for a token not trained), is {segment_NT.dtype}")
    _need(segment_NT.dim() == 2, f"segment_NT must be (N, T), is {tuple(segment_NT.shape)}")
    segment_NT = segment_NT.long()
    wrong = segment_NT[(segment_NT < -1) | (segment_NT >= count)]
    _need(len(wrong) == 0, f"segment_NT must be -1..{count - 1}, has {wrong[:1].tolist()}")


def _valid(x_N: Tensor, group_N: Tensor, valid_N: Tensor | None) -> Tensor:
    """valid_N, by default all True, once x_N, group_N and valid_N are seen to have one shape (N,)."""
    _need(x_N.dim() == 1 and group_N.shape == x_N.shape,
          f"{tuple(x_N.shape)} values need as many group ids, group_N is {tuple(group_N.shape)}")
    _need(not group_N.is_floating_point(), f"group_N must hold integers, is {group_N.dtype}")
    if valid_N is None:
        return torch.ones_like(group_N, dtype=torch.bool)
    _need_mask(valid_N, x_N.shape, "valid_N")
    return valid_N
