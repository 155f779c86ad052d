"""Packed token data unpacks to the same values and has the smallest possible size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.ledger import blobs
from openclaw_rl.types import VersionRun

IDS = st.lists(st.integers(0, 2**32 - 1)) | st.lists(st.integers(0, 2**16 - 1))
FLOATS = st.lists(st.floats(width=32, allow_nan=False))


@given(IDS)
def test_ids(ids):
    blob = blobs.pack_ids(ids)
    assert blobs.unpack_ids(blob) == tuple(ids)
    assert len(blob) <= 1 + len(ids) * (2 if max(ids, default=0) < 2**16 else 4)


@given(FLOATS)
def test_log_probs_are_exact_in_float32(values):
    assert blobs.unpack_floats(blobs.pack_floats(tuple(values))) == tuple(values)


@given(st.floats(-100, 0))
def test_other_log_probs_are_rounded_to_float32(value):
    assert blobs.unpack_floats(blobs.pack_floats((value,))) == (float(np.float32(value)),)


@given(st.lists(st.booleans()))
def test_masks(mask):
    blob = blobs.pack_mask(tuple(mask))
    assert blobs.unpack_mask(blob, len(mask)) == tuple(mask)
    assert (blob is None) == all(mask)


@given(st.lists(st.builds(VersionRun, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))))
def test_version_runs(runs):
    assert blobs.unpack_runs(blobs.pack_runs(tuple(runs))) == tuple(runs)


@given(st.binary() | st.binary(max_size=4).map(lambda data: data * 500))
def test_contents_are_never_much_larger_than_they_are(data):
    blob = blobs.pack_bytes(data)
    assert blobs.unpack_bytes(blob) == data
    assert len(blob) <= len(data) + 1
