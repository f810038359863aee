#!/usr/bin/env bash
# Several processes, on one machine or on several without a scheduler.
#
#   PROCESSES=8 launch/torchrun.sh recipe=deit_b machine=gpu8 out=runs/deit_b
#
# On several machines the same line on each, with the first one's name, and a number that all share:
#
#   NODES=2 HEAD=first.example PROCESSES=8 RUN_ID=1 launch/torchrun.sh recipe=deit_b machine=gpu8x2 out=/shared/deit_b
#
# NODES=1:4 is elastic: machines may leave and join; the run goes on with those that are there, from the last checkpoint (a
# machine that is stopped in good order saves first). The first machine must stay: it holds the meeting point. Use a machine
# file that leaves machine.nodes at 0, and a global batch that divides among every number of processes.
# RESTARTS: times that torchrun starts the processes again after a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
export PYTHONUNBUFFERED=1
words=(--nproc-per-node "${PROCESSES:-gpu}" --max-restarts "${RESTARTS:-0}")
# torchrun would die of USR1 at once, and allow 30 s for a save
words+=(--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 280)
if [ -n "${HEAD:-}" ]; then
    # the store that torch shares between agent and workers keeps the first one's address: joining machines would wait for it
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    words+=(--nnodes "${NODES:?how many machines, such as 2 or 1:4}" --rdzv-backend c10d)
    words+=(--rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:?a number that all machines share}")
    words+=(--rdzv-conf "last_call_timeout=${LAST_CALL:-15}")
else
    words+=(--standalone)
fi
exec "$PYTHON" -m torch.distributed.run "${words[@]}" train.py "$@"
