#!/bin/sh
# Load tools against a server of our own: perf_analyzer over gRPC streaming, aiperf over HTTP server-sent events.
#
#   perf/server.sh [CHECKPOINT] [options of python -m perf.load]      default: the demo checkpoint
#
# Both tools are set up once below PEERS (default .cache/peers). PyPI's newer perf_analyzer wheels need glibc 2.38; the
# binary of an older tritonclient wheel runs everywhere, with two libraries of the nvidia-pytriton wheel in .venv.
set -eu

cd "$(dirname "$0")/.."
PEERS=${PEERS:-$PWD/.cache/peers}
VENV=${VENV:-$PWD/.venv}
ROOT=$PEERS/load
CLIENT=2.48.0
AIPERF=0.13.0

if [ ! -x "$ROOT/bin/perf_analyzer" ]; then
    mkdir -p "$ROOT/bin" "$ROOT/lib"
    "$VENV/bin/pip" download -q --no-deps --only-binary=:all: "tritonclient==$CLIENT" -d "$ROOT/wheel"
    "$VENV/bin/python" -m zipfile -e "$ROOT"/wheel/tritonclient-"$CLIENT"-*.whl "$ROOT/wheel/unpacked"
    cp "$ROOT/wheel/unpacked/tritonclient-$CLIENT.data/data/bin/perf_analyzer" "$ROOT/bin/"
    chmod +x "$ROOT/bin/perf_analyzer"
    libraries=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia_pytriton.libs
    ln -sf "$libraries"/libb64-*.so.0d "$ROOT/lib/libb64.so.0d"
    ln -sf "$libraries"/libcudart-*.so.12* "$ROOT/lib/libcudart.so.12"
fi
if [ ! -x "$ROOT/aiperf/bin/aiperf" ]; then
    "$VENV/bin/python" -m venv "$ROOT/aiperf"
    "$ROOT/aiperf/bin/pip" install -q "aiperf==$AIPERF"
fi
case ${1:-} in
"" | -*) ;;
*)
    checkpoint=$1
    shift
    set -- --checkpoint "$checkpoint" "$@"
    ;;
esac
exec "$VENV/bin/python" -m perf.load --tools "$ROOT" "$@"
