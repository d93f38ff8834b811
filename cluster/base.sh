#!/usr/bin/env bash
# A base image for cluster/Dockerfile without a registry: Debian, from the mirror that this machine's apt uses.
#   cluster/base.sh [TAG]        (as root; Debian with debootstrap; about a minute; nothing to do if TAG is there)
# Python comes from the same release: 3.11 on bookworm, so the notebook must run on 3.11 too.
set -euo pipefail
tag="${1:-ftlab-base}"
if docker image inspect "$tag" >/dev/null 2>&1; then echo "$tag is already there"; exit 0; fi
command -v debootstrap >/dev/null || { echo "debootstrap is not here; try: apt install debootstrap" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "debootstrap needs root; try: sudo $0 $tag" >&2; exit 1; }
release="$(. /etc/os-release && echo "${VERSION_CODENAME:?this is no Debian}")"
mirror="$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
    awk -v release="$release" '$2 == release && $3 == "main" {print $1; exit}')"
[ -n "$mirror" ] || { echo "apt knows no mirror of $release; try: apt-get update" >&2; exit 1; }

folder="$(mktemp -d)"
# One file system only: if debootstrap was ended half way, /proc and /sys are still mounted below.
clean() { umount -q "$folder/root/proc" "$folder/root/sys" 2>/dev/null || true; rm -rf --one-file-system "$folder"; }
trap clean EXIT
echo "debootstrap: $release, about a minute"
debootstrap --variant=minbase --include=python3,python3-venv "$release" "$folder/root" "$mirror" \
    >"$folder/log" 2>&1 || { tail -20 "$folder/log" >&2; exit 1; }
tar -C "$folder/root" --one-file-system --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' \
    --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' \
    --exclude='./usr/share/locale/*' --exclude='./usr/share/man/*' --exclude='./etc/apt/sources.list*' -c . |
    docker import --change 'LABEL ftlab.image=base' - "$tag" >/dev/null
echo "$tag: $(docker image inspect --format '{{.Size}}' "$tag" | awk '{print int($1 / 1e6)}') MB"
