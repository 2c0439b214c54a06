"""The study's optimizers, and training that can be stopped anywhere."""

import json
import math

import pytest
import torch
from torch import nn

import ropewalk as rw
from ropewalk.study import files, optim, train
from study_fixtures import tiny


def quintic(matrix, steps=5):
    """The published iteration in float64, one matrix at a time."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (16, 20)])
def test_orthogonalize_is_the_published_iteration(shape):
    generator = torch.Generator().manual_seed(0)
    decay = torch.logspace(0, -5, shape[0])[:, None]
    matrices = torch.randn(3, *shape, generator=generator) * decay
    expected = torch.stack([quintic(matrix) for matrix in matrices])
    torch.testing.assert_close(expected, optim.orthogonalize(matrices.double(), dtype=torch.float64))
    torch.testing.assert_close(expected.float(), optim.orthogonalize(matrices), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(expected.mT.float(), optim.orthogonalize(matrices.mT), atol=1e-4, rtol=1e-4)


def trained(optimizer, weights, grads):
    for grad in grads:
        for weight, part in zip(weights, grad, strict=True):
            weight.grad = part.clone()
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_muon_agrees_with_torch_within_bfloat16():
    shapes = [(16, 16), (64, 16), (16, 64), (16, 16)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    mine, theirs = ([nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    got = trained(optim.Muon(mine, lr=0.02, weight_decay=0.1), mine, grads)
    want = trained(
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"), theirs, grads
    )
    for expected, value, first in zip(want, got, start, strict=True):
        moved = (expected - first).norm()
        assert 0.03 * moved > (expected - value).norm()
    exact = [nn.Parameter(weight.double()) for weight in start]
    optimizer = optim.Muon(exact, lr=0.02, weight_decay=0.1, dtype=torch.float64)
    double = trained(optimizer, exact, [[part.double() for part in grad] for grad in grads])
    for expected, value in zip(double, got, strict=True):
        torch.testing.assert_close(expected.float(), value, atol=1e-5, rtol=1e-5)


def test_every_parameter_has_exactly_one_optimizer():
    model = rw.Transformer(10, rw.Learned(8, 16), model_dim=16, num_layers=1, num_heads=2)
    found = optim.optimizers(model, matrix_rate=0.02, vector_rate=0.002, weight_decay=0.1)
    owned = [
        (p, group["weight_decay"], type(one)) for one in found for group in one.param_groups for p in group["params"]
    ]
    assert len(list(model.parameters())) == len(owned) == len({id(p) for p, _, _ in owned})
    decay = {id(p): (weight_decay, kind) for p, weight_decay, kind in owned}
    assert (0.1, torch.optim.AdamW) == decay[id(model.embedding.weight)]
    assert (0.0, torch.optim.AdamW) == decay[id(model.norm.weight)]
    assert (0.0, torch.optim.AdamW) == decay[id(model.encoding.table)]
    assert (0.1, optim.Muon) == decay[id(model.blocks[0].up.weight)]


def test_rate_rises_then_falls_to_five_percent():
    shares = [optim.rate(step, 100, 10) for step in range(100)]
    assert [0.1, 0.5, 1.0] == [shares[0], shares[4], shares[9]]
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert math.isclose(0.05, shares[-1])
    assert math.isclose((1 + 0.05) / 2, optim.rate(54, 100, 10), rel_tol=1e-9)
    assert [0.5, 1.0] == [optim.rate(step, 5, 10) for step in range(2)]


def test_equal_seeds_give_equal_weights_whatever_the_encoding_learns(tmp_path):
    settings, corpus = tiny(tmp_path)
    one, two, other = (
        train.build(settings, name, seed, corpus.vocab_size)
        for name, seed in (("rotary", 0), ("learned", 0), ("rotary", 1))
    )
    assert torch.equal(one.embedding.weight, two.embedding.weight)
    assert torch.equal(one.blocks[0].up.weight, two.blocks[0].up.weight)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_loss_in_slices_equals_the_loss_at_once(tmp_path, monkeypatch):
    settings, corpus = tiny(tmp_path)
    tokens = torch.randint(256, (3, 17))
    results = []
    for largest in (2**26, 5000):
        monkeypatch.setattr(train, "LARGEST_LOGITS", largest)
        model = train.build(settings, "rotary", 0, corpus.vocab_size)
        loss = train.loss_of(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        results.append((loss.detach(), model.embedding.weight.grad, model.blocks[0].up.weight.grad))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(whole, sliced)


def quiet(**_fields):
    pass


def test_training_learns_and_leaves_weights_and_log(tmp_path):
    settings, corpus = tiny(tmp_path / "text")
    trainer = train.Trainer(settings, "rotary", 0, corpus, tmp_path)
    trainer.run(quiet)
    log = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [10, 20, 30, 40] == [line["step"] for line in log]
    assert {"step", "loss_nats_per_token", "tokens_per_second"} == set(log[0])
    assert log[-1]["loss_nats_per_token"] < log[0]["loss_nats_per_token"] - 0.5
    assert not (tmp_path / "checkpoint.pt").exists()
    fresh = train.build(settings, "rotary", 5, corpus.vocab_size)
    summary = train.read_weights(tmp_path / "model.safetensors", fresh)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    assert log[-1]["loss_nats_per_token"] == summary["train_loss"]


@pytest.mark.parametrize("stop", [3, 10, 29])
def test_stopped_training_goes_on_with_the_same_bits(tmp_path, stop):
    settings, corpus = tiny(tmp_path / "text")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
    train.Trainer(settings, "rotary", 0, corpus, straight).run(quiet)
    trainer = train.Trainer(settings, "rotary", 0, corpus, broken)
    step, count = trainer.train_step, iter(range(stop))

    def stopping_step():
        if next(count, None) is None:
            raise InterruptedError("stop")
        return step()

    trainer.train_step = stopping_step
    with pytest.raises(InterruptedError):
        trainer.run(quiet)
    train.Trainer(settings, "rotary", 0, corpus, broken).run(quiet)
    assert (straight / "model.safetensors").stat().st_size > 1000
    models = [train.build(settings, "rotary", 0, corpus.vocab_size) for _ in range(2)]
    for model, folder in zip(models, (straight, broken), strict=True):
        train.read_weights(folder / "model.safetensors", model)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)
    logs = [
        [(line["step"], line["loss_nats_per_token"]) for line in files.read_lines(folder / "train.jsonl")]
        for folder in (straight, broken)
    ]
    assert logs[0] == logs[1]


def test_loss_that_is_not_finite_ends_the_run(tmp_path):
    settings, corpus = tiny(tmp_path / "text")
    trainer = train.Trainer(settings, "rotary", 0, corpus, tmp_path)
    nn.init.constant_(trainer.model.embedding.weight, math.nan)
    with pytest.raises(ValueError, match="loss must be finite, got nan at step 10\nhint: --dtype float32"):
        trainer.run(quiet)


def test_bfloat16_training_keeps_float32_weights(tmp_path):
    settings, corpus = tiny(tmp_path / "text", dtype="bfloat16", steps=2)
    trainer = train.Trainer(settings, "alibi", 0, corpus, tmp_path)
    assert math.isfinite(trainer.train_step())
    assert {torch.float32} == {p.dtype for p in trainer.model.parameters()}


@pytest.mark.parametrize(
    ("seconds", "winner"), [((1.0, 0.5), "bfloat16"), ((1.0, 0.9), "float32"), ((1.0, 9.0), "float32")]
)
def test_dtype_race_needs_a_clear_winner(monkeypatch, seconds, winner):
    clock, ends = [0.0], iter([lap for lap in seconds for _ in range(5)])

    def perf_counter():
        clock.append(clock[-1] if len(clock) % 2 else clock[-1] + next(ends))
        return clock[-1]

    monkeypatch.setattr(train.time, "perf_counter", perf_counter)
    assert winner == train.faster_dtype("cpu", size=8)


def test_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "state"
    files.write_bytes(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_bytes(path, b"new")
    assert b"old" == path.read_bytes()


def test_half_a_line_is_never_read(tmp_path):
    path = tmp_path / "lines.jsonl"
    files.append_line(path, {"a": 1})
    files.append_line(path, {"a": 2})
    whole = path.read_bytes()
    for cut in range(len(whole) // 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert [{"a": 1}] == files.read_lines(path)
    assert [] == files.read_lines(tmp_path / "absent.jsonl")


def test_short_write_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "write", lambda *_: 3)
    with pytest.raises(OSError, match=r"must take a line of 9 bytes, got 3 of them written \(disk full\?\)"):
        files.append_line(tmp_path / "lines.jsonl", {"a": 1})
