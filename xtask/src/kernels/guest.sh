#!/bin/sh
# The first process of a guest: runs the checks, writes what came of them to its second serial line, and ends it.

export PATH=/usr/bin:/usr/sbin HOME=/tmp LC_ALL=C.UTF-8 RUST_BACKTRACE=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
chmod 1777 /tmp /dev/shm
ip link set lo up
. /settings.sh
# Emulated, a fault takes a hundred times as long.
export PAGETAX_TEST_PERCENT=20
export SHOW="--show-output -Zunstable-options --report-time" RUSTC_BOOTSTRAP=1
export PAGETAX LIB PAGER IN_PLACE REAL WHY

# What this kernel has, by its version: pagetax itself asks the kernel.
release=$(uname -r)
# Debian's own version has the number of the stable release, which the kernel's does not.
sed -n 's/.*Debian \([0-9.]*\).*/@@kernel \1/p' /proc/version >/dev/ttyS1
major=${release%%.*}
minor=${release#*.}
minor=${minor%%.*}
at_least() { [ "$major" -gt "$1" ] || [ "$major" -eq "$1" -a "$minor" -ge "$2" ]; }
at_least 6 8 && export HAS_MOVE=1 HAS_MTHP=1
at_least 6 7 && export HAS_SCAN=1
# The kernel's own statistics may have DAMON for themselves.
statistics=$(cat /sys/module/damon_stat/parameters/enabled 2>/dev/null)
[ -e /sys/kernel/mm/damon/admin ] && [ "$statistics" != Y ] && export HAS_DAMON=1
at_least 6 1 && export HAS_COLLAPSE=1 HAS_DEVICE=1

# check NAME SECONDS SCRIPT: the script must succeed.
check() {
    printf '@@begin %s\n' "$1"
    from=$(date +%s)
    timeout -k 5 "$2" sh -ec "$3" 2>&1
    code=$?
    printf '\n@@end %s %s\n' "$code" $(($(date +%s) - from))
}

# row COMMAND SECONDS ROOT USER SCRIPT: a command as root and as an ordinary user. ROOT and USER are the versions from
# which it must work. Before them it must fail and name the version. `no TEXT` must fail with that text everywhere.
row() {
    cell "$1/root" "$2" "$3" "$5"
    cell "$1/user" "$2" "$4" "$5" as_user
}

cell() {
    printf '@@begin %s\n' "$1"
    from=$(date +%s)
    rm -rf /tmp/place
    mkdir -m 777 /tmp/place
    cd /tmp/place
    code=0
    $5 timeout -k 5 "$2" sh -ec "$4" >/tmp/said 2>&1 || code=$?
    cat /tmp/said
    case $3 in
    no*) reason=${3#no } ;;
    *) reason=$(has "$3" || echo "Linux $3") ;;
    esac
    if [ -n "$reason" ] && [ $code -ne 124 ]; then
        if [ $code -ne 0 ] && grep -q "$reason" /tmp/said; then
            printf '\n@@refused %s' "$reason"
            code=0
        else
            printf '\nwas to be refused, with: %s' "$reason"
            code=1
        fi
    fi
    cd /
    printf '\n@@end %s %s\n' "$code" $(($(date +%s) - from))
}

has() { at_least "${1%%.*}" "${1#*.}"; }

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
if sys.argv[1] != "0":
    memory.madvise(int(sys.argv[1]))
memory.write(b"x" * (16 << 20))
print("ready", flush=True)
time.sleep(600)
PYTHON

cat >/tmp/faults.py <<'PYTHON'
import mmap
page = b"x" * (8 << 20)
while True:
    with mmap.mmap(-1, len(page)) as memory: memory.write(page)
PYTHON

# What is missing has a reason and no number; root sees the faults of a busy program in stacks.
cat >/tmp/stat.py <<'PYTHON'
import json, os, sys
stat = json.load(open(sys.argv[1]))
for interval in stat["intervals"]:
    rows = interval["budget"]["cpu"] + interval["budget"]["wall"]
    for row in rows:
        missing = row["provenance"] == "missing"
        assert missing == ("ns" not in row) and row["how"], row
    for name, reading in interval["readings"].items():
        missing = reading["provenance"] == "missing"
        assert missing == ("value" not in reading) and missing == bool(reading.get("why")), (name, reading)
    assert interval["free_blocks"], interval
