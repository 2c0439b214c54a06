"""`ropewalk advise`: each rule row by row, numbers by another route, configs that read back, contradictions refused."""

import json
import math
import pathlib
import re
import shlex
import sys
import tomllib

import pytest
import typer

import ropewalk as rw
from ropewalk import advise, cli
from ropewalk.advise import measured, run

ROOT = pathlib.Path(__file__).parents[1]
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
         "max_position_embeddings": 4096}  # fmt: skip
BLOOM = {"model_type": "bloom", "hidden_size": 256, "n_head": 4, "n_layer": 2, "seq_length": 2048}
BERT = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 512}  # fmt: skip
LLAMA31 = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2,
           "max_position_embeddings": 131072, "rope_theta": 500000.0,
           "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                            "low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "hidden_size": 640, "num_attention_heads": 4, "head_dim": 256,
         "num_hidden_layers": 6, "sliding_window": 512, "max_position_embeddings": 32768}  # fmt: skip
NEW = {"train_len": 512, "num_heads": 4, "head_dim": 64}
ROWS = {
    "weights with ALiBi": ({"config": BLOOM, "eval_len": 8192}, "as it is"),
    "weights, within the length that they are made for": ({"config": LLAMA, "eval_len": 4096}, "as it is"),
    "weights with RoPE, local task, no training": ({"config": LLAMA, "eval_len": 8192, "task": "local"}, "window"),
    "weights with RoPE, stretched already": ({"config": LLAMA31, "eval_len": 300_000, "budget": "finetune"}, "llama3"),
    "weights with RoPE, no training": ({"config": LLAMA, "eval_len": 8192}, "yarn"),
    "weights with RoPE, fine-tuning, stretch up to 32": (
        {"config": LLAMA, "eval_len": 32 * 4096, "budget": "finetune"}, "yarn"),
    "weights with RoPE, fine-tuning, stretch above 32": (
        {"config": LLAMA, "eval_len": 33 * 4096, "budget": "finetune"}, "ntk"),
    "new weights, local task": ({**NEW, "eval_len": 512, "task": "local"}, "rotary+alibi"),
    "new weights, retrieval within the training length": ({**NEW, "eval_len": 512}, "rotary"),
    "new weights, retrieval beyond the training length": ({**NEW, "eval_len": 4096}, "rotary"),
}  # fmt: skip


def test_every_rule_has_a_row_here():
    assert list(ROWS) == [rule.name for rule in advise.RULES]


@pytest.mark.parametrize("name", ROWS)
def test_rule(name):
    asked, choice = ROWS[name]
    answer = advise.advise(**asked)
    assert (name, choice) == (answer.rule, answer.choice)
    assert answer.why and answer.verify and answer.code
    json.dumps(answer.as_dict())
    assert f"choose: {choice}" == str(answer).splitlines()[0]


@pytest.mark.parametrize("name", ROWS)
def test_config_reads_back_as_the_advice(name):
    asked, choice = ROWS[name]
    answer = advise.advise(**asked)
    if choice == "rotary+alibi":
        assert answer.config is None and "no family" in str(answer)
        return
    encoding = rw.hf.from_config(answer.config)
    if choice == "rotary":
        assert rw.Rotary(64, base=answer.numbers["base"]).inv_freq == encoding.inv_freq
    if choice == "yarn":
        stretch = asked["eval_len"] / 4096
        expected = rw.spectra.yarn(64, stretch=stretch, train_len=4096)
        assert (stretch, 0.1 * math.log(stretch) + 1) == (answer.numbers["factor"], pytest.approx(expected.magnitude))
        assert expected == encoding.spectrum
    if choice == "ntk":
        assert 10_000.0 * 33 ** (64 / 62) == pytest.approx(answer.config["rope_parameters"]["rope_theta"])


@pytest.mark.parametrize("rule", advise.RULES, ids=lambda rule: rule.name)
def test_rule_names_its_source_and_the_study_still_says_so(rule):
    ours = rule.source.startswith("our study")
    assert ours or re.search(r"arXiv:\d{4}\.\d{5}", rule.source)
    assert ours == (rule.holds is not None)
    assert rule.holds is None or rule.holds(advise.shipped())


def test_rules_would_notice_another_study():
    turned = json.loads(json.dumps(advise.shipped()))
    for row in turned["study"]["rows"]:
        row["perplexity"] = 1 / row["perplexity"]
    assert [] == [rule.name for rule in advise.RULES if rule.holds is not None and rule.holds(turned)]


