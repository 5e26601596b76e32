#!/usr/bin/env bash
# Builds an image of `moonpool serve` from a wheel and Debian's packages, without Docker, a daemon or a base image:
#
#     bash deploy/image.sh dist/moonpool-…-manylinux_2_28_x86_64.whl image [EXTRAS]
#
# The folder `image` becomes an OCI layout with one tag, `moonpool`. `skopeo copy oci:image:moonpool docker://…` uploads
# it.
# EXTRAS names what models need beside the server, such as serve,onnx. Needs root, mmdebstrap, umoci, and a pip.
set -euo pipefail
wheel=$(realpath "$1")
image=$(realpath -m "$2")
extras=${3:-serve}
suite=trixie
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
root=$room/root

# The packages are unpacked and not configured, which these need not be. numpy needs libstdc++; coreutils and dash are
# for the hooks of a pod.
packages=base-files,ca-certificates,coreutils,dash,libstdc++6,python3
mmdebstrap --quiet --variant=extract --include="$packages" "$suite" "$root" http://deb.debian.org/debian
# What a server does not need: languages, manuals, documents but licenses, and programs for packages.
find "$root/usr/share/doc" -type f -not -name copyright -delete
rm -rf "$root"/usr/share/{bash-completion,info,lintian,locale,man,perl5,pixmaps,zoneinfo} "$root"/var/{cache,lib}/*
cat "$root"/usr/share/ca-certificates/mozilla/*.crt > "$root/etc/ssl/certs/ca-certificates.crt"
# Users of a container need no name; libraries ask for that of root.
echo 'root:x:0:0:root:/:/bin/sh' > "$root/etc/passwd"
echo 'root:x:0:' > "$root/etc/group"

# The image's own Python installs, with the pip of a wheel, which the image does not keep.
mkdir -p "$root/build" "$root/proc" "$root/dev" "$root/mnt/models"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$room" pip
cp "$room"/pip-*.whl "$wheel" "$root/build"
export root extras wheel
# shellcheck disable=SC2016  # expanded by the inner shell
unshare --mount --pid --fork bash -euc '
  mount -t proc proc "$root/proc"
  touch "$root/dev/null" "$root/dev/urandom"
  mount --bind /dev/null "$root/dev/null"
  mount --bind /dev/urandom "$root/dev/urandom"
  # How this machine reaches the index of packages.
  touch "$root/etc/resolv.conf" "$root/etc/hosts"
  for name in resolv.conf hosts ssl/certs/ca-certificates.crt; do
    mount --bind "$(realpath "/etc/$name")" "$root/etc/$name"
  done
  pip=("$root"/build/pip-*.whl)
  env --unset=PIP_FIND_LINKS --unset=PYTHONDONTWRITEBYTECODE chroot "$root" /usr/bin/python3 \
    "/build/${pip##*/}/pip" install --quiet --disable-pip-version-check --root-user-action=ignore --no-cache-dir \
    --break-system-packages --only-binary=:all: "/build/${wheel##*/}[$extras]"
'
# Tests of libraries are a tenth of the image.
find "$root/usr/local/lib" -type d -name tests -prune -exec rm -r {} +
rm -rf "$root/build" "$root/etc/resolv.conf" "$root/etc/hosts"
chroot "$root" /usr/local/bin/moonpool --version > /dev/null

umoci init --layout "$image"
umoci new --image "$image:moonpool"
umoci insert --image "$image:moonpool" "$root" /
umoci config --image "$image:moonpool" --config.user 10001:10001 --config.exposedports 8000 --config.exposedports 8001 \
  --config.exposedports 8002 --config.entrypoint moonpool --config.entrypoint serve --config.workingdir / \
  --config.env PATH=/usr/local/bin:/usr/bin --config.env LC_ALL=C.UTF-8 --config.env PYTHONDONTWRITEBYTECODE=1 \
  --config.cmd=--model-repository=/mnt/models --config.cmd=--http-address=0.0.0.0 --config.cmd=--grpc-address=0.0.0.0
umoci gc --layout "$image"
du -sm "$root" "$image" | awk '{ print $1 " MB " ($2 ~ /root$/ ? "unpacked" : "packed") }'
