# Plants ten culprits of kswapd one after the other, and writes what `pagetax stat` says of each to the serial line.
mkdir -p /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup

# placed CGROUP KIND RATE: starts a process in a cgroup.
placed() {
    mkdir -p "/sys/fs/cgroup/$1"
    sh -c "echo \$\$ >/sys/fs/cgroup/$1/cgroup.procs; exec allocates $2 $3 /files/$1" &
    pids="$pids $!"
}

# planted NUMBER KIND: a culprit of a kind among five innocents. Four of them allocate, each an eighth of its rate. The
# fifth only computes.
planted() {
    pids=""
    placed innocent1 file 2
    placed innocent2 anon 2
    placed "culprit$1" "$2" 16
    culprit=$!
    placed innocent3 file 2
    placed innocent4 anon 2
    placed innocent5 none 0
    sleep 6
    pagetax stat -q --json=/stat.json 1 8 >/dev/null 2>/stat.err || cat /stat.err
    echo
    echo "@@run $culprit /culprit$1 $2"
    cat /stat.json
    echo
    echo "@@end"
    kill $pids
    wait $pids
}

# The page cache gets all memory, so that kswapd has to work for each page.
allocates file 100000 /files/fill &
sleep 15
kill $!
wait

for number in 1 2 3 4 5; do
    planted $number file
    planted $((number + 5)) anon
done
