"""faca.py against hand-computed numbers, vectors.jsonl (made without faca.py) and properties of any batch."""

import ast
import doctest
import functools
import itertools
import json
import math
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))
import faca  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("fixed")  # the same examples in every run, so that a red run can be repeated
VECTORS = [json.loads(line) for line in (TESTS / "vectors.jsonl").read_text(encoding="utf-8").splitlines()]
NAN, INF, F64 = math.nan, math.inf, torch.float64
GROUP = torch.zeros(9, dtype=torch.long)  # one prompt
bools = functools.partial(torch.tensor, dtype=torch.bool)
TABLE_1 = {"confirm": 1, "close": 1, "reveal_piece": 1, "be_vague": 0,
           "ask_clarification": -1, "challenge_solution": -1, "change_mind": -1}
LOG = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=F64).log()  # of four ratios, and an advantage of either sign
SIGNS = torch.tensor([[1, -1, 1, -1]], dtype=F64)
OLD, ALL4 = torch.zeros_like(LOG), torch.ones(1, 4, dtype=torch.bool)


def floats(x, dtype=F64):
    """Nested lists to a tensor; None, a value that must not be read, to NaN."""
    return torch.tensor(json.loads(json.dumps(x).replace("null", "NaN")), dtype=dtype)


def close(actual, expected, atol=1e-4):
    expected = torch.as_tensor(expected, dtype=F64)
    return actual.shape == expected.shape and torch.allclose(actual.double(), expected, rtol=0, atol=atol)


def loss_and_grad(logp, old_logp, advantage, mask, **options):
    logp = logp.clone().requires_grad_()
    loss, stats = faca.clipped_loss(logp, old_logp, advantage, mask, **options)
    loss.backward()
    return loss.detach(), logp.grad, stats


def refused(function, *arguments, **more):
    with pytest.raises(ValueError) as e:
        function(*arguments, **more)
    assert str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("v", VECTORS, ids=[v["name"] for v in VECTORS])
def test_conformance_vector(v, dtype):
    reward, reaction, logp, old_logp = (floats(v[k], dtype) for k in ("reward", "reaction", "logp", "old_logp"))
    group, segment, observed, valid = (torch.tensor(v[k]) for k in ("group", "segment", "observed", "valid"))
    advantage = faca.faca_advantage(reward, reaction, observed, group, v["lam"], valid, v["eps"])
    token = faca.token_advantage(advantage, segment)
    loss, grad, _ = loss_and_grad(logp, old_logp, token, segment >= 0, clip=v["clip"], denominator=v["denominator"])
    actual = {"outcome_advantage": faca.outcome_advantage(reward, group, valid, v["eps"]),
              "process_advantage": faca.process_advantage(reaction, observed, group, valid, v["eps"]),
              "faca_advantage": advantage, "token_advantage": token, "loss": loss, "grad": grad}
    tolerance = 1e-7 if dtype == F64 else 1e-5  # the file has 8 digits
    for name, x in actual.items():
        assert x.dtype == dtype and close(x, v[name], tolerance), name
        if name in ("outcome_advantage", "process_advantage"):  # constant, singleton, unobserved, void: exactly 0
            assert torch.equal(x == 0, torch.tensor(v[name]) == 0), name


def test_make_vectors_regenerates_the_committed_file(tmp_path):
    subprocess.run([sys.executable, TESTS / "make_vectors.py", "--out", tmp_path / "again"], check=True)
    assert (tmp_path / "again").read_bytes() == (TESTS / "vectors.jsonl").read_bytes()
    assert len(VECTORS) >= 40 and len({v["name"] for v in VECTORS}) == len(VECTORS)


