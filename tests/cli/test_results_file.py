"""The result file: what is taken for results, for a cut record, and for somebody else's file."""

import json

import pytest

from scute_jax.cli.results_file import ResultsFile

DONE = {"id": "a", "text": "", "finish_reason": "stop"}
OPENAI = {"id": "batch-b", "custom_id": "b", "response": None, "error": None}


def test_records_come_back_with_their_ids(tmp_path):
    path = tmp_path / "out.jsonl"
    odd = DONE | {"id": "\ud800", "logprobs": (None, float("nan"), -1.5)}
    with ResultsFile(path, resume=False) as results:
        for record in (DONE, OPENAI, odd):
            results.append(record)
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().splitlines()
    ]
    assert lines[2]["logprobs"] == [None, None, -1.5]
    assert ResultsFile(path, resume=True).done == {"a", "b", "\ud800"}


@pytest.mark.parametrize("cut", [b'{"id', b'{"id": "c", "text": "x', json.dumps(DONE).encode()])
def test_a_cut_record_is_taken_back_when_a_run_goes_on(tmp_path, cut):
    path = tmp_path / "out.jsonl"
    whole = json.dumps(DONE | {"id": "w"}).encode() + b"\n"
    for before in (b"", whole):
        path.write_bytes(before + cut)
        with pytest.raises(ValueError, match="give --resume"):
            ResultsFile(path, resume=False)
        assert path.read_bytes() == before + cut
        with ResultsFile(path, resume=True) as results:
            assert results.done == ({"w"} if before else set())
        assert path.read_bytes() == before


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("text", [b"precious text", b'{"id": "x", "prompt": "a"}', b"[1]", b"5"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path, text, end, resume):
    path = tmp_path / "out.jsonl"
    path.write_bytes(text + end)
    with pytest.raises(ValueError, match=r"out\.jsonl line 1 is no result of `scute generate`"):
        ResultsFile(path, resume)
    assert path.read_bytes() == text + end


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, type(tmp_path)("/dev/null")):
        with pytest.raises(ValueError, match="is no regular file"):
            ResultsFile(path, resume=False)
    with pytest.raises(ValueError, match="there is no folder"):
        ResultsFile(tmp_path / "none" / "out.jsonl", resume=False)
