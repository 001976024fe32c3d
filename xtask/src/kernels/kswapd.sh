# Runs one load of `cargo xtask kernels --only kswapd`, and asks beside it why kswapd works.
mount -t cgroup2 none /sys/fs/cgroup
case $plant in
working_set | unbalanced | swap_full) mkswap -q /dev/vdb && swapon /dev/vdb ;;
high_order)
    echo 0 >/proc/sys/vm/watermark_boost_factor
    echo defer >/sys/kernel/mm/transparent_hugepage/defrag ;;
dirty)
    echo 90 >/proc/sys/vm/dirty_ratio
    echo 85 >/proc/sys/vm/dirty_background_ratio ;;
cgroup_limit)
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    mkdir /sys/fs/cgroup/small
    echo 150M >/sys/fs/cgroup/small/memory.max
    echo $$ >/sys/fs/cgroup/small/cgroup.procs ;;
esac
kswapd_loads $plant >/tmp/ready 2>&1 &
load=$!
echo $$ >/sys/fs/cgroup/cgroup.procs
tries=0
until read -r line </tmp/ready || [ $tries -gt 200 ]; do
    tries=$((tries + 1))
    sleep 1
done
[ "$line" = ready ] || cat /tmp/ready
sleep 3
echo "@@decision"
pagetax explain kswapd --for 10s --json
echo "@@end"
