# Read by the job files beside it: what all schedulers need. Not started by itself.
#
# PYTHON      the interpreter of the environment vitfw is installed in (default: .venv/bin/python, else python)

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONUNBUFFERED=1

# A wrong word ends the job before it holds its nodes for long; out= must be given, so that every attempt finds the run.
check_words() {
    OUT=
    local word
    for word in "$@"; do
        case $word in out=*) OUT=${word#out=} ;; esac
    done
    [ -n "$OUT" ] || { echo "out=FOLDER is missing: a run that is started again must find its folder" >&2; exit 2; }
}

# Which runs stand stopped on request: in the folder itself, or in those of a ladder's rungs. Inodes tell old marks from new.
marks() {
    stat --format '%n %i' "$OUT"/stopped "$OUT"/*/stopped 2>/dev/null || true
}

# Runs a command to its end, whatever signals this shell gets meanwhile, and sets STATUS: 75 where the run stopped on request,
# which it says by its own status or, where torchrun stands between, by a mark in its folder.
# FORWARD: signals that the command does not get by itself.
attend() {
    local before fresh number
    before=$(marks)
    trap 'true' USR1 TERM INT
    "$@" &
    local job=$!
    for number in ${FORWARD:-}; do
        # shellcheck disable=SC2064
        trap "kill -$number $job 2>/dev/null || true" "$number"
    done
    while true; do  # a signal ends `wait`, not the run
        STATUS=0
        wait "$job" || STATUS=$?
        kill -0 "$job" 2>/dev/null || break
    done
    trap - USR1 TERM INT
    fresh=$(marks | grep --invert-match --line-regexp --fixed-strings --file <(echo "$before") || true)
    [ -z "$fresh" ] || STATUS=75
}
