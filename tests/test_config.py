"""The configuration against vLLM's recorded behaviour, and what is refused here on top of it."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import OffloadConfig
from offload.errors import OffloadConfigError

CASES = json.loads((Path(__file__).parent / "data" / "offload_config.json").read_text())
ACCEPTED = [case for case in CASES if case["accept"]]
REFUSED = [case for case in CASES if not case["accept"]]


def refusal(text):
    with pytest.raises(OffloadConfigError) as caught:
        OffloadConfig.from_json(text)
    return caught.value


def test_every_case_is_used():
    assert (len(ACCEPTED), len(REFUSED)) == (29, 48)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["json"] or "empty")
def test_accepted_documents_mean_what_they_mean_to_vllm(case):
    config = OffloadConfig.from_json(case["json"])
    assert config.resolved_backend == case["resolved_backend"]
    assert config.is_offloading_enabled() == case["enabled"]
    assert list(config.warnings) == case["warnings"]
    assert config.to_dict() == case["fields"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["json"])
def test_refused_documents_name_every_fault_in_place(case):
    error = refusal(case["json"])
    faults = [{"where": fault.where, "type": fault.kind, "message": fault.message} for fault in error.faults]
    assert faults == case["errors"]
    for fault in case["errors"]:
        assert fault["message"] in str(error) and fault["where"] in str(error)
    assert "\n" not in str(error) and "Value error" not in str(error)


@pytest.mark.parametrize("text", [None, "", "  ", " \n\t "], ids=repr)
def test_no_document_means_no_offload(text):
    assert OffloadConfig.from_json(text) == OffloadConfig()
    assert OffloadConfig.from_json(text).resolved_backend is None


def test_a_fault_shows_the_field_and_the_value():
    error = refusal('{"uva": {"cpu_offload_gb": -1}}')
    assert str(error) == "uva.cpu_offload_gb: Input should be greater than or equal to 0 (got -1)"


def test_several_faults_are_one_line():
    error = refusal('{"uva": {"cpu_offload_gb": -1}, "prefetch": {"offload_num_in_group": 0}}')
    assert str(error).count("; ") == 1 and len(error.faults) == 2


def test_long_values_are_cut():
    text = str(refusal(json.dumps({"offload_backend": "x" * 500})))
    assert len(text) < 160 and text.endswith("xxx...)")


@pytest.mark.parametrize(
    ("document", "remedy"),
    [
        ('{"cpu_offload_gb": 10}', "did you mean uva.cpu_offload_gb?"),
        ('{"prefetch": {"group_size": 4}}', "did you mean prefetch.offload_group_size?"),
        ('{"uva": {"q": 4}}', "known here: cpu_offload_gb, cpu_offload_params"),
        ('{"a\\nb": 4}', "a\\nb: Unexpected keyword argument (got 4)"),
    ],
)
def test_an_unknown_key_is_answered_with_known_ones(document, remedy):
    assert remedy in str(refusal(document))


@pytest.mark.parametrize("text", ["Infinity", "1e400", '"inf"', "1" + "0" * 400])
def test_an_infinite_budget_is_refused(text):
    assert "uva.cpu_offload_gb: Input should be a finite number" in str(
        refusal(f'{{"uva": {{"cpu_offload_gb": {text}}}}}')
    )


def test_minus_infinity_and_nan_keep_vllms_message():
    for text in ("-Infinity", "NaN"):
        assert "greater than or equal to 0" in str(refusal(f'{{"uva": {{"cpu_offload_gb": {text}}}}}'))


def test_text_that_is_no_unicode_is_refused_in_one_line():
    assert "\n" not in str(refusal("\udcff{}"))


@given(st.floats(0, 1e290, allow_nan=False))
def test_the_budget_is_vllms_number_of_bytes(gb):
    assert OffloadConfig.of({"uva": {"cpu_offload_gb": gb}}).budget_bytes == int(gb * 1024**3)


def test_the_largest_budget_does_not_overflow():
    assert OffloadConfig.of({"uva": {"cpu_offload_gb": 1.7e308}}).budget_bytes > 10**308


CONFIGS = st.builds(
    lambda backend, gb, params, group, count, step, layers: {
        "offload_backend": backend,
        "uva": {"cpu_offload_gb": gb, "cpu_offload_params": params},
        "prefetch": {
            "offload_group_size": group,
            "offload_num_in_group": count,
            "offload_prefetch_step": step,
            "offload_params": layers,
        },
    },
    st.sampled_from(["auto", "uva", "prefetch"]),
    st.floats(0, 1e6),
    st.lists(st.text()),
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(0, 6),
    st.lists(st.text()),
)


@given(CONFIGS)
def test_a_configuration_survives_being_written_down(fields):
    try:
        config = OffloadConfig.of(fields)
    except OffloadConfigError:
        return
    assert OffloadConfig.from_json(config.to_json()) == config == OffloadConfig.of(config)
    assert len(config.warnings) <= 1
    assert config.is_offloading_enabled() <= (config.resolved_backend is not None)


def test_selectors_are_those_of_the_resolved_backend():
    fields = {"uva": {"cpu_offload_params": {"b", "a"}}, "prefetch": {"offload_params": ["c"]}}
    assert OffloadConfig.of(fields).selectors == ()
    assert OffloadConfig.of(fields | {"offload_backend": "uva"}).selectors == ("a", "b")


def test_a_configuration_does_not_change_after_it_was_checked():
    config = OffloadConfig()
    with pytest.raises(AttributeError):
        config.uva.cpu_offload_gb = math.inf
    with pytest.raises(AttributeError):
        config.uva.cpu_offload_params.add("experts")


@pytest.mark.parametrize("value", [7, [], ("uva",), b"{}"], ids=repr)
def test_what_is_no_configuration_is_refused(value):
    with pytest.raises(OffloadConfigError):
        OffloadConfig.of(value)


def test_an_argument_is_json_or_a_file(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"uva": {"cpu_offload_gb": 2}}')
    assert OffloadConfig.from_argument(f"@{path}") == OffloadConfig.from_argument(path.read_text())
    assert OffloadConfig.from_argument(None) == OffloadConfig()


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff{}", "not UTF-8"), (b"\xef\xbb\xbf{}", "Invalid JSON")]
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "c.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OffloadConfigError, match=reason):
        OffloadConfig.from_argument(f"@{path}")


def test_a_file_without_its_sign_is_answered_with_it(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("{}")
    with pytest.raises(OffloadConfigError, match=r" is a file and no JSON text: write @ before its name$"):
        OffloadConfig.from_argument(str(path))


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"offload_backend": "uva"}, "offload_backend names it"),
        ({"uva": {"cpu_offload_gb": 1}}, "auto, cpu_offload_gb is above 0"),
        ({"uva": {"cpu_offload_gb": 1}, "prefetch": {"offload_group_size": 2}}, "auto, offload_group_size is above 0"),
        ({}, "auto, cpu_offload_gb is 0 and so is offload_group_size"),
    ],
)
def test_the_reason_for_the_backend(document, reason):
    assert OffloadConfig.of(document).reason == reason


def test_a_directory_is_not_a_configuration(tmp_path):
    with pytest.raises(OffloadConfigError, match="Is a directory"):
        OffloadConfig.from_argument(f"@{tmp_path}")
