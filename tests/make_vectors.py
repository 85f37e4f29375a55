"""Writes vectors.jsonl: conformance vectors for Eqs. 2-8 of FACA, in plain Python float64, from the paper's equations.

You copied faca.py into another framework, or wrote your own: read vectors.jsonl line by line, feed the inputs of each
to your functions, compare with the outputs (1e-5 in float32, 1e-7 in float64). This script imports neither torch nor
faca.py, so the two can only agree if both say what the equations say. `python make_vectors.py [--out FILE]`; a second
run writes the same bytes.

Inputs, for N rollouts, Q segments, T tokens (null stands for NaN: a value that must not be read):
  reward (N,), group (N,) integers, valid (N,) bool         a void rollout is in no mean and has advantage 0
  reaction (N,Q), observed (N,Q) bool                        observed: a user turn followed this segment
  segment (N,T)                                              -1: not trainable; void rollouts train no token
  logp, old_logp (N,T), clip, denominator                    denominator null: the number of tokens with segment >= 0
  lam, eps
Outputs: outcome_advantage (N,), process_advantage and faca_advantage (N,Q), token_advantage (N,T), loss,
grad (N,T) = d loss / d logp. Sigma is the sample standard deviation (ddof 1), and a group that is constant or has one
member gets exactly 0 (both chosen; see faca.py).
"""

import argparse
import json
import math
import pathlib
import random


def normalised(values, eps):
    """(v - mean) / (std + eps), Eqs. 2 and 5; zeros for a constant group or a group of one."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + eps) for v in values]


def outputs(v):
    """The expected outputs of one vector, a group, a segment, a token at a time."""
    n, width = len(v["reward"]), len(v["reaction"][0])
    outcome, process = [0.0] * n, [[0.0] * width for _ in range(n)]
    for group in set(v["group"]):
        members = [k for k in range(n) if v["group"][k] == group and v["valid"][k]]
        for k, a in zip(members, normalised([v["reward"][k] for k in members], v["eps"]) if members else []):
            outcome[k] = a
        for q in range(width):
            reached = [k for k in members if v["observed"][k][q]]  # I(x, q), Eq. 4
            for k, a in zip(reached, normalised([v["reaction"][k][q] for k in reached], v["eps"]) if reached else []):
                process[k][q] = a
    faca = [[outcome[k] + v["lam"] * process[k][q] for q in range(width)] for k in range(n)]
    token = [[faca[k][q] if q >= 0 else 0.0 for q in v["segment"][k]] for k in range(n)]

    trained = [(k, t) for k in range(n) for t, q in enumerate(v["segment"][k]) if q >= 0]
    denominator = v["denominator"] or max(len(trained), 1)
    terms, grad = [], [[0.0] * len(row) for row in v["segment"]]
    for k, t in trained:
        a, rho = token[k][t], math.exp(v["logp"][k][t] - v["old_logp"][k][t])
        clipped = min(max(rho, 1 - v["clip"]), 1 + v["clip"])
        terms.append(min(rho * a, clipped * a))
        if rho * a < clipped * a or clipped == rho:  # the minimum depends on logp here, and d rho / d logp = rho
            grad[k][t] = -rho * a / denominator
    return {"outcome_advantage": outcome, "process_advantage": process, "faca_advantage": faca,
            "token_advantage": token, "loss": -math.fsum(terms) / denominator, "grad": grad}


class Maker:
    """Fills in what a vector does not state. Of the random module only random() is used: its stream never changes."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def pick(self, choices):
        return choices[int(self.random() * len(choices))]

    def tokens(self, segments, length):
        """Prompt, then each segment and the user turn after it; in a long segment a tool result interrupts."""
        row = [-1]
        for q in range(segments):
            spare = length - len(row) - 2 * (segments - q)
            row += ([q, -1, q] if spare >= 2 and self.random() < 0.4 else [q, q] if spare >= 1 else [q]) + [-1]
        return (row + [-1] * length)[:length]

    def logps(self, clip):
        """(logp, old_logp) inside or beyond either bound, never near it: float32 must fall on the same side."""
        while True:
            old = -round(0.7 + 3 * self.random(), 2)
            new = round(old + self.pick([0.0, 0.1, 0.6, 0.6]) * (2 * self.random() - 1), 2)
            rho = math.exp(new - old)
            if min(abs(rho - 1 - clip), abs(rho - 1 + clip)) > 0.01:
                return new, old

    def vector(self, name, reward, group=None, *, exists, reaction=None, unobserved=(), lam=0.5, eps=1e-6, clip=0.2,
               denominator=None, segment=None, length=None, logp=None, old_logp=None):
        """exists: segments of each rollout; reaction: rows as long; unobserved: rollouts nobody answered at the end."""
        width, n = max(exists), len(reward)
        reaction = reaction or [[self.pick([-1, 0, 1, 1]) for _ in range(count)] for count in exists]
        observed = [[q < count - (k in unobserved) for q in range(width)] for k, count in enumerate(exists)]
        valid = [r is not None for r in reward]
        if segment is None:
            length = length or min(12, 2 * width + 2)
            segment = [self.tokens(count if ok else 0, length) for count, ok in zip(exists, valid)]
        if logp is None:
            pairs = [[self.logps(clip) if q >= 0 else (None, None) for q in row] for row in segment]
            logp, old_logp = ([[pair[i] for pair in row] for row in pairs] for i in (0, 1))
        inputs = {"reward": reward, "group": group or [0] * n, "valid": valid, "observed": observed,
                  "reaction": [[row[q] if seen[q] else None for q in range(width)]
                               for row, seen in zip(reaction, observed)],
                  "segment": segment, "logp": logp, "old_logp": old_logp,
                  "clip": clip, "denominator": denominator, "lam": lam, "eps": eps}
        return {"name": name} | inputs | outputs(inputs)


