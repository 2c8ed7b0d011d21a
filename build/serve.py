"""`python -m build.serve`: prepare the checkpoint, run tritonserver in the foreground, stop it cleanly on Ctrl-C."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from build import repository
from build.backends import BackendError
from build.server import MODEL_REPOSITORY, Ports, Server, ServerError

__all__ = ["Ports", "Server", "ServerError", "exit_on_signals"]


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that context managers stop their servers."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m build.serve", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=repository.DEMO_CHECKPOINT, help="bf16 or NVFP4 directory")
    parser.add_argument("--model-repository", type=Path, default=MODEL_REPOSITORY)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    parser.add_argument("--http-port", type=int, default=Ports.http)
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc)
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics)
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    exit_on_signals()
    try:
        checkpoint = repository.prepare(options.checkpoint)
        server = Server(
            options.model_repository,
            checkpoint=checkpoint,
            ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
            address=options.address,
            start_timeout_s=options.start_timeout,
        )
        with server:
            print(f"http    http://{server.http_url}/v2/models/{server.probe.model}/generate_stream")
            print(f"grpc    {server.grpc_url}")
            print(f"metrics {server.metrics_url}")
            print(f"log     {server.log_path}")
            print("Ctrl-C stops the server.", flush=True)
            code = server.wait()
            print(f"tritonserver ended by itself with code {code}:\n{server.log_tail()}", file=sys.stderr)
            return code or 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    except (ServerError, BackendError, repository.RepositoryError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
