"""A training step is exact on any number of ranks and micro-batches; a run can be trusted: killed, resumed, refused.

All of it is train.py itself in processes of its own, over gloo; see ranks_worker.py.
"""

import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import ranks_worker
import train
from env import load_tasks, make_env
from extras.checkpoint import save_policy
from extras.ranks import Lasting
from extras.run import rows_before
from extras.sft import load_dialogues, split
from extras.show import load_rollouts
from extras.tiny import ExpertSampler, domain_words, make_tokenizer
from ranks_worker import finish, start
from rollout import Caps, Chat, Rollout, play_groups

TEMPERATURE, CLIP = 0.7, 0.2
LENGTHS, BUDGETS = (40, 36, 20, 16), (112, 76, 1)  # tokens; those of 1, 2 and 4 micro-batches


# --------------------------------------------------------------------------------------------- the step, by hand


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random Qwen3 folders with the tiny tokenizer: tied, and untied, with unused rows in the embedding."""
    tokenizer, folders = make_tokenizer(), {}
    chat = Chat(tokenizer)
    note = {"preset": "tiny", "caps": dataclasses.asdict(Caps()), "temperature": 1.0, "trained_on": []}
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer) + 7, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
            initializer_range=0.15, tie_word_embeddings=name == "tied", bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
        folders[name] = str(tmp_path_factory.mktemp("models") / name)
        save_policy(ranks_worker.Path(folders[name]), model, tokenizer, chat.end_ids, note)
    return folders


@pytest.fixture(scope="module")
def records():
    """Four rollouts, whose old logprobs make ratios on both sides of the clip."""
    draw, out = random.Random(0), []
    for i, length in enumerate(LENGTHS):
        segment = [-1] * 5 + [0] * (length // 4) + [-1] * 3
        segment += [1] * (length - len(segment))
        out.append(Rollout(str(i), "x", i, 0, 0, [draw.randrange(3, 260) for _ in segment], segment,
                           [draw.uniform(-7, -4) if q >= 0 else 0.0 for q in segment], [None, None], [None, None],
                           [draw.uniform(-2, 2), draw.uniform(-2, 2)]))
    return out


def loss_by_hand(model, records):
    """Eqs. 7-8 in a loop over rollouts, each alone in a plain forward."""
    banned = torch.tensor(Chat(make_tokenizer()).banned_ids(model.config.vocab_size))
    total, tokens = 0.0, sum(q >= 0 for r in records for q in r.segment)
    for r in records:
        ids, at = torch.tensor(r.tokens), torch.tensor([t for t, q in enumerate(r.segment) if q >= 0])
        logits = model(ids[None]).logits[0, at - 1].index_fill(1, banned, -math.inf) / TEMPERATURE
        logp = logits.log_softmax(-1).gather(1, ids[at][:, None])[:, 0]
        advantage = torch.tensor([r.advantage[q] for q in r.segment if q >= 0])
        ratio = (logp - torch.tensor(r.logprobs)[at]).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum() / tokens
    return total


@pytest.fixture(scope="module")
def worlds(models, records, tmp_path_factory):
    """{ranks: what each found}: shares of 3 and 1 rollouts on two ranks, of 1, 0 and 3 on three."""
    out = {}
    kinds = [("tied", models["tied"], True), ("untied", models["untied"], False)]
    swapped = [(name, folder, not recompute) for name, folder, recompute in kinds]
    more = {1: {"gradients": {"models": kinds + swapped}, "live_tensors": {}, "probe": {}},
            2: {"gradients": {"models": kinds}, "two_updates": {}, "bad_steps": {},
                "checkpoints": {"folder": tmp_path_factory.mktemp("first") / "rl-000000"}},
            3: {"gradients": {"models": swapped}}}
    argv = ["--env", "mini:retail", "--kv-gib", "0.01", "--temperature", str(TEMPERATURE), "--model", models["untied"]]
    for ranks, cuts in {1: (0, 4), 2: (0, 3, 4), 3: (0, 1, 1, 4)}.items():
        shares = [records[a:b] for a, b in itertools.pairwise(cuts)]
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        done = finish(*start(folder, ranks_worker.check, folder, argv, shares, BUDGETS, more[ranks], ranks=ranks))
        assert done.code == 0, done.err
        out[ranks] = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
    return out


def largest(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_gradient_is_that_of_a_plain_loop_for_any_micro_batches_and_ranks(worlds, models, records, name):
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    loss = loss_by_hand(model, records)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    size = max(g.abs().max().item() for g in expected)
    assert 0 < size < 100 and all(g.abs().max() > 0 for g in expected)
    found = [(ranks, key, value) for ranks, world in worlds.items() for of_rank in world
             for key, value in of_rank["gradients"].items() if key[0] == name]
    assert len(found) == (2 * 1 + 2 + 3) * len(BUDGETS)
    for ranks, (_, recompute, budget), (gradient, stats, batches) in found:
        print(f"{name}, ranks {ranks}, micro-batches {batches}: {largest(gradient, expected) / size:.1e}")
        assert largest(gradient, expected) < 1e-5 * size
        assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert stats["tokens"] == sum(q >= 0 for r in records for q in r.segment)
    assert {batches for ranks, _, (_, _, batches) in found if ranks == 1} == {1, 2, 4}
    assert {batches for ranks, _, (_, _, batches) in found if ranks == 3} == {1, 3}
    assert 0 < found[0][2][1]["clipped"] < 1  # the clip did cut, and not all


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weights_are_read_by_rank_0_alone_and_the_sharded_model_computes_what_the_plain_one_does(worlds, models, name):
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    expected = model(torch.arange(3, 40)[None]).logits.detach()
    for ranks, world in worlds.items():
        for rank, of_rank in enumerate(world):
            logits, held = of_rank["gradients"][name]
            assert torch.allclose(logits, expected, atol=1e-5)
            assert held == pytest.approx(1 / ranks, abs=0.05)
            assert of_rank["gradients"]["read"] == (0 if rank else 4 if ranks == 1 else 2)
            assert of_rank["gradients"]["forwards"] == {True: 2, False: 1}


def test_two_updates_on_a_batch_are_two_full_batch_steps_written_by_hand(models, records, worlds):
    """Three rollouts on one rank in two micro-batches, one on the other: the weights of plain AdamW, twice."""
    model = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_by_hand(model, records).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for of_rank in worlds[2]:
        found = of_rank["two_updates"]
        print("two updates:", largest(found["weights"], list(model.parameters())))
        assert largest(found["weights"], list(model.parameters())) < 1e-5
        assert len(found["first"]) == len(found["second"]) == 2
        for (first, old), (second, later) in zip(found["first"], found["second"], strict=True):
            assert torch.equal(old, later) and (len(first) == 0 or not torch.equal(first, second))


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_and_the_run_ends_after_some(worlds):
    for of_rank in worlds[2]:
        found = of_rank["bad_steps"]
        for number, kind in enumerate(("nan_loss", "infinite_gradient"), 1):
            untouched, stats, in_a_row = found[kind]
            assert untouched and stats["skipped"] == 1 and in_a_row == number
        assert math.isfinite(found["infinite_gradient"][1]["loss"]) and math.isnan(found["nan_loss"][1]["loss"])
        assert "after 3 skipped steps in a row" in found["stopped"] and "\n" not in found["stopped"]
        assert found["half"] == (1, 0)  # of two updates one was made: no bad step, and nothing to stop for
        assert found["good"] == (0, True, True)


def test_a_step_leaves_no_tensor_behind(worlds):
    counts = worlds[1][0]["live_tensors"]
    assert counts[0] == counts[1], counts


def test_the_probe_stops_a_replica_that_is_not_the_policy_and_lets_a_far_step_pass(worlds):
    found = worlds[1][0]["probe"]
    assert found.pop("moved") > 0.05 and found.pop("nothing") == ""
    assert all("not one policy" in said for said in found.values()) and len(found) == 4, found


def test_a_checkpoint_before_the_first_step_changes_nothing_in_it(worlds):
    for of_rank in worlds[2]:
        found = of_rank["checkpoints"]
        for name in ("saved", "resumed"):
            assert all(torch.equal(a, b) for a, b in zip(found["plain"], found[name], strict=True)), name


def test_the_learning_rates_warm_up_and_decay_as_by_hand():
    assert [train.schedule(step, 8, 4, "none") for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [train.schedule(step, 4, 0, "linear") for step in range(4)] == [1, 0.75, 0.5, 0.25]
    assert [train.schedule(step, 4, 2, "linear") for step in range(4)] == [0.5, 0.75, 0.5, 0.25]
    assert [train.schedule(step, 4, 1, "cosine") for step in range(4)] == pytest.approx(
        [1, (1 + 0.5 ** 0.5) / 2, 0.5, (1 - 0.5 ** 0.5) / 2])


# ----------------------------------------------------------------------------------------------------- a run's life

SMALL = ("--env", "mini:retail", "--prompts", "2", "--rollouts", "3", "--max-messages", "3", "--max-message-tokens",
         "12", "--eval-trials", "1", "--seed", "2")
RUN = (*SMALL, "--eval-every", "2", "--sft-steps", "3", "--sft-batch", "4", "--sft-dialogues", "1",
       "--sft-validation", "0.2", "--save-every", "2", "--lr", "3e-3", "--warmup", "0", "--updates-per-batch", "2")


words = functools.cache(domain_words)


def trained(folder, *argv, ranks=1, **more):
    """train.py to its end, whatever that is."""
    return finish(*start(folder.parent, ranks_worker.run, [*map(str, argv)], words(), ranks=ranks, **more))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """SFT and 4 RL steps in one go, all checkpoints kept."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    done = trained(folder, *RUN, "--steps", 4, "--keep", 9, "--out", folder)
    assert done.code == 0, done.err
    signal = [row["signal"] for row in rows(folder) if row["phase"] == "rl"]
    assert any(signal[:2]) and any(signal[2:])  # else resuming would prove little
    return folder


