#!/bin/sh
# Makes a root in memory over this system's, which nothing here can change, and tries both packages in it. It
# runs in a mount namespace of its own: clean_root.sh PACKAGE.deb TARBALL
set -eu
base=$(mktemp -d)
mount -t tmpfs -o mode=755 clean-root "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
cp "$1" "$base/root/pagetax.deb"
cp "$2" "$base/root/pagetax.tar"
cp "$(dirname "$0")/try.sh" "$base/root/try.sh"
mount --rbind /dev "$base/root/dev"
mount -t proc proc "$base/root/proc"
mount --rbind /sys "$base/root/sys"
mount -t tmpfs -o mode=1777 tmp "$base/root/tmp"
# What this system's own pagetax has kept.
rm -rf "$base/root/root/.cache/pagetax" "$base/root/var/cache/pagetax"
code=0
chroot "$base/root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 sh /try.sh || code=$?
umount -R "$base/root"
umount "$base"
rmdir "$base"
exit $code
