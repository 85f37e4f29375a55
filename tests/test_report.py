"""The report: what it shows, in a real browser; what it refuses; how large it grows."""

import io
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from extras.report import LABELS, report
from extras.results import RUN, kept
from extras.runs import ReportError
from extras.show import save_rollouts
from rollout import Rollout
from screenshots import DESKTOP, PHONE, chromium, look

pytest.importorskip("matplotlib", reason="the report's charts need matplotlib: pip install matplotlib")

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'></script>\u2028&amp;"
SQRT_HALF = 0.5 ** 0.5  # a group of two that differ: each is as far from the mean, in sample standard deviations


def rollout(group: int, k: int, reward: float, strategies: list[str], reactions: list[int], advantage: list[float],
            outcome: float, says: str = "Please restart.", result: str = "done") -> Rollout:
    """A dialogue with one call in each segment, and one of the user's before each reply."""
    messages = [{"role": "system", "content": "Help the customer. " * 9}, {"role": "user", "content": "It is dead."}]
    private = [{"turn": 0, "strategy": "reveal_piece"}]
    for q, strategy in enumerate(strategies):
        call = {"type": "function", "function": {"name": "get_line", "arguments": {"phone": "7"}}}
        messages += [{"role": "assistant", "content": "", "segment": q, "tool_calls": [call]},
                     {"role": "tool", "content": result},
                     {"role": "assistant", "content": f"{says} ({k}, {q})", "segment": q},
                     {"role": "user", "content": f"I heard {k}, {q}."}]
        private += [{"turn": q + 1, "tool": "look_at_screen", "arguments": {}, "result": "dark"},
                    {"turn": q + 1, "strategy": strategy}]
    stop = "user_closed" if reward else "user_left"
    return Rollout(f"mini:telecom/train/{group:03}", "mini:telecom", group, k, 1, [5], [0], [-0.1], strategies,
                   reactions, advantage, outcome, reward, stop, {}, messages, private)


def two_groups(says: str = "Please restart.") -> list[Rollout]:
    """Group 0: all wrong, and the users alike. Group 4, lambda 0.5: one solved, and at turn 1 the users differ."""
    out, half = SQRT_HALF, SQRT_HALF / 2
    return [rollout(0, 0, 0.0, ["be_vague"], [0], [0.0], 0.0, says),
            rollout(0, 1, 0.0, ["be_vague"], [0], [0.0], 0.0, says),
            rollout(4, 0, 1.0, ["confirm", "close"], [1, 1], [out + half, out], out, says),
            rollout(4, 1, 0.0, ["challenge_solution", "confirm"], [-1, 1], [-out - half, -out], -out, says)]


