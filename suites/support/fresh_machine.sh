#!/usr/bin/env bash
# Runs the two commands of the README on a "fresh machine", and prints the duration of each command.
#
# The fresh machine is a new Debian 12 root file system in a chroot. It has only Python, venv, pip, git and a C++ compiler, an empty
# HOME and a clone of this tree. It uses the apt and pip settings of the host, so it gets packages from the same servers.
#
# With WHEELS=build/dist (the output of `nox -s wheels`), the machine is a Debian 13 without git and compiler. It installs these
# wheels and runs `gdrkit qualify --software` from them.
#
# With IMAGE=1, the machine is the base image of deploy/Containerfile. buildah builds the image, and `gdrkit qualify --software` runs
# in it. Then systemd boots in the image, and the units of deploy/systemd serve a file.
#
# The exit code is 0 if all commands succeeded within their time limits. A command that prints nothing for more than 5 s fails too.
#
# usage: [WHEELS=build/dist] [IMAGE=1] fresh_machine.sh [FOLDER]
#   FOLDER keeps the new root file system, and the next run starts with a copy of it. Without FOLDER, nothing is kept.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
release=bookworm
packages=python3,python3-venv,python3-pip,git,g++,ca-certificates
if [ -n "$wheels" ]; then
    release=trixie
    packages=python3,python3-venv,ca-certificates
elif [ -n "${IMAGE:-}" ]; then
    packages=ca-certificates,dbus,systemd,systemd-sysv
fi
first_limit_s=180
silence_limit_s=5
repeat_limit_s=60
tests_limit_s=1800

[ "$(id -u)" = 0 ] || { echo "This needs root, for debootstrap and chroot."; exit 3; }
command -v debootstrap >/dev/null || { echo "Install debootstrap: apt-get install debootstrap"; exit 3; }

work=${1:-$(mktemp -d)}
base=$work/base
root=$work/root
[ ! -e "$root" ] || { echo "$root exists: remove it first."; exit 2; }
mkdir -p "$work"

has_folder=$#
bind_mounts=()
volumes=()
clean_up() {
    # The unmount is lazy, because a process of the new system may still run.
    for mount_point in /proc /sys /dev "${bind_mounts[@]}" ""; do
        if mountpoint -q "$root$mount_point"; then umount -l "$root$mount_point"; fi
    done
    if ! grep -q " ${root}[/ ]" /proc/self/mounts; then rm -rf --one-file-system "$root"; fi
    if [ "$has_folder" = 0 ]; then rm -rf --one-file-system "$work"; fi
}
trap clean_up EXIT

# The first mirror of the host for this release. `apt-get indextargets` reads every format of apt's source lists.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' |
    awk -v codename="$release" '$2 == codename && $3 == "main" { print $1; exit }')
