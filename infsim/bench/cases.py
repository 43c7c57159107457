"""The cases of the speed benchmark. A case's configurations are measured one by one, each in a process of its own."""

from typing import Any

SYSTEMS = ("vllm-multi", "infinite-llm")
SIZES = (8, 32, 128, 512)  # instances of case s
PLAN_SIZES = (32, 256, 1024)
Configs = dict[str, dict[str, Any]]


def fixed(instances: int, num_requests: int, **workload: Any) -> dict[str, Any]:
    """512 + 128 tokens on instances of LLaMA2-70B over two GPUs, four to a node."""
    return {
        "model": "llama2-70b",
        "instance": {"tensor_parallel": 2},
        "cluster": {"nodes": max(1, instances // 4), "gpus_per_node": 8},
        "workload": {
            "generator": "fixed",
            "params": {"input_tokens": 512, "output_tokens": 128},
            "num_requests": num_requests,
            **({"rate_rps": float(instances)} | workload),
        },
    }


def saturated() -> dict[str, Any]:
    """All requests at once, 128 of them running on every instance."""
    config = fixed(32, 10_000, arrivals="saturated", rate_rps=None)
    return config | {"instance": {**config["instance"], "max_batch": 128}}


def generated(name: str, nodes: int, num_requests: int, rate_rps: float) -> dict[str, Any]:
    """LLaMA2-7B, one instance a GPU."""
    workload = {"generator": name, "num_requests": num_requests, "rate_rps": rate_rps}
    return {"model": "llama2-7b", "cluster": {"nodes": nodes, "gpus_per_node": 8}, "workload": workload}


CASES: dict[str, tuple[str, Configs]] = {
    "a": ("32 instances × 10,000 requests of 512 + 128 tokens, 1 req/s each", {"32": fixed(32, 10_000)}),
    "b": ("the same at saturation, batches of 128", {"32": saturated()}),
    "c": (
        "requests drawn from Azure's conversations, 4 req/s on each of 8 instances",
        {"8": generated("empirical-azure-conv", 1, 3_000, 32.0)},
    ),
    "d": ("trace 8 of the paper on 32 instances that lend to each other", {"32": generated("paper-8", 4, 100, 1.0)}),
    "e": ("1,024 instances × 1,000,000 requests as in a", {"1024": fixed(1024, 1_000_000)}),
    "f": ("one plan of Algorithm 1, half of the instances debtors with 20 waiting prompts", {}),
    "s": ("20 requests an instance as in a, by number of instances", {str(n): fixed(n, 20 * n) for n in SIZES}),
}
DEFAULT = "abcdfs"  # e takes many minutes: only when it is asked for
POOLED = ("d",)  # makes sense for infinite-llm alone
