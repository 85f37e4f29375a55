"""The README is true: its example runs, its tables name what exists, its limits hold."""

import doctest
import importlib
import json
import pathlib
import re

from miniature_tables import digest, side_by_side, tables
from PIL import Image

from extras.plan import options_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    found = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert found.attempted > 8 and found.failed == 0


def test_every_function_and_test_of_the_equation_table_exists():
    section = README.split("## The paper in the code")[1].split("\n## ")[0]
    functions = re.findall(r"`((?:faca|rollout|train)\.\w+)`", section)
    tests = re.findall(r"`(test_\w+)`", section)
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert len(functions) >= 10 and len(tests) >= 10
    for name in functions:
        module, _, attribute = name.partition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    for name in tests:
        assert f"def {name}(" in written, name


def test_the_file_tree_names_every_module_and_each_of_them_is_under_450_lines():
    tree = README.split("```")[1]
    for path in ROOT.glob("*.py"):
        assert path.name in tree and len(path.read_text(encoding="utf-8").splitlines()) < 450, path
    for path in (ROOT / "extras").glob("*.py"):
        assert path.name in tree, path


def test_every_flag_of_the_readme_is_one():
    import eval as evaluation
    import train
    known = {"--" + name.replace("_", "-") for name in train.Config.__dataclass_fields__} | {"--help"}
    for command in re.findall(r"^(?:torchrun|python).*?(?=#|$)", README, re.MULTILINE):
        flags = set(re.findall(r"--[a-z-]+", command)) - {"--nproc-per-node"}
        if "eval.py" in command:
            evaluation.parse(command.split()[2:])
        elif "--plan" in flags:
            options_of(command.split()[2:])
        elif "train.py" in command:
            assert flags <= known, command
        else:
            written = (ROOT / command.split()[1]).read_text(encoding="utf-8")
            assert all(f'"{flag}"' in written for flag in flags), command


def test_the_results_are_those_of_the_results_files_tables_picture_and_numbers_in_the_text():
    results, again = (json.loads((ROOT / f"tests/{name}.json").read_text(encoding="utf-8"))
                      for name in ("miniature", "miniature_again"))
    section = README.split("## Results")[1].split("\n## ")[0]
    shown = tables(results) | {"both": side_by_side([results, again])}
    assert all(len(each["runs"]) == each["about"]["runs"] for each in (results, again))  # all of them are in
    for name, text in shown.items():
        assert text in section, name
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    told, known = (set(re.findall(r"\d+\.\d+", text)) for text in (prose, " ".join(shown.values())))
    assert told <= known, told - known
    with Image.open(ROOT / "tests/miniature.png") as picture:
        assert picture.info["Description"] == f"results {digest(results)}"


def test_ci_runs_the_readmes_test_command():
    assert f"```bash\n{(ROOT / '.ci' / 'run').read_text(encoding='utf-8').splitlines()[-1]}\n```" in README
