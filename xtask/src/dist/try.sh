#!/bin/sh
# Installs, tries and removes the packages in the root that clean_root.sh has made.
set -eu

fail() {
    echo "FAILED: $1" >&2
    exit 1
}

# is WHAT EXPECTED ACTUAL: ACTUAL must match the pattern EXPECTED.
is() {
    case $3 in
    $2) ;;
    *) fail "$1: $3" ;;
    esac
}

# Where the preload library of a command comes from, and the command's status.
# An error of pagetax comes before both.
origin() {
    "$@" ppgsz -o heap=2M sh -c 'echo "$LD_PRELOAD"; exit 7' 2>&1 || echo "status $?"
}

# tried NAME PROGRAM LIBRARIES: an installed pagetax works, and loads its libraries from there.
tried() {
    echo "-- $1"
    is "$1: doctor" '*transparent huge pages*' "$("$2" doctor || true)"
    "$2" ppgsz -o heap=2M true
    is "$1: ppgsz" "$3/libpagetax_preload.so*status 7" "$(origin "$2")"
    is "$1: remote" "$3/libpagetax_remote_preload.so" "$("$2" remote --resident 16M -- sh -c 'echo "$LD_PRELOAD"')"
}

dpkg -i /pagetax.deb >/dev/null
tried "Debian package" pagetax /usr/lib/pagetax
is "manual page" '*/pagetax.1.gz' "$(man -w pagetax)"
is "manual page of a command" '*/pagetax-ppgsz.1.gz' "$(man -w pagetax-ppgsz)"
for file in include/pagetax.h lib/pkgconfig/pagetax.pc lib/libpagetax.so lib/systemd/system/pagetax-serve.service \
    share/bash-completion/completions/pagetax share/zsh/site-functions/_pagetax share/fish/vendor_completions.d/pagetax.fish; do
    [ -e "/usr/$file" ] || fail "the package has no $file"
done
is "shared library" '*libpagetax.so*' "$(ldconfig -p)"
[ ! -e /root/.cache/pagetax ] || fail "an installed pagetax wrote to the cache"
dpkg -P pagetax >/dev/null
is "what dpkg -P left" '' "$(find /usr /etc /var /opt -xdev -name '*pagetax*' ! -path '/usr/src/*')"

mkdir /opt/try
tar -C /opt/try -xf /pagetax.tar --strip-components=1
tried tarball /opt/try/bin/pagetax /opt/try/lib/pagetax
echo 'int main(void) { return 0; }' >/tmp/a.c
/opt/try/bin/pagetax build -- cc -xpagesize=2M -o /tmp/a /tmp/a.c
/tmp/a

echo "-- one file"
own=/srv/pagetax
cp /opt/try/bin/pagetax $own
rm -r /opt/try
tried "one file" $own '/root/.cache/pagetax/libraries/*'
is "env -i as root" '/var/cache/pagetax/libraries/*status 7' "$(origin env -i PATH="$PATH" $own)"

user() {
    setpriv --reuid 65534 --regid 65534 --clear-groups env -i PATH="$PATH" "$@"
}
in_tmp='/tmp/pagetax-65534/libraries/*status 7'
is "env -i as a user" "$in_tmp" "$(origin user $own)"
mkdir /mnt/read-only /mnt/noexec /mnt/full
mount -t tmpfs -o ro home /mnt/read-only
mount -t tmpfs -o noexec,mode=1777 home /mnt/noexec
mount -t tmpfs -o size=64k,mode=1777 home /mnt/full
for home in read-only noexec full; do
    is "HOME is $home" "$in_tmp" "$(origin user HOME=/mnt/$home $own)"
done

echo "-- eight first runs at once"
rm -r /tmp/pagetax-65534
for run in 1 2 3 4 5 6 7 8; do
    origin user $own >/tmp/run.$run &
done
wait
for run in 1 2 3 4 5 6 7 8; do
    is "run $run of eight" "$in_tmp" "$(cat /tmp/run.$run)"
done

echo "-- nothing to unpack into"
rm -r /tmp/pagetax-65534
mkdir -m 777 /tmp/pagetax-65534
chown 65533 /tmp/pagetax-65534
refused() {
    is "$1" "*$2*hint: set XDG_CACHE_HOME*status 7" "$(origin user HOME="$3" $own)"
    is "$1, remote" "*$2*hint: set XDG_CACHE_HOME*status 125" \
        "$(user HOME="$3" $own remote --resident 16M -- true 2>&1 || echo "status $?")"
}
refused "a planted cache" "belongs to user 65533" /mnt/noexec
refused "noexec" "is mounted noexec" /mnt/noexec
refused "read-only" "Read-only file system" /mnt/read-only
refused "a full disk" "No space left on device" /mnt/full
umount /mnt/read-only /mnt/noexec /mnt/full
echo "installed, tried and removed"
