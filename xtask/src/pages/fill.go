// Fills a heap, says "up" and stays for a while.
package main

import (
	"fmt"
	"time"
)

var kept [][]byte

func main() {
	for i := 0; i < 160*256; i++ {
		piece := make([]byte, 4096)
		for j := range piece {
			piece[j] = 1
		}
		kept = append(kept, piece)
	}
	fmt.Println("up")
	time.Sleep(4 * time.Second)
	fmt.Println(len(kept) > 0)
}
