"""Checkpoint files in and out: every byte accounted for, whole or not there, in little memory."""

import json
import pathlib
import signal
import struct
import subprocess
import sys
import types

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint_fixtures as made
from ropewalk import checkpoints, layouts
from ropewalk.checkpoints import shards

Q, K = (made.LAYER.format(1, name) + ".weight" for name in ("q_proj", "k_proj"))


def _there_and_back(source, tmp_path, **options):
    there, back = tmp_path / f"there{source.suffix}", tmp_path / f"back{source.suffix}"
    checkpoints.convert(source, there, "interleaved", layout="half", **options)
    assert made.digest(source) != made.digest(there)
    checkpoints.convert(there, back, "half", **options)
    assert made.digest(source) == made.digest(back)
    return there


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "note": 'a "quoted" \\ one, é'}])
def test_there_and_back_is_the_same_files_byte_for_byte(tmp_path, count, metadata):
    folder = made.write(tmp_path / "in", made.tensors(), metadata=metadata, shards=count)
    there = _there_and_back(folder, tmp_path)
    assert {path.name for path in folder.iterdir()} == {path.name for path in there.iterdir()}
    with safe_open(sorted(there.glob("*.safetensors"))[0], "pt") as file:
        assert (metadata or {}) | {"ropewalk.layout": "interleaved"} == file.metadata()


