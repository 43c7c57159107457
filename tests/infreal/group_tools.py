"""The ranks of one instance as threads of this process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from infreal.transport.group import Group, join_group

TIMEOUT_S = 30.0


def joined(size: int, timeout_s: float = TIMEOUT_S) -> list[Group]:
    """Connected ends by rank."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: join_group(store, rank, size, timeout_s, host="127.0.0.1"), range(size)))


def run_group(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work(group)` returns in each rank. Where one raises, the others lose it."""
    groups = joined(size)

    def run(group: Group) -> Any:
        try:
            return work(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(size) as threads:
        results = [threads.submit(run, group) for group in groups]
        return [result.result() for result in results]
