"""Does a run fit, how long may it take, and what do its checkpoints weigh?

Arithmetic from a model's config alone; nothing is loaded or measured.

    python train.py --plan --model Qwen3-8B --gpus 8 --gpu-gib 80

A GPU holds first the rollout and then the update; what one needs is released before the other begins. The update has
four moments that do not coincide, a column each:
    head    the loss: logits of one chunk of trainable positions, recomputed in backward
    layers  the backward of one decoder layer, recomputed from its input, beside the inputs of all
    reduce  the end of backward: embedding and head hand their whole gradient on to be reduced
    step    AdamW
A run fits if every column does, its reserve included: for the shards' padding, token ids, and what a library allocates
inside an operation. Any flag of train.py may stand beside --plan; those that change no number here are ignored.

Axes: T tokens of a packed row, M trainable ones among them, D hidden.
"""

import argparse
import dataclasses
import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from extras.ranks import RunStopped, UsageError
from extras.run import Config, add_flag
from sampler import ADMIT_TOKENS, HEAD_LOGITS

GIB = 2**30
SHARE = 0.3  # of a dialogue's tokens the agent sampled (assumed: prompts, tools' results and users make the rest)
RESERVE_SHARE, RESERVE = 0.06, GIB  # of the card: fragmentation; and one GiB: CUDA context, kernels, NCCL (chosen)
STEP = 1024  # --tokens-per-microbatch is proposed in multiples of this
GOOD_RATE = 0.4  # of the peak, hardware FLOPs counted, in a well-run update (chosen)
MOMENTS = ("head", "layers", "reduce", "step")

# Dense bf16 FLOP/s and bytes/s by part of the device's name, the first that matches (NVIDIA's data sheets).
PEAK_FLOPS = {"GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
              "H100": 989e12, "H20": 148e12, "A100": 312e12, "L40S": 362e12}
BANDWIDTH = {"GB200": 8e12, "B200": 8e12, "H200": 4.8e12, "H100 PCIe": 2e12, "H100 NVL": 3.9e12,
             "H100": 3.35e12, "H20": 4e12, "A100-SXM4-40GB": 1.555e12, "A100": 2.039e12, "L40S": 0.864e12}