@pytest.mark.parametrize(
    "header",
    [
        '{"__metadata__":{},%s}',
        '{ "__metadata__" : { "a" : "b" } , %s }  ',
        '{"__metadata__":{ },%s}     ',
        "{\n%s\n}",
        '{%s,"__metadata__":{"a":"b"}}',
    ],
)
def test_headers_that_others_wrote_come_back_as_they_were(tmp_path, header):
    weight = torch.randn(128, 4)
    entry = f'"a.0.attn.q_proj.weight":{{"dtype":"F32","shape":[128,4],"data_offsets":[0,{weight.nbytes}]}}'
    text = (header % entry).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(weight.numpy().data))
    (tmp_path / "config.json").write_text(json.dumps(made.CONFIG))
    there = _there_and_back(path, tmp_path)
    assert torch.equal(layouts.to_interleaved_weight(weight, 8), load_file(there)["a.0.attn.q_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_queries_and_keys_are_reordered_and_nothing_else(tmp_path, dtype):
    state = made.tensors(dtype=dtype)
    checkpoints.convert(made.write(tmp_path / "in", state), tmp_path / "out", "interleaved", layout="half")
    got = load_file(tmp_path / "out" / "model.safetensors")
    raw = {name: x.view(torch.uint8).reshape(*x.shape, -1) for name, x in state.items()}
    for name, heads in ((key, 8 if "q_proj" in key else 2) for key in state if "q_proj" in key or "k_proj" in key):
        raw[name] = layouts.to_interleaved_weight(raw[name], heads)
    assert raw.keys() == got.keys()
    assert {} == {n: x for n, x in got.items() if not torch.equal(raw[n], x.view(torch.uint8).reshape(raw[n].shape))}


def test_only_the_b_factor_of_an_adapter_changes(tmp_path):
    prefix = "base_model.model." + made.LAYER.format(0, "")
    state = {
        f"{prefix}q_proj.lora_A.weight": torch.randn(4, 64),
        f"{prefix}q_proj.lora_B.weight": torch.randn(128, 4),
        f"{prefix}q_proj.lora_magnitude_vector": torch.randn(128),
        f"{prefix}v_proj.lora_B.weight": torch.randn(32, 4),
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    base = made.write(tmp_path / "base", made.tensors())
    with pytest.raises(ValueError, match=r"config must be config.json or params.json, got neither[\s\S]*--config PATH"):
        checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")
    there = _there_and_back(folder, tmp_path, config=base)
    got = load_file(there / "adapter_model.safetensors")
    changed = {name.removeprefix(prefix) for name in state if not torch.equal(state[name], got[name])}
    assert {"q_proj.lora_B.weight", "q_proj.lora_magnitude_vector"} == changed
    assert torch.equal(layouts.to_interleaved_weight(state[f"{prefix}q_proj.lora_B.weight"], 8),
                       got[f"{prefix}q_proj.lora_B.weight"])  # fmt: skip


def test_metas_own_files_are_read_with_params_json(tmp_path):
    state = {f"layers.0.attention.{name}.weight": torch.randn(rows, 8) for name, rows in (("wq", 128), ("wk", 32))}
    save_file(state, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps({"dim": 128, "n_heads": 8, "n_kv_heads": 2, "n_layers": 1}))
    out = tmp_path / "half.safetensors"
    done = checkpoints.convert(tmp_path / "consolidated.safetensors", out, "half", layout="interleaved")
    assert 2 == done["tensors"]
    got = load_file(out)
    assert torch.equal(
        layouts.to_half_weight(state["layers.0.attention.wk.weight"], 2), got["layers.0.attention.wk.weight"]
    )


def test_scales_of_quantised_rows_move_with_their_rows(tmp_path):
    state = made.tensors()
    state[Q] = torch.randint(-100, 100, (128, 64), dtype=torch.int8)
    state[Q + "_scale"] = torch.rand(128, 1)
    expected = layouts.to_interleaved_weight(state[Q].float() * state[Q + "_scale"], 8)
    got = checkpoints.convert_state(state, made.CONFIG, "interleaved")
    assert torch.equal(expected, got[Q].float() * got[Q + "_scale"])


@pytest.mark.parametrize(("size", "count"), [(128, 8), (16, 8)])
def test_norms_of_one_head_or_of_all_move_with_their_channels(size, count):
    """q_norm of head_dim is shared by the heads; of all channels, or as (heads, head_dim), each head has its own."""
    name = made.LAYER.format(0, "q_norm.weight")
    state = made.tensors() | {name: torch.randn(size)}
    got = checkpoints.convert_state(state, made.CONFIG, "interleaved")[name]
    heads = 1 if size == 16 else 8
    assert torch.equal(layouts.to_interleaved_weight(state[name], heads), got)
    state[name] = state[name].view(-1, 16)
    assert torch.equal(got, checkpoints.convert_state(state, made.CONFIG, "interleaved")[name].flatten())


_MEMORY = """
import resource, sys
from ropewalk import checkpoints
import torch
torch.randn(8, 8)[torch.arange(8)]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
checkpoints.convert(sys.argv[1], sys.argv[2], "interleaved", layout="half")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_below_one_tensor(tmp_path):
    """192 MiB of checkpoint, tensors of up to 32 MiB: a few MiB at a time."""
    columns = 2**16
    state = {
        Q: torch.randn(128, columns),
        K: torch.randn(32, columns),
        "model.embed_tokens.weight": torch.randn(608, columns),
    }
    size = sum(x.nbytes for x in state.values())
    folder = made.write(tmp_path / "in", state)
    del state
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, folder, tmp_path / "out"], capture_output=True, text=True, check=True
    )
    assert size == 192 * 2**20
    assert int(done.stdout) < 32 * 2**20
    assert size < (tmp_path / "out" / "model.safetensors").stat().st_size


_KILLED = """
import os, signal, sys
from ropewalk import checkpoints
from ropewalk.checkpoints import shards
where = sys.argv[3]
copy, rename = shards._copy, os.rename
def dies(*a):
    copy(*a)
    os.kill(os.getpid(), signal.SIGKILL)
def renames(a, b):
    rename(a, b)
    os.kill(os.getpid(), signal.SIGKILL)
if where == "in the middle":
    shards._copy = dies
else:
    os.rename = renames
checkpoints.convert(sys.argv[1], sys.argv[2], "interleaved", layout="half", force=len(sys.argv) > 4)
"""


def _killed(source, out, where, *force):
    done = subprocess.run([sys.executable, "-c", _KILLED, source, out, where, *force], capture_output=True)
    assert -signal.SIGKILL == done.returncode, done.stderr


@pytest.mark.slow
def test_a_kill_leaves_nothing_under_the_name_and_the_next_run_says_so(tmp_path):
    folder, out = made.write(tmp_path / "in", made.tensors()), tmp_path / "out"
    _killed(folder, out, "in the middle")
    assert not out.exists()
    with pytest.raises(ValueError, match=r"OUT must be without .out.partial beside it[\s\S]*--force removes it"):
        checkpoints.convert(folder, out, "interleaved", layout="half")
    checkpoints.convert(folder, out, "interleaved", layout="half", force=True)
    assert ["in", "out"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the middle", "between the names"])
def test_a_kill_destroys_no_earlier_output(tmp_path, where):
    folder = made.write(tmp_path / "in", made.tensors())
    out = made.write(tmp_path / "out", made.tensors(seed=1))
    before = made.digest(out)
    _killed(folder, out, where, "force")
    with pytest.raises(ValueError, match=r"OUT must be absent"):
        checkpoints.convert(folder, out, "interleaved", layout="half")
    assert before == made.digest(out)


_FULL = """
import resource, sys
from ropewalk import checkpoints
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoints.convert(sys.argv[1], sys.argv[2], "interleaved", layout="half", force=True)
except OSError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_told_and_earlier_output_stays(tmp_path, kind):
    source = made.write(tmp_path / "in", made.tensors())
    out = made.write(tmp_path / "out", made.tensors(seed=1))
    if kind == "file":
        source, out = source / "model.safetensors", out / "model.safetensors"
    before = made.digest(out)
    done = subprocess.run([sys.executable, "-c", _FULL, source, out], capture_output=True, text=True, check=True)
    assert f"OUT must be written whole, got {out} (File too large)\n" == done.stdout
    assert before == made.digest(out)
    assert not list(tmp_path.rglob("*.partial"))


def test_nothing_is_overwritten_unless_told_and_then_only_checkpoints(tmp_path):
    folder = made.write(tmp_path / "in", made.tensors())
    out = made.write(tmp_path / "out", made.tensors(seed=1))

    def convert(source=folder, to=out, **options):
        return checkpoints.convert(source, to, "interleaved", layout="half", **options)

    with pytest.raises(ValueError, match=r"OUT must be absent, got .*out, which exists\nhint: --force replaces it"):
        convert()
    convert(force=True)
    assert load_file(out / "model.safetensors").keys() == made.tensors().keys()
    (out / "sub").mkdir()
    with pytest.raises(ValueError, match=r"OUT must be a folder of checkpoint files and nothing else"):
        convert(force=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"OUT must be a folder of checkpoint files and nothing else"):
        convert(to=home, force=True)
    for place in (folder, tmp_path):
        with pytest.raises(ValueError, match=r"OUT must be another place than IN"):
            convert(to=place, force=True)
    with pytest.raises(ValueError, match=r"OUT must be in an existing folder"):
        convert(to=tmp_path / "no" / "out")
    with pytest.raises(ValueError, match=r"OUT must be a .safetensors file"):
        convert(folder / "model.safetensors", tmp_path / "x")


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    folder = made.write(tmp_path / "in", made.tensors())
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=2**20))
    with pytest.raises(ValueError, match=r"OUT must be on a disk with \d+ MiB free, got 1 MiB at"):
        checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")
    assert ["in"] == [path.name for path in tmp_path.iterdir()]


def test_links_are_followed_and_folders_named_as_left_out(tmp_path):
    """As in the cache of a hub, where a checkpoint is a folder of links."""
    real = made.write(tmp_path / "real", made.tensors())
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in real.iterdir():
        (linked / path.name).symlink_to(path)
    (linked / "original").mkdir()
    done = checkpoints.convert(linked, tmp_path / "out", "interleaved", layout="half")
    assert "left out: original/" in done["notes"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]


def _damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:-1], r"model.safetensors must be a whole safetensors file of \d+ bytes, got \d+ bytes"),
        (lambda data: data + b"x", r"a whole safetensors file of \d+ bytes"),
        (lambda data: data[:100], r"a whole safetensors file"),
        (lambda data: data[:8] + b"!" + data[9:], r"a safetensors file with a readable header"),
        (lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"F64"', 1), r"must be F64 of shape"),
        (lambda data: data.replace(b"[0,", b"[4,", 1), r"must be stored from byte 0 on, got 4"),
    ],
)
def test_damaged_files_are_named(tmp_path, change, match):
    folder = made.write(tmp_path / "in", made.tensors())
    _damage(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=match):
        checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")


