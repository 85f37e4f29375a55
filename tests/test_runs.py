"""What a report is made of: which rollouts are shown, figures of runs, arms of evaluations."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.browser import Texts, as_json, by_failures, chosen_groups, chosen_steps, judged, sampled, size_of
from extras.results import load_results
from extras.runs import arms_evaluated, gains, meanings, names_of, percent, read_runs, signed, thirds
from extras.show import save_rollouts
from test_report import make_results, make_run, rollout


def test_the_rollouts_of_a_run_stay_near_their_budget_and_are_spread_over_all_its_steps(tmp_path):
    run = make_run(tmp_path / "run", steps=4, records=[
        rollout(group, k, float(k), ["confirm"], [1], [0.0], 0.0, f"{group} {k} " * 200) for group in range(9)
        for k in range(2)])
    group = size_of(sampled(run, 1, Texts())[0][0]["groups"][0]) + 2 * 800  # it, and its two texts
    for budget in (5 * group, 12 * group):
        texts = Texts()
        steps, left_out, faults = sampled(run, budget, texts)
        assert [step["step"] for step in steps] == [0, 1, 2, 3] and not faults
        assert budget / 2 < size_of(steps) + texts.size < budget + 4 * group
    assert sampled(run, 0, Texts())[1] == "0 of 4 steps are shown"


def test_mixed_groups_are_chosen_first_and_one_of_equal_rewards(tmp_path):
    kinds = [False, False, True, True, True, True, False]
    records = [rollout(g, k, float(mixed and k), ["confirm"], [1], [0.0], 0.0)
               for g, mixed in enumerate(kinds) for k in range(2)]
    save_rollouts(tmp_path / "step-00000.jsonl", records)
    groups, total = chosen_groups(tmp_path / "step-00000.jsonl", 4)
    assert [group[0].group for group in groups] == [0, 2, 3, 4] and total == 7


@given(st.integers(0, 300), st.integers(2, 40))
def test_chosen_steps_begin_and_end_with_the_runs_and_are_never_more_than_asked_for(steps, count):
    chosen = chosen_steps(list(range(steps)), count)
    assert len(chosen) == len(set(chosen)) <= count and set(chosen) <= set(range(steps))
    assert steps == 0 or {0, steps - 1} <= set(chosen)
    if steps >= 9 and count >= 9:  # spread: no gap is twice as wide as an even one
        places = sorted(chosen_steps(list(range(steps)), 9))
        assert max(b - a for a, b in zip(places, places[1:], strict=False)) <= 2 * (steps - 1) / 8


@given(st.text("</script>!-&'\"\\ \n\u2028é😀\ud800"))
def test_any_text_survives_the_script_element(words):
    assert json.loads(as_json({"a": words})) == {"a": words} and "<" not in as_json(words)


def test_shares_of_the_first_and_last_third_are_weighted(tmp_path):
    run = make_run(tmp_path / "a", steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [(0.5, 1), (0.8, 3), (0.1, 9), (0.1, 9), (1.0, 1), (None, 5)]
    rows[1:4] = [{"phase": "rl", "step": step, "positive_share": share, "observed": count}
                 for step, (share, count) in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, last = thirds(read_runs([run], {run: "a"}), "positive_share", "observed")
    assert first == pytest.approx((0.5 * 1 + 0.8 * 3) / 4) and last == 1.0


def test_halves_of_a_tenth_are_rounded_once_and_up(tmp_path):
    before, after = (0.505, 0.68, 0.6), (0.575, 0.685, 0.6375)  # +7.0, +0.5, +3.75 points
    runs = read_runs(*[{make_run(tmp_path / f"{arm}-{seed}", arm, seed, success=found[seed]): f"{arm}-{seed}"
                        for arm, found in (("grpo", before), ("faca", after)) for seed in range(3)}] * 2)
    each = gains([run for run in runs if run.arm == "FACA"], [run for run in runs if run.arm != "FACA"])
    assert list(map(signed, each)) == ["+7.0", "+0.5", "+3.8"] and signed((each[0] + each[1]) / 2) == "+3.8"
    assert percent(0.0375, 0.5825, 1.0) == "3.8 → 58.3 → 100.0" and signed(-0.0375) == "−3.8"
    assert signed(-0.0001) == "+0.0"


def test_the_meaning_of_a_metric_is_the_readmes(tmp_path):
    told = meanings()

    def of(key: str) -> list[str]:
        return [text for names, text in told if names.fullmatch(key)]

    assert of("entropy") == ["mean entropy of the policy at trainable tokens, nats"]
    assert of("process_share") == ["sum |lambda A^p| / sum (|A^o| + |lambda A^p|), over segments"]
    assert of("simulator/retries") == of("simulator/requests") and len(of("simulator/requests")) == 1
    assert len(of("stop/user_left")) == len(of("strategy/confirm")) == len(of("pass@1/mini:telecom")) == 1
    assert of("entropies") == of("retries") == [] == meanings(tmp_path / "README.md")


def test_evaluations_show_the_same_tasks_those_with_most_failures_where_there_is_no_room_for_all(tmp_path):
    one = load_results(make_results(tmp_path / "one", 2, ["user gave up", "user gave up"]))
    other = load_results(make_results(tmp_path / "other", 0, ["user gave up", "", "", ""]))
    hardest = by_failures([one, other])
    assert hardest == {"mini:telecom/test/001": 0, "mini:telecom/test/000": 1}  # two failures, and one
    for results in (one, other):
        (step,), left_out, faults = judged(results, hardest, 1, Texts())
        assert [group["task"] for group in step["groups"]] == ["mini:telecom/test/001"] and not faults
        assert left_out == "1 of 2 tasks are shown, those with most failures in all evaluations"
    (step,), left_out, _ = judged(other, hardest, 1e6, Texts())
    assert [group["task"][-3:] for group in step["groups"]] == ["000", "001"] and left_out == ""  # 1 and 2 solved


def test_only_seeds_are_averaged_and_an_evaluation_of_unknown_training_stands_alone(tmp_path):
    def make(name: str, seed: int, method: str = "faca"):
        training = {"method": method, "lam": 0.5 * (method == "faca"), "control": "none", "seed": seed}
        return load_results(make_results(tmp_path / name, 4, [], training=training))

    found = [make("b", 1), make("a", 0), make("base", 0, "grpo"), make("start", 0, "sft")]
    names = {results.folder: results.folder.name for results in found}

    def arms() -> dict[str, list[str]]:
        return {arm: [names[results.folder] for results in members]
                for arm, members in arms_evaluated(found, names).items()}

    assert arms() == {"SFT alone": ["start"], "Interactive GRPO": ["base"], "FACA": ["a", "b"]}
    found[0].run["temperature"] = 0.5
    found[2].run["training"] = {}
    assert arms() == {"SFT alone temperature 0.0": ["start"], "FACA temperature 0.0": ["a"],
                      "FACA temperature 0.5": ["b"], "base": ["base"]}


def test_a_folder_named_by_its_seed_alone_is_told_with_the_two_above_it(tmp_path):
    folders = [tmp_path / "results" / "faca" / "0", tmp_path / "results" / "grpo" / "0", tmp_path / "runs" / "faca-0"]
    assert list(names_of(folders).values()) == ["results/faca/0", "results/grpo/0", "faca-0"]
