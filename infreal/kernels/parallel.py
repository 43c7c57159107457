"""Several CPU threads for the torch twins, each running its torch operations by itself.

Many small matrix products are slow when each is spread over the threads (one barrier per product, and a stall at every barrier
when another process takes a core). Work is cut once instead: each task runs whole on one thread.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs the tasks, on as many threads as torch may use here (`torch.set_num_threads`); raises what one of them raised."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(tasks) <= 1:
        for task in tasks:
            task()
        return
    for done in [_workers(num_threads).submit(task) for task in tasks]:
        done.result()


@cache
def _workers(num_threads: int) -> ThreadPoolExecutor:
    """Threads whose torch operations use one thread each.

    `torch.set_num_threads` speaks for the calling thread, and for threads that have not asked torch yet: hence it is called
    again here, once every worker has asked and set its own.
    """
    executor = ThreadPoolExecutor(num_threads, "kernels", initializer=_use_one_thread)
    all_started = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        executor.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(num_threads)
    return executor


def _use_one_thread() -> None:
    torch.get_num_threads()  # the first question makes a thread take the process's number over
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_workers.cache_clear)  # a forked child has no threads
