"""Points of a run on actors: what its other threads and processes take of the instances' cores, and how long a message takes.

Two instances of a core each serve a few requests, as `infreal run --ray local --pinned` has them. Nothing is borrowed, so that an
iteration waits for nothing but its core.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import raycluster
from experiments.explain import validate
from experiments.plan import plan_cluster, plan_run
from infreal.generate import default_backend
from infreal.profiling.table import Table
from infreal.sources import find_model, load_model, make_requests
from perfmodel.errors import InputError
from perfmodel.messages import Address, Command, Event, MessageReceived, RequestArrived, StartIterations, SubmitRequest

WORKLOAD = {
    "generator": "fixed",
    "params": {"input_tokens": 128, "output_tokens": 32},
    "num_requests": 24,
    "rate_rps": 6.0,
}
LINK = "loopback"


class Deliveries:
    """An observer: seconds from each request's arrival until its instance has heard of it."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.heard_s: dict[int, float] = {}

    def event(self, t_s: float, machine: Address, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self.arrived_s[event.request.req_id] = t_s
        elif isinstance(event, MessageReceived) and isinstance(event.message, SubmitRequest):
            self.heard_s.setdefault(event.message.request.req_id, t_s)

    def command(self, t_s: float, machine: Address, command: Command) -> None: ...
    def span(self, machine: Address, start_s: float, end_s: float, step: StartIterations) -> None: ...
    def note(self, t_s: float, what: str, **values: Any) -> None: ...

    def times_s(self) -> list[float]:
        return [heard_s - self.arrived_s[req_id] for req_id, heard_s in self.heard_s.items()]


def measure_actors(table: Table, model: str, dtype: str) -> None:
    """message: one way. actor_iterations, actor_iterations_core: a second of iterations, and how much of it their thread had its
    core. Left out where there is no Ray."""
    if table.has(operator="actor_iterations", ranks=2):
        return
    model = str(Path(model).resolve()) if Path(model).exists() else model
    base = {
        "system": "infinite-llm",
        "model": model,
        "dtype": dtype,
        "gpu": "cpu",
        "cluster": {"nodes": 1, "gpus_per_node": 2, "intra_link": LINK, "inter_link": LINK},
        "instance": {"blocks_per_gpu": 256},
        "scheduler": {"period_s": 0.25, "heartbeat_s": 0.25},
        "workload": WORKLOAD,
    }
    config = validate(base, "infreal profile")
    plan, source, deliveries = plan_run(config), find_model(model, None, dtype), Deliveries()
    requests = make_requests(config, plan.workload, source)
    try:
        with raycluster.connected(raycluster.LOCAL):
            from infreal.actors.run import RayOptions, make_head

            options = RayOptions(backend=default_backend("cpu"), pinned=True)
            make_decoder = partial(load_model, model, None, dtype, "cpu")
            head = make_head(partial(plan_cluster, config), make_decoder, requests, deliveries, options)
            head.run()
    except InputError:
        return
    point = replace(table.common, ranks=2, link=LINK)
    table.add(replace(point, operator="message"), deliveries.times_s())
    table.add(replace(point, operator="actor_iterations_core"), [head.core_frac()])
    table.add(replace(point, operator="actor_iterations"), [1.0])
