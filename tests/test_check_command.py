"""`check` and `ropewalk check`: targets, reports in every form, exit codes, the pytest entry."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import ropewalk as rw
from ropewalk import check, cli
from ropewalk.check import render

FEW = ["slopes", "bias", "bounds"]


class Sideways(rw.ALiBi):
    """Rewards the future, and says so to nobody."""

    def bias(self, head, q_pos, k_pos):
        return super().bias(head, q_pos, k_pos).abs() * 0 + (k_pos - q_pos) * 0.1


def run(*arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ropewalk", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_the_module_is_the_function():
    assert rw.check("alibi", laws=FEW).passed
    assert rw.check.check is check.check


@pytest.mark.parametrize(
    "target",
    ["rotary+alibi", rw.ALiBi, rw.ALiBi(12), rw.Rotary(32), lambda: rw.Rotary(16) + rw.ALiBi(8), "ropewalk:ALiBi",
     rw.Learned(300, 64)],
    ids=lambda t: getattr(t, "__name__", str(t)[:20]),
)  # fmt: skip
def test_an_encoding_is_checked_however_it_is_named(target):
    report = rw.check(target)
    assert () == report.findings
    assert report.passed


@pytest.mark.parametrize("make", [lambda: rw.Sinusoidal(768), lambda: rw.Learned(16, 8), lambda: rw.Sinusoidal(6),
                                  lambda: rw.Rotary(2), lambda: rw.ALiBi(1), lambda: rw.Rotary(512)])  # fmt: skip
def test_no_false_alarm_at_unusual_sizes(make):
    assert () == rw.check(make()).findings


@pytest.mark.parametrize("target", ["learned", "rotary"])
def test_a_check_leaves_random_numbers_and_threads_alone(target):
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    rw.check(target, laws=["state", "history"])
    assert torch.equal(before, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def broken_constructor():
    raise RuntimeError("not today")


def test_what_cannot_be_built_is_no_broken_law():
    with pytest.raises(ValueError, match="target must be built without an error, got RuntimeError: not today"):
        rw.check(broken_constructor)


@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"head_dim": 0}])
def test_sizes_are_counts(sizes):
    with pytest.raises(ValueError, match=r"must be (at least 1|an integer)"):
        rw.check("alibi", **sizes)


def test_a_wrong_encoding_is_named_with_law_kind_and_page():
    report = rw.check(Sideways, num_heads=4)
    assert not report.passed
    assert {"bias", "slopes"} <= {found.law for found in report.findings}
    assert "K15" in report.kinds
    text = str(report)
    assert "BROKEN  bias" in text
    assert "docs/laws.md#encoding-bias" in text
    assert "(bias, K15)" in text


@pytest.mark.parametrize("target", ["no_such_name", "nowhere:Nothing", "ropewalk:Nothing", "alibi+nothing"])
def test_unknown_names_are_refused(target):
    with pytest.raises(ValueError, match="target must be"):
        rw.check(target)


@pytest.mark.parametrize("target", [3, torch.nn.Linear(2, 2), lambda x: x, None])
def test_what_is_no_target_is_refused_with_a_hint(target):
    with pytest.raises(TypeError, match="target must be"):
        rw.check(target)


def test_unknown_laws_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="laws must be among"):
        rw.check("alibi", laws=["nothing"])
    with pytest.raises(ValueError, match="dtypes must be of"):
        rw.check({"model_type": "llama"}, dtypes=["int8"])


def test_exit_codes_and_forms(monkeypatch, capsys, tmp_path):
    ends = {"monkeypatch": monkeypatch, "capsys": capsys}
    junit = tmp_path / "out.xml"
    code, out, err = run("alibi", "--laws", "slopes,bias", "--json", "--junit", str(junit), **ends)
    assert (0, "") == (code, err)
    made = json.loads(out)
    assert made["passed"]
    assert ["slopes", "bias"] == [verdict["law"] for verdict in made["verdicts"]]
    suite = ElementTree.parse(junit).getroot()[0]
    assert {"tests": "2", "failures": "0", "skipped": "0", "errors": "0"}.items() <= suite.attrib.items()
    wrong = "test_check_command:Sideways"
    code, out, err = run(wrong, "--laws", "bias", "--markdown", "--num-heads", "4", **ends)
    assert 1 == code
    assert "| bias | fail |" in out
    code, out, err = run("rotary", "--laws", "slopes", **ends)
    assert 2 == code
    assert err.endswith("error: no law applies\n")
    code, out, err = run("alibi", "--json", "--markdown", **ends)
    assert (2, "") == (code, out)
    code, out, err = run("nothing", **ends)
    assert (2, "") == (code, out)
    assert err.startswith("error: target must be")
    assert 1 == err.count("\n")


def test_a_report_is_written_to_a_pipe_and_not_over_it(tmp_path, monkeypatch, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    code, _, _ = run(
        "alibi", "--laws", "slopes", "--json", "--junit", str(pipe), monkeypatch=monkeypatch, capsys=capsys
    )
    assert 0 == code
    assert os.read(reader, 1 << 16).startswith(b"<?xml")
    os.close(reader)
    assert pipe.is_fifo()


def test_a_failure_is_one_in_junit_and_no_row_of_a_table_breaks():
    found = check.Finding("bias", "a | b\nc", "1", "2", "because", "K15")
    verdict = check.Verdict("bias", "It is.", "fail", "none", (found,))
    report = check.Report("x", (verdict, check.Verdict("slopes", "They are.", "not applicable", "none", reason="no")))
    tree = ElementTree.fromstring(render.junit([report]).split("?>", 1)[1])
    assert ["1", "1"] == [tree[0].attrib[name] for name in ("failures", "skipped")]
    assert "a | b" in str(tree[0][0][0].text)
    rows = render.markdown(report).splitlines()[2:]
    assert all(4 == row.replace("\\|", "").count("|") for row in rows)


def test_nothing_checked_is_not_passed():
    silent = check.Verdict("slopes", "They are.", "not applicable", "none", reason="no")
    assert not check.Report("x", (silent,)).passed


SUITE = """
import pytest
from ropewalk.check import laws_for
@pytest.mark.parametrize("law", laws_for("{target}", num_heads=4))
def test_law(law): law()
"""


@pytest.mark.slow
def test_three_lines_put_the_laws_in_anybodys_suite(tmp_path):
    (tmp_path / "own.py").write_text(
        "import ropewalk as rw\nclass Wrong(rw.ALiBi):\n    def bias(self, *at):\n        return -super().bias(*at)\n"
    )
    (tmp_path / "test_right.py").write_text(SUITE.format(target="alibi"))
    (tmp_path / "test_wrong.py").write_text(SUITE.format(target="own:Wrong"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf"]
    right, wrong = (
        subprocess.run([*command, name], cwd=tmp_path, capture_output=True, text=True)
        for name in ("test_right.py", "test_wrong.py")
    )
    assert 0 == right.returncode, right.stdout
    assert 1 == wrong.returncode
    assert "test_law[bias]" in wrong.stdout