def test_faca_imports_torch_and_the_standard_library_only_and_make_vectors_not_even_torch():
    for path, third_party in ((faca.__file__, {"torch"}), (TESTS / "make_vectors.py", set())):
        nodes = list(ast.walk(ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == third_party


def test_the_worked_example_of_the_docstring_is_true():
    result = doctest.testmod(faca)
    assert result.attempted >= 5 and result.failed == 0


def test_table_1_and_everything_else_is_0():
    assert faca.REACTION == TABLE_1 == {z: faca.reaction_of(z) for z in TABLE_1}
    assert [faca.reaction_of(z) for z in ("invalid", "Confirm", "", None, 1, ["close"], {"confirm": 1})] == [0] * 7


@pytest.mark.parametrize("values, expected", [
    ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),           # mean 1/4, sigma sqrt(.75 / 3) = 1/2; ddof 0 would give 1.732
    ([-1, -1, 0, -1], [-0.5, -0.5, 1.5, -0.5]),        # TRL PR 5026: dividing by a negative mean would flip the sign
    ([1, 0, None, 0], [1.1547, -0.5774, 0, -0.5774]),  # TRL PR 5773: mean 1/3, sigma 1/sqrt 3, the void poisons none
    ([1, 1, 0], [0.5774, 0.5774, -1.1547]), ([1, 1, None], [0, 0, 0]),  # neutral is a reaction, unobserved is none
    ([1, 0, -1], [1, 0, -1]), ([1], [0]), ([None, 1], [0, 0]), ([None], [0]), ([-1, -1], [0, 0]), ([0, 0], [0, 0]),
    ([0.35] * 8, [0] * 8), ([0.35] * 8 + [None], [0] * 9),  # 0.029 in float32 where 0 is hoped for, not detected
    ([0.35] * 7 + [0.95], [-0.3536] * 7 + [2.4749]),   # NeMo-RL PR 4161 had 7428; here -1/sqrt 8 and 7/sqrt 8
    ([1e6] * 7 + [1e6 + 1], [-0.3536] * 7 + [2.4749])])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_normalisation_within_a_group_by_hand(values, expected, dtype):
    x, member, group = floats(values, dtype), bools([v is not None for v in values]), GROUP[:len(values)]
    for a in (faca.outcome_advantage(x, group, member),
              faca.process_advantage(x[:, None], member[:, None], group)[:, 0],
              faca.process_advantage(x[:, None], torch.ones_like(member)[:, None], group, member)[:, 0]):
        assert close(a, expected) and torch.equal(a == 0, torch.tensor(expected) == 0)


def test_faca_advantage_by_hand():
    on = torch.ones(4, 2, dtype=torch.bool)
    # UserRL: the whole group's reactions 0 in a mixed group, where scaling by the credit sum kills the sign
    actual = faca.faca_advantage(floats([1, 0, 0, 0]), torch.zeros(4, 2), on, GROUP[:4])
    assert close(actual, [[1.5, 1.5]] + [[-0.5, -0.5]] * 3)
    # Credit is local, a later reaction does not flow back, and a void rollout's reaction is in no B^p.
    actual = faca.faca_advantage(floats([1, 1, 1, None]), torch.tensor([[0, 1], [0, 0], [0, -1], [1, 1]]), on,
                                 GROUP[:4], valid_N=bools([1, 1, 1, 0]))  # lambda 0.5 by default
    assert close(actual, [[0, 0.5], [0, 0], [0, -0.5], [0, 0]])


def test_lambda_0_is_the_outcome_advantage_bit_for_bit_and_a_negative_one_reverses_the_process():
    torch.manual_seed(0)
    reward, group, reaction = torch.rand(40), torch.randint(5, (40,)), torch.randint(-1, 2, (40, 3))
    valid, observed = torch.rand(40) < 0.8, torch.rand(40, 3) < 0.8
    outcome = faca.outcome_advantage(reward, group, valid)[:, None].repeat(1, 3)
    none, plus, minus = (faca.faca_advantage(reward, reaction, observed, group, x, valid) for x in (0, 0.5, -0.5))
    assert torch.equal(none, outcome) and none.is_contiguous() and outcome.abs().max() > 1
    assert close(plus + minus, 2 * outcome.double(), 1e-6) and (plus - minus).abs().max() > 0.5
    assert [faca.check_lam(x) for x in (0.5, 0, -0.5, -3.0)] == [None] * 4


def test_clipped_loss_by_hand():
    # min(rho A, clip(rho) A): 1.2 (cut off), -1.5, 0.5, -0.8 (cut off); their sum -0.6, over 4 tokens
    loss, grad, stats = loss_and_grad(LOG, OLD, SIGNS, ALL4)
    assert close(loss, 0.15, 1e-12) and close(grad, [[0, 0.375, -0.125, 0]], 1e-12)  # -rho A / 4
    assert stats["tokens"] == 4 and stats["clipped"] == 2
    assert close(stats["k3"], 0.575364, 1e-6)  # 2 (.5 - ln 1.5) + 2 (-.5 + ln 2)
    assert close(stats["ratio_max"], 1.5, 1e-12) and close(stats["ratio_min"], 0.5, 1e-12)
    wide, grad, stats = loss_and_grad(LOG, OLD, SIGNS + 1, ALL4, clip=0.6, denominator=2)
    assert close(wide, -2, 1e-12) and close(grad, [[-1.5, 0, -0.5, 0]], 1e-12) and stats["clipped"] == 0


def test_the_first_update_has_loss_0_and_a_gradient_through_logp_alone():
    # open-r1 #239: the loss is minus the mean advantage, the gradient is not. slime PR 179: the old logprob is data.
    logp, old_logp, advantage = (x.clone().requires_grad_() for x in (LOG, LOG, SIGNS))
    loss, stats = faca.clipped_loss(logp, old_logp, advantage, ALL4)
    loss.backward()
    assert loss == 0 and logp.grad.tolist() == [[-0.25, 0.25, -0.25, 0.25]]
    assert old_logp.grad is None and advantage.grad is None and not any(x.requires_grad for x in stats.values())
    assert {k: x.item() for k, x in stats.items()} == dict(tokens=4, clipped=0, k3=0, ratio_max=1, ratio_min=1)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_stands_at_masked_places_reaches_neither_value_nor_gradient(poison):
    mask = bools([[1, 0, 0, 1]])
    clean = loss_and_grad(LOG, OLD, SIGNS, mask)
    dirty = loss_and_grad(*(torch.where(mask, x, poison) for x in (LOG, OLD, SIGNS)), mask)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]
    assert dirty[0].isfinite() and dirty[1][~mask].tolist() == [0, 0] and dirty[2]["tokens"] == 2
    for denominator in (None, 7):  # and with no trainable token at all
        loss, grad, stats = loss_and_grad(LOG * poison, OLD, SIGNS, ~ALL4, denominator=denominator)
        assert loss == 0 and not grad.any()
        assert {k: x.item() for k, x in stats.items()} == dict(tokens=0, clipped=0, k3=0, ratio_max=-INF, ratio_min=INF)


