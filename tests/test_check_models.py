"""Laws of whole models: the installed ones keep them, spoiled ones are caught, and named with their kind."""

import pytest
import torch

pytest.importorskip("transformers")

from model_mutants import CONFIG, MODEL_MUTANTS, fresh
from ropewalk import check
from ropewalk.check.models import LAWS_OF_MODELS, ModelSubject

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
LAWS = {law.name: law for law in LAWS_OF_MODELS}


@pytest.mark.parametrize("mutant", MODEL_MUTANTS, ids=lambda m: m.name)
def test_spoiled_model_is_caught(mutant):
    findings = LAWS[mutant.law](mutant.subject())
    assert {(mutant.law, mutant.kind)} == {(found.law, found.kind) for found in findings}, f"{mutant.name} survives"
    assert all(found.input and found.expected and found.cause for found in findings)


@pytest.mark.parametrize("law", [law for law in LAWS_OF_MODELS if law.name != "casts"], ids=lambda law: law.name)
def test_right_model_keeps_the_law(law):
    assert [] == law(fresh(CONFIG))


def test_every_law_of_models_has_a_mutant_or_a_real_fault():
    # casts: transformers' own rotary module is the fault (see the test below)
    assert set(LAWS) - {"casts"} == {mutant.law for mutant in MODEL_MUTANTS}


def pads_make_eager_attention_nan_in_float64(family):
    """A real fault of transformers 5.24, in a few lines: a row of the mask without keys overflows to -inf in its
    float32 softmax, and 0 times NaN reaches the real tokens in the second layer."""
    model = ModelSubject({"model_type": family}, torch.float64).model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[5, 5, 7, 8, 9]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    return bool(out.logits[0, 2:].isnan().any())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt_neox"])
def test_no_false_alarm_on_installed_models(family, dtype):
    other = {"float32": "float64", "float64": "float32"}[dtype]
    report = check.check({"model_type": family}, dtypes=[dtype, other])
    real = {("implementations", "K16")} if pads_make_eager_attention_nan_in_float64(family) else set()
    assert (real if dtype == "float64" else set()) == {(found.law, found.kind) for found in report.findings}
    assert 20 > sum(verdict.seconds for verdict in report.verdicts)


def test_a_cast_rounds_the_frequencies_of_llama():
    """As with transformers 5.24, `model.to(torch.bfloat16)` casts inv_freq; from_pretrained(dtype=) does not."""
    found = LAWS["casts"](fresh(CONFIG))
    model = fresh(CONFIG).fresh().to(torch.bfloat16)
    if model.model.rotary_emb.inv_freq.dtype == torch.bfloat16:
        assert ["K01"] == [finding.kind for finding in found]
        assert "inv_freq" in found[0].cause
    else:
        assert [] == found


def test_a_model_a_class_and_a_config_are_one_target():
    subject = fresh(CONFIG)
    own = subject.model()
    wanted = subject.logits(subject.tokens(1, 4))
    for target in (own, subject.config):
        again = ModelSubject(target)
        if again.loaded:
            assert torch.equal(wanted, again.logits(subject.tokens(1, 4)))
        assert "llama" in again.name
    assert "llama" in ModelSubject(type(own)).name


def test_a_checkpoint_is_checked_with_its_weights(tmp_path):
    subject = fresh(CONFIG)
    subject.model().save_pretrained(tmp_path)
    loaded = ModelSubject(tmp_path)
    assert loaded.loaded
    assert torch.equal(subject.logits(subject.tokens(1, 4)), loaded.logits(subject.tokens(1, 4)))
    assert check.check(str(tmp_path), laws=["decoding", "padding"], dtypes=["float32"]).passed


@pytest.mark.parametrize("target", [{"model_type": "no_such_family"}, {"hidden_size": 8}])
def test_what_cannot_be_built_is_refused_by_name(target):
    with pytest.raises(ValueError, match="model_type must be"):
        ModelSubject(target)


def test_positions_with_gaps_reach_far_with_few_tokens():
    from ropewalk.check.models.compare import spread

    where = spread(10, 4000)[0]
    assert [0, 4009] == [where[0].item(), where[-1].item()]
    assert bool((where.diff() > 0).all())
