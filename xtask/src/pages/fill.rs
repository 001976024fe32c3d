//! Fills a heap by small and large pieces, says "up" and stays for a while.
fn main() {
    let small: Vec<Vec<u8>> = (0..96 * 256).map(|_| vec![1; 4096]).collect();
    let large = vec![1u8; 64 << 20];
    println!("up");
    std::thread::sleep(std::time::Duration::from_secs(4));
    println!("{}", small.len() + large.len());
}
