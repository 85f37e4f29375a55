"""extras/plan.py: parameter and byte counts against hand computation and against torch, and what the plan promises."""

import json
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import train
from extras.plan import (GIB, KNOWN, MOMENTS, Shape, budget, checkpoint_bytes, flops_per_token, largest, layer_bytes,
                         peak_flops, peaks, plan, shape_from, shape_of)
from extras.ranks import RunStopped, UsageError

SMALL = Shape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32, tied=False)


def config_of(shape):
    return Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied)


# ---------------------------------------------------------------------------------------------------- the shapes


def test_parameters_are_those_of_the_released_models():
    assert {name: shape.parameters for name, shape in KNOWN.items()} == {
        "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096,
        "Qwen3-8B": 8_190_735_360, "Qwen3-14B": 14_768_307_200}


@pytest.mark.parametrize("shape", [*KNOWN.values(), SMALL], ids=str)
def test_parameters_are_counted_as_transformers_builds_them(shape):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config_of(shape))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert (shape.parameters, shape.layer_parameters) == (sum(p.numel() for p in model.parameters()), layer)


def test_keys_and_values_of_a_token():
    assert KNOWN["Qwen3-8B"].kv_bytes_per_token == 147_456  # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert KNOWN["Qwen3-14B"].kv_bytes_per_token == 163_840


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_gives_its_own_shape(tmp_path, tied):
    shape = Shape(64, 2, 4, 2, 128, 192, 512, tied)
    config_of(shape).save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)) == shape_from(config_of(shape).to_dict()) == shape
    assert shape_of("Qwen/Qwen3-8B") == shape_of("Qwen3-8B") == KNOWN["Qwen3-8B"]


@pytest.mark.parametrize("text, named", [
    ("{", "can't be read"), ("[1]", "hidden_size"), ('{"num_local_experts": 8}', "experts"),
    (json.dumps(dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=0, intermediate_size=1, vocab_size=9)),
     "num_attention_heads")])
def test_a_folder_that_is_no_dense_decoder_is_refused_by_name(tmp_path, text, named):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=named) as error:
        shape_of(str(tmp_path))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------- the budget


def test_budget_of_a_small_shape_is_the_sum_done_by_hand():
    """A layer has 2*8*4*3 + 3*8*16 + 2*8 + 2*4 = 600 parameters, the root 2*32*8 + 8 = 520: 1,720 in all."""
    assert (SMALL.layer_parameters, SMALL.root_parameters, SMALL.parameters) == (600, 520, 1720)
    columns = budget(SMALL, gpus=2, gpu_gib=1, tokens_per_microbatch=10, kv_gib=1, max_context=4, dialogues=3)
    reserve = {"reserve": 0.06 * 2**30 + 2**30}
    kept = {"weights, fp32, a share": 3440, "AdamW's m and v, a share": 6880}
    update = kept | {"gradients, fp32, a share": 3440} | reserve
    backward = update | {"embedding, head, gathered": 1040, "layers, gathered": 3600, "layers' inputs, kept": 480}
    forward = (8192 + 4) * (8 * 8 + 6 * 16)
    assert columns == {
        "rollout": kept | reserve | {"sampler's replica, bf16": 3440, "KV cache": 2**30,
                                     "sampler's forward": forward + 3 * 32 * 30},
        "head": backward | {"their gradient, whole": 1024, "last norm, chosen states": 896, "logits of a chunk": 1536},
        # the layer: 16*8 + 10*8 + 10*4 + 8*16 + 4*(4+1+2) kept, 6*8 + 4*16 in flight = 516 bytes a token
        "layers": backward | {"their gradient, whole": 512, "layer's gradient, whole": 4800,
                              "one layer, recomputed": 5160},
        "reduce": update | {"embedding, head, gathered": 1040, "their gradient, whole": 4160,
                            "embedding's states": 160},
        "step": update}


