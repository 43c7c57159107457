"""Files of tens of millions of rows: bounded memory, and how fast. Run with `make bench`."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, time, traces
begin = time.perf_counter()
trace = traces.load("azure-2024", sys.argv[1])
wall_s = time.perf_counter() - begin
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
assert trace.account.rows_read == int(sys.argv[2]) and trace.account.dropped == {"zero_output": int(sys.argv[2]) // 10}
print(f"{trace.account.line()}; {int(sys.argv[2]) / wall_s:,.0f} rows/s, peak {peak_bytes / 1e6:,.0f} MB")
print(peak_bytes)
"""


def write_azure_2024(path, num_rows):
    """Rows 10 ms apart, in the two spellings of the real file, one in ten without an answer."""
    import numpy as np

    second = [f"2024-05-10 {h:02d}:{m:02d}:{s:02d}" for h in range(24) for m in range(60) for s in range(60)]
    lengths = np.random.default_rng(0).integers(1, 8000, (1000, 2))
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        rows = []
        for row in range(num_rows):
            seconds, hundredths = divmod(row, 150)
            fraction = f".{hundredths:02d}0017" if hundredths else ""
            output = lengths[row % 1000, 1] if row % 10 else 0
            rows.append(f"{second[seconds]}{fraction}+00:00,{lengths[row % 1000, 0]},{output}\n")
            if len(rows) == 100_000:
                file.writelines(rows)
                rows.clear()
        file.writelines(rows)


def load_in_a_process(path, num_rows):
    command = [sys.executable, "-c", MEASURE, str(path), str(num_rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.bench
def test_ten_million_rows_in_less_than_a_gigabyte(tmp_path):
    path = tmp_path / "azure-2024.csv"
    write_azure_2024(path, 10_000_000)
    assert load_in_a_process(path, 10_000_000) < 1e9


def test_a_window_bounds_memory_whatever_the_file(write, monkeypatch):
    """Rows behind the window are left out as they are read, not at the end."""
    from traces import collect

    held = []
    joined = collect._joined
    monkeypatch.setattr(
        collect, "_joined", lambda parts, clock: held.append(sum(map(len, parts["time"]))) or joined(parts, clock)
    )
    monkeypatch.setattr("traces.files.BLOCK_BYTES", 1000)
    import traces

    path = write("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{k},1,1\n" for k in range(5000)))
    trace = traces.load("vidur", path, traces.LoadOptions(window_s=(10, 20)))
    assert len(trace) == 10
    assert held == [20]
    assert trace.account.dropped == {"outside_window": 4990}


def test_progress_is_shown_on_a_terminal_only(write, monkeypatch, capfd):
    """The bar goes to stderr and stands still for no one who is not watching."""
    import traces

    monkeypatch.setattr("traces.progress.SHOW_FROM_BYTES", 0)
    path = write("arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n1,2,2\n", "big.csv")
    traces.load("vidur", path)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    traces.load("vidur", path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "big.csv" in err
