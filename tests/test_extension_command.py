"""What `ropewalk extend` says, saves and refuses."""

import json
import sys

import pytest

from extension_fixtures import TRAINED, WORDS, folder, save_tokenizer, settings, tokens  # noqa: F401

transformers = pytest.importorskip("transformers")
from ropewalk import cli, hf  # noqa: E402
from ropewalk.extension import report, source  # noqa: E402


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a command line in a scratch folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ropewalk", "extend", *map(str, arguments)])
        capsys.readouterr()  # what transformers said while the model was saved
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_json_is_all_that_stdout_gets(command, folder, tmp_path):
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32", "--json")
    result = json.loads(out)
    assert (0, "") == (code, err)
    assert {"unchanged", "window", "linear", "ntk", "yarn"} == result["losses_nats_per_token"].keys()
    assert (TRAINED, 64, None) == (result["train_len"], result["to"], result["saved"])
    assert json.loads((tmp_path / "runs" / "extend-model" / "summary.json").read_text()).items() <= result.items()


def test_words_and_progress_are_apart(command, folder):
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32", "--windows", "2")
    assert 0 == code
    assert out.startswith("model: trained to 32 tokens, stretched to 64 (factor 2)\n128 tokens of text, in windows")
    for words in ("loss, nats per token", "attention limited to 32", "95 % interval", "recommendation: ", "32 to 64"):
        assert words in out
    assert "unchanged, 16 tokens: 0%; window 1 of 58" in err


def advised(monkeypatch, method):
    monkeypatch.setattr(report, "recommend", lambda *_: report.Recommendation(method, "because"))


def test_saved_config_loads_as_what_was_recommended(command, folder, tmp_path, monkeypatch):
    advised(monkeypatch, "yarn")
    asked = (folder, "--to", 64, "--text", "text", "--dtype", "float32", "--methods", "yarn", "--lengths", "64")
    before = (folder / "config.json").read_bytes()
    code, out, _ = command(*asked, "--save", "new")
    assert 0 == code
    assert "written: new/config.json" in out
    assert hf.extended_config(folder, to=64) == json.loads((tmp_path / "new" / "config.json").read_text())
    assert '"rope_type": "yarn"' in out
    code, out, err = command(*asked, "--save", "new")
    assert (2, "") == (code, out)
    assert err == "error: --save must be a new file, got new/config.json\nhint: --force replaces it\n"
    assert 2 == command(*asked, "--save", folder)[0]
    assert before == (folder / "config.json").read_bytes()
    assert 0 == command(*asked, "--save", "new", "--force")[0]


def test_nothing_is_saved_where_no_method_helps(command, folder, tmp_path, monkeypatch):
    advised(monkeypatch, None)
    asked = (folder, "--to", 64, "--text", "text", "--dtype", "float32", "--methods", "yarn", "--lengths", "64")
    code, out, err = command(*asked, "--save", "new")
    assert 1 == code
    assert "recommendation: leave the config as it is\nbecause" in out
    assert err.endswith("error: nothing saved, since no method helps\n")
    assert not (tmp_path / "new").exists()


def test_dry_run_reads_no_weight_and_writes_nothing(command, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(source.Model, "load", None)
    monkeypatch.setattr(source.Model, "tokenizer", None)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dry-run", "--sliding")
    assert (0, "") == (code, err)
    assert "unchanged     13 windows of      16 tokens" in out
    assert "window         1 windows of      64 tokens" in out
    assert "about 0.5 minutes" in out
    planned = json.loads(command(folder, "--to", 64, "--text", "text", "--dry-run", "--json")[1])
    assert {"linear", "ntk", "yarn"} == planned["configs"].keys()
    assert before == sorted(tmp_path.rglob("*"))


WRONG = {
    "to": (["--to", "16"], "to must be at least the trained length (32), got 16"),
    "method": (
        ["--to", "64", "--methods", "spiral"],
        "methods must be among linear, ntk, dynamic, yarn, llama3, got 'spi",
    ),
    "lists": (["--to", "64", "--methods", "longrope"], "methods must be among"),
    "twice": (["--to", "64", "--methods", "yarn,yarn"], "methods must be at least one, all different"),
    "lengths": (["--to", "64", "--lengths", "48,64"], "lengths must be divisors of the longest (64), got 48"),
    "beyond": (["--to", "64", "--lengths", "128"], "lengths must be at most --to (64), got 128"),
    "dtype": (["--to", "64", "--dtype", "int8"], "dtype must be auto, float32 or bfloat16, got 'int8'"),
    "device": (["--to", "64", "--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
    "windows": (["--to", "64", "--windows", "0"], "windows must be at least 1, got 0"),
    "text": (["--to", "64", "--text", "absent"], "--text must be a readable file of UTF-8, got absent"),
    "short text": (["--to", "512", "--text", "text"], "--text must be at least 513 tokens long, got 400 in text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_told_before_weights_are_read(case, command, folder, monkeypatch):
    monkeypatch.setattr(source.Model, "load", None)
    arguments, words = WRONG[case]
    code, out, err = command(folder, *arguments)
    assert (2, "") == (code, out)
    assert f"error: {words}" in err


def test_what_is_no_model_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    for model, words in (
        ("absent", "MODEL must be a folder, a .gguf file or package:NAME, got absent"),
        ("empty", "MODEL must be a folder with a config.json, got empty"),
        ("weightless", "MODEL must be a folder with .safetensors, got weightless"),
        ("package:no_such_package", "MODEL must be package:NAME of an installed package"),
        ("package:json", "MODEL must be a package with one .gguf file, got 0 of them in json"),
    ):
        code, _, err = command(model, "--to", 64)
        assert (2, True) == (code, f"error: {words}" in err), err


def test_model_without_a_tokenizer_is_refused(command, tmp_path, folder):
    for path in folder.glob("token*"):
        path.unlink()
    code, _, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32")
    assert 2 == code
    assert "MODEL must be with its tokenizer beside the weights" in err


def test_weights_of_another_config_are_told_in_one_line_and_leave_no_folder(command, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 32}))
    code, _, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32", "--out", tmp_path / "new")
    assert 2 == code
    assert "error: MODEL must be a folder whose weights fit its config.json" in err
    assert not (tmp_path / "new").exists()