class Live(TorchDispatchMode):
    """Bytes of the tensors that live now, and the most there were, without what an operation hides inside."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("shape", [
    Shape(128, 1, 4, 1, 32, 384, 64, False), Shape(128, 1, 8, 4, 32, 384, 64, False)], ids=["like 8B", "like 0.6B"])
def test_backward_of_a_checkpointed_layer_peaks_where_the_plan_says(shape):
    """Measured at two lengths, so that what does not grow with the tokens drops out."""
    torch.manual_seed(0)
    config = config_of(shape)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).bfloat16()

    def peak(tokens):
        x = torch.randn(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        rotary = model.model.rotary_emb(x, torch.arange(tokens)[None])
        model.zero_grad()
        with Live() as live:
            y = checkpoint(lambda h: model.model.layers[0](h, position_embeddings=rotary, use_cache=False), x,
                           use_reentrant=False)
            y.backward(torch.ones_like(y))
        return live.peak

    grows = (peak(384) - peak(256)) / 128
    assert 0.95 * layer_bytes(shape) <= grows <= layer_bytes(shape)


@settings(deadline=None)
@given(shape=st.sampled_from([SMALL, *KNOWN.values()]), gpus=st.integers(1, 64), gpu_gib=st.floats(1, 200),
       tokens=st.integers(1, 2**20), kv=st.floats(0, 100), context=st.integers(1, 2**17), dialogues=st.integers(1, 256),
       by=st.integers(1, 2**20))
def test_budget_grows_with_everything_but_the_gpus(shape, gpus, gpu_gib, tokens, kv, context, dialogues, by):
    def totals(*arguments):
        return [sum(column.values()) for column in budget(*arguments).values()]

    start = [shape, gpus, gpu_gib, tokens, kv, context, dialogues]
    base = totals(*start)
    for i in range(2, len(start)):
        assert all(a <= b for a, b in zip(base, totals(*start[:i], start[i] + by, *start[i + 1:]))), i
    assert all(a >= b for a, b in zip(base, totals(shape, gpus + by, *start[2:])))
    for name, value in vars(shape).items():
        larger = Shape(**vars(shape) | {name: value + by if name != "tied" else False})
        assert all(a <= b for a, b in zip(base, totals(larger, *start[1:]))), name


@given(shape=st.sampled_from([*KNOWN.values()]), gpus=st.integers(1, 64), gpu_gib=st.floats(4, 200),
       context=st.integers(1, 2**16), dialogues=st.integers(1, 128))
def test_largest_sizes_fit_and_a_step_more_does_not(shape, gpus, gpu_gib, context, dialogues):
    def fits(kv_gib, tokens):
        columns = budget(shape, gpus, gpu_gib, tokens, kv_gib, context, dialogues)
        return [used <= gpu_gib * GIB for used in peaks(columns)]

    found = largest(shape, gpus, gpu_gib, context, dialogues)
    least = -(-context * shape.kv_bytes_per_token // GIB)
    if found is None:
        assert not all(fits(least, -(-context // 1024) * 1024))
    else:
        kv_gib, tokens = found
        assert fits(kv_gib, tokens) == [True, True] and fits(kv_gib + 1, tokens + 1024) == [False, False]
        assert kv_gib >= least and tokens % 1024 == 0


# ------------------------------------------------------------------------------------------------ what is printed


@pytest.mark.parametrize("flags", ["", "--model Qwen3-14B", "--kv-gib 20.5 --tokens-per-microbatch 8192",
                                   "--model Qwen3-0.6B --gpus 1 --gpu-gib 24 --max-context 8192 --method grpo"])
def test_printed_rows_sum_to_the_printed_totals_which_fit(flags):
    text = plan(["--plan", *flags.split()])
    columns = [[], [], [], [], []]
    for line in text[text.index("rollout |"):text.index("largest")].splitlines()[1:]:
        for column, cell in zip(columns, line[27:].replace("|", "").split()):
            column.append(0.0 if cell == "-" else float(cell))
    card = 24 if "24" in flags else 80
    for *rows, total in columns:
        assert len(rows) == 16 and sum(rows) == pytest.approx(total, abs=0.005 * 17) and 0 < total <= card
    assert all(name in text for name in MOMENTS) and "not measured" in text


def test_plan_of_8b_on_eight_cards_of_80():
    """Shares of 8,190,735,360 parameters: 4/8 bytes of each are 3.81 GiB; the reserve is 4.8 + 1."""
    text = plan(["--plan", "--model", "Qwen3-8B", "--gpus", "8", "--gpu-gib", "80"])
    rows = {line[:27].strip(): line[27:].replace("|", "").split() for line in text.splitlines()}
    assert rows["weights, fp32, a share"] == ["3.81"] * 5 and rows["AdamW's m and v, a share"] == ["7.63"] * 5
    assert rows["sampler's replica, bf16"] == ["15.26", "-", "-", "-", "-"]
    assert rows["logits of a chunk"] == ["-", "4.00", "-", "-", "-"] and rows["reserve"] == ["5.80"] * 5
    assert "43   313,116 tokens" in text  # 43 GiB / 147,456


def test_14b_does_not_fit_one_card_and_the_line_says_how_many_are_enough():
    with pytest.raises(RunStopped, match="it fits from 6 GPUs on") as error:
        plan("--plan --model Qwen3-14B --gpus 1".split())
    assert "\n" not in str(error.value)
    with pytest.raises(RunStopped):
        plan("--plan --model Qwen3-14B --gpus 5".split())
    assert "Qwen3-14B on 6 GPUs" in plan("--plan --model Qwen3-14B --gpus 6".split())
    with pytest.raises(RunStopped, match="larger ones"):  # the replica alone has 27.5 GiB
        plan("--plan --model Qwen3-14B --gpu-gib 24".split())


def test_a_size_that_is_given_must_fit_and_the_line_names_the_largest():
    for flags in ("--kv-gib 44", "--tokens-per-microbatch 97280"):  # one step more than the plan proposes
        with pytest.raises(RunStopped, match="the largest that fit are 43 and 96256"):
            plan(["--plan", *flags.split()])


@pytest.mark.parametrize("flags, named", [
    ("--gpus 0", "--gpus"), ("--gpus -1", "--gpus"), ("--gpus 1.5", "--gpus"), ("--gpu-gib nan", "--gpu-gib"),
    ("--gpu-gib 0", "--gpu-gib"), ("--kv-gib -3", "--kv-gib"), ("--kv-gib 4", "--max-context 32768: give 5"),
    ("--tokens-per-microbatch 0", "--tokens-per-microbatch"), ("--prompts 0", "--prompts"), ("--model tiny", "'tiny'"),
    ("--model Qwen3-9B", "Qwen3-8B"), ("--model ./nowhere", "nowhere"), ("--device TPU", "TPU"), ("--gpu 8", "--gpu")])
def test_bad_input_is_refused_in_one_line(flags, named):
    with pytest.raises(UsageError, match=named) as error:
        plan(["--plan", *flags.split()])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags, code", [("", 0), ("--gpus 0", 2), ("--gpus 1 --model Qwen3-14B", 1)])
def test_command_line_exits_with_what_was_found(flags, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--plan", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        train.main()
    out, err = capsys.readouterr()
    assert (ended.value.code or 0) == code
    assert ("largest --kv-gib" in out, len(err.splitlines())) == (code == 0, min(code, 1))


def test_checkpoints_on_disk_are_planned():
    assert checkpoint_bytes(KNOWN["Qwen3-8B"]) == 14 * 8_190_735_360
    assert checkpoint_bytes(KNOWN["Qwen3-0.6B"]) == 14 * 596_049_920 + 4 * 151_936 * 1024  # tied: the head once more
    assert "a checkpoint 114.7 GB; 1 kept, and one more while it is written: 229 GB" in plan(["--plan", "--keep", "1"])


# --------------------------------------------------------------------------------------------------------- FLOPs


def test_flops_of_a_trained_token():
    """8B: 36 layers of 192,946,432 and a head of 151,936 * 4,096 are 7,568,401,408 weights."""
    shape = KNOWN["Qwen3-8B"]
    assert flops_per_token(shape, 0) == 6 * 7_568_401_408
    assert flops_per_token(shape, 0, share=0) == 6 * 6_946_071_552
    assert flops_per_token(shape, 1000) - flops_per_token(shape, 0) == 884_736_000  # 6 * 36 * 32 * 128 * 1000


def test_flops_of_a_small_model_are_those_that_torch_counts():
    """Attention apart: torch counts the whole square of the eager product, of which a causal kernel does half."""
    from torch.utils.flop_counter import FlopCounterMode
    config = config_of(SMALL)
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 16, dtype=torch.long), use_cache=False).logits.sum().backward()
    norms = SMALL.layers * (2 * SMALL.hidden + 2 * SMALL.head_dim)  # multiplied, but not by a matrix
    attention = 16 * (flops_per_token(SMALL, 16) - flops_per_token(SMALL, 0))
    assert counter.get_total_flops() == 16 * (flops_per_token(SMALL, 16) - 6 * norms) + attention


@pytest.mark.parametrize("name, peak", [
    ("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Quadro P400", None)])
def test_peak_is_that_of_the_device_or_none(name, peak):
    assert peak_flops(name) == peak