mirror=${mirror:-http://deb.debian.org/debian}

if [ ! -e "$work/base.done" ]; then
    echo "== debootstrap $release"
    rm -rf --one-file-system "$base"
    debootstrap --variant=minbase --include="$packages" "$release" "$base" "$mirror" >"$work/debootstrap.log" 2>&1 ||
        { tail -n 20 "$work/debootstrap.log"; exit 3; }
    touch "$work/base.done"
fi
cp -a --reflink=auto "$base" "$root"
# Programs for namespaces, such as ip-netns(8), expect that / is a mount point.
mount --bind "$root" "$root"

# Settings of the host: name servers, certificates, configuration of pip, and the local folders that it names.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
mkdir -p "$root/usr/local/share/ca-certificates" "$root/etc/apt/apt.conf.d"
cp -rL /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
for setting in $(apt-config dump --format '%f %v%n' | awk '/^Acquire::(http|https|Check|Retries)/ { print $1 "=" $2 }'); do
    echo "${setting%%=*} \"${setting#*=}\";" >>"$root/etc/apt/apt.conf.d/90host"
done
if [ -f /etc/pip.conf ]; then cp -L /etc/pip.conf "$root/etc/pip.conf"; fi
mkdir -p "$root/root/.config/pip"
if [ -f "${HOME:-/root}/.config/pip/pip.conf" ]; then cp -L "${HOME:-/root}/.config/pip/pip.conf" "$root/root/.config/pip/"; fi
for folder in $(pip config list 2>/dev/null | grep -oE "(file://)?/[^ ']+" | sed 's#^file://##' | sort -u); do
    # A local package index is a folder "simple". The packages themselves are in other folders of its parent, so mount the parent.
    if [ "${folder##*/}" = simple ]; then folder=${folder%/simple}; fi
    if [ ! -d "$folder" ] || [ "$folder" = / ] || mountpoint -q "$root$folder"; then continue; fi
    if [ -n "${IMAGE:-}" ]; then
        # The image does not contain the packages, which can have many gigabytes. Only its build sees them.
        volumes+=(--volume "$folder:$folder:ro")
        continue
    fi
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder"
    bind_mounts+=("$folder")
done

# Prints the output of the units' check, and returns its exit code. systemd is the first process of new namespaces.
boot_units() {
    local system=$1
    cp "$project"/deploy/systemd/*.service "$system/etc/systemd/system/"
    cp "$project/suites/support/deployed_units.sh" "$system/root/"
    # shellcheck disable=SC2016 # systemd expands the name.
    printf '%s\n' '[Service]' 'Type=oneshot' 'StandardOutput=file:/root/units.log' 'StandardError=inherit' \
        'ExecStart=/opt/gdrkit/bin/gdrkit run --software --quiet -- bash /root/deployed_units.sh' \
        'ExecStopPost=sh -c "echo $EXIT_STATUS >/root/units.code"' >"$system/etc/systemd/system/check.service"
    # The namespace gets the unmounts of the host (slave), so it does not keep the host's file systems mounted.
    # shellcheck disable=SC2016 # The shell of the new namespaces expands the names.
    timeout --signal KILL 300 unshare --mount --pid --ipc --uts --cgroup --fork --kill-child --propagation slave bash -c '
        mount --bind "$1" "$1"
        mount -t proc proc "$1/proc" && mount -t sysfs sysfs "$1/sys" && mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/run" && mount -t tmpfs tmpfs "$1/dev/shm" && mount -t tmpfs tmpfs "$1/sys/fs/cgroup"
        mkdir "$1/sys/fs/cgroup/systemd" && mount -t cgroup -o none,name=systemd cgroup "$1/sys/fs/cgroup/systemd"
        exec chroot "$1" env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=check.service
    ' boot "$system" </dev/null &
    local booted=$!
    while [ ! -s "$system/root/units.code" ] && kill -0 "$booted" 2>/dev/null; do sleep 1; done
    kill -KILL "$booted" 2>/dev/null || true
    wait "$booted" 2>/dev/null || true
    cat "$system/root/units.log"
    [ "$(cat "$system/root/units.code")" = 0 ]
}

if [ -n "${IMAGE:-}" ]; then
    command -v buildah >/dev/null || { echo "Install buildah: apt-get install buildah"; exit 3; }
    tool=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)
    git clone --quiet "$project" "$work/project"
    echo "== base image"
    container=$("${tool[@]}" from scratch)
    "${tool[@]}" copy --quiet "$container" "$root" /
    "${tool[@]}" commit --quiet "$container" debian-root
    echo "== image"
    # In a chroot, the build needs no network or user namespace of its own.
    "${tool[@]}" bud --isolation chroot "${volumes[@]}" --build-arg BASE=localhost/debian-root -t gdrkit -f "$work/project/deploy/Containerfile" "$work/project"
    container=$("${tool[@]}" from localhost/gdrkit)
    echo "== qualification"
    "${tool[@]}" run --isolation chroot --cap-add CAP_IPC_LOCK "$container" -- gdrkit qualify --software --output /root/report
    echo "== units"
    boot_units "$("${tool[@]}" mount "$container")"
    exit 0
fi
if [ -n "$wheels" ]; then
    mkdir "$root/root/gdrkit"
    cp "$wheels"/*.whl "$root/root/gdrkit"
else
    git clone --quiet "$project" "$root/root/gdrkit"
fi
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys" && mount --make-rslave "$root/sys"
mount --rbind /dev "$root/dev" && mount --make-rslave "$root/dev"

# The new system inherits only the variables of the package sources. HOME and PATH have the values of a new user.
variables=()
while IFS= read -r name; do variables+=("$name=${!name}"); done < <(compgen -e | grep -iE '^(pip_|.*_proxy$|ssl_cert|requests_ca)' || true)

run_in_new_system() {
    chroot "$root" /usr/bin/env -i "${variables[@]}" HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c "cd /root/gdrkit && $1"
}

# Prints its input, and then the longest time without a new line. Fails if this time exceeds the limit.
check_silence() {
    local now last=${EPOCHREALTIME/./} longest_us=0
    while IFS= read -r line || [ -n "$line" ]; do
        now=${EPOCHREALTIME/./}
        if [ $((now - last)) -gt "$longest_us" ]; then longest_us=$((now - last)); fi
        last=$now
        printf '%s\n' "$line"
    done
    echo "== longest silence: $((longest_us / 1000)) ms (limit $silence_limit_s s)"
    [ "$longest_us" -le $((silence_limit_s * 1000000)) ]
}

failed=0
run_timed() {
    local name=$1 limit_s=$2 command=$3 codes start_s=$SECONDS
    echo "== $name: $command"
    run_in_new_system "$command" 2>&1 | check_silence && codes=(0 0) || codes=("${PIPESTATUS[@]}")
    local duration_s=$((SECONDS - start_s))
    echo "== $name: exit code ${codes[0]} after $duration_s s (limit $limit_s s)"
    if [ "${codes[0]}" -ne 0 ] || [ "${codes[1]}" -ne 0 ] || [ "$duration_s" -gt "$limit_s" ]; then failed=1; fi
}

venv='. .venv/bin/activate'
if [ -n "$wheels" ]; then
    # shellcheck disable=SC2016 # The new system expands the names.
    install='pip install "gdrkit[qualify] @ file://$(echo $PWD/gdrkit-*-cp312-abi3-*x86_64.whl)" gdrkit_twins-*x86_64.whl pyverbs-*-cp313-*.whl'
    run_timed "installation" "$first_limit_s" "python3 -m venv .venv && $venv && $install"
    run_timed "qualification" 900 "$venv && cd / && gdrkit qualify --software --output /root/report"
    exit "$failed"
fi
run_timed "first qualification" "$first_limit_s" "python3 -m venv .venv && $venv && pip install nox && nox -s qualify"
run_timed "repeated qualification" "$repeat_limit_s" "$venv && pip install nox && nox -s qualify"
run_timed "tests" "$tests_limit_s" "$venv && pip install nox && nox"
exit "$failed"
