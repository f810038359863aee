# Read by the job files beside it: what they share. Not started by itself.
#
# PYTHON      the interpreter of the environment vitfw is installed in (default: .venv/bin/python, else python)
# CONTAINER   words put before it, such as: export CONTAINER="apptainer exec --nv image.sif"
#             with pyxis, srun's own options instead: export CONTAINER="--container-image=image.sqsh --container-mounts=$PWD"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
read -r -a CONTAINER <<<"${CONTAINER:-}"
export PYTHONUNBUFFERED=1

# A wrong word ends the job before it holds its nodes for long; out= must be given, so that every attempt finds the run.
check_words() {
    OUT=
    local word
    for word in "$@"; do
        case $word in out=*) OUT=${word#out=} ;; esac
    done
    [ -n "$OUT" ] || { echo "out=FOLDER is missing: a run that is requeued must find its folder again" >&2; exit 2; }
}

# Which runs stand stopped on request: in the folder itself, or in those of a ladder's rungs. Inodes tell old marks from new.
marks() {
    stat --format '%n %i' "$OUT"/stopped "$OUT"/*/stopped 2>/dev/null || true
}

# Starts the run. Where it stopped on request it says so by its status, or by a mark in its folder where torchrun stands
# between, and the job goes back into the queue. Unless SLURM has decided by then what becomes of the job: one that is being
# requeued returns by itself, a cancelled one does not.
run() {
    local status=0 before fresh
    before=$(marks)
    trap 'true' USR1 TERM  # the run gets them as well; the shell must live until it has saved
    "$@" &
    local job=$!
    while true; do  # a signal ends `wait`, not the run
        status=0
        wait "$job" || status=$?
        kill -0 "$job" 2>/dev/null || break
    done
    trap - USR1 TERM
    fresh=$(marks | grep --invert-match --line-regexp --fixed-strings --file <(echo "$before") || true)
    if [ "$status" = 75 ] || [ -n "$fresh" ]; then
        if scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING '; then
            echo "stopped on request: back into the queue"
            scontrol requeue "$SLURM_JOB_ID"
            sleep 60  # SLURM ends this attempt
        fi
    fi
    exit "$status"
}
