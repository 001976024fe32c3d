# Runs each load of `cargo xtask bench reclaim guest` beside `pagetax stat`, and writes both documents to the
# serial line.

# measured NAME JOB ARGUMENTS…
measured() {
    name=$1
    shift
    echo 3 >/proc/sys/vm/drop_caches
    pagetax stat -q --json=/stat.json 1 >/dev/null 2>/stat.err &
    stat=$!
    sleep 3
    pagetax run "$@" --json >/run.json 2>/run.err || cat /run.err
    kill -INT $stat
    wait $stat
    echo
    echo "@@run $name"
    cat /run.json
    echo
    echo "@@stat $name"
    cat /stat.json
    echo
    echo "@@end"
}

for pages in base 2M; do
    measured "mlock-cycle $pages" mlock-cycle --set directory=/files --set file_size=100M --set sleep=5s \
        --set page_size=$pages
done
measured "madvise willneed" mlock-cycle --set directory=/files --set file_size=100M --set sleep=5s --set how=willneed