@dataclass(frozen=True)
class Shape:
    """A dense decoder's architecture, under short names. Parameters are counted as Qwen3 has them (q/k norms, no bias);
    another dense decoder's differ by less than 0.01 %."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)  # q and o, k and v
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden + 2 * self.head_dim  # and four norms

    @property
    def root_parameters(self) -> int:  # FSDP's root group: embedding, head, final norm
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_bytes_per_token(self) -> int:  # keys and values in bf16
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


# hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary, tied: the published config.json of each
KNOWN = {
    "Qwen3-0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": Shape(2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": Shape(2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": Shape(4096, 36, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": Shape(5120, 40, 40, 8, 128, 17408, 151936, False),
}


def shape_from(config: dict, name: str = "the model") -> Shape:
    """A config.json, or model.config.to_dict(), of a dense decoder. Raises UsageError for any other."""
    if any("expert" in key for key in config):
        raise UsageError(f"{name} has experts; the plan's arithmetic is for dense decoders alone")
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    numbers = {key: config.get(key) for key in keys}
    if wrong := [key for key, n in numbers.items() if type(n) is not int or n < 1]:
        raise UsageError(f"the config of {name} is no dense decoder's: it gives no {', '.join(wrong)}")
    hidden, layers, heads, intermediate, vocab = numbers.values()
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    tied = bool(config.get("tie_word_embeddings"))
    return Shape(hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, tied)


def shape_of(model: str) -> Shape:
    """A local Hugging Face folder's config.json, a name in KNOWN, or its hub id. Raises UsageError for any other."""
    path = Path(model) / "config.json"
    if not path.is_file():
        if model.removeprefix("Qwen/") in KNOWN:
            return KNOWN[model.removeprefix("Qwen/")]
        raise UsageError(f"no config of --model '{model}' is known: name one of {', '.join(KNOWN)}, or a folder with "
                         "a config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    return shape_from(config if isinstance(config, dict) else {}, model)


def flops_per_token(shape: Shape, context: float, share: float = 1.0) -> float:
    """Model FLOPs, forward and backward, of one trained token in a dialogue of `context` tokens; for MFU.

    6 per matrix weight that it meets (2 forward, 4 backward), and attention to context / 2 tokens before it on average:
    6 heads head_dim context a layer. The embedding is looked up, not multiplied; the head multiplies only the `share`
    of tokens that are trainable. Recomputation is no model FLOP: with it the hardware does 4/3 of this (8 N for 6 N).
    For a batch, `context` is the mean length weighted by tokens, sum T^2 / sum T.
    """
    matrices = shape.layers * shape.layer_parameters + share * shape.vocab * shape.hidden
    return 6 * matrices + 6 * shape.layers * shape.heads * shape.head_dim * context


def look_up(table: dict[str, float], device_name: str) -> float | None:
    """The first entry whose key is part of the name; None for an unknown device, or a MIG slice of a known one."""
    return None if "MIG" in device_name else next((v for key, v in table.items() if key in device_name), None)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of what torch.cuda.get_device_name() calls a device, None if unknown."""
    return look_up(PEAK_FLOPS, device_name)


# ---------------------------------------------------------------------------------------------------------- memory


def layer_bytes(shape: Shape) -> int:
    """Bytes a token takes in the backward of one layer: what autograd kept, and the gradients in flight.

    D hidden, A = heads * head_dim, K = kv_heads * head_dim, F intermediate. Kept, as transformers writes Qwen3:
    two norms' inputs in fp32, normalised, and scaled for the matrices (16 D); q and k in fp32, normalised, rotated
    (8 A + 8 K); v (2 K); attention's output (2 A); gate, silu(gate), up and their product (8 F); one fp32 a head and
    a norm (4 each). The attention kernel keeps no scores.
    In flight: three gradients of D, two of F.
    """
    D, A, K, F = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    kept = 16 * D + 10 * A + 10 * K + 8 * F + 4 * (2 * shape.heads + shape.kv_heads + 2)
    return kept + 6 * D + 4 * F


def budget(shape: Shape, gpus: int, gpu_gib: float, tokens_per_microbatch: int, kv_gib: float, max_context: int = 32768,
           dialogues: int = 16) -> dict[str, dict[str, float]]:
    """Bytes of one GPU by row, for the rollout and each moment of the update; `dialogues` are this GPU's.

    A packed row has at most tokens_per_microbatch tokens, but a single dialogue of max_context is never cut.
    """
    P, L, R, D = shape.parameters, shape.layer_parameters, shape.root_parameters, shape.hidden
    head = shape.vocab * D
    T = max(tokens_per_microbatch, max_context)
    M = math.ceil(SHARE * T)
    # No gradients: a layer's own (its MLP's three, or q in fp32 twice), or one weight gathered for the replica (fp32).
    forward = (ADMIT_TOKENS + max_context) * (8 * D + max(6 * shape.intermediate, 8 * shape.heads * shape.head_dim))
    drawing = dialogues * shape.vocab * 30  # bf16 and fp32 logits, masked, log-softmax; probabilities, CDF in fp64
    state = {"weights, fp32, a share": 4 * P / gpus, "AdamW's m and v, a share": 8 * P / gpus}
    grown = state | {"gradients, fp32, a share": 4 * P / gpus}
    root = {"embedding, head, gathered": 2 * R}  # in bf16, from the first forward to the end of backward
    inputs = {"layers' inputs, kept": (shape.layers + 1) * 2 * D * T}
    gathered = {"layers, gathered": 3 * 2 * L}  # in bf16: the one at work, and the next as it arrives and unpacked
    columns = {
        "rollout": state | {"sampler's replica, bf16": 2 * P, "KV cache": kv_gib * GIB,
                            "sampler's forward": max(forward + drawing, 4 * head)},
        # the gradient in bf16, so far and of this chunk
        "head": grown | root | {"their gradient, whole": 2 * 2 * head} | gathered | inputs | {
            "last norm, chosen states": 10 * D * T + 4 * D * M,
            # bf16 and its gradient, fp32, log-softmax and its gradient
            "logits of a chunk": min(HEAD_LOGITS, M * shape.vocab) * (2 + 2 + 4 + 4 + 4)},
        "layers": grown | root | {"their gradient, whole": 2 * head} | gathered | inputs | {
            "layer's gradient, whole": (2 + 4 + 4 / gpus) * L,  # bf16, fp32 to be reduced, reduced
            "one layer, recomputed": layer_bytes(shape) * T},
        "reduce": grown | root | {"their gradient, whole": (2 + 4 + 4 / gpus) * R, "embedding's states": 2 * D * T},
        "step": grown,  # fused: AdamW makes no copies
    }
    reserve = RESERVE_SHARE * gpu_gib * GIB + RESERVE
    return {name: column | {"reserve": reserve} for name, column in columns.items()}


def checkpoint_bytes(shape: Shape) -> int:
    """On disk: fp32 weights (a tied head is written again) and two moments in state/, bf16 weights in model/."""
    return 14 * shape.parameters + (4 * shape.vocab * shape.hidden if shape.tied else 0)


def peaks(columns: dict[str, dict[str, float]]) -> tuple[float, float]:
    """Bytes at the fullest: (of the rollout, of the update)."""
    return sum(columns["rollout"].values()), max(sum(columns[name].values()) for name in MOMENTS)


def least_sizes(shape: Shape, max_context: int) -> tuple[int, int]:
    """The smallest (--kv-gib, --tokens-per-microbatch) with room for one dialogue, in whole GiB and STEPs."""
    return math.ceil(max_context * shape.kv_bytes_per_token / GIB), math.ceil(max_context / STEP) * STEP


def largest(shape: Shape, gpus: int, gpu_gib: float, max_context: int, dialogues: int) -> tuple[int, int] | None:
    """The largest (--kv-gib, --tokens-per-microbatch) that fit, or None if the least do not."""
    def used(tokens=1):
        return peaks(budget(shape, gpus, gpu_gib, tokens, 0, max_context, dialogues))

    card, (least_kv, least_tokens) = gpu_gib * GIB, least_sizes(shape, max_context)
    kv_gib = int((card - used()[0]) // GIB)
    tokens = range(least_tokens, 2**30, STEP)
    fitting = bisect_right(tokens, card, key=lambda n: used(n)[1])
    return (kv_gib, tokens[fitting - 1]) if kv_gib >= least_kv and fitting else None


# ---------------------------------------------------------------------------------------------------- what is shown


def options_of(argv: list[str]) -> argparse.Namespace:
    """The flags. Raises UsageError for a value that makes no sense."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UsageError(message)

    parser = Parser(prog="train.py --plan", description=__doc__, allow_abbrev=False, conflict_handler="resolve",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Config):
        add_flag(parser, f.name, f.metadata["paper"], f"{f.metadata['paper']}")
    parser.add_argument("--plan", action="store_true", help="print this plan, and train nothing")
    parser.add_argument("--model", default="Qwen3-8B", help="a known name, or a folder with a config.json [Qwen3-8B]")
    parser.add_argument("--gpus", type=int, default=8, help="of all nodes [8]")
    parser.add_argument("--gpu-gib", type=float, default=80.0, help="memory of each [80]")
    parser.add_argument("--device", default="H100", help="for the times: " + ", ".join(BANDWIDTH) + " [H100]")
    parser.add_argument("--kv-gib", type=float, help="sampler's cache [the largest that fits]")
    parser.add_argument("--tokens-per-microbatch", type=int, help="tokens of a packed row [the most that fit]")
    o = parser.parse_args(argv)
    for name in ("gpus", "gpu_gib", "kv_gib", "tokens_per_microbatch", "prompts", "rollouts", "max_context"):
        value, least = getattr(o, name), 0.5 if name.endswith("_gib") else 1
        if value is not None and not least <= value < 2**31:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least} and below 2^31, is {value}")
    if not peak_flops(o.device) or not look_up(BANDWIDTH, o.device):
        raise UsageError(f"no data sheet of --device '{o.device}' here; there are: {', '.join(BANDWIDTH)}")
    return o


