# Page-ins and rewrites over each link of "$@", for `cargo xtask kernels --only netem`.
mkdir -p /run/netns /var/run
ip link set lo up
ip netns add far
ip link add near type veth peer name far netns far
ip addr add 198.51.100.1/30 dev near
ip link set near up
far="ip netns exec far"
$far ip link set lo up
$far ip addr add 198.51.100.2/30 dev far
$far ip link set far up
servers=
for port in 7070 7071; do
    $far pagetax serve --memory 128M --listen 198.51.100.2:$port --insecure --failure-domain $port &
    servers=$servers,198.51.100.2:$port
done
servers=${servers#,}
sleep 3
export PAGETAX_REMOTE_INSECURE=1
nth=0
for link; do
    nth=$((nth + 1))
    tc qdisc replace dev near root netem $link
    $far tc qdisc replace dev far root netem $link
    for copies in 1 2; do
        echo "@@$nth cold $copies"
        timeout 200 touch cold 16 $servers $copies </dev/null
    done
    echo "@@$nth paged"
    PAGETAX_TOUCH_REWRITES=4000 timeout 200 touch paged 24 8 $servers 2 </dev/null
done
echo "@@"
