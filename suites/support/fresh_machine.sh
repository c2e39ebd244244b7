#!/usr/bin/env bash
# The README's two commands on a fresh machine: a new Debian 12 root with only Python, venv, pip, git and a C++ compiler, a new HOME and
# a clone of this tree. Prints what each command took and ends with 0 when both ended with 0 in time.
#
# usage: fresh_machine.sh [FOLDER]     FOLDER keeps the new system for the next run, which begins with a copy (default: nothing is kept)
#
# The root uses the host's own settings of apt and pip, whatever they are, so it works where the host reaches its packages.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
release=bookworm
packages=python3,python3-venv,python3-pip,git,g++,ca-certificates
first_limit_s=300
repeat_limit_s=60
tests_limit_s=720

[ "$(id -u)" = 0 ] || { echo "This needs root, for debootstrap and chroot."; exit 3; }
command -v debootstrap >/dev/null || { echo "Install debootstrap: apt-get install debootstrap"; exit 3; }

work=${1:-$(mktemp -d)}
base=$work/base
root=$work/root
[ ! -e "$root" ] || { echo "$root is there already; remove it first."; exit 2; }
mkdir -p "$work"

keep=$#
bound=()
leave() {
    # Lazily, so that a process which stayed behind cannot keep the root mounted.
    for place in /proc /sys /dev "${bound[@]}"; do
        if mountpoint -q "$root$place"; then umount -l "$root$place"; fi
    done
    if ! grep -q " $root/" /proc/self/mounts; then rm -rf --one-file-system "$root"; fi
    if [ "$keep" = 0 ]; then rm -rf --one-file-system "$work"; fi
}
trap leave EXIT

# The first mirror that the host has for this release. `apt-get indextargets` understands every format of sources.
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

# The host's own settings: names, certificates, pip's files and whatever local folders those name.
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
    # An index of pip is the folder "simple" of something that has the files themselves beside it.
    if [ "${folder##*/}" = simple ]; then folder=${folder%/simple}; fi
    if [ -d "$folder" ] && [ "$folder" != / ] && ! mountpoint -q "$root$folder"; then
        mkdir -p "$root$folder"
        mount --bind "$folder" "$root$folder"
        mount -o remount,bind,ro "$root$folder"
        bound+=("$folder")
    fi
done

git clone --quiet "$project" "$root/root/gdrkit"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys" && mount --make-rslave "$root/sys"
mount --rbind /dev "$root/dev" && mount --make-rslave "$root/dev"

# Only what says where packages come from is handed on; HOME and PATH are those of a new user.
settings=()
while IFS= read -r name; do settings+=("$name=${!name}"); done < <(compgen -e | grep -iE '^(pip_|.*_proxy$|ssl_cert|requests_ca)' || true)

inside() {
    chroot "$root" /usr/bin/env -i "${settings[@]}" HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c "cd /root/gdrkit && $1"
}

failed=0
timed() {
    local name=$1 limit_s=$2 command=$3 code=0 began=$SECONDS
    echo "== $name: $command"
    inside "$command" || code=$?
    local took_s=$((SECONDS - began))
    echo "== $name: exit code $code after $took_s s (limit $limit_s s)"
    if [ "$code" -ne 0 ] || [ "$took_s" -gt "$limit_s" ]; then failed=1; fi
}

venv='. .venv/bin/activate'
timed "first qualification" "$first_limit_s" "python3 -m venv .venv && $venv && pip install -q nox && nox -s qualify"
timed "repeated qualification" "$repeat_limit_s" "$venv && pip install -q nox && nox -s qualify"
timed "tests" "$tests_limit_s" "$venv && pip install -q nox && nox"
exit "$failed"