rows = [row for interval in stat["intervals"] for row in interval["budget"]["cpu"]]
faults = sum(row.get("ns", 0) for row in rows if row["id"] == "minor_fault")
stacks = any("stacks" in row["how"] and "ns" in row for row in rows)
print("faults", faults, "ns; stacks", stacks)
assert faults > 0 and (stacks or os.getuid() != 0)
PYTHON

# works TEXT, lacks TEXT VERSION: what doctor lists as working, and what it refuses, naming the kernel that has it.
cat >/tmp/doctors.sh <<'SCRIPT'
works() { sed -n '/^works/,/^$/p' /tmp/doctor | grep -e "$1"; }
lacks() {
    if works "$1"; then exit 1; fi
    grep -e "$1.*Linux $2" /tmp/doctor
}
SCRIPT

cat >/tmp/users.sh <<'SCRIPT'
as_user() { HOME=/tmp/home setpriv --reuid user --regid user --clear-groups "$@"; }
SCRIPT
. /tmp/users.sh
mkdir -m 777 /tmp/home

# holds ADVICE: starts a process with 16 MiB of memory, advised by that number (14 is MADV_HUGEPAGE, 0 none).
cat >/tmp/holds.sh <<'SCRIPT'
holds() {
    python3 /tmp/holds.py "$1" >ready & pid=$!
    until grep -q ready ready; do sleep 0.1; done
}
SCRIPT

