# Read by the SLURM job files beside it: what they share. Not started by itself.
#
# CONTAINER   words put before the interpreter, such as: export CONTAINER="apptainer exec --nv image.sif"
#             with pyxis, srun's own options instead: export CONTAINER="--container-image=image.sqsh --container-mounts=$PWD"

. "${VITFW_LAUNCH:-launch}/job.sh"
read -r -a CONTAINER <<<"${CONTAINER:-}"

# Runs the steps; SLURM itself sends signals to them. A run that stopped on request goes back into the queue, unless SLURM has
# decided by then what becomes of the job: one that is being requeued returns by itself, a cancelled one does not.
run() {
    attend "$@"
    if [ "$STATUS" = 75 ] && scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING '; then
        echo "stopped on request: back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
        sleep 60  # SLURM ends this attempt
    fi
    exit "$STATUS"
}