def rows(folder):
    """The metrics, without those that are times and memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items()
             if not name.startswith("seconds") and not name.endswith("_per_second") and name != "peak_gib"}
            for line in lines]


def state(folder):
    """Weights and optimizer of a checkpoint as one file of plain torch."""
    dcp_to_torch_save(folder / "state", folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_run(one, two):
    """Weights, optimizer, rollouts and metrics, bit for bit."""
    assert rows(one) == rows(two)
    assert names(one / "rollouts") == names(two / "rollouts")
    for name in names(one / "rollouts"):
        assert (one / "rollouts" / name).read_bytes() == (two / "rollouts" / name).read_bytes()
    for name in ("sft", "model"):
        first, second = (load_file(folder / name / "model.safetensors") for folder in (one, two))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    first, second = (state(folder / "checkpoints" / "rl-000004") for folder in (one, two))
    flat = [tree_flatten(found) for found in (first, second)]
    assert flat[0][1] == flat[1][1] and len(flat[0][0]) > 50
    for a, b in zip(flat[0][0], flat[1][0], strict=True):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_two_steps_and_two_after_a_resume_are_four_in_one_go(straight, tmp_path):
    folder = tmp_path / "run"
    assert trained(folder, *RUN, "--steps", 2, "--out", folder).code == 0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "st')  # as of a process that was killed while it wrote
    done = trained(folder, "--resume", folder, "--steps", 4)
    assert done.code == 0 and f"resuming {folder} from rl-000002" in done.err
    assert_same_run(straight, folder)
    assert names(folder / "checkpoints") == ["rl-000002", "rl-000004"]  # --keep 2


MOMENTS = [  # what the process was about to do when it was killed
    ("open", "metrics.jsonl", 3),  # SFT's first row
    ("os.rename", "sft-000003.part", 1),
    ("open", "step-00001.jsonl.part", 1),
    ("shutil.rmtree", "checkpoints/sft-000002", 1),
    ("open", "metrics.jsonl", 4),  # the evaluation's row, amid RL
    ("open", "rl-000004.part/model.part/config.json", 1),
    ("os.rename", "run/model.part", 1)]


def test_killed_at_many_moments_a_run_goes_on_as_if_it_had_not_been(straight, tmp_path):
    folder, argv, said = tmp_path / "run", [*RUN, "--steps", 4, "--out", tmp_path / "run"], []
    for moment in MOMENTS:
        done = trained(folder, *argv, dies=moment)
        assert done.code == -9, (moment, done.err)
        said.append(done.err)
        argv = ["--resume", folder]
    done = trained(folder, *argv)
    assert done.code == 0, done.err
    assert "from the beginning: it has no checkpoint" in said[1] and "from rl-000002" in said[-1]
    assert_same_run(straight, folder)
    assert names(folder / "checkpoints") == ["rl-000002", "rl-000004"]
    assert not list(folder.rglob("*.part"))


def copy_until(straight, folder, last):
    """The run as it was when that checkpoint was the newest."""
    shutil.copytree(straight, folder)
    for name in names(folder / "checkpoints"):
        if (name.startswith("rl"), name) > (last.startswith("rl"), last):
            shutil.rmtree(folder / "checkpoints" / name)
    return folder


def test_resumed_on_another_number_of_ranks_a_run_goes_on_to_float_tolerance(straight, tmp_path):
    folder = copy_until(straight, tmp_path / "run", "rl-000002")
    done = trained(folder, "--resume", folder, ranks=2)
    assert done.code == 0 and "from rl-000002" in done.err
    for name in names(straight / "rollouts"):
        one, two = (load_rollouts(run / "rollouts" / name) for run in (straight, folder))
        assert [r.tokens for r in one] == [r.tokens for r in two]
        assert [r.advantage for r in one] == [r.advantage for r in two]
    first, second = (load_file(run / "model" / "model.safetensors") for run in (straight, folder))
    before = load_file(straight / "checkpoints" / "rl-000002" / "model" / "model.safetensors")
    moved = largest(first.values(), before.values())
    print("two ranks for one:", largest(first.values(), second.values()), "of", moved)
    assert largest(first.values(), second.values()) < 1e-3 * moved


def refused(folder, *argv, **more):
    """What train.py says of a resume that can't be: one line, exit code 2, and the folder as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    done = trained(folder, "--resume", folder, *argv, **more)
    said = [line for line in done.err.splitlines() if line and "it/s]" not in line]  # but for a bar
    assert done.code == 2 and len(said) == 1 and said[0].startswith("train.py: "), done.err
    assert before == {path: path.read_bytes() for path in before}
    return said[0]


