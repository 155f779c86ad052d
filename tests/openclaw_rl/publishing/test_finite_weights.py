"""NaN and infinity are found in every float type, wherever they stand; what torch writes is what is read."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.version_folders import not_finite

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_found_in_every_type(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    edges = [0.0, -0.0, 1.0, largest, -largest, torch.finfo(dtype).smallest_normal]
    whole = torch.tensor(edges, dtype=torch.float64).to(dtype)
    file = tmp_path / "model.safetensors"
    save_file({"a": whole, "b": whole.clone(), "c": torch.tensor([2**31 - 1, -1], dtype=torch.int32)}, file)
    assert not_finite(tmp_path) is None
    spoilt = torch.tensor([1.0, value], dtype=torch.float32).to(dtype)
    save_file({"a": whole, "b": spoilt}, file)
    is_number = bool(spoilt.float().isfinite().all())  # F8_E4M3 has no infinity: it became the largest number
    said = "model.safetensors: b holds what is not a finite number"
    assert not_finite(tmp_path) == (None if is_number else said)


@settings(max_examples=40)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(1, 5))
def test_it_says_what_torch_says_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], block: int
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    tensor = torch.tensor(values)
    save_file({"a": tensor}, folder / "adapter_model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version_folders, "_BLOCK", 4 * block)
        assert (not_finite(folder) is None) is bool(tensor.isfinite().all())


def test_every_shard_and_the_ema_teacher_are_looked_at(tmp_path: Path) -> None:
    good, bad = {"a": torch.ones(3)}, {"a": torch.tensor([torch.nan])}
    save_file(good, tmp_path / "adapter_model.safetensors")
    (tmp_path / "ema").mkdir()
    save_file(bad, tmp_path / "ema" / "adapter_model.safetensors")
    assert not_finite(tmp_path) == "ema/adapter_model.safetensors: a holds what is not a finite number"
    save_file(good, tmp_path / "ema" / "adapter_model.safetensors")
    save_file(bad, tmp_path / "model-00002-of-00002.safetensors")
    assert not_finite(tmp_path) == "model-00002-of-00002.safetensors: a holds what is not a finite number"


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0nope", b'\x0a\0\0\0\0\0\0\0{"a": "b"}'],
)
def test_what_is_no_safetensors_is_the_engines_to_refuse(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert not_finite(tmp_path) is None


def headed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "entry",
    [
        b'{"dtype": "F32", "data_offsets": [0.0, 4.5]}',
        b'{"dtype": "F32", "data_offsets": ["0", "4"]}',
        b'{"dtype": ["F32"], "data_offsets": [0, 4]}',
        b'{"dtype": "F32", "data_offsets": [9223372036854775808, 9223372036854775812]}',
        b'{"dtype": "F32", "data_offsets": [0, 100000000000000000]}',
        b'{"dtype": "F32", "data_offsets": [-4, 4]}',
        b'{"dtype": "F32", "data_offsets": [4, 0]}',
        b'{"dtype": "F32"}',
        b"[" * 200_000 + b"]" * 200_000,
    ],
    ids=range(9),
)
def test_an_odd_header_is_the_engines_to_refuse(tmp_path: Path, entry: bytes) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(headed(b'{"a": ' + entry + b"}", b"\0" * 4))
    assert not_finite(tmp_path) is None


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    save_file({"b": torch.tensor([torch.nan])}, tmp_path / "b.safetensors")
    assert not_finite(tmp_path) == "b.safetensors: b holds what is not a finite number"


def test_a_folder_without_weights_is_not_found_wanting(tmp_path: Path) -> None:
    assert not_finite(tmp_path / "nowhere") is None