rows() {
    row doctor 100 5.10 5.10 '"$PAGETAX" doctor; "$PAGETAX" doctor | grep "^works"'
    row pagesize 30 5.10 5.10 '"$PAGETAX" pagesize -a | grep 2097152'
    row "jobs, machines" 60 5.10 5.10 '"$PAGETAX" jobs | grep mmap3; "$PAGETAX" machines | grep sparcstation-1'
    row run 100 5.10 5.10 '"$PAGETAX" run tlb-gather --set size=8M,count=20000 --fault-latency'
    row "stat, hatstat" 200 5.10 5.10 '
        "$PAGETAX" calibrate --quick >calibration
        python3 /tmp/faults.py & busy=$!
        code=0
        "$PAGETAX" stat 1 4 --json=stat.json || code=$?
        kill $busy
        [ $code -eq 0 ]
        python3 /tmp/stat.py stat.json
        "$PAGETAX" hatstat | grep "faults on base pages"'
    row compare 100 5.10 5.10 '
        for file in a b; do "$PAGETAX" run tlb-gather --set size=4M,count=10000 --json=$file.json; done
        "$PAGETAX" compare a.json b.json'
    row diagnose 200 5.10 5.10 '
        code=0
        "$PAGETAX" diagnose --runs 3 --warmup 0 -- python3 -c "print(sum(range(100000)))" >diagnosis 2>&1 || code=$?
        cat diagnosis
        [ $code -eq 0 ]
        grep -i "^verdict" diagnosis
        if [ -z "$HAS_MTHP" ]; then grep "Linux 6.8" diagnosis; fi'
    row "diagnose -p" 100 6.1 6.1 '
        python3 -c "
page = b\"x\" * (16 << 20)
with open(\"/dev/null\", \"wb\", buffering=0) as out:
    while True: out.write(bytes(page[:4096]))" & busy=$!
        sleep 3
        code=0
        "$PAGETAX" diagnose -p $busy --for 10s --yes >diagnosis 2>&1 || code=$?
        kill $busy
        cat diagnosis
        [ $code -eq 0 ]
        grep -i "^verdict" diagnosis'
    row "diagnose --all, top" 100 5.10 5.10 '
        python3 /tmp/faults.py & busy=$!
        sleep 1
        "$PAGETAX" diagnose --all --for 2s --json=ranked >ranking
        "$PAGETAX" top --once >page
        kill $busy
        cat ranking page
        grep python3 ranking
        if [ -n "$HAS_DAMON" ] && [ "$(id -u)" = 0 ]; then
            grep "sampled by DAMON" ranked
            grep "^0$" /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds
        fi
        grep "PID CPU" page'
    row pmap 60 5.10 5.10 '
        . /tmp/holds.sh; holds 14
        "$PAGETAX" pmap -xs $pid >map
        kill $pid
        cat map
        grep " 2M " map'
    row calibrate 200 5.10 5.10 '"$PAGETAX" calibrate --quick'
    # The quickest of the reports: simulations depend on no kernel.
    row reproduce 300 5.10 5.10 '"$PAGETAX" reproduce alpha-nms'
    row why 60 5.10 5.10 '
        . /tmp/holds.sh; holds 0
        "$PAGETAX" why -p $pid >answer
        kill $pid
        cat answer
        grep "certain.* on advice only" answer'
    row "ppgsz --verify COMMAND" 100 5.10 5.10 '
        "$PAGETAX" ppgsz -o heap=2M --verify python3 -c "
import time
held = [bytearray(1 << 20) for _ in range(40)]
time.sleep(3)" 2>verdict
        cat verdict
        grep "heap.* on 2M" verdict'
    row "ppgsz -p" 60 6.1 6.1 '
        . /tmp/holds.sh; holds 0
        code=0
        "$PAGETAX" ppgsz -o anon=2M -p $pid >changed 2>&1 || code=$?
        kill $pid
        cat changed
        [ $code -eq 0 ]
        grep " on 2M" changed'
    row "ppgsz --undo -p" 60 5.10 5.10 '
        . /tmp/holds.sh; holds 14
        grep -q "AnonHugePages: *[1-9]" /proc/$pid/smaps
        "$PAGETAX" ppgsz --undo -p $pid
        if grep "AnonHugePages: *[1-9]" /proc/$pid/smaps; then exit 1; fi
        kill $pid'
    row "trapstat with counters" 60 "no performance-monitoring unit" "no performance-monitoring unit" '
        "$PAGETAX" trapstat --backend perf -- true'
    row "trapstat --sample" 200 5.10 5.10 '
        seq 1 100000 >numbers
        "$PAGETAX" trapstat --sample --engine native -- sort -r numbers >counts 2>&1
        tail -40 counts
        grep "sampled: [1-9][0-9]* bursts" counts'
    if [ -n "$HAS_DEVICE" ]; then chgrp user /dev/userfaultfd; chmod 0660 /dev/userfaultfd
    else echo 1 >/proc/sys/vm/unprivileged_userfaultfd; fi
    row remote 200 5.10 5.10 '
        "$PAGETAX" remote --resident 16M -- python3 /tmp/lists.py >sum
        grep "^8999955000050000 0$" sum'
    row "serve, run on a server" 200 5.10 5.10 '
        "$PAGETAX" serve --memory 64M & server=$!
        until "$PAGETAX" servers --once | grep " up "; do sleep 0.5; done
        "$PAGETAX" run mmap3 --set backing=remote,size=4M,resident=2M --servers 127.0.0.1
        kill $server
        wait $server'
}

doctor() {
    check doctor 100 '
        . /tmp/doctors.sh
        "$PAGETAX" doctor >/tmp/doctor
        if [ -n "$HAS_MOVE" ]; then works "userfaultfd.*pages are moved"
        else works "userfaultfd.*pages are copied"; grep "pages are copied.*(Linux 6.8)" /tmp/doctor; fi
        if [ -n "$HAS_SCAN" ]; then works PAGEMAP_SCAN; else lacks PAGEMAP_SCAN 6.7; fi
        if [ -n "$HAS_COLLAPSE" ]; then works MADV_COLLAPSE; else lacks MADV_COLLAPSE 6.1; fi
        if [ -z "$HAS_MTHP" ]; then lacks mTHP 6.8; fi
        if grep -i "inappropriate ioctl\|invalid argument" /tmp/doctor; then exit 1; fi'
}

why() {
    check why 300 '"$WHY" --skip system:: $SHOW'
    check why-user 300 '. /tmp/users.sh; as_user "$WHY" memory:: files:: process:: controls:: $SHOW'
    # One after the other: they change the system.
    check why-system 300 '"$WHY" system:: --ignored --test-threads 1 $SHOW'
}

pager() {
    check remote-sort 200 '
        seq 1 100000 | sed "s/\(.*\)\(.\)/\2 \1 ä/" >/tmp/lines
        sort --parallel=2 /tmp/lines >/tmp/sorted
        "$PAGETAX" remote --resident 3M --stats -- sort --parallel=2 -S 24M /tmp/lines >/tmp/paged 2>/tmp/counts
        cat /tmp/counts
        cmp /tmp/sorted /tmp/paged
        grep " page_in_count [1-9]" /tmp/counts'
    check remote-refused 100 '
        . /tmp/users.sh
        if [ -n "$HAS_DEVICE" ]; then chmod 0600 /dev/userfaultfd; fi
        echo 0 >/proc/sys/vm/unprivileged_userfaultfd
        if as_user "$PAGETAX" remote --resident 16M -- true 2>/tmp/refusal; then exit 1; fi
        cat /tmp/refusal
        if [ -n "$HAS_DEVICE" ]; then grep -q chgrp /tmp/refusal
        else grep -q "sysctl vm.unprivileged_userfaultfd=1" /tmp/refusal; fi'
    # Tests of what the kernel does. The pager own decisions, such as how far ahead it fetches, are the same on each.
    [ -n "$HAS_MOVE" ] && check moves 60 '"$LIB" pager::sys::uffd::tests::a_page_that_is_gone $SHOW'
    # Where the kernel lacks a feature, hiding it changes nothing: each test runs once there. Signals that come between
    # faults are the pager own matter.
    check in-place 300 '
        [ -n "$HAS_MOVE" ] && hidden="no_move::both_sides no_move::a_child no_poison::a_lost"
        "$IN_PLACE" all_features:: $hidden --skip signals_come $SHOW'
    check pager 1000 '
        if [ -n "$HAS_MOVE" ]; then once="--skip copied_out::pages_dropped --skip copied_out::threads_write"
        else once="--skip copied_out:: --skip a_page_that_is_pinned"; fi
        "$PAGER" \
            a_region_four_times_its_memory_keeps_every_write threads_write_what_is_being_evicted \
            pages_dropped_past_the_pager dropped_pages_are_zeros locked_pages memory_that_may_not_be_written_to \
            a_page_that the_system_writes a_lost_page both_sides_of_a_fork pages_leave_whose a_process_ends \
            --skip cheapest:: --skip no_poison:: --skip in_place::copied_out:: \
            --skip in_place::moved::pages_dropped --skip in_place::moved::threads_write $once $SHOW'
    [ -n "$HAS_MOVE" ] && check no-poison 200 '
        "$PAGER" no_poison::a_page_that no_poison::a_lost no_poison::both_sides no_poison::in_place::a_page_that $SHOW'
    check preload 600 '
        "$REAL" moved::each_way moved::locked_memory moved::reserved moved::memory_that moved::what_asks \
            advice_is_followed $SHOW'
}

# diagnosed NAME SECONDS COMMAND: each trial on large pages has over 90 % of its memory there, or states the reason.
diagnosed() {
    check "diagnose $1" "$2" "
        cd /dev/shm
        code=0
        \"\$PAGETAX\" diagnose --runs 2 --warmup 0 --json=diagnosis.json $3 >said 2>&1 || code=\$?
        cat said
        [ \$code -eq 0 ]
        python3 /tmp/shares.py diagnosis.json"
}

cat >/tmp/shares.py <<'PYTHON'
import json, sys
for trial in json.load(open(sys.argv[1]))["trials"]:
    took, name = trial["took"], trial["name"]
    print(name, trial["median_ns"] / 1e9, "s", took.get("fraction"), took.get("why"))
    if name not in ("as-is", "base") and took.get("fraction", 0) < 0.9 and not took.get("why"):
        sys.exit("no reason")
PYTHON

programs() {
    seq 1 26000000 | tac | head -c 200000000 >/dev/shm/big.txt
    cat >/dev/shm/names.py <<'PYTHON'
names = {n: str(n) for n in range(1_000_000)}
print(sum(len(names[n * 7919 % 1_000_000]) for n in range(2_000_000)))
PYTHON
    cat >/dev/shm/rows.sql <<'SQL'
CREATE TABLE t(a, b);
WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 500000) INSERT INTO t SELECT n * 7919 % 1000003, n FROM c;
CREATE INDEX i ON t(a);
SELECT count(*), sum(x.b * y.b % 7) FROM t x JOIN t y ON x.a = y.a;
SQL
    diagnosed "the built-in job" 1500 ""
    diagnosed "sort of 200 MB" 1500 "-- sort -S 1G -o sorted.txt big.txt"
    diagnosed python3 1500 "-- python3 names.py"
    diagnosed sqlite3 1500 "--input rows.sql -- sqlite3 :memory:"
}

# The parts to run, from the command line of the kernel.
parts=$(sed -n 's/.*pagetax.parts=\([a-z,]*\).*/\1/p' /proc/cmdline)
part() {
    case ",$parts," in
    *",$1,"*) shift; for checks; do $checks; done ;;
    esac
}
{
    part commands rows doctor
    part why why
    part pager pager
    part programs programs
} >/dev/ttyS1 2>&1
echo @@done >/dev/ttyS1
echo o >/proc/sysrq-trigger
sleep 60
