# Runs a load of `cargo xtask kernels --only snoop` beside a tool of bcc and `pagetax stat`. Set before: the load
# and its words, the tool's command, and the seconds in which the tool comes up if it says nothing.
seconds=30
# One process reads a file larger than memory. It must reclaim by itself, because kswapd gets next to no time on
# the same CPU.
for folder in /proc/[0-9]*; do
    read -r name <$folder/comm
    case $name in
    kswapd*)
        taskset -p 2 ${folder#/proc/} >/tmp/said
        renice -n 19 -p ${folder#/proc/} >/tmp/said ;;
    esac
done
[ -z "$mib" ] || truncate -s ${mib}M /files/hole
mkfifo /tmp/input
taskset 2 stat_loads $load $seconds $words </tmp/input >/tmp/up &
load=$!
exec 3>/tmp/input
until read -r line </tmp/up; do sleep 1; done
taskset 1 $tool -p $load -d $((seconds + 20)) >/tmp/tool 2>&1 &
tool=$!
waited=0
until [ -s /tmp/tool ] || [ $waited -ge $ready ]; do sleep 1; waited=$((waited + 1)); done
taskset 1 pagetax stat -q -p $load --json=/tmp/stat 1 $((seconds + 10)) >/tmp/said 2>&1 &
stat=$!
sleep 5
echo >&3
wait $stat
sleep 10
# One that waits for a next event does not see that its time is over.
kill $tool 2>/tmp/said
wait $tool
echo "@@tool"
cat /tmp/tool
echo "@@stat"
cat /tmp/stat || cat /tmp/said
echo "@@end"