def plan(argv: list[str]) -> str:
    """The text that `train.py --plan` prints. Raises UsageError (exit code 2), or RunStopped (1) if it does not fit."""
    o = options_of(argv)
    shape = shape_of(o.model)

    def played(gpus):  # dialogues of one GPU: whole groups stay together
        return math.ceil(o.prompts / gpus) * o.rollouts

    def fits(gpus):
        return largest(shape, gpus, o.gpu_gib, o.max_context, played(gpus))

    what = f"{o.model} on {o.gpus} GPU{'s' * (o.gpus > 1)} of {o.gpu_gib:g} GiB"
    dialogues, best = played(o.gpus), fits(o.gpus)
    least_kv, least_tokens = least_sizes(shape, o.max_context)
    if best is None:
        enough = next((n for n in range(o.gpus + 1, 1025) if fits(n)), None)
        least = budget(shape, o.gpus, o.gpu_gib, least_tokens, least_kv, o.max_context, dialogues)
        needs = [used / GIB for used in peaks(least)]
        raise RunStopped(
            f"{what} does not fit: with one dialogue of --max-context {o.max_context} the rollout needs {needs[0]:.1f} "
            f"GiB a GPU, the update {needs[1]:.1f}; " + (f"it fits from {enough} GPUs on" if enough else
            "no number of GPUs up to 1,024 is enough: take larger ones, or a shorter --max-context"))
    kv_gib, tokens = o.kv_gib or best[0], o.tokens_per_microbatch or best[1]
    if kv_gib < least_kv:
        raise UsageError(f"--kv-gib {kv_gib:g} may hold no dialogue of --max-context {o.max_context}: give {least_kv}")
    columns = budget(shape, o.gpus, o.gpu_gib, tokens, kv_gib, o.max_context, dialogues)
    if max(peaks(columns)) > o.gpu_gib * GIB:
        raise RunStopped(f"{what} does not fit with --kv-gib {kv_gib:g} and --tokens-per-microbatch {tokens}: the "
                         f"rollout needs {peaks(columns)[0] / GIB:.1f} GiB a GPU, the update "
                         f"{peaks(columns)[1] / GIB:.1f}; the largest that fit are {best[0]} and {best[1]}")
    disk = checkpoint_bytes(shape) / 1e9
    held = best[0] * GIB // shape.kv_bytes_per_token
    return "\n".join([
        f"{what}: arithmetic from the config, not measured",
        f"{shape.parameters:,} parameters; {shape.kv_bytes_per_token:,} bytes of keys and values a token", "",
        f"GiB a GPU, with --kv-gib {kv_gib:g} --tokens-per-microbatch {tokens} --max-context {o.max_context}", "",
        *table(columns), "",
        f"largest --kv-gib                 {best[0]:>9,}   {held:,} tokens, or {held // o.max_context:,} dialogues at "
        f"--max-context; this GPU plays {dialogues}",
        f"largest --tokens-per-microbatch  {best[1]:>9,}   a row is never cut: at least --max-context "
        f"{o.max_context:,}", "",
        f"on disk: a checkpoint {disk:.1f} GB; {o.keep} kept, and one more while it is written: "
        f"{disk * (o.keep + 1):.0f} GB", "", *times(shape, o, dialogues, kv_gib)])


