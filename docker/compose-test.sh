#!/usr/bin/env bash
# Builds the image and runs compose.yaml for real, then tests/test_compose.py against it: `make compose-test`.
#
# Docker is taken as it is found. Where it is missing it is installed (Debian or Ubuntu, as root); where no daemon
# answers, one is started for this test alone, its data in a folder of its own. Where no registry can be reached, a
# base image made of Debian packages stands in for python:3.11-slim and for redis:7.
# On exit, good or bad: everything made here is gone again. What apt installed and what was pulled stays.
#
#   PYTHON                 interpreter with pytest (.venv/bin/python)
#   EI_TEST_BASE_TARBALL   keep the made base image's files here and use them in the next run
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
made_base=evolving-infra-test-base:$$
work=$(mktemp -d /var/tmp/evolving-compose.XXXXXX)
daemon_pid=
had_docker0=

export COMPOSE_PROJECT_NAME=evolving-test-$$
export EI_COMPOSE_IMAGE=evolving-infra-test:$$
export EI_COMPOSE_BASE_IMAGE=${EI_COMPOSE_BASE_IMAGE:-python:3.11-slim-bookworm}
export EI_COMPOSE_REDIS_IMAGE=${EI_COMPOSE_REDIS_IMAGE:-redis:7}
# An empty port is a free one, so that a cluster that already runs here is not in the way.
export EI_COMPOSE_ROUTER=127.0.0.1:
export EI_COMPOSE_TELEMETRY=127.0.0.1:
compose=()

say() { printf '== %s\n' "$*"; }
fail() { printf 'compose-test: %s\n' "$*" >&2; exit 2; }

install_packages() {
    [ "$(id -u)" = 0 ] || fail "$1 is missing: install it, or run this as root on Debian or Ubuntu"
    command -v apt-get >/dev/null || fail "$1 is missing, and there is no apt-get to install it: install it by hand"
    say "installing $*"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
        >"$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log" >&2; fail "apt-get could not install $*"; }
}

start_daemon() {
    [ "$(id -u)" = 0 ] || fail "no Docker daemon answers, and only root can start one"
    command -v dockerd >/dev/null || install_packages docker.io
    command -v iptables >/dev/null || install_packages iptables
    # Two such daemons would take the same bridge and addresses from each other; the lock ends with this process.
    exec 9</var/tmp
    flock --nonblock 9 || { say "waiting for another compose-test on this machine"; flock 9; }
    say "starting a Docker daemon for this test"
    [ -e /sys/class/net/docker0 ] && had_docker0=yes
    export DOCKER_HOST=unix://$work/docker.sock
    dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/docker.pid" \
        >"$work/dockerd.log" 2>&1 9<&- &
    daemon_pid=$!
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$daemon_pid" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 20 "$work/dockerd.log" >&2
    fail "the Docker daemon did not start"
}

stop_daemon() {
    kill "$daemon_pid" 2>/dev/null || true
    wait "$daemon_pid" 2>/dev/null || true
    [ -n "$had_docker0" ] || ip link delete docker0 2>/dev/null || true
}

# True when the image is here or was pulled.
have_image() {
    docker image inspect "$1" >/dev/null 2>&1 || timeout 600 docker pull --quiet "$1" >"$work/pull.log" 2>&1
}

# One image with Python, Redis and what this host needs to reach a package index: its certificates and its index.
make_base() {
    local tarball=${EI_TEST_BASE_TARBALL:-$work/base.tar} root=$work/base
    if [ ! -s "$tarball" ]; then
        command -v debootstrap >/dev/null || install_packages debootstrap debian-archive-keyring
        say "no registry can be reached: making a base image of Debian packages (1 to 2 minutes)"
        debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,redis-server,ca-certificates \
            bookworm "$root" >"$work/debootstrap.log" 2>&1 ||
            { tail -n 20 "$work/debootstrap.log" >&2; fail "debootstrap failed"; }
        rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
        tar -C "$root" -cf "$tarball.part" . && mv "$tarball.part" "$tarball"
        rm -rf "$root"
    fi
    docker import "$tarball" "$made_base" >/dev/null

    mkdir -p "$root/etc/ssl/certs"
    cp -L "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
    {
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ntimeout = 180\n'
        index=$("$PYTHON" -m pip config get global.index-url 2>/dev/null) || index=${PIP_INDEX_URL:-}
        [ -z "$index" ] || printf 'index-url = %s\n' "$index"
    } >"$root/etc/pip.conf"
    printf 'FROM %s\nCOPY etc /etc\n' "$made_base" >"$root/Dockerfile"
    docker build --quiet --tag "$made_base" "$root" >"$work/base.log" 2>&1 || { cat "$work/base.log" >&2; return 1; }
    rm -rf "$root"
    EI_COMPOSE_BASE_IMAGE=$made_base
    EI_COMPOSE_REDIS_IMAGE=$made_base
}

clean_up() {
    local status=$?
    trap - EXIT INT TERM
    set +e
    say "cleaning up"
    if [ ${#compose[@]} -gt 0 ]; then
        "${compose[@]}" --profile loadtest down --volumes --remove-orphans --timeout 30 >"$work/down.log" 2>&1
    fi
    if [ -n "$daemon_pid" ]; then
        stop_daemon
    elif docker info >/dev/null 2>&1; then
        docker image rm --force "$EI_COMPOSE_IMAGE" >/dev/null 2>&1
        docker image prune --force --filter label=evolving-infra.stage=build >/dev/null 2>&1
        docker image rm --force "$made_base" >/dev/null 2>&1
    fi
    rm -rf "$work"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$PYTHON" -c 'import pytest' 2>/dev/null || fail "$PYTHON has no pytest: run make compose-test, or set PYTHON"
command -v docker >/dev/null || install_packages docker.io
docker info >/dev/null 2>&1 || start_daemon
if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
else
    command -v docker-compose >/dev/null || install_packages docker-compose
    compose=(docker-compose)
fi
if ! { have_image "$EI_COMPOSE_BASE_IMAGE" && have_image "$EI_COMPOSE_REDIS_IMAGE"; }; then
    make_base
fi

say "building the image on $EI_COMPOSE_BASE_IMAGE"
"${compose[@]}" build router >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; fail "the build failed"; }

say "running the cluster"
EI_TEST_COMPOSE="${compose[*]}" "$PYTHON" -m pytest -m compose -vvx --tb=short -p no:cacheprovider \
    tests/test_compose.py "$@"
say "passed"
