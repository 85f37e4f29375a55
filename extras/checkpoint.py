"""A policy on disk: found, loaded whole or sharded, saved as a Hugging Face folder, and as the state of a run.

A checkpoint of a run is a folder RUN/checkpoints/PHASE-STEP: `state/` (torch's distributed checkpoint: sharded weights
and optimizer, readable on any number of ranks), `model/` (the Hugging Face folder) and `note.json`, which is written
last. The folder is built beside its name and renamed, so whatever has a name is complete; the newest complete one is
where a run resumes. No random state is in it: every stream of a run is made from its seed and the step.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_state_dict, set_model_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from env import digest
from rollout import Caps, Chat

transformers.utils.logging.disable_progress_bar()  # its bars for a weight file would stand between ours


class PolicyError(ValueError):
    """No model can be loaded from what was named; the message is one line."""


class SaveError(OSError):
    """A checkpoint could not be written, on some rank; those before it stand. Raised on all ranks alike."""


# --------------------------------------------------------------------------------------------------------------- found

WHOLE, SLICES, SLICE = 2**26, 64, 2**16  # bytes of a file that files_digest() reads whole; of a larger one: so many


NOTED = {"preset", "caps", "temperature", "trained_on"}  # in every faca.json
LATER = {"trained_on_complete", "phase", "step"}         # not in the oldest: what they would say is not known


def note_of(model: str) -> dict:
    """faca.json of a checkpoint of ours (preset, caps, temperature, training tasks' ids); {} for any other model."""
    path = Path(model) / "faca.json"
    if not path.is_file():
        return {}
    try:
        note = json.loads(path.read_text())
        if NOTED <= set(note) <= NOTED | LATER and Caps(**note["caps"]):
            return note
    except (OSError, ValueError, TypeError):
        pass
    raise PolicyError(f"{path} is damaged, or from another version; without it the folder is read as any other model")


def trained_on_complete(model: str) -> bool:
    """Whether `trained_on` names all tasks that a model was trained on; the fresh tiny one was trained on none."""
    return model == "tiny" or note_of(model).get("trained_on_complete") is True


def preset_of(model: str) -> str:
    """Whose defaults hold: the tiny model's, and its checkpoints', or the paper's."""
    return "tiny" if model == "tiny" else note_of(model).get("preset", "paper")


def find_policy(name: str) -> str:
    """tiny, a folder, a hub id, or a short name for Qwen's (Qwen3-8B). Raises PolicyError before anything is loaded."""
    if name == "tiny":
        return name
    folder = Path(name)
    looks_local = folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not name or looks_local and not (folder / "config.json").is_file():
        inner = (f"; '{folder / 'model'}' does" if (folder / "model" / "config.json").is_file() else
                 f"; '{folder / 'sft'}' does" if (folder / "sft" / "config.json").is_file() else "")
        raise PolicyError(f"no model '{name}': no folder of that name holds a config.json{inner}")
    if (folder / "metrics.jsonl").is_file():
        made = next((f"; its model is '{folder / part}'" for part in ("model", "sft") if (folder / part).is_dir()), "")
        raise PolicyError(f"no model '{name}': it is a run folder of train.py{made}")
    hub_id = f"Qwen/{name}" if name.startswith("Qwen") and "/" not in name and not looks_local else name
    try:
        AutoConfig.from_pretrained(hub_id)
    except (OSError, ValueError) as error:
        raise PolicyError(f"no model '{name}': neither tiny, nor a Hugging Face folder, nor an id that the hub gives "
                          f"({str(error).splitlines()[0][:120]})") from None
    return hub_id


def files_digest(folder: str | Path) -> str:
    """A digest of a Hugging Face folder: weights, tokenizer, template and configuration; "" for what is no folder.

    Each file with its name and size; a large one by its header and SLICES of its bytes, evenly spaced, so that it takes
    a moment and not minutes (chosen): training changes nearly every weight.
    """
    folder, told = Path(folder), hashlib.blake2b(digest_size=8)
    if not folder.is_dir():
        return ""
    names = ("*.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template*", "config.json", "faca.json")
    for path in sorted({path for name in names for path in folder.glob(name) if path.is_file()}):
        size = path.stat().st_size
        told.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                told.update(file.read())
                continue
            header = int.from_bytes(file.read(8), "little")  # its bytes, as safetensors has them
            told.update(file.read(min(header, WHOLE)))
            for i in range(SLICES):
                file.seek(i * (size - SLICE) // (SLICES - 1))
                told.update(file.read(SLICE))
    return told.hexdigest()


# ------------------------------------------------------------------------------------------------ tokenizer, template

QWEN3_CONDITIONS = {
    "loop.index0 > ns.last_query_index": "true",  # an agent message of an earlier turn keeps its think block,
    "loop.last or (not loop.last and reasoning_content)": "true",  # the empty one, too
    "enable_thinking is defined and enable_thinking is false":  # and whoever doesn't say gets what was trained
        "enable_thinking is not defined or enable_thinking is false",
}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}


def load_tokenizer(found: str):
    """The tokenizer of a folder or hub id, its chat template made that of training, evaluation and every export.

    One line on stderr says where even this template renders a history otherwise than a rollout builds it. Raises
    PolicyError, one line, where tokenizer or template can't be used at all.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(found)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = as_trained(tokenizer.chat_template)
        same = renders_as_trained(tokenizer)
    except Exception as error:  # files of somebody else's making fail in every way there is
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise PolicyError(f"the tokenizer or chat template of '{found}' can't be used: "
                          f"{type(error).__name__}: {reason}") from error
    if not same and os.environ.get("RANK", "0") == "0":
        print(f"warning: the chat template of '{found}' renders a dialogue otherwise than training builds it, so a "
              "server would give the trained model histories unlike those it has learned on", file=sys.stderr)
    return tokenizer


def as_trained(template: str) -> str:
    """Qwen3's template, but each agent message with its think block, empty if it has none; another one unchanged.

    Qwen3's own drops the blocks of earlier turns, while a rollout keeps all ids as they were read and sampled.
    """
    for condition, ours in QWEN3_CONDITIONS.items():
        template = template.replace(condition, ours)
    return template


def renders_as_trained(tokenizer) -> bool:
    """Whether the ids that a server makes of a dialogue's messages are those that a rollout of it has."""
    chat = Chat(tokenizer)
    messages = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hello."}]
    ids = chat.open(messages, [TOOL])
    for calls, heard in ((2, ["tool", "tool"]), (0, ["user"]), (0, ["user"])):
        said = "\n".join(["Well.", *[CALLED] * calls])
        messages.append({"role": "assistant", "content": "Well."} | ({"tool_calls": [CALL] * calls} if calls else {}))
        messages += (answers := [{"role": role, "content": f"{i} {{}}"} for i, role in enumerate(heard)])
        ids += tokenizer.encode(said, add_special_tokens=False) + [chat.turn_end]
        ids += chat.delta(answers, chat.turn_end)
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    return ids == tokenizer.encode(rendered, add_special_tokens=False)


# -------------------------------------------------------------------------------------------------------------- model


def load_policy(name: str, seed: int, device: torch.device, dtype: torch.dtype):
    """Tokenizer and whole model, in eval mode. Weights come from safetensors alone.

    Raises PolicyError, one line, for a model that can't be loaded.
    """
    if name == "tiny":
        from extras.tiny import make_tiny
        tokenizer, model = make_tiny(seed)
        return tokenizer, model.to(device, dtype).eval()
    found = find_policy(name)
    tokenizer = load_tokenizer(found)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(found, dtype=dtype, use_safetensors=True,
                                                           output_loading_info=True)
        wrong = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
        if wrong:
            raise ValueError(f"{len(wrong)} weights are missing or do not fit, such as {wrong[0]}")
    except Exception as error:  # files of somebody else's making fail in every way there is
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
        raise PolicyError(f"model '{name}' can't be loaded: {type(error).__name__}: {reason}") from error
    return tokenizer, model.to(device).eval()


def load_sharded(name: str, seed: int, device: torch.device, half: torch.dtype):
    """Tokenizer, the sharded fp32 model to train, and an empty replica in `half` to sample with. Collective.

    Rank 0 alone reads the weights, and hands each rank its shards a parameter at a time: 8B takes 32 GB of host memory
    once, whatever the number of ranks. Raises PolicyError on all ranks alike.
    """
    whole, tokenizer, refusal = None, None, ""
    if dist.get_rank() == 0:
        try:
            tokenizer, whole = load_policy(name, seed, torch.device("cpu"), torch.float32)
        except PolicyError as error:
            refusal = str(error)
    shared = [refusal, tokenizer, whole.config if whole else None]
    dist.broadcast_object_list(shared)
    refusal, tokenizer, config = shared
    if refusal:
        raise PolicyError(refusal)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        replica = AutoModelForCausalLM.from_config(config, dtype=half)
    materialise(shard(model, half), device)
    set_model_state_dict(model, whole.state_dict() if whole else {},
                         options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return tokenizer, model, materialise(replica, device).eval().requires_grad_(False)


def shard(model, half: torch.dtype):
    """FSDP2, a group a layer and one of what is around them: fp32 shards, computing in `half`, reducing in fp32."""
    policy = MixedPrecisionPolicy(half, torch.float32) if half != torch.float32 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def materialise(model, device: torch.device):
    """Memory for a model made on the meta device. What rotary embeddings hold is in no checkpoint: made anew."""
    model.to_empty(device=device)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        model.tie_weights()  # to_empty parted them; FSDP keeps them one
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model


# ------------------------------------------------------------------------------------------------- saved, and resumed


def save_policy(path: Path, model, tokenizer, end_ids, note: dict) -> None:
    """A Hugging Face folder, whole or not there. `note` becomes faca.json, see export()."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.generation_config.update(do_sample=True, temperature=note["temperature"], top_p=1.0, top_k=0,
                                   eos_token_id=sorted(end_ids))
    model.save_pretrained(part)
    config = json.loads((part / "config.json").read_text())
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta:  # transformers 4, which servers may use, looks for it here, and would silently take its own default
        (part / "config.json").write_text(json.dumps({**config, "rope_theta": theta}, indent=2) + "\n")
    tokenizer.save_pretrained(part)
    (part / "faca.json").write_text(json.dumps(note, indent=1))
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)


def save_state(path: Path, model, optimizer, note: dict, export) -> None:
    """A checkpoint: state, export(path / "model") on rank 0, note. Collective; raises SaveError on all ranks alike."""
    part, failure = path.with_name(path.name + ".part"), ""
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    try:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=part / "state")
        if dist.get_rank() == 0:
            export(part / "model")
            (part / "note.json").write_text(json.dumps(note))
            flush(part)
    except (Exception, CheckpointException) as error:  # the latter, of what a rank's disk said, is no Exception
        failure = str(error).strip().splitlines()[-1][:200]
    failures = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if dist.get_rank() == 0:
        if any(failures):
            shutil.rmtree(part, ignore_errors=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
            flush(path.parent)
    dist.barrier()
    if any(failures):
        free = shutil.disk_usage(path.parent).free / 2**30
        raise SaveError(f"the checkpoint {path} can't be written ({free:.1f} GiB are free there; older ones stand): "
                        f"{next(filter(None, failures))}")


def flush(folder: Path) -> None:
    """The file, or all that the folder holds, to the disk: a name must not outlive its content when the power fails."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def damaged(path: Path, error: Exception) -> PolicyError:
    reason = (str(error).strip().splitlines() or [""])[-1][:160]
    return PolicyError(f"the checkpoint {path} can't be read ({type(error).__name__}: {reason}): move it away, and the "
                       "run resumes from the one before it")


def load_state(path: Path, model, optimizer) -> None:
    """Weights and optimizer of a checkpoint, on any number of ranks, into these. Collective.

    Raises PolicyError, one line, on all ranks alike, where the files can't be read.
    """
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    try:
        dcp.load(state, checkpoint_id=path / "state")
    except (Exception, CheckpointException) as error:  # the latter, on all ranks, is no Exception
        raise damaged(path, error) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def export(trainer, path: Path) -> None:
    """The weights as sampled, in a Hugging Face folder that knows what they were trained on, and how far. On rank 0."""
    config, (phase, step) = trainer.config, trainer.at
    save_policy(path, trainer.sampler.model, trainer.tokenizer, trainer.chat.end_ids, {
        "preset": preset_of(config.model), "trained_on": sorted(trainer.trained_on),
        "trained_on_complete": trainer.trained_on_complete, "phase": phase, "step": step,
        "caps": asdict(trainer.actors.caps), "temperature": config.temperature})


def save_export(trainer, path: Path) -> None:
    """export(), collective. Raises SaveError on all ranks alike."""
    refusal = [""]
    if trainer.rank == 0:
        try:
            export(trainer, path)
        except Exception as error:  # safetensors has its own kind
            refusal = [f"{path} can't be written: {error}"]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise SaveError(refusal[0])


NOTE = {"phase", "step", "rows", "trained_on", "trained_on_complete", "bad_steps", "origin"}


def save(trainer, run) -> None:
    """All that is needed to resume where the trainer is, once; then the oldest beyond --keep go. Collective."""
    if trainer.saved == trainer.at:
        return
    phase, step = trainer.at
    note = {"phase": phase, "step": step, "rows": len(run.rows), "trained_on": sorted(trainer.trained_on),
            "trained_on_complete": trainer.trained_on_complete, "bad_steps": trainer.bad_steps, "origin": run.origin}
    save_state(run.path / "checkpoints" / f"{phase}-{step:06}", trainer.model, trainer.optimizer, note,
               lambda path: (export(trainer, path), *map(flush, run.path.glob("*.json*"))))  # its rows are there, too
    trainer.saved = trainer.at
    for old in checkpoints(run.path)[:-trainer.config.keep] if trainer.rank == 0 else []:
        old = old.rename(old.with_name(old.name + ".part"))  # so that none is ever half there under its name
        shutil.rmtree(old, ignore_errors=True)  # a server may hold its files


def resume(trainer, note: dict) -> None:
    """Back to where the checkpoint of that note was made. Collective."""
    load_state(Path(note["path"]), trainer.model, trainer.optimizer)
    trainer.trained_on, trainer.bad_steps = set(note["trained_on"]), note["bad_steps"]
    trainer.trained_on_complete = note.get("trained_on_complete", False)
    trainer.at = trainer.saved = note["phase"], note["step"]


def origin_of(model, tokenizer, tasks, data: str = "") -> dict[str, str]:
    """What a run that resumes must find as it was, each as a digest."""
    shape = {name: value for name, value in model.config.to_dict().items()
             if name not in ("_name_or_path", "transformers_version", "dtype")}
    words = sorted(tokenizer.get_vocab().items()), tokenizer.chat_template
    parts = {"the task list of --env": [digest(task) for task in tasks], "the architecture of --model": shape,
             "the tokenizer of --model": words, "the file of --data": Path(data).read_bytes() if data else b""}
    return {name: hashlib.blake2b(repr(part).encode(), digest_size=8).hexdigest() for name, part in parts.items()}


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first: by phase (sft before rl) and step. No folder of another name."""
    found = [path for path in (run / "checkpoints").glob("*-*") if (path / "note.json").is_file()]
    ours = [path for path in found if re.fullmatch(r"(sft|rl)-\d{6,}", path.name)]
    return sorted(ours, key=lambda path: (path.name.startswith("rl"), int(path.name.partition("-")[2])))


def newest_note(run: Path) -> dict | None:
    """What the newest complete checkpoint of a run says of itself, and its `path`; None where there is none."""
    for path in checkpoints(run)[::-1]:
        try:
            note = json.loads((path / "note.json").read_text())
            if not isinstance(note, dict) or note.keys() | {"trained_on_complete"} != NOTE:  # older ones are without
                raise ValueError("note.json is not of this version")
        except (OSError, ValueError) as error:
            raise damaged(path, error) from None
        return note | {"path": str(path)}
    return None
