"""Co-Gym's three tasks: what they are, and what of its checkout they are made of."""

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from extras.ranks import UsageError

USER = "gpt-4o-2024-08-06"  # written into Co-Gym's simulated user
DATABASE = ("flights/clean_Flights_2022.csv", "accommodations/clean_accommodations_2022.csv",
            "restaurants/clean_restaurant_2022.csv", "googleDistanceMatrix/distance.csv", "attractions/attractions.csv",
            "background/citySet_with_states.txt")
CLONE = "git clone https://github.com/SALT-NLP/collaborative-gym"
TRAVEL = "https://drive.google.com/file/d/1pF1Sw6pBmq2sFkJvm-LzJOqrmfWoQgxE"


@dataclass(frozen=True)
class Task:
    """One of Co-Gym's three: how its environment is named and told, and which models it asks."""

    env: str
    size: int
    index: str                # the option of its environment that takes a session's number
    data: dict[str, str]      # its options that hold paths, and those within the checkout
    judge: str
    models: tuple[str, ...]   # all that it asks, beside the user's
    keys: tuple[str, ...] = ()


TASKS = {
    "travel_planning": Task(
        "travel_planning", 102, "travel_planner_data_point_idx",
        {"travel_planner_data_path": "datasets/TravelPlanner/validation_with_hidden_profile.csv",
         "travel_planner_database_dir": "datasets/TravelPlanner/database"},
        f"{USER} reads the plan, rules rate it", ()),
    "related_work": Task(
        "lit_survey", 100, "simulated_data_point_idx",
        {"simulated_data_path": "datasets/RelatedWorkWriting/test.json",
         "rubric_path": "datasets/RelatedWorkWriting/rubric.txt"}, "gpt-4-0613", ("gpt-4-0613", "gpt-4o-mini"),
        ("VOYAGE_API_KEY", "QDRANT_ENDPOINT", "QDRANT_API_KEY", "QDRANT_COLLECTION")),
    "tabular_analysis": Task(
        "tabular_analysis", 110, "discovery_bench_data_point_idx",
        {"discovery_bench_root_dir": "datasets/discoverybench/real/test"}, USER, ()),
}


def check_data(tasks: list[str], folder: Path) -> None:
    """Raises UsageError, one line, for what the checkout lacks."""
    for name in tasks:
        for part in TASKS[name].data.values():
            if part.endswith("database"):
                lacking = [file for file in DATABASE if not (folder / part / file).is_file()]
                if lacking:
                    raise UsageError(f"travel_planning needs TravelPlanner's database, and {folder / part} has no "
                                     f"{lacking[0]}: download {TRAVEL} and unzip it as that folder, or leave the task "
                                     "out of --tasks")
            elif not (folder / part).exists():
                raise UsageError(f"--bench-data {folder} is no checkout of Co-Gym, it has no {part}: {CLONE}, and name "
                                 "that folder")


def content(name: str, folder: Path) -> list[str]:
    """A digest of each session's content and of all files of its task. Raises UsageError for another data set."""
    task = TASKS[name]
    path = folder / next(iter(task.data.values()))
    try:
        files = " ".join(files_of(folder / part) for part in task.data.values())
        if name == "travel_planning":
            csv.field_size_limit(2**31 - 1)
            with path.open(newline="") as file:
                found = [json.dumps(row) for row in csv.reader(file)][1:]
        elif name == "related_work":
            found = [json.dumps(point) for point in json.loads(path.read_text())]
        else:  # the list is in Co-Gym's code
            answers = (path / "answer_key_real.csv").read_text()
            found = [f"{i} {answers}" for i in range(task.size)]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} can't be read ({type(error).__name__}): {CLONE}, and name that folder") from None
    if len(found) != task.size:
        raise UsageError(f"{path} has {len(found)} sessions, and {name} has {task.size}: it is another data set")
    return [hashlib.blake2b(f"{text} {files}".encode(), digest_size=8).hexdigest() for text in found]


def files_of(path: Path) -> str:
    """A digest of a file, or of all files of a folder: names, sizes and contents."""
    told = hashlib.blake2b(digest_size=8)
    for file in sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "blake2b").hexdigest()
        told.update(f"{file.relative_to(path.parent)} {file.stat().st_size} {digest}\n".encode())
    return told.hexdigest()
