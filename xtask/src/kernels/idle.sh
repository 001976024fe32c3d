# Ranks the processes of a guest that has idle page tracking and no DAMON for us, for `cargo xtask kernels --only idle`.
cd /tmp
pagetax calibrate --quick -q >said 2>&1 || cat said
gather 64 >out & busy=$!
sleep 1000 & idle=$!
sleep 5
pagetax diagnose --all --for 3s --json=ranked >text 2>&1
kill $busy $idle
echo "@@ranked"
cat ranked || cat text
echo "@@end"