def _lose(folder):
    next(folder.glob("*-00002-*")).unlink()


def _add(folder):
    save_file({"x": torch.zeros(1)}, folder / "extra.safetensors")


def _forget(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][Q]
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_lose, r"model-00002-of-00003.safetensors must be a shard in the folder and in model.safetensors.index.json"),
        (_add, r"extra.safetensors must be a shard in the folder and in"),
        (_forget, rf"{Q} must be in model-0000\d-of-00003.safetensors and so in model.safetensors.index.json"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), r"one .safetensors file, or shards with"),
        (
            lambda folder: (folder / "pytorch_model.bin").touch(),
            r"safetensors alone, got pytorch_model.bin beside them",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), r"config.json must be whole JSON"),
    ],
)
def test_incomplete_and_mixed_folders_are_refused_by_name(tmp_path, change, match):
    folder = made.write(tmp_path / "in", made.tensors(), shards=3)
    change(folder)
    with pytest.raises(ValueError, match=match):
        checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")
    assert not pathlib.Path(tmp_path / "out").exists()


def test_progress_is_told_when_it_takes_long(monkeypatch):
    told, clock = [], iter(range(0, 100))
    monkeypatch.setattr("ropewalk.checkpoints.run.time.monotonic", lambda: float(next(clock)))
    from ropewalk.checkpoints.run import _Progress

    progress = _Progress(8 * 2**20, told.append)
    for _ in range(4):
        progress(2 * 2**20)
    assert "4 of 8 MiB written" == told[0]


@pytest.mark.parametrize("text", [
    b'{"__metadata__":{"a":"b", "ropewalk.layout" : "half"},%s}',
    b'{"__metadata__":{"ropewalk.layout":"half"},%s}',
])  # fmt: skip
def test_record_in_a_header_that_others_wrote_anew_is_taken_out(text):
    entry = b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = json.loads(shards.recorded(text % entry, None))
    assert "ropewalk.layout" not in header["__metadata__"]
    assert json.loads(b"{%s}" % entry)["x"] == header["x"]
