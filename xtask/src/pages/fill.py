"""Fills a heap by small and large objects, says "up" and stays for a while."""
import time

small = {i: str(i) for i in range(1000000)}
large = bytearray(b"x" * (64 << 20))
print("up", flush=True)
time.sleep(4)
