#!/usr/bin/env bash
# Create or complete .venv with the pinned packages; nothing to do (milliseconds) when it is up to date.
# Usage: build/venv.sh [PYTHON]   without PYTHON: the first of python3.11, 3.12, 3.10 and python3 that will do.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Prints major.minor if the interpreter will do: 3.10 to 3.12, able to make a venv, with the shared libpython that
# Triton's stub links.
version_of() {
    "$1" - <<'PYTHON' 2>/dev/null
import ensurepip, pathlib, sys, sysconfig, venv
version = "%d.%d" % sys.version_info[:2]
assert version in ("3.10", "3.11", "3.12")
folder = pathlib.Path(sysconfig.get_config_var("LIBDIR"))
name = "libpython%s.so.1.0" % version
assert (folder / name).exists() or (folder / (sysconfig.get_config_var("MULTIARCH") or "") / name).exists()
print(version)
PYTHON
}

python="${1:-}"
mkdir -p .cache
exec 9>.cache/venv.lock
flock 9 # two makes at the same time: the second waits

wanted=""
if [[ -n "$python" ]]; then
    candidates=("$python")
elif [[ -x .venv/bin/python ]]; then
    candidates=(.venv/bin/python python3.11 python3.12 python3.10 python3)
else
    candidates=(python3.11 python3.12 python3.10 python3)
fi
for candidate in "${candidates[@]}"; do
    if version="$(version_of "$candidate")"; then
        wanted="$candidate"
        break
    fi
done
if [[ -z "$wanted" ]]; then
    echo "python: expected Python 3.10, 3.11 or 3.12 with venv and a shared libpython, got none of: ${candidates[*]};" \
        "on Debian or Ubuntu: apt-get install python3-venv libpython3.11 (or libpython3.10, libpython3.12), or name an" \
        "interpreter with PYTHON=…" >&2
    exit 1
fi

stamp="$version $PWD $(cat pyproject.toml requirements.lock build/venv.sh | sha256sum | cut -d' ' -f1)"
if [[ -f .venv/.stamp && "$(cat .venv/.stamp)" == "$stamp" ]]; then
    exit 0
fi
if [[ "$(version_of .venv/bin/python || true)" != "$version" ]]; then
    echo "creating .venv with Python $version ($wanted)"
    rm -rf .venv
    "$wanted" -m venv .venv
fi
echo "installing the pinned packages into .venv"
.venv/bin/python -m pip install -c requirements.lock -e '.[test,dev]'
# Only the server binary and the stubs of this wheel are used; its own dependencies are not.
.venv/bin/python -m pip install --no-deps nvidia-pytriton==0.7.0
echo "$stamp" >.venv/.stamp