def test_micro_batches_with_a_global_denominator_add_up_to_the_batch():
    torch.manual_seed(1)
    logp, advantage, noise = torch.randn(3, 7, 9, dtype=F64)
    mask = torch.rand(7, 9) < 0.6
    mask[5] = False  # a micro-batch without a token
    batch, total = (logp, logp + 0.4 * noise, advantage, mask), int(mask.sum())
    whole, grad, stats = loss_and_grad(*batch)
    parts = [loss_and_grad(*(x[a:b] for x in batch), denominator=total) for a, b in ((0, 2), (2, 5), (5, 6), (6, 7))]
    assert close(sum(p[0] for p in parts), whole, 1e-12) and close(torch.cat([p[1] for p in parts]), grad, 1e-12)
    for name, combine in {"tokens": sum, "clipped": sum, "k3": sum, "ratio_max": max, "ratio_min": min}.items():
        assert close(combine(p[2][name] for p in parts), stats[name], 1e-12), name
    assert stats["tokens"] == total and 0 < stats["clipped"] < total


def test_bf16_inputs():
    reward = torch.tensor([0.1, 0.35, 0.95, 0.95, 0.2, 0.35]).bfloat16()  # computed in float64, rounded once
    exact, logp = faca.outcome_advantage(reward.double(), GROUP[:6]), LOG.bfloat16()
    assert torch.equal(faca.outcome_advantage(reward, GROUP[:6]), exact.bfloat16())
    exact, exact_grad, _ = loss_and_grad(logp.double(), OLD, SIGNS, ALL4)
    for old_logp in (OLD.float(), OLD.bfloat16()):
        loss, grad, stats = loss_and_grad(logp, old_logp, SIGNS.bfloat16(), ALL4)
        assert close(loss, exact, 0.01) and close(grad, exact_grad, 0.01) and stats["clipped"] == 2


