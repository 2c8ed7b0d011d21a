#!/bin/sh
# llama.cpp as a peer of `python -m perf.engine`: source distribution of llama-cpp-python, built for this CPU.
#
#   PEERS=DIR perf/peers/llama_cpp.sh          10 to 30 minutes of one core; a second run changes nothing
#
# PEERS (default .cache/peers of the clone) then holds llama_cpp/bin/{llama-bench,llama-batched-bench,llama-quantize}
# and llama_cpp/venv with the converter's packages. GGUF files are made by `python -m perf.peers.gguf`.
# JOBS: compiler processes, 1 unless told. Needs cmake, a C++ compiler and pip.
set -eu

VERSION=0.3.36
TARGETS="llama-bench llama-batched-bench llama-quantize"
cd "$(dirname "$0")/../.."
PEERS=${PEERS:-$PWD/.cache/peers}
ROOT=$PEERS/llama_cpp
SOURCE=$ROOT/source
PYTHON=${PYTHON:-python3}
mkdir -p "$ROOT"

if [ ! -d "$SOURCE/vendor/llama.cpp" ]; then
    # pip prepares metadata of what it downloads, in an environment of its own: only the archive stays.
    "$PYTHON" -m pip download --no-deps --no-binary llama-cpp-python "llama-cpp-python==$VERSION" -d "$ROOT/sdist"
    mkdir -p "$SOURCE"
    tar xzf "$ROOT/sdist/llama_cpp_python-$VERSION.tar.gz" -C "$SOURCE" --strip-components=1
fi

# A copy of its own: a new time stamp on it would build everything again.
cmp -s perf/peers/tile_config.h "$ROOT/tile_config.h" || cp perf/peers/tile_config.h "$ROOT/"
cmake -S "$SOURCE/vendor/llama.cpp" -B "$ROOT/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_HTML=OFF -DLLAMA_OPENSSL=OFF \
    -DCMAKE_CXX_FLAGS="-include $ROOT/tile_config.h"
# shellcheck disable=SC2086
cmake --build "$ROOT/build" --parallel "${JOBS:-1}" --target $TARGETS
mkdir -p "$ROOT/bin"
for target in $TARGETS; do
    cp "$ROOT/build/bin/$target" "$ROOT/bin/"
done

if [ ! -x "$ROOT/venv/bin/python" ]; then
    "$PYTHON" -m venv "$ROOT/venv"
    "$ROOT/venv/bin/pip" install -q torch transformers sentencepiece protobuf safetensors "$SOURCE/vendor/llama.cpp/gguf-py"
fi
echo "llama.cpp $VERSION: $ROOT/bin"
