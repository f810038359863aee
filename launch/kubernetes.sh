#!/usr/bin/env bash
# One pod of launch/kubernetes.yaml: torchrun together with the other pods of the job. The job reads its exit status: 0 finished,
# 75 stopped and saved, start the pod again, 2 refused, 1 failed.
#
# NODES       pods of the job           PROCESSES   processes a pod; default: its GPUs
# HEAD        host name of pod 0        JOB_COMPLETION_INDEX   which pod this is, set by Kubernetes
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/job.sh

check_words "$@"
# torchrun makes one status of all, and the job would start again what no start can mend: so the words are read here first
words=(machine=cpu)
for word in "$@"; do
    case $word in machine=* | machine.*) ;; *) words+=("$word") ;; esac
done
"$PYTHON" train.py "${words[@]}" dry_run=true >/dev/null

# pods come and go one by one: the others wait for pod 0, and torchrun gives a save more time than its usual 30 s
FORWARD="TERM USR1 INT" attend "$PYTHON" -m torch.distributed.run \
    --nnodes "${NODES:?pods of the job}" --nproc-per-node "${PROCESSES:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:?host name of pod 0}:${PORT:-29400}" --rdzv-id "${RUN_ID:-vitfw}" \
    --rdzv-conf "read_timeout=600,join_timeout=900" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 280 \
    train.py "$@"
exit "$STATUS"
