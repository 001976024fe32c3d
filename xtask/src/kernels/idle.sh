# Ranks the processes of a guest by the pages that they touch, and shows them in `top`, for
# `cargo xtask kernels --only idle`.
cd /tmp
pagetax calibrate --quick -q >said 2>&1 || cat said
gather 64 >out & busy=$!
sleep 1000 & idle=$!
# An emulated TLB holds all pages of a program until another one runs on its CPU.
spin() { while :; do :; done; }
spin & one=$!
spin & other=$!
sleep 5
pagetax diagnose --all --for 3s --json=ranked >text 2>&1
pagetax top --json=top >said 2>&1 || cat said
kill $busy $idle $one $other
echo "@@ranked"
cat ranked || cat text
echo "@@end"
echo "@@top"
cat top
echo "@@end of top"
