"""simulate: one run on the SimPy driver."""

from infsim.driver import Simulation
from perfmodel.cluster import ClusterSpec, Workload
from perfmodel.journal import Observer
from perfmodel.records import RunResult


def simulate(spec: ClusterSpec, workload: Workload, observer: Observer | None = None) -> RunResult:
    """Carry a workload through a cluster in virtual time. Raises RunError where it cannot end."""
    return Simulation(spec, workload, observer).run()
