# Runs the load of `cargo xtask kernels --only snoop`: a file is read in turn by one process, which must reclaim by
# itself, because kswapd has next to no CPU time.
seconds=30
(while :; do :; done) &
spinner=$!
taskset -p 1 $spinner >/tmp/said
renice -n -20 -p $spinner >/tmp/said
for folder in /proc/[0-9]*; do
    read -r name <$folder/comm
    case $name in
    kswapd*)
        taskset -p 1 ${folder#/proc/} >/tmp/said
        renice -n 19 -p ${folder#/proc/} >/tmp/said ;;
    esac
done
mkfifo /tmp/input
taskset 2 stat_loads reclaim $seconds /files/hole $mib </tmp/input >/tmp/up &
load=$!
exec 3>/tmp/input
until read -r line </tmp/up; do sleep 1; done
drsnoop -p $load -d $((seconds + 15)) >/tmp/drsnoop 2>&1 &
snoop=$!
pagetax stat -q -p $load --json=/tmp/stat 1 $((seconds + 15)) >/tmp/said 2>&1 &
stat=$!
sleep 5
echo >&3
wait $snoop $stat
echo "@@drsnoop"
cat /tmp/drsnoop
echo "@@stat"
cat /tmp/stat || cat /tmp/said
echo "@@end"