def test_a_resume_with_another_config_is_one_line(straight, tmp_path, models):
    for argv, named in [
            (("--lr", "1"), "--lr 1.0 is not what"), (("--env", "mini:telecom"), "--env mini:telecom is not what"),
            (("--model", models["tied"]), f"--model {models['tied']} is not what"),
            (("--prompts", "3"), "free: steps"), (("--out", tmp_path / "b"), "--out"), (("--steps", "-1"), "--steps")]:
        assert named in refused(straight, *argv)
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert f"{folder} is no run folder" in refused(folder)


def test_a_run_folder_has_one_process_at_a_time(straight):
    with (straight / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is at work in it" in refused(straight)


def test_a_resume_with_other_tasks_is_one_line(straight):
    assert "the task list of --env is not what" in refused(straight, held_out=4)


def test_a_config_edited_to_other_values_is_one_line(straight, tmp_path):
    folder = copy_until(straight, tmp_path / "run", "rl-000002")
    options = json.loads((folder / "config.json").read_text())
    for name, value, said in (("lr", "fast", "its type: lr"), ("steps", None, "its type: steps"),
                              ("prompts", 1.5, "its type: prompts"), ("seed", 7, "config.json is not what"),
                              ("steps", 1, "--steps 1 is less than the 2 that")):
        (folder / "config.json").write_text(json.dumps(options | {name: value}))
        assert said in refused(folder)
    (folder / "config.json").write_text(json.dumps(options | {"steps": 2}))
    (folder / "checkpoints" / "rl-000002" / "note.json").write_text('{"phase": "rl"')
    assert "rl-000002 can't be read (JSONDecodeError" in refused(folder)
    with pytest.raises(train.UsageError, match="no run folder"):  # as of a shell's unset variable: no new run
        train.parse_config(["--resume", ""])


def test_a_checkpoint_whose_state_is_cut_is_one_line_and_moved_away_the_run_goes_on(straight, tmp_path):
    folder = copy_until(straight, tmp_path / "run", "rl-000002")
    newest = shutil.copytree(folder / "checkpoints" / "rl-000002", folder / "checkpoints" / "rl-000003")
    os.truncate(next((newest / "state").glob("*.distcp")), 5000)
    done = trained(folder, "--resume", folder)
    assert done.code == 2 and "Traceback" not in done.err
    assert "rl-000003 can't be read" in done.err.splitlines()[-1]
    newest.rename(folder / "checkpoints" / "rl-000003-damaged")  # no name of a checkpoint any more
    assert trained(folder, "--resume", folder).code == 0
    assert_same_run(straight, folder)


def test_metrics_go_back_to_the_checkpoint_but_keep_evaluations_of_its_weights(tmp_path, capsys):
    evaluated = {"phase": "held_out", "at": "after RL", "void": 0, "rollouts": 4}
    every = [{"phase": "rl", "step": 0}, {"phase": "rl", "step": 1}, evaluated, {"phase": "rl", "step": 2}]
    lines, note = [json.dumps(row) for row in every], {"step": 2, "rows": 2}
    config, file = SimpleNamespace(steps=2, max_void_rate=0.2), tmp_path / "metrics.jsonl"

    def left(text, **changed):
        file.write_text(text)
        return rows_before(note, file, SimpleNamespace(**vars(config) | changed))

    assert left("\n".join(lines)) == every[:3]
    assert left("\n".join(lines), steps=3) == every[:2]
    assert left("\n".join(lines).replace('"void": 0', '"void": 1')) == every[:2]  # which stopped the run
    assert rows_before(None, file, config) == [] and capsys.readouterr().err == ""
    assert left("\n".join([lines[0][:5], *lines[1:3]])) == every[1:3]
    assert "1 of the 2 rows" in capsys.readouterr().err
    assert left(lines[0] + "\n" + lines[1][:9]) == every[:1]
    file.unlink()
    assert rows_before(note, file, config) == [] and "2 of the 2 rows" in capsys.readouterr().err


def test_a_signal_that_comes_while_a_checkpoint_is_saved_parts_no_rank_from_the_others(monkeypatch):
    """SFT ends where all ranks were asked, not where this one alone has been told in the meantime."""
    seen = []
    run = SimpleNamespace(signalled=False, log=seen.append, stopped=lambda: len(seen) > 3, due=lambda step, steps: True,
                          bar=lambda steps, name: tqdm(steps, disable=True))
    trainer = SimpleNamespace(
        config=SimpleNamespace(sft_validation=0, seed=0, sft_batch=1, sft_steps=9, sft_lr=1, sft_warmup=0), rank=0,
        world=1, begin=lambda *_: 0, refresh_sampler=lambda: None,
        update=lambda *_: dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "skipped"), 0.0))
    monkeypatch.setattr(train, "save", lambda trainer, run: setattr(run, "signalled", True))
    train.sft(trainer, [Rollout("", "", 0, 0, 0)], run)
    assert trainer.at == ("sft", 4)


