# Runs the diagnoses of `cargo xtask kernels --only states`.
mount -t cgroup2 none /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkswap -q /dev/vdb && swapon /dev/vdb
rows() {
    echo "CREATE TABLE t(a); WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT $1)
        INSERT INTO t SELECT zeroblob(100000) FROM c; SELECT sum(length(a)) FROM t;"
}
diagnose() {
    echo "@@diagnosis"
    pagetax diagnose --json --quiet --pages 4K,2M --runs 2 --warmup 0 --when $1 -- \
        sqlite3 :memory: "$(rows 2500)" 2>/tmp/said || cat /tmp/said
    echo "@@end"
}
diagnose fragmented,compactable,pressed,forked
# The rest of memory is held by another program.
(rows 7000; sleep 10000) | sqlite3 :memory: >/tmp/held &
tries=0
until [ -s /tmp/held ] || [ $tries -gt 200 ]; do
    tries=$((tries + 1))
    sleep 1
done
diagnose found
