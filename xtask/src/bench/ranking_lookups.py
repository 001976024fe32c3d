# Lookups in a large dict, for `cargo xtask bench ranking`. Usage: ranking_lookups.py MILLIONS PERCENT
#
# Speaks the protocol of ranking_loads.c.
import os, random, signal, sys, time

is_over = False


def stop(number, frame):
    global is_over
    is_over = True


signal.signal(signal.SIGUSR1, stop)
count, percent = int(sys.argv[1]) * 1_000_000, int(sys.argv[2])
table = {key: key for key in range(count)}
keys = random.Random(1).choices(range(count), k=500_000)
begin = worked = time.process_time_ns()
rounds = 0
print("up", flush=True)
while not is_over:
    at = rounds * 5_000 % len(keys)
    for key in keys[at:at + 5_000]:
        table[key]
    rounds += 1
    work = time.process_time_ns() - worked
    if percent < 100 and work > 3_000_000:
        time.sleep(work / 1e9 * (100 - percent) / percent)
        worked = time.process_time_ns()
print(rounds, time.process_time_ns() - begin, 0, flush=True)
os._exit(0)