def test_what_is_said_to_a_reader_that_is_gone_ends_nothing():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        stream = Lasting(pipe)
        stream.write("heard\n")
        stream.flush()
        assert os.read(reader, 99) == b"heard\n"
        os.close(reader)
        print("to nobody", file=stream, flush=True)
        print("nor this", file=stream, flush=True)


def test_a_full_disk_ends_the_run_with_one_line_and_the_checkpoints_before_it_are_good(straight, tmp_path):
    folder = copy_until(straight, tmp_path / "run", "rl-000002")
    for size, named in ((10**6, "GiB are free there"), (10**4, "File too large")):  # weights take 2 MB, rollouts 13 kB
        done = trained(folder, "--resume", folder, largest_file=size)
        assert done.code == 1 and "Traceback" not in done.err and done.err.count("train.py: ") == 1, done.err
        assert named in done.err.splitlines()[-1]
        assert not list(folder.rglob("rl-*.part")) and names(folder / "checkpoints")[:2] == ["rl-000002", "sft-000002"]
    assert trained(folder, "--resume", folder, "--out", folder).code == 0
    assert_same_run(straight, folder)


@pytest.mark.parametrize("how, said", [("killed", "exitcode: -9|by peer"), ("raising", "the last words of rank 1")])
def test_a_rank_that_dies_ends_the_run_with_its_own_error_shown(straight, tmp_path, how, said):
    """Within the minute that finish() gives it. One that is killed is seen by torchrun or by the other rank, first."""
    folder = tmp_path / "run"
    argv = ["--model", straight / "sft", *SMALL, "--eval-trials", 0, "--steps", 2, "--out", folder]
    done = finish(*start(tmp_path, ranks_worker.under_torchrun, [*map(str, argv)], words(), how), seconds=60)
    assert done.code == 9 and re.search(said, done.err), done.err
    assert not (folder / "model").exists()


