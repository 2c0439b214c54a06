"""What the study asks of a trained model, each answer reached here by another route."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import ropewalk as rw
from ropewalk.naming import build
from ropewalk.study import attention, copying, evaluate, files, results, scoring, train, worker
from study_fixtures import tiny


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def study(home):
    return tiny(home / "text")


@pytest.fixture(scope="module", params=["rotary", "alibi", "rotary+alibi"])
def cell(request, home, study):
    """A finished cell: its folder, its model and its evaluation lines by (protocol, length)."""
    folder = home / request.param
    settings, corpus = study
    worker.run_cell(settings, request.param, 0, corpus, folder, lambda **_: None)
    model = train.build(settings, request.param, 3, corpus.vocab_size)
    train.read_weights(folder / "model.safetensors", model)
    lines = {(line["protocol"], line["eval_len"]): line for line in files.read_lines(folder / "evaluation.jsonl")}
    return folder, model.eval(), lines


def token_losses(model, tokens, see=math.inf):
    """Loss of each token after the first, one sequence at a time, each token seeing at most `see` back."""
    positions = torch.arange(len(tokens) - 1)
    mask = positions[:, None] - positions < see
    with torch.inference_mode():
        logits = model(tokens[None, :-1], mask=mask)[0]
    return F.cross_entropy(logits, tokens[1:], reduction="none").double()


def near(expected):
    return pytest.approx(expected, rel=2e-5)


def nats(line):
    return [row["nats"] for row in line["documents"]]


def in_windows(model, tokens, length, see=math.inf):
    parts = [
        token_losses(model, tokens[start : start + length + 1], see) for start in range(0, len(tokens) - 1, length)
    ]
    return torch.stack(parts)


def test_every_question_is_answered_once(cell, study):
    _, model, lines = cell
    lengths, beyond = [16, 32, 64], [32, 64]
    asked = {(protocol, length) for protocol in ("windows", "sliding", "limited") for length in lengths}
    asked |= {("context", length) for length in beyond}
    if any(isinstance(part, rw.Rotary) for part in model.modules()):
        asked |= {(method, length) for method in ("linear", "ntk", "yarn") for length in beyond}
    asked |= {("copy", distance) for distance in (4, 8, 12, 16, 32, 64)}
    assert asked == lines.keys()
    assert {None} == {line["reason"] for line in lines.values()}


def test_windows_score_the_same_tokens_at_every_length(cell, study):
    _, model, lines = cell
    blocks = study[1].held_out
    for length in (16, 32, 64):
        line = lines["windows", length]
        losses = [in_windows(model, block.tokens, length) for block in blocks]
        assert [near(part.sum().item()) for part in losses] == nats(line)
        assert [(block.id, 64, 64) for block in blocks] == [
            (row["id"], row["tokens"], row["bytes"]) for row in line["documents"]
        ]
        assert {"nats": near(sum(part.sum().item() for part in losses)), "tokens": 192} == line["last_256"]


def test_loss_by_position_adds_up_within_its_edges(cell, study):
    _, model, lines = cell
    losses = torch.stack([in_windows(model, block.tokens, 64) for block in study[1].held_out])
    found = lines["windows", 64]["by_position"]
    assert [0, 32, 64] == found["edges"]
    assert [3 * 32, 3 * 32] == found["tokens"]
    assert [near(losses[..., :32].sum().item()), near(losses[..., 32:].sum().item())] == found["nats"]


def test_sliding_scores_each_token_once_with_three_quarters_of_context(cell, study):
    _, model, lines = cell
    for block, row in zip(study[1].held_out[:2], lines["sliding", 32]["documents"], strict=True):
        total = 0.0
        for target in range(1, 65):
            # the window in which this token is scored ends at the next multiple of the stride
            end = max(32, math.ceil(target / 8) * 8)
            losses = token_losses(model, block.tokens[end - 32 : target + 1])
            total += losses[-1].item()
        assert near(total) == row["nats"]
        assert 64 == row["tokens"]
    assert nats(lines["windows", 64])[:2] == nats(lines["sliding", 64])


def test_limited_sees_only_the_training_length_back(cell, study):
    _, model, lines = cell
    for length in (16, 32, 64):
        expected = [in_windows(model, block.tokens, length, see=16).sum().item() for block in study[1].held_out[:2]]
        assert [near(value) for value in expected] == nats(lines["limited", length])


def test_context_compares_the_same_tokens_beyond_the_training_length(cell, study):
    _, model, lines = cell
    for block, row in zip(study[1].held_out[:2], lines["context", 64]["documents"], strict=True):
        assert near(in_windows(model, block.tokens, 64)[:, 16:].sum().item()) == row["nats"]
        assert near(in_windows(model, block.tokens, 64, see=16)[:, 16:].sum().item()) == row["limited_nats"]
        assert (48, 48) == (row["tokens"], row["bytes"])


def test_stretches_change_the_frequencies_and_leave_the_model_as_it_was(cell, study):
    _, model, lines = cell
    before = model.encoding
    for method in evaluate.STRETCHES:
        if (method, 64) not in lines:
            continue
        with evaluate.stretched(model, method, 64, 16):
            rotary = next(part for part in model.encoding.modules() if isinstance(part, rw.Rotary))
            options = {"train_len": 16} if method == "yarn" else {}
            assert getattr(rw.spectra, method)(8, 10_000.0, stretch=4.0, **options) == rotary.spectrum
            assert all(block.attention.encoding is model.encoding for block in model.blocks)
            expected = [in_windows(model, block.tokens, 64).sum().item() for block in study[1].held_out[:2]]
        assert [near(value) for value in expected] == nats(lines[method, 64])
        assert nats(lines["windows", 64])[:2] != nats(lines[method, 64])
    assert model.encoding is before
    assert all(block.attention.encoding is before for block in model.blocks)


@pytest.mark.parametrize("name", ["rotary", "rotary+alibi", "hybrid"])
def test_stretch_finds_rope_in_every_composition(name):
    encoding = build(name, head_dim=8, num_heads=2, model_dim=16, num_positions=16)
    changed = evaluate.with_stretch(encoding, "linear", 64, 16)
    found = [part.spectrum for part in changed.modules() if isinstance(part, rw.Rotary)]
    assert [rw.spectra.linear(8, stretch=4.0)] == found
    untouched = [part.spectrum for part in encoding.modules() if isinstance(part, rw.Rotary)]
    assert [rw.spectra.plain(8)] == untouched


def test_copy_scores_the_second_copy_after_its_cue(cell, study):
    _, model, lines = cell
    settings, corpus = study
    rows, size = copying.copy_rows(corpus.held_out, settings, 32)
    span, cue = copying.copy_span(settings)
    assert (2, 36) == tuple(rows.shape)
    assert torch.equal(rows[:, span : 2 * span], rows[:, -span:])
    line = lines["copy", 32]
    losses = torch.stack([token_losses(model, row) for row in rows])
    second, first = losses[:, -(span - cue) :], losses[:, span + cue - 1 : 2 * span - 1]
    assert (2, 2 * (span - cue), size) == (line["trials"], line["tokens"], line["bytes"])
    assert (near(second.sum().item()), near(first.sum().item())) == (line["nats"], line["first_nats"])
    with torch.inference_mode():
        guessed = model(rows[:, :-1]).argmax(-1) == rows[:, 1:]
    assert near(guessed[:, -(span - cue) :].double().mean().item()) == line["accuracy"]


def test_attention_maps_are_the_weights_that_the_model_uses(cell, study):
    _, model, _ = cell
    tokens = study[1].held_out[0].tokens[None, :32]
    layer = model.blocks[0].attention
    inputs = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with torch.inference_mode():
        model.hidden(tokens)
        weights = attention.attention_weights(model, tokens, [0])[0]
        hook.remove()
        values = layer.v_proj(inputs[0])[0].view(32, 2, 8).transpose(0, 1)
        expected = layer(inputs[0])[0]
        torch.testing.assert_close(expected, layer.out_proj((weights @ values).transpose(0, 1).reshape(32, 16)))


def test_cell_json_is_the_summary(cell, study):
    folder, model, lines = cell
    summary = files.read_json(folder / "cell.json")
    assert sum(p.numel() for p in model.parameters()) == summary["parameters"]
    assert near(sum(nats(lines["windows", 16])) / 192) == summary["heldout_loss_same_length"]
    kept = summary["attention"]
    assert (32, 16) == (kept["seq_len"], kept["train_len"])
    assert [(0, 0), (0, 1)] == [(entry["layer"], entry["head"]) for entry in kept["maps"]]
    for entry in kept["maps"]:
        assert [pytest.approx(1, abs=0.02)] * 32 == [sum(row) for row in entry["weights"]]
        assert 0 < entry["mean_distance"] < 16


def test_large_map_is_shrunk_without_losing_weight():
    weights = torch.rand(10, 10).tril()
    weights = weights / weights.sum(1, keepdim=True)
    small = attention.shrink(weights, 4)
    assert (4, 4) == tuple(small.shape)
    torch.testing.assert_close(torch.ones(4), small.sum(1))
    torch.testing.assert_close(weights[:3, 3:6].sum() / 3, small[0, 1])
    torch.testing.assert_close(weights[9:, :3].sum(), small[3, 0])
    assert pytest.approx(1 / 3) == attention.mean_distance(torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 1.0]]))


def test_learned_table_shows_why_it_cannot_answer(home, study):
    settings, corpus = study
    folder = home / "learned"
    worker.run_cell(settings, "learned", 0, corpus, folder, lambda **_: None)
    lines = {(line["protocol"], line["eval_len"]): line for line in files.read_lines(folder / "evaluation.jsonl")}
    refused = {key for key, line in lines.items() if line["reason"]}
    assert {"the learned table has 16 positions"} == {lines[key]["reason"] for key in refused}
    assert {
        ("windows", 32),
        ("windows", 64),
        ("sliding", 32),
        ("limited", 64),
        ("context", 32),
        ("copy", 16),
    } <= refused
    assert not {("windows", 16), ("sliding", 16), ("limited", 16), ("copy", 12)} & refused
    assert {None} == {lines[key]["documents"] for key in refused}
    row = results.row(lines["windows", 64])
    assert "the learned table has 16 positions" == row["reason"]
    assert {None} == {row[name] for name in results.COLUMNS[4:]}


def test_result_rows_say_what_the_lines_say(cell):
    _, _, lines = cell
    line = lines["windows", 32]
    row = results.row(line)
    loss = sum(nats(line)) / 192
    assert (line["encoding"], 0, "windows", 32, 192) == tuple(
        row[name] for name in (*results.COLUMNS[:4], "scored_tokens")
    )
    assert (near(loss), near(loss / math.log(2)), near(math.exp(loss))) == (
        row["loss_nats_per_byte"],
        row["bits_per_byte"],
        row["perplexity"],
    )
    assert row["ci_low"] <= row["perplexity"] <= row["ci_high"]
    copied = results.row(lines["copy", 32])
    assert near(math.exp(lines["copy", 32]["nats"] / lines["copy", 32]["tokens"])) == copied["perplexity"]
    assert (None, lines["copy", 32]["accuracy"]) == (copied["ci_low"], copied["accuracy"])


def test_scores_do_not_depend_on_how_many_rows_run_at_once(cell, study, monkeypatch):
    _, model, _ = cell
    settings, corpus = study
    scorer = scoring.Scorer(model, "cpu", functools.partial(train.autocast, settings))
    whole = scorer.windows(corpus.held_out, 16).nats
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", 16)
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 256 * 5)
    torch.testing.assert_close(whole, scorer.windows(corpus.held_out, 16).nats, rtol=1e-5, atol=1e-5)
