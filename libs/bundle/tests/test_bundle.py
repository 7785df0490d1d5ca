"""What identifies an answer, and what does not."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from headrace.api.control.v1.intent_pb2 import Bundle
from headrace.base.errors import StartError
from headrace.bundle.bundle import describe, digest, verify
from headrace.bundle.shipped import shipped_model_path


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return describe(shipped_model_path())


def changed(bundle: Bundle, **fields: object) -> Bundle:
    copy = Bundle()
    copy.CopyFrom(bundle)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def test_the_shipped_model_is_described_by_itself(shipped: Bundle) -> None:
    assert shipped.max_model_len == 8192
    assert shipped.display_name == "Smollm2 135M 8k Lc100K Mix1 Ep2"
    assert shipped.precision == "float32"
    assert shipped.engine_version
    assert Path(shipped.model_path).is_absolute()
    assert len(digest(shipped)) == 32
    verify(shipped)


def test_describing_takes_a_fraction_of_a_second(shipped: Bundle) -> None:
    """Every engine start verifies; 0.2 s are usual for 98 MB, the bound is for a busy machine."""
    began = time.process_time()
    assert describe(shipped_model_path()) == shipped
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_digest", "0" * 32),
        ("tokenizer_digest", "0" * 32),
        ("precision", "bfloat16"),
        ("max_model_len", 4096),
        ("engine_version", "0.0.0"),
        ("display_name", "other"),
    ],
)
def test_each_field_changes_the_digest(shipped: Bundle, field: str, value: object) -> None:
    assert digest(changed(shipped, **{field: value})) != digest(shipped)


def test_a_sampling_default_changes_the_digest_in_any_order(shipped: Bundle) -> None:
    path = shipped_model_path()
    one = describe(path, sampling_defaults={"temperature": "0.7", "top_k": "40"})
    other = describe(path, sampling_defaults={"top_k": "40", "temperature": "0.7"})
    assert digest(one) == digest(other) != digest(shipped)
    assert digest(describe(path, sampling_defaults={"temperature": "0.8", "top_k": "40"})) != digest(one)


def test_where_the_model_lies_does_not_change_the_digest(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    assert digest(describe(folder)) == digest(describe(moved))
    assert digest(changed(describe(folder), model_path="")) == digest(describe(folder))


def test_a_renamed_gguf_file_is_the_same_bundle(shipped: Bundle, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.gguf"
    renamed.symlink_to(shipped_model_path())
    assert digest(describe(renamed)) == digest(shipped)


def test_a_folder_is_described(folder: Path) -> None:
    bundle = describe(folder, precision="bfloat16", max_model_len=512, display_name="tiny")
    assert (bundle.max_model_len, bundle.display_name, bundle.precision) == (512, "tiny", "bfloat16")
    assert describe(folder).max_model_len == 2048
    assert describe(folder).display_name == "tiny-model"


@pytest.mark.parametrize(
    ("name", "content", "side"),
    [
        ("model-00002-of-00002.safetensors", "weights twO", "weights"),
        ("model-00003.safetensors", "", "weights"),
        ("config.json", '{"max_position_embeddings": 2048, "rope_theta": 5}', "tokenizer"),
        ("tokenizer.json", '{"a": 1}', "tokenizer"),
        ("chat_template.jinja", "hi", "tokenizer"),
        ("generation_config.json", "{}", "tokenizer"),
    ],
)
def test_changed_content_changes_the_digest_and_is_noticed(folder: Path, name: str, content: str, side: str) -> None:
    before = describe(folder)
    verify(before)
    (folder / name).write_text(content)
    assert digest(describe(folder)) != digest(before)
    with pytest.raises(StartError, match=f"does not hold the bundle's {side}"):
        verify(before)


def test_swapped_weight_files_are_another_model(folder: Path) -> None:
    before = digest(describe(folder))
    one, two = sorted(folder.glob("*.safetensors"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert digest(describe(folder)) != before


def test_notes_beside_the_weights_are_no_part_of_the_model(folder: Path) -> None:
    before = digest(describe(folder))
    (folder / "README.md").write_text("hello")
    assert digest(describe(folder)) == before


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-0*.safetensors"])
def test_an_incomplete_folder_says_what_it_lacks(folder: Path, missing: str) -> None:
    for file in folder.glob(missing):
        file.unlink()
    with pytest.raises(StartError, match="it has no ") as caught:
        describe(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^there is no model at .*gone\.gguf$"):
        describe(tmp_path / "gone.gguf")
    with pytest.raises(StartError, match=r"^there is no model at /gone\.gguf$"):
        verify(Bundle(model_path="/gone.gguf"))


def test_settings_the_model_cannot_have_are_refused(folder: Path) -> None:
    with pytest.raises(StartError, match="max_model_len=4096 passes the model's own limit of 2048 tokens"):
        describe(folder, max_model_len=4096)
    with pytest.raises(StartError, match="precision: must be one of float32, bfloat16"):
        describe(folder, precision="int3")
    with pytest.raises(StartError, match="sampling_defaults"):
        describe(folder, sampling_defaults={"top_q": "1"})


def test_a_model_that_does_not_say_its_limit_needs_one(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({}))
    with pytest.raises(StartError, match="does not say its context limit"):
        describe(folder)
    assert describe(folder, max_model_len=100).max_model_len == 100


def test_a_config_that_is_no_object_is_refused(folder: Path) -> None:
    for content in ("[]", "{"):
        (folder / "config.json").write_text(content)
        with pytest.raises(StartError, match="does not hold a JSON object"):
            describe(folder)
