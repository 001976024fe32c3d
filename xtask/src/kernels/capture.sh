# Prints the files that `stat`, `hatstat` and `top` read, each below its path, with one version of cgroups.
# The kernel has worked by then, so that few of its counters are 0.
[ -e /proc/pressure ] || echo "== lacks /proc/pressure"
if [ "$version" = 2 ]; then
    mount -t cgroup2 none /sys/fs/cgroup
    echo "+memory +cpu" >/sys/fs/cgroup/cgroup.subtree_control
    folders=/sys/fs/cgroup/load
else
    mount -t tmpfs none /sys/fs/cgroup
    folders=
    for controller in memory cpuacct; do
        mkdir /sys/fs/cgroup/$controller
        mount -t cgroup -o $controller none /sys/fs/cgroup/$controller
        folders="$folders /sys/fs/cgroup/$controller/load"
    done
fi
mkdir $folders

# A process of the cgroup, with children that have faults.
sh -c 'for folder in '"$folders"'; do echo $$ >$folder/cgroup.procs; done
    for n in 1 2 3 4 5 6 7 8 9; do cat /bin/* >/dev/null; done
    exec sleep 1000' &
sleep 8

show() {
    for file; do
        if [ -r "$file" ]; then
            echo "== $file"
            cat "$file" || echo "== error $file"
        fi
    done
}
echo "@@files"
show /proc/sys/kernel/osrelease /proc/uptime /proc/stat /proc/vmstat /proc/meminfo /proc/buddyinfo /proc/zoneinfo \
    /proc/pressure/memory /sys/devices/system/cpu/online /sys/kernel/mm/transparent_hugepage/enabled
for process in /proc/[0-9]*; do
    read -r name <$process/comm || continue
    case $name in
    kswapd* | kcompactd* | khugepaged | sleep)
        for file in comm stat status schedstat cgroup maps; do show $process/$file; done ;;
    esac
done
for folder in $folders; do
    for file in cgroup.procs cpu.stat memory.stat memory.pressure memory.current memory.max cpuacct.usage \
        cpuacct.usage_sys memory.usage_in_bytes memory.limit_in_bytes; do
        show $folder/$file
    done
done
echo "@@end"