def test_every_checkpoint_holds_a_model_that_plain_transformers_loads(straight):
    assert names(straight / "checkpoints") == ["rl-000002", "rl-000004", "sft-000002", "sft-000003"]  # --keep 9
    for folder in [*(straight / "checkpoints").iterdir(), straight]:
        weights = load_file(folder / "model" / "model.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
        assert not any(info.values()) and "lm_head.weight" not in weights
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
        assert AutoTokenizer.from_pretrained(folder / "model").chat_template


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    """A few of the expert's, as rows of a file."""
    path, chat = tmp_path_factory.mktemp("data") / "rows.jsonl", Chat(make_tokenizer())
    tasks = load_tasks("mini:retail", "sft")[:12]
    records, _ = play_groups(list(enumerate(tasks)), 1, (0, 0), ExpertSampler(chat), chat, Caps())
    tools = make_env(tasks[0]).tools
    path.write_text("".join(json.dumps({"messages": r.messages, "tools": tools}) + "\n" for r in records))
    return path


@pytest.fixture(scope="module")
def taught(dialogues, models, tmp_path_factory):
    """SFT on a file, of an untied model that another one may stand in for later, on two ranks: run, model."""
    folder, given = tmp_path_factory.mktemp("taught") / "run", tmp_path_factory.mktemp("given") / "model"
    shutil.copytree(models["untied"], given)
    done = trained(folder, "--method", "sft", "--data", dialogues, "--model", given, "--env", "mini:retail",
                   "--max-context", 2048, "--eval-trials", 0, "--sft-steps", 2, "--sft-batch", 3, "--sft-validation",
                   0.1, "--out", folder, ranks=2)
    assert done.code == 0, done.err
    return folder, given


def test_sft_on_a_file_trains_an_untied_model_and_validates_on_what_is_held_out(taught, dialogues):
    """One validation dialogue for both ranks: its loss by hand, under the saved weights."""
    folder, given = taught
    assert json.loads((folder / "model" / "faca.json").read_text())["trained_on_complete"] is False  # a file names none
    before, after = (load_file(path / "model.safetensors") for path in (given, folder / "model"))
    assert before.keys() == after.keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(not torch.equal(before[key], after[key]) for key in before)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    chat = Chat(AutoTokenizer.from_pretrained(folder / "model"))
    records, counts = load_dialogues(dialogues, chat, 2048)
    assert rows(folder)[0] == {"phase": "data"} | counts
    assert [row.get("validation_loss") is None for row in rows(folder)[1:]] == [True, False]
    _, (held,) = split(records, 0.1, 0)
    ids, at = torch.tensor(held.tokens), torch.tensor([t for t, q in enumerate(held.segment) if q >= 0])
    banned = torch.tensor(chat.banned_ids(model.config.vocab_size))
    logp = model(ids[None]).logits[0, at - 1].index_fill(1, banned, -math.inf).log_softmax(-1)
    expected = -logp.gather(1, ids[at][:, None]).mean().item()
    assert rows(folder)[-1]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_rl_goes_on_from_what_sft_on_a_file_has_made(taught, tmp_path):
    folder = tmp_path / "rl"
    done = trained(folder, "--method", "faca", "--model", taught[0] / "model", *SMALL, "--max-context", 2048,
                   "--eval-trials", 0, "--steps", 1, "--out", folder)
    assert done.code == 0 and "lm_head.weight" in load_file(folder / "model" / "model.safetensors"), done.err


def test_a_resume_with_another_model_or_file_is_one_line(taught, dialogues, models, tmp_path):
    folder, given = taught
    good = dialogues.read_text()
    shutil.move(given, tmp_path / "untied")
    shutil.copytree(models["tied"], given)
    assert "the architecture of --model is not what" in refused(folder)
    shutil.rmtree(given)
    assert f"no model '{given}'" in refused(folder)
    shutil.move(tmp_path / "untied", given)
    dialogues.write_text(good + '{"messages": []}\n')
    assert f"{dialogues}, row 13: no agent message" in refused(folder)
    dialogues.write_text(good.partition("\n")[2])
    assert "the file of --data is not what" in refused(folder)
    dialogues.write_text(good)
