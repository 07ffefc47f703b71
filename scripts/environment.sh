# shellcheck shell=bash
# Sourced by scripts/test, scripts/demo and scripts/bench.py: the virtual environments, and what Open MPI must be told.

root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# make_environment NAME EXTRAS: a virtual environment $root/NAME that has the package with at least
# these comma-separated extras. Quick when it is there and pyproject.toml has not changed.
make_environment() {
    local venv=$root/$1 extras=$2 stamp=$root/$1/mpi_replica.stamp
    local state known_state='' known_extras='' known_root='' extra missing='' stale=''

    # Of another checkout: it is whoever's made it, and `--clear` would empty that.
    [[ ! -L $venv ]] || return 0
    state=$(cksum <"$root/pyproject.toml")
    if [[ -f $stamp ]]; then
        { read -r known_state && read -r known_extras && IFS= read -r known_root; } <"$stamp" || true
        # The checkout was moved or copied, so that the programs in there point elsewhere, or the
        # Python that it was made with is gone.
        [[ $root == "$known_root" && -x $venv/bin/python ]] || stale=yes
    fi
    for extra in ${extras//,/ }; do
        [[ ,$known_extras, == *,$extra,* ]] || missing=yes
    done
    [[ $missing || $stale || $state != "$known_state" ]] || return 0

    # Another script may have asked for other extras: it keeps them.
    extras=$(tr ',' '\n' <<<"$extras,$known_extras" | grep . | sort -u | paste -sd , -)

    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$python is missing or older than Python 3.11: set PYTHON to one that is not" >&2
        return 1
    fi
    echo "installing mpi_replica[$extras] in $venv" >&2
    if [[ $stale ]]; then
        "$python" -m venv --clear "$venv" || return
    elif [[ ! -f $stamp ]]; then
        "$python" -m venv "$venv" || return
    fi
    pip_install "$venv" --editable "${root}[$extras]" || return
    # Last, so that an installation that was interrupted is made again.
    printf '%s\n' "$state" "$extras" "$root" >"$stamp"
}

# pip_install VENV ARGUMENTS...: Python compiles the modules that are imported; pip would compile all, in
# half of its time.
pip_install() {
    "$1/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check "${@:2}"
}

# newest_python: prints $PYTHON, or else the newest Python that is there, of those that the package is
# known to work with: on PATH, or of pyenv.
newest_python() {
    local python minor newest=${PYTHON:-} greatest=0

    for python in python3 python3.{12..15} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-5].*/bin/python; do
        [[ ! ${PYTHON:-} ]] || break
        minor=$("$python" -c 'import sys, venv; print(sys.version_info[1])' 2>/dev/null) || continue
        if ((minor > greatest)); then
            newest=$python greatest=$minor
        fi
    done
    printf '%s\n' "$newest"
}

# make_array_environment NAME EXTRAS: as make_environment, with torch and JAX, and what holds weights
# for that. A build of torch for the CPU alone, where the package index has one, is a tenth of what
# pip takes otherwise.
make_array_environment() {
    local venv=$root/$1

    make_environment "$1" "$2,jax,test-jax" || return
    "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' && return
    echo "installing torch in $venv" >&2
    pip_install "$venv" torch==2.13.0+cpu 2>/dev/null || pip_install "$venv" torch
}

# make_intel_environment NAME: as make_environment, with Intel MPI for one host: without the libraries of
# networks that its package asks for. Where the package index has none the environment has no MPI.
make_intel_environment() {
    make_environment "$1" test || return
    [[ ! -x $root/$1/bin/mpiexec ]] || return 0
    pip_install "$root/$1" --no-deps impi-rt ||
        echo "without Intel MPI: its tests are skipped" >&2
}

# open_mpi_environment RANKS: let Open MPI start so many ranks, whoever the user is.
open_mpi_environment() {
    if ((EUID == 0)); then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    # Open MPI counts cores, nproc counts hardware threads: up to two a core.
    if (($(nproc 2>/dev/null || echo 1) < 2 * $1)); then
        export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    fi
    # The same order of sets of strings on all ranks.
    export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
    # The ranks share the cores: one BLAS thread each.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
}
