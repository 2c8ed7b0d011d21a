"""`python -m build.serve`: prepare the checkpoint, run tritonserver in the foreground, stop it cleanly on Ctrl-C."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from build import repository
from build.backends import BackendError
from build.server import MODEL_REPOSITORY, Ports, Server, ServerError

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP raise SystemExit once: context managers then stop their servers undisturbed."""

    def leave(number: int, _: FrameType | None) -> None:
        for each in _STOP_SIGNALS:  # a second Ctrl-C must not interrupt the stop, which has a limit of its own
            signal.signal(each, signal.SIG_IGN)
        print("stopping", flush=True)
        raise SystemExit(128 + number)

    for number in _STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, leave)


def parse_arguments(program: str, description: str | None) -> argparse.Namespace:
    """Command line of everything that runs one server."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--checkpoint", type=Path, default=repository.DEMO_CHECKPOINT, help="bf16 or NVFP4 directory")
    parser.add_argument("--model-repository", type=Path, default=MODEL_REPOSITORY)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0 to be reached from other machines")
    parser.add_argument("--http-port", type=int, default=Ports.http)
    parser.add_argument("--grpc-port", type=int, default=Ports.grpc)
    parser.add_argument("--metrics-port", type=int, default=Ports.metrics)
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    return parser.parse_args()


def server_of(options: argparse.Namespace, checkpoint: Path) -> Server:
    """The server that the command line describes, not started."""
    return Server(
        options.model_repository,
        checkpoint=checkpoint,
        ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
        address=options.address,
        start_timeout_s=options.start_timeout,
    )


def serve_until_stopped(server: Server) -> int:
    """Exit code of a server that ended by itself; a signal leaves by SystemExit instead."""
    with server:
        print(f"http    http://{server.http_url}/v2/models/{server.probe.model}/generate_stream")
        print(f"grpc    {server.grpc_url}")
        print(f"metrics {server.metrics_url}")
        print(f"log     {server.log_path}")
        print("Ctrl-C stops the server.", flush=True)
        code = server.wait()
    print(f"tritonserver ended by itself with code {code}:\n{server.log_tail()}", file=sys.stderr)
    return code or 1


def main() -> int:
    options = parse_arguments("python -m build.serve", __doc__)
    exit_on_signals()
    try:
        checkpoint = repository.prepare(options.checkpoint)
        return serve_until_stopped(server_of(options, checkpoint))
    except (ServerError, BackendError, repository.RepositoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
