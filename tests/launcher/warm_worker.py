"""What Ray runs for a new worker in place of its own `setup_worker.py`: it asks a server to fork.

With `serve` it is that server, which has imported torch and the package (warm.py).
"""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SOCKET = "BIGPLAN_TEST_WARM_WORKERS"  # in the environment of a node: where the server listens
MESSAGE = 1 << 20  # bytes at most
# With what Ray needs but not Ray, which reads the environment of its worker when it is imported.
PRELOADED = (
    *("bigplan.runtime.worker", "bigplan.launcher.actor"),
    "torch.fx.experimental.symbolic_shapes",  # of the first backward: sympy, 0.6 s
    *("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "requests", "pdb", "tqdm"),
    "pydantic.v1",
)


def _ask(path: str) -> None:
    """Have a worker as this process is asked to be, which then ends."""
    wanted = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 -- pathlib would be imported for it
        "raylet": os.getppid(),
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(wanted).encode()], [0, 1, 2])
        server.shutdown(socket.SHUT_WR)
        server.recv(1)  # it has forked


def _serve(path: str) -> None:
    import gc
    import select
    import signal
    from importlib import import_module
    from pathlib import Path

    for name in PRELOADED:
        import_module(name)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what has ended
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    print("listening", flush=True)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        asking, _ = listening.accept()
        data, descriptors, _, _ = socket.recv_fds(asking, MESSAGE, 3)
        while more := asking.recv(MESSAGE):
            data += more
        wanted = json.loads(data)
        if (process := os.fork()) == 0:
            asking.close()
            listening.close()
            _become(wanted, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        Path(path).with_name(f"worker-{wanted['raylet']}-{process}").touch()  # for warm.forked
        asking.close()


def _become(wanted: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """What `setup_worker.py` does, without a start of Python."""
    import runpy
    import signal

    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    given, rest = setup_worker.parser.parse_known_args(wanted["arguments"])
    context = RuntimeEnvContext.deserialize(given.serialized_runtime_env_context or "{}")
    update_envs(context.env_vars)
    if "OMP_NUM_THREADS" in os.environ:  # read when torch was imported
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = rest
    runpy.run_path(rest[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _ask(os.environ[SOCKET])
