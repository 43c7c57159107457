"""A Ray cluster behind joblib: connecting to it, and the check that all its nodes see the files of a sweep.

Ray is imported late: only `--ray` needs it.
"""

import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perfmodel.errors import InputError

LOCAL = "local"
CONNECT_S = 5.0
PROBE_S = 15.0
PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
address = canonicalize_bootstrap_address(sys.argv[1])
if address:
    GcsClient(address=address)
"""


def register_ray(address: str) -> None:
    """Connect joblib to Ray: a cluster's address, or "local" for one of this machine. Raises InputError without Ray."""
    connect(address)
    from ray.util.joblib import register_ray as register

    register()


@contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[None]:
    """Connected to Ray; what was connected here ends here, and a local cluster with it."""
    is_mine = connect(address, num_cpus)
    try:
        yield
    finally:
        if is_mine:
            import ray

            ray.shutdown()


def connect(address: str, num_cpus: int | None = None) -> bool:
    """Connect to Ray; False where that has been done. num_cpus: of a local cluster, by default those of this machine."""
    if "ray" not in sys.modules:  # it reads this when it is imported, and later turns authentication on by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise InputError("--ray: ray is not installed (pip install 'infsim[real]')") from error
    if ray.is_initialized():
        return False
    if address == LOCAL:  # it listens on all interfaces
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        check_answers(address)
        check_accepts(address)
    try:
        ray.init(
            address=address,
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {address}: no cluster answers there ({first_line(error)})") from error
    except OSError as error:
        raise InputError(f"--ray {address}: Ray cannot write its files ({error})") from error
    return True


def check_answers(address: str) -> None:
    """Ray itself would try for minutes. Raises InputError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--ray {address}: no cluster answers there ({error})") from error


def check_accepts(address: str) -> None:
    """Whether a cluster is there that takes this user's token: Ray itself would try for minutes, or abort. Raises InputError."""
    if address.startswith("ray://"):
        return
    try:
        command = [sys.executable, "-c", PROBE, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"--ray {address}: no cluster answers there within {PROBE_S:g} s") from error
    if done.returncode and "uthentication" in done.stderr:
        raise InputError(
            f"--ray {address}: the cluster's authentication token is missing or wrong (RAY_AUTH_TOKEN, "
            "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token; RAY_AUTH_MODE=disabled for a cluster without one)"
        )
    if done.returncode:
        raise InputError(f"--ray {address}: no cluster answers there ({done.stderr.strip().rpartition(chr(10))[2]})")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_shared(out: Path, inputs: Sequence[Path]) -> None:
    """Every node must see the output folder and the inputs under the same absolute paths. Raises InputError, naming the node.

    A file written here must be there on every node, so an equal but separate folder is told apart.
    """
    probe = out / f".probe-{secrets.token_hex(8)}"
    probe.touch()
    try:
        for node, unseen in unseen_by_node([probe, *inputs]).items():
            if probe in unseen:
                raise InputError(f"--out {out}: node {node} of the Ray cluster does not see this folder")
            if unseen:
                raise InputError(f"{unseen[0]}: node {node} of the Ray cluster does not see this input")
    finally:
        probe.unlink()


def unseen_by_node(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Node address → those of `paths` that do not exist there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(unseen_here)
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(paths)
        for node in nodes
    ]
    return {node["NodeManagerAddress"]: unseen for node, unseen in zip(nodes, ray.get(asked), strict=True)}


def unseen_here(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if not path.exists()]