@pytest.mark.parametrize("dtype, rtol", [
    pytest.param(torch.bfloat16, INF), pytest.param(torch.float32, 0.01), (F64, 0.01)])
def test_k3_is_never_negative_and_is_right_near_ratio_1(dtype, rtol):
    logp = torch.logspace(-4, -1, 50).to(dtype)
    for x in (*logp, *-logp):
        k3 = faca.clipped_loss(x[None], torch.zeros_like(x[None]), x[None], bools([1]))[1]["k3"].item()
        assert k3 >= 0 and k3 == pytest.approx(math.expm1(x.item()) - x.item(), rel=rtol)


def test_shifted_takes_the_reaction_before_and_never_onto_a_missing_segment():
    observed, exists = bools([[1, 1, 0], [1, 1, 0], [1, 0, 1]]), bools([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    moved, seen = faca.shifted(floats([[1, -1, None], [-1, 1, 0], [1, 1, 1]]), observed, exists)
    assert moved.tolist() == [[0, 1, -1], [0, -1, 0], [0, 1, 0]]  # row 0: its unanswered last segment takes one
    assert seen.tolist() == [[False, True, True], [False, True, False], [False, True, False]]  # row 1 has no third


def test_randomized_keeps_the_reactions_and_their_places_and_is_seeded():
    # Distinct numbers, so that a permutation within rows or columns would show.
    number, observed = torch.arange(1, 121).reshape(30, 4), torch.rand(30, 4, generator=torch.manual_seed(3)) < 0.7
    one, same, other = (faca.randomized(number, observed, torch.Generator().manual_seed(i)) for i in (5, 5, 6))
    for drawn in (one, other):
        assert drawn.dtype == number.dtype and not drawn[~observed].any()
        assert torch.equal(drawn[observed].sort().values, number[observed])
        moved = drawn[observed] - number[observed]
        assert len(moved.unique()) > 40 and (moved % 4 != 0).any()
    assert torch.equal(one, same) and not torch.equal(one, other)


STEP = dict(  # group 3: rows 0, 1 and the void row 4; group 7: rows 2, 3; group -2: row 5
    reward_N=floats([1, 0, 1, 1, None, 0]), valid_N=bools([1, 1, 1, 1, 0, 1]), lam=0.5,
    reaction_NQ=floats([[1, None], [-1, 1], [1, 1], [0, None], [-1, -1], [None, None]]),
    group_N=torch.tensor([3, 3, 7, 7, 3, -2]), observed_NQ=bools([[1, 0], [1, 1], [1, 1], [1, 0], [1, 1], [0, 0]]),
    exists_NQ=bools([[1, 1], [1, 1], [1, 1], [1, 0], [1, 1], [1, 0]]),
    tokens_NQ=torch.tensor([[3, 2], [1, 1], [4, 9], [2, 0], [1, 5], [6, 0]]),
    strategies=[["confirm", None], ["challenge_solution", "close"], ["reveal_piece", "confirm"], ["huh"],
                ["change_mind", "change_mind"], [None]])
R, F, G = floats([1, 0, 1]), floats([[1, 0], [0, -1], [1, 1]]), torch.tensor([4, 4, -1])
ON, SEGMENT = torch.ones(3, 2, dtype=torch.bool), torch.tensor([[-1, 0, 1], [0, 0, -1], [1, -1, -1]])
LAMS = 0.6, 0.5000001, NAN, INF, -INF
REFUSED = {
    "check_lam": [(lam,) for lam in LAMS],
    "outcome_advantage": [(R, G.double()), (R, G[:2]), (R[:, None], G), (R, G, R), (R, G, ON[:2, 0]), (R / 0, G)],
    "process_advantage": [(R, ON, G), (F, ON, G.float()), (F, ON.float(), G), (F, ON[:, :1], G), (F * NAN, ON, G)],
    "faca_advantage": [(R, F[:2], ON[:2], G), (R[:2], F, ON, G), *((R, F, ON, G, lam) for lam in LAMS)],
    "token_advantage": [(F, G), (F, SEGMENT[:2]), (F, SEGMENT + 1), (F, SEGMENT - 1), (F[:, :0], SEGMENT)],
    "clipped_loss": [(F, F, F, ON.float()), (F, F, F, ON[:1]), (F, F[:1], F, ON), (F, F, R[:, None], ON),
                     *((F, F, F, ON, *rest) for rest in ((0.0,), (NAN,), (0.2, 0), (0.2, NAN)))],
    "segment_tokens": [(SEGMENT, 1)], "shifted": [(F, ON.long(), ON), (F, ON, ON.float()), (F, ON, ON[:, :1])],
    "randomized": [(F, ON.float(), torch.default_generator), (F, ON[:1], torch.default_generator)],
    "credit_telemetry": [(R, F, ON, 1 * ON, 1 * ON, G, 0.5), (R, F, ON, ON, 1 * ON, R, 0.5)]}


def test_credit_telemetry_by_hand():
    out = faca.credit_telemetry(**STEP)
    # A^p: 4 of the 8 segments of valid rollouts have +-.7071, both q = 1 are singletons. A^o: +-.7071 on the 4 segments
    # of rows 0 and 1. So sum |A^o| = 2.8284, sum |lam A^p| = 1.4142.
    assert out.pop("process_share") == pytest.approx(1 / 3, abs=1e-5)
    labels = dict.fromkeys((*TABLE_1, "invalid"), 0)
    labels |= dict(confirm=2, close=1, reveal_piece=1, challenge_solution=1, invalid=1)
    assert out == {f"strategy/{z}": n for z, n in labels.items()} | dict(
        segments=8, observed=6, positive_share=4 / 6, negative_share=1 / 6, coverage=4 / 8,
        groups_correct=1, groups_wrong=1, groups_mixed=1)
    assert faca.credit_telemetry(**STEP | {"lam": -0.5})["process_share"] == pytest.approx(1 / 3, abs=1e-5)
    assert not any(faca.credit_telemetry(**STEP | {"valid_N": bools([0] * 6)}).values())


def test_credit_telemetry_refuses_records_that_do_not_fit_the_tensors():
    n = STEP["tokens_NQ"]
    for change in ({"tokens_NQ": n + 1}, {"tokens_NQ": n - 1}, {"observed_NQ": n >= 0, "reaction_NQ": 0 * n}):
        refused(faca.credit_telemetry, **STEP | change)


@pytest.mark.parametrize("name, arguments", [(name, a) for name, rows in REFUSED.items() for a in rows])
def test_what_does_not_fit_is_refused_in_one_line(name, arguments):
    refused(getattr(faca, name), *arguments)


def test_no_function_writes_into_its_inputs_or_returns_a_view_of_them():
    r, f, on, g, s, logp = inputs = [x.clone() for x in (R, F, ON, G, SEGMENT, floats([[0.1, 2, 3]] * 3))]
    before, valid = [x.clone() for x in inputs], on[:, 0]
    outputs = [faca.outcome_advantage(r, g, valid), faca.process_advantage(f, on, g, valid), *faca.shifted(f, on, on),
               faca.faca_advantage(r, f, on, g, 0, valid), faca.faca_advantage(r, f, on, g, 0.5, valid),
               faca.token_advantage(f, s), faca.segment_tokens(s, 2), faca.randomized(f, on, torch.manual_seed(0))]
    loss, stats = faca.clipped_loss(logp, logp, logp, s >= 0)
    assert faca.credit_telemetry(r, f, on, on, 1 * on, g, 0.5, valid)["segments"] == 6
    for x in (*outputs, loss, *stats.values()):
        x.zero_()  # if x is a view, its base changes
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))


