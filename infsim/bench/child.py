"""One measured run in a process of its own: `python -m infsim.bench.child CONFIG` prints its figures as JSON."""

import json
import resource
import sys
from time import process_time

LOOP = 1_000_000


def main(text: str) -> None:
    """Seconds are of CPU: the clock on the wall also counts what else the machine does."""
    from experiments.config import Config
    from experiments.plan import plan_run
    from infsim.driver import Simulation

    startup_s = process_time()
    plan = plan_run(Config.model_validate(json.loads(text)).resolved())
    loop_s, start_s = time_loop_s(), process_time()
    simulation = Simulation(plan.spec, plan.workload)
    result = simulation.run()
    run_s, requests = process_time() - start_s, len(plan.workload)
    figures = {
        "requests_per_s": requests / run_s,
        "iterations_per_s": simulation.num_iterations / run_s,
        "events_per_s": simulation.num_events / run_s,
        "us_per_request": run_s / requests * 1e6,
        "loops_per_request": run_s / requests / (loop_s + time_loop_s()) * 2 * LOOP,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "startup_s": startup_s,
        "whole_process_requests_per_s": requests / process_time(),
    }
    moves = sum(time_s is not None for time_s in result.moves["committed_s"])
    json.dump(figures | ({"moves_per_s": moves / run_s} if moves else {}), sys.stdout)


def time_loop_s() -> float:
    """A bare loop of `LOOP` rounds: how fast this interpreter is on this machine at this time."""
    start_s = process_time()
    for _ in range(LOOP):
        pass
    return process_time() - start_s


if __name__ == "__main__":
    main(sys.argv[1])
