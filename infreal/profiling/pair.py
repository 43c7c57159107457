"""Points of two processes: an exchange of messages, moves with and without a model beside them, the start of a process."""

import time
from dataclasses import replace

from infreal.bench.exchange import moves, pings
from infreal.bench.partner import Partner
from infreal.profiling.table import Table

PING_BYTES, PING_ROUNDS = (1 << 10, 8 << 10, 64 << 10), 5
MOVE_BYTES, MOVE_ROUNDS = (1 << 20, 4 << 20, 16 << 20), 8
LINK = "loopback"


def measure_pair(table: Table) -> None:
    """Over the transport. exchange: there and back; send_recv: one way and an acknowledgement."""
    if table.has(operator="process_start", ranks=2, link=LINK):
        return
    start_s = time.perf_counter()
    with Partner() as partner:
        both = partner.transport, partner.store
        partner.start(pings, PING_BYTES[0], 1)
        pings(*both, PING_BYTES[0], 1)
        partner.result()
        started_s = time.perf_counter() - start_s
        for num_bytes in PING_BYTES[1:]:
            partner.start(pings, num_bytes, PING_ROUNDS)
            times = pings(*both, num_bytes, PING_ROUNDS)
            partner.result()
            table.add(
                replace(table.common, operator="exchange", num_bytes=num_bytes, ranks=2, link=LINK), times["transport"]
            )
        for beside in (False, True):
            for num_bytes in MOVE_BYTES:
                partner.start(moves, num_bytes, MOVE_ROUNDS, beside)
                times, _ = moves(*both, num_bytes, MOVE_ROUNDS, beside)
                partner.result()
                name = "send_recv_beside" if beside else "send_recv"
                row = replace(table.common, operator=name, num_bytes=num_bytes, ranks=2, link=LINK)
                table.add(row, times["transport"])
    table.add(replace(table.common, operator="process_start", ranks=2, link=LINK), [started_s])
