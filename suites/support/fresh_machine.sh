#!/usr/bin/env bash
# Runs the two commands of the README on a "fresh machine", and prints the duration of each command.
#
# The fresh machine is a new Debian 12 root file system in a chroot. It has only Python, venv, pip, git and a C++ compiler, an empty
# HOME and a clone of this tree. It uses the apt and pip settings of the host, so it gets packages from the same servers.
#
# With WHEELS=build/dist (the output of `nox -s wheels`), the machine is a Debian 13 without git and compiler. It installs these
# wheels and runs `gdrkit qualify --software` from them.
#
# The exit code is 0 if all commands succeeded within their time limits. A command that prints nothing for more than 5 s fails too.
#
# usage: [WHEELS=build/dist] fresh_machine.sh [FOLDER]
#   FOLDER keeps the new root file system, and the next run starts with a copy of it. Without FOLDER, nothing is kept.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
release=bookworm
packages=python3,python3-venv,python3-pip,git,g++,ca-certificates
if [ -n "$wheels" ]; then
    release=trixie
    packages=python3,python3-venv,ca-certificates
fi
first_limit_s=180
silence_limit_s=5
repeat_limit_s=60
tests_limit_s=720

[ "$(id -u)" = 0 ] || { echo "This needs root, for debootstrap and chroot."; exit 3; }
command -v debootstrap >/dev/null || { echo "Install debootstrap: apt-get install debootstrap"; exit 3; }

work=${1:-$(mktemp -d)}
base=$work/base
root=$work/root
[ ! -e "$root" ] || { echo "$root exists: remove it first."; exit 2; }
mkdir -p "$work"

has_folder=$#
bind_mounts=()
clean_up() {
    # The unmount is lazy, because a process of the new system may still run.
    for mount_point in /proc /sys /dev "${bind_mounts[@]}"; do
        if mountpoint -q "$root$mount_point"; then umount -l "$root$mount_point"; fi
    done
    if ! grep -q " $root/" /proc/self/mounts; then rm -rf --one-file-system "$root"; fi
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
    if [ -d "$folder" ] && [ "$folder" != / ] && ! mountpoint -q "$root$folder"; then
        mkdir -p "$root$folder"
        mount --bind "$folder" "$root$folder"
        mount -o remount,bind,ro "$root$folder"
        bind_mounts+=("$folder")
    fi
done

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
