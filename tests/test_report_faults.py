"""The report, the audit and the alarm with what no run should hold: absurd numbers, names and sizes; interruptions."""

import json
import re
from pathlib import Path

import pytest

from extras.alarm import proxy_alarm
from extras.audit import AuditError, audit
from extras.report import report
from extras.runs import ReportError
from screenshots import PHONE
from test_report import browser, make_run, rollout, text, visit  # noqa: F401 (browser is a fixture)

HUGE, NOWHERE = 10 ** 400, "RL step " + "9" * 5000


def changed(run: Path, line: int, **more) -> Path:
    """The run with other values in a row of its metrics; 0 is an evaluation, then come RL steps."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    rows[line] = json.dumps(json.loads(rows[line]) | more)
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return run


@pytest.mark.parametrize("line, more", [
    *((1, {key: value}) for key in ("success", "positive_share", "observed", "step") for value in (HUGE, 1e308)),
    (0, {"pass@1/mini:telecom": HUGE}), (0, {"pass@1/mini:telecom": 1e308}), (0, {"at": NOWHERE})])
def test_numbers_that_no_float_holds_are_no_values_of_a_curve(tmp_path, line, more):
    run = changed(make_run(tmp_path / "a"), line, **more)
    assert "1 runs" in report([run], tmp_path / "report.html")
    assert "Infinity" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("values", [{"success": float("nan")}, {"success": HUGE}, {"step": 1e308}])
def test_the_audit_names_the_row_of_metrics_that_has_no_such_number(tmp_path, values):
    with pytest.raises(AuditError, match=f"line 2 is no row of RL .no number: {next(iter(values))}.$"):
        audit(changed(make_run(tmp_path / "a"), 1, **values), None, 0, 0)


@pytest.mark.parametrize("reward", [HUGE, 1e308])
def test_a_reward_that_no_float_holds_is_named_by_the_audit_and_shown_as_not_solved(tmp_path, reward):
    run = make_run(tmp_path / "a", records=[rollout(0, 0, reward, ["confirm"], [1], [HUGE], 0.5)])
    assert "rollouts of 3 of 3" in report([run], tmp_path / "report.html")
    with pytest.raises(AuditError, match="group 0, rollout 0 has .* a reward that is no number"):
        audit(run, None, 0, 0)


@pytest.mark.parametrize("options", [{"lam": float("nan")}, {"lam": HUGE}, {"seed": HUGE}])
def test_options_that_are_no_numbers_are_refused(tmp_path, options):
    with pytest.raises(ReportError, match=f"config.json has another kind of {next(iter(options))}$"):
        report([make_run(tmp_path / "a", **options)], tmp_path / "report.html")


def test_json_too_deep_to_be_read_is_a_damaged_line_or_no_run(tmp_path):
    run = make_run(tmp_path / "a", simulator=["a list"])
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"phase": "sft", "step": 0}\n')
    assert "1 damaged lines of its metrics are left out, line 6 first" in report([run], tmp_path / "report.html")
    (run / "config.json").write_text("[" * 100_000)
    with pytest.raises(ReportError, match="is neither a run folder .* RecursionError"):
        report([run], tmp_path / "report.html")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_older_report_stays_until_the_new_one_is_whole(tmp_path, monkeypatch, fault):
    run, out = make_run(tmp_path / "a"), tmp_path / "report.html"
    out.write_text("the older one")

    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise fault

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((KeyboardInterrupt, ReportError)):
        report([run], out)
    assert out.read_text() == "the older one" and sorted(p.name for p in tmp_path.iterdir()) == ["a", "report.html"]


def test_a_link_to_a_report_stays_a_link(tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "report.html")
    report([make_run(tmp_path / "a")], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "report.html").stat().st_size > 50_000


def test_a_group_larger_than_the_page_is_left_out_and_said_and_the_others_are_shown(tmp_path):
    huge = rollout(0, 0, 1.0, ["confirm"], [1], [0.5], 0.5)
    huge.messages[2]["tool_calls"][0]["function"]["name"] = "n" * 6_000_000
    run = make_run(tmp_path / "a", steps=1, records=[huge, rollout(1, 0, 1.0, ["confirm"], [1], [0.5], 0.5, "Small.")])
    said = report([run], tmp_path / "report.html")
    assert re.search(r"group 0 is not shown: its dialogues take 6,00\d kB, more than there is room for .step 0.", said)
    assert (tmp_path / "report.html").stat().st_size < 1e6 and "Small." in (tmp_path / "report.html").read_text()


def test_rollouts_take_only_what_the_charts_leave_of_ten_megabytes(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.charts.slim", lambda *_: "<svg>" + "x" * 1_100_000 + "</svg>")  # 7 of them
    run = make_run(tmp_path / "a", records=[rollout(0, k, float(k), ["confirm"], [1], [0.5], 0.5, f"{k} " * 500_000)
                                            for k in range(2)])
    monkeypatch.setattr("extras.report.metrics", lambda *_: ("", ""))
    assert "is not shown: its dialogues take 2," in report([run], tmp_path / "report.html")
    assert 7e6 < (tmp_path / "report.html").stat().st_size < 10e6
    monkeypatch.undo()
    assert "is not shown" not in report([run], tmp_path / "report.html")


def test_long_names_and_paths_do_not_make_the_page_wider_than_a_phone(tmp_path, browser):  # noqa: F811
    long = "x" * 90
    folders = [make_run(tmp_path / long, model=f"runs/{long}"), make_run(tmp_path / "b", "grpo")]
    for run in folders:
        (run / "rollouts/step-00001.jsonl").write_text("")
    report(folders, tmp_path / "report.html")
    visit(browser, tmp_path / "report.html", size=PHONE)
    assert browser.execute_script("return document.documentElement.scrollWidth") == PHONE[0]


def test_a_link_to_what_the_page_does_not_have_says_so(tmp_path, browser):  # noqa: F811
    report([make_run(tmp_path / "a")], tmp_path / "report.html")
    for place, missing in (("run=b", "run b"), ("run=a&step=-1", "step -1"), ("run=a&step=1&group=%00", "group ")):
        visit(browser, tmp_path / "report.html", f"#{place}")
        assert text(browser, "#group-says").startswith(f"This page does not have {missing}")
    visit(browser, tmp_path / "report.html", "#run=a&step=1&group=4&rollout=1")
    assert text(browser, "#group-says").startswith("Task ") and browser.get_log("browser") == []
    visit(browser, tmp_path / "report.html", size=PHONE)
    browser.execute_script("location.hash = 'run=a&step=1&group=0'")
    assert browser.execute_script("return new Promise(done => setTimeout(() => "
                                  "done(document.querySelectorAll('table.dialogues thead th').length), 100))") == 1


def test_the_alarm_passes_over_rows_without_its_numbers_and_rings_as_without_them():
    rows = [{"phase": "rl", "step": i, "success": 0.9 - 0.6 * (i >= 20), "positive_share": 0.5 + 0.4 * (i >= 20)}
            for i in range(40)]
    assert proxy_alarm(rows) and not proxy_alarm(rows[:39])
    odd = [{"phase": "rl", "step": 20}, {"phase": "rl", "success": None, "positive_share": 0.5},
           {"phase": "rl", "success": float("nan"), "positive_share": 0.5}]
    assert proxy_alarm(odd + rows) and proxy_alarm(rows[:20] + odd + rows[20:]) and not proxy_alarm(odd + rows[:39])