def test_shipped_numbers_are_those_measured():
    """Stale? `python -m ropewalk.advise .` makes them anew."""
    assert measured.made(ROOT) == advise.shipped()


def test_figures_of_the_study_page():
    page = (ROOT / "docs" / "study" / "README.md").read_text()
    for label, name in (("RoPE", "rotary"), ("ALiBi", "alibi"), ("RoPE + ALiBi", "rotary+alibi")):
        cells = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", page, re.MULTILINE)[1].split("|")
        expected = [cell.split("±")[0].strip() for cell in cells]
        assert expected == [f"{measured.perplexity(name, n):.2f}" for n in measured.lengths()]


@pytest.mark.parametrize("length", [512, 4096, 16384])
def test_base_keeps_the_expected_lead(length):
    base = run.base_for(64, length)
    lead = lambda b, d: math.fsum(math.cos(d * b ** (-2 * i / 64)) for i in range(32))  # noqa: E731
    assert all(lead(base, d) > -1e-6 for d in range(length))
    if base > run.BASES[0]:
        smaller = run.BASES[run.BASES.index(base) - 1]
        assert any(lead(smaller, d) < 0 for d in range(length))


@pytest.mark.parametrize("length", [4096, 16384, 32768])
def test_base_is_near_the_published_bound(length):
    """0.0424 length^1.628, the line through the bounds of Men et al., for heads of 128."""
    assert 1 / 4 < run.base_for(128, length) / (0.0424 * length**1.628) < 4


def test_costs_are_quotients_of_the_benchmark():
    table = json.loads((ROOT / "benchmarks" / "attention-float32.json").read_text())["rows"]
    rows = {row["name"]: row["forward"]["ratio"] for row in table if row["seq_len"] == 4096}
    assert rows["alibi"] / rows["none"] == pytest.approx(measured.time("alibi", 4096)["forward"], abs=1e-4)
    quoted = advise.advise(config=BLOOM, eval_len=4096).costs[0]
    assert f"takes {rows['alibi'] / rows['none']:.2f} of its time" in quoted and "(4096 tokens;" in quoted
    assert "the nearest length measured to 10000" in advise.advise(config=BLOOM, eval_len=10000).costs[0]


def test_sight_of_the_flattest_head():
    answer = advise.advise(config=BLOOM, eval_len=4096)
    assert [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8] == pytest.approx(answer.numbers["slopes"])
    assert math.floor(math.log(100) * 256) + 1 == answer.numbers["farthest_sight"]
    assert any("Beyond 1179 tokens" in line for line in answer.cautions)


def test_a_stretched_config_is_taken_at_its_word():
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = {**LLAMA, "max_position_embeddings": 16384, "rope_scaling": block}
    assert "as it is" == advise.advise(config=config, eval_len=16384).choice
    anew = advise.advise(config=config, eval_len=32768)
    assert ("yarn", 8.0) == (anew.choice, anew.numbers["factor"])
    assert any("stretched to 16384 already" in line for line in anew.cautions)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({**NEW, "eval_len": 512, "budget": "none"}, "budget must be pretrain where no weights exist, got 'none'"),
        ({"config": LLAMA, "eval_len": 512, "budget": "pretrain"}, "budget must be none or finetune where weights"),
        ({"config": LLAMA, "eval_len": 512, "num_heads": 8}, r"num_heads must be what the config says \(4\), got 8"),
        ({"config": LLAMA, "eval_len": 512, "head_dim": 8}, r"head_dim must be what the config says \(64\), got 8"),
        ({"config": LLAMA, "eval_len": 512, "train_len": 8}, r"train_len must be what the config says \(4096\), got 8"),
        ({"config": BERT, "eval_len": 513}, r"eval_len must be at most the trained length \(512\), got 513"),
        ({**NEW, "eval_len": 512, "head_dim": 7}, "head_dim must be even, got 7"),
        ({"config": LLAMA, "eval_len": 65 * 4096}, "eval_len must be at most 64 times"),
        ({**NEW, "eval_len": 0}, "eval_len must be at least 1, got 0"),
        ({**NEW, "eval_len": 1 << 22}, "eval_len must be at most 2097152"),
        ({**NEW, "eval_len": 512, "task": "fun"}, "task must be retrieval or local, got 'fun'"),
        ({"eval_len": 512, "num_heads": 4, "head_dim": 64}, "train_len must be given where no config tells it"),
    ],
)
def test_contradictions_are_refused_by_name(asked, match):
    with pytest.raises(ValueError, match=match):
        advise.advise(**asked)


def test_bert_within_its_table():
    assert "as it is" == advise.advise(config=BERT, eval_len=512).choice


