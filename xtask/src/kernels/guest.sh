#!/bin/sh
# The first process of a guest: runs the checks, writes what came of them to its second serial line, and ends it.

export PATH=/usr/bin:/usr/sbin HOME=/tmp LC_ALL=C.UTF-8 RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t cgroup2 none /sys/fs/cgroup
chmod 1777 /tmp /dev/shm
ip link set lo up
. /settings.sh
export PAGETAX LIB PAGER IN_PLACE REAL

# What this kernel has, by its version: pagetax itself asks the kernel.
release=$(uname -r)
major=${release%%.*}
minor=${release#*.}
minor=${minor%%.*}
at_least() { [ "$major" -gt "$1" ] || [ "$major" -eq "$1" -a "$minor" -ge "$2" ]; }
at_least 6 8 && export HAS_MOVE=1 HAS_MTHP=1
at_least 6 7 && export HAS_SCAN=1
at_least 6 1 && export HAS_COLLAPSE=1 HAS_DEVICE=1

# check NAME SECONDS SCRIPT: the script must succeed.
check() {
    printf '@@begin %s\n' "$1"
    from=$(date +%s)
    timeout -k 5 "$2" sh -ec "$3" 2>&1
    code=$?
    printf '\n@@end %s %s\n' "$code" $(($(date +%s) - from))
}

cat >/tmp/lists.py <<'PYTHON'
import os
numbers = [n * n for n in range(300000)]
child = os.fork()
total = sum(numbers)
if child == 0:
    os._exit(0 if total == 8999955000050000 else 3)
status = os.waitpid(child, 0)[1]
print(total, status)
PYTHON

cat >/tmp/holds.py <<'PYTHON'
import mmap, sys, time
memory = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * (16 << 20))
print("ready", flush=True)
time.sleep(600)
PYTHON

checks() {
    check doctor 60 '
        "$PAGETAX" doctor >/tmp/doctor
        grep -A40 "^works" /tmp/doctor | grep "serving faults from user space" >/tmp/faults
        cat /tmp/faults
        if [ -n "$HAS_MOVE" ]; then grep "pages are moved" /tmp/faults
        else grep "pages are copied.*(Linux 6.8)" /tmp/doctor; fi
        if grep -i "inappropriate ioctl" /tmp/doctor; then exit 1; fi'
    check diagnose 120 '
        "$PAGETAX" diagnose --runs 3 --warmup 0 -- python3 -c "print(sum(range(100000)))" >/tmp/diagnosis
        cat /tmp/diagnosis
        if [ -z "$HAS_MTHP" ]; then grep "the kernel has no 64K pages (Linux 6.8)" /tmp/diagnosis; fi'
    check pmap 40 '
        python3 /tmp/holds.py >/tmp/ready & pid=$!
        until grep -q ready /tmp/ready; do sleep 0.1; done
        "$PAGETAX" pmap -xs $pid >/tmp/map
        tail -n 3 /tmp/map
        kill $pid
        grep "total Kb" /tmp/map'
    check ppgsz-command 60 '
        "$PAGETAX" ppgsz -o heap=2M --verify python3 -c "
import time
held = [bytearray(1 << 20) for _ in range(40)]
time.sleep(3)" 2>/tmp/verdict
        cat /tmp/verdict
        grep heap /tmp/verdict
        if grep "ended before" /tmp/verdict; then exit 1; fi'
    check ppgsz-process 60 '
        python3 /tmp/holds.py >/tmp/ready & pid=$!
        until grep -q ready /tmp/ready; do sleep 0.1; done
        code=0
        "$PAGETAX" ppgsz -o anon=2M -p $pid >/tmp/changed 2>&1 || code=$?
        kill $pid
        cat /tmp/changed
        if [ -n "$HAS_COLLAPSE" ]; then [ $code -eq 0 ]; grep "2M" /tmp/changed
        else grep "Linux 6.1" /tmp/changed; fi'
    check trapstat 40 '
        if "$PAGETAX" trapstat --backend perf -- true 2>/tmp/refusal; then exit 1; fi
        cat /tmp/refusal
        grep "performance-monitoring unit" /tmp/refusal'
    check remote 90 '
        "$PAGETAX" remote --resident 16M -- python3 /tmp/lists.py >/tmp/sum
        cat /tmp/sum
        grep "^8999955000050000 0$" /tmp/sum'
    check remote-user 60 '
        if [ -n "$HAS_DEVICE" ]; then chgrp user /dev/userfaultfd; chmod 0660 /dev/userfaultfd
        else echo 1 >/proc/sys/vm/unprivileged_userfaultfd; fi
        setpriv --reuid user --regid user --clear-groups \
            "$PAGETAX" remote --resident 16M -- python3 /tmp/lists.py >/tmp/sum
        grep "^8999955000050000 0$" /tmp/sum'
    check remote-refused 40 '
        if [ -n "$HAS_DEVICE" ]; then chmod 0600 /dev/userfaultfd; fi
        echo 0 >/proc/sys/vm/unprivileged_userfaultfd
        if setpriv --reuid user --regid user --clear-groups \
            "$PAGETAX" remote -- true 2>/tmp/refusal; then exit 1; fi
        cat /tmp/refusal
        if [ -n "$HAS_DEVICE" ]; then grep chgrp /tmp/refusal
        else grep "sysctl vm.unprivileged_userfaultfd=1" /tmp/refusal; fi'
    # On a kernel without the features, hiding them changes nothing: each test runs once there.
    check pager-lib 120 '"$LIB" pager:: --show-output'
    check in-place 240 '"$IN_PLACE" all_features:: --show-output'
    # How far ahead a sweep is fetched depends on the evictor, which emulated CPUs slow down more than the sweep.
    check pager 400 '"$PAGER" --show-output --skip copied_out:: --skip no_poison:: --skip cheapest:: \
        --skip sweeps_are_fetched_ahead'
    check preload 400 '"$REAL" moved:: --show-output'
}

checks >/dev/ttyS1 2>&1
echo @@done >/dev/ttyS1
echo o >/proc/sysrq-trigger
sleep 60