@st.composite
def batches(draw, columns=st.integers(1, 3)):
    """reward, reaction, observed, group, valid of any batch, NaN where void or unobserved."""
    n, q = draw(st.integers(1, 7)), draw(columns)
    rows = lambda *values: draw(st.lists(st.sampled_from(values), min_size=n, max_size=n))  # noqa: E731
    observed, reaction = (torch.tensor([rows(*x) for _ in range(q)]).T for x in ((True, True, False), (-1.0, 0.0, 1.0)))
    valid, reward = torch.tensor(rows(True, True, True, False)), floats(rows(0, 1, 1, 0.35, -2))
    return (torch.where(valid, reward, NAN), torch.where(observed, reaction.double(), NAN), observed,
            torch.tensor(rows(-3, 0, 8)), valid)


def advantage_of(reward, reaction, observed, group, valid):
    return faca.faca_advantage(reward, reaction, observed, group, 0.5, valid)


@given(batches(), st.permutations(range(7)), st.permutations([2**40, 17, -5]))
def test_order_of_rollouts_and_names_of_groups_change_nothing(batch, order, names):
    order = [i for i in order if i < len(batch[0])]
    assert close(advantage_of(*(x[order] for x in batch)), advantage_of(*batch)[order], 1e-9)
    renamed = torch.tensor([names[[-3, 0, 8].index(g)] for g in batch[3].tolist()])
    assert close(advantage_of(*batch[:3], renamed, batch[4]), advantage_of(*batch), 1e-9)


