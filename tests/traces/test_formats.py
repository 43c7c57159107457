"""Every format: what a small file of it becomes."""

import gzip

import numpy as np
import pytest

import traces
from perfmodel.errors import InputError
from traces.catalogue import READERS

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"


def test_azure_2023_crlf_and_no_final_newline(write):
    trace = traces.load("azure-2023", write(AZURE))
    assert trace.arrival_s.tolist() == [0.0, 4.314579]
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.ids.tolist() == trace.source_row.tolist() == [1, 2]


def test_azure_2024_mixes_fractions_within_one_column(write):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:01+00:00,2399,6\n"
        "2024-05-10T02:00:01.017335+02:00,76,7\n"
    )
    trace = traces.load("azure-2024", write(text))
    np.testing.assert_allclose(trace.arrival_s, [0.0, 0.990070, 1.007405], rtol=0, atol=1e-12)


def test_azure_2025_third_dialect_and_images_are_noted(write):
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2025-01-01T00:00:00.000Z,1,800,9\n2025-01-01T00:00:00.125Z,0,90,8\n"
    )
    trace = traces.load("azure-2025", write(text))
    assert trace.arrival_s.tolist() == [0.0, 0.125]
    assert any("NumImages is not used" in note for note in trace.account.notes)


@pytest.mark.parametrize("fraction", ["", ".1", ".123", ".123456", ".1234567", ".123456789"])
@pytest.mark.parametrize("separator", ["T", " "])
@pytest.mark.parametrize("zone", ["", "Z", "+00:00", "+0000"])
def test_every_dialect_of_time_is_kept_to_a_microsecond(write, fraction, separator, zone):
    rows = [f"2024-02-29{separator}23:59:59{fraction}{zone},5,6", f"2024-03-01{separator}00:00:01{zone},7,8"]
    trace = traces.load("azure-2024", write("timestamp,contexttokens,generatedtokens\n" + "\n".join(rows)))
    assert trace.arrival_s[1] == pytest.approx(2.0 - float("0" + fraction), abs=1e-6)


def test_header_in_any_case_any_order_with_other_columns_and_a_byte_order_mark(write):
    text = "\ufeffgeneratedTOKENS,note,timestamp,CONTEXTtokens\n44,hello,2023-11-16 18:15:46.6805900,374\n"
    trace = traces.load("azure-2023", write(text))
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (374, 44)


def test_gzip_is_read_by_content_and_hashed_as_it_lies_on_disk(write):
    import hashlib

    path = write(gzip.compress(AZURE.encode()), "trace.csv")
    trace = traces.load("azure-2023", path)
    assert len(trace) == 2
    assert trace.source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


MOONCAKE = (
    '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
)


def test_mooncake(write):
    trace = traces.load("mooncake", write(MOONCAKE))
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.input_tokens.tolist() == [513, 512]
    assert [blocks.tolist() for blocks in trace.prefix_blocks] == [[0, 7], [0]]
    assert trace.block_tokens == 512
    assert "prefix hashes are not used" in trace.account.notes


def test_burstgpt_v1_and_v3(write):
    v1 = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,0,10,API log\n"
    )
    v3 = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,b,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,a,2,ChatGPT,36,29,65,Conversation log\n"
        "19440192.0,b,8,GPT-4,1779,123,1902,Conversation log\n"
    )
    first = traces.load("burstgpt", write(v1))
    assert first.account.as_dict()["dropped"] == {"zero_output": 1}
    third = traces.load("burstgpt", write(v3))
    assert third.arrival_s.tolist() == [0.0, 51.0, 82.0]
    assert third.session.tolist() == [0, 1, 0]


def test_bailian_joins_turns_to_conversations(write):
    rows = [
        (10, -1, 0.5, 17, 3, 1, [1, 2]),
        (11, -1, 0.75, 16, 3, 1, [1]),
        (12, 10, 2.0, 40, 3, 2, [1, 2, 3]),
        (13, 12, 4.0, 48, 3, 3, [1, 2, 4]),
        (14, 99, 5.0, 5, 3, 7, [9]),
    ]
    text = "".join(
        f'{{"chat_id": {c}, "parent_chat_id": {p}, "timestamp": {t}, "input_length": {i}, "output_length": {o}, '
        f'"type": "text", "turn": {n}, "hash_ids": {h}}}\n'
        for c, p, t, i, o, n, h in rows
    )
    trace = traces.load("bailian", write(text))
    assert trace.arrival_s.tolist() == [0.0, 0.25, 1.5, 3.5, 4.5]
    assert trace.ids.tolist() == [10, 11, 12, 13, 14]
    assert trace.session.tolist() == [0, 1, 0, 0, 2]
    assert trace.turn.tolist() == [1, 1, 2, 3, 7]
    assert trace.input_tokens.tolist() == [17, 16, 40, 48, 5], "the input already holds the history: nothing is added"
    assert any("1 turns follow a parent" in note for note in trace.account.notes)


def test_vidur_with_and_without_times(write):
    timed = traces.load("vidur", write("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n0.052,3180,8\n"))
    assert timed.arrival_s.tolist() == [0.0, 0.052]
    lengths_only = write("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n9,10\n")
    assert traces.load("vidur", lengths_only).is_saturated
    paced = traces.load("vidur", lengths_only, traces.LoadOptions(rate_rps=2.0, seed=3))
    faster = traces.load("vidur", lengths_only, traces.LoadOptions(rate_rps=4.0, seed=3))
    assert np.array_equal(paced.arrival_s, 2 * faster.arrival_s)
    assert paced.arrival_s[-1] > 0
    assert paced.account.notes == ["the file has no times: Poisson arrivals at 2/s, seed 3"]


def test_unknown_format_names_the_nearest(write):
    with pytest.raises(InputError, match="unknown trace format 'azure2023'; did you mean 'azure-2023'"):
        traces.load("azure2023", write(AZURE))


def test_every_format_has_a_reader_module():
    import importlib

    for name, reader in READERS.items():
        module = importlib.import_module(f"traces.formats.{reader.module}")
        assert hasattr(module, "read_folder" if reader.is_folder else "read"), name
    assert traces.FORMATS.keys() == READERS.keys()