def table(columns: dict[str, dict[str, float]]) -> list[str]:
    """Rows by columns in GiB; a dash where nothing is held."""
    rows = dict.fromkeys(name for column in columns.values() for name in column if name != "reserve")
    lines = [f"{'':27}{'rollout':>9} | update:" + "".join(f"{name:>9}" for name in MOMENTS)]
    for row in [*rows, "reserve", "total"]:
        held = [sum(c.values()) if row == "total" else c.get(row) for c in columns.values()]
        cells = [f"{'-' if x is None else f'{x / GIB:.2f}':>9}" for x in held]
        lines.append(f"{row:27}{cells[0]} |        " + "".join(cells[1:]))
    return lines


def times(shape: Shape, o: argparse.Namespace, dialogues: int, kv_gib: float) -> list[str]:
    """Bounds of one step, as if every dialogue were max_context long: few are, so a step is shorter."""
    tokens = o.prompts * o.rollouts * o.max_context
    model = flops_per_token(shape, o.max_context, SHARE)
    at_peak = tokens * model / (o.gpus * peak_flops(o.device))  # forward and backward, nothing recomputed
    read = 2 * (shape.layers * shape.layer_parameters + shape.vocab * shape.hidden)  # of the embedding, a row a token
    cached = dialogues * o.max_context / 2 * shape.kv_bytes_per_token  # of dialogues that are half grown
    serial = math.ceil(SHARE * o.max_context)
    waves = max(1.0, cached / (kv_gib * GIB))  # dialogues that the cache has no room for wait
    weights, keys = (serial * n / look_up(BANDWIDTH, o.device) for n in (waves * read, cached))
    return [
        f"A step on {o.device}: {o.prompts} prompts x {o.rollouts} rollouts, each of {o.max_context:,} tokens (the "
        f"most), {SHARE:.0%} of them sampled (assumed);",
        "arithmetic, not measured; users, tools, kernel launches and collectives are not counted",
        f"  trained token  {model / 1e9:.1f} GFLOP of the model, {model * 4 / 3e9:.1f} with recomputation",
        f"  update         {at_peak * 4 / 3:,.0f} s at the peak, {at_peak * 4 / 3 / GOOD_RATE:,.0f} s at "
        f"{GOOD_RATE:.0%} of it",
        f"  prefill        {at_peak / 3:,.0f} s at the peak",
        f"  decode         {weights + keys:,.0f} s at the memory's speed: {waves * serial:,.0f} serial steps that read "
        f"{read / 1e9:.1f} GB of weights ({weights:,.0f} s), and the cache ({keys:,.0f} s)"]
