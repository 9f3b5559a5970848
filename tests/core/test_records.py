"""Response records on disk."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from dflash.errors import TrainingError
from dflash.records import ResponseRecord, iter_records, open_text, read_records

RECORDS = [
    ResponseRecord((5, 6, 7), (8, 9, 2), "math", 0.0, True, "k1"),
    ResponseRecord((5,), (4,) * 20, "chat", 0.6, False),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_written_records_read_back_equal(tmp_path, name):
    with open_text(tmp_path / name, "w") as stream:
        stream.writelines(record.to_json() + "\n" for record in RECORDS)
    assert list(iter_records(tmp_path / name)) == RECORDS
    assert read_records([tmp_path / name, tmp_path / name]) == RECORDS * 2


def test_the_loss_mask_covers_the_response_through_its_end_token():
    record = RECORDS[0]
    assert record.tokens.tolist() == [5, 6, 7, 8, 9, 2] and record.tokens.dtype == np.int64
    assert record.loss_mask.tolist() == [False] * 3 + [True] * 3 and len(record) == 6


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "{}", '{"prompt":[1],"response":"text"}', '{"prompt":[1],"response":[-1]}',
     '{"prompt":[1.5],"response":[2]}', '{"prompt":[1],"response":[2],"temp":"hot"}'],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(RECORDS[0].to_json() + "\n" + line + "\n")
    with pytest.raises(TrainingError, match=r"line 2, is not a response record"):
        read_records([tmp_path / "rows.jsonl"])


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(TrainingError, match=r"absent\.jsonl cannot be read"):
        read_records([tmp_path / "absent.jsonl"])
    whole = gzip.compress(RECORDS[0].to_json().encode() * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainingError, match=r"cut\.jsonl\.gz"):
        read_records([tmp_path / "cut.jsonl.gz"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"domain":"caf\xe9"}\n')
    with pytest.raises(TrainingError, match=r"latin\.jsonl cannot be read"):
        read_records([tmp_path / "latin.jsonl"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TrainingError, match="no response records"):
        read_records([tmp_path / "empty.jsonl"])