@given(batches(st.just(2)), batches(st.just(2)), st.booleans())
def test_a_void_rollout_or_another_group_changes_nothing_for_the_others(batch, other, void):
    other = (*other[:3], other[3] + (0 if void else 100), other[4] & (not void))
    both, n = advantage_of(*(torch.cat(pair) for pair in zip(batch, other))), len(batch[0])
    assert close(both[:n], advantage_of(*batch), 1e-9) and close(both[n:], advantage_of(*other), 1e-9)
    assert not (void and both[n:].any())


@given(batches(), st.floats(-9, 9), st.floats(-100, 100))
def test_each_group_has_sum_0_deviation_1_and_a_bound_and_scale_and_offset_cancel(batch, scale, offset):
    reward, reaction, observed, group, valid = batch
    advantage = torch.cat([faca.outcome_advantage(reward, group, valid)[:, None],
                           faca.process_advantage(reaction, observed, group, valid)], 1)
    members = torch.cat([valid[:, None], observed & valid[:, None]], 1)
    assert not advantage[~members].any()
    values = torch.cat([reward[:, None], reaction], 1)
    for g, c in itertools.product(group.unique(), range(values.shape[1])):
        here = members[:, c] & (group == g)
        x, a, n = values[here, c], advantage[here, c], int(here.sum())
        if n < 2 or x.min() == x.max():
            assert not a.any()
        else:
            assert abs(a.sum()) < 1e-9 and a.std().item() == pytest.approx(1, abs=1e-4)
            assert a.abs().max() <= (n - 1) / math.sqrt(n) and torch.equal(a > 0, x > x.mean())
    scale += math.copysign(0.1, scale)  # sigma is at least .0132 then: eps makes a relative difference below 1e-4
    scaled = faca.outcome_advantage(scale * reward + offset, group, valid)
    assert close(scaled, math.copysign(1, scale) * advantage[:, 0], 3e-4)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_tokens_take_the_advantage_of_their_segment_as_in_a_plain_loop_and_are_counted_in_it(n, q, t, random):
    advantage = [[random.uniform(-2, 2) for _ in range(q)] for _ in range(n)]
    segment = [[random.randrange(-1, q) for _ in range(t)] for _ in range(n)]
    expected = [[row[s] if s >= 0 else 0 for s in segments] for row, segments in zip(advantage, segment)]
    assert faca.token_advantage(floats(advantage), torch.tensor(segment).long()).tolist() == expected
    counts = [[segments.count(i) for i in range(q)] for segments in segment]
    assert faca.segment_tokens(torch.tensor(segment).long(), q).tolist() == counts