def make_run(folder: Path, method: str = "faca", seed: int = 0, steps: int = 3, success: float = 0.5,
             records: list[Rollout] | None = None, **more) -> Path:
    """A run folder of so many steps; pass@1 goes from 0.25 to success."""
    (folder / "rollouts").mkdir(parents=True)
    config = {"method": method, "seed": seed, "lam": 0.0 if method == "grpo" else 0.5, "control": "none",
              "env": "mini:telecom", "model": "runs/sft/model", "simulator": "scripted", "steps": steps,
              "eval_trials": 2} | more
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"phase": "held_out", "at": "before", "pass@1/mini:telecom": 0.25, "rollouts": 8}]
    for step in range(steps):
        rows.append({"phase": "rl", "step": step, "success": step / steps, "observed": 10, "segments": 20,
                     "positive_share": 0.5 + 0.1 * step, "coverage": 0.8, "process_share": 0.36,
                     "groups_correct": 1, "groups_mixed": 2, "groups_wrong": 1,
                     **{f"strategy/{label}": 6 * (label == "confirm") for label in LABELS}})
        save_rollouts(folder / "rollouts" / f"step-{step:05}.jsonl", records or two_groups())
    rows.append({"phase": "held_out", "at": "after RL", "pass@1/mini:telecom": success, "rollouts": 8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """FACA and Interactive GRPO, two seeds each, 10 points apart at seed 0 and 20 at seed 1."""
    home = tmp_path_factory.mktemp("runs")
    folders = [make_run(home / "faca-0", success=0.6), make_run(home / "faca-1", seed=1, success=0.8),
               make_run(home / "grpo-0", "grpo", success=0.5), make_run(home / "grpo-1", "grpo", seed=1, success=0.6)]
    report(folders, home / "report.html")
    return home / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = chromium(str(tmp_path_factory.mktemp("profile")))
    if not found:
        pytest.skip("needs selenium, chromium and chromedriver (Debian: chromium, chromium-driver)")
    yield found
    found.quit()


def visit(browser, path: Path, hash: str = "", size=DESKTOP, scheme: str = "light") -> None:
    look(browser, size, scheme)
    browser.get("about:blank")
    browser.get(path.as_uri() + hash)


def text(browser, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def click(browser, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


# ----------------------------------------------------------------------------------------------------- in a browser


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("size", (DESKTOP, PHONE))
def test_it_renders_in_both_widths_and_schemes_without_an_error_or_a_page_wider_than_the_window(
        browser, page, size, scheme):
    visit(browser, page, size=size, scheme=scheme)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == size[0]
    wide = ("return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg')"
            " && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))")
    assert browser.execute_script(wide) == []
    drawn = "return [...document.querySelectorAll('figure svg[role=img]')].map(e => e.getBoundingClientRect().width)"
    assert len(widths := browser.execute_script(drawn)) == 9 and min(widths) > 250
    columns = browser.execute_script("return document.querySelectorAll('table.dialogues thead th').length")
    assert columns == (1 if size == PHONE else 2)
    ink, paper = browser.execute_script("let s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (bright[0] < bright[1]) == (scheme == "light")


def test_on_a_phone_no_word_of_a_name_is_broken_and_a_shadow_shows_where_a_table_goes_on(browser, page):
    from matplotlib.image import imread
    visit(browser, page, size=PHONE)
    broken = ("return [...document.querySelectorAll('#summary > .numbers tbody th')].flatMap(th =>"
              " [...th.childNodes].filter(node => node.nodeType === 3).flatMap(node =>"
              " [...node.data.matchAll(/\\S+/g)].filter(word => { const range = document.createRange();"
              " range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);"
              " return new Set([...range.getClientRects()].map(box => box.top)).size > 1; }).map(word => word[0])))")
    assert browser.execute_script(broken) == []
    table = browser.find_element("css selector", "#summary .scroll")

    def edge() -> float:
        """Mean brightness of the table's last pixels beside its head."""
        place = [round(table.rect[name]) for name in ("x", "y", "width")]
        picture = imread(io.BytesIO(browser.get_screenshot_as_png()))
        top = place[1] - browser.execute_script("return Math.round(scrollY)")
        return picture[top + 10:top + 40, place[0] + place[2] - 8:place[0] + place[2] - 1, :3].mean()

    browser.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", table)
    before = edge()
    assert browser.execute_script("arguments[0].scrollLeft = 1e5; return arguments[0].scrollLeft > 100", table)
    assert edge() > before + 0.05


def test_the_top_says_pass_at_1_of_each_arm_and_the_gain_at_matched_seeds(browser, page):
    visit(browser, page)
    tiles = text(browser, ".tiles").split("\n")
    assert text(browser, ".tiles-say") == ("Held-out tasks solved (pass@1) before RL and at the end of training, by "
                                           "training's own evaluation of 2 dialogues a task:")
    assert "by training's own evaluation of 2 dialogues a task" in text(browser, "#summary .note")
    assert tiles[:2] == ["before RL", "25.0 %"]
    # mean of 0.5 and 0.6, of 0.6 and 0.8; sample standard deviations 0.1 / sqrt 2 and 0.2 / sqrt 2
    assert tiles[3:6] == ["Interactive GRPO", "55.0 %", "2 seeds, ± 7.1 (sample sd)"]
    assert tiles[6:9] == ["FACA", "70.0 %", "2 seeds, ± 14.1 (sample sd)"]
    assert tiles[9:] == ["FACA − Interactive GRPO", "+15.0 points", "at matched seeds: +10.0, +20.0"]


def test_a_segment_shows_its_advantage_split_and_the_reactions_that_it_was_compared_with(browser, page):
    visit(browser, page, "#run=faca-0&step=0&group=4&rollout=all")
    assert "the process part, from the users' reactions, tells their turns apart" in text(browser, "#group-says")
    assert "1 of 2 solved" in text(browser, "#group option:checked")
    assert "mean 0.00, sd 1.41" in text(browser, "#turn-1") and "0: +1" in text(browser, "#turn-1")
    assert "no difference, no process credit" in text(browser, "#turn-2")
    cells = "return [...document.querySelector('.agent').cells]"
    better, worse = browser.execute_script(cells + ".map(cell => cell.innerText)")
    assert "▲ +1.06" in better and "= outcome +0.71 + process 0.35" in better  # 0.7071 + 0.5 x 0.7071
    assert "better taken than its neighbours: 0.5 × (+1 − 0.00) / 1.41" in " ".join(better.split())
    assert "▼ −1.06" in worse and "= outcome −0.71 − process 0.35" in worse and "get_line" in worse
    reply = text(browser, ".reply td:last-child")
    assert "challenge_solution −1" in reply and "I heard 1, 0." in reply and "private: look_at_screen" in reply
    shades = browser.execute_script(cells + ".map(cell => getComputedStyle(cell.firstChild).backgroundColor)")
    assert len(set(shades)) == 2
    visit(browser, page, "#run=grpo-0&step=0&group=4&rollout=0")
    assert "this arm uses no reactions" in text(browser, ".agent td")
    assert "process" not in text(browser, "#group-says") + text(browser, "#turn-2")
    visit(browser, page, "#run=grpo-0&step=0&group=0")
    assert "nothing is learned from this group" in text(browser, "#group-says")


def test_run_step_group_and_rollout_are_chosen_by_controls_and_kept_in_the_address(browser, page):
    visit(browser, page)
    assert text(browser, "#group-says").startswith("Task mini:telecom/train/004, 2 rollouts, 1 solved.")
    click(browser, '#rollouts [data-k="1"]')
    assert "(1, 0)" in text(browser, ".dialogues") and "(0, 0)" not in text(browser, ".dialogues")
    browser.execute_script("let b = document.querySelector('#turn-1 [data-k=\"0\"]'); b.focus(); b.click()")
    assert browser.execute_script("return document.activeElement.innerText") == "0: +1"
    assert "(0, 0)" in text(browser, ".dialogues") and "(1, 0)" not in text(browser, ".dialogues")
    click(browser, '[data-move="step"][data-by="1"]')
    click(browser, '[data-move="group"][data-by="-1"]')
    click(browser, '[data-turn="1"]')
    browser.execute_script("let s = document.querySelector('#run'); s.value = 3; s.dispatchEvent(new Event('change'))")
    assert browser.current_url.endswith("#run=grpo-1&step=1&group=0&rollout=0")
    assert "All ended alike" in text(browser, "#group-says")
    visit(browser, page, "#run=grpo-1&step=2&group=4&rollout=1&turn=2")
    assert text(browser, "#step option:checked") == "2" and "(1, 1)" in text(browser, ".dialogues")
    assert browser.execute_script("return document.querySelector('.target').id") == "turn-2"
    visit(browser, page, "#run=gone&step=x&group=-1&rollout=%00")
    assert browser.get_log("browser") == [] and "Rollout 0" in text(browser, ".dialogues")


def test_controls_and_charts_are_reached_and_worked_by_keys(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    visit(browser, page)
    browser.execute_script("window.reached = []; addEventListener('focusin', e => reached.push("
                           "e.target.id || e.target.dataset.move || e.target.dataset.k || e.target.tagName))")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB * 32)
    reached = browser.execute_script("return reached")
    assert {"svg", "metric", "run", "step", "group", "all", "0", "1", "SUMMARY"} <= set(reached)
    chart = browser.find_element(By.CSS_SELECTOR, ".figures svg[role=img]")
    chart.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text(browser, ".readout") == "step 3: Interactive GRPO 55.0 %, FACA 70.0 %"
    browser.execute_script("let s = document.querySelector('#metric'); s.value = 'rl/observed';"
                           "s.dispatchEvent(new Event('change', {bubbles: true}))")
    assert browser.execute_script("return document.querySelectorAll('#metric-chart svg path').length") > 5
    chosen = text(browser, "#metric-chart").split("\n")
    assert chosen[:3] == ["observed (training by RL)", "Interactive GRPO", "FACA"]
    assert chosen[-1] == "U2U segments; those that a user turn followed"  # as README says it
    assert browser.current_url.endswith("#metric=rl%2Fobserved")
    click(browser, '#rollouts [data-k="1"]')
    assert browser.current_url.endswith("&rollout=1&metric=rl%2Fobserved")
    visit(browser, page, "#metric=rl/success")
    assert text(browser, "#metric-chart").startswith("success (training by RL)")


def test_text_of_models_and_names_never_becomes_markup_and_nothing_can_be_loaded(browser, tmp_path):
    records = two_groups(EVIL)
    records[0].task, records[2].private[-1]["strategy"], records[2].strategies[1] = EVIL, EVIL, EVIL
    records[2].messages[3]["content"], records[3].outcome_advantage = EVIL, float("nan")
    run = make_run(tmp_path / "a<img src=x onerror='window.hacked = 3'>", records=records, steps=1, model=EVIL)
    report([run], tmp_path / "report.html")
    assert tmp_path.joinpath("report.html").read_text().count("</script>") == 2
    visit(browser, tmp_path / "report.html")
    assert browser.get_log("browser") == []
    assert EVIL.replace("\u2028", "") in text(browser, ".agent .say").replace("\u2028", "").replace("\n", "")
    visit(browser, tmp_path / "report.html", "#run=" + run.name + "&group=0")
    found = browser.execute_script("return [window.hacked, document.images.length, document.scripts.length]")
    assert found == [None, 0, 2]
    refused = browser.execute_async_script(
        "const done = arguments[0]; addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));"
        "fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert refused == "connect-src"
    inline = browser.execute_async_script(
        "const done = arguments[0]; addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));"
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 4'}))")
    assert inline == "script-src-elem" and browser.execute_script("return window.hacked") is None
    browser.get_log("browser")  # the two refusals


# -------------------------------------------------------------------------------------------------------- the page


def test_charts_keep_text_and_have_unique_ids_no_styles_and_no_colours_but_the_pages(page):
    written = page.read_text()
    charts = re.findall(r'<svg viewBox="0 0 \d+ \d+" role="img".*?</svg>', written, re.DOTALL)
    assert len(charts) >= 9 and all("<text" in chart for chart in charts)
    ids = re.findall(r' id="([^"]*)"', "".join(charts))
    assert ids and len(ids) == len(set(ids))
    assert not re.search(r'style=|="#[0-9a-f]{6}"', "".join(charts))
    assert set(re.findall(r"var\(--([\w-]+)\)", "".join(charts))) <= set(re.findall(r"--([\w-]+):", written))


def test_a_run_of_120_steps_of_128_rollouts_gives_a_page_under_10_mb_that_says_what_it_left_out(tmp_path, browser):
    long = "A line of a long result, with a number: 12345.\n" * 80
    records = [rollout(group, k, float(k < group % 8), ["confirm"] * 5, [1] * 5, [0.1] * 5, 0.1,
                       f"Text of its own, {group} {k}. " * 12, f"{group} {k} {long}")
               for group in range(16) for k in range(8)]
    run = make_run(tmp_path / "big", steps=1, records=records)
    first, row = run / "rollouts" / "step-00000.jsonl", json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    for step in range(1, 120):
        os.link(first, run / "rollouts" / f"step-{step:05}.jsonl")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(120)))
    says = report([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 10e6 and says.endswith("; rollouts of 9 of 120 steps")
    visit(browser, tmp_path / "report.html", "#run=big&step=119&group=1")
    assert "more characters" in browser.execute_script("return document.querySelector('.dialogues').textContent")
    assert re.search(r"big: 9 of 120 steps are shown \(0, .*119\), with 54 of their 144 groups; "
                     r"[\d,]+ tool calls or results are cut at 1,200 characters", text(browser, "#notes"))


def make_results(folder: Path, solved: int, reasons: list[str], trials: int = 2, **more) -> Path:
    """An evaluation on two tasks of one domain; the first dialogues are solved, the rest are not, or not yet there."""
    folder.mkdir(parents=True)
    tasks = {f"mini:telecom/test/{i:03}": {"domain": "mini:telecom", "digest": "0", "seen": i == 0, "nothing": 0.0,
                                           "strata": []} for i in range(2)}
    empty = {kind: kind() for kind in (str, dict, list, int, float, bool)}
    run = {name: empty[kind] for name, kind in RUN.items()} | {
        "tasks": tasks, "trials": trials, "model": "m", "limits": {"mini:telecom": {}}, "seen_known": True} | more
    (folder / "run.json").write_text(json.dumps(run))
    lines = []
    for i, reason in enumerate([""] * solved + reasons):
        record = rollout(i // trials, i % trials, float(not reason), ["confirm"], [1], [], 0.0)
        record.task = list(tasks)[i // trials]
        lines.append(json.dumps(asdict(kept(record, reason=reason))))
    (folder / "results.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def rows_of_evaluations(browser) -> list[list[str]]:
    return browser.execute_script("return [...document.querySelectorAll('#evaluations tbody tr')]"
                                  ".map(row => [...row.cells].map(cell => cell.textContent))")


def test_evaluations_are_tabled_with_the_reasons_of_failures(tmp_path, browser):
    whole = make_results(tmp_path / "whole", 3, ["user gave up"])
    begun = make_results(tmp_path / "begun", 1, ["error budget spent", "user gave up"], seen_known=False)
    says = report([whole, begun], tmp_path / "report.html")
    assert says.endswith("; begun: it is not complete: 3 of 4 dialogues, the others count as not solved")
    visit(browser, tmp_path / "report.html")
    assert browser.get_log("browser") == []
    assert text(browser, ".tiles").split("\n") == ["whole", "75.0 %", "4 dialogues", "begun", "25.0 %", "4 dialogues"]
    rows = rows_of_evaluations(browser)
    # Wilson, 3 of 4: (0.75 + 0.4802) / 1.9604 -+ 1.96 sqrt(0.75 x 0.25 / 4 + 0.0600) / 1.9604 = 0.6275 -+ 0.3269
    # of the unseen task, 1 of 2: 0.5 -+ 0.4055; pass^2: the first task alone has both of its trials
    assert rows[:2] == [["mini:telecom"], ["whole", "–", "75.0 [30.1, 95.4]", "50.0 [9.5, 90.5]",
                                          "50.0 (k = 2)", "2 × 2", "0.0", "0"]]
    assert rows[2][2:4] == ["25.0 [4.6, 69.9]", "unknown"] and rows[2][-1] == "1"
    assert rows[3:] == [["user gave up", "1 (100%)", "1 (50%)"], ["error budget spent", "0 (0%)", "1 (50%)"]]


def test_evaluations_of_an_arm_stand_together_with_their_mean_and_tell_nothing_twice(tmp_path, browser):
    tasks = {f"mini:telecom/test/{i:03}": {"domain": "mini:telecom", "digest": "0", "seen": False, "nothing": 0.0,
                                           "strata": ["1 issue"] * (i == 0)} for i in range(2)}
    folders = []
    for method, seed, solved in (("faca", 1, 24), ("faca", 0, 40), ("grpo", 0, 20)):
        training = {"method": method, "lam": 0.5 * (method == "faca"), "control": "none", "seed": seed}
        folders.append(make_results(tmp_path / "results" / method / str(seed), solved, ["user gave up"] * (40 - solved),
                                    trials=20, training=training, tasks=tasks))
    report(folders, tmp_path / "report.html")
    visit(browser, tmp_path / "report.html")
    # shares 1.0 and 0.6 of FACA: mean 0.8, sample standard deviation 0.4 / sqrt 2
    assert text(browser, ".tiles").split("\n") == [
        "Interactive GRPO", "50.0 %", "40 dialogues", "FACA", "80.0 %", "2 seeds, ± 28.3 (sample sd), 80 dialogues"]
    rows = rows_of_evaluations(browser)
    assert [row[:2] for row in rows[:5]] == [
        ["mini:telecom"], ["results/grpo/0", "Interactive GRPO"], ["results/faca/0", "FACA"],
        ["results/faca/1", "FACA"], ["mean of 2", "FACA"]]
    # in all 20 trials: both tasks, and the first of the two, 1.0 and 0.5: sample standard deviation 0.25 x sqrt 2
    assert rows[4][2:] == ["80.0 ± 28.3", "75.0 ± 35.4 (k = 20)", "", "", "0"]
    assert rows[5] == ["mini:telecom, 1 issue"] and [row[0] for row in rows[6:10]] == [row[0] for row in rows[1:5]]
    assert rows[10:] == [["user gave up", "20 (100%)", "16 (100%)"]]
    few = "return [...document.querySelectorAll('#evaluations tr.few')].length"  # the 20 dialogues of one task
    assert browser.execute_script(few) == 4
    assert text(browser, "#evaluations > p") == "By eval.py run, 20 dialogues a task. No task here was trained on."
    assert browser.execute_script("return document.querySelector('#curves') || document.querySelector('#summary')"
                                  " || document.querySelector('nav a[href=\"#curves\"]')") is None
    assert "arms compared, learning curves" in text(browser, "header > p:last-child")


def test_dialogues_of_evaluations_are_browsed_without_credit_the_failed_first_with_their_reasons(tmp_path, browser):
    folder = make_results(tmp_path / "eval", 3, ["user gave up"])
    run = make_run(tmp_path / "run", steps=1)
    says = report([run, folder], tmp_path / "report.html")
    assert says.endswith("; rollouts of 1 of 1 steps")
    visit(browser, tmp_path / "report.html", "#run=eval")
    assert browser.get_log("browser") == []
    options = browser.execute_script("return [...document.querySelector('#group').options].map(o => o.text)")
    assert options == ["001: 1 of 2 solved", "000: 2 of 2 solved"]
    assert text(browser, "#group-says") == "Task mini:telecom/test/001, 2 trials, 1 solved. Failed: user gave up (1)."
    heads = browser.execute_script("return [...document.querySelectorAll('.dialogues thead th')].map(e => e.innerText)")
    assert [head.split("\n")[0] for head in heads] == ["Trial 0 ✓ solved", "Trial 1 ✗ not solved"]
    assert "Failed: user gave up" in heads[1] and "Failed" not in heads[0] and "part" not in heads[0]
    assert "confirm +1" in text(browser, ".reply td") and "private: look_at_screen" in text(browser, ".reply td")
    assert browser.execute_script("return document.querySelector('.credit')") is None
    hidden = "return ['#step', '.guide', '.guide.evaluation'].map(e => document.querySelector(e).checkVisibility())"
    assert browser.execute_script(hidden) == [False, False, True]
    browser.execute_script("let s = document.querySelector('#run'); s.value = 0; s.dispatchEvent(new Event('change'))")
    assert browser.execute_script(hidden) == [True, True, False] and "= outcome" in text(browser, ".credit")


# ------------------------------------------------------------------------------------------------------- bad input


def test_runs_that_lack_something_are_shown_and_what_they_lack_is_said(tmp_path):
    torn = make_run(tmp_path / "x" / "run", steps=2)
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 2, "succ')
    odd = make_run(tmp_path / "y" / "run", seed=1, steps=2)
    lines = (odd / "metrics.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace('"success": 0.0', '"success": NaN').replace('"coverage": 0.8', '"coverage": null')
    (odd / "metrics.jsonl").write_text("\n".join([lines[0], "no JSON", "7", *lines[1:]]) + "\n")
    (odd / "rollouts" / "step-00001.jsonl").write_text("{}\n")
    bare = make_run(tmp_path / "bare", seed=2, steps=2)
    for path in (bare / "rollouts").iterdir():
        path.unlink()
    (bare / "rollouts").rmdir()
    sft = make_run(tmp_path / "sft", "sft", steps=0)
    says = report([torn, odd, bare, sft], tmp_path / "report.html")
    assert says.startswith(f"{tmp_path / 'report.html'}: 4 runs, ")
    assert "x/run: the last line of its metrics is torn" in says
    assert "y/run: 2 damaged lines of its metrics are left out, line 2 first" in says
    assert "y/run: step 1 is not shown: " in says and "step-00001.jsonl: line 1 is no rollout" in says
    assert "bare: " not in says and "sft: " not in says and "\n" not in says
    assert "<b>bare</b>: it has no rollouts" in (tmp_path / "report.html").read_text()


def test_a_run_of_sft_alone_makes_a_page(tmp_path, browser):
    sft = make_run(tmp_path / "sft", "sft", steps=0)
    (sft / "metrics.jsonl").write_text('{"phase": "held_out", "at": "before", "pass@1/a": 0.0}\n'
                                       '{"phase": "sft", "step": 0, "loss": 2.0}\n'
                                       '{"phase": "sft", "step": 1, "loss": 1}\n'
                                       '{"phase": "held_out", "at": "after SFT", "pass@1/a": 0.25, "pass@1/b": 0.75}\n')
    report([sft], tmp_path / "report.html")
    visit(browser, tmp_path / "report.html")
    assert browser.get_log("browser") == []
    assert text(browser, ".tiles").split("\n")[:2] == ["SFT alone", "50.0 %"]  # mean over domains
    assert "No run has done a step of RL yet." in text(browser, "#curves")
    assert text(browser, "#summary").startswith("The runs\n")
    assert text(browser, "nav").split() == ["Summary", "Curves"]
    assert text(browser, "header > p:last-child") == "Left out, since nothing that was given has them: dialogues."


def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch):
    run, out = make_run(tmp_path / "run", steps=1), tmp_path / "report.html"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "qwen3"}')
    other = make_run(tmp_path / "other", steps=1, lam="half")
    for folders, where, line in (
            ([run, tmp_path / "none"], out, "none is neither a run folder of train.py"),
            ([foreign], out, "foreign is neither a run folder of train.py"),
            ([other], out, "config.json has another kind of lam"),
            ([run, tmp_path / "run" / ".." / "run"], out, "is named twice"),
            ([], out, "no folder was named"),
            ([run], tmp_path, "must be a file in a folder that exists"),
            ([run], tmp_path / "no" / "report.html", "must be a file in a folder that exists")):
        with pytest.raises(ReportError, match=re.escape(line)) as error:
            report(folders, where)
        assert "\n" not in str(error.value)
    broken = make_results(tmp_path / "broken", 1, [])
    (broken / "results.jsonl").write_text("{}\n")
    with pytest.raises(ReportError, match="results.jsonl: line 1 is no result"):
        report([broken], out)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ReportError, match="pip install matplotlib"):
        report([run], out)
