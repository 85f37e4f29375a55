"""bench.py runs, and each line has the ratio of its two figures; how large they are is for a quiet machine."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).with_name("bench.py")
LINE = re.compile(r"(.+?)  +([\d.]+) (s \([\d.]+\)|GiB)  +([\d.]+) (?:s \([\d.]+\)|GiB)  +(\S+)")


def run(*arguments):
    return subprocess.run([sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=240,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def test_every_line_of_the_bench_has_two_positive_costs_and_a_finite_ratio():
    done = run("--quick", "cache", "head", "share")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    found = [LINE.fullmatch(text) for text in lines]
    assert header.split() == ["compared", "ours", "other", "ratio"] and all(found), done.stdout
    assert [len([f for f in found if word in f[1]]) for word in ("turns", "prompts", "padded", "V 2,000", "peak",
                                                                 "share")] == [1, 1, 1, 2, 2, 1]
    for f in found:
        assert float(f[2]) > 0 and float(f[4]) > 0 and 0 < float(f[5]) < math.inf, f[0]
    assert float(found[-1][5]) < 1  # a share