def vectors():
    make = Maker(2608_17499)
    vector = make.vector
    four = [1, 0, 0, 0]
    yield vector("one rollout, one segment", [1], exists=[1])
    yield vector("one right of four", four, exists=[2, 2, 2, 2])
    yield vector("three right of four", [1, 1, 0, 1], exists=[2, 2, 2, 2])
    yield vector("a void rollout", [1, 0, None, 0], exists=[2, 2, 2, 2])
    yield vector("a void rollout alone in its group", [1, 0, None], [0, 0, 1], exists=[2, 2, 1])
    yield vector("one valid rollout beside voids", [None, 1, None], exists=[1, 2, 2])
    yield vector("all void", [None, None, None], exists=[1, 2, 1])
    yield vector("no trainable token", [1, 0], exists=[2, 2], segment=[[-1] * 3] * 2)
    yield vector("no trainable token, a denominator", [1, 0], exists=[1, 1], segment=[[-1]] * 2, denominator=5)
    yield vector("constant rewards, differing reactions", [1, 1, 1], exists=[2, 2, 1], reaction=[[1, -1], [0, 1], [-1]])
    yield vector("rewards constant at 0.35", [0.35] * 8, exists=[1] * 8, length=2)
    yield vector("seven 0.35 and one 0.95", [0.35] * 7 + [0.95], exists=[1] * 8, length=2)
    yield vector("constant reactions of 1", [1, 0, 0], exists=[2, 2, 2], reaction=[[1, 1]] * 3)
    yield vector("constant reactions of -1", [1, 0, 0], exists=[2, 2, 2], reaction=[[-1, -1]] * 3)
    yield vector("all reactions 0", four, exists=[2] * 4, reaction=[[0, 0]] * 4)
    yield vector("a 0 among -1", [0] * 4, exists=[1] * 4, reaction=[[-1], [-1], [0], [-1]])
    yield vector("a -1 among 0", four, exists=[1] * 4, reaction=[[0], [-1], [0], [0]])
    yield vector("a singleton at the last index", [1, 0, 0], exists=[1, 4, 2], reaction=[[1], [-1, 1, 1, -1], [0, 0]])
    yield vector("the last segment unobserved", [1, 0, 1], exists=[3, 3, 3], unobserved=[0, 2])
    yield vector("the only segment unobserved", [1, 0, 0], exists=[1, 1, 1], unobserved=[0, 1, 2])
    yield vector("unobserved 0 is not a reaction of 0", [0, 0, 0], exists=[1] * 3, reaction=[[1], [1], [0]],
                 unobserved=[2])
    yield vector("ragged", [0, 1, 1, 0, 0], exists=[5, 1, 3, 2, 4], unobserved=[1, 4])
    yield vector("a rollout without a segment", [1, 0, 0], exists=[2, 0, 1])
    yield vector("two groups interleaved", [1, 1, 0, 0, 0, 1], [0, 1, 0, 1, 0, 1], exists=[2, 1, 2, 2, 1, 2])
    yield vector("negative group ids", [1, 0, 0, 1, 1], [-1, -7, -1, -7, -7], exists=[2, 2, 1, 2, 1])
    yield vector("unsorted ids far apart", [1, 0, 0, 1, 0, 0], [90, 3, -10**12, 90, 3, 90], exists=[1, 2, 2, 1, 2, 2])
    yield vector("groups of 1, 2, 3", [1, 1, 0, 0, 1, 0], [5, 2, 9, 2, 9, 9], exists=[2, 2, 1, 1, 2, 2])
    yield vector("two groups, constants 0 and 1", [0, 1, 0, 1], [4, 3, 4, 3], exists=[1, 2, 2, 1])
    yield vector("real rewards of both signs", [-2.5, 0.25, 3.0, 0.25], exists=[1, 2, 1, 2])
    yield vector("large rewards", [1000.0, 1001.0, 1002.5], exists=[1, 1, 1])
    for lam in (0, 0.1, 0.5, -0.5):
        yield vector(f"lambda {lam}", [1, 0, 0, None], exists=[2, 2, 2, 1], lam=lam, unobserved=[1])
    yield vector("eps 0.5, to see where it stands", four, exists=[2, 2, 1, 1], eps=0.5)
    yield vector("eps 0.01", [1, 0], exists=[2, 2], eps=0.01, reaction=[[1, 0], [-1, 1]])
    for sign, reward in (("positive", [1, 0]), ("negative", [0, 1])):  # only the first rollout trains
        rho = [0.3, 0.75, 0.85, 1.0, 1.15, 1.25, 3.0]
        yield vector(f"ratios inside and beyond both bounds, {sign} advantage", reward, exists=[1, 1], lam=0.1,
                     reaction=[[1], [1]], segment=[[0] * 7, [-1] * 7],
                     logp=[[round(math.log(r) - 1.5, 3) for r in rho], [None] * 7], old_logp=[[-1.5] * 7, [None] * 7])
    yield vector("ratios beyond both bounds, no advantage", [1, 1], exists=[1, 1], reaction=[[0], [0]],
                 segment=[[0, 0], [-1, 0]], logp=[[-0.2, -3.1], [None, -1.0]], old_logp=[[-1.1, -1.1], [None, -1.0]])
    yield vector("first update, every ratio 1", [1, 0], exists=[1, 1], segment=[[-1, 0, 0], [-1, 0, -1]],
                 logp=[[None, -1.25, -0.5], [None, -2.0, None]], old_logp=[[None, -1.25, -0.5], [None, -2.0, None]])
    yield vector("a global denominator", [1, 0, 0], exists=[2, 1, 2], denominator=100)
    yield vector("a denominator below the token count", [1, 0, 1], exists=[2, 2, 2], denominator=2.5)
    yield vector("clip 0.1", [1, 0, 0], exists=[2, 2, 2], clip=0.1)
    yield vector("clip 0.4", [1, 0, 1], exists=[2, 2, 2], clip=0.4)
    yield vector("one token", [1, 0], exists=[1, 1], segment=[[0], [-1]])
    yield vector("a tool result inside a segment", [0, 1], exists=[2, 1],
                 segment=[[-1, 0, -1, 0, -1, 1], [-1, 0, 0, -1, -1, 0]])
    yield vector("a group of eight", [1, 0, 0, 1, 1, 0, 1, 1], exists=[2] * 8, unobserved=[2, 5], length=4)
    for i in range(5):
        n = 2 + int(make.random() * 4)
        exists = [1 + int(make.random() * 3) for _ in range(n)]
        yield vector(f"random {i}", [make.pick([0, 1, 1, 0.5, None]) for _ in range(n)],
                     [make.pick([-3, 0, 11]) for _ in range(n)], exists=exists, lam=make.pick([0.1, 0.5, -0.5]),
                     unobserved=[k for k in range(n) if make.random() < 0.4])
    yield vector("nine rollouts, three groups, five segments", [1, 0, 0, None, 1, 1, 0, 1, 1],
                 [7, -2, 7, 7, -2, 0, 0, -2, 0], exists=[5, 2, 4, 3, 1, 5, 3, 2, 4], unobserved=[0, 4, 5], length=12)


def rounded(x):
    """Eight digits: the last bits, in which math libraries differ, stay out, and so does what is left of a - a."""
    if isinstance(x, float):
        return float(f"{x:.8g}") if abs(x) > 1e-12 else 0
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return [rounded(y) for y in x] if isinstance(x, list) else x


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("vectors.jsonl"))
    lines = [json.dumps(rounded(v), separators=(",", ":")) + "\n" for v in vectors()]
    parser.parse_args().out.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