@pytest.mark.parametrize("name", ROWS)
def test_commands_to_verify_exist(name):
    """Each is parsed by the command that it calls."""
    commands = typer.main.get_command(cli.app).commands
    for line in advise.advise(**ROWS[name][0]).verify:
        program, command, *rest = shlex.split(line)
        assert "ropewalk" == program
        found = commands[command]
        if hasattr(found, "commands"):
            found, rest = found.commands[rest[0]], rest[1:]
        found.make_context(command, list(rest))
        assert "--out" in rest or "plot" != command
        assert "--dry-run" in rest or command not in ("study", "extend")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights with RoPE, no training", "new weights, retrieval beyond the training length",
                                  "new weights, local task"])  # fmt: skip
def test_commands_to_verify_run_when_pasted(name, monkeypatch, capsys, tmp_path):
    """In a folder where the block is new.json; `extend` needs a model's weights, so it is asked for its help."""
    pytest.importorskip("matplotlib")
    answer = advise.advise(**ROWS[name][0])
    (tmp_path / "new.json").write_text(json.dumps(answer.config))
    monkeypatch.chdir(tmp_path)
    for line in answer.verify:
        rest = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [*rest[:2], "--help"] if rest[1] == "extend" else rest)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None), line
        assert "minutes" in capsys.readouterr().out or rest[1] != "study"


def test_a_model_folder_is_what_extend_is_given(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert " path/to/model " in advise.advise(config=str(path), eval_len=8192).verify[0]
    (tmp_path / "model.safetensors").touch()
    assert f" {tmp_path} " in advise.advise(config=str(path), eval_len=8192).verify[0]


def test_nothing_is_claimed_beyond_what_was_measured():
    assert "nothing measured beyond 16 times" in advise.advise(config=LLAMA, eval_len=17 * 4096).why
    assert "nothing measured" not in advise.advise(config=LLAMA, eval_len=16 * 4096).why


def test_llama_31_keeps_its_rule():
    answer = advise.advise(config=LLAMA31, eval_len=300_000, budget="finetune")
    assert pytest.approx(300_000 / 8192) == answer.numbers["factor"]
    old, new = rw.hf.from_config(LLAMA31).inv_freq, rw.hf.from_config(answer.config).inv_freq
    kept = [i for i in range(64) if 8192 * 500_000.0 ** (-i / 64) / (2 * math.pi) > 4]
    assert [old[i] for i in kept] == [new[i] for i in kept]
    assert any("stretched to 131072 already, of which this is 2.29 times" in line for line in answer.cautions)


def test_numbers_have_units_and_lines_are_short():
    text = str(advise.advise(train_len=4096, eval_len=32768, num_heads=32, head_dim=128))
    assert re.search(r"base \d \d{3} \d{3}|base \d{3} 000", text) and re.search(r"longest wave [\d ]+ tokens", text)
    assert "(Men et al." in " ".join(text.split())
    hybrid = str(advise.advise(train_len=512, eval_len=512, num_heads=32, head_dim=64, task="local"))
    assert 112 >= max(map(len, hybrid.partition("verify")[0].splitlines()))


def test_layers_that_differ_are_named_and_unchanged_configs_say_so():
    assert "rw.hf.layers" in advise.advise(config=GEMMA, eval_len=1024).code
    assert "rw.hf.layers" in advise.advise(config=GEMMA, eval_len=65536).code
    for asked in ({"config": BLOOM, "eval_len": 4096}, {"config": LLAMA, "eval_len": 8192, "task": "local"}):
        assert "nothing changes" in str(advise.advise(**asked))


def test_command(monkeypatch, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    arguments = ["ropewalk", "advise", "--eval-length", "8192", "--config", str(path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    assert advise.advise(config=str(path), eval_len=8192).as_dict() == json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", [*arguments, "--heads", "3"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert 2 == ended.value.code and "--heads must be" in capsys.readouterr().err


def test_shipped_numbers_are_in_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ropewalk"]
    path = measured.PATH.relative_to(pathlib.Path(rw.__file__).parent)
    assert any(path.match(pattern) for pattern in patterns)


@pytest.mark.parametrize("name", ["advise", "explain"])
def test_help_has_an_example_that_runs(name, monkeypatch, capsys):
    command = typer.main.get_command(cli.app).commands[name]
    example = re.search(r"Example: (ropewalk .*)", command.help)[1]
    monkeypatch.setattr(sys, "argv", shlex.split(example))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None) and len(capsys.readouterr().out) > 500
