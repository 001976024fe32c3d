//! A region's secret: who knows it may use the region.
//!
//! The secret is drawn by the client and told once, when the region is made. Later connections prove
//! that they know it, over the server's nonce for that very connection, so that a recorded proof
//! opens nothing. Secrecy on the way is the transport's matter (TLS, or loopback).

use crate::wire::TOKEN_BYTES;
use crate::wire::hello::NONCE_BYTES;
use crate::wire::request::Token;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use std::io;

/// Fresh random bytes from the system.
///
/// # Errors
/// When the system has none, which it always does once booted.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let drawn = SystemRandom::new().fill(&mut bytes);
    drawn.map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(bytes)
}

/// What a proof is over.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// The server's, of its hello on this connection.
    pub nonce: [u8; NONCE_BYTES],
    /// The server's, of its hello.
    pub epoch: u64,
    /// The region that is to be used.
    pub region: u32,
    /// Whether earlier leases are to be void.
    pub fence: bool,
}

impl Claim {
    fn bytes(&self) -> [u8; NONCE_BYTES + 13] {
        let mut bytes = [0; NONCE_BYTES + 13];
        bytes[..NONCE_BYTES].copy_from_slice(&self.nonce);
        bytes[NONCE_BYTES..NONCE_BYTES + 8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[NONCE_BYTES + 8..NONCE_BYTES + 12].copy_from_slice(&self.region.to_le_bytes());
        bytes[NONCE_BYTES + 12] = self.fence as u8;
        bytes
    }
}

/// That whoever makes this claim knows the token.
pub fn proof(token: &Token, claim: &Claim) -> Token {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, token), &claim.bytes());
    let mut proof = [0; TOKEN_BYTES];
    proof.copy_from_slice(tag.as_ref());
    proof
}

/// Whether the proof holds; takes the same time whatever is wrong with it.
pub fn proves(token: &Token, claim: &Claim, proof: &Token) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, token);
    hmac::verify(&key, &claim.bytes(), proof).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_claim() {
        let token: Token = random().unwrap();
        let claim = Claim { nonce: random().unwrap(), epoch: 1, region: 7, fence: false };
        let good = proof(&token, &claim);
        assert!(proves(&token, &claim, &good));
        assert!(!proves(&random().unwrap(), &claim, &good));
        for other in [
            Claim { nonce: random().unwrap(), ..claim },
            Claim { epoch: 2, ..claim },
            Claim { region: 8, ..claim },
            Claim { fence: true, ..claim },
        ] {
            assert!(!proves(&token, &other, &good));
        }
    }
}
