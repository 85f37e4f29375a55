"""A policy on disk: found, loaded, and saved as a Hugging Face folder that knows what it was trained on."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

transformers.utils.logging.disable_progress_bar()  # its bars for a weight file would stand between ours


class PolicyError(ValueError):
    """No model can be loaded from what was named; the message is one line."""


def note_of(model: str) -> dict:
    """faca.json of a checkpoint of ours (preset, caps, temperature, training tasks' ids); {} for any other model."""
    path = Path(model) / "faca.json"
    if not path.is_file():
        return {}
    try:
        note = json.loads(path.read_text())
        if set(note) == {"preset", "caps", "temperature", "trained_on"}:
            return note
    except (OSError, ValueError, TypeError):
        pass
    raise PolicyError(f"{path} is damaged, or from another version; without it the folder is read as any other model")


def find_policy(name: str) -> str:
    """tiny, a folder, a hub id, or a short name for Qwen's (Qwen3-8B). Raises PolicyError before anything is loaded."""
    if name == "tiny":
        return name
    folder = Path(name)
    looks_local = folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not name or looks_local and not (folder / "config.json").is_file():
        raise PolicyError(f"no model '{name}': no folder of that name holds a config.json")
    hub_id = f"Qwen/{name}" if name.startswith("Qwen") and "/" not in name and not looks_local else name
    try:
        AutoConfig.from_pretrained(hub_id)
    except (OSError, ValueError) as error:
        raise PolicyError(f"no model '{name}': neither tiny, nor a Hugging Face folder, nor an id that the hub gives "
                          f"({str(error).splitlines()[0][:120]})") from None
    return hub_id


def load_policy(name: str, seed: int, device: torch.device):
    """Tokenizer, the fp32 model to train, and the replica to sample with (bf16 on a GPU), in eval mode both.

    Weights come from safetensors alone. Raises PolicyError, one line, for a model that can't be loaded.
    """
    if name == "tiny":
        from extras.tiny import make_tiny
        tokenizer, model = make_tiny(seed)
    else:
        found = find_policy(name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(found)
            model, info = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32, use_safetensors=True,
                                                               output_loading_info=True)
            wrong = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
            if wrong:
                raise ValueError(f"{len(wrong)} weights are missing or do not fit, such as {wrong[0]}")
        except Exception as error:  # files of somebody else's making fail in every way there is
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
            raise PolicyError(f"model '{name}' can't be loaded: {type(error).__name__}: {reason}") from error
    model = model.to(device).eval()
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    replica = AutoModelForCausalLM.from_config(model.config, dtype=half).to(device).eval()
    replica.load_state_dict(model.state_dict())
    return tokenizer, model, replica


def save_policy(path: Path, model, tokenizer, end_ids, note: dict) -> None:
    """A Hugging Face folder, whole or not there. `note` becomes faca.json: preset, caps, the training tasks' ids."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.generation_config.update(do_sample=True, temperature=note["temperature"], top_p=1.0, top_k=0,
                                   eos_token_id=sorted(end_ids))
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "faca.json").write_text(json.dumps(note, indent=1))
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)
