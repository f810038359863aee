#!/usr/bin/env bash
# One trial of a W&B sweep: the agent's words, a run folder of its own, all processes started with the same words.
#
#   wandb sweep launch/sweep.yaml && PROCESSES=8 wandb agent SWEEP
#
# A trial that the agent starts again (the same WANDB_RUN_ID) goes on where it was. RUNS: the folder of all runs (runs).
set -euo pipefail
: "${WANDB_SWEEP_ID:?is set by wandb agent}" "${WANDB_RUN_ID:?is set by wandb agent}"
exec "$(dirname "$0")/torchrun.sh" "$@" "out=${RUNS:-runs}/sweep-$WANDB_SWEEP_ID/$WANDB_RUN_ID" log.wandb=true
