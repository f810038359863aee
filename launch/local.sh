#!/usr/bin/env bash
# One process on this machine: the GPU where there is one (machine=gpu1), else the CPU (machine=cpu).
#
#   launch/local.sh recipe=digits machine=cpu out=runs/digits
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
exec "$PYTHON" train.py "$@"
