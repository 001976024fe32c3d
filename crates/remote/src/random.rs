//! Random bytes from the system.

use ring::rand::{SecureRandom, SystemRandom};
use std::io;

/// Returns fresh random bytes from the system.
///
/// # Errors
/// If the system has none, which does not happen once it is booted.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let drawn = SystemRandom::new().fill(&mut bytes);
    drawn.map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(bytes)
}
